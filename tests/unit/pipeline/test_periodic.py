from __future__ import annotations

import logging
import threading

import pytest

from penstock.pipeline.control import PeriodicThread


def test_the_work_is_done_again_and_again_until_it_is_stopped() -> None:
    third, calls = threading.Event(), []

    def work() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            third.set()

    ticker = PeriodicThread(0.001, work, name="tick")
    ticker.start()
    ticker.start()
    assert third.wait(20)
    ticker.stop()
    done = len(calls)
    assert set(calls) == {"tick"}
    assert not any(thread.name == "tick" for thread in threading.enumerate())
    ticker.stop()
    assert len(calls) == done


def test_it_can_be_started_again() -> None:
    again = threading.Event()
    ticker = PeriodicThread(0.001, again.set)
    for _ in range(2):
        again.clear()
        ticker.start()
        assert again.wait(20)
        ticker.stop()


def test_work_that_fails_is_logged_and_done_again(caplog: pytest.LogCaptureFixture) -> None:
    second, calls = threading.Event(), []

    def work() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("no luck")
        second.set()

    ticker = PeriodicThread(0.001, work, name="tick")
    with caplog.at_level(logging.ERROR):
        ticker.start()
        assert second.wait(20)
        ticker.stop()
    assert "tick: its work failed" in caplog.text
    assert "no luck" in caplog.text


def test_the_work_may_stop_it() -> None:
    stopped = threading.Event()

    def work() -> None:
        ticker.stop()
        stopped.set()

    ticker = PeriodicThread(0.001, work)
    ticker.start()
    assert stopped.wait(20)


def test_nothing_is_done_before_the_first_interval_is_over() -> None:
    calls: list[int] = []
    ticker = PeriodicThread(1000.0, lambda: calls.append(1))
    ticker.start()
    ticker.stop()
    assert calls == []
