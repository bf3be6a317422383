"""Encoders of categories against pandas, and hashes against published values."""

from __future__ import annotations

import json
import math
import threading
from typing import Any

import cloudpickle
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from tests.batch_pieces import column_of, pieces

from penstock.arrays.hashes import hash64, mix64
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.transforms.features import HashingEncoder, OneHotEncoder, OrdinalEncoder

categories = st.lists(st.sampled_from(["b", "a", "ü", "", "B"]) | st.none(), max_size=20)
cuts = st.lists(st.integers(0, 30), max_size=4)


@pytest.mark.parametrize("encoder", [OneHotEncoder("x"), OrdinalEncoder("x")], ids=repr)
def test_transforming_before_fitting_says_what_to_do(encoder: Any) -> None:
    with pytest.raises(ConfigError, match=r"'x'.*fit\(source\)"):
        encoder.transform(pa.record_batch({"x": [1]}))


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
    message = r"'x'.*row 2\b.*'c'.*"
    with pytest.raises(DataError, match=message + "unknown='ignore'") as caught:
        OneHotEncoder("x").fit(seen).transform(new)
    assert caught.value.row == 2
    with pytest.raises(DataError, match=message + "unknown=-1"):
        OrdinalEncoder("x").fit(seen).transform(new)
    lenient = OneHotEncoder("x", unknown="ignore").fit(seen)
    lenient.begin_attempt()
    assert lenient.transform(new).to_pydict() == {"x=a": [0, None, 0, 0], "x=b": [1, None, 0, 0]}
    assert lenient.end_attempt() == ({}, {"x: unknown category, row kept": 2})
    ordinal = OrdinalEncoder("x", unknown=-7).fit(seen)
    assert ordinal.transform(new).column("x").to_pylist() == [1, None, -7, -7]
    assert ordinal.counts == {"x: unknown category, row kept": 2}


def test_too_many_categories_are_an_error_that_leaves_the_encoder_as_it_was() -> None:
    encoder = OneHotEncoder("x", max_categories=2).fit(pa.record_batch({"x": ["a", "b"]}))
    with pytest.raises(DataError, match=r"'x'.*max_categories"):
        encoder.partial_fit(pa.record_batch({"x": ["c"]}))
    assert encoder.categories == {"x": ["a", "b"]}


def test_types_that_change_or_cannot_be_categories_are_errors() -> None:
    encoder = OrdinalEncoder("x").fit(pa.record_batch({"x": [1, 2]}))
    with pytest.raises(SchemaError, match=r"'x'.*large_string"):
        encoder.partial_fit(pa.record_batch({"x": ["a"]}))
    with pytest.raises(SchemaError, match=r"'x'.*large_string"):
        encoder.transform(pa.record_batch({"x": ["a"]}))
    for make in (OrdinalEncoder("x").fit, HashingEncoder("x", buckets=8).transform):
        with pytest.raises(SchemaError, match=r"'x'.*Cast\(\{'x': 'string'\}\)"):
            make(pa.record_batch({"x": [0.5]}))


def test_one_hot_refuses_columns_that_are_already_there_and_leaving_none() -> None:
    batch = pa.record_batch({"x": ["a"], "x=a": [1]})
    with pytest.raises(SchemaError, match="'x=a'"):
        OneHotEncoder("x").fit(batch).transform(batch)
    nothing = pa.record_batch({"x": pa.nulls(1)})
    with pytest.raises(SchemaError, match="'x'"):
        OneHotEncoder("x").fit(nothing).transform(nothing)


def fitted() -> list[OneHotEncoder | OrdinalEncoder]:
    batch = pa.record_batch({"x": [3, 1, 2, None], "y": [1, 1, 0, 0]})
    return [
        OneHotEncoder("x", max_categories=9, unknown="ignore").fit(batch),
        OrdinalEncoder(["x"], unknown=-2).fit(batch),
    ]


@pytest.mark.parametrize("encoder", fitted(), ids=repr)
def test_a_fit_survives_json_pickling_and_reset(encoder: OneHotEncoder | OrdinalEncoder) -> None:
    saved = json.loads(json.dumps(encoder.to_dict(), allow_nan=False))
    encoder.reset()
    for copy in (type(encoder).from_dict(saved), cloudpickle.loads(cloudpickle.dumps(encoder)), encoder):
        assert copy.to_dict() == saved
        assert repr(copy) == repr(encoder)
    batch = pa.record_batch({"x": [1, None, 3], "y": [0, 1, None]})
    assert type(encoder).from_dict(saved).transform(batch).equals(encoder.transform(batch))


@pytest.mark.parametrize("encoder", fitted(), ids=repr)
def test_merging_two_fits_is_fitting_both_parts(encoder: OneHotEncoder | OrdinalEncoder) -> None:
    batch = pa.record_batch({"x": [3, 1, 2, 5], "y": [1, 1, 0, 0]})
    options = encoder.to_dict()["options"]

    def fresh(data: pa.RecordBatch) -> Any:
        return type(encoder)(encoder.columns, **options).fit(data)

    merged = fresh(batch[:1]).merge(fresh(batch[1:]))
    once = fresh(batch).transform(batch)
    assert merged.transform(batch).equals(once)


def test_constructors_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match="max_categories"):
        OneHotEncoder("x", max_categories=0)
    with pytest.raises(ValueError, match=r"unknown.*'skip'"):
        OneHotEncoder("x", unknown="skip")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"unknown.*'error'"):
        OrdinalEncoder("x", unknown=0)
    with pytest.raises(ValueError, match="buckets"):
        HashingEncoder("x", buckets=0)
    with pytest.raises(ValueError, match=r"\bseed\b"):
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
    assert HashingEncoder("x", buckets=3).transform(empty).schema.types == [pa.int64(), pa.int64()]


def test_a_missing_column_is_named() -> None:
    batch, other = pa.record_batch({"x": [1]}), pa.record_batch({"y": [1]})
    for encoder in (OneHotEncoder("x"), OrdinalEncoder("x")):
        with pytest.raises(SchemaError, match=r"'x'.*'y'"):
            encoder.fit(other)
        with pytest.raises(SchemaError, match=r"'x'.*'y'"):
            encoder.fit(batch).transform(other)
    with pytest.raises(SchemaError, match=r"'x'.*'y'"):
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
    assert repr(OneHotEncoder("x")) == "OneHotEncoder('x', unknown='error')"
    assert repr(OrdinalEncoder("x", unknown=-1)) == "OrdinalEncoder('x', unknown=-1)"
    assert repr(HashingEncoder("x", buckets=8)) == "HashingEncoder('x', buckets=8, seed=0)"
