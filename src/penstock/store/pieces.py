"""Where a shard is cut: a function of the rows alone, so that the same rows always make the same files.

Rows are collected into pieces (record batches of about a megabyte, or one larger row), and pieces into shards. How the
rows were split into batches before leaves no trace: a piece is put together anew, without what lies around a slice or
beneath a null.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import SchemaError
from penstock.memory.views import compact
from penstock.store.null_values import without_hidden

__all__ = ["Pieces", "plain_batch", "plain_schema", "row_bytes"]

_ROW_OVERHEAD = 8
"""Bytes that any row is taken to have, so that a piece ends some time even if rows are empty."""


class Pieces:
    """Cuts a stream of batches into pieces. Holds less than one piece."""

    def __init__(self, piece_bytes: int) -> None:
        self._limit = piece_bytes
        self._pending: list[pa.RecordBatch] = []
        self._filled = 0

    def add(self, batch: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, int]]:
        """The pieces that this batch completes, each with its size by the measure that cuts are made by."""
        reach = np.concatenate([[0], np.cumsum(row_bytes(batch))])
        start = 0
        while start < batch.num_rows:
            room = self._limit - self._filled
            stop = int(np.searchsorted(reach, reach[start] + room, side="right")) - 1
            if stop >= batch.num_rows:
                break
            if stop == start and not self._pending:
                stop += 1  # a row larger than a piece is one by itself
            self._keep(batch, start, stop, int(reach[stop] - reach[start]))
            yield self._take()
            start = stop
        if start < batch.num_rows:
            self._keep(compact(batch.slice(start)), 0, batch.num_rows - start, int(reach[-1] - reach[start]))

    def rest(self) -> tuple[pa.RecordBatch, int] | None:
        """What is left at the end."""
        return self._take() if self._pending else None

    def pending(self) -> list[pa.RecordBatch]:
        """The rows that wait for more, as they are."""
        return list(self._pending)

    def held_bytes(self) -> int:
        return sum(batch.nbytes for batch in self._pending)

    def _keep(self, batch: pa.RecordBatch, start: int, stop: int, size: int) -> None:
        if stop > start:
            self._pending.append(batch.slice(start, stop - start))
            self._filled += size

    def _take(self) -> tuple[pa.RecordBatch, int]:
        parts, size = self._pending, self._filled
        self._pending, self._filled = [], 0
        schema = parts[0].schema
        columns = [pa.concat_arrays([part.column(i) for part in parts]) for i in range(len(schema))]
        return pa.RecordBatch.from_arrays(columns, schema=schema), size


def row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Bytes of each row, counted the same way wherever the row lies. Costs nothing for each token of a list."""
    total = np.full(batch.num_rows, _ROW_OVERHEAD, np.int64)
    for column in batch.columns:
        total += _sizes(column)
    return total


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema as it is stored: dictionaries as the values they stand for, without metadata but that of columns."""
    fields = []
    for column in schema:
        if pa.types.is_dictionary(column.type):
            column = column.with_type(column.type.value_type)
        odd = _odd(column.type)
        if odd is not None:
            raise SchemaError(
                f"column {column.name!r} has the type {odd}, which a store cannot hold; "
                "cast it to numbers, text, lists or structs"
            )
        fields.append(column)
    return pa.schema(fields)


def plain_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """A batch with its dictionaries taken apart, which depend on how rows were split, and nothing beneath its nulls."""
    columns = [c.dictionary_decode() if pa.types.is_dictionary(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays([without_hidden(column) for column in columns], schema=schema)


def _storage(kind: pa.DataType) -> pa.DataType:
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _odd(kind: pa.DataType) -> pa.DataType | None:
    """The part of a type that cannot be measured row by row, if there is one."""
    kind = _storage(kind)
    if _is_list(kind) or pa.types.is_fixed_size_list(kind):
        return _odd(kind.value_type)
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        parts = (kind.key_type, kind.item_type) if pa.types.is_map(kind) else tuple(field.type for field in kind)
        return next((odd for part in parts if (odd := _odd(part)) is not None), None)
    plain = pa.types.is_null(kind) or _width(kind) is not None or _is_text(kind)
    return None if plain else kind


def _width(kind: pa.DataType) -> int | None:
    """Bytes of a value, if all have the same. A truth value is counted as one."""
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_primitive(kind) or pa.types.is_fixed_size_binary(kind) or pa.types.is_decimal(kind):
        return int(kind.bit_width) // 8
    return None


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_binary, pa.types.is_large_string, pa.types.is_large_binary)
    )


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)  # type: ignore[no-any-return]


def _sizes(array: pa.Array) -> npt.NDArray[np.int64]:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    kind, rows = array.type, len(array)
    width = _width(kind)
    if width is not None:
        return np.full(rows, width, np.int64)
    if pa.types.is_null(kind) or not rows:
        return np.zeros(rows, np.int64)
    if pa.types.is_struct(kind):
        total = np.zeros(rows, np.int64)
        for child in array.flatten():
            total += _sizes(child)
        return total
    if pa.types.is_fixed_size_list(kind):
        values = array.values.slice(array.offset * kind.list_size, rows * kind.list_size)
        return _sums(values, np.arange(rows + 1, dtype=np.int64) * kind.list_size)
    if _is_text(kind):
        wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
        dtype = np.dtype(np.int64 if wide else np.int32)
        offsets = np.frombuffer(array.buffers()[1], dtype, rows + 1, array.offset * dtype.itemsize)
        return np.diff(offsets).astype(np.int64)
    offsets = array.offsets.to_numpy().astype(np.int64)
    values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    return _sums(values, offsets - offsets[0])


def _sums(values: pa.Array, offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bytes of each list, given all values and where the lists begin and end."""
    width = _width(_storage(values.type))
    if width is not None:
        return np.diff(offsets) * width
    reach = np.zeros(len(values) + 1, np.int64)
    np.cumsum(_sizes(values), out=reach[1:])
    return np.diff(reach[offsets])
