"""Pool of reusable aligned buffers, and the charge of objects on a budget while they live."""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock._forks import renewed
from penstock.memory.budget import MemoryBudget, format_bytes, parse_bytes

_SMALLEST = 4096


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters and sizes of a pool; `acquired == reused + allocated`."""

    acquired: int
    reused: int
    allocated: int
    returned: int
    dropped: int
    """Buffers returned to the system: for lack of room, by `trim`, or after `close`."""
    free_bytes: int
    in_use_bytes: int


class BufferPool:
    """Pool of aligned buffers; each comes back when the last view of it is gone.

    Free buffers are kept up to `max_bytes`, the least recently used sizes leaving first, and are charged to the
    `budget` as a standing charge of `owner` (two pools on one budget need two owners); buffers in use are for their
    user to reserve. The charge is brought up to date by each call on the pool and each `release`, so views that die
    elsewhere show in it a little later. Any thread may acquire, release, or drop the last view; an `acquire` that
    finds a free buffer costs a few microseconds.

        pool = BufferPool("64 MiB")
        with pool.acquire(1 << 20) as buffer:
            file.readinto(buffer.array())
            data = buffer.arrow()   # stays valid after the block: the memory comes back when `data` is gone
    """

    def __init__(
        self,
        max_bytes: int | str = "64 MiB",
        *,
        budget: MemoryBudget | None = None,
        alignment: int = 64,
        owner: str = "pool",
    ) -> None:
        self._max_bytes = parse_bytes(max_bytes)
        if self._max_bytes < 0:
            raise ValueError(f"max_bytes cannot be negative, got {max_bytes!r}")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"alignment must be a power of two, got {alignment}")
        self._budget, self._owner, self._alignment = budget, owner, alignment
        self._lock = renewed(threading.Lock())
        self._returned: deque[tuple[int, pa.Buffer]] = deque()
        self._free: dict[int, list[pa.Buffer]] = {}
        """Free blocks by capacity, the capacity used last at the end."""
        self._free_bytes = self._in_use_bytes = self._charged = 0
        self._reuses = self._allocations = self._returns = self._drops = 0
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        """An empty pool of the same size, in another process: budgets and buffers stay here."""
        return BufferPool, (self._max_bytes,)

    @property
    def max_bytes(self) -> int:
        """Most bytes of free buffers."""
        return self._max_bytes

    def acquire(self, nbytes: int) -> PooledBuffer:
        """A buffer of at least `nbytes`, with arbitrary content."""
        if nbytes < 0:
            raise ValueError(f"a number of bytes cannot be negative, got {nbytes}")
        capacity = size_class(nbytes)
        try:
            with self._lock:
                if self._closed:
                    raise ValueError("cannot acquire from a closed buffer pool")
                self._file_all()
                block = self._take_free(capacity)
                if block is None:
                    # Arrow aligns to 64 bytes; more than that is found inside a slightly larger block. Arrow's own
                    # heap, because what we drop then serves its next allocation without fresh pages from the system.
                    block = pa.allocate_buffer(capacity + max(0, self._alignment - 64))
                    self._allocations += 1
                self._in_use_bytes += capacity
                self._settle()
        finally:
            self._file_returned()
        return PooledBuffer(self, self._lease(block, capacity), nbytes)

    def trim(self, target_bytes: int = 0) -> int:
        """Give free buffers back to the system until at most `target_bytes` are kept; how many bytes that freed."""
        try:
            with self._lock:
                self._file_all()
                before = self._free_bytes
                self._evict(max(0, target_bytes))
                freed = before - self._free_bytes
                self._settle()
        finally:
            self._file_returned()
        # Arrow's allocator keeps freed pages otherwise.
        pa.default_memory_pool().release_unused()
        return freed

    def stats(self) -> PoolStats:
        try:
            with self._lock:
                self._file_all()
                self._settle()
                return PoolStats(
                    acquired=self._reuses + self._allocations,
                    reused=self._reuses,
                    allocated=self._allocations,
                    returned=self._returns,
                    dropped=self._drops,
                    free_bytes=self._free_bytes,
                    in_use_bytes=self._in_use_bytes,
                )
        finally:
            self._file_returned()

    def close(self) -> None:
        """Keep nothing from now on. Buffers in use stay valid, and are freed when their last view is gone."""
        with self._lock:
            self._closed = True
        self.trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        kept, out = format_bytes(self._free_bytes), format_bytes(self._in_use_bytes)
        return f"BufferPool({kept} free of {format_bytes(self._max_bytes)}, {out} in use)"

    def _lease(self, block: pa.Buffer, capacity: int) -> npt.NDArray[np.uint8]:
        # The lease is a fresh array over the block, and every view made from it (array, pa.Buffer, tensor) leads back
        # to this very object: NumPy stops shortening chains of views where the base is no array. A memoryview would
        # not do: NumPy, and its own slices, refer past it to what lies below, so it would die before they do.
        # Nor is an array known to the cycle collector, so its weak references fire when it is really gone, not when
        # a cycle that holds it is found, whose `finally` blocks are yet to run and may write to it.
        lease = np.frombuffer(block, np.uint8, capacity, -block.address % self._alignment)
        finalizer = weakref.finalize(lease, self._give_back, capacity, block)
        finalizer.atexit = False
        return lease

    def _give_back(self, capacity: int, block: pa.Buffer) -> None:
        # Runs wherever the last view happens to die: on any thread, and through a garbage collection even on one that
        # is inside this pool's lock, or the budget's. So it must not wait for a lock, nor touch the budget: it leaves
        # the block in a deque (append is atomic) and files it only if the lock is free.
        self._returned.append((capacity, block))
        self._file_returned()

    def _file_returned(self) -> None:
        # Whoever held the lock while a block was left in the deque comes here after letting go, so none is forgotten.
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._file_all()
            finally:
                self._lock.release()

    def _settle_if_free(self) -> None:
        # Called by `release`, which may run in a generator that is being collected: it must not wait either.
        if self._budget is not None and self._lock.acquire(blocking=False):
            try:
                self._file_all()
                self._settle()
            finally:
                self._lock.release()
        self._file_returned()

    # The rest is called with the lock held.

    def _take_free(self, capacity: int) -> pa.Buffer | None:
        blocks = self._free.get(capacity)
        if not blocks:
            return None
        self._reuses += 1
        self._free_bytes -= capacity
        return blocks.pop()

    def _file_all(self) -> None:
        while self._returned:
            capacity, block = self._returned.popleft()
            self._returns += 1
            self._in_use_bytes -= capacity
            if self._closed or capacity > self._max_bytes:
                self._drops += 1
                continue
            self._evict(self._max_bytes - capacity)
            blocks = self._free.pop(capacity, [])
            blocks.append(block)
            self._free[capacity] = blocks
            self._free_bytes += capacity

    def _evict(self, target_bytes: int) -> None:
        while self._free_bytes > target_bytes:
            capacity, blocks = next(iter(self._free.items()))
            if blocks:
                blocks.pop()
                self._free_bytes -= capacity
                self._drops += 1
            else:
                del self._free[capacity]

    def _settle(self) -> None:
        if self._budget is not None and self._charged != self._free_bytes:
            self._budget.hold(self._owner, self._free_bytes)
            self._charged = self._free_bytes


class PooledBuffer:
    """Writable, aligned memory on loan from a pool.

    `release` (or leaving the `with` block, or dropping the object) gives up this handle only. The memory goes back to
    the pool when the last array, Arrow buffer or tensor made from it is gone, and not before.
    """

    __slots__ = ("_lease", "_pool", "capacity", "nbytes")

    def __init__(self, pool: BufferPool, lease: npt.NDArray[np.uint8], nbytes: int) -> None:
        self._pool = pool
        self._lease: npt.NDArray[np.uint8] | None = lease
        self.nbytes: int = nbytes
        """Bytes requested."""
        self.capacity: int = lease.nbytes
        """Bytes of the size class."""

    def array(self, dtype: npt.DTypeLike = np.uint8, shape: int | tuple[int, ...] | None = None) -> npt.NDArray[Any]:
        """The memory as a writable array: all `nbytes` of it, or as much as `shape` takes of the capacity."""
        kind = np.dtype(dtype)
        if shape is None:
            if self.nbytes % kind.itemsize:
                raise ValueError(f"{self.nbytes} bytes are not a whole number of {kind}; pass shape=...")
            shape = self.nbytes // kind.itemsize
        needed = math.prod((shape,) if isinstance(shape, int) else shape) * kind.itemsize
        if needed > self.capacity:
            raise ValueError(f"{kind} of shape {shape} takes {needed} bytes, this buffer has {self.capacity}")
        return np.ndarray(shape, kind, self._memory())

    def arrow(self, length: int | None = None) -> pa.Buffer:
        """The first `length` bytes (default: `nbytes`) as an Arrow buffer, without copying."""
        size = self.nbytes if length is None else length
        if not 0 <= size <= self.capacity:
            raise ValueError(f"length must be between 0 and {self.capacity}, got {size}")
        return pa.py_buffer(self._memory()[:size])

    def release(self) -> None:
        """Give up this handle; a second call does nothing."""
        if self._lease is not None:
            self._lease = None
            self._pool._settle_if_free()

    def _memory(self) -> npt.NDArray[np.uint8]:
        if self._lease is None:
            raise ValueError("this buffer was released; make its views before that")
        return self._lease

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"PooledBuffer({format_bytes(self.nbytes)} of {format_bytes(self.capacity)})"


def size_class(nbytes: int) -> int:
    """The capacity that serves `nbytes`: four steps to each power of two, so less than a fifth of it is idle."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << ((nbytes - 1).bit_length() - 3)
    return -(-nbytes // step) * step


class Ledger:
    """Charge on a budget for objects such as tensors, until each of them is gone.

    An object may be collected on any thread in the middle of anything, so its weak reference only wakes a thread (a
    SimpleQueue may be put to from anywhere). The thread corrects the charge, so that reservations that wait for room
    go on. It ends with `close`, or, after `forget`, with the last object.
    """

    def __init__(self, budget: MemoryBudget, owner: str, on_end: Callable[[], None] = lambda: None) -> None:
        self._budget, self._owner, self._on_end = budget, owner, on_end
        self._wake: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lock = renewed(threading.Lock())
        self._held: list[tuple[int, int | None, weakref.ref[Any]]] = []
        """Bytes, address and the object."""
        self._thread: threading.Thread | None = None
        self._closed = self._forgotten = False
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, owner: Any, nbytes: int, address: int | None = None) -> None:
        """Charge `nbytes` until `owner` is gone; they begin at `address`, if that is not the object itself."""
        with self._lock:
            self._held.append((nbytes, address, weakref.ref(owner, self._wake.put)))
            self._settle()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._watch, name="penstock-tensors", daemon=True)
                self._thread.start()

    def knows(self, tensor: Any) -> bool:
        """True if the tensor, or the memory that it is a view of, is charged already."""
        address = _address(tensor)
        with self._lock:
            held = list(self._held)
        return any(
            alive is tensor if start is None else address is not None and start <= address < start + max(1, nbytes)
            for nbytes, start, owner in held
            if (alive := owner()) is not None
        )

    def settle(self) -> None:
        """Release the charge of objects that are gone."""
        with self._lock:
            self._settle()

    def forget(self) -> None:
        """No more calls will come: objects stay charged, and with the last of them the thread ends."""
        self._forgotten = True
        self._wake.put(None)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._settle()
        self._wake.put(None)
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(5)

    def _settle(self) -> None:
        self._held = [] if self._closed else [entry for entry in self._held if entry[2]() is not None]
        self.nbytes = sum(entry[0] for entry in self._held)
        self._budget.hold(self._owner, self.nbytes, by=self)

    def _watch(self) -> None:
        while not self._closed and (self._held or not self._forgotten):
            self._wake.get()
            self.settle()
        self._on_end()


def _address(tensor: Any) -> int | None:
    if hasattr(tensor, "ctypes"):
        return int(tensor.ctypes.data)
    return int(tensor.data_ptr()) if hasattr(tensor, "data_ptr") else None
