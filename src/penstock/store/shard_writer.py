"""One shard being written: an Arrow file and its index, hashed as they grow."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.arrays.ragged import is_any_list, offsets_of
from penstock.arrays.text import numbers_of
from penstock.errors import SchemaError
from penstock.memory.views import compact
from penstock.store.manifest import ShardEntry

_SMALL_BYTES = 1 << 16
"""Parts of an Arrow file that are written together: each write from Arrow waits for the interpreter lock."""


class ShardWriter:
    """Writes pieces to `path`, and to `path` plus `.index` one int32 for each row (how many tokens it has, if
    the store has tokens) followed by one for each piece (how many rows).

    Holds nothing but the index of its pieces. `sync` makes the bytes so far durable and returns their extent; another
    writer can later take over the pieces within that length.
    """

    def __init__(self, path: Path, schema: pa.Schema, tokens: str | None, mask: str | None) -> None:
        self.path = path
        self._tokens, self._mask = tokens, mask
        self._data = _HashedFile(path)
        self._index = _HashedFile(_index_of(path))
        self._buffered = pa.BufferedOutputStream(pa.PythonFile(self._data, "w"), _SMALL_BYTES)
        self._writer: Any = pa.ipc.new_file(self._buffered, schema)
        self._piece_rows: list[int] = []
        self.rows = 0
        self.size = 0
        """By the measure that cuts are made by."""
        self._token_total = self._supervised = 0

    def write(self, piece: pa.RecordBatch, size: int) -> None:
        self._writer.write_batch(piece)
        if self._tokens is not None:
            counts = token_counts(piece.column(self._tokens), self._tokens)
            self._index.write(counts)
            self._token_total += int(counts.sum(dtype=np.int64))
        if self._mask is not None:
            self._supervised += _count_true(piece.column(self._mask), self._mask)
        self._piece_rows.append(piece.num_rows)
        self.rows += piece.num_rows
        self.size += size

    def sync(self) -> tuple[int, str]:
        """Make the pieces so far durable; returns their length in bytes and their hash."""
        self._buffered.flush()
        self._data.sync()
        return self._data.length, self._data.digest.hexdigest()

    def finish(self) -> ShardEntry:
        """Complete and durable; the entry names the content, the files still have their own names."""
        self._writer.close()
        self._buffered.flush()
        self._index.write(np.array(self._piece_rows, "<i4"))
        for file in (self._data, self._index):
            file.sync()
            file.close()
        return ShardEntry(
            name=self._data.digest.hexdigest(),
            rows=self.rows,
            tokens=self._token_total if self._tokens is not None else None,
            supervised=self._supervised if self._mask is not None else None,
            bytes=self._data.length,
            index_checksum=self._index.digest.hexdigest(),
            index_bytes=self._index.length,
        )

    def abort(self) -> None:
        """Close without a footer; the files stay."""
        self._data.discarding = self._index.discarding = True
        for part in (self._writer, self._buffered, self._data, self._index):
            with contextlib.suppress(OSError, pa.ArrowException):  # a full disk is full for the last bytes too
                part.close()


def token_counts(column: pa.Array, name: str) -> npt.NDArray[np.int32]:
    """Number of tokens of each row; 0 for null."""
    kind = column.type
    if not is_any_list(kind):
        raise SchemaError(f"the column of tokens must hold lists, and {name!r} is {kind}; pass tokens=, or tokens=None")
    counts = pc.list_value_length(column)
    if counts.null_count:
        counts = pc.fill_null(counts, 0)
    return np.ascontiguousarray(numbers_of(counts), "<i4")


def _count_true(column: pa.Array, name: str) -> int:
    kind = column.type
    if not is_any_list(kind):
        raise SchemaError(f"the mask must hold lists, and {name!r} is {kind}; pass mask=")
    values = column.flatten()
    if pa.types.is_boolean(values.type):
        return int(pc.sum(values).as_py() or 0)
    return int(pc.sum(pc.not_equal(values, 0)).as_py() or 0)


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + ".index")


class _HashedFile(io.RawIOBase):
    """A file whose hash is known as soon as it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "wb")  # noqa: SIM115 - its lifetime is this object's
        self.digest = xxhash.xxh3_128()
        self.length = 0
        self.discarding = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.length

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.discarding:
            self._file.write(view)
            self.digest.update(view)
            self.length += view.nbytes
        return view.nbytes

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        return

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


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
    """True if an array has values beneath its nulls."""
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
    """Rebuilt row by row: values that belong to no row are left out."""
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
    """The zeros and empty lists beneath the nulls instead of them: a field declared without nulls must have none."""
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
    """Offsets of the values, and the end of the last."""
    kind = array.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind) or pa.types.is_large_list(kind)
    dtype = np.dtype(np.int64 if wide else np.int32)
    return np.frombuffer(array.buffers()[1], dtype, len(array) + 1, array.offset * dtype.itemsize).astype(np.int64)


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
        reach = offsets_of(row_bytes(batch))
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
        """Rows left at the end."""
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


def any_row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """Bytes of each row, for columns of any type: of categories, those of the numbers that stand for them."""
    total = np.zeros(batch.num_rows, np.int64)
    for column in batch.columns:
        if pa.types.is_dictionary(column.type):
            total += column.type.index_type.bit_width // 8
        elif _odd(column.type) is None:
            total += _sizes(column)
        elif batch.num_rows:
            total += column.nbytes // batch.num_rows
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
    if is_any_list(kind):
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
    offsets = numbers_of(array.offsets).astype(np.int64)
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
