"""Work done ahead: in order, bounded, and gone when it is closed."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

import pytest
from tests.waits import wait_for

from penstock.memory import MemoryBudget
from penstock.pipeline.prefetch import ReadAhead, map_ahead


def test_results_come_in_order() -> None:
    assert list(map_ahead(lambda x: x * x, range(200))) == [x * x for x in range(200)]


def test_no_more_is_taken_than_a_few_items_ahead() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(1000):
            taken.append(item)
            yield item

    results = map_ahead(lambda x: x, items())
    for _ in range(10):
        next(results)
    assert len(taken) <= 10 + 5
    results.close()
    assert len(taken) <= 10 + 5


def test_an_error_comes_in_its_place() -> None:
    results = map_ahead(lambda x: 1 // (3 - x), range(10))
    assert [next(results) for _ in range(3)] == [0, 0, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_closing_ends_the_threads() -> None:
    with contextlib.closing(map_ahead(lambda x: x, range(100))) as results:
        next(results)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-ahead")]


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "penstock-ahead"]


def test_an_iterator_read_ahead_gives_its_items_in_order() -> None:
    ahead = ReadAhead(iter(range(100)), 3)
    assert list(ahead) == list(range(100))
    assert list(ahead) == []
    ahead.close()


def test_a_thread_whose_start_is_interrupted_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ReadAhead(iter(range(100)), 3)
    gc.collect()
    wait_for(lambda: not threads())


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_thread_that_finishes_hands_the_rest_of_the_iterator_back(taken: int) -> None:
    items = iter(range(20))
    ahead = ReadAhead(items, 3)
    found = [next(ahead) for _ in range(taken)]
    ahead.finish()
    found += ahead
    assert ahead.handed_back
    assert taken < len(found) < 20
    assert found + list(items) == list(range(20))
    assert not threads()


def test_an_iterator_that_ends_is_not_handed_back() -> None:
    ahead = ReadAhead(iter(range(3)), 5)
    assert list(ahead) == [0, 1, 2]
    ahead.finish()
    assert not ahead.handed_back


def test_an_exception_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield 1
        raise OSError("gone")

    ahead = ReadAhead(items(), 3)
    assert next(ahead) == 1
    with pytest.raises(OSError, match="gone"):
        next(ahead)
    assert list(ahead) == []


def test_no_more_is_read_ahead_than_asked_for_and_closing_ends_the_thread() -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    ahead = ReadAhead(items(), 2)
    assert next(ahead) == 0
    ahead.close()
    assert len(taken) <= 4
    assert list(ahead) == []
    ahead.close()


def test_one_that_is_forgotten_ends_its_thread_without_anybody_waiting() -> None:
    before = set(threads())
    ahead = ReadAhead(iter(range(1000)), 2)
    (thread,) = set(threads()) - before
    del ahead
    gc.collect()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_what_waits_is_charged_and_given_back() -> None:
    budget = MemoryBudget("1 MiB")
    ahead = ReadAhead(iter([b"x" * 1000] * 10), 2, budget=budget, size=len)
    assert next(ahead) == b"x" * 1000
    ahead.close()
    assert budget.used == 0


def test_waiting_for_the_next_item_has_an_end() -> None:
    go = threading.Event()

    def items() -> Iterator[int]:
        yield 1
        go.wait()
        yield 2

    ahead = ReadAhead(items(), 1)
    assert ahead.wait(60)
    assert next(ahead) == 1
    assert not ahead.wait(0.01)
    go.set()
    assert ahead.wait(60)
    assert list(ahead) == [2]
    assert ahead.wait(60), "the end needs no waiting either"


def test_one_item_is_always_on_its_way_even_without_room() -> None:
    budget = MemoryBudget(100)
    with budget.reserve(100, "others"):
        ahead = ReadAhead(iter(range(5)), 3, budget=budget, size=lambda _: 60, always_one=True)
        assert list(ahead) == list(range(5))
    ahead.close()
    assert budget.used == 0
