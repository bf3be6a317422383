"""Text and boolean columns of Arrow as NumPy arrays, without copies where Arrow allows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.errors import DataError

Integers = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def plain(array: pa.Array) -> pa.Array:
    """The same values in a layout every Arrow function takes: no dictionaries, no string views, no half floats."""
    if pa.types.is_dictionary(array.type):
        return plain(array.dictionary_decode())
    if array.type in VIEWS:
        return array.cast(VIEWS[array.type])
    if array.type == pa.float16():
        return array.cast(pa.float32())
    return array


def flags(array: pa.Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """A boolean column as NumPy booleans; null counts as False."""
    if not isinstance(array, pa.BooleanArray) or not len(array):
        given = array.fill_null(False) if array.null_count else array
        return given.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
    validity, values = array.buffers()  # not `to_numpy`, which imports pandas
    found = _bits(values, array.offset, len(array))
    return found & _bits(validity, array.offset, len(array)) if array.null_count else found


def _bits(packed: pa.Buffer, start: int, count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    first, last = start // 8, -(-(start + count) // 8)
    bits = np.unpackbits(np.frombuffer(packed, np.uint8)[first:last], bitorder="little")
    return bits[start - 8 * first :][:count].view(np.bool_)


def arrow_of(values: np.ndarray[Any, Any], there: np.ndarray[Any, np.dtype[np.bool_]] | None = None) -> pa.Array:
    """Numbers as an Arrow array, without a copy, or truth values; null where `there` is false.

    pyarrow would import pandas first: 0.2 s.
    """
    made = np.ascontiguousarray(values)
    validity = None if there is None else _packed(there)
    if made.dtype == np.bool_:
        return pa.Array.from_buffers(pa.bool_(), len(made), [validity, _packed(made)])
    return pa.Array.from_buffers(pa.from_numpy_dtype(made.dtype), len(made), [validity, pa.py_buffer(made)])


def _packed(truths: np.ndarray[Any, np.dtype[np.bool_]]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(truths, bitorder="little"))


def numbers_of(array: pa.Array) -> np.ndarray[Any, Any]:
    """A view of integers or floats without nulls; as `to_numpy`, which imports pandas."""
    kind = np.dtype(array.type.to_pandas_dtype())
    if not len(array):
        return np.empty(0, kind)
    view = np.frombuffer(array.buffers()[1], kind, len(array), array.offset * kind.itemsize)
    view.flags.writeable = False  # Arrow arrays share memory, and take it not to change
    return view


def text_array(texts: Iterable[str], kind: pa.DataType | None = None) -> pa.Array:
    """Texts as an Arrow array of strings or large strings, without the import of pandas."""
    data = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, data)], dtype=np.int64)
    kind = pa.string() if kind is None else kind
    if kind == pa.string() and bounds[-1] > np.iinfo(np.int32).max:
        raise ValueError(f"texts of {bounds[-1]:,} bytes are more than a column of the type string can hold")
    places = bounds if kind == pa.large_string() else bounds.astype(np.int32)
    return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(places), pa.py_buffer(b"".join(data))])


class Utf8(NamedTuple):
    """The bytes of a column of text: row i is `data[offsets[i]:offsets[i + 1]]`."""

    data: np.ndarray[Any, np.dtype[np.uint8]]
    offsets: Integers


def utf8(array: pa.Array) -> Utf8:
    """A view of the bytes of a string or binary column; slices cost nothing, `offsets` begin at 0."""
    offset_type: type[np.signedinteger[Any]] = np.int32
    if array.type in (pa.large_string(), pa.large_binary()):
        offset_type = np.int64
    if len(array) == 0:
        return Utf8(np.zeros(0, np.uint8), np.zeros(1, offset_type))
    _, offsets, data = array.buffers()
    bounds: Integers = np.frombuffer(offsets, offset_type)[array.offset : array.offset + len(array) + 1]
    first, last = bounds[0], bounds[-1]
    if first == last:
        return Utf8(np.zeros(0, np.uint8), np.zeros(len(bounds), offset_type))
    return Utf8(np.frombuffer(data, np.uint8)[first:last], bounds - first if first else bounds)


def from_utf8(text: Utf8, original: pa.Array) -> pa.Array:
    """A string column of new bytes, with the type and the nulls of the original."""
    validity = None
    if original.null_count:
        validity = pa.py_buffer(np.packbits(flags(original.is_valid()), bitorder="little"))
    offset_type = np.int64 if original.type == pa.large_string() else np.int32
    bounds = np.ascontiguousarray(text.offsets, offset_type)
    buffers = [validity, pa.py_buffer(bounds), pa.py_buffer(text.data)]
    return pa.Array.from_buffers(original.type, len(original), buffers)


def is_text(kind: pa.DataType) -> bool:
    """True if a type is Arrow's `string` or `large_string`."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def pieces(texts: pa.Array, max_bytes: int) -> Iterator[pa.Array]:
    """The column in slices of about `max_bytes` bytes; a longer row is a slice of its own."""
    dtype = np.int64 if texts.type == pa.large_string() else np.int32
    bounds = (
        np.frombuffer(texts.buffers()[1], dtype)[texts.offset : texts.offset + len(texts) + 1] if len(texts) else None
    )
    start = 0
    while start < len(texts):
        assert bounds is not None
        stop = int(np.searchsorted(bounds, bounds[start] + max_bytes, "right")) - 1
        stop = min(max(stop, start + 1), len(texts))
        yield texts[start:stop]
        start = stop


def checked_text(texts: pa.Array) -> pa.Array:
    """A column of text whose bytes are UTF-8, with an empty text for every null."""
    if texts.type not in (pa.string(), pa.large_string()):
        raise DataError(f"texts must be a string or large_string array, got {texts.type}")
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        row = _first_invalid(texts)
        raise DataError(
            f"the text of row {row} of the batch is not UTF-8: {texts[row].as_buffer().to_pybytes()[:80]!r}; "
            "decode it with the encoding it was written in, or leave the row out",
            row=row,
        ) from None
    return texts.fill_null("") if texts.null_count else texts


def _first_invalid(texts: pa.Array) -> int:
    for row in range(len(texts)):
        try:
            texts[row : row + 1].validate(full=True)
        except pa.ArrowInvalid:
            return row
    raise DataError("the column is not valid Arrow data")  # offsets that point nowhere: no row to blame
