"""Which columns of texts are dates, and in which format: decided by the values of the whole column, or said by name.

`31/01/2019` somewhere in a column tells that days stand before months in all of it. Where nothing tells, or where some
cells are something else, a column stays text and there is a remark for whoever reads it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.datasets._dates import DIRECTIVES, ReadDates, read_dates

__all__ = ["FoundDates", "date_remedy", "find_dates", "one_array", "with_dates"]

log = logging.getLogger(__name__)

_LOOKED_AT, _MOST_FORMATS = 64, 12
_NAME = DIRECTIVES["b"].replace("?P<b>", "?:")
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_GAP = r"(?:\s*[./-]\s*|,?\s+)"
_WEEKDAY = re.compile(rf"(?P<day>{DIRECTIVES['a']})(?P<gap>[.,]?\s+)", re.IGNORECASE)
_TIME = re.compile(
    r"(?P<gap>,?\s+|T)\d{1,2}:\d{2}(?P<seconds>:\d{2}(?:\.\d{1,9})?)?(?P<half>\s*[ap]\.?m\.?)?$", re.IGNORECASE
)
_NUMBERS = re.compile(r"(\d{1,4})([./-])(\d{1,2})\2(\d{1,4})")
_NAMED = (
    (re.compile(rf"{_DAY}({_GAP}){_NAME}({_GAP})(\d{{4}}|\d{{2}})", re.IGNORECASE), "%d{0}%b{1}{year}"),
    (re.compile(rf"{_NAME}({_GAP}){_DAY}({_GAP})(\d{{4}})", re.IGNORECASE), "%b{0}%d{1}{year}"),
    (re.compile(rf"(\d{{4}})({_GAP}){_NAME}({_GAP}){_DAY}", re.IGNORECASE), "%Y{1}%b{2}%d"),
)
_UNREAD = re.compile(
    rf"{_NAME}[ /'-]+(?:\d{{4}}|\d{{2}})|\d{{1,2}}/[12]\d{{3}}|[12]\d{{3}}/\d{{1,2}}|[12]\d{{3}}-?[qQwW]\d{{1,2}}|"
    r"(?:\d{1,2}[./-]\d{1,2}[./-][12]\d{3}|[12]\d{3}[./-]\d{1,2}[./-]\d{1,2})[\sT]+\d{1,2}[:.]\d{2}.*",
    re.IGNORECASE,
)
"""What looks like dates, in forms that are not read: months and quarters alone, zones behind a time."""


class FoundDates(NamedTuple):
    """What texts are that look like dates: a format, or why none could be chosen."""

    format: str | None
    doubt: str = ""
    nearest: str | None = None
    """The format that most of the texts have, where some have it not."""


def find_dates(texts: pa.Array) -> FoundDates | None:
    """The format in which all of the texts are dates; None if they do not look like dates at all."""
    values = texts.drop_null()
    if not len(values):
        return None
    places = np.unique(np.linspace(0, len(values) - 1, _LOOKED_AT).astype(np.int64))
    looked_at = [str(value).strip() for value in values.take(pa.array(places)).to_pylist()]
    formats = [_formats_of(value) for value in looked_at]
    unread = [value for value, found in zip(looked_at, formats) if not found and _UNREAD.fullmatch(value)]
    if 2 * (sum(map(bool, formats)) + len(unread)) < len(looked_at):
        return None
    candidates = list(dict.fromkeys(one for found in formats for one in found))[:_MOST_FORMATS]
    if not candidates or len(unread) > sum(map(bool, formats)):
        return FoundDates(None, f"{unread[0]!r} is no form that is read")
    return _decided(values, candidates)


def with_dates(
    table: pa.Table, names: Iterable[str], *, file: str, formats: Mapping[str, str]
) -> tuple[pa.Table, dict[str, str]]:
    """The table with those of these columns as dates whose texts are, and the format of each.

    `formats` are those that somebody said. What looks like dates and cannot be decided stays text, with a warning.
    """
    made = dict(formats)
    for name in names:
        place = table.schema.get_field_index(name)
        kind = table.schema.field(place).type
        if name in formats or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            continue
        texts = one_array(table.column(place))
        found = find_dates(texts)
        if found is None:
            continue
        if found.format is None:
            doubt = f"{found.doubt}; {date_remedy(name)}"
            log.warning("%s: column %r looks like dates and stays text: %s", file, name, doubt)
            continue
        made[name] = found.format
        log.info("%s: column %r is read as dates, %s", file, name, found.format)
        table = table.set_column(place, name, read_dates(texts, found.format).values)
    return table, made


def date_remedy(name: str) -> str:
    """What to do about a column that looks like dates."""
    return (
        f"say what it is in the spec: columns={{{name!r}: ColumnSpec(kind='date', date_format='%d/%m/%Y')}}, or "
        "kind='text'"
    )


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    whole = column.combine_chunks()
    return pa.concat_arrays(whole.chunks) if isinstance(whole, pa.ChunkedArray) else whole


def _decided(values: pa.Array, candidates: Sequence[str]) -> FoundDates:
    read = {one: read_dates(values, one) for one in candidates}
    fitting = {one: dates for one, dates in read.items() if not dates.wrong.any()}
    if not fitting:
        best = min(read, key=lambda one: int(read[one].wrong.sum()))
        return FoundDates(None, _misfits(values, best, read[best]), best)
    first, *others = fitting
    for other in others:
        if not fitting[other].values.equals(fitting[first].values):
            row = int(np.not_equal(*(_moments(fitting[one].values) for one in (first, other))).argmax())
            return FoundDates(
                None,
                f"{values[row].as_py()!r} is {fitting[first].values[row].as_py():%Y-%m-%d} by {first} and "
                f"{fitting[other].values[row].as_py():%Y-%m-%d} by {other}, and no value of the column tells which",
            )
    return FoundDates(first)


def _moments(dates: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(dates.cast(pa.timestamp("us")).cast(pa.int64()))


def _misfits(values: pa.Array, written: str, read: ReadDates) -> str:
    first = values[int(read.wrong.argmax())].as_py()
    return f"{int(read.wrong.sum())} of {len(values)} values are not of the form {written}, such as {first!r}"


def _formats_of(value: str) -> list[str]:
    """The formats that one text may have, in the order in which they are tried."""
    before = behind = ""
    if weekday := _WEEKDAY.match(value):
        before, value = f"%a{weekday['gap']}", value[weekday.end() :]
    if time := _TIME.search(value):
        value = value[: time.start()]
        hours = "%I" if time["half"] else "%H"
        half = f"{time['half'][: len(time['half']) - len(time['half'].lstrip())]}%p" if time["half"] else ""
        behind = f"{time['gap']}{hours}:%M{':%S' if time['seconds'] else ''}{half}"
    return [f"{before}{one}{behind}" for one in _dates_of(value)]


def _dates_of(value: str) -> list[str]:
    if numbers := _NUMBERS.fullmatch(value):
        first, sign, second, third = numbers.groups()
        if len(first) == 4 and len(third) <= 2:
            return [f"%Y{sign}%m{sign}%d"]
        if len(first) <= 2 and len(third) == 4:
            return [f"%d{sign}%m{sign}%Y", f"%m{sign}%d{sign}%Y"]
        padded = len(first) == len(second) == 2  # 1.2.19 may be a version, 01.02.19 hardly
        if len(first) <= 2 and len(third) == 2 and (sign == "/" or padded):
            return [f"%d{sign}%m{sign}%y", f"%m{sign}%d{sign}%y", f"%y{sign}%m{sign}%d"]
        return []
    for pattern, written in _NAMED:
        if found := pattern.fullmatch(value):
            year = "%Y" if len(found.groups()[-1]) == 4 else "%y"
            return [written.format(*found.groups(), year=year)]
    return []
