"""Scalers and encoders against NumPy, pandas and exact fractions."""

from __future__ import annotations

import json
import math
import threading
from fractions import Fraction
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.transforms.encoding import (
    Fitted,
    HashingEncoder,
    MinMaxScaler,
    OneHotEncoder,
    OrdinalEncoder,
    StandardScaler,
    hash64,
    mix64,
)

numbers = st.lists(st.floats(-1e3, 1e3) | st.just(math.nan) | st.none(), min_size=1, max_size=30)
cuts = st.lists(st.integers(0, 30), max_size=4)


def column_of(values: list[Any], dtype: pa.DataType) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, dtype)})


def pieces(batch: pa.RecordBatch, at: list[int]) -> list[pa.RecordBatch]:
    """The batch in slices, some of them empty."""
    edges = [0, *sorted(min(cut, batch.num_rows) for cut in at), batch.num_rows]
    return [batch[start:stop] for start, stop in pairwise(edges)]


class ListSource:
    """A source that hands out what it was given, at most `max_rows` at a time."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.left = batch

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if not self.left.num_rows:
            return None
        batch, self.left = self.left[:max_rows], self.left[max_rows:]
        return batch

    def size_hint(self) -> int | None:
        return None

    def memory_usage(self) -> int:
        return 0


@given(values=numbers, at=cuts, offset=st.sampled_from([0.0, 1e9, -1e6]))
def test_mean_and_deviation_are_exact_to_twelve_digits_however_the_rows_are_cut(
    values: list[float | None], at: list[int], offset: float
) -> None:
    shifted = [None if v is None else v + offset for v in values]
    seen = [v for v in shifted if v is not None and not math.isnan(v)]
    scaler = StandardScaler("x").fit(pieces(column_of(shifted, pa.float64()), at))
    if not seen:
        return
    exact_mean = sum(map(Fraction, seen)) / len(seen)
    exact_var = float(sum((Fraction(v) - exact_mean) ** 2 for v in seen) / len(seen))
    scale = max(abs(float(exact_mean)), math.sqrt(exact_var))
    assert scaler.mean["x"] == pytest.approx(float(exact_mean), rel=1e-12, abs=1e-12 * scale)
    assert scaler.std["x"] == pytest.approx(math.sqrt(exact_var), rel=1e-12, abs=1e-300)


def test_the_variance_survives_a_large_offset_and_a_thousand_merges() -> None:
    values = 1e9 + np.random.default_rng(0).standard_normal(20_000)
    batch = pa.record_batch({"x": values})
    whole = StandardScaler("x").fit(batch)
    cut = StandardScaler("x").fit(batch[i : i + 20] for i in range(0, 20_000, 20))
    single = StandardScaler("x").fit(batch[i : i + 1] for i in range(20_000))
    exact = values.astype(np.longdouble)
    for scaler in (whole, cut, single):
        assert scaler.mean["x"] == pytest.approx(float(exact.mean()), rel=1e-12)
        assert scaler.std["x"] == pytest.approx(float(exact.std()), rel=1e-12)


@given(values=numbers, at=cuts, skip=st.integers(0, 3))
def test_standard_scaling_agrees_with_numpy_and_leaves_null_and_nan(
    values: list[float | None], at: list[int], skip: int
) -> None:
    batch = column_of(values, pa.float64())[skip:]
    array = np.array([math.nan if v is None else v for v in values[skip:]], float)
    scaler = StandardScaler("x").fit(pieces(batch, at))
    if np.isnan(array).all():
        return
    out = scaler.transform(batch).column("x")
    assert out.is_null().to_pylist() == [v is None for v in values[skip:]]
    spread = np.nanstd(array) if np.nanmin(array) != np.nanmax(array) else 1.0
    if spread > 1e-9:
        expected = (array - np.nanmean(array)) / spread
        np.testing.assert_allclose(out.to_numpy(zero_copy_only=False), expected, rtol=1e-6, atol=1e-6)


@given(values=numbers, at=cuts)
def test_min_max_scaling_agrees_with_numpy_and_does_not_depend_on_the_cuts(
    values: list[float | None], at: list[int]
) -> None:
    batch = column_of(values, pa.float64())
    array = np.array([math.nan if v is None else v for v in values], float)
    scaler = MinMaxScaler("x", range=(-1, 1)).fit(pieces(batch, at))
    if np.isnan(array).all():
        return
    low, high = np.nanmin(array), np.nanmax(array)
    assert (scaler.minimum["x"], scaler.maximum["x"]) == (low, high)
    out = scaler.transform(batch).column("x")
    assert out.equals(MinMaxScaler("x", range=(-1, 1)).fit(batch).transform(batch).column("x")) or np.isnan(array).any()
    expected = -1 + (array - low) / ((high - low) or 1.0) * 2
    np.testing.assert_allclose(out.to_numpy(zero_copy_only=False), expected, rtol=1e-12, atol=1e-12)


def test_columns_of_equal_values_are_not_blown_up() -> None:
    batch = pa.record_batch({"x": [0.1] * 7})
    assert StandardScaler("x").fit(pieces(batch, [3])).std == {"x": 0.0}
    scaled = StandardScaler("x").fit(pieces(batch, [3])).transform(batch).column("x").to_numpy()
    np.testing.assert_allclose(scaled, 0, atol=1e-15)
    assert MinMaxScaler("x", range=(2, 3)).fit(batch).transform(batch).column("x").to_pylist() == [2.0] * 7


def test_scaling_keeps_float32_and_makes_float64_of_other_numbers() -> None:
    batch = pa.record_batch({"f": pa.array([1, 2], pa.float32()), "i": pa.array([1, None], pa.int8()), "t": ["a", "b"]})
    out = StandardScaler(["f", "i"]).fit(batch).transform(batch)
    assert out.schema.types == [pa.float32(), pa.float64(), pa.string()]
    assert out.column("i").to_pylist() == [0.0, None]


def test_integers_beyond_the_precision_of_floats_are_rounded_not_refused() -> None:
    batch = pa.record_batch({"x": [2**60 + 1, 2**60 + 3]})
    assert StandardScaler("x").fit(batch).mean == {"x": float(2**60)}


def test_infinity_cannot_be_fitted() -> None:
    batch = pa.record_batch({"x": [None, math.nan, 1.0, -math.inf]})
    with pytest.raises(
        DataError, match="column 'x', row 3 of the batch: -inf is too large to scale; clip it first"
    ) as caught:
        MinMaxScaler("x").fit(batch)
    assert caught.value.row == 3


def test_fit_reads_sources_tables_batches_and_iterables_alike() -> None:
    batch = pa.record_batch({"x": np.arange(100_000, dtype=float)})
    scalers = [
        StandardScaler("x").fit(data)
        for data in (batch, pa.table(batch), ListSource(batch), [batch[:10], batch[10:]], iter([batch]))
    ]
    for scaler in scalers:
        assert scaler.mean["x"] == pytest.approx(49_999.5, rel=1e-12)
    again = scalers[0].fit(batch[:2])
    assert again.mean == {"x": 0.5}, "fit starts anew"


@pytest.mark.parametrize("encoder", [StandardScaler("x"), MinMaxScaler("x"), OneHotEncoder("x"), OrdinalEncoder("x")])
def test_transforming_before_fitting_says_what_to_do(encoder: Any) -> None:
    with pytest.raises(ConfigError, match=r"\('x'.*\) has not been fitted; call fit\(source\) first, or load one"):
        encoder.transform(pa.record_batch({"x": [1]}))


def test_a_column_without_a_value_in_the_fit_cannot_be_scaled() -> None:
    batch = pa.record_batch({"x": pa.nulls(3)})
    scaler = StandardScaler("x").fit(batch)
    with pytest.raises(ConfigError, match=r"StandardScaler\('x'\) saw no value of column 'x' in the fit"):
        scaler.transform(batch)
    scaler.partial_fit(pa.record_batch({"x": [1.0, 3.0]}))
    assert scaler.transform(batch).column("x").equals(pa.nulls(3, pa.float64()))


categories = st.lists(st.sampled_from(["b", "a", "ü", "", "B"]) | st.none(), max_size=20)


@given(values=categories, at=cuts, dtype=st.sampled_from([pa.string(), pa.large_string(), pa.string_view()]))
def test_one_hot_agrees_with_get_dummies(values: list[str | None], at: list[int], dtype: pa.DataType) -> None:
    batch = pa.record_batch(
        {"k": pa.array(range(len(values))), "x": pa.array(values, dtype), "z": pa.nulls(len(values))}
    )
    encoder = OneHotEncoder("x").fit(pieces(batch, at))
    out = encoder.transform(batch)
    dummies = pd.get_dummies(pd.Series(values, dtype=object), prefix="x", prefix_sep="=")
    assert out.schema.names == ["k", *dummies.columns, "z"]
    for name in dummies.columns:
        assert out.column(name).type == pa.uint8()
        expected = [None if v is None else int(flag) for v, flag in zip(values, dummies[name])]
        assert out.column(name).to_pylist() == expected


@given(values=categories, at=cuts, skip=st.integers(0, 3))
def test_ordinal_codes_are_places_in_the_sorted_categories(values: list[str | None], at: list[int], skip: int) -> None:
    batch = column_of(values, pa.string())[skip:]
    known = sorted({v for v in values[skip:] if v is not None})
    encoder = OrdinalEncoder("x").fit(reversed(pieces(batch, at)))
    assert encoder.categories == {"x": known}
    out = encoder.transform(batch).column("x")
    assert out.type == pa.int64()
    assert out.to_pylist() == [None if v is None else known.index(v) for v in values[skip:]]


@pytest.mark.parametrize(
    ("array", "known"),
    [
        (pa.array([3, -1, None], pa.int8()), [-1, 3]),
        (pa.array([True, False, None]), [False, True]),
        (pa.array(["b", "a", None]).dictionary_encode(), ["a", "b"]),
        (pa.nulls(3), []),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_categories_may_be_numbers_booleans_or_dictionaries(array: pa.Array, known: list[Any]) -> None:
    batch = pa.record_batch({"x": array, "y": pa.nulls(3)})
    assert OrdinalEncoder("x").fit(batch).transform(batch)["x"].to_pylist() == [1, 0, None] if known else [None] * 3
    out = OneHotEncoder("x").fit(batch).transform(batch)
    assert out.schema.names == [*(f"x={value}" for value in known), "y"]


def test_a_value_not_seen_in_the_fit_is_an_error_unless_told_otherwise() -> None:
    seen, new = pa.record_batch({"x": ["a", "b"]}), pa.record_batch({"x": ["b", None, "c", "c"]})
    message = "column 'x', row 2 of the batch: 'c' is not among the 2 categories of the fit; fit on more data, or pass "
    with pytest.raises(DataError, match=message + "unknown='ignore'") as caught:
        OneHotEncoder("x").fit(seen).transform(new)
    assert caught.value.row == 2
    with pytest.raises(DataError, match=message + "unknown=-1"):
        OrdinalEncoder("x").fit(seen).transform(new)
    lenient = OneHotEncoder("x", unknown="ignore").fit(seen)
    assert lenient.transform(new).to_pydict() == {"x=a": [0, None, 0, 0], "x=b": [1, None, 0, 0]}
    assert lenient.drain_changes() == {"x: unknown category, row kept": 2}
    ordinal = OrdinalEncoder("x", unknown=-7).fit(seen)
    assert ordinal.transform(new).column("x").to_pylist() == [1, None, -7, -7]
    assert ordinal.counts == {"x: unknown category, row kept": 2}


def test_too_many_categories_are_an_error_that_leaves_the_encoder_as_it_was() -> None:
    encoder = OneHotEncoder("x", max_categories=2).fit(pa.record_batch({"x": ["a", "b"]}))
    with pytest.raises(DataError, match="column 'x' has more than 2 categories; raise max_categories, or use Hashing"):
        encoder.partial_fit(pa.record_batch({"x": ["c"]}))
    assert encoder.categories == {"x": ["a", "b"]}


def test_types_that_change_or_cannot_be_categories_are_errors() -> None:
    encoder = OrdinalEncoder("x").fit(pa.record_batch({"x": [1, 2]}))
    with pytest.raises(SchemaError, match="column 'x': categories were int64 in earlier batches, and are large_string"):
        encoder.partial_fit(pa.record_batch({"x": ["a"]}))
    with pytest.raises(SchemaError, match="column 'x' is large_string, but was fitted as int64"):
        encoder.transform(pa.record_batch({"x": ["a"]}))
    for make in (OrdinalEncoder("x").fit, HashingEncoder("x", buckets=8).transform):
        with pytest.raises(SchemaError, match=r"column 'x' is double, expected text, .*put Cast\(\{'x': 'string'\}\)"):
            make(pa.record_batch({"x": [0.5]}))
    with pytest.raises(SchemaError, match=r"column 'x' is string, expected numbers; put Cast\(\{'x': 'float64'\}\)"):
        StandardScaler("x").fit(pa.record_batch({"x": ["1"]}))


def test_one_hot_refuses_columns_that_are_already_there_and_leaving_none() -> None:
    batch = pa.record_batch({"x": ["a"], "x=a": [1]})
    with pytest.raises(SchemaError, match="would make a second column called 'x=a'; rename the one there"):
        OneHotEncoder("x").fit(batch).transform(batch)
    nothing = pa.record_batch({"x": pa.nulls(1)})
    with pytest.raises(SchemaError, match="column 'x' is the only one, and had no category in the fit"):
        OneHotEncoder("x").fit(nothing).transform(nothing)


def fitted() -> list[Fitted[Any]]:
    batch = pa.record_batch({"x": [3, 1, 2, None], "y": [1, 1, 0, 0]})
    return [
        StandardScaler(["x", "y"]).fit(batch),
        MinMaxScaler("x", range=(-1, 1)).fit(batch),
        OneHotEncoder("x", max_categories=9, unknown="ignore").fit(batch),
        OrdinalEncoder(["x"], unknown=-2).fit(batch),
        StandardScaler("z").fit(pa.record_batch({"z": pa.nulls(2)})),
    ]


@pytest.mark.parametrize("encoder", fitted(), ids=repr)
def test_a_fit_survives_json_pickling_and_reset(encoder: Fitted[Any]) -> None:
    saved = json.loads(json.dumps(encoder.to_dict(), allow_nan=False))
    encoder.reset()
    for copy in (type(encoder).from_dict(saved), cloudpickle.loads(cloudpickle.dumps(encoder)), encoder):
        assert copy.to_dict() == saved
        assert repr(copy) == repr(encoder)
    if encoder.columns != ("z",):
        batch = pa.record_batch({"x": [1, None, 3], "y": [0, 1, None]})
        assert type(encoder).from_dict(saved).transform(batch).equals(encoder.transform(batch))


@pytest.mark.parametrize("encoder", fitted()[:4], ids=repr)
def test_merging_two_fits_is_fitting_both_parts(encoder: Fitted[Any]) -> None:
    batch = pa.record_batch({"x": [3, 1, 2, 5], "y": [1, 1, 0, 0]})
    options = encoder.to_dict()["options"]

    def fresh(data: pa.RecordBatch) -> Fitted[Any]:
        return type(encoder)(encoder.columns, **options).fit(data)

    merged = fresh(batch[:1]).merge(fresh(batch[1:]))
    once = fresh(batch).transform(batch)
    for name, array in zip(once.schema.names, merged.transform(batch).columns, strict=True):
        np.testing.assert_allclose(array.to_numpy(), once.column(name).to_numpy(), rtol=1e-12)


def test_merging_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"can merge only one of its own kind and columns, got StandardScaler\('y'\)"):
        StandardScaler("x").merge(StandardScaler("y"))
    with pytest.raises(ValueError, match="can merge only one of its own kind"):
        StandardScaler("x").merge(MinMaxScaler("x"))  # type: ignore[arg-type]


def test_saved_fits_of_another_kind_version_or_shape_are_refused() -> None:
    saved = StandardScaler("x").fit(pa.record_batch({"x": [1.0]})).to_dict()
    with pytest.raises(ResumeError, match="expected a MinMaxScaler, version 1, got kind 'StandardScaler', version 1"):
        MinMaxScaler.from_dict(saved)
    with pytest.raises(ResumeError, match="expected a StandardScaler, version 1, got kind 'StandardScaler', version 2"):
        StandardScaler.from_dict({**saved, "version": 2})
    damaged: list[dict[str, Any]] = [
        {"learned": {"x": {"count": 1, "colour": 2}}},
        {"columns": []},
        {"options": {"what": 1}},
    ]
    for damage in damaged:
        with pytest.raises(ResumeError, match="the saved StandardScaler is damaged"):
            StandardScaler.from_dict({**saved, **damage})


def test_constructors_refuse_what_cannot_work() -> None:
    for given_range in ((1, 0), (0, math.inf), (0, math.nan)):
        with pytest.raises(ValueError, match="range must be a pair of finite numbers, the lower first, got"):
            MinMaxScaler("x", range=given_range)
    with pytest.raises(ValueError, match="max_categories must be at least 1, got 0"):
        OneHotEncoder("x", max_categories=0)
    with pytest.raises(ValueError, match="unknown must be 'error' or 'ignore', got 'skip'"):
        OneHotEncoder("x", unknown="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown must be 'error' or a negative number, got 0"):
        OrdinalEncoder("x", unknown=0)
    with pytest.raises(ValueError, match=r"buckets must be between 1 and 2\*\*31, got 0"):
        HashingEncoder("x", buckets=0)
    with pytest.raises(ValueError, match=r"seed must be an integer from 0 to 2\*\*64 - 1, got -1"):
        HashingEncoder("x", buckets=1, seed=-1)


@given(values=st.lists(st.text(max_size=5) | st.none(), max_size=15), at=cuts, skip=st.integers(0, 3))
def test_hashing_depends_on_the_value_and_the_seed_alone(values: list[str | None], at: list[int], skip: int) -> None:
    encoder = HashingEncoder("x", buckets=1000, seed=5)
    batch = column_of(values, pa.string())[skip:]
    whole = encoder.transform(batch).column("x")
    assert whole.type == pa.int64()
    assert [v is None for v in whole.to_pylist()] == [v is None for v in values[skip:]]
    assert whole.to_pylist() == [v for p in pieces(batch, at) for v in encoder.transform(p).column("x").to_pylist()]
    for dtype in (pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())):
        other = pa.record_batch({"x": batch.column("x").cast(dtype)})
        assert encoder.transform(other).column("x").equals(whole)


def test_hashes_are_the_same_in_every_release() -> None:
    batch = pa.record_batch(
        {"t": ["", "a", "penstock"], "n": pa.array([0, 5, -1], pa.int16()), "b": [True, False, None]}
    )
    out = HashingEncoder(["t", "n", "b"], buckets=1_000_000, seed=7).transform(batch)
    assert out.to_pydict() == {"t": [353464, 584788, 53751], "n": [697221, 327830, 534112], "b": [648415, 697221, None]}
    assert out["t"].to_pylist() == [xxhash.xxh3_64_intdigest(t, 7) % 1_000_000 for t in (b"", b"a", b"penstock")]
    wide = pa.record_batch({"n": batch.column("n").cast(pa.int64())})
    assert HashingEncoder("n", buckets=1_000_000, seed=7).transform(wide)["n"].equals(out["n"])
    # The first outputs of splitmix64 from the state 0, as its authors publish them.
    state = np.array([0, 0x9E3779B97F4A7C15], np.uint64)
    assert [hex(w) for w in mix64(state)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_buckets_fill_evenly_and_seeds_differ() -> None:
    batch = pa.record_batch({"n": np.arange(100_000), "t": [f"user {i}" for i in range(100_000)]})
    one, two = (HashingEncoder(["n", "t"], buckets=100, seed=seed).transform(batch) for seed in (0, 1))
    for name in ("n", "t"):
        sizes = np.bincount(one[name].to_numpy(), minlength=100)
        assert sizes.size == 100
        assert abs(sizes - 1000).max() < 6 * math.sqrt(1000)
        assert np.mean(one[name].to_numpy() == two[name].to_numpy()) < 0.02


def test_hash64_tells_nulls_apart_and_takes_any_type() -> None:
    stamp = pa.array([1, None, 1], pa.timestamp("ns"))
    nested = pa.array([[1, 2], None, [1, 2]])
    decimal = pa.array([1.5, None, 1.5]).cast(pa.decimal128(5, 2))
    for array in (stamp, nested, decimal, pa.array([0.0, None, -0.0]), pa.array([b"x", None, b"x"])):
        first, null, again = hash64(array, 3)
        assert first == again
        assert first != null
    assert len(set(hash64(pa.nulls(4), 3).tolist())) == 1
    assert hash64(pa.array([], pa.string()), 0).size == 0
    nan = np.array([np.nan, -np.nan])
    assert len(set(hash64(pa.array(nan), 0).tolist())) == 1


def test_empty_batches_keep_the_promised_columns() -> None:
    batch = pa.record_batch({"x": ["a", "b"], "n": [1, 2]})
    empty = batch[:0]
    assert OneHotEncoder("x").fit(batch).transform(empty).schema.names == ["x=a", "x=b", "n"]
    assert OrdinalEncoder("x").fit(batch).transform(empty).schema.types == [pa.int64(), pa.int64()]
    assert StandardScaler("n").fit(batch).transform(empty).schema.types == [pa.string(), pa.float64()]
    assert HashingEncoder("x", buckets=3).transform(empty).schema.types == [pa.int64(), pa.int64()]


def test_a_missing_column_is_named() -> None:
    batch, other = pa.record_batch({"x": [1]}), pa.record_batch({"y": [1]})
    for encoder in (StandardScaler("x"), MinMaxScaler("x"), OneHotEncoder("x"), OrdinalEncoder("x")):
        with pytest.raises(SchemaError, match=r"column 'x' not found; the batch has \['y'\]"):
            encoder.fit(other)
        with pytest.raises(SchemaError, match=r"column 'x' not found; the batch has \['y'\]"):
            encoder.fit(batch).transform(other)
    with pytest.raises(SchemaError, match=r"column 'x' not found; the batch has \['y'\]"):
        HashingEncoder("x", buckets=3).transform(other)


def test_a_fitted_encoder_serves_many_threads() -> None:
    encoder = OrdinalEncoder("x", unknown=-1).fit(pa.record_batch({"x": ["a"]}))
    batch = pa.record_batch({"x": ["a", "b", None]})
    wrong: list[Any] = []

    def work() -> None:
        for _ in range(100):
            out = encoder.transform(batch)["x"].to_pylist()
            if out != [0, -1, None]:
                wrong.append(out)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert encoder.counts == {"x: unknown category, row kept": 800}


def test_encoders_print_as_they_are_written() -> None:
    assert repr(StandardScaler("x")) == "StandardScaler('x')"
    assert repr(MinMaxScaler(["x", "y"])) == "MinMaxScaler(['x', 'y'], range=(0, 1))"
    assert repr(OneHotEncoder("x")) == "OneHotEncoder('x', unknown='error')"
    assert repr(OrdinalEncoder("x", unknown=-1)) == "OrdinalEncoder('x', unknown=-1)"
    assert repr(HashingEncoder("x", buckets=8)) == "HashingEncoder('x', buckets=8, seed=0)"
