"""Splits: parts of the input that can be read independently, in any order, found without reading the data.

    splits = split_input(source, 4 << 20)
    with closing(open_split(source, splits[7])) as reader:
        cut = reader.cut(max_records=1000, max_bytes=1 << 20)
        rows = reader.decode(cut)

Lines (text, JSON Lines) are cut by bytes: a line belongs to the split in which it begins. Parquet is cut
between row groups, Arrow files between record batches, a token store between any two rows of a shard. A compressed
file, and one whose records cannot be found from the middle (CSV, JSON), is one split; it is still read piece by
piece. Of Parquet and Arrow files the footers are read, of all others nothing but their sizes. Tables in memory are cut
between any two rows, logs of messages between partitions; a source that can only be read from its beginning on is one
split.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError
from penstock.files.compression import open_input
from penstock.files.filesystems import is_access_error
from penstock.files.listing import split_suffix
from penstock.files.ranges.read_ahead import RemoteReadAhead, parquet_metadata
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.files.records import first_newline
from penstock.pipeline.prefetch import map_ahead
from penstock.pipeline.stages import Block, Origin, Rejected
from penstock.sources.blocks import BlockPosition, BlockReader, RecordSpans
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.file_source import FileSource, OpenedFile
from penstock.sources.jsonl import JsonlSource
from penstock.sources.logs.base import LogSource, OpenedPartition
from penstock.sources.memory import IteratorSource, MemorySource
from penstock.sources.record_source import RecordSource
from penstock.sources.sql import RangedRows, SqlSource
from penstock.sources.store import StoreSource

_READ_BYTES = 1 << 20
_LEAST_LOOK, _LOOK_BYTES = 1 << 9, 1 << 16
_IN_MEMORY = "<memory>"
_DAMAGED = (pa.ArrowException, OSError, EOFError)


@dataclass(frozen=True, slots=True)
class InputSplit:
    """Bytes, or rows, `start` to `stop` of one file; `stop` is None where the end is not known before it is reached."""

    file: int
    start: int
    stop: int | None
    nbytes: int
    """About how much there is to read."""


@dataclass(frozen=True, slots=True)
class RecordRun:
    """Some records that follow one another, not decoded yet."""

    data: Any
    records: int
    nbytes: int
    first: int
    """Start of the first of them in the file: a byte (after decompression), or a row."""


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Rows of a run of records, the start of each in the file, and records that are no rows."""

    batch: pa.RecordBatch
    places: npt.NDArray[np.int64]
    rejected: tuple[Rejected, ...] = ()


class SplitReader(Protocol):
    """Reader of an open split."""

    by_bytes: bool
    """True if positions are bytes, not rows."""

    @property
    def at(self) -> int:
        """Records taken so far, counted from its start."""
        ...

    def cut(self, max_records: int, max_bytes: int) -> RecordRun | None:
        """The next records, up to a number of records or bytes; None at the end.

        What is cut depends on where it begins and on the limits alone. A damaged place raises `DataError` after the
        last record before it; `skip_bad` continues after it.
        """
        ...

    def decode(self, cut: RecordRun) -> SplitRows: ...

    def skip_bad(self) -> str:
        """Continue after an error; returns a short description of what was skipped."""
        ...

    def close(self) -> None: ...


def input_files(source: Any) -> list[tuple[str, int]]:
    """(name, bytes) of everything a source reads; `InputSplit.file` counts through this list."""
    if isinstance(source, StoreSource):
        return [(source.shard_place(number), shard.bytes) for number, shard in enumerate(source.manifest.shards)]
    if isinstance(source, MemorySource):
        return [(_IN_MEMORY, source.nbytes)]
    if isinstance(source, SqlSource) and source.has_key:
        return [(source.name, max(1, source.nbytes))]
    if isinstance(source, LogSource):
        return [(source.partition_name(index), 1) for index in range(source.partition_count)]  # sizes are not known
    if not isinstance(source, RecordSource | FileSource):
        return [(repr(source), 1)]  # its size is not known
    return [(str(path), path.stat().st_size) for path in source.files]


def has_files(source: Any) -> bool:
    """True if the parts of a source are files, which may change."""
    return isinstance(source, StoreSource | RecordSource | FileSource)


def split_input(source: Any, target_bytes: int) -> list[InputSplit]:
    """The input in splits of about `target_bytes`, as far as its format allows. Empty files have none."""
    files = input_files(source)
    if isinstance(source, StoreSource):
        shards = enumerate(source.manifest.shards)
        return [part for n, shard in shards for part in _row_ranges(n, shard.rows, shard.bytes, target_bytes)]
    if isinstance(source, MemorySource):
        rows = source.size_hint() or 0
        return _row_ranges(0, rows, source.nbytes, target_bytes) if rows else []
    if isinstance(source, SqlSource) and source.has_key:
        bounds = source.split(target_bytes)
        ends = [*range(0, bounds.rows, bounds.rows_each), bounds.rows]
        each = max(1, source.nbytes // max(1, bounds.rows))
        return [InputSplit(0, low, high, (high - low) * each) for low, high in pairwise(ends)]
    if not has_files(source):
        return [InputSplit(number, 0, None, size) for number, (_, size) in enumerate(files)]
    numbers = [number for number, (_, size) in enumerate(files) if size]
    if isinstance(source, ParquetSource | ArrowSource):
        groups = _row_groups if isinstance(source, ParquetSource) else _record_batches
        found = map_ahead(lambda number: groups(source.files[number]), numbers)
        return [
            part
            for number, counted in zip(numbers, found)
            for part in _joined(number, counted, files[number][1], target_bytes)
        ]
    if isinstance(source, FileSource):
        return [InputSplit(number, 0, None, files[number][1]) for number in numbers]
    return [part for number in numbers for part in _byte_ranges(source, number, files[number][1], target_bytes)]


def open_split(source: Any, split: InputSplit, at: int = 0) -> SplitReader:
    """A reader of one split, from `at` on: an earlier `SplitReader.at`."""
    if isinstance(source, LogSource):
        return _LogReader(source, split, at)
    return _LineReader(source, split, at) if isinstance(source, RecordSource) else _RowReader(source, split, at)


def _byte_ranges(source: RecordSource, number: int, size: int, target_bytes: int) -> list[InputSplit]:
    path = source.files[number]
    if split_suffix(path)[1] or not source.lines_can_be_found(number):
        return [InputSplit(number, 0, None, size)]
    count = max(1, -(-size // target_bytes))
    bounds = [size * part // count for part in range(count + 1)]
    return [InputSplit(number, low, high, high - low) for low, high in pairwise(bounds)]


def _row_ranges(number: int, rows: int, nbytes: int, target_bytes: int) -> list[InputSplit]:
    count = max(1, min(rows, -(-nbytes // target_bytes)))
    bounds = [rows * part // count for part in range(count + 1)]
    pairs = pairwise(bounds)
    return [InputSplit(number, low, high, max(1, nbytes * (high - low) // rows)) for low, high in pairs if high > low]


def _joined(number: int, groups: Sequence[tuple[int, int]] | None, size: int, target_bytes: int) -> list[InputSplit]:
    """Neighbouring groups of (rows, bytes) together, until they are large enough."""
    if groups is None:
        return [InputSplit(number, 0, None, size)]
    found: list[InputSplit] = []
    start = stop = nbytes = 0
    for at, (rows, more) in enumerate(groups):
        stop, nbytes = stop + rows, nbytes + more
        if stop > start and (nbytes >= target_bytes or at == len(groups) - 1):
            found.append(InputSplit(number, start, stop, max(1, nbytes)))
            start, nbytes = stop, 0
    return found


def _row_groups(path: InputFile) -> list[tuple[int, int]] | None:
    try:
        metadata = parquet_metadata(path)
    except _DAMAGED as error:
        if isinstance(path, RemoteFile) and is_access_error(error):
            raise  # other splits than before would be found without it
        return None  # reported when it is read
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


def _record_batches(path: InputFile) -> list[tuple[int, int]] | None:
    """None for streams, for compressed files, which list nothing, and for remote ones, where each is a request."""
    if split_suffix(path)[1] or isinstance(path, RemoteFile):
        return None
    try:
        with pa.memory_map(str(path)) as file:
            reader = pa.ipc.open_file(file)
            batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate()  # or a damaged one could be counted beyond its end
            return [(batch.num_rows, batch.nbytes) for batch in batches]
    except _DAMAGED:
        return None  # a stream, or damaged, which is reported when it is read


class _LineReader:
    """Records in text. Places are bytes."""

    by_bytes = True

    def __init__(self, source: RecordSource, split: InputSplit, at: int) -> None:
        self._source, self._split, self._at = source, split, at
        self._path = source.files[split.file]
        # Most last records of a split are read with it, where those seen so far are like them.
        self._look = min(_LOOK_BYTES, source.record_bytes, max(_LEAST_LOOK, split.nbytes))
        self._ahead = RemoteReadAhead(
            [self._path],
            source.read_ahead_bytes,
            until=split.stop,
            record_bytes=self._look,
            shared=source.shared_parts if split.stop is not None else None,
        )
        self._reader: BlockReader | None = None
        self._data = pa.py_buffer(b"")
        self._first = 0
        """Offset of the data in the file."""
        self._starts = self._stops = np.empty(0, np.int64)
        self._used = 0
        self._wanted = _READ_BYTES

    @property
    def at(self) -> int:
        return self._at

    def cut(self, max_records: int, max_bytes: int) -> RecordRun | None:
        parts: list[pa.Buffer] = []
        records = nbytes = 0
        first = self._split.start + self._at
        self._wanted = self._ahead.first_bytes = max_bytes + self._look
        while records < max_records and nbytes < max_bytes:
            try:
                if not self._load():
                    break
            except DataError:
                if records:
                    break  # the next call raises again
                raise
            begin = self._split.start + self._at - self._first
            if not records:
                first = self._first + begin
            ends = self._stops[self._used : self._used + max_records - records] - begin
            taken = min(len(ends), int(np.searchsorted(ends, max_bytes - nbytes)) + 1)
            parts.append(self._data.slice(begin, int(ends[taken - 1])))
            records, nbytes = records + taken, nbytes + int(ends[taken - 1])
            self._used += taken
            self._at += int(ends[taken - 1])
        if not records:
            return None
        data = parts[0] if len(parts) == 1 else pa.py_buffer(b"".join(parts))
        return RecordRun(data, records, nbytes, first)

    def decode(self, cut: RecordRun) -> SplitRows:
        number = self._split.file
        meta = {"records": cut.records, "file": number, "layout": self._source.layout_of(number)}
        block = Block(Origin(str(self._path), 0, cut.first), cut.data, cut.nbytes, meta)
        alone = isinstance(self._source, JsonlSource) and not self._source.has_schema
        decoded = self._source.decode_alone(block) if alone else self._source.decode(block)  # type: ignore[attr-defined]
        starts = RecordSpans(block).starts
        places = starts[: decoded.batch.num_rows] if decoded.rows is None else starts[list(decoded.rows)]
        return SplitRows(
            decoded.batch,
            cut.first + np.asarray(places, np.int64),
            # Its row number in the file is not known.
            tuple(replace(rejected, row=None) for rejected in decoded.rejected),
        )

    def skip_bad(self) -> str:
        assert self._reader is not None
        reason = self._reader.skip_bad()
        place = self._reader.place
        if not place.file:
            self._at = place.offset - self._split.start
        return reason

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._ahead.close()

    def _load(self) -> bool:
        """True if a record is left; reads more if needed."""
        if self._used < len(self._starts):
            return True
        stop = self._split.stop
        if self._reader is None and not self._open():
            return False
        assert self._reader is not None
        here = self._reader.place
        most = min(_READ_BYTES, self._wanted) if isinstance(self._path, RemoteFile) else _READ_BYTES
        left = most if stop is None else min(most, stop - here.offset)
        if here.file or left <= 0:
            self.close()
            return False
        try:
            raw = self._reader.next(left)
        except DataError as error:
            raise DataError(error.reason, file=str(self._path), offset=error.offset) from error
        if raw is None:
            return False
        self._data, self._first, self._used = raw.data, raw.place.offset, 0
        cutter = self._source.layout_of(self._split.file).cutter
        self._starts, self._stops = cutter.spans(np.frombuffer(raw.data, np.uint8))
        if len(self._starts):
            mean = len(raw.data) // len(self._starts)
            self._source.record_bytes = max(_LEAST_LOOK, (7 * self._source.record_bytes + mean) // 8)
        if stop is not None:
            mine = int(np.searchsorted(self._starts, stop - self._first))
            self._starts, self._stops = self._starts[:mine], self._stops[:mine]
        self._at = raw.place.offset - self._split.start  # after a byte order mark, or the header of a CSV
        return len(self._starts) > 0

    def _open(self) -> bool:
        begin = self._split.start + self._at
        if self._split.start and not self._at:
            found = self._first_line()
            if found is None:
                return False
            begin = found
        self._at = begin - self._split.start
        self._reader = self._source.reader_of(self._split.file, BlockPosition(0, begin), self._ahead)
        return True

    def _first_line(self) -> int | None:
        open_at = self._ahead.open if isinstance(self._path, RemoteFile) else None
        return _first_line(self._path, self._split, open_at)


def line_start(source: RecordSource, split: InputSplit) -> int | None:
    """Start of the first record of a split of text; None if none begins there."""
    return _first_line(source.files[split.file], split, None) if split.start else 0


def _first_line(path: InputFile, split: InputSplit, open_at: Callable[[int, int], Any] | None) -> int | None:
    """Start of the first line of a split: after the first newline at or after the byte before it."""
    at, stop = split.start - 1, split.stop
    reader: Any = open_input(path, at) if open_at is None else open_at(0, at)
    try:
        scratch = np.empty(_LOOK_BYTES, np.uint8)
        while (stop is None or at < stop - 1) and (got := reader.readinto(memoryview(scratch))):  # type: ignore[arg-type]
            found = first_newline(scratch[:got])
            if found:
                begin = at + found
                return begin if stop is None or begin < stop else None
            at += got
    finally:
        reader.close()
    return None


class _RowReader:
    """Rows of columnar files and of stores. Places are rows."""

    by_bytes = False

    def __init__(self, source: Any, split: InputSplit, at: int) -> None:
        self._source, self._split, self._at = source, split, at
        self._opened: OpenedFile | None = None
        rows = (split.stop or 0) - split.start
        self._row_bytes = max(1, -(-split.nbytes // rows)) if rows > 0 else 0

    @property
    def at(self) -> int:
        return self._at

    def cut(self, max_records: int, max_bytes: int) -> RecordRun | None:
        first, stop = self._split.start + self._at, self._split.stop
        wanted = max_records
        if stop is not None:
            wanted = min(wanted, max(1, -(-max_bytes // self._row_bytes)), stop - first)
        batches: list[pa.RecordBatch] = []
        left = wanted
        try:
            while left > 0 and (batch := self._here().next(left)) is not None:
                batches.append(batch)
                left -= batch.num_rows
                self._at += batch.num_rows
        except DataError:
            if not batches:
                raise
            # What came before the bad row is delivered; the next call raises again.
        except _DAMAGED as error:
            self.close()
            self._at = first - self._split.start
            raise self._told(error, first + wanted - left) from error
        if not batches:
            self.close()
            return None
        nbytes = (wanted - left) * self._row_bytes or sum(batch.nbytes for batch in batches)
        data = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        return RecordRun(data, wanted - left, nbytes, first)

    def decode(self, cut: RecordRun) -> SplitRows:
        batch, kept = cut.data, None
        if isinstance(self._source, FileSource):
            batch, kept = self._source.rows_of(batch, self._source.files[self._split.file], cut.first)
        return SplitRows(batch, cut.first + (np.arange(cut.records, dtype=np.int64) if kept is None else kept))

    def skip_bad(self) -> str:
        if isinstance(self._source, IteratorSource):
            before = self._source.row
            reason = self._source.skip_file()
            self._at += self._source.row - before
            return reason
        self.close()
        self._split = replace(self._split, stop=self._split.start + self._at)
        return "the rest of a row group or record batch is unreadable"

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def _here(self) -> OpenedFile:
        if self._opened is None:
            opened = _open_rows(self._source, self._split.file)
            first = self._split.start + self._at
            if first and opened.skip(first) < first:
                opened.close()
                name = input_files(self._source)[self._split.file][0]
                raise DataError(f"the file has less than {first} rows now; it was changed", file=name)
            self._opened = opened
        return self._opened

    def _told(self, error: Exception, row: int) -> Exception:
        if not isinstance(self._source, FileSource):
            return error
        return self._source._damaged(error, self._source.files[self._split.file], row)


class _LogReader:
    """Messages of one partition of a log. Places are offsets; `at` is the next offset plus 1."""

    by_bytes = False

    def __init__(self, source: LogSource, split: InputSplit, at: int) -> None:
        self._source, self._split, self._at = source, split, at
        self._opened: OpenedPartition | None = None

    @property
    def at(self) -> int:
        return self._at

    def cut(self, max_records: int, max_bytes: int) -> RecordRun | None:
        if self._opened is None:
            self._opened = self._source.open_partition(self._split.file, self._at)
        messages = self._opened.take(max_records, max_bytes)
        if not len(messages):
            self.close()
            return None
        self._at = messages.following + 1
        return RecordRun(messages, len(messages), max(1, messages.nbytes), self._opened.place(messages.offsets[0]))

    def decode(self, cut: RecordRun) -> SplitRows:
        assert self._opened is not None
        return SplitRows(*self._opened.decode(cut.data))

    def skip_bad(self) -> str:
        raise NotImplementedError("bad messages are found when they are decoded")

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None


def _open_rows(source: Any, number: int) -> OpenedFile:
    if isinstance(source, StoreSource):
        return _Shard(source, number)
    if isinstance(source, MemorySource):
        return _MemoryRows(source)
    if isinstance(source, SqlSource) and source.has_key:
        return RangedRows(source)
    return source._open(source.files[number]) if isinstance(source, FileSource) else _SequentialRows(source)


class _MemoryRows:
    """Rows in memory, from row to row."""

    def __init__(self, source: MemorySource) -> None:
        self._source, self._row = source, 0

    def skip(self, rows: int) -> int:
        self._row = min(rows, self._source.size_hint() or 0)
        return self._row

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        batch = self._source.rows_from(self._row, max_rows)
        self._row += 0 if batch is None else batch.num_rows
        return batch

    def held_bytes(self) -> int:
        return 0

    def close(self) -> None:
        return


class _SequentialRows:
    """Rows of a source that can only be read from its beginning on."""

    def __init__(self, source: Any) -> None:
        self._source = source
        reset = getattr(source, "reset", None)
        if reset is not None:
            reset()
        elif getattr(source, "_was_read", False):
            raise ConfigError(f"{source!r} has no reset(), so it can be read only once; add one to begin again")
        with contextlib.suppress(AttributeError):
            source._was_read = True

    def skip(self, rows: int) -> int:
        if isinstance(self._source, IteratorSource):
            self._source.pass_over(rows)
            return rows
        left = rows
        while left and (batch := self._source.next_batch(left)) is not None:
            left -= batch.num_rows
        return rows - left

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        while (batch := self._source.next_batch(max_rows)) is not None:
            if batch.num_rows:
                return batch
        return None

    def held_bytes(self) -> int:
        return 0

    def close(self) -> None:
        if hasattr(self._source, "close"):
            self._source.close()


class _Shard:
    """A shard of a store, from row to row."""

    def __init__(self, source: StoreSource, number: int) -> None:
        self._reader = source.open_shard(number)
        self._row = 0
        self._piece: tuple[int, pa.RecordBatch] | None = None

    def skip(self, rows: int) -> int:
        self._row = min(rows, self._reader.rows)
        return self._row

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self._reader.rows:
            return None
        number = self._reader.find(self._row)
        if self._piece is None or self._piece[0] != number:
            self._piece = number, self._reader.batch(number)
        batch = self._piece[1].slice(self._row - self._reader.starts[number], max_rows)
        self._row += batch.num_rows
        return batch

    def held_bytes(self) -> int:
        return self._piece[1].nbytes if self._piece is not None else 0

    def close(self) -> None:
        self._piece = None
