"""Parquet files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.files.listing import PathLike
from penstock.sources._files import FileSource, Opened
from penstock.sources._schemas import check_columns, project

__all__ = ["ParquetSource"]

_READ_AHEAD_BYTES = 1 << 18
_PIECE_BYTES = 1 << 19
_PROBE_ROWS, _MOST_ROWS = 64, 1 << 14


class ParquetSource(FileSource):
    """Parquet, row group by row group, only the `columns` asked for.

    Column chunks are read in pieces of about half a megabyte, so a row group may be larger than memory. Resuming begins
    at the row group that holds the row and passes over the rows before it.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".parquet", ".pq")

    def __init__(self, paths: PathLike | Iterable[PathLike], *, columns: Sequence[str] | None = None) -> None:
        self._columns = check_columns(columns)
        self._piece_bytes = _PIECE_BYTES
        super().__init__(paths, columns=self._columns)

    def _file_schema(self, path: Path) -> pa.Schema:
        return project(pq.read_schema(path), self._columns, str(path))

    def _file_rows(self, path: Path) -> int | None:
        return int(pq.read_metadata(path).num_rows)

    def fit_budget(self, nbytes: int) -> None:
        """Smaller pieces if there is less memory."""
        self._piece_bytes = max(1 << 14, min(_PIECE_BYTES, nbytes // 64))

    def _open(self, path: Path) -> Opened:
        return _Reader(path, self._columns, self._piece_bytes)


class _Reader:
    """One open file. How many rows make up a piece is fixed when a row group is begun, so they are cut afterwards."""

    def __init__(self, path: Path, columns: list[str] | None, piece_bytes: int) -> None:
        self._file = pq.ParquetFile(path, buffer_size=_READ_AHEAD_BYTES, pre_buffer=False)
        self._columns, self._piece_bytes = columns, piece_bytes
        self._group = 0
        self._skip = 0
        self._row_bytes = 0.0
        self._pieces: Iterator[pa.RecordBatch] = iter(())
        self._pending: pa.RecordBatch | None = None

    def skip(self, rows: int) -> int:
        metadata = self._file.metadata
        self._skip = min(rows, metadata.num_rows)
        passed = self._skip
        while self._group < metadata.num_row_groups and self._skip >= metadata.row_group(self._group).num_rows:
            self._skip -= metadata.row_group(self._group).num_rows
            self._group += 1
        return passed

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        while self._pending is None:
            piece = next(self._pieces, None)
            if piece is None:
                if self._group == self._file.metadata.num_row_groups:
                    return None
                self._pieces = self._begin(self._group)
                self._group += 1
                continue
            drop = min(self._skip, piece.num_rows)
            self._skip -= drop
            if piece.num_rows > drop:
                self._pending = piece.slice(drop)
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch

    def held_bytes(self) -> int:
        pending = self._pending
        return pending.nbytes if pending is not None else 0

    def close(self) -> None:
        self._file.close()

    def _begin(self, group: int) -> Iterator[pa.RecordBatch]:
        # The sizes in the footer are those of encoded values, so a few rows are decoded to see how wide they are.
        if not self._row_bytes:
            probe = next(self._iterate(group, _PROBE_ROWS), None)
            self._row_bytes = probe.nbytes / probe.num_rows if probe is not None and probe.num_rows else 0.0
        rows = int(self._piece_bytes / max(1.0, self._row_bytes))
        for piece in self._iterate(group, max(1, min(_MOST_ROWS, rows))):
            self._row_bytes = max(0.5 * self._row_bytes, piece.nbytes / max(1, piece.num_rows))
            yield piece

    def _iterate(self, group: int, rows: int) -> Iterator[Any]:
        return iter(self._file.iter_batches(rows, row_groups=[group], columns=self._columns, use_threads=True))
