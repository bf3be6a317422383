from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.distributed import (
    Balanced,
    CanonicalStreams,
    Contiguous,
    Rank,
    Sharding,
    Strided,
    attention_cost,
    canonical_streams,
    shares_of,
)
from penstock.errors import ConfigError

SIZES = st.lists(st.integers(0, 5000), max_size=60).map(lambda sizes: np.array(sizes, np.int64))
EQUAL = [Contiguous(), Strided(), Balanced(), CanonicalStreams()]


@dataclass(frozen=True)
class Custom:
    answer: Any

    def shares(self, sizes: Any, world: int) -> Any:
        return self.answer


@pytest.mark.parametrize(
    "sharding", [*EQUAL, Balanced(equal_size=False)], ids=lambda sharding: repr(sharding).split(" at 0x")[0]
)
@given(sizes=SIZES, world=st.integers(1, 9))
def test_every_sample_goes_to_exactly_one_rank(sharding: Sharding, sizes: Any, world: int) -> None:
    shares = shares_of(sharding, sizes, world)
    assert len(shares) == world
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(sizes)))
    assert all(share.dtype == np.int64 for share in shares)
    assert sum(len(share) == 0 for share in shares) == max(0, world - len(sizes))


@pytest.mark.parametrize("sharding", EQUAL, ids=lambda sharding: repr(sharding).split(" at 0x")[0])
@given(sizes=SIZES, world=st.integers(1, 9))
def test_counts_differ_by_at_most_one_and_rank_0_is_the_last_to_go_short(
    sharding: Sharding, sizes: Any, world: int
) -> None:
    counts = [len(share) for share in shares_of(sharding, sizes, world)]
    assert max(counts) - min(counts) <= 1
    if not isinstance(sharding, Balanced):
        assert counts[0] == max(counts)


def test_contiguous_and_strided_deal_as_they_say() -> None:
    sizes = np.ones(7, np.int64)
    assert [share.tolist() for share in Contiguous().shares(sizes, 3)] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [share.tolist() for share in Strided().shares(sizes, 3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_balanced_ranks_have_less_to_wait_for() -> None:
    sizes = np.random.default_rng(3).lognormal(6, 1, 256).astype(np.int64)
    cost = attention_cost(sizes)

    def slowest(sharding: Sharding) -> float:
        return float(max(cost[share].sum() for share in shares_of(sharding, sizes, 8)))

    assert slowest(Balanced()) < 1.01 * cost.sum() / 8
    assert slowest(Contiguous()) > 1.1 * cost.sum() / 8


def test_balanced_takes_the_cost_it_is_given() -> None:
    shares = shares_of(
        Balanced(cost=lambda sizes: (sizes == 7).astype(np.int64), equal_size=False), np.array([7, 1, 7, 1]), 2
    )
    assert [int(np.isin([0, 2], share).sum()) for share in shares] == [1, 1]


def test_a_sample_of_several_documents_costs_their_sum() -> None:
    lengths, offsets = np.array([8, *[1] * 8, 8, *[2] * 4]), np.array([0, 1, 9, 10, 14, 14])
    squares = Balanced(cost=lambda lengths: lengths**2)
    assert squares.costs(lengths, offsets).tolist() == [64, 8, 64, 16, 0]
    sizes = np.array([8, 8, 8, 8, 0])
    expensive = [np.isin(share, [0, 2]).sum() for share in shares_of(squares, sizes, 2, (lengths, offsets))]
    assert expensive == [1, 1]
    # A sharding that knows sizes alone is asked as ever.
    assert [share.tolist() for share in shares_of(Strided(), sizes, 2, (lengths, offsets))] == [[0, 2, 4], [1, 3]]


@given(
    documents=st.lists(st.lists(st.integers(1, 5000), max_size=6), min_size=1, max_size=40),
    world=st.integers(1, 9),
    equal=st.booleans(),
)
def test_shares_by_documents_are_complete(documents: list[list[int]], world: int, equal: bool) -> None:
    lengths = np.array([length for each in documents for length in each], np.int64)
    offsets = np.cumsum([0, *map(len, documents)])
    sizes = np.array([sum(each) for each in documents])
    shares = shares_of(Balanced(equal_size=equal), sizes, world, (lengths, offsets))
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(documents)))
    counts = [len(share) for share in shares]
    assert not equal or max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ([[0, 1, 2]], r"Custom\(.*\)"),
        ([[0, 1], [1, 2]], r"\b1\b.*\b2\b"),
        ([[0], [2]], r"\b1\b.*\b0\b"),
        ([[0, 1], [2, 3]], r"sample 3\b"),
        ([[0, 1], [2, -1]], r"-1\b"),
        ([[0, 1, 2], []], r"rank 1\b"),
        ([[0.0, 1.0], [2.0]], r"rank 0\b.*\bfloat64\b"),
        ([[[0, 1]], [2]], r"\bint64\b"),
    ],
)
def test_a_sharding_that_loses_or_repeats_samples_is_named(answer: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        shares_of(Custom(answer), np.ones(3, np.int64), 2)


def test_anything_with_shares_is_a_sharding() -> None:
    assert isinstance(Custom([]), Sharding)
    assert [share.tolist() for share in shares_of(Custom([[2, 0], [1]]), np.ones(3, np.int64), 2)] == [[2, 0], [1]]


@given(global_batch=st.integers(1, 5000), wanted=st.integers(1, 100))
def test_canonical_streams_fit_the_global_batch(global_batch: int, wanted: int) -> None:
    streams = canonical_streams(global_batch, wanted)
    assert 1 <= streams <= 2 * wanted
    assert streams % global_batch == 0 or global_batch % streams == 0
    if global_batch <= 2 * wanted:
        assert streams % global_batch == 0


def test_canonical_streams_of_usual_batches() -> None:
    assert [canonical_streams(g) for g in (1, 8, 40, 64, 96, 128, 256, 1024, 3 * 64, 1009)] == [
        64, 64, 80, 64, 96, 128, 64, 64, 64, 1,
    ]  # fmt: skip


@given(per_rank=st.integers(1, 12), world=st.integers(1, 8), steps=st.integers(1, 40))
def test_ranks_read_the_streams_that_serve_their_slots_and_no_others(per_rank: int, world: int, steps: int) -> None:
    global_batch = per_rank * world
    sharding = CanonicalStreams(canonical_streams(global_batch, 16))
    used: list[set[int]] = [set() for _ in range(world)]
    for step in range(max(steps, sharding.streams)):
        served = sharding.at(step, global_batch)
        assert len(served) == global_batch
        assert np.all(np.diff(served) >= 0)
        for rank, share in enumerate(sharding.shares(np.ones(global_batch, np.int64), world)):
            slots = sharding.slots_of(Rank(rank, world), global_batch)
            assert share.tolist() == list(slots)
            used[rank] |= set(served[share].tolist())
    assert set().union(*used) == set(range(sharding.streams))
    assert sharding.exclusive(global_batch, world) == (sum(map(len, used)) == sharding.streams)
    if sharding.streams % global_batch == 0:
        assert sharding.exclusive(global_batch, world)


def test_the_stream_of_a_slot_does_not_depend_on_the_ranks() -> None:
    """4 streams and 2 slots: they take turns. 2 streams and 4 slots: each serves two."""
    assert [CanonicalStreams(4).at(step, 2).tolist() for step in range(3)] == [[0, 2], [1, 3], [0, 2]]
    assert [CanonicalStreams(2).at(step, 4).tolist() for step in range(2)] == [[0, 0, 1, 1], [0, 0, 1, 1]]
    assert not CanonicalStreams(2).exclusive(4, 4)


def test_streams_that_do_not_fit_the_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\b6\b.*\b4\b"):
        CanonicalStreams(6).at(0, 4)
    with pytest.raises(ConfigError, match=r"streams.*\b0\b"):
        CanonicalStreams(0)
    with pytest.raises(ConfigError, match=r"\b1\b.*\b0\b"):
        canonical_streams(0)
