"""Parquet and Arrow IPC files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.errors import ConfigError
from penstock.files.checksums import (
    ARROW_TAIL,
    PARQUET_TAIL,
    HashedFile,
    Segment,
    add_checksums,
    check_file,
    hash_segments,
)
from penstock.files.listing import PathLike, split_suffix
from penstock.memory.budget import parse_bytes
from penstock.sinks.file_sink import FileSink, Writer

__all__ = ["ArrowSink", "ParquetSink"]

_COMPRESSIONS = ("zstd", "snappy", "gzip", "lz4", "brotli", "none")


class ParquetSink(FileSink):
    """One Parquet file, or a directory of them.

    A row group is closed when its rows take `row_group_bytes` in memory, which is also what the sink holds; a pipeline
    with a small budget makes that a sixteenth of it. Text that hardly repeats is written without a dictionary
    (`dictionary=None` decides by the first row group).

    Pages have the checksums of the format. Checksums of all bytes, footer included, stand in front of the footer, where
    only `ParquetSource` looks for them.
    """

    suffix: ClassVar[str] = ".parquet"

    def __init__(
        self,
        path: PathLike,
        *,
        compression: str = "zstd",
        compression_level: int | None = None,
        row_group_bytes: int | str = "16 MiB",
        dictionary: bool | Sequence[str] | None = None,
        rows_per_file: int | None = None,
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        _refuse_outer_compression(self.path)
        if compression not in _COMPRESSIONS:
            raise ConfigError(f"unknown compression {compression!r}; expected one of {', '.join(_COMPRESSIONS)}")
        self._compression, self._level = compression, compression_level
        self._row_group_bytes = self._asked_bytes = parse_bytes(row_group_bytes)
        self._dictionary = dictionary if dictionary is None or isinstance(dictionary, bool) else list(dictionary)

    def fit_budget(self, nbytes: int) -> None:
        self._row_group_bytes = min(self._asked_bytes, nbytes // 16)

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _ParquetWriter(file, schema, self._compression, self._level, self._row_group_bytes, self._dictionary)

    def _join(self, segments: list[Path], target: BinaryIO) -> None:
        """Row groups cannot be moved from file to file as they are: they are read and written again."""
        writer: Writer | None = None
        for segment in segments:
            with pq.ParquetFile(segment, buffer_size=1 << 18, pre_buffer=False) as piece:
                check_file(segment, PARQUET_TAIL)
                writer = writer or self._new_writer(target, piece.schema_arrow, first=True)
                for batch in piece.iter_batches(1 << 12):
                    writer.write(batch)
        if writer is not None:
            writer.close()


class ArrowSink(FileSink):
    """One Arrow IPC file (or a directory of them) that readers can memory-map.

    `compression` ("lz4" or "zstd") makes it smaller; without it batches are views of the file when read. A checksum of
    each batch stands in front of the footer, where only `ArrowSource` looks for it.
    """

    suffix: ClassVar[str] = ".arrow"

    def __init__(self, path: PathLike, *, compression: str | None = None, rows_per_file: int | None = None) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        _refuse_outer_compression(self.path)
        if compression not in (None, "lz4", "zstd"):
            raise ConfigError(f"compression must be 'lz4', 'zstd' or None, got {compression!r}")
        self._compression = compression

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _ArrowWriter(file, schema, self._compression)

    def _join(self, segments: list[Path], target: BinaryIO) -> None:
        writer: Writer | None = None
        for segment in segments:
            check_file(segment, ARROW_TAIL)
            with pa.memory_map(str(segment)) as piece:
                reader = pa.ipc.open_file(piece)
                writer = writer or self._new_writer(target, reader.schema, first=True)
                for number in range(reader.num_record_batches):
                    writer.write(reader.get_batch(number))
        if writer is not None:
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
        # A handle of Arrow's own on the same file: through a Python file every page would wait for the interpreter.
        self._native: pa.OSFile | None = None
        self._segments: list[Segment] = []

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
        assert self._native is not None
        self._native.close()
        with open(self._file.name, "rb+") as file:
            add_checksums(file, self._segments, PARQUET_TAIL)

    def abort(self) -> None:
        self._pending, self._held = [], 0
        if self._writer is not None:
            self._writer.is_open = False  # or it would try to write a footer, once more when it is collected
            self._writer = None
        if self._native is not None:
            with contextlib.suppress(OSError):
                self._native.close()

    def held_bytes(self) -> int:
        return self._held

    def _write_group(self) -> None:
        table = pa.Table.from_batches(self._pending, self._schema)
        if self._writer is None:
            self._native = pa.OSFile(str(self._file.name), "wb")
            self._writer = pq.ParquetWriter(
                self._native,
                self._schema,
                compression=self._compression,
                compression_level=self._level,
                use_dictionary=self._dictionary if self._dictionary is not None else _worth_a_dictionary(table),
                write_page_checksum=True,
            )
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self._hash_written()
        self._pending, self._held = [], 0

    def _hash_written(self) -> None:
        """While the system still has it in memory."""
        assert self._native is not None
        before = self._segments[-1][0] if self._segments else 0
        with open(self._file.name, "rb", buffering=0) as file:
            self._segments += hash_segments(file, before, self._native.tell())


class _ArrowWriter:
    def __init__(self, file: BinaryIO, schema: pa.Schema, compression: str | None) -> None:
        options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=True)
        self._file = HashedFile(file)
        self._writer = pa.ipc.new_file(self._file, schema, options=options)
        self._known: dict[int, pa.Array] = {}
        """For each column with a dictionary, an empty array with all the values so far."""

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [self._grown(i, column) for i, column in enumerate(batch.columns)]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=batch.schema))
        self._file.cut()

    def close(self) -> None:
        self._file.hold()
        self._writer.close()
        self._file.finish(ARROW_TAIL)

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def held_bytes(self) -> int:
        return sum(column.dictionary.nbytes for column in self._known.values())

    def _grown(self, index: int, column: pa.Array) -> pa.Array:
        """A file has one dictionary for each column, which may only grow: new values go behind the known ones."""
        if not pa.types.is_dictionary(column.type):
            return column
        if index in self._known:
            column = pa.chunked_array([self._known[index], column]).unify_dictionaries().chunk(1)
        self._known[index] = column.slice(0, 0)
        return column


def _refuse_outer_compression(path: Path) -> None:
    outer = split_suffix(path)[1]
    if outer:
        raise ConfigError(f"{path.name}: this format compresses inside; leave {outer!r} out and pass compression=")


def _worth_a_dictionary(table: pa.Table) -> bool | list[str]:
    """Columns whose values repeat. Building a dictionary of long text that never repeats costs a fifth of the time."""
    names = []
    for field, column in zip(table.schema, table.columns):
        if pa.types.is_nested(field.type):
            return True  # nested leaves have names of their own: leave the choice to the writer
        head = column.slice(0, 1024)
        comparable = pa.types.is_primitive(field.type) or pa.types.is_string(field.type)
        if not comparable or not len(head) or len(head.unique()) <= len(head) // 2:
            names.append(field.name)
    return names or False
