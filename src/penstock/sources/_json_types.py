"""Which Arrow type fits every JSON value seen: merging types, and the values that no type fits."""

from __future__ import annotations

from typing import Any

import orjson
import pyarrow as pa

__all__ = ["JSON_TEXT", "TypeConflict", "conform", "infer", "merge", "storage", "without_timestamps"]

JSON_TEXT = pa.json_(pa.string())
"""Marks a place whose values have types that do not go together: they are kept as JSON text."""


class TypeConflict(Exception):
    """Two values at the same place that no Arrow type holds."""

    def __init__(self, path: str, first: pa.DataType, second: pa.DataType) -> None:
        super().__init__(f"{path}: {first} and {second}")
        self.path, self.first, self.second = path, first, second


def merge(first: pa.DataType, second: pa.DataType, path: str, *, mixed: bool = False) -> pa.DataType:
    """The narrowest type that holds both: null gives way, integers widen, structs and lists merge inside.

    Types that do not go together raise `TypeConflict`, or become `JSON_TEXT` if `mixed`.
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
    raise TypeConflict(path, first, second)


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


def conform(value: Any, kind: pa.DataType) -> Any:
    """A parsed value as the type wants it: whatever stands at a `JSON_TEXT` place becomes JSON text."""
    if value is None:
        return None
    if kind == JSON_TEXT:
        return orjson.dumps(value).decode()
    if pa.types.is_list(kind):
        return [conform(item, kind.value_type) for item in value]
    if pa.types.is_struct(kind):
        return {field.name: conform(value.get(field.name), field.type) for field in kind}
    return value


def storage(kind: pa.DataType) -> pa.DataType:
    """The type with JSON text as plain strings."""
    if kind == JSON_TEXT:
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(storage(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, storage(field.type)) for field in kind])
    return kind


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
