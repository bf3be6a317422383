"""Rows of about one length together: every row once, whole batches, no more padding than without."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.length_tables import Lengths

from penstock.arrays.truncation import Truncation
from penstock.errors import ConfigError, DataError
from penstock.order.plan import Plan, PlanSource
from penstock.order.sample_orders import BucketOrder
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]


class Padded(Lengths):
    """A table that is never empty, even if all its rows are."""

    @property
    def tokens(self) -> int:
        return max(super().tokens, 1)


def order_of(lengths: list[int], size: int, **more: Any) -> BucketOrder:
    options: dict[str, Any] = {"shuffle": True, "seed": 0, "window_batches": 4, **more}
    return BucketOrder(Padded(lengths), options.pop("fit", Truncation(max_length=None)), size=size, **options)


def whole(order: BucketOrder, epoch: int) -> Samples:
    return Samples.concat([order.plan_window(epoch, window) for window in range(order.windows)])


rows_of_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=120)


@given(rows_of_lengths, st.integers(1, 9), st.integers(0, 99), st.booleans(), st.integers(0, 3))
def test_an_epoch_has_every_row_once(lengths: list[int], size: int, seed: int, shuffle: bool, epoch: int) -> None:
    order = order_of(lengths, size, seed=seed, shuffle=shuffle)
    found = whole(order, epoch)
    assert sorted(found.rows.tolist()) == list(range(len(lengths)))
    assert found.lengths.tolist() == [lengths[row] for row in found.rows]
    sizes = [order.size_of(epoch, window) for window in range(order.windows)]
    assert len(found) == order.count(epoch) == sum(sizes)
    assert sizes == [len(order.plan_window(epoch, window)) for window in range(order.windows)]


@given(rows_of_lengths, st.integers(1, 9), st.integers(0, 99))
def test_batches_of_a_window_do_not_overlap_in_length(lengths: list[int], size: int, seed: int) -> None:
    order = order_of(lengths, size, seed=seed)
    for window in range(order.windows):
        found = order.plan_window(0, window).lengths
        batches = [found[low : low + size] for low in range(0, len(found) // size * size, size)]
        batches.sort(key=lambda batch: (int(batch.min()), int(batch.max())))
        for earlier, later in itertools.pairwise(batches):
            assert earlier.max() <= later.min()


@given(rows_of_lengths, st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_steps_of_a_plan_are_the_batches_and_are_found_again(
    lengths: list[int], size: int, seed: int, drop_last: bool
) -> None:
    if drop_last and len(lengths) < size:
        return
    order = order_of(lengths, size, seed=seed)
    plan = Plan((PlanSource("rows", order),), size, drop_last=drop_last)
    steps = [plan.step(number) for number in range(plan.steps_in(0) + plan.steps_in(1))]
    epochs = [[row for step in steps if step.epoch == epoch for row in step.samples.rows.tolist()] for epoch in (0, 1)]
    for epoch, rows in enumerate(epochs):
        due = whole(order, epoch).rows.tolist()
        assert rows == (due[: len(due) // size * size] if drop_last else due)
    for row in range(0, len(lengths), 7):
        for use in plan.trace(row, epochs=2):
            assert steps[use.step].samples.rows[use.sample] == row


def test_less_is_padded_than_in_a_plain_shuffle() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 3000).tolist()
    order = order_of(lengths, 32, window_batches=32)
    found = whole(order, 0).lengths
    padded = sum(int(found[low : low + 32].max()) * len(found[low : low + 32]) for low in range(0, len(found), 32))
    shuffled = np.random.default_rng(1).permutation(np.array(lengths))
    plain = sum(int(shuffled[low : low + 32].max()) * len(shuffled[low : low + 32]) for low in range(0, 3000, 32))
    assert padded < 1.1 * sum(lengths) < 1.5 * sum(lengths) < plain


def test_epochs_have_other_batches_and_none_are_in_the_order_of_their_lengths() -> None:
    lengths = np.random.default_rng(0).integers(5, 200, 400).tolist()
    order = order_of(lengths, 8, window_batches=64)
    first, second = whole(order, 0), whole(order, 1)
    assert first.rows.tolist() != second.rows.tolist()
    longest = [int(first.lengths[low : low + 8].max()) for low in range(0, 400, 8)]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_without_shuffling_short_rows_of_a_window_come_first() -> None:
    order = order_of([5, 1, 4, 2, 3, 9, 7], 2, shuffle=False)
    assert whole(order, 0).lengths.tolist() == [1, 2, 4, 3, 5, 9, 7]


def test_rows_that_are_too_long_are_cut_or_an_error() -> None:
    order = order_of([3, 9, 4], 2, fit=Truncation("right", 5))
    assert sorted(whole(order, 0).lengths.tolist()) == [3, 4, 5]
    with pytest.raises(DataError, match=r"row 1\b"):
        whole(order_of([3, 9, 4], 2, fit=Truncation(max_length=5)), 0)


def test_what_cannot_be_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError):
        order_of([1], 0)
    with pytest.raises(ConfigError, match="truncation='drop'"):
        order_of([1], 2, fit=Truncation("drop", 5))


def test_another_size_is_another_order_by_its_description() -> None:
    assert order_of([1] * 9, 2).describe() != order_of([1] * 9, 3).describe()
