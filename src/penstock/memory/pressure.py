"""Memory pressure of the machine or container: lowers the limit of a budget, and restores it afterwards."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from penstock.memory.budget import MemoryBudget, format_bytes
from penstock.memory.cgroups import CGROUP, PROC, content, groups_v1, groups_v2, lines
from penstock.memory.pool import BufferPool

log = logging.getLogger(__name__)

_SHRINK = 0.7
_RESTORE = 0.1
_STALLED_PERCENT = 10.0
_CALM_PERCENT = 2.0
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in malloc.h


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Reading of the memory pressure; None for values that are unknown."""

    used_fraction: float | None = None
    """Used share of the tightest limit, without cached files, which the system can drop."""
    psi_some: float | None = None
    """Percent of the last 10 seconds in which some task waited for memory."""
    psi_full: float | None = None
    """Percent of the last 10 seconds in which all tasks waited for memory."""
    limit_bytes: int | None = None
    """Limit of `used_fraction`."""
    source: str = "unknown"
    """Owner of the limit: `system`, or the path of a cgroup."""


@dataclass(frozen=True, slots=True)
class PressureEvent:
    """Change of a budget's limit, and the reading that caused it."""

    before: int
    after: int
    reading: MemoryReading


class MemoryPressureHandler:
    """Keeps a budget within what the machine can give.

    Each `check` is one step: above `high`, or when everything waits for memory, the limit shrinks by 30%, down to
    `floor` of the capacity, and free buffers go back to the system; below `low` a tenth of the capacity is given back;
    in between nothing happens, so that the limit does not swing. What is not known never changes anything.
    Has no thread: the engine's control thread calls `check`, which looks at most once in `interval_seconds` (under a
    millisecond) and otherwise returns at once.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        *,
        pools: Iterable[BufferPool] = (),
        high: float = 0.90,
        low: float = 0.75,
        floor: float = 0.25,
        interval_seconds: float = 1.0,
        readings: Callable[[], MemoryReading] | None = None,
    ) -> None:
        if not 0 < low < high <= 1:
            raise ValueError(f"low and high must satisfy 0 < low < high <= 1, got {low} and {high}")
        if not 0 < floor <= 1:
            raise ValueError(f"floor must be above 0 and at most 1, got {floor}")
        if interval_seconds < 0:
            raise ValueError(f"interval_seconds cannot be negative, got {interval_seconds}")
        self._budget, self._pools = budget, tuple(pools)
        self._high, self._low, self._floor, self._interval_seconds = high, low, floor, interval_seconds
        self._readings = readings or read_memory
        self._next_look = float("-inf")
        self._direction = "steady"
        self._events: deque[PressureEvent] = deque(maxlen=100)
        self.shrunk = 0
        """Number of times the limit was lowered."""
        self.restored = 0
        """Number of times the limit was raised again."""
        self.lowest_limit = budget.limit
        """Lowest limit so far."""
        self.reading = MemoryReading()
        """Last reading."""
        self.under_pressure = False
        """True if memory was short at the last reading."""

    @property
    def events(self) -> tuple[PressureEvent, ...]:
        """The last hundred changes of the limit, oldest first."""
        return tuple(self._events)

    def check(self) -> bool:
        """Read the pressure once and adapt the budget; True if its limit changed."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + self._interval_seconds
        self.reading = self._readings()
        self.under_pressure = self._is_short(self.reading)
        if self.under_pressure:
            for pool in self._pools:
                pool.trim()
            pa.default_memory_pool().release_unused()
            return self._shrink()
        return self._is_calm(self.reading) and self._restore()

    def restore(self) -> None:
        """Restore the full limit, at the end of a run."""
        self._budget.shrink_to(self._budget.capacity)
        self._direction = "steady"

    def _is_short(self, reading: MemoryReading) -> bool:
        too_full = reading.used_fraction is not None and reading.used_fraction >= self._high
        return too_full or (reading.psi_full is not None and reading.psi_full >= _STALLED_PERCENT)

    def _is_calm(self, reading: MemoryReading) -> bool:
        has_room = reading.used_fraction is not None and reading.used_fraction < self._low
        return has_room and (reading.psi_full is None or reading.psi_full < _CALM_PERCENT)

    def _shrink(self) -> bool:
        lowest = max(1, int(self._budget.capacity * self._floor))
        before = self._budget.limit
        after = min(before, max(lowest, int(before * _SHRINK)))
        if after == before:
            return False
        self._change(before, after, "down")
        self.shrunk += 1
        return True

    def _restore(self) -> bool:
        capacity, before = self._budget.capacity, self._budget.limit
        after = min(capacity, before + max(1, int(capacity * _RESTORE)))
        if after == before:
            return False
        self._change(before, after, "up")
        self.restored += 1
        return True

    def _change(self, before: int, after: int, direction: str) -> None:
        self._budget.shrink_to(after)
        self._events.append(PressureEvent(before, after, self.reading))
        self.lowest_limit = min(self.lowest_limit, after)
        if direction != self._direction:
            self._direction = direction
            self._log(before, after)

    def _log(self, before: int, after: int) -> None:
        state = _describe(self.reading)
        if after < before:
            log.warning("memory is short (%s): budget %s -> %s", state, format_bytes(before), format_bytes(after))
        else:
            capacity = format_bytes(self._budget.capacity)
            log.info("memory is free again (%s): budget back from %s towards %s", state, format_bytes(before), capacity)


def read_memory(*, proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryReading:
    """Current reading of the machine and the control groups of this process.

    Looks at the system, at every cgroup from our own up to the root (v2 and v1), and at pressure stall information.
    Files that are missing, forbidden or not understood are left out.
    """
    levels = list(_levels(proc, cgroup))
    tightest = max(levels, key=lambda level: level.used_fraction, default=None)
    stalls = [_stalls(proc / "pressure" / "memory")]
    stalls += [_stalls(group / "memory.pressure") for group in groups_v2(proc, cgroup)[:1]]
    return MemoryReading(
        used_fraction=tightest.used_fraction if tightest else None,
        psi_some=max((stall["some"] for stall in stalls if "some" in stall), default=None),
        psi_full=max((stall["full"] for stall in stalls if "full" in stall), default=None),
        limit_bytes=tightest.limit if tightest else None,
        source=tightest.source if tightest else "unknown",
    )


def suggest_limit(*, proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Default budget for this machine: a quarter of the available memory, between 64 MiB and 4 GiB."""
    available = min((level.limit - level.used for level in _levels(proc, cgroup)), default=0)
    return min(4 << 30, max(64 << 20, available // 4 >> 20 << 20))


@dataclass(frozen=True, slots=True)
class _Level:
    """Memory limit, and the used part of it."""

    source: str
    used: int
    limit: int

    @property
    def used_fraction(self) -> float:
        return self.used / self.limit


def _levels(proc: Path, cgroup: Path) -> Iterator[_Level]:
    system = _system_level(proc)
    if system is not None:
        yield system
    yield from _group_levels(groups_v2(proc, cgroup), "memory.current", ("memory.max", "memory.high"), "")
    yield from _group_levels(
        groups_v1("memory", proc, cgroup), "memory.usage_in_bytes", ("memory.limit_in_bytes",), "total_"
    )


def _system_level(proc: Path) -> _Level | None:
    known = {name.rstrip(":"): 1024 * number for name, number in _stat(proc / "meminfo", words=3).items()}
    total, available = known.get("MemTotal", 0), known.get("MemAvailable")
    if available is not None and available <= total:
        return _Level("system", total - available, total)
    import psutil  # here and below: it takes longer to import than all of this package, and Linux needs none of it

    try:
        memory = psutil.virtual_memory()
        return _Level("system", memory.total - memory.available, memory.total)
    except (OSError, ValueError, RuntimeError, psutil.Error):
        log.debug("psutil cannot tell the memory of this system", exc_info=True)
        return None


def _group_levels(groups: Iterable[Path], usage: str, limits: tuple[str, ...], prefix: str) -> Iterator[_Level]:
    for group in groups:
        used = _number(group / usage)
        # Without a limit, v2 says `max` and v1 a number no machine has.
        in_force = [n for n in (_number(group / name) for name in limits) if n is not None and 0 < n < 1 << 60]
        if used is None or not in_force:
            continue
        # Cached files are counted as used, yet give way before anything else does: without this correction, reading a
        # file larger than the limit would look like pressure for ever.
        stat = _stat(group / "memory.stat")
        cached = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
        yield _Level(str(group), max(0, used - cached), min(in_force))


def _number(path: Path) -> int | None:
    text = "\n".join(lines(path))
    return int(text) if text.isascii() and text.isdigit() else None


def _stat(path: Path, words: int = 2) -> dict[str, int]:
    """Numbers by name, of the lines with so many words."""
    found = (line.split() for line in lines(path))
    return {line[0]: int(line[1]) for line in found if len(line) == words and line[1].isascii() and line[1].isdigit()}


def _stalls(path: Path) -> dict[str, float]:
    """`some avg10=0.12 avg60=...` as {"some": 0.12}, and `full` the same."""
    found = {}
    for line in lines(path):
        kind, _, rest = line.partition(" ")
        for item in rest.split():
            name, _, value = item.partition("=")
            if name == "avg10" and value.replace(".", "", 1).isdigit() and value.isascii():
                found[kind] = float(value)
    return found


def _describe(reading: MemoryReading) -> str:
    parts = []
    if reading.used_fraction is not None:
        limit = "" if reading.limit_bytes is None else f" of {format_bytes(reading.limit_bytes)}"
        parts.append(f"{reading.source} at {reading.used_fraction:.0%}{limit}")
    if reading.psi_full:
        parts.append(f"all tasks stalled {reading.psi_full:.0f}% of the time")
    return ", ".join(parts) or "unknown"


_STATM = Path("/proc/self/statm")
_FIRST_BYTES, _BURST_BYTES = 46 << 20, 20 << 20
_NEARLY, _NEARLY_BYTES = 0.3, 36 << 20
_TRIM_SHARE = 20
"""Times as long as it took to return malloc's free pages, they are left alone: it takes the locks of malloc, and tenths
of a second in a process with hundreds of thousands of free blocks."""
_DECAY, _HEADROOM = 0.99, 0.15
LOADED_LEAST_BYTES = 8 << 20
"""Bytes that stages loaded from which they count."""


class ResidentWatch:
    """Keeps the resident memory of a run inside its budget, by two means.

    It sets aside what the process occupies beyond what is charged: pages that allocators keep, temporaries. That begins
    at half of the budget (more, if that is not much) and follows what is measured, so a run fills its budget within
    seconds, not at once. Other parts of the program may grow too, so it never takes more than seven eighths.

    And `give_back`, called by each thread after a batch: once the process has grown nearly as much as the budget since
    the run began, the thread returns its free pages to the system. That costs page faults later, so it is not done
    while there is room. With a budget of 72 MiB or less it is done from the first batch on: a few batches may take half
    of that before memory is first measured. Arrow's allocator keeps a heap for each thread; only its own thread can
    empty it.

    What stages loaded for the run, such as the tables of a tokenizer (`loaded` bytes), is a standing charge, up to half
    of the budget: they may be larger than all of it, and the rows need the other half.
    """

    def __init__(self, budget: MemoryBudget, loaded: int = 0) -> None:
        self._budget = budget
        self._loaded = min(loaded, budget.capacity // 2) if loaded >= LOADED_LEAST_BYTES else 0
        self._before = resident_bytes()
        self._aside = 0
        self._tight = budget.capacity <= 2 * _NEARLY_BYTES

    def begin(self) -> None:
        capacity = self._budget.capacity
        self._budget.hold("loaded by stages", self._loaded, by=self)
        self._set_aside(min(max(capacity // 2, min(capacity * 3 // 4, _FIRST_BYTES)), self._most()))

    def end(self) -> None:
        self._set_aside(0)
        self._budget.hold("loaded by stages", 0, by=self)

    def _most(self) -> int:
        return self._budget.capacity * 7 // 8 - self._loaded

    def look(self) -> None:
        """Compare the resident memory with the charges; takes about ten microseconds."""
        capacity, limit, charged = self._budget.capacity, self._budget.limit, self._budget.used - self._loaded
        grown = resident_bytes() - self._before
        wanted = grown - charged + max(int(_HEADROOM * capacity), min(_BURST_BYTES, capacity * 5 // 16))
        # Up at once, down slowly, and only while something is in flight: idle moments prove nothing.
        wanted = max(wanted, int(_DECAY * self._aside) if charged > capacity // 16 else self._aside)
        self._set_aside(min(wanted, self._most()))
        self._tight = grown + self._loaded > limit - max(_NEARLY * limit, _NEARLY_BYTES)
        if self._tight:
            trim_malloc()

    def give_back(self) -> None:
        """Called by a thread that has just released memory."""
        if self._tight:
            pa.default_memory_pool().release_unused()

    def _set_aside(self, nbytes: int) -> None:
        self._aside = nbytes
        self._budget.set_aside(nbytes, by=self)


def give_back_memory() -> None:
    """Return free pages to the system: those of malloc, and those that Arrow keeps for the calling thread."""
    trim_malloc()
    pa.default_memory_pool().release_unused()


_trim_at = float("-inf")


def trim_malloc() -> None:
    """Return free pages of malloc to the system: NumPy, codecs and tokenizers use it. Only glibc has a call for it.

    All callers of a process together spend a twentieth of the time on it at most.

    `release_unused` of Arrow's system pool, which is documented to do the same, does nothing in the wheels of pyarrow.
    """
    global _trim_at
    trim, began = _c_function("malloc_trim"), time.monotonic()
    if trim is None or began < _trim_at:
        return
    trim(0)
    ended = time.monotonic()
    _trim_at = ended + _TRIM_SHARE * (ended - began)


@cache
def _c_function(name: str) -> Any:
    """A function of the C library; None where there is none. The interpreter lock is not held during a call."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name, None)
    except OSError:  # an interpreter without dynamic linking, as those are that are built with musl
        return None


def free_large_blocks_at_once() -> None:
    """Make glibc return blocks of a megabyte and more to the system when they are freed; elsewhere nothing changes.

    By itself it does so only until the first of them is freed, and keeps many of the later ones, in every arena. It is
    a setting of the whole process, so commands call it and the library does not. A user's own setting stays.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "mmap_threshold" in tunables:
        return
    mallopt = _c_function("mallopt")
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 1 << 20)


def resident_bytes() -> int:
    """Resident set size of this process."""
    try:
        return int(content(_STATM).split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import psutil

        return int(psutil.Process().memory_info().rss)
