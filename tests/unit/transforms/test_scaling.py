"""Scalers against NumPy and exact fractions, and what every fitted transform shares."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch_pieces import column_of, pieces

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.transforms.features import MinMaxScaler, StandardScaler

numbers = st.lists(st.floats(-1e3, 1e3) | st.just(math.nan) | st.none(), min_size=1, max_size=30)
cuts = st.lists(st.integers(0, 30), max_size=4)


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
    with pytest.raises(DataError, match=r"'x'.*row 3\b") as caught:
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


@pytest.mark.parametrize("scaler", [StandardScaler("x"), MinMaxScaler("x")], ids=repr)
def test_transforming_before_fitting_says_what_to_do(scaler: Any) -> None:
    with pytest.raises(ConfigError, match=r"'x'.*fit\(source\)"):
        scaler.transform(pa.record_batch({"x": [1]}))


def test_a_column_without_a_value_in_the_fit_cannot_be_scaled() -> None:
    batch = pa.record_batch({"x": pa.nulls(3)})
    scaler = StandardScaler("x").fit(batch)
    with pytest.raises(ConfigError, match=r"StandardScaler\('x'\).*'x'"):
        scaler.transform(batch)
    scaler.partial_fit(pa.record_batch({"x": [1.0, 3.0]}))
    assert scaler.transform(batch).column("x").equals(pa.nulls(3, pa.float64()))


def test_text_cannot_be_scaled() -> None:
    with pytest.raises(SchemaError, match=r"'x'.*Cast\(\{'x': 'float64'\}\)"):
        StandardScaler("x").fit(pa.record_batch({"x": ["1"]}))


def fitted() -> list[StandardScaler | MinMaxScaler]:
    batch = pa.record_batch({"x": [3, 1, 2, None], "y": [1, 1, 0, 0]})
    return [
        StandardScaler(["x", "y"]).fit(batch),
        MinMaxScaler("x", range=(-1, 1)).fit(batch),
        StandardScaler("z").fit(pa.record_batch({"z": pa.nulls(2)})),
    ]


@pytest.mark.parametrize("scaler", fitted(), ids=repr)
def test_a_fit_survives_json_pickling_and_reset(scaler: StandardScaler | MinMaxScaler) -> None:
    saved = json.loads(json.dumps(scaler.to_dict(), allow_nan=False))
    scaler.reset()
    for copy in (type(scaler).from_dict(saved), cloudpickle.loads(cloudpickle.dumps(scaler)), scaler):
        assert copy.to_dict() == saved
        assert repr(copy) == repr(scaler)
    if scaler.columns != ("z",):
        batch = pa.record_batch({"x": [1, None, 3], "y": [0, 1, None]})
        assert type(scaler).from_dict(saved).transform(batch).equals(scaler.transform(batch))


@pytest.mark.parametrize("scaler", fitted()[:2], ids=repr)
def test_merging_two_fits_is_fitting_both_parts(scaler: StandardScaler | MinMaxScaler) -> None:
    batch = pa.record_batch({"x": [3, 1, 2, 5], "y": [1, 1, 0, 0]})
    options = scaler.to_dict()["options"]

    def fresh(data: pa.RecordBatch) -> Any:
        return type(scaler)(scaler.columns, **options).fit(data)

    merged = fresh(batch[:1]).merge(fresh(batch[1:]))
    once = fresh(batch).transform(batch)
    for name, array in zip(once.schema.names, merged.transform(batch).columns, strict=True):
        np.testing.assert_allclose(array.to_numpy(), once.column(name).to_numpy(), rtol=1e-12)


def test_merging_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"StandardScaler\('y'\)"):
        StandardScaler("x").merge(StandardScaler("y"))
    with pytest.raises(ValueError, match=r"range=\(0, 1\)"):
        StandardScaler("x").merge(MinMaxScaler("x"))  # type: ignore[arg-type]


def test_saved_fits_of_another_kind_version_or_shape_are_refused() -> None:
    saved = StandardScaler("x").fit(pa.record_batch({"x": [1.0]})).to_dict()
    with pytest.raises(ResumeError, match=r"version 1\b.*'StandardScaler'"):
        MinMaxScaler.from_dict(saved)
    with pytest.raises(ResumeError, match=r"version 1\b.*version 2\b"):
        StandardScaler.from_dict({**saved, "version": 2})
    damaged: list[dict[str, Any]] = [
        {"learned": {"x": {"count": 1, "colour": 2}}},
        {"columns": []},
        {"options": {"what": 1}},
    ]
    for damage in damaged:
        with pytest.raises(ResumeError, match="StandardScaler"):
            StandardScaler.from_dict({**saved, **damage})


def test_a_range_must_be_finite_and_in_order() -> None:
    for given_range in ((1, 0), (0, math.inf), (0, math.nan)):
        with pytest.raises(ValueError, match=r"\brange\b"):
            MinMaxScaler("x", range=given_range)


def test_empty_batches_keep_the_promised_types() -> None:
    batch = pa.record_batch({"x": ["a", "b"], "n": [1, 2]})
    assert StandardScaler("n").fit(batch).transform(batch[:0]).schema.types == [pa.string(), pa.float64()]


def test_a_missing_column_is_named() -> None:
    batch, other = pa.record_batch({"x": [1]}), pa.record_batch({"y": [1]})
    for scaler in (StandardScaler("x"), MinMaxScaler("x")):
        with pytest.raises(SchemaError, match=r"'x'.*'y'"):
            scaler.fit(other)
        with pytest.raises(SchemaError, match=r"'x'.*'y'"):
            scaler.fit(batch).transform(other)


def test_scalers_print_as_they_are_written() -> None:
    assert repr(StandardScaler("x")) == "StandardScaler('x')"
    assert repr(MinMaxScaler(["x", "y"])) == "MinMaxScaler(['x', 'y'], range=(0, 1))"


@given(
    values=st.lists(
        st.floats(-1e150, 1e150) | st.floats(-1e-150, 1e-150) | st.integers(-9, 9), min_size=1, max_size=90
    ),
    at=cuts,
    order=st.randoms(use_true_random=False),
)
def test_a_fit_gives_the_same_bits_for_any_cuts_and_any_order(values: list[float], at: list[int], order: Any) -> None:
    whole = StandardScaler("x").fit(column_of(values, pa.float64()))
    shuffled = order.sample(values, len(values))
    parts = [StandardScaler("x").fit(part) for part in pieces(column_of(shuffled, pa.float64()), at)]
    merged = StandardScaler.from_dict(json.loads(json.dumps(parts[0].to_dict())))
    for part in parts[1:]:
        merged.merge(StandardScaler.from_dict(json.loads(json.dumps(part.to_dict()))))
    assert merged.to_dict() == whole.to_dict()
    exact = [Fraction(value) for value in map(float, values)]
    mean = sum(exact) / len(exact)
    assert whole.mean == {"x": float(mean)}
    assert whole.learned("x").squares == float(sum((value - mean) ** 2 for value in exact))


def test_a_scaler_saved_with_rounded_figures_alone_scales_as_before_and_can_learn_more() -> None:
    figures = {"count": 3, "mean": 2.1, "mean_rest": 3e-17, "squares": 2.0, "minimum": 1.0, "maximum": 3.0}
    saved = {"kind": "StandardScaler", "version": 1, "columns": ["x"], "options": {}, "learned": {"x": figures}}
    scaler = StandardScaler.from_dict(saved)
    assert (scaler.mean, scaler.std) == ({"x": 2.1}, {"x": math.sqrt(2 / 3)})
    scaler.partial_fit(column_of([2.1] * 3, pa.float64()))
    assert (scaler.mean["x"], scaler.std["x"]) == pytest.approx((2.1, math.sqrt(2 / 6)), rel=1e-15)
