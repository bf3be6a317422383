"""CSV and TSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.compression import open_input
from penstock.files.listing import PathLike, split_suffix
from penstock.files.records import CsvRecords
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Block
from penstock.sources._blocks import Place
from penstock.sources._records import RecordSource, check_utf8, require_columns

__all__ = ["CsvSource"]

_HEADER_BYTES = 1 << 22


class CsvSource(RecordSource):
    """Comma separated values with quotes, quoted newlines and a header line; `.tsv` files are tab separated.

    Types come from all rows: a column is integer, float, boolean, date or timestamp only if every value is, and text
    otherwise. An empty cell is null. In columns that are not text, `NA`, `null`, `NaN` and the like are null too;
    in text they are text. Give `schema` to choose the types and save the scan, `names` for files without a header.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".csv", ".tsv")
    format_name: ClassVar[str] = "CSV"

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        delimiter: str | None = None,
        names: Sequence[str] | None = None,
        schema: pa.Schema | Any | None = None,
        columns: Sequence[str] | None = None,
        max_row_bytes: int | str = "64 MiB",
        allow_empty: bool = False,
    ) -> None:
        if delimiter is not None and len(delimiter) != 1:
            raise ConfigError(f"delimiter must be one character, got {delimiter!r}")
        super().__init__(
            paths,
            CsvRecords(),
            schema=arrow_schema(schema),
            max_row_bytes=max_row_bytes,
            allow_empty=allow_empty,
        )
        self._delimiter = delimiter
        self._names = list(names) if names is not None else None
        self._columns = list(columns) if columns is not None else None
        self._headers: dict[int, list[str]] = {}

    def _begin(self, file: int) -> Place:
        if self._names is not None:
            return Place(file)
        return Place(file, self._header(file)[1])

    def _meta(self, file: int) -> dict[str, Any]:
        return {"names": self._names or self._header(file)[0], "delimiter": self._separator(file)}

    def _separator(self, file: int) -> str:
        return self._delimiter or ("\t" if split_suffix(self.files[file])[0] == ".tsv" else ",")

    def _header(self, file: int) -> tuple[list[str], int]:
        """The names in a file's first line, and where its first record begins."""
        path = self.files[file]
        reader = open_input(path)
        try:
            scratch = np.empty(_HEADER_BYTES if path.stat().st_size > _HEADER_BYTES else 1 << 16, np.uint8)
            filled = 0
            while filled < len(scratch) and (got := reader.readinto(memoryview(scratch)[filled:])):  # type: ignore[arg-type]
                filled += got
                end, _ = self._cutter.cut(scratch[:filled])
                if end:
                    break
        except OSError as error:
            if error.errno is not None:
                raise
            raise DataError(f"cannot be decompressed: {error}", file=str(path), row=0, offset=0) from error
        finally:
            reader.close()
        ends = self._cutter.ends(scratch[:filled])
        stop = int(ends[0]) if len(ends) else filled
        if not filled:
            return [], 0
        try:
            text = scratch[:stop].tobytes().removeprefix(b"\xef\xbb\xbf").decode()
        except UnicodeDecodeError as error:
            raise DataError(f"the header is not valid UTF-8 ({error.reason})", file=str(path), row=0, offset=0) from error
        names = next(csv.reader(io.StringIO(text), delimiter=self._separator(file)), [])
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"the header names {twice[0]!r} twice", file=str(path), row=0, offset=0)
        self._headers[file] = names
        return names, stop

    def _parse(self, data: pa.Buffer, block: Block) -> pa.RecordBatch:
        check_utf8(data)
        schema = self.schema
        names = block.meta["names"]
        require_columns(pa.schema([(name, pa.string()) for name in names]), schema.names, block.origin.file)
        if self._columns is None and len(names) > len(schema):
            extra = [name for name in names if name not in schema.names]
            raise SchemaError(f"{block.origin.file} has columns {extra} that the schema lacks; it has {schema.names}")
        table = self._read(data, block, {field.name: field.type for field in schema}).select(schema.names)
        batches = table.combine_chunks().to_batches()
        if not batches:
            return self._none()
        return pa.RecordBatch.from_arrays([_empty_is_null(column) for column in batches[0].columns], schema=schema)

    def _read(self, data: pa.Buffer, block: Block, types: dict[str, pa.DataType] | None) -> pa.Table:
        return pcsv.read_csv(
            pa.BufferReader(data),
            pcsv.ReadOptions(use_threads=False, column_names=block.meta["names"], block_size=data.size + 1),
            pcsv.ParseOptions(delimiter=block.meta["delimiter"], newlines_in_values=True),
            pcsv.ConvertOptions(column_types=types, strings_can_be_null=False, check_utf8=False),
        )

    def _explain(self, record: bytes, error: Exception) -> tuple[str, str]:
        try:
            record.decode()
        except UnicodeDecodeError as bad:
            return "invalid UTF-8", f"not valid UTF-8: byte {record[bad.start]:#04x} at position {bad.start}"
        message = str(error)
        if "Expected" in message and "columns" in message:
            return "wrong number of columns", f"{message.removeprefix('CSV parse error: ')}"
        return "does not fit the schema", message

    def _scan(self, blocks: Iterator[tuple[Block, pa.Buffer]]) -> pa.Schema:
        kinds: dict[str, pa.DataType] = {}
        for block, data in blocks:
            for field in self._infer(block, data):
                kinds[field.name] = _widen(kinds.get(field.name, pa.null()), field.type)
        if not kinds and self.files:
            kinds = dict.fromkeys(self._names or self._header(0)[0], pa.null())
        names = self._columns if self._columns is not None else list(kinds)
        schema = pa.schema(list(kinds.items()))
        require_columns(schema, names, str(self.files[0]))
        return pa.schema([schema.field(name) for name in names])

    def _infer(self, block: Block, data: pa.Buffer) -> list[pa.Field]:
        try:
            return list(self._read(data, block, None).schema)
        except pa.ArrowInvalid:
            pass  # bad records: look at the good ones by themselves, the others are reported when the rows are read
        kinds: dict[str, pa.DataType] = {}
        todo = [self._spans(data)]
        while todo:
            spans = todo.pop()
            start, stop = spans[0][0], spans[-1][1]
            try:
                for field in self._read(data.slice(start, stop - start), block, None).schema:
                    kinds[field.name] = _widen(kinds.get(field.name, pa.null()), field.type)
            except pa.ArrowInvalid:
                if len(spans) > 1:
                    todo += [spans[len(spans) // 2 :], spans[: len(spans) // 2]]
        return [pa.field(name, kind) for name, kind in kinds.items()]


def _widen(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """A type that reads both columns; text reads everything."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    temporal = [kind for kind in (first, second) if pa.types.is_timestamp(kind) or pa.types.is_date(kind)]
    if len(temporal) == 2 and {getattr(kind, "tz", None) for kind in temporal} == {None}:
        return pa.timestamp("ns") if pa.timestamp("ns") in temporal else pa.timestamp("s")
    return pa.string()


def _empty_is_null(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return column
    empty = pc.equal(column, "")
    return pc.if_else(empty, pa.scalar(None, column.type), column) if pc.any(empty).as_py() else column
