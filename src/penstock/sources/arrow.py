"""Arrow IPC files and streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.files.compression import open_input
from penstock.files.listing import PathLike, split_suffix
from penstock.memory.views import MappedFile
from penstock.sources._files import FileSource, Opened

__all__ = ["ArrowSource"]

_FILE_MAGIC = b"ARROW1\0\0"


class ArrowSource(FileSource):
    """Arrow IPC: file format (`.arrow`, `.feather`), memory-mapped so that batches are views of it, or stream format.

    Which of the two a file is stands in its first bytes, whatever its suffix. A compressed file is read from its
    beginning to its end, so resuming in it decompresses what comes before.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def __init__(self, paths: PathLike | Iterable[PathLike]) -> None:
        super().__init__(paths)

    def _file_schema(self, path: Path) -> pa.Schema:
        reader = _Reader(path)
        reader.close()
        return reader.schema

    def _file_rows(self, path: Path) -> int | None:
        reader = _Reader(path)
        try:
            return reader.rows()
        finally:
            reader.close()

    def _open(self, path: Path) -> Opened:
        return _Reader(path)


class _Reader:
    """One open file of either kind."""

    def __init__(self, path: Path) -> None:
        self._pending: pa.RecordBatch | None = None
        self._file: Any = None
        """What to close: a mapping, or a stream of decompressed bytes."""
        if split_suffix(path)[1]:
            self._ipc, self._random = self._open_compressed(path), False
        else:
            mapped = self._file = MappedFile(path)
            head = mapped.buffer(0, min(len(mapped), len(_FILE_MAGIC))).to_pybytes()
            self._random = head == _FILE_MAGIC
            data = pa.BufferReader(mapped.buffer())
            self._ipc = pa.ipc.open_file(data) if self._random else pa.ipc.open_stream(data)
        self.schema = self._ipc.schema
        self._batches = self._all_batches()

    def rows(self) -> int | None:
        """A stream does not say; a file lists its batches, whose headers do."""
        return int(self._ipc.count_rows()) if self._random else None

    def skip(self, rows: int) -> int:
        left = rows
        for batch in self._batches:
            if batch.num_rows > left:
                self._pending = batch.slice(left)
                return rows
            left -= batch.num_rows
        return rows - left

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        if self._pending is None:
            self._pending = next(self._batches, None)
            if self._pending is None:
                return None
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def held_bytes(self) -> int:
        pending = self._pending
        return pending.nbytes if pending is not None and not self._random else 0  # a mapping is the system's to keep

    def close(self) -> None:
        # Batches that are still in use keep the mapping alive by reference; this only drops our own.
        self._ipc = self._pending = None
        self._batches = iter(())
        self._file.close()

    def _open_compressed(self, path: Path) -> Any:
        # The file format is the stream format with something before and behind it.
        head = memoryview(bytearray(len(_FILE_MAGIC)))
        begin = 0
        stream: Any = open_input(path)
        try:
            stream.readinto(head)
            if head.tobytes() == _FILE_MAGIC:
                begin = len(_FILE_MAGIC)
        finally:
            stream.close()
        self._file = open_input(path, begin)
        try:
            return pa.ipc.open_stream(self._file)
        except BaseException:
            self._file.close()
            raise

    def _all_batches(self) -> Iterator[pa.RecordBatch]:
        if not self._random:
            yield from self._ipc
            return
        for number in range(self._ipc.num_record_batches):
            yield self._ipc.get_batch(number)
