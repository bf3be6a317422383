"""Waiting for a condition, with a limit that only a test that hangs reaches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

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
