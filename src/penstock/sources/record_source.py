"""Base of the text formats: files cut into blocks, blocks parsed on any thread, errors of single records.

The schema is made from *all* of the input before the first row leaves: a scan that parses every block and keeps only
its types. It costs one more pass (a given `schema` saves it; what was read of remote files is kept for the rows, as far
as memory goes) and is why the type of a column never depends on which
rows came first. While it is going on, `next_block` returns a block without rows every now and then, so that whoever
waits sees that it is not stuck, and can stop it.

A record's row number counts all records of its file from 0, blank ones too, so in a file of lines it is the line. The
header of a CSV file is not counted.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.listing import PathLike
from penstock.files.ranges.read_ahead import WINDOW_BYTES, KeptParts, RemoteReadAhead, SharedParts, window_for
from penstock.files.ranges.remote_file import InputFile
from penstock.files.states import StateFormat
from penstock.memory.budget import parse_bytes
from penstock.memory.pool import BufferPool
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected, Source, State
from penstock.sources.blocks import BlockPosition, BlockReader, FileLayout, Pending, RawBlock, RecordSpans
from penstock.sources.file_source import PLACE, FileList, check_columns, is_schema, project, schema_mark, schema_of

_STATE = StateFormat(
    "records of files",
    "a source of text files",
    fields=PLACE | {"offset": (int,), "row": (int,), "schema": (str, None)},
)
_SCAN_BYTES = 4 << 20
_SCAN_BLOCKS = 16
_POOL_BYTES = 32 << 20
_BATCH_BYTES = 1 << 20
_INFLATED_BYTES = 64 << 20
_KEPT_SHARE, LEAST_BUDGET = 4, 256 << 20
"""Part of a memory budget for what the scan has read of remote files, and the least budget that has room for it."""
_MOST_ROW_BYTES = (1 << 31) - (1 << 20)
_RECORD_BYTES = 1 << 12
_LOOK_BYTES = 1 << 14
_BAD = (pa.ArrowInvalid, pa.ArrowTypeError, ValueError, OverflowError)

Scan = Generator[None, None, pa.Schema]
TypeScan = Generator[None, None, pa.DataType]
"""Yields after every block; returns the type of all rows, as a struct."""


class RecordSource(Source):
    """Base of the sources whose files are sequences of records in text."""

    suffixes: ClassVar[tuple[str, ...]] = ()
    format_name: ClassVar[str] = ""

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        schema: pa.Schema | None,
        columns: Sequence[str] | None = None,
        max_row_bytes: int | str,
        allow_empty: bool,
        **shown: Any,
    ) -> None:
        self._list = FileList(paths, self.suffixes)
        self._columns = check_columns(columns)
        self._schema = project(schema, self._columns, "the schema") if schema is not None else None
        self._given = schema is not None
        self._max_row_bytes = parse_bytes(max_row_bytes)
        if not 0 < self._max_row_bytes <= _MOST_ROW_BYTES:
            raise ConfigError(f"max_row_bytes must be between 1 byte and 2047 MiB, got {max_row_bytes!r}")
        self._allow_empty = allow_empty
        self._shown = {"columns": self._columns, **shown}
        self._pool = BufferPool(_POOL_BYTES)
        self._scan_bytes = _SCAN_BYTES
        self.read_ahead_bytes = WINDOW_BYTES
        """Most bytes of remote files that are requested ahead."""
        self._inflated_bytes = _INFLATED_BYTES
        """Most bytes of the next compressed files that are decompressed ahead."""
        self._kept = KeptParts(WINDOW_BYTES)
        """What the scan has read of remote files, for the rows."""
        self.shared_parts: SharedParts | None = None
        """Parts of remote files that the readers of splits share."""
        self.record_bytes = _RECORD_BYTES
        """About the length of a record, as the readers of splits have seen them; decides on requests alone."""
        self._layouts: dict[int, FileLayout] = {}
        self._mark: str | None = None
        """The schema the scan found, as the state keeps it."""
        self._scanned: Generator[Block, None, None] | None = None
        self._scanning: Scan | None = None
        self._head: Block | None = None
        self._reader: BlockReader | None = None
        self._start = BlockPosition()
        self._pending: Pending | None = None
        self._origin: Origin | None = None

    # -- implemented by formats ---------------------------------------------------------------------------------------

    def _lay_out(self, number: int) -> FileLayout:
        """Layout of a file."""
        raise NotImplementedError(type(self).__name__)

    def _parse(self, data: pa.Buffer, layout: FileLayout) -> pa.RecordBatch:
        """Whole records to a batch with the source's schema, a row for each not blank one; ValueError if any is bad."""
        raise NotImplementedError(type(self).__name__)

    def _explain(self, record: bytes, layout: FileLayout, error: Exception) -> tuple[str, str]:
        """(kind, reason) of a record that does not parse by itself."""
        raise NotImplementedError(type(self).__name__)

    def _obvious_error(self, record: pa.Buffer) -> Exception | None:
        """Error of a bad record, if it can be found in less time than parsing the record alone takes."""
        return None

    def _scan_types(self, blocks: Iterator[Block], known: pa.DataType) -> TypeScan:
        """Merges the types of the rows of some blocks into those of all rows before them."""
        raise NotImplementedError(type(self).__name__)

    def _merge_types(self, known: pa.DataType, more: pa.DataType) -> pa.DataType:
        """Types of all rows of two parts of the input; `TypeConflictError` if there is none."""
        raise NotImplementedError(type(self).__name__)

    def _typed(self, known: pa.DataType) -> pa.Schema:
        """The schema of the files, from the types of all their rows."""
        raise NotImplementedError(type(self).__name__)

    def _scan(self, blocks: Iterator[Block]) -> Scan:
        """Returns the schema that every record of the input fits; yields after every block."""
        return self._typed((yield from self._scan_types(blocks, pa.struct([]))))

    def _learn(self, found: pa.Schema) -> None:
        """Take over what the scan found, in this run or in the one that a state comes from."""
        self._schema = found

    # -- a source ----------------------------------------------------------------------------------------------------

    @property
    def files(self) -> list[InputFile]:
        """The files this source reads, in order."""
        return self._list.files

    @property
    def schema(self) -> pa.Schema:
        """The schema of every batch; scans the input the first time, unless it was given."""
        while self._schema is None:
            self._scan_on()
        return self._schema

    @property
    def has_schema(self) -> bool:
        """True if the schema is known, so that `schema` reads nothing."""
        return self._schema is not None

    def _take_schema(self, found: pa.Schema) -> None:
        """Take the schema of the files, as a scan of all of them has found it, here or elsewhere."""
        self._mark = schema_mark(found)
        self._learn(self._list.partitions.completed(found, self._columns))

    @property
    def place(self) -> BlockPosition:
        """Position of the next record."""
        return self._place()

    def layout_of(self, number: int) -> FileLayout:
        """Layout of one of the files."""
        return self._layout(number)

    def lines_can_be_found(self, number: int) -> bool:
        """True if reading may begin after any newline of a file."""
        try:
            layout = self._layout(number)
        except DataError:
            return False  # it is reported, in its place, when the rows are read
        return layout.cutter.newline_ends and not layout.begin

    def reader_of(self, number: int, place: BlockPosition, ahead: RemoteReadAhead | None = None) -> BlockReader:
        """A reader of one file alone, which it calls file 0; an empty file has no records."""
        return BlockReader(
            self.files[number : number + 1],
            lambda _: self._layout(number),
            pool=self._pool,
            max_row_bytes=self._max_row_bytes,
            allow_empty=True,
            place=place,
            stamps=self._list.stamps,
            ahead=ahead,
        )

    def next_block(self, max_bytes: int) -> Block | None:
        # The scan ends before the first rows are delivered, since decode runs on other threads.
        if self._schema is None and not self._scan_on():
            return Block(Origin(str(self._list)), b"", 0, {"records": None})
        if self._pending is not None:
            self.close()  # rows that `next_batch` has cut but not delivered come again
        raw = self._blocks().next(max_bytes)
        return self._block(raw) if raw is not None else None

    def decode(self, block: Block) -> Decoded:
        if block.meta["records"] is None:  # the schema is not known yet
            return Decoded(pa.RecordBatch.from_arrays([], schema=pa.schema([])))
        decoded = self._decode(block)
        batch = self._list.partitions.filled(decoded.batch, block.origin.file, self.schema)
        return decoded if batch is decoded.batch else replace(decoded, batch=batch)

    def _decode(self, block: Block) -> Decoded:
        records = block.meta["records"]
        if not records:
            return Decoded(self._none())
        try:
            batch = self._parse(block.data, block.meta["layout"])
        except _BAD:
            return self._rescue(block)
        return Decoded(batch, rows=tuple(RecordSpans(block).filled().tolist()) if batch.num_rows < records else None)

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        """Rows without an engine. A bad record raises in its place; the next call continues after it.

        Where no record is to blame for an error, the next call reads the same rows again: see `skip_file`.
        """
        while self._pending is None:
            place = self._place()
            block = self.next_block(_BATCH_BYTES)
            if block is None:
                return None
            try:
                decoded = self.decode(block)
                if decoded.batch.num_rows or decoded.rejected:
                    self._pending = Pending(block, decoded)
            except BaseException:  # Ctrl-C, or no memory: the block is read again
                self.close()
                self._start = place
                raise
        pending = self._pending
        try:
            batch, self._origin = pending.take(max_rows)
        finally:
            if pending.over:
                self._pending = None
        return batch

    def origin(self) -> Origin | None:
        return self._origin

    def file_bytes_read(self) -> int:
        reader = self._reader
        if reader is None:
            return self._list.bytes_before(self._start.file)
        return self._list.bytes_before(reader.place.file) + reader.file_position

    def offset_of(self, block: Block, row: int) -> int | None:
        starts = RecordSpans(block).starts
        return (block.origin.offset or 0) + int(starts[row]) if row < len(starts) else None

    def skip_file(self) -> str:
        """After an error: skip the bad record or file; returns its description."""
        return self._blocks().skip_bad()

    def fit_budget(self, nbytes: int) -> None:
        """Smaller pieces to scan, and fewer buffers to keep, if there is less memory."""
        self._scan_bytes = max(1 << 16, min(_SCAN_BYTES, nbytes // 32))
        self._pool = BufferPool(min(_POOL_BYTES, nbytes // 32))
        self.read_ahead_bytes = window_for(2 * nbytes)
        self._inflated_bytes = min(_INFLATED_BYTES, nbytes // 16) if nbytes >= LEAST_BUDGET else 0
        if not self._kept.held_bytes:
            self._kept = KeptParts(nbytes // _KEPT_SHARE if nbytes >= LEAST_BUDGET else 0)

    def memory_usage(self) -> int:
        reader, pending = self._reader, self._pending
        held = self._kept.held_bytes + (reader.held_bytes if reader is not None else 0)
        return held + self._pool.stats().free_bytes + (pending.nbytes if pending is not None else 0)

    def reset(self) -> None:
        """Back to the first record."""
        self.close()
        self._list.stamps.forget()
        self._start = BlockPosition()

    def close(self) -> None:
        """Close the open file. The next read continues at the same position."""
        self._start = self._place()
        if self._reader is not None:
            self._reader.close()
        if self._scanned is not None:
            self._scanned.close()
        self._reader = self._pending = self._scanning = self._scanned = self._head = None
        self._kept.clear()

    def state_dict(self) -> State:
        place = self._place()
        facts = {"offset": place.offset, "row": place.row, "schema": self._mark}
        return _STATE.write(self._list.state(place.file) | facts)

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        self._list.check(state)
        self.close()
        self._start = BlockPosition(state["file"], state["offset"], state["row"])
        if not self._given and state["schema"] is not None:
            self._mark, self._schema = state["schema"], None
            if is_schema(state["schema"]):
                self._learn(self._list.partitions.completed(schema_of(state["schema"]), self._columns))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _scan_on(self) -> bool:
        """Look at some more of the input; whether that was the end of it, and the schema is known now."""
        if self._scanning is None:
            head = self._first_block()
            assert self._scanned is not None
            self._head = None
            self._scanning = self._scan(chain([] if head is None else [head], self._scanned))
        try:
            for _ in range(_SCAN_BLOCKS):
                next(self._scanning)
        except StopIteration as end:
            self._scanning = self._scanned = None
            mark = schema_mark(end.value)
            if self._mark is not None and self._mark != mark:
                raise ResumeError(
                    f"the columns of {self!r} are not those it had when the state was saved; "
                    "restore the same files, or start without the state"
                ) from None
            self._take_schema(end.value)
            return True
        except BaseException:
            self._scanning = self._scanned = None
            raise
        return False

    def _place(self) -> BlockPosition:
        """The first record that has not been delivered."""
        if self._pending is not None:
            return self._pending.place()
        return self._reader.place if self._reader is not None else self._start

    def _blocks(self) -> BlockReader:
        if self._reader is None:
            ahead = RemoteReadAhead(self.files, self.read_ahead_bytes, kept=self._kept)
            self._reader = self._new_reader(self._start, ahead)
        return self._reader

    def _new_reader(self, place: BlockPosition, ahead: RemoteReadAhead) -> BlockReader:
        return BlockReader(
            self.files,
            self._layout,
            pool=self._pool,
            max_row_bytes=self._max_row_bytes,
            allow_empty=self._allow_empty,
            place=place,
            stamps=self._list.stamps,
            ahead=ahead,
            inflated_bytes=self._inflated_bytes,
        )

    def _layout(self, number: int) -> FileLayout:
        if number not in self._layouts:
            self._layouts[number] = self._lay_out(number)
        return self._layouts[number]

    def _first_block(self) -> Block | None:
        """The first block; the file stays open for the scan of the schema, which continues after it."""
        if self._scanned is None:
            self._kept.clear()
            self._scanned = self._all_blocks(self._kept)
            self._head = next(self._scanned, None)
        return self._head

    def _all_blocks(self, keeps: KeptParts | None = None) -> Generator[Block, None, None]:
        ahead = RemoteReadAhead(self.files, self.read_ahead_bytes, keeps=keeps)
        reader = self._new_reader(BlockPosition(), ahead)
        try:
            while True:
                try:
                    raw = reader.next(self._scan_bytes)
                except DataError:
                    reader.skip_bad()  # it is reported, in its place, when the rows are read
                    continue
                if raw is None:
                    return
                yield self._block(raw)
        finally:
            reader.close()

    def _block(self, raw: RawBlock) -> Block:
        place = raw.place
        origin = Origin(str(self.files[place.file]), place.row, place.offset)
        meta = {"records": raw.records, "file": place.file, "layout": self._layout(place.file)}
        return Block(origin, raw.data, raw.data.size, meta)

    def _rescue(self, block: Block) -> Decoded:
        """Parse what can be parsed: the records without an obvious error, halved until each bad one stands alone."""
        spans, layout = RecordSpans(block), block.meta["layout"]
        good: list[pa.RecordBatch] = []
        rows: list[int] = []
        rejected: list[Rejected] = []
        left: list[int] = []
        for number in spans.filled().tolist():
            data = spans.slice(number, number)
            error = self._obvious_error(data)
            if error is None:
                left.append(number)
            else:
                rejected.append(self._reject(block, number, spans, data, error))
        todo = [left] if left else []
        while todo:
            part = todo.pop()
            data = spans.gather(part)
            try:
                batch = self._parse(data, layout)
            except _BAD as error:
                if len(part) == 1:
                    rejected.append(self._reject(block, part[0], spans, data, error))
                else:
                    middle = len(part) // 2
                    todo += [part[middle:], part[:middle]]
                continue
            good.append(batch)
            rows += part
        rejected.sort(key=lambda one: one.row or 0)
        return Decoded(pa.concat_batches(good) if good else self._none(), tuple(rejected), tuple(rows))

    def _reject(self, block: Block, row: int, spans: RecordSpans, data: pa.Buffer, error: Exception) -> Rejected:
        record = data.to_pybytes().rstrip(b"\r\n")
        wrong_bytes = _what_is_not_utf8(record)
        if wrong_bytes is not None:
            kind, reason = "invalid UTF-8", wrong_bytes
        else:
            kind, reason = self._explain(record, block.meta["layout"], error)
        return Rejected(
            file=block.origin.file,
            row=block.origin.row + row,
            offset=(block.origin.offset or 0) + int(spans.starts[row]),
            stage=f"reading {self.format_name}",
            kind=kind,
            reason=reason,
            data=record[: 1 << 20],
        )

    def _none(self) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in self.schema], schema=self.schema)

    def __repr__(self) -> str:
        options = [f", {name}={value!r}" for name, value in self._shown.items() if value is not None]
        return f"{type(self).__name__}({self._list}{''.join(options)})"


def check_utf8(data: pa.Buffer) -> None:
    """Raise ValueError if the bytes are not UTF-8 throughout. Costs a pass at several GB/s."""
    view = np.frombuffer(data, np.uint8)
    if not data.size or (view[:_LOOK_BYTES].max() < 0x80 and view.max() < 0x80):
        return
    offsets = pa.py_buffer(np.array([0, data.size], np.int64))
    pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, data]).cast(pa.large_string())


def _what_is_not_utf8(record: bytes) -> str | None:
    """The first byte of a record that is not UTF-8, in words."""
    try:
        record.decode()
    except UnicodeDecodeError as bad:
        return f"not valid UTF-8: byte {record[bad.start]:#04x} at position {bad.start}"
    return None
