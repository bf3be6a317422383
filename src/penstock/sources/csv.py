"""CSV and TSV files."""

from __future__ import annotations

import contextlib
import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.listing import PathLike, split_suffix
from penstock.files.records import CsvRecords
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Block
from penstock.sources.blocks import BlockPosition, BlockReader, FileLayout
from penstock.sources.file_source import project
from penstock.sources.record_source import RecordSource, TypeScan, check_utf8

MAX_COLUMNS = 50_000
"""Columns of a CSV file: each takes a kilobyte and more in every batch."""


class _RowCountError(ValueError):
    """Other number of rows than records: a line end inside a record."""


@dataclass(frozen=True, slots=True)
class CsvLayout(FileLayout):
    """A CSV file: also its column names and what separates them."""

    names: tuple[str, ...]
    delimiter: str


class CsvSource(RecordSource):
    """Comma separated values with quotes, quoted newlines and a header line; `.tsv` files are tab separated.

    Types come from all rows: a column is integer, float, boolean (`true` and `false`), date, time or timestamp only if
    every value is, and text otherwise. An empty cell is null, a blank line is no row. In columns that are not text,
    `NA`, `null`, `NaN` and the like are null too; in text they are text. Give `schema` to choose the types (text, to
    keep the zeros of `007`) and save the scan, `names` for files without a header.

    Files may have their columns in different orders. Without a `schema` a column that some of them lack is null there.
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
        if delimiter is not None and (len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n'):
            raise ConfigError(f"delimiter must be one ASCII character, no quote and no line end, got {delimiter!r}")
        super().__init__(
            paths,
            schema=arrow_schema(schema),
            columns=columns,
            max_row_bytes=max_row_bytes,
            allow_empty=allow_empty,
            delimiter=delimiter,
            names=list(names) if names is not None else None,
        )
        self._delimiter = delimiter
        self._names = _distinct(tuple(names), "names") if names is not None else None
        if self._schema is not None:
            _refuse_unreadable(self._schema)

    def _lay_out(self, number: int) -> CsvLayout:
        path = self.files[number]
        delimiter = self._delimiter or ("\t" if split_suffix(path)[0] == ".tsv" else ",")
        begin, cutter = 0, CsvRecords(delimiter)
        names = self._names
        if names is None:
            begin, names = self._header(number, cutter, delimiter)
        if self._schema is not None and self._given and names:
            named = self._list.partitions.schema.names  # these stand in directories, and need not be in the file too
            wanted = [name for name in self._schema.names if name in names or name not in named]
            _check_columns(names, wanted, str(path), may_have_more=self._columns is not None)
        return CsvLayout(begin, cutter, names, delimiter)

    def _header(self, number: int, cutter: CsvRecords, delimiter: str) -> tuple[int, tuple[str, ...]]:
        """Offset of a file's first record, and the names in the line before it."""
        path = self.files[number]
        reader = BlockReader(
            [path],
            lambda _: FileLayout(0, cutter),
            pool=self._pool,
            max_row_bytes=self._max_row_bytes,
            allow_empty=True,
            place=BlockPosition(),
        )
        try:
            block = reader.next(1 << 14)
        finally:
            reader.close()
        if block is None:
            return 0, ()
        data = np.frombuffer(block.data, np.uint8)
        starts, stops = cutter.spans(data)
        filled = np.flatnonzero(~cutter.blank(data, starts))
        if not len(filled):
            return 0, ()
        start, stop = int(starts[filled[0]]), int(stops[filled[0]])
        try:
            line = block.data.slice(start, stop - start).to_pybytes().decode()
            names = next(csv.reader(io.StringIO(line, newline="\n"), delimiter=delimiter))
            return block.place.offset + stop, _distinct(tuple(names), "the header")
        except (UnicodeDecodeError, csv.Error, ConfigError) as error:
            raise DataError(
                f"the header cannot be read: {error}", file=str(path), offset=block.place.offset + start
            ) from error

    def _parse(self, data: pa.Buffer, layout: FileLayout) -> pa.RecordBatch:
        check_utf8(data)
        convert = pcsv.ConvertOptions(
            column_types=self.schema,
            include_columns=self.schema.names,
            include_missing_columns=True,
            strings_can_be_null=False,
            check_utf8=False,
        )
        _, count = layout.cutter.prepare(np.frombuffer(data, np.uint8))
        table = _read(data, layout, convert)
        if table.num_rows != count:
            raise _RowCountError(f"{table.num_rows} rows, expected {count}")
        columns = [_empty_is_null(table[name].combine_chunks()) for name in self.schema.names]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _explain(self, record: bytes, layout: FileLayout, error: Exception) -> tuple[str, str]:
        message = str(error).removeprefix("CSV parse error: ").removeprefix("Row #1: ")
        if "Expected" in message and "columns" in message:
            return "wrong number of columns", message
        if isinstance(error, _RowCountError):
            return "bare carriage return", "a line end inside a record: lines must end in \\n or \\r\\n, or be quoted"
        return "does not fit the schema", self._misfit(record, layout) or message

    def _misfit(self, record: bytes, layout: FileLayout) -> str | None:
        """Sentence that names the column of a record that does not fit the schema."""
        assert isinstance(layout, CsvLayout)
        cells = next(csv.reader(io.StringIO(record.decode(), newline="\n"), delimiter=layout.delimiter), [])
        for name, cell in zip(layout.names, cells):
            index = self.schema.get_field_index(name)
            if index >= 0:
                kind = self.schema.field(index).type
                convert = pcsv.ConvertOptions(column_types={name: kind}, include_columns=[name], check_utf8=False)
                try:
                    _read(pa.py_buffer(record), layout, convert)
                except pa.ArrowInvalid:
                    return f"column {name!r} holds {cell!r:.80}, which is not {kind}"
        return None

    def _scan_types(self, blocks: Iterator[Block], known: pa.DataType) -> TypeScan:
        for block in blocks:
            known = _widen_columns(known, self._infer(block))
            yield
        return known

    def _merge_types(self, known: pa.DataType, more: pa.DataType) -> pa.DataType:
        return _widen_columns(known, ((field.name, field.type) for field in more))

    def _typed(self, known: pa.DataType) -> pa.Schema:
        kinds = {field.name: field.type for field in known}
        for number in range(len(self.files)):
            with contextlib.suppress(DataError):  # reported in its place, when the rows are read
                for name in self._layout(number).names:  # type: ignore[attr-defined]
                    kinds.setdefault(name, pa.null())  # a header without rows
        stored = self._list.partitions.stored(self._columns, list(kinds))
        return project(pa.schema(list(kinds.items())), stored, str(self._list))

    def _infer(self, block: Block) -> Iterator[tuple[str, pa.DataType]]:
        """The types of the columns in a block, without its bad records, which are reported when the rows are read."""
        layout = block.meta["layout"]
        # 0 and 1 are numbers, or a column of them would change its type with the first `true` in the same block.
        convert = pcsv.ConvertOptions(
            true_values=["true", "True", "TRUE"],
            false_values=["false", "False", "FALSE"],
            strings_can_be_null=False,
            check_utf8=False,
        )
        data = np.frombuffer(block.data, np.uint8)
        starts, stops = layout.cutter.spans(data)
        todo = [(0, len(starts))]
        while todo:
            first, last = todo.pop()
            part = block.data.slice(int(starts[first]), int(stops[last - 1] - starts[first]))
            try:
                check_utf8(part)
                yield from ((field.name, field.type) for field in _read(part, layout, convert).schema)
            except pa.ArrowInvalid:
                if last - first > 1:
                    middle = (first + last) // 2
                    todo += [(middle, last), (first, middle)]


def _read(data: pa.Buffer, layout: FileLayout, convert: pcsv.ConvertOptions) -> pa.Table:
    assert isinstance(layout, CsvLayout)
    return pcsv.read_csv(
        pa.BufferReader(data),
        pcsv.ReadOptions(use_threads=False, column_names=list(layout.names), block_size=data.size + 1),
        pcsv.ParseOptions(delimiter=layout.delimiter, newlines_in_values=True),
        convert,
    )


def _distinct(names: tuple[str, ...], where: str) -> tuple[str, ...]:
    if len(names) > MAX_COLUMNS:
        raise ConfigError(f"{where} has {len(names):,} columns, and at most {MAX_COLUMNS:,} are read")
    if len(set(names)) < len(names):
        twice = next(name for name, times in Counter(names).items() if times > 1)
        raise ConfigError(f"{where} has {twice!r} twice")
    return names


def _check_columns(names: Sequence[str], wanted: Sequence[str], file: str, *, may_have_more: bool) -> None:
    """A file must have the columns of a schema that was given, and no others unless `columns` chose among them."""
    here, asked = set(names), set(wanted)
    missing = [name for name in wanted if name not in here]
    if missing:
        raise SchemaError(f"column {missing[0]!r} not in {file}; it has {list(names)}")
    extra = [name for name in names if name not in asked]
    if extra and not may_have_more:
        raise SchemaError(f"{file} has columns {extra} that the schema lacks; add them, or pass columns=")


def _refuse_unreadable(schema: pa.Schema) -> None:
    for field in schema:
        try:
            pcsv.read_csv(
                pa.BufferReader(b'""\n'),
                pcsv.ReadOptions(column_names=[field.name]),
                convert_options=pcsv.ConvertOptions(column_types={field.name: field.type}),
            )
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(f"column {field.name!r}: CSV cannot be read as {field.type}") from error


def _widen_columns(known: pa.DataType, more: Iterable[tuple[str, pa.DataType]]) -> pa.DataType:
    kinds = {field.name: field.type for field in known}
    for name, kind in more:
        kinds[name] = _widen(kinds.get(name, pa.null()), kind)
    return pa.struct(list(kinds.items()))


def _widen(first: pa.DataType, second: pa.DataType) -> pa.DataType:
    """The type that Arrow finds for both columns together, in any order; text reads everything."""
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    zones = {getattr(kind, "tz", None) for kind in (first, second)}
    if all(pa.types.is_timestamp(kind) or pa.types.is_date(kind) for kind in (first, second)) and len(zones) == 1:
        fine = any(pa.types.is_timestamp(kind) and kind.unit == "ns" for kind in (first, second))
        return pa.timestamp("ns" if fine else "s", zones.pop())
    return pa.string()


def _empty_is_null(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type) and not pa.types.is_large_string(column.type):
        return column
    empty = pc.equal(column, "")
    return pc.if_else(empty, pa.scalar(None, column.type), column) if pc.any(empty).as_py() else column
