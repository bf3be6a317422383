"""Columns without what lies beneath their nulls, so that equal columns become equal bytes.

A mask over an array leaves the values where they were, and nobody can tell from the rows. Arrays that have nothing
there, which are nearly all, come back as they are, at the cost of a look at their nulls.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["without_hidden"]


def without_hidden(array: pa.Array) -> pa.Array:
    """The same values; beneath a null there are zeros, empty lists and texts, or nulls again."""
    if isinstance(array, pa.ExtensionArray):
        storage = without_hidden(array.storage)
        return array if storage is array.storage else pa.ExtensionArray.from_storage(array.type, storage)
    kind = array.type
    if pa.types.is_null(kind) or not len(array):
        return array
    if pa.types.is_struct(kind):
        return _plain_struct(array)
    if pa.types.is_fixed_size_list(kind):
        return _plain_blocks(array)
    if pa.types.is_nested(kind):
        return _plain_lists(array)
    return _emptied(array) if array.null_count and _hides(array) else array


def _hides(array: pa.Array) -> bool:
    """Whether an array with nulls has something beneath them."""
    kind, rows = array.type, len(array)
    nulls = _nulls(array)
    if pa.types.is_boolean(kind):
        bits = pa.Array.from_buffers(kind, rows, [None, array.buffers()[1]], offset=array.offset)
        return bool(bits.to_numpy(zero_copy_only=False)[nulls].any())
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind):
        width = kind.bit_width // 8
        values = np.frombuffer(array.buffers()[1], np.uint8, rows * width, array.offset * width)
        return bool(values.reshape(rows, width)[nulls].any())
    return bool(np.diff(_offsets(array))[nulls].any())


def _emptied(array: pa.Array) -> pa.Array:
    """Taken anew row by row: what has no row is not taken."""
    return array.take(pa.array(np.arange(len(array)), mask=_nulls(array)))


def _plain_struct(array: pa.Array) -> pa.Array:
    parts = array.flatten() if array.null_count else [array.field(i) for i in range(array.type.num_fields)]
    plain = [without_hidden(part) for part in parts]
    if not plain or (not array.null_count and all(new is old for new, old in zip(plain, parts))):
        return array
    if array.null_count:
        plain = [
            part if field.nullable or part.null_count > array.null_count else _all_valid(part)
            for part, field in zip(plain, array.type)
        ]
    mask = array.is_null() if array.null_count else None
    return pa.StructArray.from_arrays(plain, fields=list(array.type), mask=mask)


def _plain_blocks(array: pa.Array) -> pa.Array:
    size, rows = array.type.list_size, len(array)
    values = array.values.slice(array.offset * size, rows * size)
    if array.null_count:
        hidden = np.repeat(_nulls(array), size)
        values = values.take(pa.array(np.arange(rows * size), mask=hidden))
    plain = without_hidden(values)
    if array.null_count and not array.type.value_field.nullable and plain.null_count == array.null_count * size:
        plain = _all_valid(plain)
    if not size or (not array.null_count and plain is values):
        return array
    mask = array.is_null() if array.null_count else None
    return pa.FixedSizeListArray.from_arrays(plain, type=array.type, mask=mask)


def _plain_lists(array: pa.Array) -> pa.Array:
    """Lists and maps."""
    if array.null_count and _hides(array):
        array = _emptied(array)
    offsets = _offsets(array)
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    if pa.types.is_map(array.type):
        parts = [array.keys.slice(first, count), array.items.slice(first, count)]
    else:
        parts = [array.values.slice(first, count)]
    plain = [without_hidden(part) for part in parts]
    if all(new is old for new, old in zip(plain, parts)):
        return array
    wide = pa.types.is_large_list(array.type)
    starts = pa.array((offsets - first).astype(np.int64 if wide else np.int32))
    mask = array.is_null() if array.null_count else None
    kind: Any = pa.MapArray if pa.types.is_map(array.type) else pa.LargeListArray if wide else pa.ListArray
    return kind.from_arrays(starts, *plain, type=array.type, mask=mask)


def _all_valid(array: pa.Array) -> pa.Array:
    """The zeros and empty lists beneath the nulls instead of them: a field that says it has no nulls must have none."""
    if isinstance(array, pa.ExtensionArray):
        return pa.ExtensionArray.from_storage(array.type, _all_valid(array.storage))
    kind, rows = array.type, len(array)
    if pa.types.is_struct(kind):
        return pa.StructArray.from_arrays([array.field(i) for i in range(kind.num_fields)], fields=list(kind))
    if pa.types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, rows * kind.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(array.offsets, array.keys, array.items, type=kind)
    children = [array.values] if pa.types.is_nested(kind) else []
    own = array.buffers()[1 : kind.num_buffers]
    return pa.Array.from_buffers(kind, rows, [None, *own], offset=array.offset, children=children)


def _nulls(array: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.is_null(array).to_numpy(zero_copy_only=False))


def _offsets(array: pa.Array) -> npt.NDArray[np.int64]:
    """Where each value begins, and the last one ends."""
    kind = array.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind)
    dtype = np.dtype(np.int64 if wide else np.int32)
    return np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize).astype(np.int64)
