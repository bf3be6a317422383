"""Single values as plain Python, and as the text they have when no rule says otherwise."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

__all__ = [
    "FineDuration",
    "FineMoment",
    "Unsayable",
    "as_value",
    "duration_text",
    "float_text",
    "json_text",
    "plain_text",
    "whole",
    "why_unsayable",
]

_EXACT = 2**53
"""Whole floats up to here are said as the integers they are: pandas makes floats of integers where it must."""

_MIDNIGHT = time()

_SAYABLE = ("arrow.bool8", "arrow.fixed_shape_tensor", "arrow.json")
"""The extension types of Arrow whose values are plain ones; of any other what is stored need not be what is meant."""


class Unsayable(Exception):  # noqa: N818 - caught where the column and the row are known, never shown by itself
    """A value that a rule has no text for; the message is the reason."""


@dataclass(frozen=True, slots=True)
class FineMoment:
    """A moment and the nanoseconds (1 to 999) that Python's own type has no room for."""

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
    """A duration in nanoseconds."""

    nanoseconds: int


def as_value(value: Any) -> Any:
    """What a cell holds, as plain Python: NaN, NaT and pd.NA are None, NumPy's scalars Python's.

    A float narrower than 64 bits becomes the number that it is written as: 0.1, not 0.10000000149011612.
    """
    if value is None or isinstance(value, (str, int, list, tuple, dict)):  # bool too
        return value
    if isinstance(value, np.generic):
        return _from_numpy(value)
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Decimal):
        return None if value.is_nan() else value or abs(value)  # Arrow has no -0 of these
    if isinstance(value, datetime) and hasattr(value, "to_pydatetime"):
        return _from_timestamp(value)
    if isinstance(value, timedelta) and hasattr(value, "to_pytimedelta"):
        return _duration(value.to_pytimedelta(), getattr(value, "nanoseconds", 0))
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "as_py"):  # a scalar of Arrow
        if (reason := why_unsayable(getattr(value.type, "extension_name", ""))) is not None:
            raise Unsayable(reason)
        return as_value(value.as_py())
    return value


def why_unsayable(extension: str) -> str | None:
    """Why values of an extension type of Arrow have no text, if they have none."""
    if not extension or extension in _SAYABLE:
        return None
    return f"it holds {extension} values, which have no text; turn them into text, numbers or dates first"


def plain_text(value: Any) -> str:
    """A value without a rule: digits, the shortest form of a float, yes or no, ISO dates, JSON for what is nested."""
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
    raise Unsayable(
        f"{value!r:.80} is a {type(value).__name__}, which has no text; turn it into text or a number first"
    )


def float_text(value: float) -> str:
    """The shortest digits that read back as this float; whole ones have no point: 22, 7.25, 1e+300, inf."""
    if abs(value) <= _EXACT and value.is_integer():
        return str(int(value)) if value or math.copysign(1, value) > 0 else "-0"
    return repr(float(value))


def whole(value: Any) -> Any:
    """3 for 3.0, which pandas may have made of it; anything else as it is, -0.0 too."""
    if isinstance(value, float) and abs(value) <= _EXACT and value.is_integer() and str(value) != "-0.0":
        return int(value)
    return value


def duration_text(value: timedelta | FineDuration) -> str:
    """`1 day, 2:03:04.5`, as Python writes it but without zeros at the end."""
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
    """A value as JSON: letters as they are, infinity (which JSON lacks) as text, and what has no JSON type as text."""
    return json.dumps(_jsonable(value), ensure_ascii=False, allow_nan=False)


def _jsonable(value: Any) -> Any:
    value = as_value(value)
    if value is None or isinstance(value, (bool, str, int)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return whole(value)
    if isinstance(value, Mapping):
        # A column of structs has every key in every row, so a key without a value says nothing.
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
        raise Unsayable(f"{value} is outside the years 1 to 9999")
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
