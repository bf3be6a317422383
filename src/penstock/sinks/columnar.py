"""Parquet and Arrow IPC files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.memory.budget import parse_bytes
from penstock.sinks._files import FileSink, Writer

__all__ = ["ArrowSink", "ParquetSink"]


class ParquetSink(FileSink):
    """One Parquet file, or a directory of them.

    A row group is closed when its rows take `row_group_bytes` in memory, which is also what the sink holds. Text that
    hardly repeats is written without a dictionary (`dictionary=None` decides by the first row group).
    """

    suffix: ClassVar[str] = ".parquet"

    def __init__(
        self,
        path: PathLike,
        *,
        compression: str = "zstd",
        compression_level: int | None = None,
        row_group_bytes: int | str = "8 MiB",
        dictionary: bool | Sequence[str] | None = None,
        rows_per_file: int | None = None,
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        if compression != "none" and not pa.Codec.is_available(compression):
            raise ConfigError(f"unknown compression {compression!r}; try zstd, snappy, gzip, lz4, brotli or none")
        self._compression, self._level = compression, compression_level
        self._row_group_bytes = parse_bytes(row_group_bytes)
        self._dictionary = dictionary if dictionary is None or isinstance(dictionary, bool) else list(dictionary)

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _ParquetWriter(file, schema, self._compression, self._level, self._row_group_bytes, self._dictionary)

    def _join(self, segments: list[Path], target: BinaryIO) -> None:
        """Row groups cannot be moved from file to file as they are: they are read and written again."""
        with pq.ParquetFile(segments[0]) as head:
            writer = self._new_writer(target, head.schema_arrow, first=True)
        for segment in segments:
            with pq.ParquetFile(segment, buffer_size=1 << 18, pre_buffer=False) as piece:
                for batch in piece.iter_batches(1 << 12):
                    writer.write(batch)
        writer.close()


class ArrowSink(FileSink):
    """One Arrow IPC file (or a directory of them) that readers can memory-map.

    `compression` ("lz4" or "zstd") makes it smaller; without it batches are views of the file when read.
    """

    suffix: ClassVar[str] = ".arrow"

    def __init__(
        self, path: PathLike, *, compression: str | None = None, rows_per_file: int | None = None
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        if compression not in (None, "lz4", "zstd"):
            raise ConfigError(f"compression must be 'lz4', 'zstd' or None, got {compression!r}")
        self._compression = compression

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _ArrowWriter(file, schema, self._compression)

    def _join(self, segments: list[Path], target: BinaryIO) -> None:
        readers = [pa.ipc.open_file(pa.memory_map(str(segment))) for segment in segments]
        writer = self._new_writer(target, readers[0].schema, first=True)
        for reader in readers:
            for number in range(reader.num_record_batches):
                writer.write(reader.get_batch(number))
        writer.close()


class _ParquetWriter:
    def __init__(
        self,
        file: BinaryIO,
        schema: pa.Schema,
        compression: str,
        level: int | None,
        row_group_bytes: int,
        dictionary: bool | list[str] | None,
    ) -> None:
        self._file, self._schema = file, schema
        self._compression, self._level, self._dictionary = compression, level, dictionary
        self._row_group_bytes = row_group_bytes
        self._pending: list[pa.RecordBatch] = []
        self._held = 0
        self._writer: pq.ParquetWriter | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        self._pending.append(batch)
        self._held += batch.nbytes
        if self._held >= self._row_group_bytes:
            self._write_group()

    def close(self) -> None:
        if self._pending or self._writer is None:
            self._write_group()
        assert self._writer is not None
        self._writer.close()

    def held_bytes(self) -> int:
        return self._held

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._pending, self._schema)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._file,
                self._schema,
                compression=self._compression,
                compression_level=self._level,
                use_dictionary=self._dictionary if self._dictionary is not None else _worth_a_dictionary(table),
            )
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._pending, self._held = [], 0


class _ArrowWriter:
    def __init__(self, file: BinaryIO, schema: pa.Schema, compression: str | None) -> None:
        self._writer = pa.ipc.new_file(file, schema, options=pa.ipc.IpcWriteOptions(compression=compression))

    def write(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()

    def held_bytes(self) -> int:
        return 0


def _worth_a_dictionary(table: pa.Table) -> bool | list[str]:
    """Columns whose values repeat. Building a dictionary of long text that never repeats costs a fifth of the time."""
    names = []
    for field, column in zip(table.schema, table.columns):
        if pa.types.is_nested(field.type):
            return True  # nested leaves have names of their own: leave the choice to the writer
        head = column.slice(0, 1024)
        if not (pa.types.is_string(field.type) or pa.types.is_large_string(field.type)) or not len(head):
            names.append(field.name)
        elif len(head.unique()) <= len(head) // 2:
            names.append(field.name)
    return names or False
