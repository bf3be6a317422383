"""JSON Lines and JSON files."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from penstock.errors import ConfigError, SchemaError
from penstock.files.compression import DamagedStreamError, open_input
from penstock.files.json_values import DepthError, is_too_deep, loads
from penstock.files.listing import PathLike
from penstock.files.machine_code import Functions
from penstock.files.records import JsonItems
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.prefetch import map_ahead
from penstock.pipeline.stages import Block, Decoded
from penstock.sources.blocks import FileLayout, RecordSpans
from penstock.sources.file_source import project
from penstock.sources.json_types import (
    TypeConflictError,
    conform,
    has_json_text,
    infer,
    merge,
    parseable,
    parsed,
    skeleton,
    storage,
    verbatim,
    without_timestamps,
)
from penstock.sources.plain_json import COMPILE_BYTES, KERNELS, LOAD_BYTES, CountedLines, PlainRows, infer_plain
from penstock.sources.record_source import LEAST_BUDGET, RecordSource, TypeScan, check_utf8
from penstock.types import Schema, from_rows

_SCAN_CHUNK_BYTES, _SCAN_CHUNK_ROWS = 1 << 20, 64
_REFUSED_BYTES = 4 << 20
"""Bytes of records that are looked at for the columns, if no row can be read."""
_ESCAPE = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


class JsonlSource(RecordSource):
    """One JSON object a line: a file, a directory, a glob or a list of them, compressed or not.

    Fields may be nested, ragged, null at first or appear late: the schema is made from all rows (see `schema` to give
    it and save the scan). Which columns there are and their types depend on nothing but the set of rows; their order is
    that of first appearance. Integers and floats together are floats, as are integers beyond 64 bits. Strings that look
    like dates stay strings. A field whose types do not go together, such as text here and a list there, is an error
    that names the row; `mixed="json"` keeps such fields as JSON text instead, and takes several times as long if there
    are any.

    The columns that `verbatim` names are kept as JSON text, with key order, nulls and spelling of numbers, unless they
    hold only strings, booleans and integers, in lists or as the fields that it names.

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
        verbatim: Mapping[str, Collection[str]] | None = None,
        max_row_bytes: int | str = "256 MiB",
        allow_empty: bool = False,
    ) -> None:
        if mixed not in ("error", "json"):
            raise ConfigError(f"mixed must be 'error' or 'json', got {mixed!r}")
        super().__init__(
            paths,
            schema=arrow_schema(schema),
            columns=columns,
            max_row_bytes=max_row_bytes,
            allow_empty=allow_empty,
            mixed=mixed if mixed != "error" else None,
            verbatim=sorted(verbatim) if verbatim else None,
        )
        self._mixed = mixed == "json"
        self._verbatim = dict(verbatim or {})
        self._json_text: pa.StructType | None = None
        """The row type, if some of its places are kept as JSON text."""
        self._asked: tuple[pa.Schema, pa.Schema] | None = None
        """The schema, and what Arrow's parser is asked for."""
        self._by_rows = self._given and not _parses_natively(self._schema)
        self._input_bytes: int | None = None
        self._has_room = self._has_room_to_compile = True
        """False if memory is too little for the library that loads kernels, or for the process that compiles them."""
        self._plain: PlainRows | None = None

    def _lay_out(self, number: int) -> FileLayout:
        return FileLayout(0, CountedLines())

    def _learn(self, found: pa.Schema) -> None:
        row = pa.struct(list(found))
        self._json_text = row if has_json_text(row) else None
        self._by_rows = self._json_text is not None
        super()._learn(pa.schema(list(storage(row))))

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> bool:
        """As `verbatim`, set by a pipeline for a stage that needs it, before anything is read; True if it is kept."""
        if self._verbatim or self._given:
            return self._verbatim.keys() >= columns.keys()
        if self._reader is not None or self._pending is not None:
            return False
        self._verbatim, self._mixed = dict(columns), True
        self._schema = self._mark = None  # what was learned by a look at the schema is learned again
        return True

    # -- plain rows --------------------------------------------------------------------------------------------------

    def _kernels(self) -> Functions | None:
        """The kernels for plain rows, if there are any: input that is read in no time is not worth loading them."""
        if not self._one_a_line or not self._has_room:
            return None
        if self._input_bytes is None:
            self._input_bytes = 0
            for file in self.files:
                if self._input_bytes < COMPILE_BYTES:
                    with contextlib.suppress(OSError):  # of a file that is gone, told when it is read
                        self._input_bytes += file.stat().st_size
        if self._input_bytes < LOAD_BYTES:
            return None
        return KERNELS.functions(compile_missing=self._has_room_to_compile and self._input_bytes >= COMPILE_BYTES)

    def fit_budget(self, nbytes: int) -> None:
        super().fit_budget(nbytes)
        self._has_room, self._has_room_to_compile = nbytes >= LEAST_BUDGET, nbytes >= 2 * LEAST_BUDGET

    def _decode(self, block: Block) -> Decoded:
        batch = self._plain_batch(block) if not self._by_rows and block.meta["records"] else None
        if batch is None:
            return super()._decode(block)
        rows = tuple(RecordSpans(block).filled().tolist()) if batch.num_rows < block.meta["records"] else None
        return Decoded(batch, rows=rows)

    def _plain_batch(self, block: Block) -> pa.RecordBatch | None:
        """The rows of a block without anything unusual; None where they need a closer look."""
        kernels = self._kernels()
        if kernels is None:
            return None
        plain = self._plain
        if plain is None or plain.schema is not self.schema:
            self._plain = plain = PlainRows(self.schema, others=self._columns is not None)
        if not plain.is_possible:
            return None
        try:
            found = plain.decode(kernels, block.data, block.meta["records"])
            if found is not None and not found[1]:
                check_utf8(block.data)
        except (pa.ArrowException, ValueError):
            return None
        return found[0] if found is not None else None

    def _plain_type(self, data: pa.Buffer) -> pa.DataType | None:
        """The type of the rows of a block without anything unusual, whatever encoding its texts have."""
        kernels = self._kernels()
        found = infer_plain(kernels, data) if kernels is not None else None
        return pa.struct([(name, self._wanted(name, kind)) for name, kind in found]) if found is not None else None

    # -- parsing -----------------------------------------------------------------------------------------------------

    def _parse(self, data: pa.Buffer, layout: FileLayout) -> pa.RecordBatch:
        check_utf8(data)
        ready, count = layout.cutter.prepare(np.frombuffer(data, np.uint8))
        if self._by_rows:
            return self._parse_rows([_loads(record) for _, record in _records(ready, layout)])
        return self._read(pa.py_buffer(ready), self.schema, count)

    def _read(self, data: pa.Buffer, schema: pa.Schema, count: int) -> pa.RecordBatch:
        table = pj.read_json(
            pa.BufferReader(data),
            pj.ReadOptions(use_threads=False, block_size=data.size + 1),
            pj.ParseOptions(
                explicit_schema=self._parseable(schema),
                newlines_in_values=not self._one_a_line,
                unexpected_field_behavior="error" if self._columns is None else "ignore",
            ),
        )
        whole = table.to_batches()
        if len(schema) and len(whole) == 1 and whole[0].schema.equals(schema, check_metadata=True):
            batch = whole[0]  # with thousands of columns, anything done for each takes longer than parsing
        else:
            columns = [parsed(table[field.name].combine_chunks(), field.type) for field in schema]
            batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        if batch.num_rows != count:
            raise ValueError(f"{batch.num_rows} rows, expected {count}")
        return batch

    def _parseable(self, schema: pa.Schema) -> pa.Schema:
        """The schema to ask Arrow's parser for; made once for all blocks."""
        known = self._asked
        if known is None or known[0] is not schema:
            self._asked = known = (schema, pa.schema([field.with_type(parseable(field.type)) for field in schema]))
        return known[1]

    def _parse_rows(self, rows: list[Any]) -> pa.RecordBatch:
        """The slow way, for values that are kept as JSON text, and for types that Arrow's JSON parser does not know."""
        names = set(self.schema.names)
        for row in rows:
            if not isinstance(row, dict):
                raise ValueError("a row is not an object")
            if self._columns is None and not row.keys() <= names:
                raise ValueError("a row has a field that is not in the schema")
        if self._json_text is None:
            kept = [{name: value for name, value in row.items() if name in names} for row in rows]
            return from_rows(kept, Schema.from_arrow(self.schema))
        return pa.RecordBatch.from_pylist([conform(row, self._json_text) for row in rows], schema=self.schema)

    def _obvious_error(self, record: pa.Buffer) -> Exception | None:
        text = record.to_pybytes()
        try:
            return None if isinstance(_loads(text), dict) else ValueError("a row is not an object")
        except ValueError as error:
            # Arrow's parser takes `-NaN` and `Inf` too.
            return None if b"NaN" in text or b"Inf" in text else error

    def _explain(self, record: bytes, layout: FileLayout, error: Exception) -> tuple[str, str]:
        try:
            row = _loads(record)
        except DepthError as problem:
            return "nested too deeply", f"{problem}; leave the row out with on_error='skip': {record[:80]!r}"
        except ValueError as problem:
            half = _lone_surrogate(record)
            if half is not None:
                return "invalid JSON", (
                    f"not valid JSON: the escape {half} is half of a surrogate pair and stands for no character; write "
                    "the whole pair, or \\ufffd in its place, or leave the row out with on_error='skip': "
                    f"{record[:80]!r}"
                )
            return "invalid JSON", f"not valid JSON: {problem}: {record[:80]!r}"
        if not isinstance(row, dict):
            kind = "null" if row is None else type(row).__name__
            return "not an object", f"expected a JSON object, got {kind}: {record[:80]!r}"
        for name, value in row.items():
            reason = self._misfit(name, value)
            if reason is not None:
                return "does not fit the schema", reason
        if not len(self.schema):
            return "no columns", "the row has no fields, and a row without columns cannot be kept"
        return "invalid JSON", f"not valid JSON: {error}: {record[:80]!r}".replace(" in row 0", "")

    def _misfit(self, name: str, value: Any) -> str | None:
        """Reason why this field of a row does not fit the schema; None if it does."""
        if name not in self.schema.names:
            return f"field {name!r} is not in the schema, which has {self.schema.names}" if not self._columns else None
        field = self.schema.field(name)
        try:
            if self._by_rows:
                self._parse_rows([{name: value}])
            else:
                self._read(pa.py_buffer(json.dumps({name: value}).encode()), pa.schema([field]), 1)
        except (pa.ArrowInvalid, ValueError, OverflowError):
            return f"column {name!r} holds {value!r:.80}, which is not {field.type}"
        return None

    def first_columns(self) -> list[str]:
        """The names of the fields in the first few megabytes: a look, where `schema` reads everything."""
        block = self._first_block()
        if block is None:
            return []
        kind = self._try_to_infer(block)[1]
        if kind is not None:
            return [field.name for field in kind]
        names: dict[str, None] = {}
        for _, record in _records(np.frombuffer(block.data, np.uint8), block.meta["layout"]):
            with contextlib.suppress(ValueError):  # a bad row, which is reported when it is read
                row = _loads_halves(record)
                names.update(dict.fromkeys(row if isinstance(row, dict) else ()))
        return list(names)

    def decode_alone(self, block: Block) -> Decoded:
        """The rows of a block with their own types, regardless of other blocks."""
        alone = type(self)(
            self.files, columns=self._columns, mixed="json" if self._mixed else "error", verbatim=self._verbatim
        )
        alone._input_bytes, alone._has_room = self._input_bytes, self._has_room
        alone._has_room_to_compile = self._has_room_to_compile
        alone._learn_from(block, None)
        return alone.decode(block)

    def learn_first(self) -> None:
        """Take the types of the first few megabytes for all rows, of which nothing else is read; others do not fit."""
        if not self.has_schema and (block := self._first_block()) is not None:
            self._learn_from(block, self._columns)

    def _learn_from(self, block: Block, columns: list[str] | None) -> None:
        kind = self._try_to_infer(block)[1]
        if kind is None:
            kind = self._scan_rows(block, pa.struct([]))
        merged = verbatim(merge(pa.struct([]), kind, "", mixed=self._mixed), self._verbatim)
        schema = pa.schema(list(merged))
        if columns is not None:
            schema = project(schema, self._list.partitions.stored(columns, schema.names), str(self._list))
        self._learn(self._list.partitions.completed(schema, columns))

    # -- the schema --------------------------------------------------------------------------------------------------

    def _scan_types(self, blocks: Iterator[Block], known: pa.DataType) -> TypeScan:
        with contextlib.closing(map_ahead(self._try_to_infer, blocks)) as found:
            for block, kind, looked_at_text in found:
                known = self._widened(known, block, kind, looked_at_text)
                yield
        return known

    def _widened(self, known: pa.DataType, block: Block, kind: pa.DataType | None, looked_at_text: bool) -> pa.DataType:
        """The types with those of a block. A row that is refused when it is read adds nothing, in any block."""
        try:
            if kind is not None:
                widened = merge(known, kind, "", mixed=self._mixed)
                if widened == known or looked_at_text:
                    return widened
                kind = self._infer_from_text(block)  # what is new may come from a row whose text is not valid
                return merge(known, kind, "", mixed=self._mixed)
        except (TypeConflictError, pa.ArrowException, ValueError):
            pass
        return self._scan_rows(block, known)

    def _merge_types(self, known: pa.DataType, more: pa.DataType) -> pa.DataType:
        return merge(known, more, "", mixed=self._mixed)

    def _typed(self, known: pa.DataType) -> pa.Schema:
        if not known.num_fields:
            known = self._types_of_a_refused_row()
        schema = pa.schema(list(verbatim(known, self._verbatim)))
        return project(schema, self._list.partitions.stored(self._columns, schema.names), str(self._list))

    def _types_of_a_refused_row(self) -> pa.DataType:
        """If no row can be read: of the first with half a surrogate pair, so that columns are known and it is named."""
        left = _REFUSED_BYTES
        with contextlib.closing(self._all_blocks()) as blocks:
            for block in blocks:
                for _, record in _records(np.frombuffer(block.data, np.uint8), block.meta["layout"]):
                    left -= len(record)
                    if left < 0:
                        return pa.struct([])
                    with contextlib.suppress(ValueError):
                        if isinstance(row := _loads_halves(record), dict):
                            return infer(row, mixed=self._mixed)
        return pa.struct([])

    def _try_to_infer(self, block: Block) -> tuple[Block, pa.DataType | None, bool]:
        """A block, the type of its rows (None if something in it is unusual), and whether their text was parsed."""
        try:
            if (kind := self._plain_type(block.data)) is not None:
                return block, kind, False
            table = self._read_skeleton(block, np.frombuffer(block.data, np.uint8))
            if table is not None:
                return block, self._row_type(table), False
            return block, self._infer_from_text(block), True
        except (pa.ArrowException, ValueError):
            return block, None, True

    def _infer_from_text(self, block: Block) -> pa.DataType:
        """The type of the rows of a block, all of which are valid, text too."""
        check_utf8(block.data)
        if (kind := self._plain_type(block.data)) is not None:
            return kind
        ready, count = block.meta["layout"].cutter.prepare(np.frombuffer(block.data, np.uint8))
        return self._row_type(self._read_any(pa.py_buffer(ready), count)) if count else pa.struct([])

    def _row_type(self, table: pa.Table) -> pa.DataType:
        return pa.struct([(field.name, self._wanted(field.name, field.type)) for field in table.schema])

    def _read_skeleton(self, block: Block, data: Any) -> pa.Table | None:
        """The block's rows without their text; None if they cannot be separated without a closer look."""
        bones = skeleton(data)
        if bones is None:
            return None
        try:
            ready, count = block.meta["layout"].cutter.prepare(bones)
            table = self._read_any(pa.py_buffer(ready), count)
        except (pa.ArrowException, ValueError):
            return None
        # A quote missing in one row pairs with one of another, and the rows between them run together.
        whole = len(block.meta["layout"].cutter.spans(bones)[0]) == block.meta["records"] and table.num_rows == count
        return table if whole else None

    def _read_any(self, data: pa.Buffer, count: int) -> pa.Table:
        """Rows with their own types."""
        options = pj.ParseOptions(newlines_in_values=not self._one_a_line)
        # A chunk costs time and memory for each column, however few rows it has.
        chunk_bytes = max(_SCAN_CHUNK_BYTES, _SCAN_CHUNK_ROWS * data.size // max(1, count))
        if chunk_bytes < data.size:
            try:
                # With threads, the fields that chunks add come in the order in which the chunks are done.
                chunks = pj.ReadOptions(use_threads=False, block_size=chunk_bytes)
                return pj.read_json(pa.BufferReader(data), chunks, options)
            except pa.ArrowException:
                pass  # a row longer than a chunk, or types that Arrow cannot bring together across chunks
        whole = pj.ReadOptions(use_threads=False, block_size=data.size + 1)
        return pj.read_json(pa.BufferReader(data), whole, options)

    def _wanted(self, name: str, kind: pa.DataType) -> pa.DataType:
        """The type of a column; of one that is not read anyway, nothing but its name."""
        return without_timestamps(kind) if self._columns is None or name in self._columns else pa.null()

    def _scan_rows(self, block: Block, known: pa.DataType) -> pa.DataType:
        """The slow way, for a block with something unusual in it: row by row, to name the row."""
        for number, record in _records(np.frombuffer(block.data, np.uint8), block.meta["layout"]):
            try:
                kind = self._type_of(record)
                known = known if kind is None else merge(known, kind, "", mixed=self._mixed)
            except TypeConflictError as conflict:
                raise SchemaError(
                    f"{block.origin.file}, row {block.origin.row + number}: field {conflict.path!r} is "
                    f"{_plain(conflict.second)} here and {_plain(conflict.first)} before; make the data agree, pass "
                    "mixed='json' to keep the field as JSON text, or schema= with the right type"
                ) from None
        return known

    def _type_of(self, record: bytes) -> pa.DataType | None:
        """The type of one row; None if it is bad, which is reported in its place, when the rows are read."""
        try:
            row = _loads(record)
        except DepthError:
            return None
        except ValueError:
            if b"NaN" not in record and b"Inf" not in record:
                return None
            if not record.lstrip().startswith(b"{"):  # Arrow's parser crashes on some that are not objects
                return None
            with contextlib.suppress(pa.ArrowException, ValueError):  # as a whole block of such rows is parsed
                check_utf8(pa.py_buffer(record))
                return self._row_type(self._read_any(pa.py_buffer(record.strip()), 1))
            return None
        if not isinstance(row, dict):
            return None
        if self._columns is not None:
            row = {name: value if name in self._columns else None for name, value in row.items()}
        return infer(row, mixed=self._mixed)


class JsonSource(JsonlSource):
    """JSON files: one array of objects, one object, or objects one after the other, over any number of lines.

    Read in pieces: a file larger than memory is fine. Otherwise as `JsonlSource`.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".json",)
    format_name: ClassVar[str] = "JSON"
    _one_a_line: ClassVar[bool] = False

    def _lay_out(self, number: int) -> FileLayout:
        position, first = _first_characters(self.files[number])
        in_array = first[:1] == b"[" and first != b"[,"  # with a comma there, the whole of it is no valid JSON
        return FileLayout(position + 1 if in_array else 0, JsonItems(in_array=in_array))


def _first_characters(path: PathLike) -> tuple[int, bytes]:
    """The first two bytes of a file that are neither space nor byte order mark, and where the first stands."""
    reader = open_input(path)
    try:
        read, scratch = b"", memoryview(bytearray(1 << 12))
        while got := reader.readinto(scratch):
            read += scratch[:got]
            text = read.removeprefix(b"\xef\xbb\xbf").lstrip()
            if text:
                return len(read) - len(text), text[:1] + text[1:].lstrip()[:1]
    except DamagedStreamError:
        pass  # reported when the file is read
    finally:
        reader.close()
    return 0, b""


def _records(data: Any, layout: FileLayout) -> Iterator[tuple[int, bytes]]:
    """The records of a block that are not blank, with their numbers."""
    starts, stops = layout.cutter.spans(data)
    view = memoryview(data)
    for number in np.flatnonzero(~layout.cutter.blank(data, starts)).tolist():
        yield number, bytes(view[starts[number] : stops[number]])


def _loads(record: bytes) -> Any:
    """A parsed record, numbers as they are spelled; like Arrow's parser it knows NaN and Infinity."""
    return loads(record)


def _loads_halves(record: bytes) -> Any:
    """As `_loads`, with halves of surrogate pairs: such a row is refused when it is read, but its fields are known."""
    return _loads(record) if _lone_surrogate(record) is None or is_too_deep(record) else json.loads(record)


def _lone_surrogate(record: bytes) -> str | None:
    """The first escape of a record that is half of a surrogate pair without the other half."""
    if b"\\u" not in record:
        return None
    high: re.Match[bytes] | None = None
    for escape in _ESCAPE.finditer(record):
        code = int(escape[1], 16) if escape[1] else 0
        if high is not None:
            if 0xDC00 <= code < 0xE000 and escape.start() == high.end():
                high = None
                continue
            return high[0].decode()
        if 0xDC00 <= code < 0xE000:
            return escape[0].decode()
        high = escape if 0xD800 <= code < 0xDC00 else None
    return high[0].decode() if high is not None else None


def _parses_natively(schema: pa.Schema | None) -> bool:
    try:
        pj.read_json(pa.BufferReader(b"{}"), parse_options=pj.ParseOptions(explicit_schema=schema))
    except pa.ArrowNotImplementedError:
        return False
    return True


def _plain(kind: pa.DataType) -> str:
    return "an object" if pa.types.is_struct(kind) else "a list" if pa.types.is_list(kind) else str(kind)
