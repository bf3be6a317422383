"""Work done ahead of whoever waits for it: a function over many items, or an iterator, results in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Generic, Self, TypeVar

from penstock.errors import StalledError
from penstock.memory import MemoryBudget, Reservation
from penstock.pipeline.config import available_cores

__all__ = ["ReadAhead", "WorkAhead", "map_ahead"]

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST_THREADS = 4
_LOOK_UP_SECONDS = 0.2
"""How often a thread that waits for memory looks whether it is still wanted."""


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


class WorkAhead(Generic[Item, Result]):
    """A function over many items by several threads, up to `most` items ahead of whoever takes the results, in order.

    The items are taken by the thread that takes the results. What is in work or waits is charged to `budget`, by the
    largest `size` so far until its own is known; where there is no room, no more is begun until results were taken, but
    one is always in work. An exception comes in its place in the order. `close` begins nothing more, and waits for
    what is in work.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Iterator[Item],
        threads: int,
        most: int,
        *,
        budget: MemoryBudget | None = None,
        size: Callable[[Result], int] | None = None,
    ) -> None:
        self._function, self._items, self._most = function, items, max(most, 1)
        self._budget, self._size, self._largest = budget, size, 0
        self._threads: set[int] = set()
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix="penstock-ahead",
            initializer=lambda known: known.add(threading.get_ident()),
            initargs=(self._threads,),
        )
        self._working: deque[tuple[Future[Result], Reservation | None]] = deque()
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        self._begin_more()
        if not self._working:
            self.close()
            raise StopIteration
        future, charge = self._working.popleft()
        try:
            return future.result()
        finally:
            if charge is not None:
                charge.release()
            del future

    def finish(self) -> None:
        """Begin nothing more; what is in work still comes."""
        self._ended = True

    def close(self) -> None:
        self._ended = True
        # One of its own threads may be what collects it as garbage, and cannot wait for itself.
        self._pool.shutdown(wait=threading.get_ident() not in self._threads, cancel_futures=True)
        while self._working:
            _, charge = self._working.popleft()
            if charge is not None:
                charge.release()

    def _begin_more(self) -> None:
        while not self._ended and len(self._working) < self._most:
            charge = None
            if self._budget is not None and self._size is not None:
                if self._working:
                    charge = self._budget.try_reserve(self._largest, "prefetch")
                    if charge is None:
                        return
                else:
                    charge = self._budget.charge(self._largest, "prefetch")
            try:
                item = next(self._items)
            except BaseException as error:  # noqa: BLE001 - it is raised where the result would have been
                self._ended = True
                if charge is not None:
                    charge.release()
                if isinstance(error, StopIteration):
                    return
                failed: Future[Result] = Future()
                failed.set_exception(error)
                self._working.append((failed, None))
                return
            self._working.append((self._pool.submit(self._work, item, charge), charge))

    def _work(self, item: Item, charge: Reservation | None) -> Result:
        result = self._function(item)
        if charge is not None and self._size is not None:
            size = self._size(result)
            self._largest = max(self._largest, size)
            charge.resize(size)
        return result


class ReadAhead(Generic[Item]):
    """An iterator run by a thread of its own, up to `most` items ahead of whoever takes them.

    What waits is charged to `budget`, by its `size`. An exception comes in its place in the order. `stop` tells the
    thread to end, once the item that is in work is done; `close` also waits for that. Forgotten without either, it is
    stopped: whatever collects garbage must not wait for a thread.
    """

    def __init__(
        self,
        items: Iterator[Item],
        most: int,
        *,
        budget: MemoryBudget | None = None,
        size: Callable[[Item], int] | None = None,
    ) -> None:
        self._line: _Line[Item] = _Line(most, budget, size)
        # The thread knows the line, not this object, so that nothing keeps alive what nobody uses.
        self._thread = threading.Thread(target=self._line.fill, args=(items,), name="penstock-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        return self._line.take()

    def stop(self) -> None:
        self._line.stop()

    def close(self) -> None:
        """Stop, and wait until the thread has ended, unless this is that thread."""
        self._line.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        if hasattr(self, "_line"):
            self._line.stop()


class _Line(Generic[Item]):
    """What stands between the thread that makes items and the one that takes them."""

    def __init__(self, most: int, budget: MemoryBudget | None, size: Callable[[Item], int] | None) -> None:
        self._most, self._budget, self._size = most, budget, size
        self._ready: deque[tuple[Item, Reservation | None]] = deque()
        self._changed = threading.Condition()
        self._stopped = self._done = False
        self._error: BaseException | None = None

    def fill(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                charge = self._reserve(item)
                with self._changed:
                    if self._stopped:
                        if charge is not None:
                            charge.release()
                        return
                    self._ready.append((item, charge))
                    del item
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._most)
                    if self._stopped:
                        return
        except BaseException as error:  # noqa: BLE001 - it is raised where the item would have been
            self._error = error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def take(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._done or self._stopped)
            if self._ready:
                item, charge = self._ready.popleft()
                self._changed.notify_all()
                if charge is not None:
                    charge.release()
                return item
            error, self._error = self._error, None
        if error is not None and not self._stopped:
            raise error
        raise StopIteration

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            while self._ready:
                _, charge = self._ready.popleft()
                if charge is not None:
                    charge.release()
            self._changed.notify_all()

    def _reserve(self, item: Item) -> Reservation | None:
        if self._budget is None or self._size is None:
            return None
        needed = self._size(item)
        while not self._stopped:
            with suppress(StalledError):
                return self._budget.reserve(needed, "prefetch", timeout=_LOOK_UP_SECONDS)
        return None
