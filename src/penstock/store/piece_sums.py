"""Checksums of the pieces of a shard, in a file beside it in a bucket: parts that are fetched are verified."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from penstock.errors import DataError
from penstock.store.home import StoreHome
from penstock.store.manifest import ShardEntry

Sum = tuple[int, int, str]
"""Offset, length, and xxh3-128 as hex, of some bytes of a file."""
INDEX_STEP = 1 << 20
"""Length of the parts of an index."""
_VERSION = 1
_MAGIC_BYTES = 8
"""An Arrow file is an Arrow stream with this many bytes before it and a footer after it."""


@dataclass(frozen=True, slots=True)
class PieceSums:
    """Checksums of one shard: of each record batch of its Arrow file, in order, and of its index in steps of 1 MiB.

    A piece is a whole message: with the store's schema, `pa.ipc.read_record_batch` reads it alone.
    """

    pieces: tuple[Sum, ...]
    index: tuple[Sum, ...]

    @classmethod
    def of(cls, data: Path, index: Path) -> PieceSums:
        """Of the files of a shard on disk, of which one piece at a time is in memory."""
        return cls(tuple(_message_sums(data)), tuple(_step_sums(index)))

    def to_bytes(self) -> bytes:
        return orjson.dumps({"version": _VERSION, "pieces": self.pieces, "index": self.index})

    @classmethod
    def from_bytes(cls, data: bytes) -> PieceSums:
        """Sums that `to_bytes` wrote; ValueError for anything else."""
        facts = orjson.loads(data)
        if not isinstance(facts, Mapping) or facts.get("version") != _VERSION:
            raise ValueError("it is no list of checksums of this release")
        try:
            return cls(_sums(facts["pieces"]), _sums(facts["index"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"it is no list of checksums ({error})") from error


def write_sums(home: StoreHome, entry: ShardEntry, data: Path, index: Path) -> None:
    """Write the checksums of a shard, whose files are on this disk, into a store."""
    home.write(entry.sums_file, PieceSums.of(data, index).to_bytes())


def read_sums(home: StoreHome, entry: ShardEntry) -> PieceSums | None:
    """The checksums of a shard; None if nobody wrote them, as for a store that other tools have copied."""
    try:
        data = home.read(entry.sums_file)
    except FileNotFoundError:
        return None
    try:
        return PieceSums.from_bytes(data)
    except ValueError as error:
        raise DataError(
            f"the checksums of a shard are damaged: {error}; delete this file, and the shard is fetched whole",
            file=home.place(entry.sums_file),
        ) from error


def _message_sums(path: Path) -> Iterator[Sum]:
    with pa.OSFile(str(path)) as stream, open(path, "rb", buffering=0) as file:
        start = stream.seek(_MAGIC_BYTES)
        for message in pa.ipc.MessageReader.open_stream(stream):
            stop = stream.tell()
            if message.type == "record batch":
                file.seek(start)
                yield start, stop - start, xxhash.xxh3_128_hexdigest(file.read(stop - start))
            start = stop


def _step_sums(path: Path) -> Iterator[Sum]:
    with open(path, "rb", buffering=0) as file:
        start = 0
        while part := file.read(INDEX_STEP):
            yield start, len(part), xxhash.xxh3_128_hexdigest(part)
            start += len(part)


def _sums(listed: Any) -> tuple[Sum, ...]:
    made = tuple((start, length, digest) for start, length, digest in listed)
    for start, length, digest in made:
        if type(start) is not int or type(length) is not int or not isinstance(digest, str) or min(start, length) < 0:
            raise TypeError(f"{[start, length, digest]!r:.80}")
    return made
