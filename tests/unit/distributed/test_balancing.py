from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.distributed import attention_cost, greedy, karmarkar_karp, micro_batches
from penstock.errors import ConfigError

BOTH = pytest.mark.parametrize("divide", [karmarkar_karp, greedy])
Divide = Callable[..., list[Any]]


def sums(costs: Any, parts: list[Any]) -> list[float]:
    return [float(np.asarray(costs)[part].sum()) for part in parts]


def least_possible(costs: list[int], parts: int) -> int:
    """The dearest part of the best division there is, by trying them all."""
    ways = itertools.product(range(parts), repeat=len(costs))
    return min(max(sum(c for c, at in zip(costs, way) if at == part) for part in range(parts)) for way in ways)


def plain_differencing(costs: list[float], parts: int) -> list[float]:
    """Largest differencing on sums alone, as the books have it."""
    states = [[cost] + [0.0] * (parts - 1) for cost in costs]
    while len(states) > 1:
        states.sort(key=lambda state: max(state) - min(state))
        one, other = states.pop(), states.pop()
        states.append([a + b for a, b in zip(sorted(one), sorted(other, reverse=True))])
    return sorted(states[0])


@BOTH
@given(
    costs=st.lists(st.integers(0, 1000), max_size=50),
    parts=st.integers(1, 12),
    equal_size=st.booleans(),
    data=st.data(),
)
def test_every_item_is_in_one_part(
    divide: Divide, costs: list[int], parts: int, equal_size: bool, data: st.DataObject
) -> None:
    result = divide(costs, parts, equal_size=equal_size)
    sizes = [len(part) for part in result]
    assert len(result) == parts
    assert sorted(np.concatenate(result).tolist()) == list(range(len(costs)))
    assert sum(size == 0 for size in sizes) == max(0, parts - len(costs))
    assert all(part.tolist() == sorted(part.tolist()) for part in result)
    firsts = [int(part[0]) for part in result if len(part)]
    assert firsts == sorted(firsts)
    if equal_size:
        assert max(sizes) - min(sizes) <= 1
    again = divide(np.array(costs, data.draw(st.sampled_from([np.int64, np.int32, np.float64]))), parts, equal_size)
    assert [part.tolist() for part in again] == [part.tolist() for part in result]


@BOTH
@given(costs=st.lists(st.integers(1, 30), min_size=1, max_size=7), parts=st.integers(1, 3))
def test_the_dearest_part_is_near_the_least_possible(divide: Divide, costs: list[int], parts: int) -> None:
    assert max(sums(costs, divide(costs, parts))) <= 4 / 3 * least_possible(costs, parts)


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 16])
def test_differencing_is_the_one_of_the_books(parts: int) -> None:
    rng = np.random.default_rng(parts)
    for count in (1, 4, 17, 100):
        costs = rng.lognormal(0, 1, count)
        expected = plain_differencing(costs.tolist(), parts)
        assert np.allclose(sorted(sums(costs, karmarkar_karp(costs, parts))), expected)


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize(("count", "parts"), [(32, 8), (64, 8), (256, 16)])
def test_differencing_is_more_even_than_greedy(count: int, parts: int, equal_size: bool) -> None:
    rng = np.random.default_rng(0)
    batches = [attention_cost(rng.lognormal(6, 1, count).astype(int)) for _ in range(40)]
    dearest = {
        divide: np.mean([max(sums(costs, divide(costs, parts, equal_size))) for costs in batches])
        for divide in (karmarkar_karp, greedy)
    }
    assert dearest[karmarkar_karp] <= dearest[greedy]


@BOTH
def test_twos_and_threes_come_out_even(divide: Divide) -> None:
    assert sums([8, 7, 6, 5, 4], karmarkar_karp([8, 7, 6, 5, 4], 2)) in ([14, 16], [16, 14])
    assert sums([6, 6, 6, 6], divide([6, 6, 6, 6], 2)) == [12, 12]
    assert divide([], 3)[0].tolist() == []


def test_many_items_are_no_trouble() -> None:
    costs = attention_cost(np.random.default_rng(1).lognormal(6, 1, 100_000).astype(int))
    for equal_size in (False, True):
        parts = sums(costs, karmarkar_karp(costs, 64, equal_size))
        assert max(parts) - min(parts) < 1e-4 * np.mean(parts)


def test_attention_cost_counts_pairs_of_tokens() -> None:
    assert attention_cost([0, 1, 100], linear=2, quadratic=3).tolist() == [0, 5, 30200]
    assert attention_cost([24576]).tolist() == [2 * 24576]


@BOTH
@pytest.mark.parametrize(
    ("costs", "parts", "complaint"),
    [
        ([1, 2], 0, r"\bparts\b"),
        ([1, -2], 2, r"\b1\b.*-2\b"),
        ([float("nan")], 2, r"\bnan\b"),
        ([[1]], 2, r"\bint64\b"),
        (["1"], 2, "(?i)sample"),
    ],
)
def test_costs_that_mean_nothing_are_refused(divide: Divide, costs: Any, parts: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        divide(costs, parts)


def partitions(items: list[int]) -> Any:
    """All ways to put items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for at in range(len(rest)):
            yield [*rest[:at], [items[0], *rest[at]], *rest[at + 1 :]]


def tokens(lengths: Any, batch: Any, padded: bool) -> int:
    part = np.asarray(lengths)[batch]
    return int(part.max()) * len(part) if padded else int(part.sum())


@given(
    lengths=st.lists(st.integers(0, 100), min_size=1, max_size=60),
    padded=st.booleans(),
    at_least=st.integers(1, 5),
    multiple_of=st.integers(1, 5),
    slack=st.integers(0, 300),
)
def test_micro_batches_keep_the_limit_and_lose_nothing(
    lengths: list[int], padded: bool, at_least: int, multiple_of: int, slack: int
) -> None:
    limit = max(1, max(lengths) + slack)
    options: dict[str, Any] = {"padded": padded, "at_least": at_least, "multiple_of": multiple_of}
    fewest = max(at_least, len(micro_batches(lengths, limit, padded=padded)))
    if -(-fewest // multiple_of) * multiple_of > len(lengths):
        with pytest.raises(ConfigError, match="max_tokens"):
            micro_batches(lengths, limit, **options)
        return
    batches = micro_batches(lengths, limit, **options)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    assert all(len(batch) for batch in batches)
    counts = [tokens(lengths, batch, padded) for batch in batches]
    assert max(counts) <= limit
    assert counts == sorted(counts, reverse=True)
    assert len(batches) >= at_least
    assert len(batches) % multiple_of == 0


@given(lengths=st.lists(st.integers(1, 10), min_size=1, max_size=6), slack=st.integers(0, 20), padded=st.booleans())
def test_there_are_as_few_micro_batches_as_can_be(lengths: list[int], slack: int, padded: bool) -> None:
    limit = max(lengths) + slack
    fewest = min(
        len(way)
        for way in partitions(list(range(len(lengths))))
        if all(tokens(lengths, batch, padded) <= limit for batch in way)
    )
    count = len(micro_batches(lengths, limit, padded=padded))
    assert count == fewest if padded else fewest <= count <= fewest + 1


def test_the_token_limit_is_strict_where_halves_do_not_fit() -> None:
    """Eight sevens are 56 tokens, seven times eight; but no two of them fit into eight."""
    assert [batch.tolist() for batch in micro_batches([7] * 8, 8)] == [[number] for number in range(8)]


def test_ranks_get_equally_many_micro_batches_and_none_empty() -> None:
    """One long sample and many short ones, on four ranks: the rank with the long one must not run out."""
    lengths = [4000] + [10] * 40
    batches = micro_batches(lengths, 4096, multiple_of=4)
    taken = [batches[rank::4] for rank in range(4)]
    assert {len(part) for part in taken} == {1}
    assert all(len(batch) for part in taken for batch in part)


def test_what_cannot_be_cut_is_said() -> None:
    with pytest.raises(ConfigError, match="max_tokens=4096"):
        micro_batches([10, 5000], 4096)
    with pytest.raises(ConfigError, match=r"\b2\b.*\b4\b"):
        micro_batches([10, 10], 100, multiple_of=4)
    with pytest.raises(ConfigError, match="at_least"):
        micro_batches([10], 100, at_least=0)
    with pytest.raises(ConfigError, match="got 0 and 100"):
        micro_batches([10], 100, multiple_of=0)
    with pytest.raises(ConfigError, match="lengths"):
        micro_batches([1.5], 100)
    assert micro_batches([], 100) == []
