"""JSON Lines and JSON files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import orjson
import pyarrow as pa
import pyarrow.json as pj

from penstock.errors import ConfigError, SchemaError
from penstock.files.listing import PathLike
from penstock.files.records import Cutter, JsonItems, Lines
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Block
from penstock.sources._json_types import TypeConflict, conform, infer, merge, storage, without_timestamps
from penstock.sources._records import RecordSource, check_utf8, require_columns, unfit

__all__ = ["JsonSource", "JsonlSource"]


class JsonlSource(RecordSource):
    """One JSON object a line: a file, a directory, a glob or a list of them, compressed or not.

    Fields may be nested, ragged, null at first or appear late: the schema is made from all rows (see `schema` to give
    it and save the scan). A field whose types do not go together, such as text here and a list there, is an error that
    names the rows; `mixed="json"` keeps such fields as JSON text instead. Strings that look like dates stay strings.

    Reading goes block by block; parsing happens in the pipeline's workers.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".jsonl", ".ndjson")
    format_name: ClassVar[str] = "JSON Lines"
    _one_a_line: ClassVar[bool] = True

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        schema: pa.Schema | Any | None = None,
        columns: Sequence[str] | None = None,
        mixed: Literal["error", "json"] = "error",
        max_row_bytes: int | str = "256 MiB",
        allow_empty: bool = False,
    ) -> None:
        if mixed not in ("error", "json"):
            raise ConfigError(f"mixed must be 'error' or 'json', got {mixed!r}")
        super().__init__(
            paths,
            self._new_cutter(),
            schema=arrow_schema(schema),
            max_row_bytes=max_row_bytes,
            allow_empty=allow_empty,
        )
        self._columns = list(columns) if columns is not None else None
        self._mixed = mixed == "json"
        self._marked: pa.StructType | None = None

    def _new_cutter(self) -> Cutter:
        return Lines()

    def _parse(self, data: pa.Buffer, block: Block) -> pa.RecordBatch:
        check_utf8(data)
        if self._mixed and self._given_schema is None:
            return self._parse_mixed(data, block)
        table = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=data.size + 1),
            pj.ParseOptions(
                explicit_schema=self.schema,
                newlines_in_values=not self._one_a_line,
                unexpected_field_behavior="ignore" if self._columns is not None else "error",
            ),
        )
        batches = table.combine_chunks().to_batches()
        return batches[0] if batches else self._none()

    def _parse_mixed(self, data: pa.Buffer, block: Block) -> pa.RecordBatch:
        kinds = self._kinds()
        rows = [orjson.loads(record) for record in self._records(data)]
        for row in rows:
            if not isinstance(row, dict):
                raise pa.ArrowInvalid("a row is not an object")
        return pa.RecordBatch.from_pylist([conform(row, kinds) for row in rows], schema=self.schema)

    def _kinds(self) -> pa.StructType:
        self.schema  # noqa: B018 - the scan finds the places that hold mixed values
        if self._marked is None:  # resumed from a state: the schema came with it, the marks did not
            self._scan(self._all_blocks())
        assert self._marked is not None
        return self._marked

    def _explain(self, record: bytes, error: Exception) -> tuple[str, str]:
        try:
            row = orjson.loads(record)
        except orjson.JSONDecodeError as problem:
            try:
                record.decode()
            except UnicodeDecodeError as bad:
                return "invalid UTF-8", f"not valid UTF-8: byte {record[bad.start]:#04x} at position {bad.start}"
            return "invalid JSON", f"not valid JSON: {problem}: {record[:80]!r}"
        if not isinstance(row, dict):
            return "not an object", f"expected a JSON object, got {type(row).__name__}: {record[:80]!r}"
        reason = unfit(self.schema, row)
        if reason is not None:
            return "does not fit the schema", reason
        return "invalid JSON", str(error).replace(" in row 0", "")

    def _scan(self, blocks: Iterator[tuple[Block, pa.Buffer]]) -> pa.Schema:
        known: pa.DataType = pa.struct([])
        for block, data in blocks:
            try:
                if self._mixed:
                    raise pa.ArrowInvalid("mixed values are looked at one by one")
                kind = without_timestamps(self._infer_block(data))
                known = merge(known, kind, "")
            except (pa.ArrowInvalid, TypeConflict):
                known = self._scan_rows(block, known)
        self._marked = known
        schema = pa.schema([(field.name, storage(field.type)) for field in known])
        if self._columns is not None:
            require_columns(schema, self._columns, str(self.files[0]))
            schema = pa.schema([schema.field(name) for name in self._columns])
        return schema

    def _infer_block(self, data: pa.Buffer) -> pa.DataType:
        table = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=True, block_size=1 << 20),
            pj.ParseOptions(newlines_in_values=not self._one_a_line),
        )
        return pa.struct(list(table.schema))

    def _scan_rows(self, block: Block, known: pa.DataType) -> pa.DataType:
        """The slow way, for a block with something unusual in it: row by row, to say which."""
        for index, record in enumerate(self._records(block.data)):
            try:
                row = orjson.loads(record)
            except orjson.JSONDecodeError:
                continue  # reported in its place, when the rows are read
            if not isinstance(row, dict):
                continue
            try:
                known = merge(known, infer(row, mixed=self._mixed), "", mixed=self._mixed)
            except TypeConflict as conflict:
                raise SchemaError(
                    f"{block.origin.file}, row {block.origin.row + index}: field {conflict.path!r} is "
                    f"{_plain(conflict.second)} here and {_plain(conflict.first)} before; pass mixed='json' to keep "
                    "it as JSON text, or make the data agree"
                ) from None
        return known

    def _records(self, data: pa.Buffer) -> Iterator[bytes]:
        for start, stop in self._spans(data):
            record = data.slice(start, stop - start).to_pybytes().removeprefix(b"\xef\xbb\xbf")
            if record.strip():
                yield record


class JsonSource(JsonlSource):
    """JSON files: one array of objects, one object, or objects one after the other, over any number of lines.

    Read in pieces: a file larger than memory is fine.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".json",)
    format_name: ClassVar[str] = "JSON"
    _one_a_line: ClassVar[bool] = False

    def _new_cutter(self) -> Cutter:
        return JsonItems()


def _plain(kind: pa.DataType) -> str:
    return "an object" if pa.types.is_struct(kind) else "a list" if pa.types.is_list(kind) else str(kind)
