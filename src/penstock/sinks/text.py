"""JSON Lines and CSV files, compressed by suffix."""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import Any, BinaryIO, ClassVar

import orjson
import pyarrow as pa
import pyarrow.csv as pcsv

from penstock.errors import ConfigError, SchemaError
from penstock.files.compression import open_output
from penstock.files.listing import PathLike, split_suffix
from penstock.pipeline.functions import rows_of
from penstock.sinks.file_sink import FileSink, Writer
from penstock.types import to_rows

__all__ = ["CsvSink", "JsonlSink"]


class JsonlSink(FileSink):
    """One JSON object a line; `.gz`, `.zst`, `.bz2`, `.lz4` and `.xz` names are compressed.

    Timestamps are written as ISO 8601 text, decimals and durations as text, maps as objects, tensors as nested lists.
    JSON has no NaN and no infinity: they become null. It has no form for binary columns either: they are refused.
    """

    suffix: ClassVar[str] = ".jsonl"

    def __init__(
        self, path: PathLike, *, compression_level: int | None = None, rows_per_file: int | None = None
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        self._level = compression_level

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        binary = [field.name for field in schema if _any(field.type, _is_binary)]
        if binary:
            raise SchemaError(
                f"JSON has no form for the binary columns {binary}; drop or encode them, or write Parquet"
            )
        return _JsonlWriter(file, schema, split_suffix(self.path)[1], self._level)


class CsvSink(FileSink):
    """Comma separated values with a header line, tabs if the name ends in `.tsv`; compressed by suffix.

    Null and empty text both become empty. Nested and binary columns are refused.
    """

    suffix: ClassVar[str] = ".csv"

    def __init__(
        self,
        path: PathLike,
        *,
        delimiter: str | None = None,
        compression_level: int | None = None,
        rows_per_file: int | None = None,
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
            raise ConfigError(f"delimiter must be one ASCII character, no quote and no line end, got {delimiter!r}")
        self._delimiter = delimiter or ("\t" if split_suffix(self.path)[0] == ".tsv" else ",")
        self._level = compression_level

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        nested = [field.name for field in schema if pa.types.is_nested(field.type) or _is_binary(field.type)]
        if nested:
            raise SchemaError(
                f"CSV has no form for the nested or binary columns {nested}; drop them, or write JSON Lines or Parquet"
            )
        return _CsvWriter(file, schema, split_suffix(self.path)[1], self._level, self._delimiter, header=first)


class _JsonlWriter:
    def __init__(self, file: BinaryIO, schema: pa.Schema, codec: str, level: int | None) -> None:
        self._raw = file
        self._out: Any = open_output(file, codec, level)
        self._options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
        if any(_any(field.type, pa.types.is_map) for field in schema):
            self._options |= orjson.OPT_NON_STR_KEYS

    def write(self, batch: pa.RecordBatch) -> None:
        columns = {field.name: _values(column, field) for field, column in zip(batch.schema, batch.columns)}
        self._out.write(b"".join([orjson.dumps(row, _plain, self._options) for row in rows_of(columns)]))

    def close(self) -> None:
        if self._out is not self._raw:
            self._out.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def held_bytes(self) -> int:
        return 0


class _CsvWriter:
    def __init__(
        self, file: BinaryIO, schema: pa.Schema, codec: str, level: int | None, delimiter: str, *, header: bool
    ) -> None:
        self._raw = file
        self._out: Any = open_output(file, codec, level)
        self._options = pcsv.WriteOptions(include_header=False, delimiter=delimiter)
        if header and len(schema):
            names = pcsv.WriteOptions(include_header=True, delimiter=delimiter)
            empty = pa.RecordBatch.from_arrays([pa.array([], pa.string())] * len(schema), schema.names)
            pcsv.write_csv(empty, self._out, names)

    def write(self, batch: pa.RecordBatch) -> None:
        columns = [_as_csv(column, alone=len(batch.columns) == 1) for column in batch.columns]
        if columns:
            pcsv.write_csv(pa.RecordBatch.from_arrays(columns, batch.schema.names), self._out, self._options)

    def close(self) -> None:
        if self._out is not self._raw:
            self._out.close()

    def abort(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def held_bytes(self) -> int:
        return 0


def _values(column: pa.Array, field: pa.Field) -> list[Any]:
    """A column as what orjson can write."""
    if isinstance(column, pa.ExtensionArray):
        return [row[field.name] for row in to_rows(pa.RecordBatch.from_arrays([column], schema=pa.schema([field])))]
    values: list[Any] = column.to_pylist(maps_as_pydicts="strict")
    return values


def _plain(value: Any) -> Any:
    """What orjson has no form for: nanoseconds come as a kind of datetime; decimals and durations become text."""
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _as_csv(column: pa.Array, *, alone: bool) -> pa.Array:
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.string())
    if alone and column.null_count:
        # The only cell of a row: left empty it would be a blank line, which readers pass over. As text it is quoted.
        column = column.cast(pa.string()).fill_null("")
    return column


def _any(kind: pa.DataType, test: Any) -> bool:
    """Whether a type, or any inside it, passes a test."""
    if isinstance(kind, pa.BaseExtensionType):
        return _any(kind.storage_type, test)
    if pa.types.is_dictionary(kind):
        return _any(kind.value_type, test)
    return bool(test(kind)) or any(_any(kind.field(i).type, test) for i in range(kind.num_fields))


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )
