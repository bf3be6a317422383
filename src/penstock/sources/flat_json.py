"""Rows of JSON Lines without a level below, decoded by kernels; whatever is not plain is left to Arrow's parser.

A block is taken as a whole or not at all, so that its rows, errors and types are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.files.machine_code import Functions, MachineCode
from penstock.files.records import JsonLines

NULL, TEXT, ESCAPED, INTEGER, FLOAT, TRUE, FALSE = range(7)
"""Kinds of values; what was found in a column is a set of bits, `1 << kind`."""
DONE, ODD, NEW_KEY = range(3)
"""Results of the kernel that finds values."""
POSITION, ROWS, HIGH, KEY_BEGIN, KEY_END, FACTS = range(6)
"""Its state: where it begins or has stopped, rows so far, whether a text is not ASCII, and where a new key lies."""

KERNELS = MachineCode("penstock.sources.json_kernels")
LOAD_BYTES, COMPILE_BYTES = 32 << 20, 128 << 20
"""Bytes of input for which the kernels are loaded, and compiled."""
_MOST_KEYS = 63
_MOST_BYTES = 1 << 30
_SLACK = 64

_TEXTS, _BOOLEANS = 1 << TEXT | 1 << ESCAPED, 1 << TRUE | 1 << FALSE
_INTEGERS, _NUMBERS = 1 << INTEGER, 1 << INTEGER | 1 << FLOAT
_INFERRED = {
    0: pa.null(),
    _INTEGERS: pa.int64(),
    1 << FLOAT: pa.float64(),
    _NUMBERS: pa.float64(),
    **dict.fromkeys((1 << TEXT, 1 << ESCAPED, _TEXTS), pa.string()),
    **dict.fromkeys((1 << TRUE, 1 << FALSE, _BOOLEANS), pa.bool_()),
}


class CountedLines(JsonLines):
    """JSON Lines that a kernel counts, if the kernels are loaded."""

    def cut(self, data: npt.NDArray[np.uint8]) -> tuple[int, int]:
        kernels = KERNELS.loaded
        if kernels is None:
            return super().cut(data)
        end = np.zeros(1, np.int64)
        count = kernels["count_lines"](data.ctypes.data, len(data), end.ctypes.data)
        return int(end[0]), count


class FlatRows:
    """Decoder of blocks whose rows have the columns of a schema, with other fields passed over or not."""

    def __init__(self, schema: pa.Schema, *, others: bool) -> None:
        self.schema, self._others = schema, others
        self._keys = _Keys(schema.names)
        self._allowed = [_allowed(field) for field in schema]
        self.is_possible = (
            0 < len(schema) <= _MOST_KEYS and None not in self._allowed and len(set(schema.names)) == len(schema)
        )

    def decode(self, kernels: Functions, data: pa.Buffer, records: int) -> tuple[pa.RecordBatch, bool] | None:
        """The rows of a block of at most so many records, and whether all of it is ASCII; None if it is not plain."""
        if data.size > _MOST_BYTES:
            return None
        count = len(self.schema)
        spans = np.empty(2 * count * records, np.int32)
        kinds = np.zeros((count, records), np.uint8)
        found, sizes, state = np.zeros(count, np.uint8), np.zeros(count, np.int64), np.zeros(6, np.int64)
        arrays = [*self._keys.arrays, spans, kinds, found, sizes, state]
        keys, key_ends, *places = (array.ctypes.data for array in arrays)
        result = kernels["find_values"](data.address, data.size, keys, key_ends, count, self._others, records, *places)
        rows = int(state[ROWS])
        if result != DONE or not rows:
            return None
        columns = []
        for number, field in enumerate(self.schema):
            bits = int(found[number])
            if bits & ~1 & ~(self._allowed[number] or 0):
                return None
            if not bits & ~1:
                columns.append(pa.nulls(rows, field.type))
                continue
            where = (places[0] + 8 * number * records, places[1] + number * records)
            part = _Column(kernels, where, rows, has_nulls=bool(bits & 1))
            if pa.types.is_boolean(field.type):
                columns.append(part.booleans())
            else:
                columns.append(_cast(part.texts(data, int(sizes[number])), field.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema), not state[HIGH]


class _Column:
    """Column of a block, whose values were found at an address."""

    def __init__(self, kernels: Functions, where: tuple[int, int], rows: int, *, has_nulls: bool) -> None:
        self._kernels, self._rows, self._has_nulls = kernels, rows, has_nulls
        self._spans, self._kinds = where
        self._valid = np.zeros(-(-rows // 8), np.uint8)

    def texts(self, data: pa.Buffer, nbytes: int) -> pa.Array:
        offsets = np.empty(self._rows + 1, np.int32)
        target = pa.allocate_buffer(nbytes + _SLACK)
        used = self._kernels["take_texts"](
            *(data.address, data.size, self._spans, self._kinds, self._rows),
            *(offsets.ctypes.data, target.address, self._valid.ctypes.data),
        )
        return self._array(pa.string(), pa.py_buffer(offsets), target.slice(0, used))

    def booleans(self) -> pa.Array:
        values = np.zeros(-(-self._rows // 8), np.uint8)
        self._kernels["take_booleans"](self._kinds, self._rows, values.ctypes.data, self._valid.ctypes.data)
        return self._array(pa.bool_(), pa.py_buffer(values))

    def _array(self, kind: pa.DataType, *buffers: pa.Buffer) -> pa.Array:
        valid = pa.py_buffer(self._valid) if self._has_nulls else None
        return pa.Array.from_buffers(kind, self._rows, [valid, *buffers])


def infer_flat(kernels: Functions, data: pa.Buffer) -> list[tuple[str, pa.DataType]] | None:
    """Names and types of the columns of a block, in order of first appearance; None if it is not plain."""
    if data.size > _MOST_BYTES:
        return None
    names: list[bytes] = []
    found, state = np.zeros(_MOST_KEYS, np.uint8), np.zeros(6, np.int64)
    result = NEW_KEY
    while result == NEW_KEY:
        table = _Keys(names)
        keys, key_ends = (array.ctypes.data for array in table.arrays)
        result = kernels["find_values"](
            *(data.address, data.size, keys, key_ends, len(names), 0, 0),
            *(0, 0, found.ctypes.data, 0, state.ctypes.data),
        )
        if result == NEW_KEY:
            names.append(data.slice(state[KEY_BEGIN], state[KEY_END] - state[KEY_BEGIN]).to_pybytes())
            if len(names) > _MOST_KEYS:
                return None
    kinds = [_INFERRED.get(bits) for bits in (found & 0xFE).tolist()[: len(names)]]
    if result != DONE or None in kinds:
        return None
    return [(name.decode(), kind) for name, kind in zip(names, kinds)]


class _Keys:
    """Table of keys as kernels take it: their bytes, and where each begins."""

    def __init__(self, names: Sequence[str | bytes]) -> None:
        parts = [name.encode(errors="surrogatepass") if isinstance(name, str) else name for name in names]
        ends = np.cumsum([0, *map(len, parts)], dtype=np.int32)
        self.arrays: tuple[npt.NDArray[Any], npt.NDArray[Any]] = (
            np.frombuffer(b"".join(parts) + b"\0", np.uint8),
            ends,
        )


def _allowed(field: pa.Field) -> int | None:
    """Kinds of values that a column may have beside null; None for a column that is not plain."""
    kind = field.type
    if not field.nullable:
        return None
    if kind == pa.string():
        return _TEXTS
    if pa.types.is_boolean(kind):
        return _BOOLEANS
    if pa.types.is_integer(kind):
        return _INTEGERS
    if kind in (pa.float32(), pa.float64()):
        return _NUMBERS
    return 0 if pa.types.is_null(kind) else None


def _cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """Numbers that were found as texts; Arrow's parser of JSON converts them by the same function."""
    return texts if kind == pa.string() else texts.cast(kind)
