"""A few threads for work that somebody will ask for soon."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.pipeline.config import available_cores

__all__ = ["Background"]

Result = TypeVar("Result")
_MOST_THREADS = 8


class Background:
    """Threads that start with the first piece of work, and end with `close`; more work starts them again."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = min(available_cores(), _MOST_THREADS) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do it as soon as a thread is free, in the order of the calls."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="penstock-background")
        return self._pool.submit(work)

    def close(self) -> None:
        """Wait for what has begun, and forget the rest."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
