"""Byte budget for everything in flight: a stage waits until it can reserve memory, which is the backpressure."""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import deque
from operator import index
from types import TracebackType
from typing import Self

from penstock._forks import renewed
from penstock.errors import ConfigError, StalledError

_UNITS = {"": 1, "b": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_UNITS |= {"kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}

_FEW_COLUMNS, _COLUMN_BYTES = 100, 640


def column_bytes(columns: int) -> int:
    """Memory that the columns of a batch take besides their data; of a few it is not counted."""
    return columns * _COLUMN_BYTES if columns > _FEW_COLUMNS else 0


_budgets: weakref.WeakSet[MemoryBudget] = weakref.WeakSet()


def _forget_charges() -> None:
    for budget in list(_budgets):
        budget._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_charges)


class MemoryBudget:
    """Limit in bytes, shared by any number of owners and threads.

    Two kinds of charge. A *reservation* waits for room, first come first served. A *standing* charge (`hold`) is for
    bytes that exist already, such as a sink's buffer: it never waits, and leaves less room for the reservations.
    A stream without a reservation is always admitted. So one oversized item, standing charges that fill the budget, or
    another stream that holds all of it slow a stream down to one item at a time, but never stop it. `by` names the
    stream of a reservation; without it all are of one stream.

        budget = MemoryBudget("256 MiB")
        with budget.reserve(1 << 20, owner="read", timeout_seconds=30):
            ...
    """

    def __init__(self, limit: int | str = "1 GiB") -> None:
        self._capacity = parse_bytes(limit)
        if self._capacity <= 0:
            raise ConfigError(f"a memory budget must be positive, got {limit!r}")
        self._limit = self._capacity
        self._changed = renewed(threading.Condition())
        self._reserved: dict[str, int] = {}
        self._standing: dict[tuple[str, object], int] = {}
        self._aside: dict[object, int] = {}
        self._queue: deque[tuple[object, object]] = deque()
        self._held: dict[object, int] = {}
        self._most_aside = 0
        self._used = 0
        self._peak = 0
        self._forks = 0
        """Number of forks that lie between this object and the one that was made."""
        _budgets.add(self)

    @classmethod
    def of(cls, given: MemoryBudget | int | str) -> MemoryBudget:
        """A budget for a limit, `MemoryBudget.of("4 GiB")`; a budget is returned unchanged."""
        try:
            return given if isinstance(given, MemoryBudget) else cls(given)
        except ValueError:
            raise ConfigError(f"budget must be a size such as '256 MiB', or a MemoryBudget, got {given!r}") from None

    @property
    def capacity(self) -> int:
        """Limit given to the constructor."""
        return self._capacity

    @property
    def limit(self) -> int:
        """Current limit: the capacity, or less while the machine is short of memory."""
        return self._limit

    @property
    def used(self) -> int:
        return self._used

    @property
    def peak(self) -> int:
        """Most bytes charged at once, since the beginning or `restart_peak`."""
        return self._peak

    def restart_peak(self) -> None:
        """Start to measure the peak again."""
        with self._changed:
            self._peak = self._used

    @property
    def available(self) -> int:
        return max(0, self._limit - self._used)

    def by_owner(self) -> dict[str, int]:
        """Bytes charged now, by owner."""
        with self._changed:
            return self._charges()

    def reserve(
        self, nbytes: int, owner: str = "", *, timeout_seconds: float | None = None, by: object = None
    ) -> Reservation:
        """Wait for room for `nbytes`, then charge them to `owner`; raise `StalledError` after `timeout_seconds`."""
        _check_amount(nbytes)
        ticket = (object(), by)
        with self._changed:
            if not self._queue and self._fits(nbytes, by):
                return self._admit(nbytes, owner, by)
            deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
            self._queue.append(ticket)
            try:
                while not (self._is_next(ticket) and self._fits(nbytes, by)):
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise StalledError(self._why_full(nbytes, owner, timeout_seconds))
                    self._changed.wait(left)
                return self._admit(nbytes, owner, by)
            finally:
                self._queue.remove(ticket)
                if self._queue:
                    self._changed.notify_all()

    def try_reserve(self, nbytes: int, owner: str = "", *, by: object = None) -> Reservation | None:
        """The reservation, or None if it would have to wait."""
        _check_amount(nbytes)
        with self._changed:
            return self._admit(nbytes, owner, by) if not self._queue and self._fits(nbytes, by) else None

    def charge(self, nbytes: int, owner: str = "", *, by: object = None) -> Reservation:
        """A reservation that does not wait, for bytes that exist already."""
        _check_amount(nbytes)
        with self._changed:
            return self._admit(nbytes, owner, by)

    def hold(self, owner: str, nbytes: int, *, by: object = None) -> None:
        """Set the standing charge of `owner` to `nbytes`, without waiting.

        Several holders may charge the same owner: each says who it is with `by`, and sets only its own part.
        """
        _check_amount(nbytes)
        with self._changed:
            before = self._standing.pop((owner, by), 0)
            if nbytes:
                self._standing[owner, by] = nbytes
            if nbytes != before:
                self._charge(nbytes - before)

    def set_aside(self, nbytes: int, *, by: object = None) -> None:
        """Keep `nbytes` free of charges, for what cannot be charged one by one: pages that allocators keep.

        They are not in `used`, but leave less room for reservations. Of several holders the largest part counts: they
        look at the same process.
        """
        _check_amount(nbytes)
        with self._changed:
            self._aside[by] = nbytes
            if not nbytes:
                del self._aside[by]
            self._most_aside = max(self._aside.values(), default=0)
            self._changed.notify_all()

    def shrink_to(self, limit: int) -> None:
        """Lower (or raise, up to the capacity) the current limit. Existing charges stay."""
        with self._changed:
            self._limit = max(1, min(limit, self._capacity))
            self._changed.notify_all()

    def _is_next(self, ticket: tuple[object, object]) -> bool:
        """First come, first served; but a stream with nothing in flight does not wait for other streams."""
        if ticket[1] in self._held:
            return self._queue[0] is ticket
        return next(one for one in self._queue if one[1] is ticket[1]) is ticket

    def _fits(self, nbytes: int, by: object) -> bool:
        # With nothing in transit the next item goes ahead alone, or the stream could never advance.
        return by not in self._held or self._used + nbytes + self._most_aside <= self._limit

    def _admit(self, nbytes: int, owner: str, by: object) -> Reservation:
        self._held[by] = self._held.get(by, 0) + 1
        self._reserved[owner] = self._reserved.get(owner, 0) + nbytes
        self._charge(nbytes)
        return Reservation(self, owner, nbytes, by)

    def _charge(self, delta: int) -> None:
        self._used += delta
        if self._used > self._peak:
            self._peak = self._used
        if delta < 0 and self._queue:
            self._changed.notify_all()

    def _change(self, reservation: Reservation, nbytes: int, *, release: bool = False) -> None:
        with self._changed:
            if reservation._closed or reservation._forks != self._forks:
                return
            delta = nbytes - reservation.nbytes
            reservation.nbytes = nbytes
            # Not `+=`: an owner at zero has no entry, yet may still hold a reservation of nothing, for an empty batch.
            self._reserved[reservation.owner] = self._reserved.get(reservation.owner, 0) + delta
            if not self._reserved[reservation.owner]:
                del self._reserved[reservation.owner]
            if release:
                reservation._closed = True
                self._held[reservation._by] -= 1
                if not self._held[reservation._by]:
                    del self._held[reservation._by]
                if self._queue:
                    self._changed.notify_all()
            self._charge(delta)

    def _charges(self) -> dict[str, int]:
        total = dict(self._reserved)
        for (owner, _), nbytes in self._standing.items():
            total[owner] = total.get(owner, 0) + nbytes
        return {owner: nbytes for owner, nbytes in total.items() if nbytes}

    def _why_full(self, nbytes: int, owner: str, timeout_seconds: float | None) -> str:
        held = sorted(self._charges().items(), key=lambda charge: -charge[1])
        listing = ", ".join(f"{holder or '?'} {format_bytes(charged)}" for holder, charged in held)
        return (
            f"{owner or 'a reservation'} waited {timeout_seconds:g} s for {format_bytes(nbytes)} of a budget of "
            f"{format_bytes(self._limit)}; held by: {listing or 'no owner'}; "
            "raise the budget or find who does not release"
        )

    def _after_fork(self) -> None:
        """Nothing is charged in a forked process: those who would give it back are threads of its parent."""
        self._reserved, self._standing, self._aside, self._held = {}, {}, {}, {}
        self._queue.clear()
        self._most_aside = self._used = self._peak = 0
        self._forks += 1

    def __repr__(self) -> str:
        return f"MemoryBudget({format_bytes(self._used)} of {format_bytes(self._limit)})"


class Reservation:
    """Bytes charged to an owner until released; a context manager."""

    __slots__ = ("_budget", "_by", "_closed", "_forks", "nbytes", "owner")

    def __init__(self, budget: MemoryBudget, owner: str, nbytes: int, by: object) -> None:
        self._budget, self._by, self._closed, self._forks = budget, by, False, budget._forks
        self.owner, self.nbytes = owner, nbytes

    def resize(self, nbytes: int) -> None:
        """Set the real size. Growing never waits, because the bytes exist already."""
        _check_amount(nbytes)
        self._budget._change(self, nbytes)

    def release(self) -> None:
        """Give the bytes back; a second call does nothing."""
        self._budget._change(self, 0, release=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


def parse_bytes(size: int | str) -> int:
    """Bytes from `4096`, `"64 KiB"`, `"1.5GB"` (powers of 1000) or `"2 GiB"` (powers of 1024)."""
    if hasattr(size, "__index__") and not isinstance(size, bool):
        return index(size)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", size if isinstance(size, str) else "")
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"not a size: {size!r}; write a number of bytes, or one with a unit such as '256 MiB'")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(nbytes: float) -> str:
    """Bytes as text, such as `1.5 MiB`."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _check_amount(nbytes: int) -> None:
    if nbytes < 0:
        raise ValueError(f"a number of bytes cannot be negative, got {nbytes}")
