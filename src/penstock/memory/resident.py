"""What the process really occupies: allocators keep freed memory, and a budget is about memory, not about objects."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pyarrow as pa

from penstock.memory.budget import MemoryBudget

__all__ = ["ResidentWatch", "resident_bytes"]

_STATM = Path("/proc/self/statm")
_FIRST_BYTES, _BURST_BYTES = 46 << 20, 20 << 20
_NEARLY, _NEARLY_BYTES = 0.3, 36 << 20
_DECAY, _HEADROOM = 0.99, 0.15


class ResidentWatch:
    """Keeps the resident memory of a run inside its budget, by two means.

    It sets aside what the process occupies beyond what is charged: pages that allocators keep, temporaries. That begins
    at half of the budget (more, if that is not much) and follows what is measured, so a run fills its budget within
    seconds, not at once. Other parts of the program may grow too, so it never takes more than seven eighths.

    And `give_back`, called by each thread after a batch: once the process has grown nearly as much as the budget since
    the run began, the thread returns its free pages to the system. That costs page faults later, so it is not done
    while there is room. Arrow's allocator keeps a heap for each thread; only its own thread can empty it.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._before = resident_bytes()
        self._aside = 0
        self._tight = False

    def begin(self) -> None:
        capacity = self._budget.capacity
        self._set_aside(max(capacity // 2, min(capacity * 3 // 4, _FIRST_BYTES)))

    def end(self) -> None:
        self._set_aside(0)

    def look(self) -> None:
        """Compare, now and then; takes some ten microseconds."""
        capacity, limit, charged = self._budget.capacity, self._budget.limit, self._budget.used
        grown = resident_bytes() - self._before
        wanted = grown - charged + max(int(_HEADROOM * capacity), min(_BURST_BYTES, capacity * 5 // 16))
        # Up at once, down slowly, and only while something is in flight: idle moments prove nothing.
        wanted = max(wanted, int(_DECAY * self._aside) if charged > capacity // 16 else self._aside)
        self._set_aside(min(wanted, capacity * 7 // 8))
        self._tight = grown > limit - max(_NEARLY * limit, _NEARLY_BYTES)
        if self._tight:
            pa.system_memory_pool().release_unused()  # the free pages of malloc, which NumPy and codecs use

    def give_back(self) -> None:
        """Called by a thread that has just let go of memory."""
        if self._tight:
            pa.default_memory_pool().release_unused()

    def _set_aside(self, nbytes: int) -> None:
        self._aside = nbytes
        self._budget.set_aside(nbytes, by=self)


def resident_bytes() -> int:
    """The resident set size of this process."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return int(psutil.Process().memory_info().rss)
