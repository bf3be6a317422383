from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.memory.budget import MemoryBudget
from penstock.memory.pool import BufferPool, PooledBuffer, size_class

MIB = 1 << 20
LONG = 300.0


def address(buffer: PooledBuffer) -> int:
    return int(buffer.arrow().address)


def torch() -> Any:
    return pytest.importorskip("torch")


def int64s(buffer: PooledBuffer) -> pa.Array:
    return pa.Array.from_buffers(pa.int64(), buffer.nbytes // 8, [None, buffer.arrow()])


VIEWS: dict[str, Callable[[PooledBuffer], Any]] = {
    "array": lambda b: b.array(),
    "typed array": lambda b: b.array(np.float32, (2, 512)),
    "slice of a slice": lambda b: b.array()[16:][:64],
    "reshaped view": lambda b: b.array(np.int32).reshape(2, -1).T[3:].view(np.uint32),
    "array subclass": lambda b: b.array().view(np.recarray)[8:],
    "array from an array's memory": lambda b: np.frombuffer(b.array()[8:16], np.int64),
    "memoryview": lambda b: b.array().data[100:200],
    "flat iterator": lambda b: b.array().flat,
    "arrow buffer": lambda b: b.arrow(),
    "slice of an arrow buffer": lambda b: b.arrow().slice(64, 64),
    "arrow array": int64s,
    "slice of an arrow array": lambda b: int64s(b).slice(10, 3),
    "record batch": lambda b: pa.record_batch({"x": int64s(b)}).slice(5, 5),
    "nested arrow array": lambda b: pa.FixedSizeListArray.from_arrays(int64s(b), 4).slice(1, 1),
    "array from an arrow array": lambda b: int64s(b).to_numpy()[3:],
    "tensor from an array": lambda b: torch().from_numpy(b.array(np.float32)),
    "view of a tensor": lambda b: torch().from_numpy(b.array()).view(torch().int64)[4:8].view(2, 2)[1],
    "tensor from a buffer": lambda b: torch().frombuffer(b.array(), dtype=torch().int16)[7:],
    "tensor through dlpack": lambda b: torch().from_dlpack(b.array()),
    "array from a tensor": lambda b: torch().from_numpy(b.array())[3:].numpy(),
}


@pytest.mark.parametrize("make_view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("explicitly", [True, False], ids=["released", "dropped"])
def test_memory_comes_back_only_when_the_last_view_is_gone(
    make_view: Callable[[PooledBuffer], Any], explicitly: bool
) -> None:
    pool = BufferPool()
    buffer = pool.acquire(4096)
    start = address(buffer)
    view = make_view(buffer)
    if explicitly:
        buffer.release()
    del buffer
    assert (pool.stats().returned, pool.stats().in_use_bytes) == (0, 4096)
    other = pool.acquire(4096)
    assert address(other) != start, "memory was handed out twice"
    del view
    assert (pool.stats().returned, pool.stats().free_bytes) == (1, 4096)
    assert address(pool.acquire(4096)) == start
    other.release()


def test_views_see_the_same_memory() -> None:
    with BufferPool().acquire(80) as buffer:
        numbers = buffer.array(np.int64)
        numbers[:] = range(10)
        assert int64s(buffer).to_pylist() == list(range(10))
        numbers[3] = 99
        assert buffer.array(np.int64, (2, 5))[0, 3] == int64s(buffer)[3].as_py() == 99
        assert buffer.arrow().is_mutable


def test_a_tensor_writes_to_the_same_memory() -> None:
    with BufferPool().acquire(80) as buffer:
        torch().from_numpy(buffer.array(np.int64))[3] = 99
        assert int64s(buffer)[3].as_py() == 99


def test_counters_prove_reuse() -> None:
    pool = BufferPool()
    for _ in range(10):
        with pool.acquire(MIB):
            pass
    stats = pool.stats()
    assert (stats.acquired, stats.reused, stats.allocated, stats.returned, stats.dropped) == (10, 9, 1, 10, 0)
    assert (stats.free_bytes, stats.in_use_bytes) == (MIB, 0)


def test_sizes_of_one_class_share_their_buffers() -> None:
    pool = BufferPool()
    pool.acquire(1000 << 10).release()
    with pool.acquire(MIB) as buffer:
        assert pool.stats().reused == 1
        assert (buffer.nbytes, buffer.capacity) == (MIB, MIB)
    pool.acquire(MIB + 1).release()
    assert pool.stats().reused == 1


@given(st.integers(0, 1 << 40))
def test_size_classes_fit_and_waste_less_than_a_quarter(nbytes: int) -> None:
    capacity = size_class(nbytes)
    assert capacity >= max(nbytes, 4096)
    assert capacity % 64 == 0
    assert size_class(capacity) == capacity
    if nbytes > 4096:
        assert capacity - nbytes < 0.25 * nbytes


@given(st.integers(4096, 1 << 30))
def test_there_are_four_size_classes_to_a_doubling(nbytes: int) -> None:
    start = size_class(nbytes)
    sizes, capacity = set(), start
    while capacity < 2 * start:
        capacity = size_class(capacity + 1)
        sizes.add(capacity)
    assert len(sizes) == 4


@pytest.mark.parametrize("alignment", [1, 64, 128, 4096])
@pytest.mark.parametrize("nbytes", [0, 1, 4097, 100_000, MIB + 1])
def test_buffers_are_aligned_and_whole(alignment: int, nbytes: int) -> None:
    pool = BufferPool(alignment=alignment)
    buffers = [pool.acquire(nbytes) for _ in range(3)]
    for number, buffer in enumerate(buffers):
        assert address(buffer) % max(64, alignment) == 0
        buffer.array(shape=buffer.capacity)[:] = number
    for number, buffer in enumerate(buffers):
        assert (buffer.array(shape=buffer.capacity) == number).all()
        assert buffer.array().nbytes == buffer.arrow().size == nbytes


def test_free_memory_stays_within_its_bound() -> None:
    pool = BufferPool("4 MiB")
    buffers = [pool.acquire(MIB) for _ in range(10)]
    while buffers:
        buffers.pop().release()
        # Not through stats(): what was returned must be within the bound without anybody asking.
        assert pool._free_bytes <= 4 * MIB
        assert not pool._returned
    stats = pool.stats()
    assert (stats.free_bytes, stats.returned, stats.dropped) == (4 * MIB, 10, 6)


def test_a_buffer_larger_than_the_bound_is_not_kept_and_displaces_nothing() -> None:
    pool = BufferPool("4 MiB")
    pool.acquire(MIB).release()
    pool.acquire(5 * MIB).release()
    assert (pool.stats().free_bytes, pool.stats().dropped) == (MIB, 1)


def test_sizes_no_longer_asked_for_make_room_for_the_current_ones() -> None:
    pool = BufferPool("4 MiB")
    old = [pool.acquire(MIB) for _ in range(4)]
    for buffer in old:
        buffer.release()
    for _ in range(5):
        pool.acquire(2 * MIB).release()
    stats = pool.stats()
    assert (stats.allocated, stats.reused, stats.dropped) == (5, 4, 2)
    assert stats.free_bytes == 4 * MIB


def test_a_pool_without_room_still_hands_out_buffers() -> None:
    pool = BufferPool(0)
    for _ in range(3):
        pool.acquire(10).release()
    assert (pool.stats().allocated, pool.stats().dropped, pool.stats().free_bytes) == (3, 3, 0)


def test_free_memory_is_a_standing_charge_on_the_budget() -> None:
    budget = MemoryBudget("64 MiB")
    pool = BufferPool("4 MiB", budget=budget, owner="blocks")
    first, second = pool.acquire(MIB), pool.acquire(MIB)
    assert budget.by_owner() == {}, "what is in use is for its user to reserve"
    first.release()
    assert budget.by_owner() == {"blocks": MIB}
    del second
    assert pool.stats().free_bytes == budget.used == 2 * MIB
    pool.acquire(MIB).release()
    assert budget.used == 2 * MIB
    pool.trim(MIB)
    assert budget.used == MIB
    pool.close()
    assert budget.by_owner() == {}


def test_trim_gives_the_memory_back_to_arrow_and_says_how_much() -> None:
    before = pa.total_allocated_bytes()
    pool = BufferPool()
    buffers = [pool.acquire(MIB) for _ in range(8)]
    used = pool.acquire(MIB)
    buffers.clear()
    assert pa.total_allocated_bytes() - before == 9 * MIB
    assert pool.trim(3 * MIB) == 5 * MIB
    assert pool.trim() == 3 * MIB
    assert pool.trim() == 0
    assert pa.total_allocated_bytes() - before == MIB
    assert (pool.stats().dropped, pool.stats().in_use_bytes) == (8, MIB)
    used.release()


def test_buffers_outlive_a_closed_pool_and_are_then_freed() -> None:
    before = pa.total_allocated_bytes()
    with BufferPool() as pool:
        view = pool.acquire(MIB).array()
        pool.acquire(2 * MIB).release()
    pool.close()
    view[:] = 7
    assert pool.stats().in_use_bytes == MIB
    with pytest.raises(ValueError, match=r"(?i)pool"):
        pool.acquire(1)
    del view
    stats = pool.stats()
    assert (stats.free_bytes, stats.in_use_bytes, stats.dropped) == (0, 0, 2)
    assert pa.total_allocated_bytes() == before


def test_a_released_buffer_makes_no_new_views() -> None:
    pool = BufferPool()
    buffer = pool.acquire(100)
    kept = buffer.array()
    buffer.release()
    buffer.release()
    with pytest.raises(ValueError, match=r"(?i)buffer"):
        buffer.array()
    with pytest.raises(ValueError, match=r"(?i)buffer"):
        buffer.arrow()
    kept[:] = 1
    assert (buffer.nbytes, buffer.capacity) == (100, 4096)
    assert pool.stats().in_use_bytes == 4096


def test_views_that_do_not_fit_are_refused() -> None:
    buffer = BufferPool().acquire(10)
    with pytest.raises(ValueError, match=r"\bfloat32\b.*shape="):
        buffer.array(np.float32)
    with pytest.raises(ValueError, match=r"\b8192\b.*\b4096\b"):
        buffer.array(np.float64, (2, 512))
    for length in (-1, 4097):
        with pytest.raises(ValueError, match=r"\b0\b.*\b4096\b"):
            buffer.arrow(length)
    assert buffer.array(np.float64, 512).shape == (512,)
    assert buffer.arrow(4096).size == 4096


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BufferPool(-1), "max_bytes"),
        (lambda: BufferPool(alignment=48), "alignment"),
        (lambda: BufferPool(alignment=0), "alignment"),
        (lambda: BufferPool().acquire(-1), r"-1\b"),
    ],
)
def test_wrong_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pool_prints_what_it_holds() -> None:
    pool = BufferPool("2 MiB")
    buffer = pool.acquire(5000)
    assert repr(buffer) == "PooledBuffer(4.9 KiB of 5.0 KiB)"
    assert repr(pool) == "BufferPool(0 B free of 2.0 MiB, 5.0 KiB in use)"


class Cycle:
    """Holds a view in a reference cycle, so that only the collector can end it."""

    def __init__(self, view: object) -> None:
        self.view, self.me = view, self


class CollectingBudget(MemoryBudget):
    """Collects garbage whenever the pool settles its charge, that is: inside the pool's lock."""

    def hold(self, owner: str, nbytes: int) -> None:
        gc.collect()
        super().hold(owner, nbytes)


def test_a_collection_inside_the_locked_region_neither_deadlocks_nor_loses_the_buffer() -> None:
    pool = BufferPool(budget=CollectingBudget())
    gc.disable()
    try:
        first = pool.acquire(4096)
        Cycle(pool.acquire(4096).array())
        Cycle(pool.acquire(4096))
        work = threading.Thread(target=first.release, daemon=True)
        work.start()
        work.join(LONG)
        assert not work.is_alive(), "deadlock: the finalizer waits for a lock its own thread holds"
        assert not pool._returned, "the buffer was left behind"
        assert pool._free_bytes == 3 * 4096
    finally:
        gc.enable()
    assert (pool.stats().returned, pool.stats().in_use_bytes) == (3, 0)


def test_a_generator_collected_inside_the_locked_region_can_release_its_buffer() -> None:
    def reader(pool: BufferPool, cycle: list[Any]) -> Iterator[None]:
        cycle.append(cycle)
        with pool.acquire(4096):
            yield

    pool = BufferPool(budget=CollectingBudget())
    gc.disable()
    try:
        first = pool.acquire(4096)
        cycle: list[Any] = []
        cycle.append(reader(pool, cycle))
        next(cycle[0])
        del cycle
        work = threading.Thread(target=first.release, daemon=True)
        work.start()
        work.join(LONG)
        assert not work.is_alive(), "deadlock: release waits for a lock its own thread holds"
    finally:
        gc.enable()
    assert (pool.stats().returned, pool.stats().in_use_bytes) == (2, 0)


def test_memory_is_not_handed_out_while_a_dying_cycle_can_still_write_to_it() -> None:
    seen: list[bool] = []

    def reader(pool: BufferPool, cycle: list[Any]) -> Iterator[None]:
        cycle.append(cycle)
        view = pool.acquire(4096).array()
        try:
            yield
        finally:
            seen.append(np.shares_memory(view, pool.acquire(4096).array()))
            view[:] = 1

    pool = BufferPool()
    cycle: list[Any] = []
    cycle.append(reader(pool, cycle))
    next(cycle[0])
    del cycle
    gc.collect()
    assert seen == [False]
    assert pool.stats().returned == 2


def test_a_view_that_dies_on_an_arrow_thread_comes_back() -> None:
    pool = BufferPool()
    with pool.acquire(800_000) as buffer:
        buffer.array(np.int64)[:] = 1
        table = pa.table({"x": int64s(buffer), "key": pa.array(np.arange(100_000) % 7)})
    assert table.group_by("key").aggregate([("x", "sum")]).column("x_sum").to_pylist() == [14286] * 5 + [14285] * 2
    del table
    deadline = time.monotonic() + 10  # Arrow's threads let go of it a moment later
    while pool.stats().returned < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert pool.stats().returned == 1


def test_a_reader_and_its_workers_share_a_few_buffers() -> None:
    """As in the engine: blocks are acquired on one thread and die on others, each still holding its own bytes."""
    budget = MemoryBudget("64 MiB")
    pool = BufferPool("1 MiB", budget=budget)
    blocks: queue.Queue[tuple[int, pa.Buffer] | None] = queue.Queue(maxsize=8)
    wrong: list[int] = []

    def worker() -> None:
        while (item := blocks.get(timeout=LONG)) is not None:
            number, block = item
            if not (np.frombuffer(block, np.uint8) == number % 251).all():
                wrong.append(number)
            del item, block

    with ThreadPoolExecutor(3) as threads:
        workers = [threads.submit(worker) for _ in range(3)]
        for number in range(3000):
            with pool.acquire(4096 + number % 3 * 4096) as buffer:
                buffer.array()[:] = number % 251
                blocks.put((number, buffer.arrow()), timeout=LONG)
            del buffer
        for _ in workers:
            blocks.put(None)
        for future in workers:
            future.result(LONG)
    stats = pool.stats()
    assert not wrong
    assert (stats.acquired, stats.returned, stats.in_use_bytes) == (3000, 3000, 0)
    assert stats.allocated < 60
    assert budget.by_owner() == {"pool": stats.free_bytes}


def test_concurrent_acquires_never_share_memory() -> None:
    pool = BufferPool("256 KiB")
    wrong: list[int] = []

    def churn(mark: int) -> None:
        for turn in range(300):
            view = pool.acquire(4096 << turn % 3).array()
            view[:] = mark
            if not (view == mark).all():
                wrong.append(mark)

    with ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(churn, mark) for mark in range(6)]:
            future.result(LONG)
    stats = pool.stats()
    assert not wrong
    assert (stats.acquired, stats.returned, stats.in_use_bytes) == (1800, 1800, 0)
    assert stats.free_bytes <= 256 << 10
