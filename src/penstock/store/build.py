"""The directory of a store that is being written: finished shards, the open one, a journal, rows between two pieces.

Nothing in it is renamed or changed before the store is published, only added to, so an older checkpoint finds all that
it needs, and ignores what came later.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, ResumeError
from penstock.files.atomic import check_own_directory, remove_own_directory, strangers, sync_directory, write_atomic
from penstock.files.states import StateFormat, parse_json, to_json
from penstock.store.manifest import BUILD, MANIFEST_NAME, SHARDS, VERSIONS, Manifest, ShardEntry, write_manifest

_JOURNAL, COMPLETE, OWNER = "journal.jsonl", "complete", "run"
SHARD_LINE = StateFormat("shard", "a line of the journal")
PLAIN = b" without a checkpoint"
_TEMPORARY = r"\.\d+-[0-9a-f]{8}\.tmp"
_OWN = re.compile(
    rf"shard-\d{{6,}}(\.index)?|tail-\d{{6,}}|{_JOURNAL}|{COMPLETE}|{OWNER}|\.({COMPLETE}|{OWNER}){_TEMPORARY}"
)
"""The names of all that is ever written into the directory of a build, and into a store that is not shown yet."""
_OWN_HOME = re.compile(rf"\{BUILD}|{SHARDS}|{VERSIONS}|{MANIFEST_NAME}|\.{MANIFEST_NAME}{_TEMPORARY}")
_MAGIC_BYTES = 8
"""An Arrow file is an Arrow stream with this many bytes before it and a footer after it."""

Staged = tuple[str, ShardEntry]
"""A finished shard, and the name it has until it is published."""


class Build:
    """The files of an unfinished run inside `home`, the directory that becomes or already is the store."""

    held_bytes = 0
    """Memory that writing takes besides that of the rows."""
    journal: str | None = None
    """Name of the list of finished shards, if a checkpoint has to know it."""
    journal_before: str | None = None
    """The one that the checkpoint of the process before names."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._path = home / BUILD
        self.shown = str(self._path)

    @property
    def path(self) -> Path:
        return self._path

    def check_place(self, *, shown: bool) -> None:
        """Refuse a symbolic link at the build path, and foreign files in an unpublished store."""
        if not shown:
            check_own_directory(self._home, _OWN_HOME)
        check_own_directory(self.path, _OWN)

    def remove(self) -> None:
        """Delete it with its content; if it holds files of others, leave all of it."""
        with contextlib.suppress(ConfigError):
            remove_own_directory(self.path, _OWN)

    def remove_home(self) -> None:
        """Delete an unpublished store; keep it if it holds foreign files."""
        with contextlib.suppress(ConfigError):
            if not strangers(self.path, _OWN):
                remove_own_directory(self._home, _OWN_HOME)

    def shard_path(self, number: int) -> Path:
        return self.path / f"shard-{number:06d}"

    def finished(self, name: str, entry: ShardEntry) -> None:
        """Take a shard that is complete. It stays here until `place`."""

    def keep_open(self, name: str, length: int) -> None:
        """Make the first bytes of an open shard durable. They are, since they are on disk."""

    def save_journal(self, shards: list[Staged]) -> None:
        """One line for each finished shard. Only new lines are written: there may be thousands."""
        with open(self.path / _JOURNAL, "ab+") as file:
            file.seek(0)
            known = sum(1 for _ in file)
            file.writelines(
                to_json(SHARD_LINE.write({"name": name, "entry": asdict(entry)})) + b"\n"
                for name, entry in shards[known:]
            )
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self.path)

    def read_journal(self, count: int | None = None) -> list[Staged]:
        """The first `count` shards (None: all); what was finished later is forgotten."""
        path = self.path / _JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        if count is not None:
            if len(lines) < count:
                raise self._lost(_JOURNAL)
            if len(lines) > count:
                lines = lines[:count]
                os.truncate(path, sum(map(len, lines)))
        try:
            read = [SHARD_LINE.read(parse_json(line)) for line in lines]
        except ValueError as error:
            raise self._damaged(_JOURNAL, str(error)) from error
        shards = [(line["name"], ShardEntry(**line["entry"])) for line in read]
        for name, entry in shards:
            if not (self.path / name).exists() and not (self._home / entry.file).exists():
                raise self._lost(name)
        return shards

    def write_tail(self, number: int, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> tuple[str, str]:
        """Rows that wait to fill a piece; returns the name and the hash of the file."""
        name = f"tail-{number:06d}"
        data = tail_bytes(batches, schema)
        with open(self.path / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return name, xxhash.xxh3_128_hexdigest(data)

    def read_tail(self, name: str, digest: str) -> list[pa.RecordBatch]:
        try:
            data = (self.path / name).read_bytes()
        except FileNotFoundError:
            raise self._lost(name) from None
        self._check(name, data, digest)
        return list(pa.ipc.open_stream(data))

    def pieces_within(self, name: str, length: int, digest: str) -> list[pa.RecordBatch]:
        """The pieces in the first `length` bytes of a shard that was not finished, as views of the file."""
        path = self.path / name
        if not path.is_file() or path.stat().st_size < length:
            raise self._lost(name)
        with pa.memory_map(str(path)) as file:
            data = file.read_buffer()
        self._check(name, data.slice(0, length), digest)
        # Without an end mark the stream simply stops where the bytes do.
        return list(pa.ipc.open_stream(pa.BufferReader(data.slice(_MAGIC_BYTES, length - _MAGIC_BYTES))))

    def sweep(self, needed: Iterable[str]) -> None:
        """Remove everything of ours but the journal and the shards `needed`, with their indexes, and tails."""
        keep = {_JOURNAL, OWNER} | {name + suffix for name in needed for suffix in ("", ".index")}
        for file in self.path.iterdir():
            if file.name not in keep and _OWN.fullmatch(file.name):
                file.unlink()

    def own(self, run: str, *, durable: bool) -> None:
        """Record the owner of the files before there are any, and whether a checkpoint may resume from them."""
        self.path.mkdir(parents=True)
        write_atomic(self.path / OWNER, run.encode() if durable else run.encode() + PLAIN)

    def owner(self) -> str | None:
        """The run that may still resume from these files; None if there is none."""
        owner = self._read(OWNER)
        return None if owner is None or owner.endswith(PLAIN) else owner.decode(errors="replace")

    def check_owner(self, run: str) -> None:
        """Files of another run have the same names: a checkpoint must not count on them."""
        owner = self._read(OWNER)
        if owner is None:
            raise self._lost(OWNER)
        if owner != run.encode():
            raise ResumeError(
                f"another run has begun to write {self.shown.removesuffix(f'/{BUILD}')} since this checkpoint was "
                "made, and its files are gone; delete the checkpoint to start again"
            )

    def mark_complete(self, run: str) -> None:
        """From here on the journal has all shards of the run, and publishing may move them away."""
        write_atomic(self.path / COMPLETE, run.encode())

    def is_complete(self, run: str) -> bool:
        return self._read(COMPLETE) == run.encode()

    def place(self, shards: Iterable[Staged]) -> None:
        """Give the finished files the names that readers look for. May be done again after a crash in the middle."""
        (self._home / SHARDS).mkdir(exist_ok=True)
        for name, entry in shards:
            self._place(name, self._home / entry.file)
            self._place(f"{name}.index", self._home / entry.index_file)
        sync_directory(self._home / SHARDS)

    def show(self, path: Path | None, manifest: Manifest) -> None:
        """Make the version visible: its manifest becomes the current one, and a new store gets its name."""
        assert path is not None
        home = self._home
        write_manifest(home, manifest, current=False)
        write_manifest(home, manifest, current=True)
        if home != path:
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()  # an empty directory, or the writer would have refused it
            home.rename(path)
            sync_directory(path.parent)
        Build(path).remove()

    def _read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def _lost(self, name: str) -> ResumeError:
        return ResumeError(
            f"the checkpoint counts on {self.shown}/{name}, which is gone; delete the checkpoint to start again"
        )

    def _check(self, name: str, data: Any, digest: str) -> None:
        """Compare checksums, or rows that a disk has damaged would be copied with a new, valid checksum."""
        if xxhash.xxh3_128_hexdigest(data) != digest:
            raise self._damaged(name, "its checksum differs")

    def _damaged(self, name: str, why: str) -> ResumeError:
        return ResumeError(
            f"the checkpoint counts on {self.shown}/{name}, which is damaged ({why}); delete the checkpoint to start "
            "again"
        )

    def _place(self, name: str, target: Path) -> None:
        staged = self.path / name
        if not staged.exists():
            if not target.exists():
                raise self._lost(name)
            return
        try:
            staged.replace(target)
        except PermissionError:
            # Windows: the same content exists already, and a process reads it.
            if not target.exists():
                raise


def tail_bytes(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Buffer:
    """Rows as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue()
