"""Arrow IPC files and streams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from penstock.files.compression import open_input
from penstock.files.listing import split_suffix
from penstock.memory.views import MappedFile
from penstock.sources._files import FileSource

__all__ = ["ArrowSource"]

_FILE_MAGIC = b"ARROW1"


class ArrowSource(FileSource):
    """Arrow IPC: file format (`.arrow`, `.feather`), memory-mapped so that batches are views of it, or stream format.

    Which of the two a file is stands in its first bytes, whatever its suffix. Compressed files are read as streams.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".arrow", ".feather", ".ipc", ".arrows")

    def _file_schema(self, path: Path) -> pa.Schema:
        reader = _Reader(path)
        try:
            return reader.schema
        finally:
            reader.close()

    def _file_rows(self, path: Path) -> int | None:
        reader = _Reader(path)
        try:
            return reader.rows()
        finally:
            reader.close()

    def _open(self, path: Path, row: int) -> _Reader:
        reader = _Reader(path)
        reader.skip(row)
        return reader

    def _next(self, reader: _Reader, max_rows: int) -> pa.RecordBatch | None:
        return reader.next(max_rows)


class _Reader:
    """One open file of either kind."""

    def __init__(self, path: Path) -> None:
        self._mapped: MappedFile | None = None
        self._stream: Any = None
        self._number = 0
        self._pending: pa.RecordBatch | None = None
        if split_suffix(path)[1]:
            self._stream = open_input(path)
            self._ipc = pa.ipc.open_stream(self._stream)
            self._random = False
        else:
            self._mapped = MappedFile(path)
            data = self._mapped.buffer(0, len(self._mapped))
            self._random = data.slice(0, min(6, data.size)).to_pybytes() == _FILE_MAGIC
            source = pa.BufferReader(data)
            self._ipc = pa.ipc.open_file(source) if self._random else pa.ipc.open_stream(source)
        self.schema = self._ipc.schema

    def rows(self) -> int | None:
        if not self._random:
            return None
        return sum(self._ipc.get_batch(i).num_rows for i in range(self._ipc.num_record_batches))

    def skip(self, rows: int) -> None:
        for batch in self._batches():
            if batch.num_rows > rows:
                self._pending = batch.slice(rows)
                return
            rows -= batch.num_rows

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        if self._pending is None:
            self._pending = next(self._batches(), None)
            if self._pending is None:
                return None
        batch = self._pending.slice(0, max_rows)
        rest = self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def close(self) -> None:
        # Batches that are still in use keep the mapping alive by reference; this only drops our own.
        self._ipc = None
        if self._mapped is not None:
            self._mapped.close()
        if self._stream is not None:
            self._stream.close()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        if not self._random:
            yield from self._ipc
            return
        while self._number < self._ipc.num_record_batches:
            self._number += 1
            yield self._ipc.get_batch(self._number - 1)
