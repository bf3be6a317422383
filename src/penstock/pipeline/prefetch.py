"""Prefetch: a function over many items, or an iterator, run ahead of its consumer, results in order."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Generic, Self, TypeVar

from penstock._forks import check_process, renewed
from penstock.errors import StalledError
from penstock.memory import MemoryBudget, Reservation
from penstock.pipeline.cores import available_cores

Item = TypeVar("Item")
Result = TypeVar("Result")
_MOST_THREADS = 4
_LOOK_UP_SECONDS = 0.2
"""Interval at which a thread that waits for memory checks whether it should stop."""


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
    """A function over many items by several threads, some items ahead of the consumer, results in order.

    Up to `most` items are in progress or wait, each counted by its `weight`; at least one is in progress. The thread
    that takes the results also takes the items. Items are charged to `budget`: by the largest `size` of a result so far
    plus `extra` bytes of temporaries, until the own size is known. Without room, no item starts before results are
    taken. While no size is known, one item is in progress at a time.

    An exception comes in its place in the order. `stop` begins nothing more, and lets go of what was made; `close` also
    waits for what is in work.
    """

    def __init__(
        self,
        function: Callable[[Item], Result],
        items: Iterator[Item],
        threads: int,
        most: int,
        *,
        weight: Callable[[Item], int] = lambda _: 1,
        budget: MemoryBudget | None = None,
        size: Callable[[Result], int] | None = None,
        extra: Callable[[], int] = lambda: 0,
    ) -> None:
        self._function, self._items, self._most, self._weight = function, items, max(most, 1), weight
        self._budget, self._size, self._extra = budget, size, extra
        self._largest: float | None = None
        """Bytes of a result, by its weight."""
        self._threads: set[int] = set()
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix="penstock-ahead",
            initializer=lambda known: known.add(threading.get_ident()),
            initargs=(self._threads,),
        )
        self._next: deque[Item] = deque()
        """The item that was taken and has to wait for room, if any."""
        self._working: deque[tuple[Future[Result], int, Reservation | None]] = deque()
        self._weights = 0
        self._taken: Reservation | None = None
        """Of the result that was taken last, if it is of several things, which are used one after the other."""
        self._ended = False
        self._process = os.getpid()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Result:
        check_process(self._process, "this loop")
        self._release_taken()
        self._begin_more()
        if not self._working:
            self.close()
            raise StopIteration
        future, weight, charge = self._working.popleft()
        self._weights -= weight
        self._taken = charge
        try:
            return future.result()
        finally:
            if weight <= 1:
                self._release_taken()
            del future

    def finish(self) -> None:
        """Take no more items; what was taken still comes."""
        self._ended = True

    def stop(self) -> None:
        """Begin nothing more. The threads end, and release what they hold, once their current items are done."""
        self._end(wait=False)

    def close(self) -> None:
        # One of its own threads may be what collects it as garbage, and cannot wait for itself.
        self._end(wait=threading.get_ident() not in self._threads)

    def _end(self, *, wait: bool) -> None:
        if os.getpid() != self._process:
            return  # a fork has none of the threads
        self._ended, self._weights = True, 0
        self._next.clear()
        self._release_taken()
        self._pool.shutdown(wait=wait, cancel_futures=True)
        while self._working:
            future, _, charge = self._working.popleft()
            if charge is not None:
                future.add_done_callback(partial(_release, charge))

    def _begin_more(self) -> None:
        while self._next or (not self._ended and self._weights < self._most):
            try:
                item = self._next.popleft() if self._next else next(self._items)
            except BaseException as error:  # noqa: BLE001 - it is raised where the result would have been
                self._ended = True
                if isinstance(error, StopIteration):
                    return
                failed: Future[Result] = Future()
                failed.set_exception(error)
                self._working.append((failed, 0, None))
                return
            weight = self._weight(item)
            charge = None
            if self._working and self._weights + weight > self._most:
                self._next.append(item)
                return
            if self._budget is not None and self._size is not None:
                charge = self._charge(weight)
                if charge is None:
                    self._next.append(item)
                    return
            self._weights += weight
            self._working.append((self._pool.submit(self._work, item, weight, charge), weight, charge))

    def _charge(self, weight: int) -> Reservation | None:
        """Room for one item more, if there is any, or if it is the only one."""
        assert self._budget is not None
        needed = int((self._largest or 0) * weight) + self._extra()
        if not self._working:
            return self._budget.charge(needed, "prefetch", by=self)
        return None if self._largest is None else self._budget.try_reserve(needed, "prefetch", by=self)

    def _release_taken(self) -> None:
        charge, self._taken = self._taken, None
        if charge is not None:
            charge.release()

    def _work(self, item: Item, weight: int, charge: Reservation | None) -> Result:
        result = self._function(item)
        if charge is not None and self._size is not None:
            size = self._size(result)
            self._largest = max(self._largest or 0, size / max(weight, 1))
            charge.resize(size)
        return result


def _release(charge: Reservation, done: Future[Any]) -> None:
    charge.release()


class ReadAhead(Generic[Item]):
    """An iterator run by a thread of its own, up to `most` items ahead of its consumer.

    What waits is charged to `budget`, by its `size`; with `always_one`, an item that nothing waits before is charged
    without waiting for room. An exception comes in its place in the order. `stop` tells the thread to end, once the
    item that is in work is done; `close` also waits for that. Forgotten without either, it is stopped: garbage
    collection must not wait for a thread. `finish` ends the thread too, but what it made still comes, and then the rest
    of `items` is the caller's, if they were `handed_back`.
    """

    def __init__(
        self,
        items: Iterator[Item],
        most: int,
        *,
        budget: MemoryBudget | None = None,
        size: Callable[[Item], int] | None = None,
        always_one: bool = False,
    ) -> None:
        self._line: _Line[Item] = _Line(most, budget, size, always_one=always_one)
        # The thread knows the line, not this object, so that an unused object is not kept alive.
        self._thread = threading.Thread(target=self._line.fill, args=(items,), name="penstock-ahead", daemon=True)
        self._process = os.getpid()  # before the start, which Ctrl-C may leave: the thread is stopped then
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        check_process(self._process, "this loop")
        return self._line.take()

    @property
    def ready(self) -> int:
        """Items that wait to be taken."""
        return len(self._line._ready)

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the next item, or the end; True if `next` does not have to wait."""
        return self._line.wait(seconds)

    def finish(self) -> None:
        """Take no more items than the one that is in work."""
        self._line.finish()

    @property
    def handed_back(self) -> bool:
        """True if the thread has ended because of `finish`, and not with the items."""
        return self._line.handed_back

    def stop(self) -> None:
        if os.getpid() == self._process:  # a fork has no thread to stop, and maybe the lock that it held
            self._line.stop()

    def close(self) -> None:
        """Stop, and wait until the thread has ended, unless this is that thread."""
        self.stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __del__(self) -> None:
        # At the end of the interpreter the thread is frozen, maybe with the lock that `stop` takes.
        if hasattr(self, "_process") and not sys.is_finalizing():
            self.stop()


class _Line(Generic[Item]):
    """Queue between the thread that makes items and the one that takes them."""

    def __init__(
        self, most: int, budget: MemoryBudget | None, size: Callable[[Item], int] | None, *, always_one: bool
    ) -> None:
        self._most, self._budget, self._size, self._always_one = most, budget, size, always_one
        self._ready: deque[tuple[Item, Reservation | None]] = deque()
        self._changed = threading.Condition()
        self._stopped = self._done = self._finishing = False
        self.handed_back = False
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
                    self._changed.wait_for(lambda: self._stopped or self._finishing or len(self._ready) < self._most)
                    if self._stopped or self._finishing:
                        self.handed_back = self._finishing
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

    def wait(self, seconds: float) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._ready or self._done or self._stopped, seconds))

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()

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
            if self._always_one and not self._ready:
                return self._budget.charge(needed, "prefetch", by=self)
            with suppress(StalledError):
                return self._budget.reserve(needed, "prefetch", timeout_seconds=_LOOK_UP_SECONDS, by=self)
        return None


_MOST_BACKGROUND_THREADS = 8


class Background:
    """Threads that start with the first piece of work, and end with `close`; more work starts them again."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = min(available_cores(), _MOST_BACKGROUND_THREADS) if threads is None else threads
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Do it as soon as a thread is free, in the order of the calls."""
        if self._pool is None or self._process != os.getpid():
            self._process = os.getpid()
            self._pool = ThreadPoolExecutor(self.threads, thread_name_prefix="penstock-background")
        return self._pool.submit(work)

    def close(self) -> None:
        """Wait for what has begun, and forget the rest."""
        if self._pool is not None and self._process == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


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


_CLOSE_SECONDS = 0.2
"""Longest wait of `close` for an iterator that is working on an item."""


class IteratorThread(Generic[Item]):
    """Items of an iterator, read by a thread of its own: some iterators, such as cursors of databases, refuse others.

    Nothing is read that was not asked for. `make` makes the iterator; with `owned` it is closed too. An item that is
    no dict and `is_whole` is the last one of a `take`. An exception comes in its place in the order.
    """

    def __init__(
        self, make: Callable[[], Iterator[Item]], *, owned: bool, is_whole: Callable[[Item], bool] = lambda _: False
    ) -> None:
        self._line: DemandLine[Item] = DemandLine(make, owned, is_whole)
        # The thread knows the line, not this object, so that an unused object is not kept alive.
        self._thread = threading.Thread(target=self._line.run, name="penstock-iterator", daemon=True)
        self._started = False

    @property
    def ident(self) -> int | None:
        """Number of the thread."""
        return self._thread.ident

    def take(self, most: int, max_wait_seconds: float | None = None, *, first: bool = True) -> list[Item]:
        """Up to `most` items; fewer if others take longer than `max_wait_seconds`, after a whole item, or at the end.

        Waits for one item without a limit, unless the caller has some already (`first=False`).
        """
        if not self._started:
            self._started = True
            self._start()
        return self._line.take(most, max_wait_seconds, first)

    @property
    def over(self) -> bool:
        """True if no more items will come: at the end, or after `stop`."""
        return self._line.over

    @property
    def stopped(self) -> bool:
        """True after `stop`, unless the iterator had ended before."""
        return self._line.stopped

    def stop(self) -> None:
        """End as soon as the item in work is done; a `take` that waits returns at once."""
        self._line.stop()

    def close(self) -> None:
        """Stop, and wait a moment for the thread."""
        self._line.stop()
        if self._started:
            self._wait(_CLOSE_SECONDS)

    def _start(self) -> None:
        self._thread.start()

    def _wait(self, seconds: float) -> None:
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def __del__(self) -> None:
        # At the end of the interpreter the thread is frozen, maybe with the lock that `stop` takes.
        if hasattr(self, "_line") and not sys.is_finalizing():
            self._line.stop()


class DemandLine(Generic[Item]):
    """Queue between the thread that reads and the one that takes."""

    def __init__(self, make: Callable[[], Iterator[Item]], owned: bool, is_whole: Callable[[Item], bool]) -> None:
        self._make, self._owned, self._is_whole = make, owned, is_whole
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._goal = self._read = self._taken = 0
        """Items that were asked for, that were read, and that were taken."""
        self._latest = self._demands = self._answered = 0
        """Goal of the last `take`, the number of those that had to wait, and of those that the reader knows."""
        self._awaited = False
        """True while the next item is waited for."""
        self._stopped = self._done = False
        self._ended = False
        """True if the last item was read."""
        self._error: BaseException | None = None

    def run(self) -> None:
        iterator: Iterator[Item] | None = None
        try:
            iterator = self._make()
            while self._awaits_demand() and self._read_on(iterator):
                pass
        except BaseException as error:  # noqa: BLE001 - it is raised where the item would have been
            self._error = error
        finally:
            try:
                if self._owned:
                    close: Any = getattr(iterator, "close", None)
                    if callable(close):
                        close()
            finally:
                self._finish()

    def take(self, most: int, max_wait_seconds: float | None, first: bool) -> list[Item]:
        with self._changed:
            if len(self._ready) < most:
                self._latest, self._demands = self._taken + most, self._demands + 1
                self._goal = max(self._goal, self._latest)
                self._asked()
                if first and not self._ready:
                    self._awaited = True
                    self._changed.wait_for(lambda: self._ready or self.over)
                self._changed.wait_for(
                    lambda: len(self._ready) >= most or self._read >= self._goal or self.over, max_wait_seconds
                )
            pop = self._ready.popleft
            taken = [pop() for _ in range(min(most, len(self._ready)))]
            self._taken += len(taken)
            if first and not taken and self._error is not None:
                error, self._error = self._error, None
                raise error
            return taken

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        return self._done or self._stopped

    @property
    def stopped(self) -> bool:
        return self._stopped and not self._ended

    def wait_done(self, seconds: float) -> None:
        """Wait until the reader has ended, for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, seconds)

    def _asked(self) -> None:
        """Tell the reader that more is wanted."""
        self._changed.notify_all()

    def _finish(self) -> None:
        with self._changed:
            self._done = True
            self._changed.notify_all()

    def _awaits_demand(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._goal > self._read)
            return not self._stopped

    def _read_on(self, iterator: Iterator[Item]) -> bool:
        """Read what was asked for; False at the end."""
        wanted, append, is_whole = self._wanted(), self._ready.append, self._is_whole
        count, whole = 0, False
        for item in islice(iterator, wanted):
            count += 1
            append(item)
            if self._awaited:
                self._first_came()
            if (type(item) is not dict and is_whole(item)) or self._stopped:
                whole = True
                break
        self._count(count, whole=whole)
        self._ended = not whole and count < wanted
        return not self._ended

    def _wanted(self) -> int:
        with self._changed:
            self._answered = self._demands
            return self._goal - self._read

    def _first_came(self) -> None:
        """The time to wait for other items begins."""
        with self._changed:
            self._awaited = False
            self._changed.notify_all()

    def _count(self, count: int, *, whole: bool) -> None:
        with self._changed:
            self._read += count
            if whole:  # it is all that was asked for, unless it was taken already and more was asked for
                self._goal = self._read if self._demands == self._answered else max(self._read, self._latest)
            self._changed.notify_all()
