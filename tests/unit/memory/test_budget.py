from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waits import wait_for

from penstock.errors import StalledError
from penstock.memory.budget import MemoryBudget, Reservation, format_bytes, parse_bytes

LONG = 300.0
"""Seconds after which a test gives up; none waits that long when all is well."""


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def queue_up(threads: ThreadPoolExecutor, budget: MemoryBudget, nbytes: int, owner: str = "") -> Future[Reservation]:
    """A reservation that has to wait, once it does."""
    before = len(budget._queue)
    future = threads.submit(budget.reserve, nbytes, owner, timeout_seconds=LONG)
    wait_for(lambda: len(budget._queue) == before + 1)
    return future


def test_bytes_are_charged_to_their_owner_until_released() -> None:
    budget = MemoryBudget(100)
    read = budget.reserve(30, "read")
    with budget.reserve(20, "read"), budget.reserve(10, "write"):
        assert budget.by_owner() == {"read": 50, "write": 10}
        assert (budget.used, budget.available) == (60, 40)
    assert budget.by_owner() == {"read": 30}
    read.release()
    assert budget.by_owner() == {}
    assert (budget.used, budget.peak, budget.limit, budget.capacity) == (0, 60, 100, 100)


def test_an_exception_in_the_block_releases_the_bytes() -> None:
    budget = MemoryBudget(100)
    with pytest.raises(KeyError), budget.reserve(30):
        raise KeyError("x")
    assert budget.used == 0


def test_releasing_twice_gives_back_once() -> None:
    budget = MemoryBudget(100)
    kept, given = budget.reserve(10, "a"), budget.reserve(10, "a")
    given.release()
    given.release()
    assert budget.used == 10
    kept.release()
    assert budget.used == 0


def test_a_released_reservation_can_no_longer_be_resized() -> None:
    budget = MemoryBudget(100)
    reservation = budget.reserve(10)
    reservation.release()
    reservation.resize(50)
    assert budget.used == 0


def test_reservations_of_nothing_are_released_like_any_other() -> None:
    budget = MemoryBudget(100)
    empty, also_empty, full = budget.reserve(0, "read"), budget.reserve(0, "read"), budget.reserve(5, "read")
    full.release()
    empty.release()
    also_empty.release()
    shrunk, other = budget.reserve(10, "read"), budget.reserve(10, "read")
    shrunk.resize(0)
    other.release()
    shrunk.resize(3)
    assert budget.by_owner() == {"read": 3}
    shrunk.release()
    assert (budget.by_owner(), budget.used) == ({}, 0)


def test_a_waiter_is_woken_by_a_release(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    first = budget.reserve(80)
    waiter = queue_up(threads, budget, 50)
    first.release()
    assert waiter.result(LONG).nbytes == 50
    assert budget.used == 50


def test_a_waiter_is_woken_when_a_reservation_gets_smaller(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    first = budget.reserve(80)
    waiter = queue_up(threads, budget, 50)
    first.resize(50)
    waiter.result(LONG)
    assert budget.used == 100


def test_a_waiter_is_woken_when_a_standing_charge_gets_smaller(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    budget.hold("sink", 80)
    budget.reserve(10)
    waiter = queue_up(threads, budget, 50)
    budget.hold("sink", 40)
    waiter.result(LONG)
    assert budget.used == 100


def test_waiters_are_served_in_the_order_they_came(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    first = budget.reserve(100)
    large = queue_up(threads, budget, 90, "large")
    small = queue_up(threads, budget, 10, "small")
    late = queue_up(threads, budget, 5, "late")
    assert budget.try_reserve(0) is None, "nobody overtakes the queue"
    first.resize(80)
    assert not small.done(), "the small one must not overtake the large one"
    first.release()
    large.result(LONG)
    small.result(LONG)
    assert not late.done()
    large.result().release()
    late.result(LONG)


def test_the_deadline_error_names_who_holds_the_bytes() -> None:
    budget = MemoryBudget("1 MiB")
    budget.reserve(512 << 10, "read")
    budget.hold("read", 128 << 10)
    budget.hold("sink", 256 << 10)
    with pytest.raises(StalledError) as caught:
        budget.reserve(512 << 10, "decode", timeout_seconds=0.01)
    assert re.search(r"0\.01 s.*512\.0", str(caught.value))
    assert isinstance(caught.value, TimeoutError)


def test_a_waiter_that_gave_up_does_not_block_the_next(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    first = budget.reserve(60)
    impatient = threads.submit(budget.reserve, 90, timeout_seconds=0.05)
    wait_for(lambda: len(budget._queue) == 1 or impatient.done())
    patient = threads.submit(budget.reserve, 40, timeout_seconds=LONG)
    with pytest.raises(StalledError):
        impatient.result(LONG)
    patient.result(LONG)
    first.release()


def test_one_oversized_item_is_admitted_alone(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    small = budget.reserve(10)
    oversized = queue_up(threads, budget, 1000)
    after = queue_up(threads, budget, 10)
    small.release()
    giant = oversized.result(LONG)
    assert budget.used == 1000
    assert not after.done()
    assert budget.try_reserve(1) is None
    giant.release()
    after.result(LONG)
    assert (budget.used, budget.peak) == (10, 1000)


def test_standing_charges_that_fill_the_budget_leave_one_item_at_a_time(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    budget.hold("sink", 150)
    first = budget.reserve(10, timeout_seconds=0)
    second = queue_up(threads, budget, 10)
    first.release()
    second.result(LONG).release()
    assert budget.by_owner() == {"sink": 150}


def test_a_standing_charge_is_set_not_added() -> None:
    budget = MemoryBudget(100)
    budget.hold("sink", 30)
    budget.hold("sink", 50)
    assert (budget.used, budget.peak) == (50, 50)
    budget.hold("sink", 0)
    assert (budget.used, budget.by_owner()) == (0, {})


def test_growing_a_reservation_never_waits() -> None:
    budget = MemoryBudget(100)
    budget.reserve(60, "a")
    grown = budget.reserve(40, "b")
    grown.resize(90)
    assert (budget.used, budget.available) == (150, 0)
    assert budget.by_owner() == {"a": 60, "b": 90}


def test_a_lower_limit_holds_back_newcomers_until_it_is_raised_again(threads: ThreadPoolExecutor) -> None:
    budget = MemoryBudget(100)
    budget.reserve(50)
    budget.shrink_to(40)
    assert (budget.limit, budget.capacity, budget.available, budget.used) == (40, 100, 0, 50)
    waiter = queue_up(threads, budget, 30)
    budget.shrink_to(1000)
    waiter.result(LONG)
    assert budget.limit == 100, "never above the capacity"
    budget.shrink_to(0)
    assert budget.limit == 1


@pytest.mark.parametrize(
    "attempt",
    [
        lambda budget: budget.reserve(-1),
        lambda budget: budget.try_reserve(-1),
        lambda budget: budget.hold("a", -1),
        lambda budget: budget.reserve(1).resize(-1),
    ],
)
def test_negative_sizes_are_refused(attempt: Callable[[MemoryBudget], object]) -> None:
    with pytest.raises(ValueError, match=r"-1\b"):
        attempt(MemoryBudget(100))


@pytest.mark.parametrize("limit", [0, -5, "0 MiB"])
def test_a_budget_of_nothing_is_refused(limit: int | str) -> None:
    with pytest.raises(ValueError, match="budget"):
        MemoryBudget(limit)


def test_a_budget_prints_what_is_used() -> None:
    budget = MemoryBudget.of("4 GiB")
    budget.hold("sink", 1 << 20)
    assert repr(budget) == "MemoryBudget(1.0 MiB of 4.0 GiB)"


class WatchedBudget(MemoryBudget):
    """Checks, at the moment of each admission, that it fits or is alone."""

    broken = 0

    def _admit(self, nbytes: int, owner: str, by: object) -> Reservation:
        reservation = super()._admit(nbytes, owner, by)
        self.broken += self._used > self._limit and self._held[by] > 1
        return reservation


@settings(max_examples=25, deadline=None)
@given(
    work=st.lists(st.lists(st.integers(0, 150), min_size=1, max_size=12), min_size=2, max_size=4),
    limits=st.lists(st.integers(1, 100), max_size=5),
)
def test_threads_never_exceed_the_limit_together_and_all_get_through(work: list[list[int]], limits: list[int]) -> None:
    budget = WatchedBudget(100)

    def worker(name: str, sizes: list[int]) -> None:
        for size in sizes:
            with budget.reserve(size, name, timeout_seconds=LONG) as reservation:
                reservation.resize(size // 2)

    def meddler() -> None:
        for limit in limits:
            budget.shrink_to(limit)
            budget.hold("sink", limit)

    with ThreadPoolExecutor(len(work) + 1) as threads:
        futures = [threads.submit(worker, f"w{i}", sizes) for i, sizes in enumerate(work)] + [threads.submit(meddler)]
        for future in futures:
            future.result(LONG)
    budget.hold("sink", 0)
    assert not budget.broken
    assert (budget.used, budget.by_owner()) == (0, {})


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["reserve", "release", "resize", "hold", "shrink"]), st.integers(0, 150), st.integers(0, 3)
        )
    )
)
def test_the_accounts_agree_with_a_plain_list_of_what_is_held(steps: list[tuple[str, int, int]]) -> None:
    budget = WatchedBudget(100)
    held: list[Reservation] = []
    standing: dict[str, int] = {}
    for action, nbytes, pick in steps:
        owner = "abcd"[pick]
        if action == "reserve":
            fits = not held or budget.used + nbytes <= budget.limit
            reservation = budget.try_reserve(nbytes, owner)
            assert (reservation is not None) == fits
            held += [reservation] if reservation else []
        elif action == "hold":
            budget.hold(owner, nbytes)
            standing[owner] = nbytes
        elif action == "shrink":
            budget.shrink_to(nbytes)
        elif held:
            chosen = held[pick % len(held)]
            if action == "resize":
                chosen.resize(nbytes)
            else:
                chosen.release()
                held.remove(chosen)
        expected = {o: standing.get(o, 0) + sum(r.nbytes for r in held if r.owner == o) for o in "abcd"}
        assert budget.by_owner() == {o: n for o, n in expected.items() if n}
        assert budget.used == sum(expected.values()) <= budget.peak
    assert not budget.broken


def test_many_threads_wait_and_wake_without_losing_one() -> None:
    budget = WatchedBudget(10)
    done = threading.Semaphore(0)

    def worker() -> None:
        for size in range(1, 30):
            budget.reserve(size % 7, timeout_seconds=LONG).release()
        done.release()

    workers = [threading.Thread(target=worker, daemon=True) for _ in range(16)]
    for thread in workers:
        thread.start()
    for _ in workers:
        assert done.acquire(timeout=LONG), f"a thread is stuck: {budget}"
    assert (budget.used, budget.broken) == (0, 0)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("64 KiB", 65536),
        ("1.5GB", 1_500_000_000),
        ("2 gib", 2 << 30),
        (" 3 MB ", 3_000_000),
        ("1k", 1000),
        ("0", 0),
        ("7 B", 7),
    ],
)
def test_sizes_are_read_with_their_unit(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 parsec", "1e9", "1,5 GB", True])
def test_what_is_not_a_size_says_how_to_write_one(text: int | str) -> None:
    with pytest.raises(ValueError, match="'256 MiB'"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (5 << 40, "5.0 TiB"), (-2048, "-2.0 KiB")],
)
def test_sizes_are_printed_for_people(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(0, 1 << 50))
def test_a_printed_size_reads_back_within_the_rounding(nbytes: int) -> None:
    # One decimal at 1.0 is the coarsest it gets.
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.06)


def test_a_stream_with_nothing_in_flight_is_admitted_beside_one_that_holds_everything() -> None:
    budget = MemoryBudget(100)
    with budget.reserve(100, "first", by="a"):
        with budget.reserve(60, "second", by="b", timeout_seconds=LONG):
            assert budget.used == 160
            with pytest.raises(StalledError):
                budget.reserve(1, "second", by="b", timeout_seconds=0.01)
        assert budget.used == 100


def test_what_is_set_aside_leaves_less_room_and_is_not_in_use() -> None:
    budget = MemoryBudget(100)
    budget.set_aside(60, by="one")
    budget.set_aside(30, by="other")  # they look at the same process: the larger counts
    with budget.charge(0):
        assert budget.try_reserve(41) is None
        with budget.reserve(40, timeout_seconds=LONG):
            assert budget.used == 40
    budget.set_aside(0, by="one")
    budget.set_aside(0, by="other")
    assert budget.peak == 40
    budget.restart_peak()
    assert budget.peak == 0
