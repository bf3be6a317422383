"""A cache that keeps what is worth most: how often it is used, times the seconds to make it again, for each byte."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

from penstock.errors import ConfigError
from penstock.memory.budget import MemoryBudget, format_bytes, parse_bytes

__all__ = ["CacheStats", "CostAwareCache"]

V = TypeVar("V")

_MOST_USES = 8
"""Uses beyond these count no more, or what was hot an hour ago would stay for another one."""
_UNKNOWN_RATE = 1e-9
"""Seconds for each byte while no cost is known: about what copying takes, and the same for everything."""


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache did so far, and what it holds now."""

    hits: int
    misses: int
    evicted: int
    """Items that had to go for others worth more, or because the room shrank."""
    refused: int
    """Items that were not kept: too large, or worth less than everything that was there."""
    items: int
    nbytes: int
    max_bytes: int
    saved_seconds: float
    """What the hits would have taken to make again."""
    spent_seconds: float
    """What `get_or_build` has spent on making things."""


class CostAwareCache(Generic[V]):
    """Keeps up to `max_bytes` of what is used often and slow to make, and forgets what is cheap, large, or cold.

    The worth of an item is an age clock plus `uses * seconds / bytes`: greedy-dual-size-frequency. The clock moves an
    n-th of the way to the worth of whatever lost, with n items held, and not all of it at once as in the textbook: a
    pass over everything, which is what an epoch is, does then not wash out what is kept. A new item that is worth no
    more than the least worthy ones that would have to go is not kept itself.

    What is held is a standing charge of `owner` on the `budget`; while the budget's limit is lowered, the cache keeps
    the same share of it. Any thread may do anything. Of several that ask for the same key at once, one builds.

        cache = CostAwareCache("64 MiB", budget=budget)
        image = cache.get_or_build(row, lambda: decode(row))    # its size is image.nbytes
    """

    def __init__(
        self,
        max_bytes: int | str,
        *,
        budget: MemoryBudget | None = None,
        owner: str = "hot cache",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._max_bytes = parse_bytes(max_bytes)
        if self._max_bytes < 0:
            raise ConfigError(f"max_bytes cannot be negative, got {max_bytes!r}")
        if budget is not None and self._max_bytes > budget.capacity:
            raise ConfigError(
                f"a cache of {format_bytes(self._max_bytes)} does not fit into a budget of "
                f"{format_bytes(budget.capacity)}; make it smaller, or the budget larger"
            )
        self._budget, self._owner, self._clock = budget, owner, clock
        self._lock = threading.Lock()
        self._items: dict[Hashable, _Item] = {}
        self._order: list[tuple[float, int, Hashable]] = []
        """A heap of (worth when pushed, serial, key): worth only grows, so what is popped too early is pushed again."""
        self._building: dict[Hashable, _Building] = {}
        self._serial = 0
        self._age = 0.0
        self._nbytes = 0
        self._hits = self._misses = self._evicted = self._refused = 0
        self._saved = self._spent = 0.0
        self._known_seconds, self._known_bytes = 0.0, 0

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    @property
    def nbytes(self) -> int:
        """What is held now."""
        return self._nbytes

    def get(self, key: Hashable, default: V | None = None) -> V | None:
        """The value, if it is there; counts as a use of it."""
        with self._lock:
            item = self._use(key)
            self._misses += item is None
            return default if item is None else cast(V, item.value)

    def peek(self, key: Hashable) -> V | None:
        """The value, if it is there; does not count as a use."""
        item = self._items.get(key)
        return None if item is None else cast(V, item.value)

    def put(self, key: Hashable, value: V, nbytes: int, cost_seconds: float | None = None) -> bool:
        """Keep the value if it is worth it, in the place of an older one of that key; whether it is kept.

        `cost_seconds` is what making it again would take; None: as much for each byte as is usual here.
        """
        if nbytes < 0:
            raise ConfigError(f"a number of bytes cannot be negative, got {nbytes} for {key!r}")
        if cost_seconds is not None and not (math.isfinite(cost_seconds) and cost_seconds >= 0):
            raise ConfigError(f"cost_seconds must be a number of seconds, got {cost_seconds!r} for {key!r}")
        # Dropped after the lock is released: what dies with them may come back here.
        gone: list[Any] = []
        with self._lock:
            kept = self._put(key, value, nbytes, cost_seconds, gone)
            self._settle()
        return kept

    def get_or_build(self, key: Hashable, build: Callable[[], V], size: Callable[[V], int] | int | None = None) -> V:
        """The value; made by `build` if it is not there, and kept if it is worth it.

        `size` says how many bytes it takes: a number, a function of the value, or None for its `nbytes`. Who asks
        while another thread builds it waits and gets the same value; if that fails, the next one tries.
        """
        while True:
            with self._lock:
                item = self._use(key)
                if item is not None:
                    return cast(V, item.value)
                building = self._building.get(key)
                if building is None:
                    self._misses += 1
                    mine = self._building[key] = _Building(threading.get_ident())
                    break
            if building.thread == threading.get_ident():
                raise ConfigError(f"making {key!r} asks the cache for {key!r}, which would wait for itself for ever")
            building.done.wait()
            if building.made:
                with self._lock:
                    self._hits += 1
                return cast(V, building.value)
        try:
            since = self._clock()
            value = build()
            seconds = max(0.0, self._clock() - since)
            self.put(key, value, _size_of(key, value, size), seconds)
            mine.value, mine.made = value, True
            return value
        finally:
            with self._lock:
                del self._building[key]
                self._spent += seconds if mine.made else 0.0
            mine.done.set()

    def discard(self, key: Hashable) -> bool:
        """Forget one; whether it was there."""
        with self._lock:
            item = self._remove(key)
            self._settle()
        return item is not None

    def trim(self, target_bytes: int = 0) -> int:
        """Forget the least worthy until at most `target_bytes` are held; how many bytes that freed."""
        gone: list[Any] = []
        with self._lock:
            before = self._nbytes
            self._shrink(max(0, target_bytes), gone)
            self._settle()
            return before - self._nbytes

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                hits=self._hits,
                misses=self._misses,
                evicted=self._evicted,
                refused=self._refused,
                items=len(self._items),
                nbytes=self._nbytes,
                max_bytes=self._max_bytes,
                saved_seconds=self._saved,
                spent_seconds=self._spent,
            )

    def clear(self) -> None:
        """Forget everything; the counts stay."""
        with self._lock:
            gone, self._items = self._items, {}
            self._order.clear()
            self._nbytes = 0
            self._settle()
        gone.clear()

    close = clear

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        """Whether it is there; does not count as a use."""
        return key in self._items

    def __repr__(self) -> str:
        return (
            f"CostAwareCache({len(self._items)} items, {format_bytes(self._nbytes)} of {format_bytes(self._max_bytes)})"
        )

    # The rest is called with the lock held.

    def _use(self, key: Hashable) -> _Item | None:
        item = self._items.get(key)
        if item is not None:
            item.uses = min(item.uses + 1, _MOST_USES)
            item.worth = max(item.worth, self._age + item.uses * item.rate)
            self._hits += 1
            self._saved += item.seconds
        return item

    def _put(self, key: Hashable, value: V, nbytes: int, seconds: float | None, gone: list[Any]) -> bool:
        before = self._remove(key)
        gone.append(before)
        if seconds is None:
            known = self._known_seconds / self._known_bytes if self._known_bytes else _UNKNOWN_RATE
            seconds = known * nbytes
        else:
            self._known_seconds += seconds
            self._known_bytes += nbytes
        uses = before.uses if before is not None else 1
        rate = seconds / max(1, nbytes)
        worth = self._age + uses * rate
        room = self._room()
        self._shrink(room, gone)
        if nbytes > room or not self._make_room(room - nbytes, worth, gone):
            self._refused += 1
            return False
        self._serial += 1
        self._items[key] = _Item(value, nbytes, seconds, rate, uses, worth, self._serial)
        heapq.heappush(self._order, (worth, self._serial, key))
        self._nbytes += nbytes
        return True

    def _make_room(self, target_bytes: int, worth: float, gone: list[Any]) -> bool:
        """Let go of what is worth less than `worth` until `target_bytes` are held; nothing, if that is not enough."""
        losers: list[tuple[float, int, Hashable]] = []
        freed = 0
        while self._nbytes - freed > target_bytes:
            least = self._least()
            if least[0] >= worth:
                self._grow_older(worth)
                for loser in (least, *losers):
                    heapq.heappush(self._order, loser)
                return False
            losers.append(least)
            freed += self._items[least[2]].nbytes
        if losers:
            self._grow_older(losers[-1][0])
        self._evict(losers, gone)
        return True

    def _shrink(self, target_bytes: int, gone: list[Any]) -> None:
        while self._nbytes > target_bytes:
            self._evict([self._least()], gone)

    def _evict(self, losers: list[tuple[float, int, Hashable]], gone: list[Any]) -> None:
        for _, _, key in losers:
            gone.append(self._remove(key))
            self._evicted += 1

    def _least(self) -> tuple[float, int, Hashable]:
        """What is worth least, taken from the heap; there is something, if bytes are held."""
        while True:
            worth, serial, key = entry = heapq.heappop(self._order)
            item = self._items.get(key)
            if item is None or item.serial != serial:
                continue
            if item.worth <= worth:
                return entry
            heapq.heappush(self._order, (item.worth, serial, key))

    def _grow_older(self, worth_lost: float) -> None:
        self._age += max(0.0, worth_lost - self._age) / max(1, len(self._items))

    def _remove(self, key: Hashable) -> _Item | None:
        item = self._items.pop(key, None)
        if item is not None:
            self._nbytes -= item.nbytes
            # What is left of it in the heap is passed over when it comes up; many replaced ones are swept out.
            if len(self._order) > 2 * len(self._items) + 64:
                self._order = [(each.worth, each.serial, k) for k, each in self._items.items()]
                heapq.heapify(self._order)
        return item

    def _room(self) -> int:
        budget = self._budget
        return self._max_bytes if budget is None else self._max_bytes * budget.limit // budget.capacity

    def _settle(self) -> None:
        if self._budget is not None:
            self._budget.hold(self._owner, self._nbytes, by=self)


@dataclass(slots=True)
class _Item:
    value: Any
    nbytes: int
    seconds: float
    rate: float
    uses: int
    worth: float
    serial: int


class _Building:
    """A value that one thread makes and others may wait for."""

    __slots__ = ("done", "made", "thread", "value")

    def __init__(self, thread: int) -> None:
        self.done, self.made, self.thread = threading.Event(), False, thread
        self.value: Any = None


def _size_of(key: Hashable, value: Any, size: Callable[[Any], int] | int | None) -> int:
    nbytes = size(value) if callable(size) else size if size is not None else getattr(value, "nbytes", None)
    if not isinstance(nbytes, int):
        raise ConfigError(
            f"cannot tell how many bytes {key!r} takes: a {type(value).__name__} has no nbytes; pass size="
        )
    return nbytes
