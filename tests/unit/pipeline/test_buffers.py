"""The four buffers: order, bounds, stealing, cancelling."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waits import wait_for

from penstock.memory import MemoryBudget
from penstock.pipeline.buffers import Buffers, Parcel


def parcel(budget: MemoryBudget, number: int, nbytes: int = 10) -> Parcel:
    return Parcel(number, None, None, None, budget.reserve(nbytes), time.monotonic())


def drain(buffers: Buffers, budget: MemoryBudget) -> list[int]:
    numbers = []
    while True:
        taken, _ = buffers.take_ready()
        if taken is None:
            return numbers
        for one in taken:
            numbers.append(one.number)
            one.reservation.release()


def nothing() -> Iterable[Parcel]:
    return ()


@given(order=st.permutations(range(12)))
@settings(max_examples=50, deadline=None)
def test_whatever_order_parcels_settle_in_they_come_out_numbered(order: list[int]) -> None:
    budget = MemoryBudget(10_000)
    buffers = Buffers(lambda: 10_000, 1, lambda p: [p])
    for number in range(12):
        buffers.put_read(parcel(budget, number))
    taken = [buffers.take_work(0)[0] for _ in range(12)]
    buffers.end(12, nothing)
    for number in order:
        made = taken[number]
        assert made is not None
        buffers.settle(made)
    assert drain(buffers, budget) == list(range(12))
    assert budget.used == 0


def test_an_idle_worker_steals_the_oldest_parcel_of_a_longer_lane() -> None:
    budget = MemoryBudget(10_000)
    buffers = Buffers(lambda: 10_000, 2, lambda p: [p])
    for number in range(8):
        buffers.put_read(parcel(budget, number))
    first, _ = buffers.take_work(0)  # fills lane 0 with more than it hands out
    assert first is not None
    assert first.number == 0
    seen = []
    for _ in range(7):
        got, _ = buffers.take_work(1)
        assert got is not None
        seen.append(got.number)
    assert sorted(seen) == list(range(1, 8))
    assert buffers.stolen > 0


def test_a_full_buffer_makes_the_source_wait_until_there_is_room() -> None:
    budget = MemoryBudget(10_000)
    buffers = Buffers(lambda: 400, 1, lambda p: [p])  # each buffer takes 100 bytes
    buffers.put_read(parcel(budget, 0, 60))
    waited: list[float] = []
    thread = threading.Thread(target=lambda: waited.append(buffers.put_read(parcel(budget, 1, 60))))
    thread.start()
    time.sleep(0.05)
    assert not waited
    buffers.take_work(0)
    thread.join(10)
    assert waited[0] > 0.02


def test_a_parcel_larger_than_a_buffer_passes_alone() -> None:
    budget = MemoryBudget(10_000)
    buffers = Buffers(lambda: 100, 1, lambda p: [p])
    buffers.put_read(parcel(budget, 0, 5_000))
    got, _ = buffers.take_work(0)
    assert got is not None
    buffers.settle(got)
    buffers.end(1, nothing)
    assert drain(buffers, budget) == [0]


def test_the_awaited_parcel_is_never_held_back_by_later_ones() -> None:
    budget = MemoryBudget(10_000)
    buffers = Buffers(lambda: 400, 2, lambda p: [p])
    for number in range(3):
        buffers.put_read(parcel(budget, number, 30))
    taken = [buffers.take_work(i % 2)[0] for i in range(3)]
    late = [p for p in taken if p is not None and p.number > 0]
    for one in late:
        one.reservation.resize(90)
    first = next(p for p in taken if p is not None and p.number == 0)
    first.reservation.resize(95)
    threads = [threading.Thread(target=buffers.settle, args=(one,)) for one in (*late, first)]
    for thread in threads:
        thread.start()
    buffers.end(3, nothing)
    assert drain(buffers, budget) == [0, 1, 2]
    for thread in threads:
        thread.join(10)


def test_cancelling_wakes_everybody_and_gives_the_memory_back() -> None:
    budget = MemoryBudget(10_000)
    buffers = Buffers(lambda: 40, 1, lambda p: [p])
    buffers.put_read(parcel(budget, 0, 10))
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(buffers.put_read(parcel(budget, 1, 10)))),
        threading.Thread(target=lambda: results.append(buffers.take_ready())),
    ]
    for thread in threads:
        thread.start()
    wait_for(lambda: buffers.waiting_consumer)
    buffers.cancel()
    for thread in threads:
        thread.join(10)
    assert len(results) == 2
    assert budget.used == 0


def test_stages_that_need_order_see_every_parcel_once_and_in_order() -> None:
    budget = MemoryBudget(1_000_000)
    seen: list[int] = []

    def in_order(one: Parcel) -> list[Parcel]:
        seen.append(one.number)
        return [one]

    buffers = Buffers(lambda: 1_000_000, 4, in_order)

    def work(index: int) -> None:
        while (got := buffers.take_work(index)[0]) is not None:
            buffers.settle(got)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for number in range(500):
        buffers.put_read(parcel(budget, number))
    buffers.end(500, nothing)
    assert drain(buffers, budget) == list(range(500))
    assert seen == list(range(500))
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("active", [1, 3])
def test_parked_workers_take_nothing(active: int) -> None:
    budget = MemoryBudget(1_000_000)
    buffers = Buffers(lambda: 1_000_000, 4, lambda p: [p])
    buffers.set_active(active)
    counts = [0] * 4

    def work(index: int) -> None:
        while (got := buffers.take_work(index)[0]) is not None:
            counts[index] += 1
            buffers.settle(got)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for number in range(200):
        buffers.put_read(parcel(budget, number))
    buffers.end(200, nothing)
    assert drain(buffers, budget) == list(range(200))
    for thread in threads:
        thread.join(10)
    assert sum(counts) == 200
    assert counts[active:] == [0] * (4 - active)
