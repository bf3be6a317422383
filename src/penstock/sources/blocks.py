"""Cutting files into blocks of whole records, into reused buffers, without looking inside the records."""

from __future__ import annotations

import io
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError
from penstock.files.checksums import FileStamps
from penstock.files.compression import ByteReader, DamagedStreamError, disk_position, open_input
from penstock.files.ranges.read_ahead import WINDOW_BYTES, RemoteReadAhead
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.files.records import Cutter, first_newline
from penstock.memory.budget import format_bytes
from penstock.memory.pool import BufferPool, PooledBuffer
from penstock.pipeline.stages import Block, Decoded, Origin
from penstock.sources.compressed_ahead import CompressedAhead

Bytes = npt.NDArray[np.uint8]
_NOTHING: Bytes = np.empty(0, np.uint8)
_BOM = b"\xef\xbb\xbf"
_LEAST_STEP, _STEP = 1 << 10, 1 << 20
"""Bytes to read at a time of a record that is longer than a block."""


@dataclass(frozen=True, slots=True)
class BlockPosition:
    """The next record to read: which file, how many bytes (after decompression) and records into it."""

    file: int = 0
    offset: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Layout of a file: the offset of its first record, and how records are separated."""

    begin: int
    cutter: Cutter


@dataclass(frozen=True, slots=True)
class RawBlock:
    """Whole records of one file."""

    place: BlockPosition
    data: pa.Buffer
    records: int


class BlockReader:
    """Reads files one after the other, a block of whole records at a time.

    A record longer than `max_row_bytes` is an error before it is read to its end, so that one endless line cannot take
    all memory. Errors are raised after the last good record, by the call after the one that returned it, and
    again by every further call until `skip_bad` moves past it: the long record where a newline ends it, or the rest of
    the file. Up to `inflated_bytes` of the next compressed files are decompressed meanwhile.
    """

    def __init__(
        self,
        files: Sequence[InputFile],
        layout: Callable[[int], FileLayout],
        *,
        pool: BufferPool,
        max_row_bytes: int,
        allow_empty: bool,
        place: BlockPosition,
        stamps: FileStamps | None = None,
        ahead: RemoteReadAhead | None = None,
        inflated_bytes: int = 0,
    ) -> None:
        self._files, self._layout, self._pool = files, layout, pool
        self._stamps = stamps if stamps is not None else FileStamps()
        self._ahead = ahead if ahead is not None else RemoteReadAhead(files, WINDOW_BYTES)
        self._inflated = CompressedAhead(files, inflated_bytes, self._stamps)
        self._max_row_bytes, self._allow_empty = max_row_bytes, allow_empty
        self.place = place
        self._reader: ByteReader | None = None
        self._goes_on = False
        """True after the first block: who only looks at that one needs no other file."""
        self._tail = _NOTHING
        """Bytes read after the last whole record."""
        self._ended = False
        self._trouble: tuple[str, Exception | None] | None = None
        """Error of the record after the last good one."""
        self._too_long = False

    def next(self, max_bytes: int) -> RawBlock | None:
        """Up to about `max_bytes` of whole records (one record may be longer), or None after the last file."""
        while self.place.file < len(self._files):
            try:
                if self._reader is None:
                    self._open()
                if self._goes_on:
                    self._inflated.begin_after(self.place.file)
                block = self._read(max(max_bytes, 1))
            except BaseException:
                self.close()  # what was read and not delivered is read again
                raise
            if block is not None:
                self._goes_on = True
                return block
            self._next_file()
        return None

    def skip_bad(self) -> str:
        """Continue after an error; returns a short description of what was skipped."""
        if self._too_long and self._cutter.newline_ends:
            self._skip_line()
            return "longer than max_row_bytes"
        self._next_file()
        return "the rest of the file is unreadable"

    def close(self) -> None:
        self._close_file()
        self._ahead.close()
        self._inflated.close()

    def _close_file(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def held_bytes(self) -> int:
        return self._tail.nbytes + self._ahead.held_bytes + self._inflated.held_bytes

    @property
    def file_position(self) -> int:
        """Bytes of the current file, as it is on disk, that were read."""
        return disk_position(self._reader) if self._reader is not None else 0

    # -- one file ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        number = self.place.file
        self._stamps.note(self._files[number])
        layout = self._layout(number)
        self._cutter = layout.cutter
        if self.place.offset < layout.begin:
            self.place = BlockPosition(number, layout.begin)
        try:
            self._reader = self._inflated.take(number, self.place.offset) if self.place.offset == layout.begin else None
            if self._reader is None:
                self._reader = open_input(self._files[number], self.place.offset, open_at=self._opener(number))
        except DamagedStreamError as error:
            raise self._error(f"the compressed stream is damaged or cut short ({error})") from error
        self._tail, self._ended, self._trouble, self._too_long = _NOTHING, False, None, False
        if not self.place.offset:
            self._tail = self._fill(len(_BOM))[1].copy()
            if self._tail.tobytes() == _BOM:
                self.place, self._tail = BlockPosition(number, len(_BOM)), _NOTHING

    def _opener(self, number: int) -> Callable[[int], io.RawIOBase] | None:
        """Remote files are read ahead, from one into the next."""
        if not isinstance(self._files[number], RemoteFile):
            return None
        return lambda offset: self._ahead.open(number, offset)

    def _next_file(self) -> None:
        self._close_file()
        self._tail, self._trouble, self._too_long = _NOTHING, None, False
        self.place = BlockPosition(self.place.file + 1)

    def _read(self, max_bytes: int) -> RawBlock | None:
        buffer, data = self._fill(max(max_bytes, len(self._tail) + min(max_bytes, 1 << 16)))
        end, records = self._cutter.cut(data)
        alone = False
        if not end and not self._ended and len(data) <= self._max_row_bytes:
            buffer, data, end, records = self._read_long(data)
            alone = end > 0 and self._cutter.newline_ends
        if self._ended and self._trouble is None and not alone:
            end, records = self._with_rest(data, end, records)
        end, records = self._within_limit(data, end, records)
        if not end:
            self._raise_trouble()
            return None
        block = RawBlock(self.place, buffer.arrow(end), records)
        self._tail = data[end:].copy()
        if self._ended and self._trouble is None and not len(self._tail):
            self._next_file()  # now: there is no way to tell, later, whether what ended the file was read
        else:
            self.place = BlockPosition(self.place.file, self.place.offset + end, self.place.row + records)
        return block

    def _read_long(self, data: Bytes) -> tuple[PooledBuffer, Bytes, int, int]:
        """A record longer than the block, and little after it, in one buffer that takes memory as it fills."""
        self._tail = data
        # Little of what follows the range that is read, which may be much smaller than the usual step.
        small = self._ahead.until is not None and self._cutter.newline_ends
        first = min(_STEP, max(_LEAST_STEP, len(data))) if small else _STEP
        buffer, data = self._fill(len(data) + first, self._max_row_bytes + 1)
        whole = buffer.array()
        end, records = self._ends_since(data, len(self._tail))
        self._tail = _NOTHING
        while not end and not self._ended and len(data) <= self._max_row_bytes:
            filled = len(data)
            # Where only a look at all of it tells the end, looks must be few.
            step = max(_STEP, filled // 2)
            if self._cutter.newline_ends:
                step = min(_STEP, filled) if small else _STEP
            data = self._fill_on(whole, filled, min(filled + step, len(whole)))
            end, records = self._ends_since(data, filled)
        return buffer, data, end, records

    def _ends_since(self, data: Bytes, looked: int) -> tuple[int, int]:
        """As the cutter has it; the first `looked` bytes are known to hold no end."""
        if not self._cutter.newline_ends:
            return self._cutter.cut(data)
        end = first_newline(data[looked:])
        return (looked + end, 1) if end else (0, 0)

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            reason, cause = self._trouble
            self.close()
            raise self._error(reason) from cause
        if not self.place.offset and not self._allow_empty:
            self.close()
            raise self._error("the file is empty (0 bytes); remove it, or pass allow_empty=True")

    def _with_rest(self, data: Bytes, end: int, records: int) -> tuple[int, int]:
        """End of the file: the last record end is followed by a record without a newline, half of one, or nothing."""
        try:
            return len(data), records + self._cutter.leftover(data[end:])
        except ValueError as error:
            self._trouble = (str(error), None)
            return end, records

    def _within_limit(self, data: Bytes, end: int, records: int) -> tuple[int, int]:
        """Only the records before one that is too long, wherever the blocks happen to be cut."""
        if max(end, len(data) - end) <= self._max_row_bytes:
            return end, records
        starts, stops = self._cutter.spans(data[:end])
        long = np.flatnonzero(stops - starts > self._max_row_bytes)
        if len(long):
            records = int(long[0])
            end = int(stops[records - 1]) if records else 0
        elif end:
            return end, records  # what follows is cut off by the next call
        self._too_long = True
        self._trouble = (
            f"a record is longer than max_row_bytes={format_bytes(self._max_row_bytes)}; "
            "raise max_row_bytes if such rows are wanted",
            None,
        )
        return end, records

    def _fill(self, size: int, capacity: int = 0) -> tuple[PooledBuffer, Bytes]:
        """A buffer that begins with the tail of the last one, filled up to `size` or as far as the file goes."""
        buffer = self._pool.acquire(max(size, capacity))
        data = buffer.array()
        filled = len(self._tail)
        data[:filled] = self._tail
        return buffer, self._fill_on(data, filled, size)

    def _fill_on(self, data: Bytes, filled: int, size: int) -> Bytes:
        """Read on into an array that holds `filled` bytes; what it holds then."""
        view: Any = memoryview(data)  # type: ignore[arg-type]
        assert self._reader is not None
        while filled < size and not self._ended:
            try:
                got = self._reader.readinto(view[filled:size])
            except DamagedStreamError as error:
                self._trouble = (f"the compressed stream is damaged or cut short ({error})", error)
                got = 0
            except OSError as error:
                self.close()
                if error.errno is None:  # of a server, and it names the file
                    raise
                raise OSError(error.errno, error.strerror, str(self._files[self.place.file])) from error
            self._ended = not got
            filled += got or 0
        if self._ended:
            self._check_unchanged()
        return data[:filled]

    def _check_unchanged(self) -> None:
        """End of a file, which another process may just have truncated."""
        try:
            self._stamps.check(self._files[self.place.file])
        except BaseException:
            self.close()
            raise

    def _skip_line(self) -> None:
        self.close()
        self._open()
        place, skipped = self.place, 0
        while not self._ended:
            _, data = self._fill(1 << 20)
            self._tail = _NOTHING
            end = first_newline(data)
            if end:
                self._tail = data[end:].copy()
                self.place = BlockPosition(place.file, place.offset + skipped + end, place.row + 1)
                return
            skipped += len(data)
        self._next_file()

    def _error(self, reason: str) -> DataError:
        return DataError(reason, file=str(self._files[self.place.file]), row=self.place.row, offset=self.place.offset)


class RecordSpans:
    """Offsets of the records in a block."""

    def __init__(self, block: Block) -> None:
        self._data: pa.Buffer = block.data
        self._cutter = block.meta["layout"].cutter
        self.starts: npt.NDArray[np.int64]
        self.starts, self._stops = self._cutter.spans(np.frombuffer(block.data, np.uint8))

    def filled(self) -> npt.NDArray[np.int64]:
        """The numbers of the records that are not blank."""
        return np.flatnonzero(~self._cutter.blank(np.frombuffer(self._data, np.uint8), self.starts))

    def gather(self, numbers: Sequence[int]) -> pa.Buffer:
        """The bytes of these records, one after the other."""
        first, last = numbers[0], numbers[-1]
        if last - first + 1 == len(numbers):
            return self.slice(first, last)
        # Records of a JSON file may have nothing but a comma between them; a blank line is no record.
        return pa.py_buffer(b"\n".join(memoryview(self.slice(number, number)) for number in numbers))

    def slice(self, first: int, last: int) -> pa.Buffer:
        """The bytes from the first of these records to the end of the last."""
        start = int(self.starts[first])
        return self._data.slice(start, int(self._stops[last]) - start)


class Pending:
    """A decoded block that is delivered in parts: its rows and its bad records, in the order of the file."""

    def __init__(self, block: Block, decoded: Decoded) -> None:
        self._block, self._batch = block, decoded.batch
        self._rows: Sequence[int] = decoded.rows if decoded.rows is not None else range(decoded.batch.num_rows)
        self._bad = deque(decoded.rejected)
        self._used = 0
        self._spans: RecordSpans | None = None

    @property
    def over(self) -> bool:
        return self._used == len(self._rows) and not self._bad

    @property
    def nbytes(self) -> int:
        return int(self._batch.nbytes)

    def take(self, max_rows: int) -> tuple[pa.RecordBatch, Origin]:
        """The next rows and where they come from; raises for a bad record that stands before them."""
        first = self._next_bad()
        before = bisect_left(self._rows, first) if first is not None else len(self._rows)
        if self._used == before:
            bad = self._bad.popleft()
            raise DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
        part = self._batch.slice(self._used, min(max_rows, before - self._used))
        origin = self._block.origin
        row = origin.row + self._rows[self._used]
        self._used += part.num_rows
        return part, Origin(origin.file, row)

    def place(self) -> BlockPosition:
        """The next record, good or bad."""
        if self._spans is None:
            self._spans = RecordSpans(self._block)
        following = [self._rows[self._used]] if self._used < len(self._rows) else []
        bad = self._next_bad()
        number = min([*following, *([bad] if bad is not None else [])])
        origin = self._block.origin
        offset = (origin.offset or 0) + int(self._spans.starts[number])
        return BlockPosition(self._block.meta["file"], offset, origin.row + number)

    def _next_bad(self) -> int | None:
        return (self._bad[0].row or 0) - self._block.origin.row if self._bad else None
