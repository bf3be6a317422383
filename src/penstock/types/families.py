"""Families of Arrow types that are told apart in many places: texts, lists, numbers."""

from __future__ import annotations

import pyarrow as pa


def is_text(kind: pa.DataType) -> bool:
    """True if a type is Arrow's `string` or `large_string`."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_list(kind: pa.DataType) -> bool:
    """True for lists with offsets, which lie one after the other; those of a list view need not."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def is_any_list(kind: pa.DataType) -> bool:
    """True for lists with offsets and lists of a fixed size."""
    return is_list(kind) or bool(pa.types.is_fixed_size_list(kind))


def is_number(kind: pa.DataType) -> bool:
    """True for integers, floats and booleans."""
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))
