"""Dates as people write them: 31.01.2019, 1/31/2019 4:05 PM, Jan 31, 2019. Reading a column by a format, all at once.

A format is written as for `strptime`, with these differences: `%b` takes short and long English names of months, a day
may be 31st, seconds may have a fraction, and one blank stands for any number of them.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError

__all__ = ["DIRECTIVES", "ReadDates", "compile_format", "read_dates"]

_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    "jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?|"
    "nov(?:ember)?|dec(?:ember)?"
)
_WEEKDAY = "(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?"
DIRECTIVES = {
    "Y": r"(?P<Y>[0-9]{4})",
    "y": r"(?P<y>[0-9]{2})",
    "m": r"(?P<m>[0-9]{1,2})",
    "b": rf"(?P<b>{_MONTH})[.]?",
    "d": r"(?P<d>[0-9]{1,2})(?:st|nd|rd|th)?",
    "H": r"(?P<H>[0-9]{1,2})",
    "I": r"(?P<I>[0-9]{1,2})",
    "M": r"(?P<M>[0-9]{2})",
    "S": r"(?P<S>[0-9]{2})(?:[.](?P<f>[0-9]{1,9}))?",
    "p": r"(?P<p>[ap])[.]?m[.]?",
    "a": _WEEKDAY,
}
"""What stands for each directive, as a pattern."""
_SAME = {"B": "b", "A": "a"}
_TWO_DIGITS = 69
"""From here on a year of two digits is of the 20th century, as `strptime` has it."""

Numbers = npt.NDArray[np.int64]


class ReadDates(NamedTuple):
    """The cells of a column, read by a format."""

    values: pa.Array
    """Days, or timestamps if the format has hours; null where a cell is, and where it is no such date."""
    wrong: npt.NDArray[np.bool_]
    """Which cells are no such dates."""


@functools.cache
def compile_format(written: str) -> str:
    """The pattern of a format; one that cannot be a date's is an error."""
    known = ", ".join(f"%{name}" for name in (*DIRECTIVES, *_SAME))
    if not isinstance(written, str):
        raise ConfigError(f"date_format must be a text such as '%d.%m.%Y', got {written!r}")
    pattern, names = "", []
    for part in re.findall(r"%.|[^%]+|%$", written.strip(), re.DOTALL):
        if part == "%%":
            pattern += "%"
        elif part[0] != "%":
            pattern += "".join(r"\s+" if one.isspace() else re.escape(one) for one in re.split(r"(\s+)", part) if one)
        else:
            name = _SAME.get(part[1:], part[1:])
            if name not in DIRECTIVES or name in names:
                what = "twice" if name in names else "which is not known here"
                raise ConfigError(f"date_format={written!r} has {part!r} {what}; known are {known}")
            names.append(name)
            pattern += DIRECTIVES[name]
    year, month = {"Y", "y"} & {*names}, {"m", "b"} & {*names}
    if len(year) != 1 or len(month) != 1 or "d" not in names:
        raise ConfigError(f"date_format={written!r} must have a year, a month and a day, such as '%d.%m.%Y'")
    hours = {"H", "I"} & {*names}
    if len(hours) > 1 or ("I" in names) != ("p" in names) or ({"M", "S", "p"} & {*names} and not hours):
        raise ConfigError(f"date_format={written!r} must say hours as '%H:%M:%S' or '%I:%M:%S %p'")
    return f"(?i)^{pattern}$"


def read_dates(texts: pa.Array, written: str) -> ReadDates:
    """The cells as dates of this format. Blanks around a cell do not count."""
    parts = pc.extract_regex(pc.utf8_trim_whitespace(texts), compile_format(written))
    missing = np.asarray(texts.is_null())
    matched = ~np.asarray(parts.is_null())
    names = {field.name for field in parts.type}
    if "b" in names:
        letters = pc.utf8_slice_codeunits(pc.utf8_lower(pc.struct_field(parts, "b")), 0, 3)
        months: Numbers = np.asarray(pc.index_in(letters, pa.array(_MONTHS)).fill_null(0)).astype(np.int64) + 1
    else:
        months = _whole(parts, "m")
    years = _whole(parts, "Y") if "Y" in names else _of_two_digits(_whole(parts, "y"))
    days = _whole(parts, "d")
    good = matched & (months >= 1) & (months <= 12) & (days >= 1) & (years >= 1)
    first = ((years - 1970) * 12 + np.clip(months, 1, 12) - 1).astype("datetime64[M]")
    dates = first.astype("datetime64[D]") + (days - 1)
    good &= dates.astype("datetime64[M]") == first  # no 30th of February
    if not {"H", "I"} & names:
        made = pa.array(dates.astype(np.int64).astype(np.int32), mask=~good).view(pa.date32())
        return ReadDates(made, ~good & ~missing)
    seconds, fine = _seconds(parts, names)
    good &= fine
    times = dates.astype("datetime64[s]").astype(np.int64) + seconds
    unit = "s"
    if "f" in names and pc.any(pc.greater(pc.utf8_length(pc.struct_field(parts, "f")), 0)).as_py():
        tail = pc.utf8_slice_codeunits(pc.utf8_rpad(pc.struct_field(parts, "f"), 6, "0"), 0, 6)
        times, unit = times * 1_000_000 + np.asarray(tail.cast(pa.int64()).fill_null(0)), "us"
    return ReadDates(pa.array(times, mask=~good).cast(pa.timestamp(unit)), ~good & ~missing)


def _seconds(parts: pa.StructArray, names: set[str]) -> tuple[Numbers, npt.NDArray[np.bool_]]:
    """The seconds since midnight, and where there is such a time."""
    hours = _whole(parts, "H" if "H" in names else "I")
    minutes = _whole(parts, "M") if "M" in names else np.zeros_like(hours)
    seconds = _whole(parts, "S") if "S" in names else np.zeros_like(hours)
    fine = (hours < 24) & (minutes < 60) & (seconds < 60)
    if "I" in names:
        fine &= (hours >= 1) & (hours <= 12)
        late = np.asarray(pc.equal(pc.utf8_lower(pc.struct_field(parts, "p")), "p").fill_null(False))
        hours = hours % 12 + 12 * late
    return hours * 3600 + minutes * 60 + seconds, fine


def _whole(parts: pa.StructArray, name: str) -> Numbers:
    return np.asarray(pc.struct_field(parts, name).cast(pa.int64()).fill_null(0)).astype(np.int64)


def _of_two_digits(years: Numbers) -> Numbers:
    return years + np.where(years < _TWO_DIGITS, 2000, 1900)
