"""Orders against a naive plan made with lists, and what each promises about its samples."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.length_tables import Lengths

from penstock.arrays.truncation import Truncation
from penstock.errors import ConfigError, DataError
from penstock.order.sample_orders import (
    BudgetOrder,
    ChopOrder,
    FittedOrder,
    Order,
    OrderPosition,
    PackedOrder,
    RowOrder,
)
from penstock.order.samples import Samples


def whole(order: Order, epoch: int = 0) -> Samples:
    return Samples.concat([order.plan_window(epoch, window) for window in range(order.windows)])


def tokens_of(samples: Samples) -> list[tuple[int, int]]:
    """(row, token) of all samples, in order."""
    return [(row, token) for sample in samples for row, start, n in sample for token in range(start, start + n)]


lengths_lists = st.lists(st.integers(0, 12), min_size=1, max_size=60).filter(any)
seeds = st.integers(0, 99)


def make(kind: str, table: Lengths, seed: int, shuffle: bool) -> Order:
    if kind == "rows":
        return RowOrder(table, Truncation(max_length=12), shuffle=shuffle, seed=seed)
    if kind == "fitted":
        return FittedOrder(table, Truncation("split", 12), shuffle=shuffle, seed=seed)
    if kind == "concat":
        return ChopOrder(table, 5, shuffle=shuffle, seed=seed)
    if kind == "budget":
        return BudgetOrder(table, Truncation(max_length=12), max_tokens=24, shuffle=shuffle, seed=seed, window_rows=16)
    return PackedOrder(table, Truncation(max_length=12), strategy=kind, shuffle=shuffle, seed=seed, window_rows=16)


KINDS = ["rows", "fitted", "concat", "best_fit", "first_fit", "budget"]


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=lengths_lists, seed=seeds, epoch=st.integers(0, 3), shuffle=st.booleans())
def test_every_token_is_in_an_epoch_exactly_once(
    kind: str, lengths: list[int], seed: int, epoch: int, shuffle: bool
) -> None:
    table = Lengths(lengths)
    order = make(kind, table, seed, shuffle)
    wanted = [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    assert sorted(tokens_of(whole(order, epoch))) == wanted


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=lengths_lists, seed=seeds, epoch=st.integers(0, 2))
def test_counts_places_and_finding_agree_with_the_samples(kind: str, lengths: list[int], seed: int, epoch: int) -> None:
    order = make(kind, Lengths(lengths), seed, True)
    samples = list(whole(order, epoch))
    assert order.count(epoch) == len(samples)
    for number, sample in enumerate(samples):
        place = order.position_of(epoch, number)
        assert order.number_of(place) == number
        assert list(order.window(place.epoch, place.window))[place.index] == sample
    assert order.position_of(epoch, len(samples)) == OrderPosition(epoch + 1)
    for row in range(len(lengths)):
        found = order.find(epoch, row)
        assert found == [i for i, sample in enumerate(samples) if any(part[0] == row for part in sample)]


@given(lengths=lengths_lists, seed=seeds)
def test_whole_rows_stay_whole_and_fit(lengths: list[int], seed: int) -> None:
    for strategy in ("best_fit", "first_fit"):
        samples = whole(make(strategy, Lengths(lengths), seed, True))
        assert max(samples.sizes()) <= 12
        assert all(start == 0 and length == lengths[row] for sample in samples for row, start, length in sample)


@given(lengths=lengths_lists, seed=seeds)
def test_chunks_are_cut_from_the_text_every_so_many_tokens(lengths: list[int], seed: int) -> None:
    text = [(row, token) for row, length in enumerate(lengths) for token in range(length)]
    chunks = [text[low : low + 5] for low in range(0, len(text), 5)]
    straight = whole(make("concat", Lengths(lengths), seed, False))
    assert [tokens_of(straight.slice(i, i + 1)) for i in range(len(straight))] == chunks
    shuffled = whole(make("concat", Lengths(lengths), seed, True))
    assert sorted(tokens_of(shuffled.slice(i, i + 1)) for i in range(len(shuffled))) == chunks


@example(lengths=[0] * 10 + [9], seed=0)
@given(lengths=lengths_lists, seed=seeds)
def test_batches_by_tokens_hold_no_more_than_that_with_padding(lengths: list[int], seed: int) -> None:
    order = BudgetOrder(Lengths(lengths), Truncation(max_length=12), max_tokens=32, multiple=4, shuffle=True, seed=seed)
    for batch in whole(order):
        longest = max(1, *(length for _, _, length in batch))
        assert len(batch) * (-(-longest // 4) * 4) <= 32


def test_a_row_that_is_too_long_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(DataError, match=r"row 1\b.*truncation='right'"):
        make("best_fit", Lengths([3, 13]), 0, False).plan_window(0, 0)


def test_the_same_epoch_is_the_same_and_another_is_another() -> None:
    table = Lengths([1 + i % 7 for i in range(200)])
    for kind in KINDS:
        first = make(kind, table, 3, True)
        assert list(whole(first, 0)) == list(whole(make(kind, table, 3, True), 0))
        assert list(whole(first, 0)) != list(whole(first, 1))
        assert list(whole(first, 0)) != list(whole(make(kind, table, 4, True), 0))


def test_without_shuffling_rows_come_in_their_order_in_every_epoch() -> None:
    order = make("rows", Lengths([2] * 30), 3, False)
    assert [part[0] for sample in whole(order, 2) for part in sample] == list(range(30))
    packed = whole(make("best_fit", Lengths([5] * 30), 3, False))
    assert [part[0] for sample in packed for part in sample] == list(range(30))


def test_what_lies_together_changes_from_epoch_to_epoch() -> None:
    order = make("best_fit", Lengths([1 + i % 6 for i in range(64)]), 0, True)
    together = [{frozenset(row for row, _, _ in sample) for sample in whole(order, epoch)} for epoch in (0, 1)]
    assert len(together[0] & together[1]) < len(together[0]) / 2


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="packing"):
        PackedOrder(Lengths([1]), Truncation(max_length=None), shuffle=True, seed=0)
