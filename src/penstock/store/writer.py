"""Writing a store: shard by shard, resumable after a kill, published in one step."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.atomic import naming
from penstock.files.filesystems import output_place, shown_place
from penstock.files.listing import PathLike
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import PART_BYTES, part_bytes_within
from penstock.files.remote import RemotePath
from penstock.memory.budget import parse_bytes
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.checkpoint import schema_from_text, schema_to_text
from penstock.pipeline.stages import State
from penstock.store.bucket_build import BucketBuild
from penstock.store.build import Build, Staged
from penstock.store.history import half_written, store_lock
from penstock.store.home import BucketHome, store_home
from penstock.store.manifest import (
    Lineage,
    Manifest,
    ShardEntry,
    combined_key,
    is_store,
    read_manifest,
    version_numbers,
)
from penstock.store.shard_writer import Pieces, ShardWriter, plain_batch, plain_schema

_PIECE_BYTES = 1 << 20
_MODES = ("create", "append", "overwrite")


class StoreWriter:
    """Writes one version of a store.

    `mode="create"` makes a new store, which appears at `path` when it is published. `"append"` adds rows to the one
    that is there (or makes it), `"overwrite"` puts these rows in place of those; both as a new version, while the older
    ones stay readable. Only one writer at a time: another is refused, after waiting `wait_seconds` for the first.

    Shards are cut by rows alone (within `shard_bytes`, unless one row is larger), never where a batch or a run ended,
    so the same rows make the same files. Dictionaries are stored as their values, and the metadata of a schema (not
    that of its columns) is left out. What is held in memory is less than two pieces of a megabyte.

        with StoreWriter("corpus.store") as writer:
            writer.write(batch)
            writer.publish()
    """

    def __init__(
        self,
        path: PathLike,
        *,
        mode: str = "create",
        tokens: str | None = "input_ids",
        mask: str | None = None,
        shard_bytes: int | str = "64 MiB",
        lineage: Lineage | None = None,
        wait_seconds: float = 0.0,
    ) -> None:
        place = output_place(path, "the directory of a store")
        if mode not in _MODES:
            raise ConfigError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}")
        self.home = store_home(place)
        self.path: Path | RemotePath = RemotePath(str(place)) if isinstance(self.home, BucketHome) else self._local
        self.shown = shown_place(place)
        if not self.path.name:
            raise ConfigError(f"{self.shown!r} cannot be a store; name a directory in it")
        self.lineage = lineage if lineage is not None else Lineage()
        self._mode, self._requested = mode, (tokens, mask)
        self._shard_bytes = parse_bytes(shard_bytes)
        if self._shard_bytes <= 0:
            raise ConfigError(f"shard_bytes must be positive, got {shard_bytes!r}")
        self._wait_seconds = wait_seconds
        self._lock = store_lock(self.home)
        self._part_bytes = PART_BYTES
        self._forget()

    def _forget(self) -> None:
        self._in_bucket = BucketBuild(self.home, self._part_bytes) if isinstance(self.home, BucketHome) else None
        self.manifest: Manifest | None = None
        """Manifest of the published version."""
        self._base: Manifest | None = None
        """The version that was current when the run began."""
        self._number = 1
        self._run = secrets.token_hex(8)
        self._began = self._durable = False
        self._given: pa.Schema | None = None
        self._schema = pa.schema([])
        self._tokens: str | None = None
        self._mask: str | None = None
        self._pieces = Pieces(self.piece_bytes)
        self._shard: ShardWriter | None = None
        self._shards: list[Staged] = []
        self._made = self._checkpoints = 0
        self._ended: State | None = None
        """The last token, if the run turns out to have begun to publish all of its rows."""
        self._needed: set[str] = set()
        """Files that the last checkpoint counts on."""

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, batch: pa.RecordBatch) -> None:
        """Add rows; the first batch, even an empty one, defines the columns."""
        if self.manifest is not None:
            raise ConfigError(f"{self.home.shown} has been published; call reset(), or use another writer")
        with naming(self.home.shown):
            self._begin()
            self._ended = None
            if self._given is None:
                self._set_schema(batch.schema)
            elif not batch.schema.equals(self._given):
                difference = describe_difference(self._given, batch.schema)
                raise SchemaError(f"{self!r} got another schema than before: {difference}")
            for piece, size in self._pieces.add(plain_batch(batch, self._schema)):
                self._write_piece(piece, size)

    @property
    def piece_bytes(self) -> int:
        return min(_PIECE_BYTES, self._shard_bytes)

    @property
    def shard_bytes(self) -> int:
        return self._shard_bytes

    def part_facts(self) -> list[str | int | None]:
        """Options that decide the bytes of shards that others write, and the key of what the store is made of."""
        return [self._mode, *self._requested, self._shard_bytes, self.lineage.key]

    def begin(self) -> None:
        """Take the store for this run, before the first row is written; refuse a path that it may not use."""
        with naming(self.home.shown):
            self._begin()

    def shard_options(self, schema: pa.Schema) -> dict[str, str | None]:
        """Columns of tokens and mask, if rows of this schema are written by others, shard by shard."""
        self._set_schema(schema)
        return {"tokens": self._tokens, "mask": self._mask}

    def take_shard(self, data: Path, index: Path, entry: ShardEntry) -> None:
        """The next shard, written by others with `ShardWriter` into files on any file system; they stay there."""
        with naming(self.home.shown):
            self._made += 1
            target = self._build.shard_path(self._made)
            for given, made in ((data, target), (index, target.with_name(f"{target.name}.index"))):
                try:
                    os.link(given, made)
                except OSError:  # another file system, or one without links
                    shutil.copyfile(given, made)
            self._build.finished(target.name, entry)
            self._shards.append((target.name, entry))

    def publish(self) -> Manifest:
        """Make everything written so far a version of the store, in one step. A second call gives the same."""
        if self.manifest is None:
            with naming(self.home.shown):
                self.manifest = self._publish()
        return self.manifest

    def _publish(self) -> Manifest:
        self._begin()
        rest = self._pieces.rest()
        if rest is not None:
            self._write_piece(*rest)
        self._finish_shard()
        self._check_still_ours()  # the uploads may have taken long
        if self._durable:
            self._build.save_journal(self._shards)
            self._build.mark_complete(self._run)
        self._build.place(self._shards)
        manifest = self._new_manifest()
        self._build.show(self.home.path, manifest)
        self._lock.release()
        return manifest

    def memory_usage(self) -> int:
        """Bytes of the rows that wait to fill a piece, and those that an upload holds."""
        return self._pieces.held_bytes() + (self._build.held_bytes if self._made else 0)

    def fit_budget(self, nbytes: int) -> None:
        """Make the parts of uploads fit; called before anything is written."""
        self._part_bytes = part_bytes_within(nbytes)
        if self._in_bucket is not None:
            self._in_bucket.fit(self._part_bytes)

    def abort(self) -> None:
        """Remove what was not published, except what a checkpoint needs."""
        self._drop_shard()
        if self._lock.held:
            if not self._durable:
                self._clear()
            self._lock.release()
        if self._in_bucket is not None:
            self._in_bucket.close()

    close = abort

    def discard(self) -> None:
        """Remove what `abort` keeps for a checkpoint, if that is gone for good."""
        if self._durable and self._began and self.manifest is None:
            self._clear()

    def reset(self) -> None:
        """Ready for another run, which replaces the store this one made, or adds to it once more."""
        self.abort()
        if self.manifest is not None and self._mode == "create":
            self._mode = "overwrite"
        self._forget()

    def claim(self) -> None:
        """Take the store for this run alone; while another run writes it, that one is named in an error.

        `restore` would take it over from a writer that this process has abandoned.
        """
        self._take_lock(take_over=False)

    # -- surviving kill -9 -------------------------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """Make all rows so far durable, without ending a shard."""
        if not self._durable:
            raise ConfigError("checkpoint() without restore(): a plain run cannot be resumed; call restore({}) first")
        if self._ended is not None:
            return self._ended  # no rows came after it, and only with it are the files known to be complete
        self._check_still_ours()
        with naming(self.home.shown):
            return self._checkpoint()

    def _checkpoint(self) -> State:
        self._checkpoints += 1
        opened, tail, needed = None, None, set()
        if self._shard is not None:
            length, digest = self._shard.sync()
            opened = [self._shard.path.name, length, digest, self._shard.size]
            self._build.keep_open(self._shard.path.name, length)
            needed.add(self._shard.path.name)
        if pending := self._pieces.pending():
            tail = list(self._build.write_tail(self._checkpoints, pending, self._schema))
            needed.add(tail[0])
        self._build.save_journal(self._shards)
        # What the checkpoint before counts on stays too: this one is in force only when it has been saved.
        self._sweep(needed | self._needed)
        self._needed = needed
        token = {
            "run": self._run,
            "base": self._base.version if self._base is not None else None,
            "number": self._number,
            "schema": schema_to_text(self._given) if self._given is not None else None,
            "shards": len(self._shards),
            "open": opened,
            "tail": tail,
            "made": self._made,
            "checkpoints": self._checkpoints,
        }
        return token if (journal := self._build.journal) is None else token | {"journal": journal}

    def restore(self, token: State) -> None:
        """Go back to where `token` was made, in this process or another; `{}` for the beginning."""
        self._drop_shard()
        self._forget()
        self._durable = True
        if not token.get("run"):
            self._begin(take_over=True)
            return
        self._run, finishing = token["run"], bool(token.get("finishing"))
        if finishing and self._was_published(token["number"]):
            self._ended = _without_mark(token)
            return
        self._begin(token, take_over=True)
        try:
            with naming(self.home.shown):
                self._go_on_from(token, finishing)
        except BaseException:
            self._lock.release()
            raise

    def _go_on_from(self, token: State, finishing: bool) -> None:
        if token["schema"]:
            self._set_schema(schema_from_text(token["schema"]))
        self._made, self._checkpoints = token["made"], token["checkpoints"]
        self._build.journal_before = token.get("journal")
        if finishing and self._build.is_complete(self._run):
            self._shards = self._build.read_journal()
            self._ended = _without_mark(token)
            return
        self._shards = self._build.read_journal(token["shards"])
        self._needed = {part[0] for part in (token["tail"], token["open"]) if part}
        self._sweep(self._needed)
        if token["open"]:
            self._reopen(*token["open"])
        if token["tail"]:
            for batch in self._build.read_tail(*token["tail"]):
                for piece, size in self._pieces.add(batch):  # less than a piece, so none is completed
                    self._write_piece(piece, size)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _local(self) -> Path:
        assert self.home.path is not None
        return self.home.path

    @property
    def _build(self) -> Build:
        """Build in the store if there is a version already, else in a hidden directory; one in a bucket has none."""
        if self._in_bucket is not None:
            return self._in_bucket
        path = self._local
        return Build(path if self._base is not None else path.with_name(f".{path.name}.penstock-store"))

    def _clear(self) -> None:
        if self._base is not None:
            self._build.remove()
        else:
            self._build.remove_home()

    def _begin(self, token: State | None = None, *, take_over: bool = False) -> None:
        """Take the lock and inspect the path, once."""
        if self._began:
            self._check_still_ours()
            return
        self._take_lock(take_over=take_over)
        try:
            self._look(token)
            self._build.check_place(shown=self._base is not None)
            if self._in_bucket is None:
                for file in half_written(self._build.path.parent):
                    file.unlink(missing_ok=True)
            if token is not None:
                self._build.check_owner(self._run)
            else:
                self._make_build()
        except BaseException:
            self._lock.release()
            raise
        self._began = True

    def _take_lock(self, *, take_over: bool) -> None:
        if self._in_bucket is None and not self._local.parent.is_dir():
            parent = str(self._local.parent)
            raise FileNotFoundError(f"no such directory: {parent!r}; make it before writing {self.path.name}")
        if self._in_bucket is not None:
            self.home.list()  # a missing bucket and wrong keys have errors of their own
        if not self._lock.acquire(self._wait_seconds, take_over=take_over):
            raise ConfigError(
                f"{self.home.shown} is being written by {self._lock.owner()}; wait for it to end (wait_seconds=...), "
                "or write elsewhere"
            )

    def _make_build(self) -> None:
        self._clear()  # of a run that was killed
        try:
            self._build.own(self._run, durable=self._durable)
        except BaseException:
            self._clear()
            raise

    def _check_still_ours(self) -> None:
        if isinstance(self._lock, ObjectLock):
            self._lock.check(self.shown)
        if not self._lock.held:
            raise ConfigError(f"{self!r} was aborted, or another writer has taken its place; use the newest one")

    def _look(self, token: State | None) -> None:
        """Choose the build directory by what is at the path, and refuse paths that this run may not use."""
        if is_store(self.home):
            if self._mode == "create":
                raise ConfigError(
                    f"{self.home.shown} holds a store already; pass mode='append' to add to it, mode='overwrite' to "
                    "replace it by a new version, or write elsewhere"
                )
            self._base = read_manifest(self.home)
            self._number = version_numbers(self.home)[-1] + 1
        elif self.home.path is not None:
            self._refuse_others(self.home.path)
        if self._in_bucket is not None:
            self._in_bucket.look(resumes=token is not None)
        here = self._base.version if self._base is not None else None
        if token is not None:
            if token["base"] != here:
                raise ResumeError(
                    f"the checkpoint builds on version {token['base']} of {self.home.shown}, which has version {here} "
                    "now; delete the checkpoint to start again"
                )
            self._number = token["number"]

    def _refuse_others(self, path: Path) -> None:
        """Refuse a path with something else than a store."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not a store; delete it or write elsewhere")
        if path.exists() and path.samefile(os.curdir):
            raise ConfigError(
                f"{path} is the directory this process is in, and a new store replaces its path; "
                "name a directory that does not exist yet"
            )

    @property
    def _appended_to(self) -> Manifest | None:
        """The version whose rows come before ours."""
        return self._base if self._mode == "append" else None

    def _set_schema(self, given: pa.Schema) -> None:
        schema = plain_schema(given)
        tokens, mask = self._requested
        if mask is None and tokens is not None and "loss_mask" in schema.names:
            mask = "loss_mask"
        for name, argument, way_out in ((tokens, "tokens", ", or tokens=None if there are none"), (mask, "mask", "")):
            if name is not None and name not in schema.names:
                raise SchemaError(f"no column {name!r} in {schema.names}; pass {argument}= its name{way_out}")
        base = self._appended_to
        if base is not None and base.rows:
            self._check_goes_with(base, schema, tokens, mask)
        self._given, self._schema, self._tokens, self._mask = given, schema, tokens, mask

    def _check_goes_with(self, base: Manifest, schema: pa.Schema, tokens: str | None, mask: str | None) -> None:
        if not schema.equals(base.schema):
            raise SchemaError(
                f"these rows do not have the schema of those in {self.home.shown}: "
                f"{describe_difference(base.schema, schema)}"
            )
        if (tokens, mask) != (base.tokens_column, base.mask_column):
            raise SchemaError(
                f"{self.home.shown} has its tokens in {base.tokens_column!r} and their mask in {base.mask_column!r}, "
                f"this run in {tokens!r} and {mask!r}; pass tokens= and mask= as before"
            )
        ours, theirs = self.lineage.tokenizer, base.tokenizer
        if ours is not None and theirs is not None and ours != theirs:
            raise ConfigError(
                f"{self.home.shown} was made with the tokenizer {theirs}, these rows with {ours}, and the ids of two "
                "tokenizers are incompatible; use the same one, or another store"
            )

    def _write_piece(self, piece: pa.RecordBatch, size: int) -> None:
        if self._shard is not None and self._shard.size + size > self._shard_bytes:
            self._finish_shard()
        if self._shard is None:
            self._shard = self._new_shard()
        self._shard.write(piece, size)

    def _new_shard(self) -> ShardWriter:
        self._made += 1
        return ShardWriter(self._build.shard_path(self._made), self._schema, self._tokens, self._mask)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            name, entry = self._shard.path.name, self._shard.finish()
            self._shard = None
            self._build.finished(name, entry)
            self._shards.append((name, entry))

    def _drop_shard(self) -> None:
        if self._shard is not None:
            self._shard.abort()
            self._shard = None

    def _reopen(self, name: str, length: int, digest: str, size: int) -> None:
        """Continue an unfinished shard. An Arrow file cannot be continued, so its pieces are copied."""
        self._shard = self._new_shard()
        for piece in self._build.pieces_within(name, length, digest):
            self._shard.write(piece, 0)
        self._shard.size = size

    def _sweep(self, needed: set[str]) -> None:
        mine = {self._shard.path.name} if self._shard is not None else set()
        self._build.sweep(needed | mine | {name for name, _ in self._shards})

    def _new_manifest(self) -> Manifest:
        shards = tuple(entry for _, entry in self._shards)
        lineage: tuple[Lineage, ...] = (self.lineage,)
        schema, tokens, mask = self._schema, self._tokens, self._mask
        before = self._appended_to
        if before is not None:
            shards, lineage = before.shards + shards, before.lineage + lineage
            if self._given is None:
                schema, tokens, mask = before.schema, before.tokens_column, before.mask_column
        elif self._given is None:
            tokens, mask = self._requested  # so that rows added later are counted as these would have been
        return Manifest(
            schema=schema,
            shards=shards,
            version=self._number,
            parent=self._base.version if self._base is not None else None,
            tokens_column=tokens,
            mask_column=mask,
            lineage=lineage,
            key=combined_key(lineage),
            run=self._run,
        )

    def _was_published(self, number: int) -> bool:
        """True if this run had published before it was killed; finishes its cleanup."""
        if not is_store(self.home) or number not in version_numbers(self.home):
            return False
        manifest = read_manifest(self.home, number)
        if manifest.run != self._run or read_manifest(self.home).version < number:
            return False
        self.manifest = self._base = manifest
        if self._lock.acquire():  # or another run is writing now, and the files are its own
            if self._build.is_complete(self._run):
                self._build.remove()
            self._lock.release()
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StoreWriter({self.shown!r})"


def append(path: PathLike, batches: Iterable[pa.RecordBatch], *, lineage: Lineage | None = None) -> Manifest:
    """Add batches to the store at `path` as a new version, and return its manifest. The older ones stay readable."""
    there = read_manifest(store_home(path))
    tokens, mask = there.tokens_column, there.mask_column
    with StoreWriter(path, mode="append", tokens=tokens, mask=mask, lineage=lineage) as writer:
        for batch in batches:
            writer.write(batch)
        return writer.publish()


def _without_mark(token: State) -> State:
    """A token as `checkpoint` returned it."""
    return {name: value for name, value in token.items() if name != "finishing"}
