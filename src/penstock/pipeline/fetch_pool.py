"""Fetch pool: work by name that threads do ahead of those who need its results."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from penstock._forks import renewed
from penstock.pipeline.prefetch import Background

Result = TypeVar("Result")


class FetchPool(Generic[Result]):
    """Results by name: requested ahead, taken once, and made by one thread even if several want them.

    The threads wait for a network most of their time, so there may be many more of them than cores.
    """

    def __init__(self, threads: int) -> None:
        self._background = Background(threads)
        self._guard = renewed(threading.Lock())
        self._requested: dict[str, tuple[Future[Result], int]] = {}
        self._process = os.getpid()
        self.waiting_bytes = 0
        """Bytes of what was requested and not taken yet."""

    def request(self, name: str, nbytes: int, work: Callable[[], Result]) -> None:
        """Begin work, unless it was requested already."""
        with self._guard:
            self._renew()
            if name not in self._requested:
                self._requested[name] = self._background.submit(work), nbytes
                self.waiting_bytes += nbytes

    def take(self, name: str, work: Callable[[], Result]) -> Result:
        """The result, when it is there; without a request, made here. What failed ahead of time is tried again."""
        with self._guard:
            self._renew()
            future, nbytes = self._requested.pop(name, (None, 0))
            self.waiting_bytes -= nbytes
        if future is None or future.cancel():
            return work()
        try:
            return future.result()
        except OSError:
            return work()

    def forget(self) -> None:
        """Drop what was requested and not taken; what has not begun is not done."""
        with self._guard:
            self._renew()
            for future, _ in self._requested.values():
                future.cancel()
            self._requested, self.waiting_bytes = {}, 0

    def close(self) -> None:
        self.forget()
        self._background.close()

    def _renew(self) -> None:
        """In a forked process nothing was requested: the threads of its parent are not there."""
        if self._process != os.getpid():
            self._process, self._requested, self.waiting_bytes = os.getpid(), {}, 0
