"""Identity of rows in memory: a hash of their values, the same for every way to lay them out in Arrow."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock.sources.json_types import JSON_MARK

_ROWS = 1 << 16
_STRINGS = (pa.types.is_string, pa.types.is_large_string)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary)
_LISTS = (pa.types.is_list, pa.types.is_large_list)
_JSON = {name.encode(): value.encode() for name, value in JSON_MARK.items()}


def content_hash(table: Any) -> str:
    """Hash of names, types and values of a table, 128 bits as hex.

    Chunks and offsets do not count, nor does the width of offsets, nor whether text is kept as a dictionary. So the
    same rows in a pandas, Polars or Arrow table have the same hash. The buffers are hashed where they are, some
    gigabytes a second; only slices with nulls or dictionaries are copied, one slice at a time.
    """
    columns = [_ColumnHash(field) for field in table.schema]
    for start in range(0, table.num_rows, _ROWS):
        for batch in table.slice(start, _ROWS).to_batches():
            for column, values in zip(columns, batch.columns):
                column.update(values)
    digest = xxhash.xxh3_128(str(table.num_rows).encode())
    for column in columns:
        digest.update(column.digest())
    return str(digest.hexdigest())


def sample_hash(table: Any, slices: int = 64, rows: int = 16) -> str:
    """Hash of some rows of a table, evenly spread, for tables that are too large to be read just for their identity."""
    most = table.num_rows
    starts = sorted({most * number // slices for number in range(slices)} | {max(0, most - rows)})
    parts = [content_hash(table.slice(start, rows)) for start in starts]
    return str(xxhash.xxh3_128_hexdigest(" ".join([str(most), *parts]).encode()))


class _ArrayHash:
    """Hash of arrays, laid end to end."""

    def __init__(self) -> None:
        self._digest = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        self._digest.update(data)

    def digest(self) -> bytes:
        return bytes(self._digest.digest())


class _ColumnHash:
    """Hash of a column that comes in parts."""

    def __init__(self, field: pa.Field) -> None:
        self._name, self._type = field.name, _plain_type(field.type)
        marked = (field.metadata or {}).items() >= _JSON.items() or _is_json(field.type)
        self._kind = "json" if marked else _kind(self._type)
        self._rows = 0
        self._nulls, self._sizes, self._values = _ArrayHash(), _ArrayHash(), _ArrayHash()
        inner = [self._type.field(number) for number in range(self._type.num_fields)]
        named = pa.types.is_struct(self._type)  # the name of the values of a list differs between writers
        self._inner = [_ColumnHash(each if named else each.with_name("")) for each in inner]

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128(f"{self._name} {self._kind} {self._rows}".encode())
        for part in (self._nulls, self._sizes, self._values):
            digest.update(part.digest())
        for inner in self._inner:
            digest.update(inner.digest())
        return bytes(digest.digest())

    def update(self, values: Any) -> None:
        first, self._rows = self._rows, self._rows + len(values)
        while isinstance(values, pa.ExtensionArray):
            values = values.storage
        if pa.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if values.null_count:
            self._nulls.update(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False)) + first)
            values = values.drop_null()
        kind = values.type
        if pa.types.is_null(kind) or not len(values):
            return
        if any(holds(kind) for holds in (*_STRINGS, *_BYTES)):
            self._text(values)
        elif any(holds(kind) for holds in _LISTS):
            self._sizes.update(values.value_lengths().cast(pa.int64()).to_numpy())
            self._inner[0].update(values.flatten())
        elif pa.types.is_fixed_size_list(kind):
            self._inner[0].update(values.flatten())
        elif pa.types.is_struct(kind):
            for inner, column in zip(self._inner, values.flatten()):
                inner.update(column)
        elif pa.types.is_boolean(kind):
            self._values.update(values.cast(pa.uint8()).to_numpy())
        elif self._inner or not _is_fixed_width(kind):  # maps, unions and the like: rare, so row by row
            self._values.update(repr(values.to_pylist()).encode())
        else:
            width = kind.bit_width // 8
            data = np.frombuffer(values.buffers()[1], np.uint8)
            self._values.update(data[values.offset * width : (values.offset + len(values)) * width])

    def _text(self, values: Any) -> None:
        wide = pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type)
        _, bounds, data = values.buffers()
        offsets: npt.NDArray[Any] = np.frombuffer(bounds, np.int64 if wide else np.int32)
        offsets = offsets[values.offset : values.offset + len(values) + 1]
        self._sizes.update(np.diff(offsets).astype(np.int64, copy=False))
        if data is not None:
            self._values.update(np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of the values, as they are kept."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_json(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json"


def _kind(kind: pa.DataType) -> str:
    for name, checks in {"text": _STRINGS, "bytes": _BYTES, "list": _LISTS}.items():
        if any(holds(kind) for holds in checks):
            return name
    if pa.types.is_struct(kind):
        return "struct"
    return f"list[{kind.list_size}]" if pa.types.is_fixed_size_list(kind) else str(kind)


def _is_fixed_width(kind: pa.DataType) -> bool:
    try:
        return bool(kind.bit_width % 8 == 0)
    except ValueError:
        return False
