"""Tables of every kind of value, and an independent way to say them: one row after the other, in plain Python."""

from __future__ import annotations

import math
from datetime import date, datetime
from typing import Any

import pandas as pd
from hypothesis import strategies as st

TEXTS = st.one_of(
    st.sampled_from(
        ["", "a", 'say "hi"', "two\nlines", "a|b", "{x}", "[y]", "back\\slash\\", "\r\n", "é ü 中 🙂", "\t\x00", " "]
    ),
    st.text(max_size=8),
)
FLOATS = st.one_of(
    st.sampled_from(
        [math.nan, math.inf, -math.inf, -0.0, 0.0, 1e300, -1e-300, 22.0, 7.25, 71.2833, 1e-5, 2.5e10, 1e16]
    ),
    st.floats(),
    st.integers(-(10**9), 10**9).map(lambda n: n / 100),
)
INTEGERS = st.one_of(st.integers(-5, 5), st.integers(-(2**53), 2**53))
MOMENTS = st.datetimes(datetime(1800, 1, 1), datetime(2200, 1, 1))
DATES = st.dates(date(1800, 1, 1), date(2200, 1, 1))

CELLS = {
    "int": INTEGERS,
    "maybe int": st.none() | INTEGERS,
    "float": FLOATS,
    "maybe float": st.none() | FLOATS,
    "bool": st.booleans(),
    "maybe bool": st.none() | st.booleans(),
    "text": TEXTS,
    "maybe text": st.none() | TEXTS,
    "date": DATES,
    "moment": MOMENTS | MOMENTS.map(lambda m: datetime(m.year, m.month, m.day)),
    "maybe moment": st.none() | MOMENTS,
    "null": st.none(),
}
NAMES = st.one_of(
    st.sampled_from(["Age", "the fare", 'a "b"', "x|y", "two\nlines", "{c}", "ü", "a:b", "\\"]),
    st.text(min_size=1, max_size=4),
)


@st.composite
def tables(draw: st.DrawFn, max_rows: int = 5) -> dict[str, list[Any]]:
    """A mapping of columns, each of one kind and all equally long."""
    rows = draw(st.integers(0, max_rows))
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    kinds = [draw(st.sampled_from(sorted(CELLS))) for _ in names]
    return {name: draw(st.lists(CELLS[kind], min_size=rows, max_size=rows)) for name, kind in zip(names, kinds)}


def frame_of(columns: dict[str, list[Any]]) -> pd.DataFrame:
    """As pandas would hold it: integers with a gap become floats, moments NumPy's."""
    return pd.DataFrame({name: pd.Series(values, dtype=_dtype(values)) for name, values in columns.items()})


def _dtype(values: list[Any]) -> Any:
    present = {type(value) for value in values if value is not None}
    if present == {datetime}:
        return "datetime64[us]"
    if present in ({int}, {int, float}, {float}) and None in values:
        return "float64"
    return object if date in present or not values or len(present) != 1 else None


def rows_of(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    count = len(next(iter(columns.values())))
    return [{name: values[row] for name, values in columns.items()} for row in range(count)]


def is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))


def naive_text(value: Any) -> str:
    """What a value is said as, written down once more from the rules."""
    if value is True or value is False:
        return {True: "yes", False: "no"}[value]
    if isinstance(value, float):
        if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        if abs(value) <= 9007199254740992 and value == round(value):
            return f"{value:.0f}"
        return str(value)
    if isinstance(value, datetime):
        text = value.strftime("%H:%M:%S") + (f".{value.microsecond:06d}" if value.microsecond else "")
        day = f"{value.year:04d}-{value.month:02d}-{value.day:02d}"
        return day if text == "00:00:00" else f"{day} {text}"
    return str(value)
