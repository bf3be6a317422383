"""Bytes: who may hold how many.

MemoryBudget            every batch in flight reserves its bytes here, and waits when there are none
BufferPool              raw blocks to read into; back by themselves when the last view of them is gone
slice_batch, compact    views of batches without copying, and a copy where a view would pin too much
MappedFile              a file as memory that the system may take back at any time
ResidentWatch           what allocators keep beyond that, held inside the budget too
MemoryPressureHandler   lowers the budget when the machine runs short, and gives it back
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.memory.budget import MemoryBudget, Reservation, format_bytes, parse_bytes
    from penstock.memory.hot import HotCache, HotStats
    from penstock.memory.pool import BufferPool, PooledBuffer, PoolStats
    from penstock.memory.pressure import MemoryPressureHandler, MemoryReading, PressureEvent, read_memory, suggest_limit
    from penstock.memory.resident import ResidentWatch, resident_bytes
    from penstock.memory.views import MappedFile, batch_nbytes, compact, owned_nbytes, slice_batch, split_batch

__all__ = [
    "BufferPool",
    "HotCache",
    "HotStats",
    "MappedFile",
    "MemoryBudget",
    "MemoryPressureHandler",
    "MemoryReading",
    "PoolStats",
    "PooledBuffer",
    "PressureEvent",
    "Reservation",
    "ResidentWatch",
    "batch_nbytes",
    "compact",
    "format_bytes",
    "owned_nbytes",
    "parse_bytes",
    "read_memory",
    "resident_bytes",
    "slice_batch",
    "split_batch",
    "suggest_limit",
]

# Imported when they are first used: what is not used costs nothing.
__getattr__ = lazy(
    __name__,
    {
        "MemoryBudget": "penstock.memory.budget",
        "Reservation": "penstock.memory.budget",
        "format_bytes": "penstock.memory.budget",
        "parse_bytes": "penstock.memory.budget",
        "HotCache": "penstock.memory.hot",
        "HotStats": "penstock.memory.hot",
        "BufferPool": "penstock.memory.pool",
        "PoolStats": "penstock.memory.pool",
        "PooledBuffer": "penstock.memory.pool",
        "MemoryPressureHandler": "penstock.memory.pressure",
        "MemoryReading": "penstock.memory.pressure",
        "PressureEvent": "penstock.memory.pressure",
        "read_memory": "penstock.memory.pressure",
        "suggest_limit": "penstock.memory.pressure",
        "ResidentWatch": "penstock.memory.resident",
        "resident_bytes": "penstock.memory.resident",
        "MappedFile": "penstock.memory.views",
        "batch_nbytes": "penstock.memory.views",
        "compact": "penstock.memory.views",
        "owned_nbytes": "penstock.memory.views",
        "slice_batch": "penstock.memory.views",
        "split_batch": "penstock.memory.views",
    },
)
