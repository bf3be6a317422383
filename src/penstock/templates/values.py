"""Single values and Arrow arrays as plain values, and as text without a format."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_EXACT = 2**53
"""Integral floats up to here are written as integers: pandas makes floats of integers with missing values."""

_MIDNIGHT = time()

_PLAIN_EXTENSIONS = ("arrow.bool8", "arrow.fixed_shape_tensor", "arrow.json")
"""Arrow extension types with plain values; the storage of others may mean something else."""


class NoText(Exception):  # noqa: N818 - caught where the column and the row are known
    """Value without a text; the message is the reason."""


@dataclass(frozen=True, slots=True)
class FineMoment:
    """Timestamp with nanoseconds (1 to 999), which Python's type lacks."""

    moment: datetime
    nanosecond: int

    def isoformat(self, sep: str = " ") -> str:
        text = self.moment.isoformat(sep, "microseconds")
        end = len("0000-00-00 00:00:00.000000")
        return f"{text[:end]}{self.nanosecond:03}{text[end:]}"

    def strftime(self, form: str) -> str:
        return self.moment.strftime(form)


@dataclass(frozen=True, slots=True)
class FineDuration:
    """Duration in nanoseconds."""

    nanoseconds: int


def as_value(value: Any) -> Any:
    """Cell as a plain Python value: NaN, NaT and pd.NA are None, NumPy scalars are Python's.

    A float narrower than 64 bits becomes the number of its digits: 0.1, not 0.10000000149011612.
    """
    if value is None or isinstance(value, (str, int, list, tuple, dict)):  # bool too
        return value
    if isinstance(value, np.generic):
        return _from_numpy(value)
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Decimal):
        return None if value.is_nan() else value or abs(value)  # Arrow has no decimal -0
    if isinstance(value, datetime) and hasattr(value, "to_pydatetime"):
        return _from_timestamp(value)
    if isinstance(value, timedelta) and hasattr(value, "to_pytimedelta"):
        return _duration(value.to_pytimedelta(), getattr(value, "nanoseconds", 0))
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "as_py"):  # a scalar of Arrow
        if (reason := why_no_text(getattr(value.type, "extension_name", ""))) is not None:
            raise NoText(reason)
        return as_value(value.as_py())
    return value


def why_no_text(extension: str) -> str | None:
    """Reason why values of an Arrow extension type have no text; None if they have."""
    if not extension or extension in _PLAIN_EXTENSIONS:
        return None
    return f"it has {extension} values, which have no text; convert them to text, numbers or dates"


def plain_text(value: Any) -> str:
    """Text of a value: digits, the shortest form of a float, yes or no, ISO dates, JSON for nested values."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return float_text(value)
    if isinstance(value, Decimal):
        return _decimal_text(value)
    if isinstance(value, (datetime, FineMoment)):
        return _moment_text(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (timedelta, FineDuration)):
        return duration_text(value)
    if isinstance(value, (list, tuple, Mapping)):
        return json_text(value)
    raise NoText(f"{value!r:.80} is a {type(value).__name__}, which has no text; convert it to text or a number")


def float_text(value: float) -> str:
    """Shortest digits of a float; integral ones have no point: 22, 7.25, 1e+300, inf."""
    if abs(value) <= _EXACT and value.is_integer():
        return str(int(value)) if value or math.copysign(1, value) > 0 else "-0"
    return repr(float(value))


def whole(value: Any) -> Any:
    """3 for 3.0, which pandas may have made of it; anything else unchanged, also -0.0."""
    if isinstance(value, float) and abs(value) <= _EXACT and value.is_integer() and str(value) != "-0.0":
        return int(value)
    return value


def duration_text(value: timedelta | FineDuration) -> str:
    """Duration as Python writes it, without trailing zeros: `1 day, 2:03:04.5`."""
    if isinstance(value, FineDuration):
        total = value.nanoseconds
    else:
        total = (value.days * 86_400 + value.seconds) * 10**9 + value.microseconds * 1000
    days, rest = divmod(total, 86_400 * 10**9)
    seconds, fraction = divmod(rest, 10**9)
    text = f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    if fraction:
        text += f".{fraction:09}".rstrip("0")
    return f"{days} day{'' if abs(days) == 1 else 's'}, {text}" if days else text


def json_text(value: Any) -> str:
    """Value as JSON: Unicode unescaped; infinity and other values without a JSON type as text."""
    return json.dumps(_jsonable(value), ensure_ascii=False, allow_nan=False)


def _jsonable(value: Any) -> Any:
    value = as_value(value)
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return whole(value)
    if isinstance(value, Mapping):
        # A column of structs has every key in every row, so a null value is omitted.
        return {str(key): _jsonable(item) for key, item in value.items() if as_value(item) is not None}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    return plain_text(value)


def _from_numpy(value: np.generic) -> Any:
    if isinstance(value, np.floating):
        if np.isnan(value):
            return None
        return float(str(value)) if value.itemsize < 8 else float(value)
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return _from_clock(value)
    return as_value(value.item())


def _from_clock(value: np.datetime64 | np.timedelta64) -> Any:
    if np.isnat(value):
        return None
    kind = "datetime64" if isinstance(value, np.datetime64) else "timedelta64"
    coarse = value.astype(f"{kind}[us]")
    rest = int((value - coarse).astype("timedelta64[ns]").astype(np.int64)) if value != coarse else 0
    item: Any = coarse.item()
    if isinstance(item, timedelta):
        return _duration(item, rest)
    if not isinstance(item, datetime):
        raise NoText(f"{value} is outside the years 1 to 9999")
    return FineMoment(item, rest) if rest else item


def _from_timestamp(value: Any) -> Any:
    if value != value:  # NaT
        return None
    moment = value.to_pydatetime(warn=False)
    return FineMoment(moment, value.nanosecond) if value.nanosecond else moment


def _duration(value: timedelta, nanoseconds: int) -> timedelta | FineDuration:
    if not nanoseconds:
        return value
    return FineDuration((value.days * 86_400 + value.seconds) * 10**9 + value.microseconds * 1000 + nanoseconds)


def _moment_text(value: datetime | FineMoment) -> str:
    if isinstance(value, FineMoment):
        return value.isoformat(" ")
    if value.tzinfo is None and value.time() == _MIDNIGHT:
        return value.date().isoformat()
    return value.isoformat(" ")


def _decimal_text(value: Decimal) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


TEXT = pa.large_string()
"""Type of intermediate texts: a slice of very long ones may exceed the two gigabytes of `string`."""

_VIEWS = (pa.string_view(), pa.binary_view())
_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
# Between these Arrow writes a float as Python does; beyond, their exponents differ.
_SMALL, _LARGE = 1e-4, 1e10


def is_text(kind: pa.DataType) -> bool:
    return kind in _TEXTS


def join(*parts: Any, between: str = "", nulls: str = "emit_null") -> pa.Array:
    """Texts joined row by row. A str is the same in every row; a null makes its row null, or is replaced."""
    pieces = [
        pa.scalar(part, TEXT) if isinstance(part, str) else part
        for part in parts
        if between or not isinstance(part, str) or part
    ]
    return pc.binary_join_element_wise(*pieces, pa.scalar(between, TEXT), null_handling=nulls)


def join_parts(parts: Sequence[tuple[str, pa.Array, str]], between: str) -> pa.Array:
    """Parts of prefix, values and suffix joined row by row, without the parts whose value is null.

    A part that can be null is joined with its separator first; the others go directly into the result. Arrow can skip
    nulls itself, but then drops rows of nulls only.
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
    # The first part differs from row to row, so that each began with the separator.
    return pc.utf8_slice_codeunits(joined, len(between))


def clean(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Column as one plain array: text as `large_string`, floats as float64 with NaN as null."""
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
    """`float_text` of each value."""
    size = pc.abs(values)
    texts = pc.cast(values, TEXT)
    usual = pc.and_(pc.greater_equal(size, _SMALL), pc.less(size, _LARGE))
    strange = pc.invert(pc.or_(usual, pc.equal(size, 0.0)))
    if not pc.any(strange).as_py():
        return texts
    strange = pc.fill_null(strange, False)
    return pc.replace_with_mask(texts, strange, pa.array(map(float_text, values.filter(strange).to_pylist()), TEXT))


def distinct(values: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """Distinct values, and the code of each row; nested values are returned unchanged, without codes."""
    if pa.types.is_nested(values.type):
        return values, None
    encoded = values.dictionary_encode()
    return encoded.dictionary, encoded.indices


def python_values(values: pa.Array) -> list[Any]:
    """Plain Python values, with nanoseconds."""
    kind = values.type
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        raise NoText(f"it has bytes ({kind}); decode them to text, or exclude the column")
    if (pa.types.is_timestamp(kind) or pa.types.is_duration(kind)) and kind.unit == "ns":
        return _fine(values)
    try:
        return list(values.to_pylist()) if not pa.types.is_nested(kind) else [as_value(v) for v in values.to_pylist()]
    except (ValueError, OverflowError, NotImplementedError) as error:  # such as the year 10000
        raise NoText(f"Python has no value for some of its {kind} ({error})") from None


def _decoded(array: pa.Array) -> pa.Array:
    """Array without encodings, and text as `large_string`, since few Arrow functions take dictionaries of views."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        if (reason := why_no_text(kind.extension_name)) is not None:
            raise NoText(reason)
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
    """Narrow floats as the float64 with the same digits."""
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
