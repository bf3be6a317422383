"""Arrow arrays made ready to be said: one chunk, NaN as null, floats in 64 bits, distinct values as plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.templates.values import FineDuration, FineMoment, Unsayable, as_value, float_text, why_unsayable

__all__ = ["TEXT", "clean", "distinct", "float_texts", "is_text", "join", "join_parts", "python_values"]

TEXT = pa.large_string()
"""Texts on the way: a slice of very long ones may pass the two gigabytes that `string` holds."""

_VIEWS = (pa.string_view(), pa.binary_view())
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
# Between these Arrow writes a float as Python does; beyond, they differ in when the exponent begins.
_SMALL, _LARGE = 1e-4, 1e10


def is_text(kind: pa.DataType) -> bool:
    return kind in _TEXTS


def join(*parts: Any, between: str = "", nulls: str = "emit_null") -> pa.Array:
    """Texts put together row by row. A str is the same in every row; a null makes its row null, or nothing."""
    pieces = [
        pa.scalar(part, TEXT) if isinstance(part, str) else part
        for part in parts
        if between or not isinstance(part, str) or part
    ]
    return pc.binary_join_element_wise(*pieces, pa.scalar(between, TEXT), null_handling=nulls)


def join_parts(parts: Sequence[tuple[str, pa.Array, str]], between: str) -> pa.Array:
    """What stands before, the values and what stands after of each part, without the parts whose value is null.

    A part that can be null is made by itself, with what is between it and the first part that is always there; all
    others go straight into the result. Arrow could skip nulls by itself, but then leaves out rows of nothing else.
    """
    anchor = next((number for number, (_, texts, _) in enumerate(parts) if not texts.null_count), -1)
    pieces: list[Any] = [""]
    for number, (lead, texts, tail) in enumerate(parts):
        before = f"{between}{lead}" if number > anchor else lead
        after = f"{tail}{between}" if number < anchor else tail
        if texts.null_count:
            pieces += [join(before, texts, after), ""]
        else:
            pieces[-1] += before
            pieces += [texts, after]
    joined = join(*pieces, nulls="replace")
    if anchor >= 0 or not between:
        return joined
    # Which part comes first differs from row to row, so each of them began with what is between.
    return pc.utf8_slice_codeunits(joined, len(between))


def clean(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """A column in one piece: texts as `large_string`, floats as float64 with NaN as null, nothing encoded."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    decoded = [_decoded(chunk) for chunk in chunks or [pa.array([], column.type)]]
    array = decoded[0] if len(decoded) == 1 else pa.concat_arrays(decoded)
    if pa.types.is_floating(array.type):
        array = _wide(array)
        nan = pc.is_nan(array)
        if pc.any(nan).as_py():
            array = pc.if_else(nan, pa.scalar(None, array.type), array)
    return array


def float_texts(values: pa.Array) -> pa.Array:
    """What `float_text` says for each."""
    size = pc.abs(values)
    texts = pc.cast(values, TEXT)
    usual = pc.and_(pc.greater_equal(size, _SMALL), pc.less(size, _LARGE))
    strange = pc.invert(pc.or_(usual, pc.equal(size, 0.0)))
    if not pc.any(strange).as_py():
        return texts
    strange = pc.fill_null(strange, False)
    return pc.replace_with_mask(texts, strange, pa.array(map(float_text, values.filter(strange).to_pylist()), TEXT))


def distinct(values: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The different values and which of them each row has; nested values are left as they are, without codes."""
    if pa.types.is_nested(values.type):
        return values, None
    encoded = values.dictionary_encode()
    return encoded.dictionary, encoded.indices


def python_values(values: pa.Array) -> list[Any]:
    """Plain Python values, nanoseconds included."""
    kind = values.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        raise Unsayable(f"it holds bytes ({kind}); decode them to text, or leave the column out")
    if (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns":
        return _fine(values)
    try:
        return list(values.to_pylist()) if not pa.types.is_nested(kind) else [as_value(v) for v in values.to_pylist()]
    except (ValueError, OverflowError, NotImplementedError) as error:  # such as the year 10000
        raise Unsayable(f"Python has no value for some of its {kind} ({error})") from None


def _decoded(array: pa.Array) -> pa.Array:
    """Nothing encoded, and texts as `large_string`: Arrow can do little with dictionaries and runs of views."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        if (reason := why_unsayable(kind.extension_name)) is not None:
            raise Unsayable(reason)
        return pc.cast(array.storage, pa.bool_()) if kind == pa.bool8() else _decoded(array.storage)
    if pa.types.is_dictionary(kind):
        if kind.value_type in _VIEWS:
            array = pa.DictionaryArray.from_arrays(array.indices, _decoded(array.dictionary))
        return _decoded(array.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        whole = pa.RunEndEncodedArray.from_arrays(array.run_ends, _decoded(array.values))
        return pc.run_end_decode(whole.slice(array.offset, len(array)))
    if kind == pa.binary_view():
        return pc.cast(array, pa.large_binary())
    return pc.cast(array, TEXT) if is_text(kind) and kind != TEXT else array


def _wide(array: pa.Array) -> pa.Array:
    """Narrow floats as the numbers they are written as, which is what they look like everywhere else."""
    if array.type == pa.float64():
        return array
    if array.type == pa.float32():
        return pc.cast(pc.cast(array, pa.string()), pa.float64())
    texts = [None if v is None else str(np.float16(v)) for v in array.to_pylist()]
    return pc.cast(pa.array(texts, pa.string()), pa.float64())


def _fine(values: pa.Array) -> list[Any]:
    counts = pc.cast(values, pa.int64()).to_pylist()
    rests = [0 if count is None else count % 1000 for count in counts]
    micros = pa.array([None if count is None else count // 1000 for count in counts], pa.int64())
    if pa.types.is_duration(values.type):
        whole = pc.cast(micros, pa.duration("us")).to_pylist()
        return [FineDuration(count) if rest else value for value, rest, count in zip(whole, rests, counts)]
    whole = pc.cast(micros, pa.timestamp("us", values.type.tz)).to_pylist()
    return [FineMoment(value, rest) if rest else value for value, rest in zip(whole, rests)]
