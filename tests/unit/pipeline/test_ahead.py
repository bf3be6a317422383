"""map_ahead: in order, bounded, and gone when it is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from penstock.pipeline.ahead import map_ahead


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
