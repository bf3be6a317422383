"""A function over many items on a few threads, results in order: for work that has to be over before a run begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.pipeline.config import available_cores

__all__ = ["map_ahead"]

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST_THREADS = 4


def map_ahead(function: Callable[[Item], Result], items: Iterable[Item]) -> Generator[Result, None, None]:
    """`map`, with one item more in work than there are threads; the items are taken by the calling thread alone.

    An exception comes in its place in the order. Closing the generator waits for what is in work, and takes no more.
    """
    threads = min(available_cores(), _MOST_THREADS)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="penstock-ahead")
    working: deque[Future[Result]] = deque()
    try:
        for item in items:
            working.append(pool.submit(function, item))
            del item  # the pool lets go of it as soon as it is done
            if len(working) > threads:
                yield working.popleft().result()
        while working:
            yield working.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
