"""Samples against the same thing done with lists."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.order.samples import Samples

parts = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(0, 9)), max_size=4)
lists = st.lists(parts, max_size=8)


def build(given_lists: list[list[tuple[int, int, int]]]) -> Samples:
    flat = [part for sample in given_lists for part in sample]
    columns = [np.array([part[i] for part in flat], np.int64) for i in range(3)]
    offsets = np.cumsum([0, *(len(sample) for sample in given_lists)])
    return Samples(offsets.astype(np.int64), *columns)


@given(lists, st.integers(1, 4), st.booleans())
def test_samples_are_cut_into_runs_of_one_size(
    given_lists: list[list[tuple[int, int, int]]], size: int, single: bool
) -> None:
    given_lists = [sample[:1] for sample in given_lists if sample] if single else given_lists
    samples, count = build(given_lists), len(given_lists) // size
    samples.single = single
    cut = samples.cut(size, count)
    assert [list(run) for run in cut] == [given_lists[low * size : (low + 1) * size] for low in range(count)]
    assert all(len(run) == size and run.single == single for run in cut)
    whole = samples.slice(min(1, len(samples)), len(samples))  # offsets that do not begin at 0
    for number, run in enumerate(whole.cut(size, len(whole) // size)):
        one = whole.slice(number * size, (number + 1) * size)
        assert [list(run), run.numbers().tolist()] == [list(one), one.numbers().tolist()]


@given(lists)
def test_samples_say_what_they_are_made_of(given_lists: list[list[tuple[int, int, int]]]) -> None:
    samples = build(given_lists)
    assert list(samples) == given_lists
    assert len(samples) == len(given_lists)
    assert samples.sizes().tolist() == [sum(part[2] for part in sample) for sample in given_lists]
    assert samples.numbers().tolist() == [i for i, sample in enumerate(given_lists) for _ in sample]


@given(lists, st.data())
def test_slices_takes_and_filters_are_those_of_lists(
    given_lists: list[list[tuple[int, int, int]]], data: st.DataObject
) -> None:
    samples = build(given_lists)
    low = data.draw(st.integers(0, len(given_lists)))
    high = data.draw(st.integers(low, len(given_lists)))
    assert list(samples.slice(low, high)) == given_lists[low:high]
    if given_lists:
        numbers = data.draw(st.lists(st.integers(0, len(given_lists) - 1)))
        assert list(samples.take(numbers)) == [given_lists[number] for number in numbers]
    keep = [part[0] % 2 == 0 for sample in given_lists for part in sample]
    wanted = [[part for part in sample if part[0] % 2 == 0] for sample in given_lists]
    assert list(samples.where(np.array(keep, np.bool_))) == wanted


@given(st.lists(lists, max_size=3))
def test_samples_of_several_are_one_behind_the_other(several: list[list[list[tuple[int, int, int]]]]) -> None:
    assert list(Samples.concat([build(each) for each in several])) == [sample for each in several for sample in each]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_samples_of_one_part_take_the_short_way_to_the_same(lengths: list[int], data: st.DataObject) -> None:
    rows = np.arange(len(lengths), dtype=np.int64)
    offsets = np.arange(len(lengths) + 1, dtype=np.int64)
    quick = Samples(offsets, rows, rows * 0, np.array(lengths, np.int64), single=True)
    slow = Samples(offsets, rows, rows * 0, np.array(lengths, np.int64))
    numbers = data.draw(st.lists(st.integers(0, len(lengths) - 1)))
    low = data.draw(st.integers(0, len(lengths)))
    for one, other in (
        (quick, slow),
        (quick.take(numbers), slow.take(numbers)),
        (quick.slice(low, len(lengths)), slow.slice(low, len(lengths))),
    ):
        assert list(one) == list(other)
        assert one.sizes().tolist() == other.sizes().tolist()
        assert one.numbers().tolist() == other.numbers().tolist()
