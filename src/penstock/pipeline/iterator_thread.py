"""Iterator that one thread makes, reads and closes, so that its reader need not wait for it."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
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
        self._line: _DemandLine[Item] = _DemandLine(make, owned, is_whole)
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
            self._thread.start()
        return self._line.take(most, max_wait_seconds, first)

    @property
    def over(self) -> bool:
        """True if no more items will come: at the end, or after `stop`."""
        return self._line.over

    def stop(self) -> None:
        """End as soon as the item in work is done; a `take` that waits returns at once."""
        self._line.stop()

    def close(self) -> None:
        """Stop, and wait a moment for the thread."""
        self._line.stop()
        if self._started and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def __del__(self) -> None:
        # At the end of the interpreter the thread is frozen, maybe with the lock that `stop` takes.
        if hasattr(self, "_line") and not sys.is_finalizing():
            self._line.stop()


class _DemandLine(Generic[Item]):
    """Queue between the thread that reads and the one that takes."""

    def __init__(self, make: Callable[[], Iterator[Item]], owned: bool, is_whole: Callable[[Item], bool]) -> None:
        self._make, self._owned, self._is_whole = make, owned, is_whole
        self._ready: deque[Item] = deque()
        self._changed = threading.Condition()
        self._goal = self._read = self._taken = 0
        """Items that were asked for, that were read, and that were taken."""
        self._awaited = False
        """True while the next item is waited for."""
        self._stopped = self._done = False
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
                with self._changed:
                    self._done = True
                    self._changed.notify_all()

    def take(self, most: int, max_wait_seconds: float | None, first: bool) -> list[Item]:
        with self._changed:
            if len(self._ready) < most:
                self._goal = max(self._goal, self._taken + most)
                self._changed.notify_all()
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

    def _awaits_demand(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or self._goal > self._read)
            return not self._stopped

    def _read_on(self, iterator: Iterator[Item]) -> bool:
        """Read what was asked for; False at the end."""
        wanted, append, is_whole = self._goal - self._read, self._ready.append, self._is_whole
        count, whole = 0, False
        for item in islice(iterator, wanted):
            count += 1
            append(item)
            if self._awaited:
                with self._changed:
                    self._awaited = False
                    self._changed.notify_all()  # the time to wait for others begins
            if (type(item) is not dict and is_whole(item)) or self._stopped:
                whole = True
                break
        with self._changed:
            self._read += count
            if whole:
                self._goal = self._read
            self._changed.notify_all()
        return whole or count == wanted
