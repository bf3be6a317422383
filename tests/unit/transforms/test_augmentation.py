"""Noise that depends on nothing but the row, the seed and the copy."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch_pieces import pieces

from penstock.errors import SchemaError
from penstock.pipeline.stages import Transform
from penstock.transforms.augmentation import Augment, Draws, DropWords, Jitter, SwapChars, row_keys
from penstock.transforms.text import Lower

texts = st.lists(st.text("abé😀 \n\u3000", max_size=25) | st.none(), max_size=12)
cuts = st.lists(st.integers(0, 12), max_size=4)
NOISY = [
    Jitter("x", scale=0.5),
    DropWords("text", probability=0.4),
    SwapChars("text", probability=0.4),
    Augment(DropWords("text", probability=0.4), copies=2),
]


def rows(values: list[str | None], dtype: pa.DataType | None = None) -> pa.RecordBatch:
    n = len(values)
    text = pa.array(values, pa.string()).cast(dtype or pa.string())
    return pa.record_batch(
        {"id": pa.array(range(n)), "x": pa.array([i / 3 for i in range(n)], pa.float64()), "text": text}
    )


@pytest.mark.parametrize("transform", NOISY, ids=repr)
def test_the_same_rows_come_out_the_same_however_they_are_cut(transform: Transform) -> None:
    @given(values=texts, at=cuts)
    def check(values: list[str | None], at: list[int]) -> None:
        batch = rows(values)
        whole = transform.transform(batch)
        whole.validate(full=True)
        parts = [transform.transform(piece) for piece in pieces(batch, at)]
        assert pa.table(whole).equals(pa.Table.from_batches(parts))
        assert transform.transform(batch).equals(whole), "or the number of calls would matter"

    check()


def test_noise_on_a_large_batch_equals_noise_row_by_row() -> None:
    # Vectorised log and cos must not depend on where in the array a value stands.
    batch = rows([None] * 1003)
    jitter = Jitter("x", scale=1.0)
    one_by_one = [jitter.transform(batch[i : i + 1]).column("x")[0].as_py() for i in range(1003)]
    assert jitter.transform(batch).column("x").to_pylist() == one_by_one


@pytest.mark.parametrize("transform", NOISY, ids=repr)
def test_threads_and_other_processes_see_the_same_noise(transform: Transform) -> None:
    batch = rows(["one two three four", "five six", None, ""] * 5)
    expected = transform.transform(batch)
    results: list[pa.RecordBatch] = []
    copy = cloudpickle.loads(cloudpickle.dumps(transform))
    threads = [threading.Thread(target=lambda: results.append(copy.transform(batch))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(result.equals(expected) for result in results)


def test_jitter_is_gaussian_with_the_scale_asked_for() -> None:
    n = 40_000
    batch = pa.record_batch({"x": np.zeros(n), "y": np.zeros(n), "id": np.arange(n)})
    out = Jitter(["x", "y"], scale=2.0).transform(batch)
    x, y = out["x"].to_numpy(), out["y"].to_numpy()
    assert abs(x.mean()) < 5 * 2 / math.sqrt(n)
    assert abs(x.std() - 2) < 5 * 2 / math.sqrt(2 * n)
    for sigmas, share in ((1, 0.6827), (2, 0.9545), (3, 0.9973)):
        expected = math.sqrt(share * (1 - share) / n)
        assert abs(np.mean(np.abs(x) < 2 * sigmas) - share) < 5 * expected
    assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(n)


def test_jitter_keeps_types_nulls_nan_and_infinity() -> None:
    batch = pa.record_batch({"x": pa.array([1.0, None, math.nan, math.inf], pa.float32())})
    out = Jitter("x", scale=0.1).transform(batch).column("x")
    assert out.type == pa.float32()
    assert out.is_null().to_pylist() == [False, True, False, False]
    values = out.to_pylist()
    assert values[0] != 1.0
    assert abs(values[0] - 1.0) < 1
    assert math.isnan(values[2])
    assert values[3] == math.inf


def test_equal_rows_get_equal_noise_unless_a_key_tells_them_apart() -> None:
    batch = pa.record_batch({"x": [1.0, 1.0], "id": [1, 2]})
    one, two = Jitter("x", scale=1).transform(batch.select(["x"]))["x"].to_pylist()
    assert one == two
    by_id = Jitter("x", scale=1, key="id").transform(batch)["x"].to_pylist()
    assert by_id[0] != by_id[1]
    other_value = pa.record_batch({"x": [5.0, 5.0], "id": [1, 2]})
    noise = np.array(Jitter("x", scale=1, key="id").transform(other_value)["x"].to_pylist()) - 5
    np.testing.assert_allclose(noise, np.array(by_id) - 1, rtol=1e-12)


@given(values=texts, probability=st.floats(0, 1), skip=st.integers(0, 3))
def test_drop_words_leaves_some_words_in_their_order_with_the_space_behind_them(
    values: list[str | None], probability: float, skip: int
) -> None:
    batch = rows(values)[skip:]
    out = DropWords("text", probability=probability).transform(batch).column("text").to_pylist()
    for before, after in zip(values[skip:], out):
        if before is None or not before.split():
            assert after == before
            continue
        lead = before[: len(before) - len(before.lstrip())]
        parts = re.findall(r"\S+\s*", before)
        assert after is not None
        assert after.startswith(lead)
        kept = re.findall(r"\S+\s*", after)
        left = iter(parts)
        assert all(word in left for word in kept), "a subsequence"
        assert lead + "".join(kept) == after
        assert kept


def test_drop_words_drops_the_share_asked_for() -> None:
    n = 20_000
    batch = pa.record_batch({"text": [f"w{i} " * 20 for i in range(n // 20)]})
    kept = sum(len(t.split()) for t in DropWords("text", probability=0.3).transform(batch)["text"].to_pylist())
    assert abs(kept / n - 0.7) < 5 * math.sqrt(0.3 * 0.7 / n)


def test_the_ends_of_probability_mean_what_they_say() -> None:
    batch = rows([" one two  three ", "x", None])
    assert DropWords("text", probability=0).transform(batch).equals(batch)
    assert SwapChars("text", probability=0).transform(batch).equals(batch)
    left = DropWords("text", probability=1).transform(batch)["text"].to_pylist()
    assert len(left[0].split()) == 1
    assert left[1:] == ["x", None]
    assert SwapChars("text", probability=1).transform(batch)["text"].to_pylist() == [" noe wto  htere ", "x", None]


@given(values=texts, probability=st.floats(0, 1), skip=st.integers(0, 3))
def test_swap_chars_swaps_neighbours_within_words_only(values: list[str | None], probability: float, skip: int) -> None:
    batch = rows(values)[skip:]
    out = SwapChars("text", probability=probability).transform(batch).column("text").to_pylist()
    for before, after in zip(values[skip:], out):
        if before is None:
            assert after is None
            continue
        i = 0
        while i < len(before):
            if before[i] != after[i]:
                assert (before[i], before[i + 1]) == (after[i + 1], after[i])
                assert not before[i].isspace()
                assert not before[i + 1].isspace()
                i += 1
            i += 1
        assert len(before) == len(after)


def test_swap_chars_swaps_about_the_share_asked_for() -> None:
    n = 20_000
    batch = pa.record_batch({"text": ["".join(chr(97 + (i + j) % 26) for j in range(101)) for i in range(n // 100)]})
    out = SwapChars("text", probability=0.02).transform(batch)["text"].to_pylist()
    swaps = sum(sum(a != b for a, b in zip(x, y)) for x, y in zip(batch["text"].to_pylist(), out)) / 2
    # Some two in a hundred overlap another and are left out.
    assert abs(swaps / n - 0.0196) < 5 * math.sqrt(0.02 / n)


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_every_layout_of_text_gets_the_same_noise(dtype: pa.DataType) -> None:
    values = ["one two three", None, "vier fünf", ""]
    for transform in NOISY[1:]:
        out = transform.transform(rows(values, dtype))
        assert out.schema.field("text").type == dtype
        assert out["text"].to_pylist() == transform.transform(rows(values))["text"].to_pylist()


@pytest.mark.parametrize(
    "make",
    [
        lambda s: Jitter("x", scale=1, seed=s),
        lambda s: DropWords("text", 0.5, seed=s),
        lambda s: SwapChars("text", 0.5, seed=s),
    ],
)
def test_seeds_and_copies_differ(make: Any) -> None:
    batch = rows(["the quick brown fox jumps over the lazy dog"] * 3)
    versions = [
        make(0).transform(batch),
        make(1).transform(batch),
        make(0).augment(batch, 1),
        make(0).augment(batch, 2),
    ]
    shown = {str(version.to_pylist()) for version in versions}
    assert len(shown) == 4


@given(values=texts, copies=st.integers(1, 3))
def test_augment_follows_each_row_with_its_copies(values: list[str | None], copies: int) -> None:
    batch, inner = rows(values), SwapChars("text", probability=0.5)
    out = Augment(inner, copies=copies).transform(batch)
    versions = [batch.to_pylist(), *(inner.augment(batch, copy).to_pylist() for copy in range(1, copies + 1))]
    assert out.to_pylist() == [version[i] for i in range(batch.num_rows) for version in versions]
    assert out.schema == batch.schema


def test_augment_with_a_plain_transform_makes_one_copy() -> None:
    out = Augment(Lower("text")).transform(rows(["A"]))
    assert out["text"].to_pylist() == ["A", "a"]
    with pytest.raises(ValueError, match=r"Lower\('text'\).*copies"):
        Augment(Lower("text"), copies=2)


def test_augment_refuses_transforms_that_change_the_shape_of_the_data() -> None:
    class Shorten(Transform):
        def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            return batch[1:]

        def __repr__(self) -> str:
            return "Shorten()"

    class Widen(Transform):
        def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            return batch.append_column("more", pa.nulls(batch.num_rows))

        def __repr__(self) -> str:
            return "Widen()"

    with pytest.raises(SchemaError, match=r"Shorten\(\)"):
        Augment(Shorten()).transform(rows(["a", "b"]))
    with pytest.raises(SchemaError, match=r"Widen\(\).*\bint64\b"):
        Augment(Widen()).transform(rows(["a", "b"]))


def test_row_keys_do_not_depend_on_the_order_of_columns() -> None:
    batch = rows(["a", "b", None])
    keys = row_keys(batch)
    assert (keys == row_keys(batch.select(["text", "id", "x"]))).all()
    assert len(set(keys.tolist())) == 3


def test_uniforms_are_uniform_and_streams_independent() -> None:
    n = 50_000
    keys = row_keys(pa.record_batch({"id": np.arange(n)}))
    one, two = (Draws(keys, 0, stream).uniforms() for stream in ("a", "b"))
    next_index = Draws(keys, 0, "a").uniforms(index=1)
    for draws in (one, two, next_index):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts = np.histogram(draws, 50, (0, 1))[0]
        assert abs(counts - n / 50).max() < 5 * math.sqrt(n / 50)
    for other in (two, next_index):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(n)


def test_empty_batches_pass() -> None:
    for transform in NOISY:
        out = transform.transform(rows([]))
        assert out.equals(rows([]))


def test_wrong_columns_are_named() -> None:
    batch = pa.record_batch({"id": [1]})
    for transform in NOISY:
        with pytest.raises(SchemaError, match="'id'"):
            transform.transform(batch)
    with pytest.raises(SchemaError, match=r"'id'.*Cast\(\{'id': 'float64'\}\)"):
        Jitter("id", scale=1).transform(batch)
    with pytest.raises(SchemaError, match=r"'id'.*\bint64\b"):
        DropWords("id", probability=0.5).transform(batch)
    with pytest.raises(SchemaError, match="'key'"):
        Jitter("x", scale=1, key="key").transform(rows(["a"]))


def test_constructors_refuse_what_cannot_work() -> None:
    for scale in (-1, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"\bscale\b"):
            Jitter("x", scale=scale)
    for make in (DropWords, SwapChars):
        with pytest.raises(ValueError, match="probability"):
            make("text", probability=1.5)
        with pytest.raises(ValueError, match=r"\bseed\b"):
            make("text", probability=0.5, seed=-1)
    with pytest.raises(ValueError, match="copies"):
        Augment(Lower("text"), copies=0)


def test_transforms_print_as_they_are_written() -> None:
    assert repr(Jitter("x", scale=0.5)) == "Jitter('x', scale=0.5, seed=0)"
    assert repr(SwapChars("t", 0.1, seed=3)) == "SwapChars('t', probability=0.1, seed=3)"
    assert repr(Augment(DropWords("t", 0.1), copies=2)) == "Augment(DropWords('t', probability=0.1, seed=0), copies=2)"
