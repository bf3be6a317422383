"""Cutting files into blocks of whole records, into reused buffers, without looking inside the records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError
from penstock.files.compression import ByteReader, open_input
from penstock.files.records import Cutter
from penstock.memory.budget import format_bytes
from penstock.memory.pool import BufferPool, PooledBuffer

__all__ = ["BlockReader", "Place", "RawBlock"]

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Place:
    """The next record to read: which file, how many bytes (after decompression) and records into it."""

    file: int = 0
    offset: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True)
class RawBlock:
    """Whole records of one file."""

    file: int
    offset: int
    row: int
    data: pa.Buffer
    records: int


class BlockReader:
    """Reads files one after the other, a block of whole records at a time.

    A record longer than `max_row_bytes` is an error before it is read to its end, so that one endless line cannot take
    all memory. After any error `skip_bad` moves past what it was about: the long record, or the rest of the file.
    """

    def __init__(
        self,
        files: Sequence[Path],
        cutter: Cutter,
        *,
        pool: BufferPool,
        max_row_bytes: int,
        allow_empty: bool = False,
        place: Place = Place(),
        begin: Callable[[int], Place] = Place,
    ) -> None:
        self._files, self._cutter, self._pool = files, cutter, pool
        self._max_row_bytes, self._allow_empty = max_row_bytes, allow_empty
        self.place = place
        self._begin = begin
        self._reader: ByteReader | None = None
        self._tail: Bytes = np.empty(0, np.uint8)
        self._ended = False
        self._long_row_bytes = 0
        """How much of a record that is too long has been read, after the error that says so."""

    def next(self, max_bytes: int) -> RawBlock | None:
        """Up to about `max_bytes` of whole records (one record may be longer), or None after the last file."""
        while self.place.file < len(self._files):
            if self._reader is None:
                self._open()
            block = self._read(max(max_bytes, 1))
            if block is not None:
                return block
            self._next_file()
        return None

    def skip_bad(self) -> None:
        """Go on after an error."""
        if self._long_row_bytes:
            self._skip_long_row()
        else:
            self._next_file()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    @property
    def held_bytes(self) -> int:
        return self._tail.nbytes

    def _open(self) -> None:
        path = self._files[self.place.file]
        try:
            if self.place.offset == 0:
                self.place = self._begin(self.place.file)
            self._reader = open_input(path, self.place.offset)
        except OSError as error:
            if error.errno is not None:
                raise  # missing, permission denied: the system's own message names the file
            raise self._error(f"cannot be decompressed: {error}") from error
        self._ended = False

    def _next_file(self) -> None:
        self.close()
        self._tail = np.empty(0, np.uint8)
        self._long_row_bytes = 0
        self.place = Place(self.place.file + 1)

    def _read(self, max_bytes: int) -> RawBlock | None:
        size = max(max_bytes, len(self._tail) + min(max_bytes, 1 << 16))
        buffer, filled = self._fill(size)
        data = buffer.array()[:filled]
        if not filled:
            if self.place.offset == 0 and not self._allow_empty:
                raise self._error("the file is empty (0 bytes); remove it, or pass allow_empty=True")
            return None
        end, records = self._cutter.cut(data)
        while end == 0 and not self._ended:
            if len(data) >= self._max_row_bytes:
                self._tail = np.empty(0, np.uint8)
                self._long_row_bytes = len(data)
                raise self._error(
                    f"a record is longer than max_row_bytes={format_bytes(self._max_row_bytes)}; "
                    "raise max_row_bytes if such rows are wanted"
                )
            self._tail = data
            buffer, filled = self._fill(min(2 * len(data), self._max_row_bytes + 1))
            data = buffer.array()[:filled]
            end, records = self._cutter.cut(data)
        if self._ended and end < len(data):
            end, records = self._last(data, end, records)
        return self._block(buffer, data, end, records)

    def _block(self, buffer: PooledBuffer, data: Bytes, end: int, records: int) -> RawBlock:
        place = self.place
        self._tail = data[end:].copy()
        self.place = Place(place.file, place.offset + end, place.row + records)
        self._cutter.prepare(data[:end])
        return RawBlock(place.file, place.offset, place.row, buffer.arrow(end), records)

    def _last(self, data: Bytes, end: int, records: int) -> tuple[int, int]:
        """What stands after the last record end when the file is over: a record without a newline, or nothing."""
        rest = data[end:].tobytes()
        try:
            return len(data), records + self._cutter.leftover(rest)
        except ValueError as error:
            offset = self.place.offset + end
            raise DataError(
                str(error), file=str(self._files[self.place.file]), row=self.place.row + records, offset=offset
            ) from None

    def _fill(self, size: int) -> tuple[PooledBuffer, int]:
        """A buffer of `size` bytes that begins with the tail of the last one, filled as far as the file goes."""
        buffer = self._pool.acquire(size)
        data = buffer.array()
        filled = len(self._tail)
        data[:filled] = self._tail
        view: Any = memoryview(data)
        assert self._reader is not None
        while filled < size and not self._ended:
            try:
                got = self._reader.readinto(view[filled:])
            except (OSError, EOFError, pa.ArrowException) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                self._tail = data[:filled].copy()
                raise self._error(
                    f"the compressed stream is damaged or cut short ({error}); {self.place.row} records before it are good",
                ) from error
            if not got:
                self._ended = True
            else:
                filled += got
        return buffer, filled

    def _skip_long_row(self) -> None:
        assert self._reader is not None
        scratch = np.empty(1 << 20, np.uint8)
        place, skipped, self._long_row_bytes = self.place, self._long_row_bytes, 0
        while got := self._reader.readinto(memoryview(scratch)):
            newline = scratch[:got].tobytes().find(b"\n")
            if newline >= 0:
                self._tail = scratch[newline + 1 : got].copy()
                self.place = Place(place.file, place.offset + skipped + newline + 1, place.row + 1)
                return
            skipped += got
        self._next_file()

    def _error(self, reason: str) -> DataError:
        return DataError(reason, file=str(self._files[self.place.file]), row=self.place.row, offset=self.place.offset)
