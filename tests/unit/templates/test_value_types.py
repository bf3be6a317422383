"""Every type a column may have, and columns of several: a row reads the same alone and in a table, or is refused."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from penstock.errors import DataError, SchemaError
from penstock.templates import TabularTextConverter

STYLES = ["natural", "key_value", "markdown", "json", "list"]


@pytest.mark.parametrize(
    "series",
    [
        pd.Series([1, None, 3], dtype="Int64"),
        pd.Series([1.5, None, 3], dtype="Float64"),
        pd.Series([True, None, False], dtype="boolean"),
        pd.Series(["a", None, "b"], dtype="category"),
        pd.Series(["a", None, "b"], dtype="string"),
        pd.Series(pd.to_datetime(["2020-01-02", None, "2020-01-02 03:04:05.123456789"], format="ISO8601")),
        pd.Series(pd.to_datetime(["2020-01-02", None, "2020-07-02 03:04"], format="ISO8601")).dt.tz_localize(
            "Europe/Berlin"
        ),
        pd.Series(pd.to_timedelta(["1 days 02:03:04.5", None, "3ns"])),
        pd.Series([[1, 2.0], None, ["a"]][:1] * 3),
        pd.Series([{"a": 1, "b": None}, None, {"a": 2, "b": "x"}]),
        pd.Series([{"a": 1}, {}, {"b": [{"c": None}, {"c": 2.0}]}]),
        pd.Series([Decimal("-0.0"), None, Decimal("-1.50")]),
        pd.Series([np.int8(1), np.float32(0.1), None], dtype=object),
    ],
    ids=str,
)
@pytest.mark.parametrize("style", STYLES)
def test_types_of_pandas_read_the_same_in_rows_and_tables(series: pd.Series, style: str) -> None:
    frame = pd.DataFrame({"x": series, "text": ["p", "q", "r"]})
    converter = TabularTextConverter(style=style)
    assert converter.convert_batch(frame) == [converter.convert_row(frame.iloc[row]) for row in range(3)]


def test_moments_durations_and_nested_values_have_a_text() -> None:
    frame = pd.DataFrame(
        {
            "when": pd.to_datetime(["2020-01-02", "2020-01-02 03:04:05.123456789"], format="ISO8601"),
            "zoned": pd.to_datetime(["2020-01-02", "2020-07-02"]).tz_localize("Europe/Berlin"),
            "took": pd.to_timedelta(["1 days 02:03:04.5", "3ns"]),
            "many": [["a", None], ["é"]],
        }
    )
    assert TabularTextConverter(style="key_value").convert_batch(frame) == [
        'when: 2020-01-02 | zoned: 2020-01-02 00:00:00+01:00 | took: 1 day, 2:03:04.5 | many: ["a", null]',
        "when: 2020-01-02 03:04:05.123456789 | zoned: 2020-07-02 00:00:00+02:00 | took: 0:00:00.000000003 | "
        'many: ["é"]',
    ]


@pytest.mark.parametrize("style", STYLES)
def test_dictionaries_runs_and_views_read_as_plain_texts(style: str) -> None:
    converter = TabularTextConverter(style=style)
    values = ["a|b", None, "c", "a|b", "d"]
    expected = converter.convert_batch({"x": values})
    views = pa.array(values).cast(pa.string_view())
    polars = pl.DataFrame({"x": values})
    encoded = [
        pa.DictionaryArray.from_arrays([0, None, 1, 0, 2], pa.array(["a|b", "c", "d"], pa.string_view())),
        pa.DictionaryArray.from_arrays([0, 1, 2, 0, 4], views),
        pa.chunked_array([views, views]).slice(5),
        pa.chunked_array([pa.DictionaryArray.from_arrays([n], views) for n in range(5)]),
        pa.RunEndEncodedArray.from_arrays([3, *range(4, 9)], pa.array(["-", *values], pa.string_view())).slice(3),
        pa.RunEndEncodedArray.from_arrays([1, 2, 3, 4, 5], pa.array(values)),
    ]
    for data in (
        *(pa.table({"x": column}) for column in encoded),
        polars.cast(pl.Categorical),
        polars.cast(pl.Enum(["d", "c", "a|b"])),
    ):
        assert converter.convert_batch(data) == expected
    assert converter.convert_batch(polars.cast(pl.Categorical).clear()) == []
    for data in (pl.DataFrame({"x": [b"a"]}), pa.table({"x": pa.array([b"a"], pa.binary_view()).dictionary_encode()})):
        with pytest.raises(DataError, match="'x'"):
            converter.convert_batch(data)


def test_what_is_stored_in_the_place_of_a_value_is_not_said() -> None:
    periods = pd.DataFrame({"x": pd.period_range("2024-01", periods=2, freq="M")})
    ranges = pd.DataFrame({"x": pd.interval_range(0, 2)})
    uuids = pa.table({"x": pa.array([b"0" * 16], pa.uuid())})
    for data in (periods, ranges, uuids, pa.Table.from_pandas(periods).slice(0, 1)):
        with pytest.raises(DataError, match="'x'"):
            TabularTextConverter().convert_batch(data)
    for row in (periods.iloc[0], ranges.iloc[0], uuids, pa.Table.from_pandas(periods).slice(0, 1)):
        with pytest.raises(DataError, match="'x'"):
            TabularTextConverter().convert_row(row)
    plain = {
        "flag": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1], pa.int8())),
        "json": pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[1]"])),
        "grid": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), (2,)), pa.array([[1, 2]], pa.list_(pa.int8(), 2))
        ),
    }
    text = "flag: yes | json: [1] | grid: [1, 2]"
    assert TabularTextConverter("key_value").convert_batch(pa.table(plain)) == [text]
    assert TabularTextConverter("key_value").convert_row(pa.table(plain)) == text


ZONED = pd.Timestamp("2020-01-01", tz="UTC")


@pytest.mark.parametrize(
    ("cells", "kinds"),
    [
        ([1.5, True], r"row 0\b.*row 1\b"),
        ([np.True_, 1], r"row 0\b.*row 1\b"),
        ([0.5, None, np.False_], r"row 0\b.*row 2\b"),
        ([date(2020, 1, 1), datetime(2020, 1, 1, 5)], r"row 0\b.*row 1\b"),
        ([Decimal("1.5"), 2], r"row 0\b.*row 1\b"),
        ([timedelta(1), 5], r"row 0\b.*row 1\b"),
        (["a", b"b"], r"row 0\b.*row 1\b"),
        ([ZONED, ZONED.tz_convert("Asia/Tokyo")], r"row 0\b.*row 1\b"),
    ],
    ids=str,
)
def test_types_that_arrow_would_make_one_are_mixed_types(cells: list[Any], kinds: str) -> None:
    frame = pd.DataFrame({"x": pd.Series(cells, dtype=object)})
    for data in (frame, {"x": cells}, [{"x": cell} for cell in cells]):
        with pytest.raises(SchemaError, match=rf"'x'.*{kinds}"):
            TabularTextConverter().convert_batch(data)


@pytest.mark.parametrize(
    "cells",
    [
        [1.5, True, None],
        [date(2020, 1, 1), datetime(2020, 1, 1, 5)],
        [Decimal("1.50"), 2],
        [ZONED, ZONED.tz_convert("Asia/Tokyo")],
        [np.float32(0.1), 0.1],
        [True, np.nan, False],
        [pd.Timestamp("2020-01-01 00:00:00.000000001"), pd.NaT, datetime(2020, 1, 1)],
        [pd.Timedelta(1), timedelta(1)],
        [ZONED, pd.NaT, ZONED],
    ],
    ids=str,
)
def test_objects_of_several_types_read_the_same_in_rows_and_tables(cells: list[Any]) -> None:
    frame = pd.DataFrame({"x": pd.Series(cells, dtype=object), "y": "z"})
    converter = TabularTextConverter("key_value", mixed="text")
    assert converter.convert_batch(frame) == [converter.convert_row(frame.iloc[row]) for row in range(len(cells))]


def test_categories_of_several_types_are_mixed_types() -> None:
    with pytest.raises(SchemaError, match=r"'x'.*row 0\b"):
        TabularTextConverter().convert_batch(pd.DataFrame({"x": pd.Categorical([1.5, True], categories=[1.5, True])}))


def test_mixed_types_are_an_error_that_names_two_or_text_when_asked() -> None:
    frame = pd.DataFrame({"ok": [1, 2, 3], "x": [None, 1, "a"]}, dtype=object)
    message = r"'x'.*mixed='text'"
    for data in (frame, frame.to_dict("records"), {"x": [None, 1, "a"]}):
        with pytest.raises(SchemaError, match=message):
            TabularTextConverter().convert_batch(data)
    converter = TabularTextConverter(style="key_value", mixed="text")
    assert converter.convert_batch(frame) == ["ok: 1", "ok: 2 | x: 1", "ok: 3 | x: a"]
    assert converter.convert_batch(frame) == [converter.convert_row(frame.iloc[row]) for row in range(3)]
    assert converter.convert_batch({"x": [True, 0.5, date(2020, 1, 2)]}) == ["x: yes", "x: 0.5", "x: 2020-01-02"]


def test_what_has_no_text_is_refused_with_its_column() -> None:
    with pytest.raises(DataError, match="'x'"):
        TabularTextConverter().convert_batch({"x": [b"ab"]})
    with pytest.raises(DataError, match="'x'"):
        TabularTextConverter().convert_row({"x": b"ab"})
    with pytest.raises(SchemaError, match="'x'"):
        TabularTextConverter().convert_batch({"x": [object(), object()]})
    with pytest.raises(DataError, match=r"'x'.*row 0\b"):
        TabularTextConverter(mixed="text").convert_batch({"x": [object()]})
