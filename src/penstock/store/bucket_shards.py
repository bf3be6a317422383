"""Shards of a store in a bucket: their parts, fetched when they are needed or before, and read as those on disk are.

A shard has an index, checksums of its pieces (`.sums`) and the pieces themselves, of about a megabyte. Each is a part
in a cache on this machine, verified when it is fetched and again when a process first uses it. A shard without
checksums, as other tools upload it, is one part as a whole.
"""

from __future__ import annotations

import logging
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.errors import DataError
from penstock.files.cache import default_cache_directory
from penstock.files.objects import PART_BYTES, ChangedObjectError, ObjectInfo
from penstock.files.part_cache import DamagedPartError, PartCache
from penstock.pipeline.prefetch import FetchPool
from penstock.store.home import BucketHome
from penstock.store.manifest import SHARDS, Manifest, ShardEntry
from penstock.store.piece_sums import PieceSums
from penstock.store.shards import Unchanging

log = logging.getLogger(__name__)

FETCH_THREADS = 32


class ObjectPart(NamedTuple):
    """Bytes of an object: the name in the cache, the file in the store, and the checksum if it is known."""

    name: str
    file: str
    start: int
    stop: int
    digest: str | None


@lru_cache(maxsize=16)
def part_cache(directory: Path, limit_bytes: int) -> PartCache:
    """The cache of a directory; one object for all stores of a process."""
    return PartCache(directory, limit_bytes)


class BucketShards:
    """The shards of one version of a store in a bucket."""

    def __init__(self, home: BucketHome, manifest: Manifest, cache_dir: Path | None, cache_bytes: int) -> None:
        self.home, self.manifest = home, manifest
        self.cache_dir, self.cache_bytes = cache_dir, cache_bytes
        self.cache = part_cache((cache_dir or default_cache_directory()) / "parts", cache_bytes)
        self._objects: dict[str, ObjectInfo] = {}
        self._pool: FetchPool[pa.Buffer] = FetchPool(FETCH_THREADS)
        self._layouts: dict[int, ShardLayout] = {}
        self._told = False

    def check(self) -> None:
        """Look at the sizes of all objects with one listing: every shard has to be there, whole."""
        prefix = self.home.key(SHARDS) + "/"
        found = {f"{SHARDS}/{info.key[len(prefix) :]}": info for info in self.home.bucket.objects(prefix)}
        for entry in dict.fromkeys(self.manifest.shards):
            for file, size in ((entry.file, entry.bytes), (entry.index_file, entry.index_bytes)):
                info = found.get(file)
                if info is None:
                    raise DataError(
                        "this shard is missing in the bucket, though the manifest names it: the store was uploaded in "
                        "part, or the shard was deleted; upload the store again, manifest.json last, or open another "
                        "version",
                        file=self.home.place(file),
                    )
                if info.size != size:
                    raise DataError(
                        f"this object has {info.size} bytes, expected {size}: it was uploaded in part, or replaced; "
                        "upload the store again, manifest.json last",
                        file=self.home.place(file),
                    )
        self._objects = found

    def lengths(self, number: int) -> npt.NDArray[np.int32]:
        """Tokens of each row of a shard, as a view of its index."""
        return self.layout(number).lengths

    def request(self, pieces: Iterable[tuple[int, int]]) -> int:
        """Begin to fetch pieces of shards, given as (shard, piece), unless they are in the cache; the bytes of all."""
        wanted = list(pieces)
        self.fetch_layouts({shard for shard, _ in wanted})
        total = 0
        for part in {self.part(shard, piece) for shard, piece in wanted}:
            nbytes = part.stop - part.start
            total += nbytes
            if not self.cache.has(part.name, nbytes):
                self._pool.request(part.name, nbytes, partial(self._get, part))
        return total

    def has(self, shard: int, piece: int) -> bool:
        """True if a piece is in the cache."""
        part = self.part(shard, piece)
        return self.cache.has(part.name, part.stop - part.start)

    def fetch_layouts(self, numbers: Iterable[int]) -> None:
        """Fetch what says where the pieces of shards are, of several shards at once."""
        missing = [number for number in numbers if number not in self._layouts]
        if len(missing) == 1:
            self.layout(missing[0])
        if len(missing) < 2:
            return
        for number in missing:
            for part in self._layout_parts(number):
                self._pool.request(part.name, part.stop - part.start, partial(self._get, part))
        for number in missing:
            self.layout(number)

    def known_layout(self, number: int) -> ShardLayout | None:
        """The same, if it was fetched already."""
        return self._layouts.get(number)

    def layout(self, number: int) -> ShardLayout:
        """Places of the pieces of a shard."""
        found = self._layouts.get(number)
        if found is None:
            entry = self.manifest.shards[number]
            index, *sums = [self._take(part) for part in self._layout_parts(number)]
            found = self._layouts[number] = self._read_layout(entry, index, sums[0] if sums else None)
        return found

    def part(self, number: int, piece: int) -> ObjectPart:
        """The part that holds a piece."""
        entry, sums = self.manifest.shards[number], self.layout(number).sums
        if sums is None:
            return ObjectPart(f"{entry.name}.arrow", entry.file, 0, entry.bytes, entry.name)
        start, length, digest = sums.pieces[piece]
        return ObjectPart(f"{entry.name}.{piece}", entry.file, start, start + length, digest)

    def read(self, number: int, piece: int) -> pa.RecordBatch:
        """A piece as views of the cached part."""
        layout = self.layout(number)
        data = self._take(self.part(number, piece))
        if layout.sums is None:
            return pa.ipc.open_file(pa.BufferReader(data)).get_batch(piece)
        return pa.ipc.read_record_batch(data, self.manifest.schema)

    @property
    def has_sums(self) -> bool:
        """True if the places of all pieces are known without fetching whole shards."""
        return all(entry.sums_file in self._objects for entry in self.manifest.shards)

    def read_ranges(self, number: int, ranges: Sequence[tuple[int, int]]) -> list[Any]:
        """Ranges of a shard, past the cache and without checksums."""
        file = self.manifest.shards[number].file
        with self._naming(file):
            key, etag = self.home.key(file), self._objects[file].etag
            found = self.home.bucket.read_ranges(key, ranges, etag=etag, together_bytes=0)
        self.cache.fetched_bytes += sum(stop - start for start, stop in ranges)
        return found

    def value_positions(self, number: int, column: str) -> npt.NDArray[np.int64]:
        """Position in a shard of the first token of each piece. Kept in the cache: it takes a request a piece."""
        sums = self.layout(number).sums
        assert sums is not None
        entry = self.manifest.shards[number]
        name = f"{entry.name}.{xxhash.xxh3_64_hexdigest(column.encode())}.places"
        data = self.cache.get(name, 8 * len(sums.pieces), lambda: [self._find_values(number, column).tobytes()])
        return np.frombuffer(data, "<i8")

    def _find_values(self, number: int, column: str) -> npt.NDArray[np.int64]:
        entry, layout = self.manifest.shards[number], self.layout(number)
        assert layout.sums is not None
        pieces = [(start, length) for start, length, _ in layout.sums.pieces]
        heads = self.read_ranges(number, [(start, start + min(HEAD_BYTES, length)) for start, length in pieces])
        offsets: list[tuple[int, int]] = []
        found: list[int] = []
        for (start, length), head in zip(pieces, heads):

            def read_more(size: int, start: int = start) -> Any:
                return self.read_ranges(number, [(start, start + size)])[0]

            try:
                offset, values = find_values(head, length, self.manifest.schema, column, read_more)
            except pa.ArrowException as error:
                raise self._damaged(entry.file, str(error)) from error
            found.append(start + values)
            if offset >= 0:
                offsets.append((start + offset, start + offset + 4))
        if any(any(bytes(first)) for first in self.read_ranges(number, offsets)):
            raise self._damaged(entry.file, "rows do not begin at their first value")
        return np.array(found, "<i8")

    def verify(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Compare the checksums of all objects; reads all of them, and keeps none."""
        entries, done = list(dict.fromkeys(self.manifest.shards)), 0
        total = sum(entry.bytes + entry.index_bytes for entry in entries)
        for entry in entries:
            for file, digest in ((entry.file, entry.name), (entry.index_file, entry.index_checksum)):
                summed = xxhash.xxh3_128()
                for chunk in self._chunks(ObjectPart("", file, 0, self._objects[file].size, None)):
                    summed.update(chunk)
                    done += len(chunk)
                    if progress is not None:
                        progress(done, total)
                if summed.hexdigest() != digest:
                    raise self._damaged(file, f"its checksum is {summed.hexdigest()} and was {digest}")

    def forget(self) -> None:
        """Drop what was requested ahead."""
        self._pool.forget()

    def close(self) -> None:
        self._pool.close()
        self._layouts = {}

    def _layout_parts(self, number: int) -> list[ObjectPart]:
        entry = self.manifest.shards[number]
        digest = entry.index_checksum
        parts = [ObjectPart(f"{digest}.index", entry.index_file, 0, entry.index_bytes, digest)]
        if (info := self._objects.get(entry.sums_file)) is not None:
            name = f"{entry.name}.{digest[:16]}.sums"
            parts.append(ObjectPart(name, entry.sums_file, 0, info.size, None))
        return parts

    def _read_layout(self, entry: ShardEntry, index: pa.Buffer, summed: pa.Buffer | None) -> ShardLayout:
        sums = None
        if summed is not None:
            try:
                sums = PieceSums.from_bytes(summed.to_pybytes())
            except ValueError as error:
                raise DataError(
                    f"the checksums of a shard are damaged: {error}; delete this object to fetch the shard whole",
                    file=self.home.place(entry.sums_file),
                ) from error
        elif not self._told:
            self._told = True
            log.info(
                "%s has no checksums of pieces, as other tools upload it: shards of %d bytes are fetched whole",
                self.home.shown,
                entry.bytes,
            )
        numbers = np.frombuffer(index, "<i4")
        rows = entry.rows if self.manifest.tokens_column is not None else 0
        counts = numbers[rows:]
        if int(counts.sum(dtype=np.int64)) != entry.rows or (sums is not None and len(sums.pieces) != len(counts)):
            raise self._damaged(entry.index_file, "its index belongs to another shard")
        return ShardLayout(numbers[:rows], [0, *np.cumsum(counts, dtype=np.int64).tolist()], sums)

    def _take(self, part: ObjectPart) -> pa.Buffer:
        return self._pool.take(part.name, partial(self._get, part))

    def _get(self, part: ObjectPart) -> pa.Buffer:
        """A part from the cache, or fetched into it; what arrives damaged is fetched once more."""
        for attempt in range(2):
            try:
                return self.cache.get(part.name, part.stop - part.start, partial(self._chunks, part), part.digest)
            except DamagedPartError as error:
                if attempt:
                    raise self._damaged(part.file, str(error)) from error
                log.warning("%s: %s; it is fetched again", self.home.place(part.file), error)
        raise AssertionError("unreachable")

    def _chunks(self, part: ObjectPart) -> Iterator[Any]:
        info, key = self._objects[part.file], self.home.key(part.file)
        with self._naming(part.file):
            for start in range(part.start, part.stop, PART_BYTES):
                yield self.home.bucket.read(key, start, min(start + PART_BYTES, part.stop), etag=info.etag)

    @contextmanager
    def _naming(self, file: str) -> Iterator[None]:
        """Say of an object that is another one now what that means for a store."""
        try:
            yield
        except ChangedObjectError as error:
            raise ChangedObjectError(
                "this shard was replaced or deleted in the bucket while the store was read, by another upload or by "
                "pruning its version; open the store again, or restore the object",
                file=self.home.place(file),
            ) from error

    def _damaged(self, file: str, why: str) -> DataError:
        return DataError(
            f"this shard is damaged: {why}; upload it again, or delete it and prepare the store again",
            file=self.home.place(file),
        )


class ShardLayout(NamedTuple):
    """Rows and pieces of a shard."""

    lengths: npt.NDArray[np.int32]
    """Tokens of each row."""
    starts: list[int]
    """The first row of each piece, and the row after the last."""
    sums: PieceSums | None


class BucketShard:
    """An open shard in a bucket, used as a `ShardReader`: pieces are fetched when touched, if they were not before."""

    stamp = Unchanging()

    def __init__(self, shards: BucketShards, number: int) -> None:
        self._shards, self._number = shards, number
        entry = shards.manifest.shards[number]
        self.path, self.rows = shards.home.place(entry.file), entry.rows
        self.schema: pa.Schema = shards.manifest.schema
        self.starts = shards.layout(number).starts

    def find(self, row: int) -> int:
        """The piece that holds a row."""
        return bisect_right(self.starts, row) - 1

    def batch(self, piece: int) -> pa.RecordBatch:
        with self.reading(self.starts[piece]):
            batch = self._shards.read(self._number, piece)
            batch.validate()
            if batch.num_rows != self.starts[piece + 1] - self.starts[piece]:
                raise pa.ArrowInvalid(f"a record batch has {batch.num_rows} rows, and the index has another number")
            return batch

    @contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """Turn errors about damaged bytes into DataError that names the object."""
        try:
            yield
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise DataError(
                f"this shard is damaged: {error}; upload it again, or delete it and prepare the store again",
                file=self.path,
                row=row,
            ) from error


HEAD_BYTES = 2048
"""Beginning of a piece that is read first; it nearly always holds all that is needed."""


def find_values(
    head: Any, length: int, schema: pa.Schema, column: str, read_more: Callable[[int], Any]
) -> tuple[int, int]:
    """Positions in a piece of `length` bytes of the first offset of a column of lists (-1 for none), and of its values.

    `read_more(size)` is asked for a longer beginning. The rest of the piece is memory that is never touched.
    """
    size = int.from_bytes(bytes(memoryview(head)[4:8]), "little") + 8
    if size > len(head):
        head = read_more(size)
    if not 8 < size <= length:
        raise pa.ArrowInvalid(f"a record batch of {length} bytes has metadata of {size}")
    empty = mmap.mmap(-1, length)
    empty[:size] = bytes(memoryview(head)[:size])
    whole = pa.py_buffer(empty)
    lists = pa.ipc.read_record_batch(whole, schema).column(schema.get_field_index(column))
    values = lists.values.buffers()[1]
    offsets = -1 if pa.types.is_fixed_size_list(lists.type) else lists.buffers()[1].address - whole.address
    return offsets, 0 if values is None else values.address - whole.address
