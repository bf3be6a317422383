"""Dates as people write them: 31.01.2019, 1/31/2019 4:05 PM, Jan 31, 2019. A whole column is read at once.

Formats are those of `strptime`, with these differences: `%b` takes short and long English month names, a day may be
31st, seconds may have a fraction, and one blank matches any number of blanks.
"""

from __future__ import annotations

import datetime
import functools
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import is_text
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.datasets.guesses import Facts

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
"""Pattern of each directive."""
_SAME = {"B": "b", "A": "a"}
_TWO_DIGITS = 69
"""Two-digit years from here on are in the 20th century, as in `strptime`."""
_DOUBTFUL = 30
"""Two-digit years from here up to `_TWO_DIGITS` are rather years of birth than of the future: nobody guesses."""

Numbers = npt.NDArray[np.int64]


class ReadDates(NamedTuple):
    """Cells of a column, read by a format."""

    values: pa.Array
    """Dates, or timestamps if the format has hours; null for null and wrong cells."""
    wrong: npt.NDArray[np.bool_]
    """Flags of cells that do not have the format."""


@functools.cache
def compile_format(written: str) -> str:
    """Pattern of a format; raises for an invalid one."""
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
                what = "twice" if name in names else "which is unknown"
                raise ConfigError(f"date_format={written!r} has {part!r} {what}; known: {known}")
            names.append(name)
            pattern += DIRECTIVES[name]
    year, month = {"Y", "y"} & {*names}, {"m", "b"} & {*names}
    if len(year) != 1 or len(month) != 1 or "d" not in names:
        raise ConfigError(f"date_format={written!r} must have a year, a month and a day, such as '%d.%m.%Y'")
    hours = {"H", "I"} & {*names}
    if len(hours) > 1 or ("I" in names) != ("p" in names) or ({"M", "S", "p"} & {*names} and not hours):
        raise ConfigError(f"date_format={written!r} must have hours as '%H:%M:%S' or '%I:%M:%S %p'")
    return f"(?i)^{pattern}$"


def read_dates(texts: pa.Array, written: str) -> ReadDates:
    """Cells as dates of this format. Blanks around a cell are ignored."""
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
    """Seconds since midnight, and flags of valid times."""
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


log = logging.getLogger(__name__)

_SAMPLE_ROWS, _MAX_FORMATS = 64, 12
_NAME = DIRECTIVES["b"].replace("?P<b>", "?:")
_DAY = r"\d{1,2}(?:st|nd|rd|th)?"
_GAP = r"(?:\s*[./-]\s*|,?\s+)"
_WEEKDAY_START = re.compile(rf"(?P<day>{DIRECTIVES['a']})(?P<gap>[.,]?\s+)", re.IGNORECASE)
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
"""Unsupported forms that look like dates: months and quarters alone, time zones."""


class FoundDates(NamedTuple):
    """Format of texts that look like dates, or the reason why there is none."""

    format: str | None
    doubt: str = ""
    nearest: str | None = None
    """Format of most texts, if some do not have it."""


def find_dates(texts: pa.Array) -> FoundDates | None:
    """Format in which all texts are dates; None if they do not look like dates."""
    values = texts.drop_null()
    if not len(values):
        return None
    places = np.unique(np.linspace(0, len(values) - 1, _SAMPLE_ROWS).astype(np.int64))
    sample = [str(value).strip() for value in values.take(pa.array(places)).to_pylist()]
    formats = [_formats_of(value) for value in sample]
    unread = [value for value, found in zip(sample, formats) if not found and _UNREAD.fullmatch(value)]
    if 2 * (sum(map(bool, formats)) + len(unread)) < len(sample):
        return None
    candidates = list(dict.fromkeys(one for found in formats for one in found))[:_MAX_FORMATS]
    if not candidates or len(unread) > sum(map(bool, formats)):
        return FoundDates(None, f"{unread[0]!r} has an unsupported form")
    return _decided(values, candidates)


def with_dates(
    table: pa.Table, names: Iterable[str], *, file: str, formats: Mapping[str, str]
) -> tuple[pa.Table, dict[str, str]]:
    """Table with the columns of dates among `names` as dates, and their formats.

    `formats` are the given ones. A column that looks like dates without a clear format stays text, with a warning.
    """
    made = dict(formats)
    for name in names:
        place = table.schema.get_field_index(name)
        kind = table.schema.field(place).type
        if name in formats or not is_text(kind):
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
    """Advice for a column that looks like dates."""
    return (
        f"give its kind in the spec: columns={{{name!r}: ColumnSpec(kind='date', date_format='%d/%m/%Y')}}, or "
        "kind='text'"
    )


def one_array(column: pa.ChunkedArray) -> pa.Array:
    """Column as one array."""
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
                f"{fitting[other].values[row].as_py():%Y-%m-%d} by {other}, and no value of the column decides",
            )
    if "%y" in first and (unclear := _doubtful_year(fitting[first].values)) is not None:
        made = fitting[first].values[unclear].as_py()
        return FoundDates(
            None,
            f"{values[unclear].as_py()!r} may be of {made.year - 100} or {made.year}: date_format={first!r} means "
            f"{made.year}; for {made.year - 100} write the years of the file with four digits",
        )
    return FoundDates(first)


def _doubtful_year(dates: pa.Array) -> int | None:
    """First row whose year of two digits may be of either century."""
    years = np.asarray(pc.year(dates))
    doubtful = (years >= 2000 + _DOUBTFUL) & (years < 2000 + _TWO_DIGITS)
    return int(doubtful.argmax()) if doubtful.any() else None


def _moments(dates: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(dates.cast(pa.timestamp("us")).cast(pa.int64()))


def _misfits(values: pa.Array, written: str, read: ReadDates) -> str:
    first = values[int(read.wrong.argmax())].as_py()
    return f"{int(read.wrong.sum())} of {len(values)} values do not have the form {written}, such as {first!r}"


def _formats_of(value: str) -> list[str]:
    """Possible formats of one text, in the order in which they are tried."""
    before = after = ""
    if weekday := _WEEKDAY_START.match(value):
        before, value = f"%a{weekday['gap']}", value[weekday.end() :]
    if time := _TIME.search(value):
        value = value[: time.start()]
        hours = "%I" if time["half"] else "%H"
        half = f"{time['half'][: len(time['half']) - len(time['half'].lstrip())]}%p" if time["half"] else ""
        after = f"{time['gap']}{hours}:%M{':%S' if time['seconds'] else ''}{half}"
    return [f"{before}{each}{after}" for each in _dates_of(value)]


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


_DIGITS = "%Y%m%d"
_TIME_NAME = re.compile(
    r"(?i:date|time|timestamp|datetime|day|week|month|year|epoch|unix_?time|ts|dt)|"
    r".*[ _-](?i:date|time|timestamp|datetime|year)|.*[a-z0-9](?:Date|Time|Timestamp|DateTime|Year)"
)


class FileDates(NamedTuple):
    """Tables with their dates converted, the format of each column, and the reasons why others stay text."""

    train: pa.Table
    test: pa.Table | None
    formats: dict[str, str]
    doubts: dict[str, str]


def dates_of_files(train: pa.Table, test: pa.Table | None, names: Iterable[str]) -> FileDates:
    """Convert columns of dates. Values of either file decide for both."""
    formats, doubts = {}, {}
    tested = set() if test is None else set(test.column_names)
    trained = set(train.column_names)
    for name in names:
        there = [train.column(name)] if name in trained else []
        if test is not None and name in tested:
            there.append(test.column(name))
        written, doubt = _format_of(name, [one_array(column) for column in there])
        if doubt:
            doubts[name] = doubt
        if written is not None:
            formats[name] = written
            train = _with(train, name, written)
            test = None if test is None else _with(test, name, written)
    return FileDates(train, test, formats, doubts)


def is_called_time(name: str) -> bool:
    """True for names of times: date, order_date, SaleDate, year, timestamp."""
    return _TIME_NAME.fullmatch(name) is not None


def later_by(name: str, train: Facts, test: Facts) -> str:
    """Description of how the test file is later than the training file by a column; empty if it is not.

    Numbers count only in a column with the name of a time: ids of test files are higher, too.
    """
    numbers = train.is_number and test.is_number and is_called_time(name)
    if not len(train.values) or not len(test.values) or not (numbers or (train.is_date and test.is_date)):
        return ""
    last, first, end = pc.max(train.values).as_py(), pc.min(test.values).as_py(), pc.max(test.values).as_py()
    described = f"the training file ends at {last}, and the test file begins at {first}"
    if numbers:
        return described if first > last else ""
    ended, begins, ends = (_moment(value) for value in (last, first, end))
    if ended is None or begins is None or ends is None:
        return ""
    return described if begins >= ended < ends else ""


def _moment(value: Any) -> datetime.datetime | None:
    """Date or timestamp as a datetime in UTC without a zone; None for other values."""
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is None else value.astimezone(datetime.UTC).replace(tzinfo=None)
    return datetime.datetime(value.year, value.month, value.day) if isinstance(value, datetime.date) else None


def _format_of(name: str, columns: list[pa.Array]) -> tuple[str | None, str]:
    """Format of a column, or the reason why there is none."""
    filled = [column for column in columns if len(column) > column.null_count]
    if filled and all(pa.types.is_integer(column.type) for column in filled):  # 20190131, by name as well as by value
        texts = pa.concat_arrays([column.cast(pa.string()) for column in filled])
        is_date = is_called_time(name) and not read_dates(texts, _DIGITS).wrong.any()
        return (_DIGITS if is_date else None), ""
    texts = [column.cast(pa.string()) for column in filled if is_text(column.type)]
    found = find_dates(pa.concat_arrays(texts)) if texts else None
    return (None, "") if found is None else (found.format, found.doubt)


def _with(table: pa.Table, name: str, written: str) -> pa.Table:
    place = table.schema.get_field_index(name)
    if place < 0 or pa.types.is_temporal(table.schema.field(place).type):
        return table
    return table.set_column(place, name, read_dates(one_array(table.column(place)).cast(pa.string()), written).values)
