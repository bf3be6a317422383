"""JSON Lines and CSV files, compressed by suffix."""

from __future__ import annotations

from typing import Any, BinaryIO, ClassVar

import orjson
import pyarrow as pa
import pyarrow.csv as pcsv

from penstock.errors import ConfigError, SchemaError
from penstock.files.compression import open_output
from penstock.files.listing import PathLike, split_suffix
from penstock.pipeline.functions import rows_of, values_of
from penstock.sinks._files import FileSink, Writer

__all__ = ["CsvSink", "JsonlSink"]


class JsonlSink(FileSink):
    """One JSON object a line; `.gz`, `.zst`, `.bz2`, `.lz4` and `.xz` names are compressed.

    Binary columns have no JSON form and are refused; timestamps are written as ISO 8601 text.
    """

    suffix: ClassVar[str] = ".jsonl"

    def __init__(
        self, path: PathLike, *, compression_level: int | None = None, rows_per_file: int | None = None
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        self._level = compression_level

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        return _JsonlWriter(file, split_suffix(self.path)[1], self._level)


class CsvSink(FileSink):
    """Comma separated values with a header line; nested columns are refused. Null and empty text both become empty."""

    suffix: ClassVar[str] = ".csv"

    def __init__(
        self,
        path: PathLike,
        *,
        delimiter: str = ",",
        compression_level: int | None = None,
        rows_per_file: int | None = None,
    ) -> None:
        super().__init__(path, rows_per_file=rows_per_file)
        if len(delimiter) != 1:
            raise ConfigError(f"delimiter must be one character, got {delimiter!r}")
        self._delimiter, self._level = delimiter, compression_level

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        nested = [field.name for field in schema if pa.types.is_nested(field.type)]
        if nested:
            raise SchemaError(f"CSV has no form for the nested columns {nested}; drop them, or write JSON Lines or Parquet")
        return _CsvWriter(file, schema, split_suffix(self.path)[1], self._level, self._delimiter, header=first)


class _JsonlWriter:
    def __init__(self, file: BinaryIO, codec: str, level: int | None) -> None:
        self._raw = file
        self._out: Any = open_output(file, codec, level)

    def write(self, batch: pa.RecordBatch) -> None:
        options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS
        self._out.write(b"".join([orjson.dumps(row, _plain, options) for row in rows_of(values_of(batch))]))

    def close(self) -> None:
        if self._out is not self._raw:
            self._out.close()

    def held_bytes(self) -> int:
        return 0


class _CsvWriter:
    def __init__(
        self, file: BinaryIO, schema: pa.Schema, codec: str, level: int | None, delimiter: str, *, header: bool
    ) -> None:
        self._raw = file
        self._out: Any = open_output(file, codec, level)
        options = pcsv.WriteOptions(include_header=header, delimiter=delimiter)
        self._writer = pcsv.CSVWriter(self._out, schema, write_options=options) if len(schema) else None

    def write(self, batch: pa.RecordBatch) -> None:
        if self._writer is not None:
            self._writer.write_batch(batch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._out is not self._raw:
            self._out.close()

    def held_bytes(self) -> int:
        return 0


def _plain(value: Any) -> Any:
    """What orjson has no form for: dates inside Arrow come as Python dates, which it knows; decimals become text."""
    if isinstance(value, bytes):
        raise SchemaError("JSON has no form for binary values; drop the column, encode it, or write Parquet")
    return str(value)
