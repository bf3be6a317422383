"""The dates of a competition's files together: one format for a column of the training and of the test file."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets._date_columns import find_dates, one_array
from penstock.datasets._dates import read_dates
from penstock.datasets._guesses import Facts
from penstock.datasets._kinds import is_text

__all__ = ["FileDates", "dates_of_files", "is_called_time", "later_by"]

_DIGITS = "%Y%m%d"
_TIME_NAME = re.compile(
    r"(?i:date|time|timestamp|datetime|day|week|month|year|epoch|unix_?time|ts|dt)|"
    r".*[ _-](?i:date|time|timestamp|datetime|year)|.*[a-z0-9](?:Date|Time|Timestamp|DateTime|Year)"
)


class FileDates(NamedTuple):
    """The tables with their dates as such, the format of each column, and why others stay text."""

    train: pa.Table
    test: pa.Table | None
    formats: dict[str, str]
    doubts: dict[str, str]


def dates_of_files(train: pa.Table, test: pa.Table | None, names: Iterable[str]) -> FileDates:
    """Read the columns that are dates. Values of either file decide for both."""
    formats, doubts = {}, {}
    for name in names:
        there = [table.column(name) for table in (train, test) if table is not None and name in table.column_names]
        written, doubt = _format_of(name, [one_array(column) for column in there])
        if doubt:
            doubts[name] = doubt
        if written is not None:
            formats[name] = written
            train = _with(train, name, written)
            test = None if test is None else _with(test, name, written)
    return FileDates(train, test, formats, doubts)


def is_called_time(name: str) -> bool:
    """Whether a name is that of a time: date, order_date, SaleDate, year, timestamp."""
    return _TIME_NAME.fullmatch(name) is not None


def later_by(name: str, train: Facts, test: Facts) -> str:
    """How the test file is later than the training file by one of their columns; nothing if it is not.

    Numbers count if the column is called a time: ids of test files are higher than those of training, too.
    """
    numbers = train.is_number and test.is_number and is_called_time(name)
    if not len(train.values) or not len(test.values) or not (numbers or (train.is_date and test.is_date)):
        return ""
    last, first, end = pc.max(train.values).as_py(), pc.min(test.values).as_py(), pc.max(test.values).as_py()
    said = f"the training file ends at {last}, and the test file begins at {first}"
    if numbers:
        return said if first > last else ""
    ended, begins, ends = (_moment(value) for value in (last, first, end))
    if ended is None or begins is None or ends is None:
        return ""
    return said if begins >= ended < ends else ""


def _moment(value: Any) -> datetime.datetime | None:
    """A date or a timestamp without a zone, in UTC if it had one; None for other values."""
    if isinstance(value, datetime.datetime):
        return value if value.tzinfo is None else value.astimezone(datetime.UTC).replace(tzinfo=None)
    return datetime.datetime(value.year, value.month, value.day) if isinstance(value, datetime.date) else None


def _format_of(name: str, columns: list[pa.Array]) -> tuple[str | None, str]:
    """The format of a column, or why there is none."""
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
