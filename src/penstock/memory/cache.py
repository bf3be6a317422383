"""Cache limited by bytes, charged to a memory budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock._forks import renewed
from penstock.errors import ConfigError
from penstock.memory.budget import MemoryBudget, format_bytes, parse_bytes

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters and content of a cache."""

    hits: int
    misses: int
    evicted: int
    """Items removed for newer ones, or because the budget shrank."""
    refused: int
    """Items that were not kept for lack of room."""
    items: int
    nbytes: int
    max_bytes: int


class LRUCache(Generic[V]):
    """Up to `max_bytes` of values; the least recently used ones make room for new ones.

    With `evict=False` new values are refused instead when the cache is full. That is better where all keys are used in
    turn, as in the epochs of a loader: evicting would remove each value just before its next use.

    The content is a standing charge of `owner` on the `budget`. While the budget's limit is lowered, the cache keeps
    its share of it. Thread-safe.

        cache = LRUCache("64 MiB", budget=budget)
        image = cache.get_or_build(row, lambda: decode(row))    # its size is image.nbytes
    """

    def __init__(
        self, max_bytes: int | str, *, budget: MemoryBudget | None = None, owner: str = "cache", evict: bool = True
    ) -> None:
        self.max_bytes = parse_bytes(max_bytes)
        if self.max_bytes < 0:
            raise ConfigError(f"max_bytes cannot be negative, got {max_bytes!r}")
        if budget is not None and self.max_bytes > budget.capacity:
            raise ConfigError(
                f"a cache of {format_bytes(self.max_bytes)} does not fit into a budget of "
                f"{format_bytes(budget.capacity)}; make it smaller, or the budget larger"
            )
        self.nbytes = 0
        self._budget, self._owner, self._evict = budget, owner, evict
        self._lock = renewed(threading.Lock())
        self._items: dict[Hashable, tuple[V, int]] = {}
        """Key -> value and bytes, the least recently used first."""
        self._builds: dict[Hashable, tuple[threading.RLock, int]] = {}
        """Locks of the values that are being built, and the number of threads that hold or wait for each."""
        self._hits = self._misses = self._evicted = self._refused = 0

    def get(self, key: Hashable) -> V | None:
        """The value, or None; counts as a use."""
        with self._lock:
            item = self._items.pop(key, None)
            if item is None:
                self._misses += 1
                return None
            self._items[key] = item
            self._hits += 1
            return item[0]

    def peek(self, key: Hashable) -> V | None:
        """The value, or None; counts neither as a use nor as a miss."""
        with self._lock:
            item = self._items.get(key)
        return None if item is None else item[0]

    def put(self, key: Hashable, value: V, nbytes: int) -> bool:
        """Keep the value in place of an older one of that key; whether there was room for it."""
        if nbytes < 0:
            raise ConfigError(f"a number of bytes cannot be negative, got {nbytes} for {key!r}")
        # Values are dropped after the lock is released: their finalizers may use the cache.
        dropped: list[Any] = []
        with self._lock:
            room = self._room()
            dropped += [self._remove(key), *self._shrink(room)]
            kept = nbytes <= (room if self._evict else room - self.nbytes)
            if kept:
                dropped += self._shrink(room - nbytes)
                self._items[key] = (value, nbytes)
                self.nbytes += nbytes
            self._refused += not kept
            self._charge()
        return kept

    def get_or_build(self, key: Hashable, build: Callable[[], V], size: Callable[[V], int] | None = None) -> V:
        """The value; made by `build` if it is missing, and kept if there is room. Its size is `size(value)`, or its
        `nbytes`."""
        found = self.get(key)
        if found is not None:
            return found
        with self.building(key):
            found = self.peek(key)
            if found is None:
                found = build()
                self.put(key, found, int(getattr(found, "nbytes")) if size is None else size(found))  # noqa: B009
        return found

    @contextmanager
    def building(self, key: Hashable) -> Iterator[None]:
        """One thread at a time builds the value of a key; the others wait for it."""
        with self._lock:
            lock, waiting = self._builds.get(key, (renewed(threading.RLock()), 0))
            self._builds[key] = lock, waiting + 1
        try:
            with lock:
                yield
        finally:
            with self._lock:
                lock, waiting = self._builds.pop(key)
                if waiting > 1:
                    self._builds[key] = lock, waiting - 1

    def discard(self, key: Hashable) -> bool:
        """Remove a value; whether there was one."""
        with self._lock:
            item = self._remove(key)
            self._charge()
        return item is not None

    def trim(self, target_bytes: int = 0) -> int:
        """Remove the least recently used values until at most `target_bytes` are held; how many bytes that freed."""
        with self._lock:
            before = self.nbytes
            dropped = self._shrink(max(0, target_bytes))
            self._charge()
            freed = before - self.nbytes
        del dropped
        return freed

    def clear(self) -> None:
        """Remove everything; the counters stay."""
        with self._lock:
            dropped, self._items, self.nbytes = self._items, {}, 0
            self._charge()
        del dropped

    close = clear

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                self._hits, self._misses, self._evicted, self._refused, len(self._items), self.nbytes, self.max_bytes
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        """True if there is a value; does not count as a use."""
        return key in self._items

    def __repr__(self) -> str:
        return f"LRUCache({len(self._items)} items, {format_bytes(self.nbytes)} of {format_bytes(self.max_bytes)})"

    # Called with the lock held.

    def _room(self) -> int:
        budget = self._budget
        return self.max_bytes if budget is None else self.max_bytes * budget.limit // budget.capacity

    def _remove(self, key: Hashable) -> tuple[V, int] | None:
        item = self._items.pop(key, None)
        self.nbytes -= item[1] if item is not None else 0
        return item

    def _shrink(self, target_bytes: int) -> list[tuple[V, int] | None]:
        dropped = []
        while self.nbytes > target_bytes:
            dropped.append(self._remove(next(iter(self._items))))
            self._evicted += 1
        return dropped

    def _charge(self) -> None:
        if self._budget is not None:
            self._budget.hold(self._owner, self.nbytes, by=self)
