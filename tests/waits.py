"""Waiting for a condition, with a limit that only a test that hangs reaches; and threads that fight for a lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LONGEST_SECONDS = 300.0


def wait_for(what: Callable[[], T], why: str = "it did not happen") -> T:
    """The first true value of `what()`."""
    deadline, pause = time.monotonic() + LONGEST_SECONDS, 0.001
    while not (found := what()):
        assert time.monotonic() < deadline, why
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return found


def fight_for(make_lock: Callable[[], Any], *, threads: int, turns: int) -> None:
    """Each of the threads takes the lock so many times; no two may hold it at once."""
    inside, most, done = [0], [0], []

    def fight() -> None:
        for _ in range(turns):
            with make_lock() as lock:
                assert lock.acquire(60)
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                done.append(1)
                inside[0] -= 1

    fighters = [threading.Thread(target=fight) for _ in range(threads)]
    for fighter in fighters:
        fighter.start()
    for fighter in fighters:
        fighter.join()
    assert (len(done), most) == (threads * turns, [1])
