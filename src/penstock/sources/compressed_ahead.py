"""Compressed files of a disk, the next ones decompressed by threads of their own while one is read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.files.checksums import FileStamps
from penstock.files.compression import ByteReader, disk_position, open_input, skip_bytes
from penstock.files.listing import split_suffix
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.pipeline.cores import available_cores
from penstock.pipeline.prefetch import ReadAhead

Bytes = npt.NDArray[np.uint8]
_NOTHING: Bytes = np.empty(0, np.uint8)
_PIECE_BYTES = 1 << 20
_LEAST_BYTES = 1 << 20
"""Smallest compressed file that a thread is worth."""
_MOST_FILES = 3


class CompressedAhead:
    """Files of a list, of which some are decompressed ahead: one core decompresses one file at a time.

    As many as there are further cores are begun, three at most; they and the one that is read are `nbytes` ahead
    together, or a megabyte each.
    """

    def __init__(self, files: Sequence[InputFile], nbytes: int, stamps: FileStamps) -> None:
        self._files, self._stamps = files, stamps
        self._count = min(available_cores() - 1, _MOST_FILES) if nbytes else 0
        self._pieces = max(1, nbytes // (self._count + 1) // _PIECE_BYTES)
        self._begun: dict[int, _Inflated | None] = {}
        """The next files; None for one that is not worth it."""
        self._taken: _Inflated | None = None
        """The file that is read, if it was begun."""

    @property
    def held_bytes(self) -> int:
        """About the bytes that wait in files which were begun."""
        return sum(file.held_bytes for file in (*self._begun.values(), self._taken) if file is not None)

    def begin_after(self, number: int) -> None:
        """Begin the files that follow one, unless they are begun."""
        for following in range(number + 1, min(number + 1 + self._count, len(self._files))):
            if following not in self._begun:
                with contextlib.suppress(OSError):  # it is raised in its place, if it is still there
                    self._begun[following] = self._inflated(self._files[following])

    def _inflated(self, file: InputFile) -> _Inflated | None:
        local = not isinstance(file, RemoteFile)
        if not local or not split_suffix(file)[1] or file.stat().st_size < _LEAST_BYTES:
            return None
        self._stamps.note(file)
        reader = open_input(file)
        try:
            return _Inflated(reader, self._pieces)
        except RuntimeError:  # no more threads
            reader.close()
            return None

    def take(self, number: int, offset: int) -> ByteReader | None:
        """The file from a byte near its beginning on, if it was begun."""
        for other in [other for other in self._begun if other < number]:
            self._drop(other)
        self._taken = taken = self._begun.pop(number, None)
        if taken is not None and skip_bytes(taken, offset) < offset:
            self._close_taken()
        return self._taken

    def close(self) -> None:
        self._close_taken()
        for number in list(self._begun):
            self._drop(number)

    def _close_taken(self) -> None:
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.close()

    def _drop(self, number: int) -> None:
        if (file := self._begun.pop(number)) is not None:
            file.close()


class _Piece(NamedTuple):
    data: Bytes
    position: int
    """Bytes of the file on the disk that were read for it and all before it."""


class _Inflated:
    """A file that a thread decompresses, some pieces ahead of its reader."""

    def __init__(self, reader: ByteReader, pieces: int) -> None:
        self._ahead = ReadAhead(_pieces_of(reader), pieces)
        self._left = _NOTHING
        self._position = 0
        self._closed = False

    @property
    def held_bytes(self) -> int:
        return _PIECE_BYTES * self._ahead.ready + len(self._left)

    def readinto(self, buffer: Any) -> int:
        if not len(self._left):
            piece = next(self._ahead, None)
            if self._closed:  # by another thread: this is no end of the file
                raise ValueError("read of a closed file")
            if piece is None:
                return 0
            self._left, self._position = piece
        view = np.frombuffer(buffer, np.uint8)
        count = min(len(view), len(self._left))
        view[:count], self._left = self._left[:count], self._left[count:]
        return count

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        self._closed = True
        self._ahead.close()
        self._left = _NOTHING


def _pieces_of(reader: ByteReader) -> Iterator[_Piece]:
    with contextlib.closing(reader):
        while True:
            data = np.frombuffer(pa.allocate_buffer(_PIECE_BYTES), np.uint8)
            got = reader.readinto(data)
            if not got:
                return
            yield _Piece(data[:got], disk_position(reader))
