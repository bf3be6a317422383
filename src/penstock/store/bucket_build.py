"""The unfinished run of a store in a bucket: shards are made on this machine one at a time, uploaded, and deleted here.

A finished shard is uploaded at once under the name of its content, which no version refers to before the manifest does.
What a checkpoint counts on besides is in the hidden folder `.build`: the list of finished shards, the bytes of the open
one since the checkpoint before, and rows that wait to fill a piece. A run that was taken for dead and lives changes
nothing there: names hold a word of the process, and the checkpoint has those that count.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.objects import PART_BYTES, ObjectExistsError, ObjectVersion, ObjectWriter
from penstock.files.states import parse_json, to_json
from penstock.store.build import COMPLETE, OWNER, PLAIN, SHARD_LINE, Build, Staged, tail_bytes
from penstock.store.home import BucketHome
from penstock.store.manifest import (
    BUILD,
    MANIFEST_NAME,
    SHARDS,
    VERSIONS,
    Manifest,
    ShardEntry,
    manifest_bytes,
    manifest_name,
    read_manifest,
)
from penstock.store.piece_sums import PieceSums

_OWN = re.compile(
    rf"(shard|tail)-\d{{6,}}-[0-9a-f]{{8}}(\.at-\d{{12,}})?|journal-[0-9a-f]{{8}}\.jsonl|{COMPLETE}|{OWNER}"
)
"""The names of all that is ever written into the folder of a build."""
_OWN_FOLDERS = {BUILD, SHARDS, VERSIONS}
_COPIED_BYTES = 1 << 20


class BucketBuild(Build):
    """The objects of an unfinished run below the prefix of a store, and the folder on this machine that it works in."""

    def __init__(self, home: BucketHome, part_bytes: int = PART_BYTES) -> None:
        self._store = home
        self.fit(part_bytes)
        self._word = secrets.token_hex(4)
        self.journal: str = f"journal-{self._word}.jsonl"
        self._scratch: Path | None = None
        self._uploaded: dict[str, int] = {}
        """Bytes of open shards that are in the bucket."""
        self._current: ObjectVersion | None = None
        self.shown = f"{home.shown}/{BUILD}"

    # -- this machine ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """Folder for the files of one shard."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="penstock-store-"))
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def shard_path(self, number: int) -> Path:
        return self.path / f"shard-{number:06d}-{self._word}"

    def fit(self, part_bytes: int) -> None:
        """Upload in parts of this size; three of them are in memory."""
        self._part_bytes, self.held_bytes = part_bytes, 3 * part_bytes

    def close(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)

    # -- the place ---------------------------------------------------------------------------------------------------

    def look(self, *, resumes: bool) -> None:
        """Refuse a prefix with objects that are no store, or of one whose manifest is gone: a run that begins deletes
        shards that no manifest names. Note the manifest that a new one replaces."""
        info = self._store.bucket.info(self._store.key(MANIFEST_NAME))
        self._current = info.written if info is not None else None
        if info is not None:
            return
        folders, objects = self._store.bucket.list_folder(self._store.prefix)
        strange = [name for name in folders if name not in _OWN_FOLDERS]
        strange += [info.key for info in objects]
        if strange:
            raise ConfigError(
                f"there are objects below {self._store.shown}/ that are no store, such as {strange[0]!r}; delete them "
                "or write elsewhere"
            )
        if not resumes and self._store.list(VERSIONS):
            raise ConfigError(
                f"{self._store.shown} has versions and no {MANIFEST_NAME}: it was deleted, or a run was killed as it "
                "published; make a version the current one with checkout(path, version), or delete the versions to "
                "write the store anew"
            )
        if not resumes and self._read(OWNER) is None and self._store.list(SHARDS):
            raise ConfigError(
                f"{self._store.shown} has shards and no {MANIFEST_NAME}, and no run of penstock has left them: is a "
                "store being uploaded there? Delete them or write elsewhere"
            )

    def check_place(self, *, shown: bool) -> None:
        for name in self._staged():
            if not _OWN.fullmatch(name):
                raise ConfigError(
                    f"{self.shown} is where penstock keeps unfinished output, and it holds {name!r}, which penstock "
                    "did not write; move it elsewhere, then try again"
                )

    def remove(self) -> None:
        with contextlib.suppress(ConfigError):
            self.check_place(shown=True)
            self._delete(BUILD, self._staged(), last=OWNER)
        self.close()

    def remove_home(self) -> None:
        """Delete an unpublished store."""
        if not self._store.exists(MANIFEST_NAME):
            for folder in (SHARDS, VERSIONS):
                self._delete(folder, self._store.list(folder))
        self.remove()

    # -- what a checkpoint counts on ---------------------------------------------------------------------------------

    def finished(self, name: str, entry: ShardEntry) -> None:
        """Upload a shard and its checksums under the names that readers look for, verified; then delete it here.

        What is there already, of a version before or a run that was killed, is not uploaded again.
        """
        data, index = self.path / name, self.path / f"{name}.index"
        sums = PieceSums.of(data, index).to_bytes()
        try:
            known = self._store.read(entry.sums_file) == sums  # written last
        except FileNotFoundError:
            known = False
        for file, target, size, digest in (
            (data, entry.file, entry.bytes, entry.name),
            (index, entry.index_file, entry.index_bytes, entry.index_checksum),
        ):
            if not (known and self._store.size(target) == size):
                self._upload(file, target, digest)
                if (there := self._store.size(target)) != size:
                    raise DataError(
                        f"the object has {there} bytes after its upload, and the file {size}; start again, and the "
                        "run resumes",
                        file=self._store.place(target),
                    )
        self._store.write(entry.sums_file, sums)
        data.unlink()
        index.unlink()
        self._uploaded.pop(name, None)

    def _upload(self, file: Path, target: str, digest: str) -> None:
        hashed = xxhash.xxh3_128()
        with open(file, "rb") as source, self._writer(target) as writer:
            while part := source.read(_COPIED_BYTES):
                hashed.update(part)
                writer.write(part)
            if hashed.hexdigest() != digest:
                raise DataError("the file on this disk is not what was written to it; check the disk", file=str(file))

    def _writer(self, target: str) -> ObjectWriter:
        return self._store.bucket.writer(self._store.key(target), self._part_bytes)

    def keep_open(self, name: str, length: int) -> None:
        """Upload what the open shard has grown by since the checkpoint before."""
        start = self._uploaded.get(name, 0)
        if length > start:
            with open(self.path / name, "rb") as file:
                file.seek(start)
                grown = cast(BinaryIO, _Limited(file, length - start))
                self._store.bucket.upload(self._key(f"{name}.at-{start:012d}"), grown, self._part_bytes)
            self._uploaded[name] = length

    def save_journal(self, shards: list[Staged]) -> None:
        lines = [to_json(SHARD_LINE.write({"name": name, "entry": asdict(entry)})) + b"\n" for name, entry in shards]
        self._store.bucket.write(self._key(self.journal), b"".join(lines))

    def read_journal(self, count: int | None = None) -> list[Staged]:
        name = self.journal_before or self.journal
        try:
            lines = bytes(self._store.bucket.read(self._key(name))).splitlines()
        except FileNotFoundError:
            lines = []
        if count is not None:
            if len(lines) < count:
                raise self._lost(name)
            lines = lines[:count]
        try:
            read = [SHARD_LINE.read(parse_json(line)) for line in lines]
        except ValueError as error:
            raise self._damaged(name, str(error)) from error
        shards = [(line["name"], ShardEntry(**line["entry"])) for line in read]
        there = self._store.list(SHARDS) if shards else {}
        for _, entry in shards:
            for file, size in ((entry.file, entry.bytes), (entry.index_file, entry.index_bytes)):
                if there.get(file.rpartition("/")[2]) != size:
                    raise ResumeError(
                        f"the checkpoint counts on {self._store.place(file)}, which is gone; delete the checkpoint to "
                        "start again"
                    )
        return shards

    def write_tail(self, number: int, batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> tuple[str, str]:
        name = f"tail-{number:06d}-{self._word}"
        data = bytes(memoryview(tail_bytes(batches, schema)))
        self._store.bucket.write(self._key(name), data)
        return name, xxhash.xxh3_128_hexdigest(data)

    def read_tail(self, name: str, digest: str) -> list[pa.RecordBatch]:
        try:
            data = bytes(self._store.bucket.read(self._key(name)))
        except FileNotFoundError:
            raise self._lost(name) from None
        self._check(name, data, digest)
        return list(pa.ipc.open_stream(data))

    def pieces_within(self, name: str, length: int, digest: str) -> list[pa.RecordBatch]:
        parts = sorted(part for part in self._staged() if part.startswith(f"{name}.at-"))
        with open(self.path / name, "wb") as file:
            for part in parts:
                if file.tell() != int(part.rpartition("-")[2]) or file.tell() >= length:
                    break
                self._store.bucket.download(self._key(part), file)
        pieces = super().pieces_within(name, length, digest)
        (self.path / name).unlink()  # the pieces are views that keep it
        return pieces

    def sweep(self, needed: Iterable[str]) -> None:
        kept = {self.journal, self.journal_before, OWNER}
        wanted = set(needed)
        strays = [
            name
            for name in self._staged()
            if name not in kept and name.partition(".at-")[0] not in wanted and _OWN.fullmatch(name)
        ]
        self._delete(BUILD, strays)

    def own(self, run: str, *, durable: bool) -> None:
        self._store.write(f"{BUILD}/{OWNER}", run.encode() if durable else run.encode() + PLAIN)

    def mark_complete(self, run: str) -> None:
        self._store.write(f"{BUILD}/{COMPLETE}", run.encode())

    def place(self, shards: Iterable[Staged]) -> None:
        """Nothing: finished shards are in their places."""

    def show(self, path: Path | None, manifest: Manifest) -> None:
        """Write the manifest of the version, and make it the current one: neither may replace what others wrote."""
        data, run = manifest_bytes(manifest), manifest.run
        for name, replaced in ((manifest_name(manifest.version), None), (MANIFEST_NAME, self._current)):
            try:
                self._store.bucket.write(self._store.key(name), data, create=replaced is None, replaced=replaced)
            except (ObjectExistsError, FileNotFoundError):
                # Written by this run before it was killed, or the answer got lost.
                if read_manifest(self._store, None if name == MANIFEST_NAME else manifest.version).run != run:
                    raise ConfigError(
                        f"{self._store.place(name)} was written by another writer meanwhile; this run has published "
                        "nothing: write the version again with mode='append' or 'overwrite'"
                    ) from None
                self._store.write(name, data)
        self.remove()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return self._store.key(f"{BUILD}/{name}")

    def _staged(self) -> dict[str, int]:
        return self._store.list(BUILD)

    def _read(self, name: str) -> bytes | None:
        try:
            return self._store.read(f"{BUILD}/{name}")
        except FileNotFoundError:
            return None

    def _delete(self, folder: str, names: Iterable[str], last: str | None = None) -> None:
        listed = list(names)
        keys = [self._store.key(f"{folder}/{name}") for name in listed if name != last]
        if keys:
            self._store.bucket.delete(*keys)
        if last in listed:
            self._store.delete(f"{folder}/{last}")


class _Limited:
    """The next bytes of a file, and no more."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int) -> bytes:
        data: bytes = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data
