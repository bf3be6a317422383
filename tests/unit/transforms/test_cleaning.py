"""Dropping and filling nulls, replacing by regular expression, clipping."""

from __future__ import annotations

import datetime as dt
import math
import re
import threading
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.transforms.cleanup import Clip, DropNulls, FillNulls, ReplaceRegex

integers = st.lists(st.integers(-100, 100) | st.none(), max_size=20)


def rows(a: list[Any], b: list[Any], skip: int = 0) -> pa.RecordBatch:
    n = min(len(a), len(b))
    return pa.record_batch({"a": pa.array(a[:n], pa.int64()), "b": pa.array(b[:n], pa.int64())})[skip:]


@given(a=integers, b=integers, skip=st.integers(0, 4))
def test_drop_nulls_keeps_whole_rows_and_counts_the_others_by_their_first_null(
    a: list[int | None], b: list[int | None], skip: int
) -> None:
    batch = rows(a, b, skip)
    drop = DropNulls(["b", "a"])
    out = drop.transform(batch)
    frame = pd.DataFrame({name: pd.array(batch[name].to_pylist(), "Int64") for name in ("a", "b")})
    assert out.to_pylist() == frame.dropna().to_dict("records")
    no_b, no_a = int(frame.b.isna().sum()), int((frame.a.isna() & frame.b.notna()).sum())
    assert drop.counts == {k: n for k, n in {"b: null": no_b, "a: null": no_a}.items() if n}


def test_drop_nulls_looks_at_all_columns_unless_some_are_named() -> None:
    batch = pa.record_batch({"a": [1, None, 3], "b": ["x", "y", None], "c": [math.nan, 0.0, 0.0]})
    assert DropNulls().transform(batch).column("a").to_pylist() == [1]
    assert DropNulls("b").transform(batch).column("a").to_pylist() == [1, None]
    assert DropNulls("c").transform(batch) is batch, "NaN is a value"
    assert DropNulls().transform(batch[:0]).num_rows == 0
    assert DropNulls().transform(pa.record_batch({"a": pa.nulls(2)})).num_rows == 0


def test_counts_from_many_threads_add_up() -> None:
    drop, batch = DropNulls("a"), pa.record_batch({"a": [1, None, None]})
    attempts: list[int] = []

    def work() -> None:
        for _ in range(200):
            drop.begin_attempt()
            drop.transform(batch)
            attempts.append(drop.end_attempt()[0]["a: null"])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drop.counts == {"a: null": 8 * 200 * 2}
    assert attempts == [2] * 8 * 200


def test_counts_travel_from_a_copy_in_another_process() -> None:
    drop, batch = DropNulls("a"), pa.record_batch({"a": [None, 1]})
    drop.transform(batch)
    copy = cloudpickle.loads(cloudpickle.dumps(drop))
    assert copy.counts == {}, "or what was counted here would be counted again"
    copy.begin_attempt()
    copy.transform(batch)
    drop.add_counts(*copy.end_attempt())
    assert copy.end_attempt() == ({}, {})
    assert drop.counts == {"a: null": 2}
    drop.reset()
    assert drop.counts == {}


@given(values=integers, filling=st.integers(-5, 5), skip=st.integers(0, 4))
def test_fill_nulls_puts_the_value_where_there_is_none(values: list[int | None], filling: int, skip: int) -> None:
    batch = pa.record_batch({"a": pa.array(values, pa.int64())})[skip:]
    out = FillNulls({"a": filling}).transform(batch)
    assert out.column("a").to_pylist() == [filling if v is None else v for v in values[skip:]]
    assert out.schema == batch.schema


@pytest.mark.parametrize(
    ("array", "filling", "expected"),
    [
        (pa.array(["x", None]), "", ["x", ""]),
        (pa.array(["x", None], pa.string_view()), "y", ["x", "y"]),
        (pa.array(["x", None]).dictionary_encode(), "new", ["x", "new"]),
        (pa.array([[1], None]), [], [[1], []]),
        (pa.array([1.5, None], pa.float32()), 0, [1.5, 0.0]),
        (pa.array([dt.date(2020, 1, 1), None]), dt.date(1970, 1, 1), [dt.date(2020, 1, 1), dt.date(1970, 1, 1)]),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_fill_nulls_keeps_the_type_of_the_column(array: pa.Array, filling: Any, expected: list[Any]) -> None:
    out = FillNulls({"a": filling}).transform(pa.record_batch({"a": array})).column("a")
    assert out.to_pylist() == expected
    assert out.type == array.type


def test_fill_nulls_gives_a_column_without_a_type_that_of_the_filling() -> None:
    out = FillNulls({"a": "?"}).transform(pa.record_batch({"a": pa.nulls(2)})).column("a")
    assert out.equals(pa.array(["?", "?"]))


@pytest.mark.parametrize("filling", ["x", 0.5, 2**70])
def test_a_filling_that_does_not_fit_is_an_error(filling: Any) -> None:
    with pytest.raises(SchemaError, match=r"'a'.*filling"):
        FillNulls({"a": filling}).transform(pa.record_batch({"a": [1, None]}))


@given(
    values=st.lists(st.text("ab1é \n", max_size=12) | st.none(), max_size=10),
    pattern=st.sampled_from([r"[ab]+", r"(a)(b)", r"\d", r"é", r"^a", r"b$"]),
    layout=st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]),
    skip=st.integers(0, 3),
)
def test_replace_regex_agrees_with_re_where_the_dialects_do(
    values: list[str | None], pattern: str, layout: pa.DataType, skip: int
) -> None:
    batch = pa.record_batch({"t": pa.array(values, layout)})[skip:]
    out = ReplaceRegex("t", pattern, r"<\0>").transform(batch).column("t")
    python = pattern.replace("$", r"\Z")  # RE2's $ is the very end, Python's may stand before a last newline
    assert out.to_pylist() == [v and re.sub(python, r"<\g<0>>", v) for v in values[skip:]]
    assert out.type == layout


def test_patterns_that_re2_does_not_know_are_refused_when_they_are_written() -> None:
    with pytest.raises(ValueError, match=r"'\('"):
        ReplaceRegex("t", "(", "")
    with pytest.raises(ValueError, match=re.escape("'a'")):
        ReplaceRegex("t", "a", r"\1")


floats = st.lists(st.floats(-1e6, 1e6) | st.just(math.nan) | st.none(), max_size=20)


@given(values=floats, low=st.floats(-100, 0), high=st.floats(0, 100), skip=st.integers(0, 4))
def test_clip_agrees_with_numpy_and_leaves_null_and_nan(
    values: list[float | None], low: float, high: float, skip: int
) -> None:
    batch = pa.record_batch({"x": pa.array(values, pa.float64())})[skip:]
    out = Clip({"x": (low, high)}).transform(batch).column("x")
    assert out.is_null().to_pylist() == [v is None for v in values[skip:]]
    given = np.array([math.nan if v is None else v for v in values[skip:]], float)
    np.testing.assert_array_equal(out.to_numpy(zero_copy_only=False), np.clip(given, low, high))


@pytest.mark.parametrize(
    ("dtype", "given_range", "expected"),
    [
        ("int64", (0, 10), [0, 5, 10]),
        ("int8", (None, 1000), [-7, 5, 70]),
        ("int8", (-1000, 6), [-7, 5, 6]),
        ("int16", (-0.5, 5.5), [0, 5, 5]),
        ("int32", (-math.inf, 5.0), [-7, 5, 5]),
        ("float32", (0.5, None), [0.5, 5, 70]),
        ("float16", (0.5, 5), [0.5, 5, 5]),
    ],
)
def test_clip_keeps_the_type_and_ignores_ends_the_type_cannot_reach(
    dtype: str, given_range: tuple[Any, Any], expected: list[float]
) -> None:
    array = pa.array([-7, 5, 70]).cast(dtype)
    out = Clip({"x": given_range}).transform(pa.record_batch({"x": array})).column("x")
    assert out.to_pylist() == expected
    assert out.type == array.type


def test_clip_works_on_dates_and_text_too() -> None:
    batch = pa.record_batch({"d": [dt.date(1900, 1, 1), None], "t": pa.array(["a", "z"]).dictionary_encode()})
    out = Clip({"d": (dt.date(2000, 1, 1), None), "t": ("b", "y")}).transform(batch)
    assert out.to_pydict() == {"d": [dt.date(2000, 1, 1), None], "t": ["b", "y"]}
    assert out.schema == batch.schema


def test_a_range_that_does_not_fit_the_column_is_an_error() -> None:
    batch = pa.record_batch({"x": pa.array([1], pa.uint8()), "t": ["a"]})
    for name, given_range in {"x": (300, 400), "t": (0, 1)}.items():
        with pytest.raises(SchemaError, match=f"'{name}'"):
            Clip({name: given_range}).transform(batch)
    with pytest.raises(SchemaError, match=r"'x'.*\buint8\b"):
        Clip({"x": (0.2, 0.8)}).transform(batch)


def test_constructors_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="values"):
        FillNulls({})
    with pytest.raises(ValueError, match="'a'"):
        FillNulls({"a": None})
    with pytest.raises(ValueError, match="ranges"):
        Clip({})
    with pytest.raises(ValueError, match="'a'"):
        Clip({"a": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="'a'"):
        Clip({"a": (None, None)})
    with pytest.raises(ValueError, match="'a'"):
        Clip({"a": (2, 1)})
    with pytest.raises(ValueError, match=r"'a'.*'z'"):
        Clip({"a": (0, "z")})
    with pytest.raises(ValueError, match=r"'a'.*NaN"):
        Clip({"a": (math.nan, 1)})


def test_a_missing_column_is_named() -> None:
    batch = pa.record_batch({"b": [1]})
    for transform in (DropNulls("a"), FillNulls({"a": 1}), ReplaceRegex("a", "x", "y"), Clip({"a": (0, 1)})):
        with pytest.raises(SchemaError, match=r"'a'.*'b'"):
            transform.transform(batch)


def test_empty_batches_pass() -> None:
    empty = pa.record_batch({"a": pa.array([], pa.int64()), "t": pa.array([], pa.string())})
    for transform in (DropNulls(), FillNulls({"a": 1}), ReplaceRegex("t", "x", "y"), Clip({"a": (0, 1)})):
        assert transform.transform(empty).equals(empty)


def test_transforms_print_as_they_are_written() -> None:
    assert repr(DropNulls()) == "DropNulls()"
    assert repr(DropNulls(["a", "b"])) == "DropNulls(['a', 'b'])"
    assert repr(FillNulls({"a": 0})) == "FillNulls({'a': 0})"
    assert repr(ReplaceRegex("t", r"\d", "#")) == r"ReplaceRegex('t', '\\d', '#')"
    assert repr(Clip({"a": (0, None)})) == "Clip({'a': (0, None)})"
