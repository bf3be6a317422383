"""Dates as people write them, read by a format or found by their values."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.datasets.base import ColumnSpec
from penstock.datasets.dates import compile_format, find_dates, read_dates
from penstock.errors import ConfigError

LAST = dt.date(2019, 1, 31)
NOON = dt.datetime(2019, 1, 31, 13, 45)


def found(*texts: str | None) -> str | None:
    result = find_dates(pa.array(texts, pa.string()))
    return None if result is None else result.format


@pytest.mark.parametrize(
    ("text", "written", "value"),
    [
        ("31.01.2019", "%d.%m.%Y", LAST),
        ("31/1/2019", "%d/%m/%Y", LAST),
        ("1/31/2019", "%m/%d/%Y", LAST),
        ("31-01-2019", "%d-%m-%Y", LAST),
        ("2019/1/31", "%Y/%m/%d", LAST),
        ("2019.01.31", "%Y.%m.%d", LAST),
        ("Jan 31, 2019", "%b %d, %Y", LAST),
        ("January 31st 2019", "%b %d %Y", LAST),
        ("Jan. 31, 2019", "%b %d, %Y", LAST),
        ("31 january 2019", "%d %b %Y", LAST),
        ("31-JAN-19", "%d-%b-%y", LAST),
        ("2019-Jan-31", "%Y-%b-%d", LAST),
        ("Thu, 31 Jan 2019", "%a, %d %b %Y", LAST),
        ("31.01.2019 13:45", "%d.%m.%Y %H:%M", NOON),
        ("01/31/2019 1:45 PM", "%m/%d/%Y %I:%M %p", NOON),
        ("Jan 31, 2019, 01:45:00pm", "%b %d, %Y, %I:%M:%S%p", NOON),
        ("31/01/2019T13:45:00.250", "%d/%m/%YT%H:%M:%S", NOON.replace(microsecond=250_000)),
    ],
)
def test_common_forms_are_told_and_read(text: str, written: str, value: dt.date) -> None:
    assert found(text, None, f" {text} ") == written
    assert read_dates(pa.array([text, None]), written).values.to_pylist() == [value, None]


@pytest.mark.parametrize("sign", [".", "/", "-"])
def test_one_late_value_decides_the_whole_column(sign: str) -> None:
    early = [f"{day:02}{sign}02{sign}2019" for day in range(1, 13)] * 20
    assert found(*early) is None
    assert found(*early, f"13{sign}02{sign}2019") == f"%d{sign}%m{sign}%Y"
    assert found(f"02{sign}13{sign}2019", *early) == f"%m{sign}%d{sign}%Y"


def test_what_no_value_decides_is_said_with_both_readings() -> None:
    result = find_dates(pa.array(["05/05/2019", "01/02/2019"]))
    assert result is not None
    assert result.format is None
    assert "'01/02/2019'" in result.doubt
    assert found("05/05/2019", "06/06/2019") is not None  # both readings are the same day


def test_years_of_two_digits_are_read_where_the_place_of_the_year_is_certain() -> None:
    assert found("31/01/95", "01/02/96") == "%d/%m/%y"
    assert found("31/01/19", "01/02/20") is None
    assert read_dates(pa.array(["1/2/68", "1/2/69"]), "%d/%m/%y").values.to_pylist() == [
        dt.date(2068, 2, 1),
        dt.date(1969, 2, 1),
    ]


@pytest.mark.parametrize("texts", [["17-May-60", "02-Aug-54"], ["31-Dec-30", "01-Jun-05"], ["31-Jan-05", "1-Jun-68"]])
def test_years_of_two_digits_that_may_be_of_either_century_are_a_doubt(texts: list[str]) -> None:
    told = find_dates(pa.array(texts))
    assert told is not None
    assert told.format is None
    assert any(text in told.doubt for text in texts)
    assert "date_format='%d-%b-%y'" in told.doubt
    assert not read_dates(pa.array(texts), "%d-%b-%y").wrong.any()  # a given format decides


@pytest.mark.parametrize(
    "texts",
    [
        ["31.01.2019", "unknown", "01.02.2019"],
        ["30.02.2019", "01.02.2019"],
        ["31/12/2019", "2019-12-10", "11/12/2019"],
        ["31.01.2019", "31.01.2019 10:00"],
        ["Jan 2019", "Feb 2019"],
        ["01/2019", "02/2019"],
        ["2019Q1", "2019Q2"],
        ["31.01.2019 13:45+01:00", "31.01.2019 13:45 CET"],
    ],
)
def test_what_looks_like_dates_and_is_not_read_is_a_doubt(texts: list[str]) -> None:
    result = find_dates(pa.array(texts))
    assert result is not None
    assert result.format is None
    assert result.doubt


@pytest.mark.parametrize(
    "texts",
    [
        ["hello", "world"],
        ["192.168.1.1", "10.0.0.1"],
        ["1.2.19", "3.4.20"],
        ["555-12-1234"],
        ["12:30", "13:45"],
        ["on 31.01.2019 it rained", "on 01.02.2019 it did not"],
        ["31/01/2019 is the day on which it was 10:00 for long"],
        ["May the fourth", "March on"],
        [],
        [None],
    ],
)
def test_other_texts_are_not_taken_for_dates(texts: list[str | None]) -> None:
    assert find_dates(pa.array(texts, pa.string())) is None


@given(st.lists(st.datetimes(dt.datetime(1000, 1, 1), dt.datetime(2999, 12, 31)), min_size=1, max_size=5))
def test_reading_agrees_with_strptime(times: list[dt.datetime]) -> None:
    for written in ("%d.%m.%Y", "%m/%d/%Y", "%Y-%m-%d %H:%M:%S", "%b %d, %Y %I:%M %p", "%d-%b-%Y %H:%M"):
        texts = [one.strftime(written) for one in times]
        expected = [dt.datetime.strptime(text, written) for text in texts]
        read = read_dates(pa.array(texts), written)
        assert not read.wrong.any()
        assert read.values.cast(pa.timestamp("us")).to_pylist() == expected


def test_cells_that_are_no_such_dates_are_marked() -> None:
    texts = ["31.01.2019", "31.04.2019", "00.01.2019", "1.13.2019", "29.02.2019", "29.02.2020", None, "x", "31.1.19"]
    read = read_dates(pa.array(texts), "%d.%m.%Y")
    assert read.wrong.tolist() == [False, True, True, True, True, False, False, True, True]
    hours = read_dates(pa.array(["1.1.2019 24:00", "1.1.2019 23:60", "1.1.2019 0:00"]), "%d.%m.%Y %H:%M")
    assert hours.wrong.tolist() == [True, True, False]
    assert read_dates(pa.array(["1.1.2019 13:00 pm"]), "%d.%m.%Y %I:%M %p").wrong.tolist() == [True]


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("%d.%m", "year"),
        ("%d.%m.%Y.%d", "twice"),
        ("%d.%m.%Y %Z", "'%Z'"),
        ("%d.%m.%Y %I:%M", "%I:%M:%S %p"),
        ("dd.mm.yyyy", "year"),
        ("%d.%m.%Y %", "'%'"),
    ],
)
def test_a_format_that_cannot_work_is_refused(written: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="date_format") as caught:
        compile_format(written)
    assert problem in str(caught.value)
    with pytest.raises(ConfigError):
        ColumnSpec(kind="date", date_format=written)


def test_a_format_is_for_dates() -> None:
    with pytest.raises(ConfigError, match="kind='date'"):
        ColumnSpec(kind="numeric", date_format="%d.%m.%Y")
