"""Arrow type of JSON values: types merged over every value seen, and values that no type fits."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.text import arrow_of
from penstock.files.json_values import dumps
from penstock.files.records import positions_of

JSON_MARK = {"penstock.json": "text"}
JSON_TEXT = pa.json_(pa.string())
"""Marks a place whose values have types that do not go together: they are kept as JSON text."""


class TypeConflictError(Exception):
    """Two values at the same place that no Arrow type holds."""

    def __init__(self, path: str, first: pa.DataType, second: pa.DataType) -> None:
        super().__init__(f"{path}: {first} and {second}")
        self.path, self.first, self.second = path, first, second


def merge(first: pa.DataType, second: pa.DataType, path: str, *, mixed: bool = False) -> pa.DataType:
    """The narrowest type that holds both: null gives way, integers widen to floats, structs and lists merge inside.

    The order of merging makes no difference but for the order of fields, which is that of their first appearance.
    Types that do not go together raise `TypeConflictError`, or become `JSON_TEXT` if `mixed`.
    """
    if first == second or pa.types.is_null(second):
        return first
    if pa.types.is_null(first):
        return second
    if JSON_TEXT in (first, second):
        return JSON_TEXT
    if {first, second} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if pa.types.is_list(first) and pa.types.is_list(second):
        return pa.list_(merge(first.value_type, second.value_type, f"{path}[]", mixed=mixed))
    if pa.types.is_struct(first) and pa.types.is_struct(second):
        return _merge_structs(first, second, path, mixed)
    if mixed:
        return JSON_TEXT
    raise TypeConflictError(path, first, second)


def infer(value: Any, path: str = "", *, mixed: bool = False) -> pa.DataType:
    """The type of one parsed JSON value."""
    match value:
        case None:
            return pa.null()
        case bool():
            return pa.bool_()
        case int():
            return pa.int64() if -(1 << 63) <= value < 1 << 63 else pa.float64()
        case float():
            return pa.float64()
        case str():
            return pa.string()
        case list():
            inner = pa.null()
            for item in value:
                inner = merge(inner, infer(item, f"{path}[]", mixed=mixed), f"{path}[]", mixed=mixed)
            return pa.list_(inner)
        case dict():
            prefix = f"{path}." if path else ""
            return pa.struct([(key, infer(item, f"{prefix}{key}", mixed=mixed)) for key, item in value.items()])
    raise TypeError(f"not a JSON value: {value!r}")


def verbatim(kind: pa.DataType, columns: Mapping[str, Collection[str]]) -> pa.StructType:
    """The row type with some columns as JSON text, unless one type holds all their values exactly.

    A type is exact for strings, booleans and integers, alone, in lists, or as the `columns[name]` fields of objects. In
    any other type, numbers would lose their spelling, and keys their order or their absence.
    """
    fields = []
    for field in kind:
        allowed = columns.get(field.name)
        fields.append(field if allowed is None or _says_all(field.type, allowed) else field.with_type(JSON_TEXT))
    return pa.struct(fields)


def _says_all(kind: pa.DataType, allowed: Collection[str]) -> bool:
    if pa.types.is_list(kind):
        return _says_all(kind.value_type, allowed)
    if pa.types.is_struct(kind):
        return all(field.name in allowed and _is_plain(field.type) for field in kind)
    return _is_plain(kind)


def _is_plain(kind: pa.DataType) -> bool:
    return bool(kind in (pa.string(), pa.bool_(), pa.int64(), pa.null()))


def with_json(rows: Sequence[Mapping[str, Any]], columns: Collection[str]) -> list[dict[str, Any]]:
    """Rows of Python values with some of their columns as JSON text."""
    return [
        {name: dumps(value) if name in columns and value is not None else value for name, value in row.items()}
        for row in rows
    ]


def json_texts(values: Sequence[Any]) -> list[str | None]:
    """Python values as JSON text, null where there is none."""
    return [None if value is None else dumps(value) for value in values]


def marked_json(schema: pa.Schema, columns: Collection[str]) -> pa.Schema:
    """The schema with a note at the columns that `with_json` has made."""
    fields = [field.with_metadata(JSON_MARK) if field.name in columns else field for field in schema]
    return pa.schema(fields)


def conform(value: Any, kind: pa.DataType) -> Any:
    """A parsed value as the type wants it: a value at a `JSON_TEXT` place becomes JSON text.

    A value of another type than the scan saw is left as it is, for Arrow to refuse.
    """
    if value is None:
        return None
    if kind == JSON_TEXT:
        return dumps(value, separators=(",", ":"))
    if pa.types.is_list(kind) and isinstance(value, list):
        return [conform(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {field.name: conform(value.get(field.name), field.type) for field in kind}
    if pa.types.is_floating(kind) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)  # Arrow refuses integers that a float cannot hold exactly, its JSON parser does not
    return value


def has_json_text(kind: pa.DataType) -> bool:
    """True if any part of the type is kept as JSON text."""
    if pa.types.is_list(kind):
        return has_json_text(kind.value_type)
    if pa.types.is_struct(kind):
        return any(has_json_text(field.type) for field in kind)
    return bool(kind == JSON_TEXT)


def storage(kind: pa.DataType) -> pa.DataType:
    """The type with JSON text as plain strings; the fields that hold it are marked in their metadata (`JSON_MARK`)."""
    if kind == JSON_TEXT:
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_stored("item", kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([_stored(field.name, field.type) for field in kind])
    return kind


def _stored(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, storage(kind), metadata=JSON_MARK if kind == JSON_TEXT else None)


def parseable(kind: pa.DataType) -> pa.DataType:
    """The type to ask Arrow's JSON parser for: it makes broken arrays of lists in which there is nothing but null."""
    if pa.types.is_list(kind):
        return pa.list_(pa.string() if pa.types.is_null(kind.value_type) else parseable(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(parseable(field.type)) for field in kind])
    return kind


def parsed(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """A column that was parsed as `parseable(kind)`, converted to `kind`."""
    if array.type == kind:
        return array
    if pa.types.is_null(kind):
        if array.null_count < len(array):
            raise ValueError("a value where every row had null")
        return pa.nulls(len(array))
    missing = array.is_null() if array.null_count else None
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(array.offsets, parsed(array.values, kind.value_type), type=kind, mask=missing)
    columns = [parsed(array.field(i), field.type) for i, field in enumerate(kind)]
    return pa.StructArray.from_arrays(columns, fields=list(kind), mask=missing)


def without_timestamps(kind: pa.DataType) -> pa.DataType:
    """JSON has no timestamps: text that looks like one stays text, since the next row may not look like one."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(without_timestamps(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, without_timestamps(field.type)) for field in kind])
    return kind


def _merge_structs(first: pa.StructType, second: pa.StructType, path: str, mixed: bool) -> pa.StructType:
    fields = {field.name: field.type for field in first}
    prefix = f"{path}." if path else ""
    for field in second:
        known = fields.get(field.name, pa.null())
        fields[field.name] = merge(known, field.type, f"{prefix}{field.name}", mixed=mixed)
    return pa.struct(list(fields.items()))


Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]

_QUOTE, _BACKSLASH, _COLON = b'"\\:'
_IS_SPACE = np.zeros(256, bool)
_IS_SPACE[list(b" \t\r\n")] = True
_WORTH_IT = 4
"""A skeleton is made only where it is this many times smaller; gathering it costs more than parsing otherwise."""
_TAKEN_BYTES = 16 << 20
"""Largest block whose parts Arrow gathers: it reserves room for parts of average length, half of the block."""


def skeleton(data: Bytes) -> Bytes | None:
    """The same JSON values with every string empty, keys kept; None where that is not worth it, or quotes do not match.

    In text data strings are nearly everything: looking for quotes runs at several GB/s, a parser at a tenth of that.
    """
    quotes = _string_ends(data)
    if len(quotes) % 2 or not len(quotes):
        return None
    opens, closes = quotes[::2], quotes[1::2]
    keys = _before_colon(data, closes)
    # What is kept, and what is not, in turn: up to the quote that begins a text, and on from the one that ends it.
    bounds = np.zeros(2 * int(np.count_nonzero(~keys)) + 2, np.int64)
    bounds[1:-1:2], bounds[2:-1:2], bounds[-1] = opens[~keys] + 1, closes[~keys], len(data)
    lengths = bounds[1::2] - bounds[::2]
    ends = np.cumsum(lengths)
    if _WORTH_IT * int(ends[-1]) > len(data):
        return None
    if len(data) > _TAKEN_BYTES:
        slim: Bytes = data[np.arange(ends[-1]) + np.repeat(bounds[::2] - ends + lengths, lengths)]
        return slim
    parts = pa.Array.from_buffers(
        pa.large_binary(), len(bounds) - 1, [None, pa.py_buffer(bounds), pa.py_buffer(data)]
    ).take(arrow_of(np.arange(0, len(bounds) - 1, 2)))
    bones: Bytes = np.frombuffer(parts.buffers()[2], np.uint8, np.frombuffer(parts.buffers()[1], np.int64)[-1])
    return bones


def _string_ends(data: Bytes) -> Positions:
    """The quotes that begin and end strings: those after an even number of backslashes."""
    quotes = positions_of(data, _QUOTE)
    behind_slash = np.flatnonzero(data[np.maximum(quotes - 1, 0)] == _BACKSLASH)
    if not len(behind_slash):
        return quotes
    slashes = np.ones(len(behind_slash), np.int64)
    more, at = np.arange(len(behind_slash)), quotes[behind_slash] - 2
    while len(more):
        more = more[(at[more] >= 0) & (data[at[more]] == _BACKSLASH)]
        slashes[more] += 1
        at[more] -= 1
    escaped = np.zeros(len(quotes), bool)
    escaped[behind_slash[slashes % 2 == 1]] = True
    return quotes[~escaped]


def _before_colon(data: Bytes, closes: Positions) -> npt.NDArray[np.bool_]:
    """Flags of the strings that are keys: a colon follows, after optional space."""
    after = closes + 1
    last = len(data) - 1
    spaced = np.flatnonzero(_IS_SPACE[data[np.minimum(after, last)]])
    while len(spaced):
        after[spaced] += 1
        spaced = spaced[(after[spaced] <= last) & _IS_SPACE[data[np.minimum(after[spaced], last)]]]
    keys: npt.NDArray[np.bool_] = (after <= last) & (data[np.minimum(after, last)] == _COLON)
    return keys
