"""Batches of arrays as Arrow batches and back, with what follows from the schema worked out once.

Columns of numbers, whatever their shape, take a short way: their memory becomes the Arrow buffer and is the array again
on the other side. Everything else goes through `penstock.types`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import SchemaError
from penstock.types import Field, Schema, from_numpy, to_numpy

__all__ = ["Arrays", "Columns"]

Arrays = dict[str, npt.NDArray[Any]]


class Columns:
    """The columns of a schema."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.arrow: pa.Schema = schema.to_arrow()
        self._columns = [_Column(field, arrow) for field, arrow in zip(schema, self.arrow)]

    @property
    def same_size(self) -> bool:
        """Whether all batches of as many rows take as many bytes."""
        return all(column.value is not None for column in self._columns)

    def fit(self, arrays: Mapping[str, Any], rows: int) -> bool:
        """Whether these are arrays of just these columns, with so many rows: a quick look at what is mostly so."""
        return len(arrays) == len(self._columns) and all(
            column.value is not None
            and isinstance(array := arrays.get(column.name), np.ndarray)
            and array.dtype == column.dtype
            and array.shape == (rows, *column.shape)
            for column in self._columns
        )

    def to_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> pa.RecordBatch:
        """Arrays with a row per sample as one Arrow batch, which shares the memory of the numbers among them."""
        return pa.RecordBatch.from_arrays(
            [column.encode(arrays[column.name]) for column in self._columns], schema=self.arrow
        )

    def to_arrays(self, batch: pa.RecordBatch, memory: npt.NDArray[np.uint8]) -> Arrays:
        """The arrays of a batch that was read from `memory`: parts of it, where it holds them as they are."""
        return {column.name: column.decode(batch.column(n), memory) for n, column in enumerate(self._columns)}


class _Column:
    def __init__(self, field: Field, arrow: pa.Field) -> None:
        self.name, self.field, self.type = field.name, field, arrow.type
        self.alone = Schema([field])
        fixed = field.shape is None or None not in field.shape
        value = arrow.type.value_type if isinstance(arrow.type, pa.FixedShapeTensorType) else arrow.type
        self.value: pa.DataType | None = value if fixed and _is_plain(value) else None
        self.dtype = np.dtype(value.to_pandas_dtype()) if self.value is not None else None
        self.shape = tuple(size for size in field.shape or () if size is not None)
        self.size = math.prod(self.shape)

    def encode(self, array: npt.NDArray[Any]) -> pa.Array:
        if self.value is None or array.dtype != self.dtype or array.shape[1:] != self.shape:
            return from_numpy({self.name: array}, self.alone).column(0)
        flat = np.ascontiguousarray(array)
        values = pa.Array.from_buffers(self.value, flat.size, [None, pa.py_buffer(flat)])
        if self.field.shape is None:
            return values
        rows = pa.Array.from_buffers(self.type.storage_type, len(array), [None], children=[values])
        return pa.ExtensionArray.from_storage(self.type, rows)

    def decode(self, column: pa.Array, memory: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        if self.value is None or column.offset or column.null_count:
            return self._decode_slowly(column)
        buffer = column.buffers()[-1]
        place, count = buffer.address - memory.ctypes.data, len(column) * self.size
        size = count * self.dtype.itemsize if self.dtype is not None else 0
        if not 0 <= place <= len(memory) - size:
            # It was compressed: the array is somewhere else, and may not be written to.
            return np.frombuffer(buffer, self.dtype, count).reshape(len(column), *self.shape).copy()
        return memory[place : place + size].view(self.dtype).reshape(len(column), *self.shape)

    def _decode_slowly(self, column: pa.Array) -> npt.NDArray[Any]:
        try:
            found = to_numpy(column, self.field)
        except SchemaError as error:
            raise SchemaError(f"column {self.name!r}: {error}") from None
        if self.field.shape is not None and None in self.field.shape and len(found):
            shapes = {row.shape for row in found}
            if len(shapes) == 1:  # rows of one batch agree, as a rule
                found = np.stack(list(found))
        return found if found.flags.writeable or found.dtype == object else found.copy()


def _is_plain(value: pa.DataType) -> bool:
    return bool(pa.types.is_integer(value) or pa.types.is_floating(value))
