"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.files.listing import PathLike
from penstock.sources._files import FileSource
from penstock.sources._records import require_columns

__all__ = ["ParquetSource"]

_READ_AHEAD_BYTES = 1 << 18


class ParquetSource(FileSource):
    """Parquet, row group by row group, only the `columns` asked for.

    Column chunks are read in pieces, so a row group may be larger than memory. Resuming begins at the row group that
    holds the row and passes over the rows before it.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def __init__(self, paths: PathLike | Iterable[PathLike], *, columns: Sequence[str] | None = None) -> None:
        super().__init__(paths)
        self._columns = list(columns) if columns is not None else None

    def _file_schema(self, path: Path) -> pa.Schema:
        schema = pq.read_schema(path)
        if self._columns is None:
            return schema
        require_columns(schema, self._columns, str(path))
        return pa.schema([schema.field(name) for name in self._columns])

    def _file_rows(self, path: Path) -> int | None:
        return int(pq.read_metadata(path).num_rows)

    def _open(self, path: Path, row: int) -> _Reader:
        return _Reader(path, self._columns, row)

    def _next(self, reader: _Reader, max_rows: int) -> pa.RecordBatch | None:
        return reader.next(max_rows)


class _Reader:
    """One open file. The batch size of a Parquet iterator is fixed when it starts, so larger batches are sliced."""

    def __init__(self, path: Path, columns: list[str] | None, row: int) -> None:
        self._file = pq.ParquetFile(path, buffer_size=_READ_AHEAD_BYTES, pre_buffer=False)
        self._columns = columns
        metadata = self._file.metadata
        first, skip = 0, row
        while first < metadata.num_row_groups and skip >= metadata.row_group(first).num_rows:
            skip -= metadata.row_group(first).num_rows
            first += 1
        self._groups = list(range(first, metadata.num_row_groups))
        self._skip = skip
        self._batches: Iterator[Any] | None = None
        self._pending: pa.RecordBatch | None = None

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        while self._pending is None:
            if self._batches is None:
                self._batches = self._file.iter_batches(
                    max(1, min(max_rows, 1 << 14)), row_groups=self._groups, columns=self._columns, use_threads=True
                )
            batch = next(self._batches, None)
            if batch is None:
                return None
            drop = min(self._skip, batch.num_rows)
            self._skip -= drop
            batch = batch.slice(drop)
            if batch.num_rows:
                self._pending = batch
        batch = self._pending.slice(0, max_rows)
        rest = self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def close(self) -> None:
        self._file.close()
