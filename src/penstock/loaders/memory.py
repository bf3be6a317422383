"""Tensors from a pool and a cache of tensors, within the memory budget of the pipeline.

manager = UnifiedMemoryManager(MemoryConfig(pool_size_mb=512))
tensor = manager.allocate_tensor(shape=(32, 512), dtype=mx.float32)
manager.cache_tensor("embeddings", tensor)
"""

from __future__ import annotations

import itertools
import math
import operator
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from penstock._forks import renewed
from penstock._suggest import named_options
from penstock.batching.backends.base import ALIGNMENT, Backend
from penstock.batching.backends.lookup import framework_of, get_backend, is_array
from penstock.batching.backends.mlx import MlxPool
from penstock.batching.options import configured
from penstock.errors import ConfigError, PoolFullError
from penstock.memory.budget import MemoryBudget, format_bytes
from penstock.memory.cache import LRUCache
from penstock.memory.pool import BufferPool, Ledger, size_class

_MIB = 1 << 20
_numbers = itertools.count(1)


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """Sizes of the pool and the cache, and the framework of the tensors."""

    pool_size_mb: int = 512
    """MiB for tensors in use and free memory kept for the next ones, together."""
    enable_pooling: bool = True
    """True if the memory of tensors that are gone is kept for the next ones."""
    enable_unified_memory: bool = True
    """True if MLX arrays may be allocated, which lie in memory that CPU and GPU share. Without it a dtype of MLX is an
    error, and one of no framework makes a NumPy array."""
    cache_size_mb: int | None = None
    """MiB for tensors cached by name; by default half of the pool."""
    budget: MemoryBudget | int | str | None = None
    """Budget shared with loaders and pipelines, or its size; by default one of the pool's size."""
    backend: Literal["mlx", "torch", "numpy"] = "mlx"
    """Framework of the tensors when the dtype names none: "float32", float, np.float32."""

    def __post_init__(self) -> None:
        if type(self.pool_size_mb) is not int or self.pool_size_mb < 1:
            raise ConfigError(f"pool_size_mb must be a positive number of MiB, got {self.pool_size_mb!r}")
        if self.cache_size_mb is not None and not 0 <= self.cache_size_mb <= self.pool_size_mb:
            raise ConfigError(
                f"cache_size_mb must be between 0 and pool_size_mb={self.pool_size_mb}, got {self.cache_size_mb!r}"
            )
        if self.backend not in ("mlx", "torch", "numpy"):
            raise ConfigError(f"backend must be 'mlx', 'torch' or 'numpy', got {self.backend!r}")
        if self.budget is not None:
            budget = MemoryBudget.of(self.budget)
            object.__setattr__(self, "budget", budget)
            if self.pool_size_mb * _MIB > budget.capacity:
                raise ConfigError(
                    f"a pool of {self.pool_size_mb} MiB does not fit into a budget of "
                    f"{format_bytes(budget.capacity)}; make the pool smaller, or the budget larger"
                )


class UnifiedMemoryManager:
    """Tensors of zeros from a pool, charged to a budget until they are gone, and a cache of tensors by name.

        manager = UnifiedMemoryManager(MemoryConfig(pool_size_mb=512))
        manager = UnifiedMemoryManager(pool_size_mb=512)

    NumPy arrays and torch tensors lie in pooled buffers: their memory is reused when the last view of them is gone.
    MLX arrays come from MLX's own pool, which is made as large as this one while the manager lives. All are a standing
    charge on the budget: they do not wait for batches in flight, but batches wait for them.

    A tensor that does not fit first evicts cached tensors, the least recently used ones first; then `PoolFullError` is
    raised. Thread-safe. `close` empties the cache and the pool; tensors in use stay valid, and are charged no more.
    """

    def __init__(self, config: MemoryConfig | None = None, **overrides: Any) -> None:
        self.config = config = configured(MemoryConfig, config, overrides)
        self._limit = config.pool_size_mb * _MIB
        self.budget = MemoryBudget.of(self._limit if config.budget is None else config.budget)
        cached = self._limit // 2 if config.cache_size_mb is None else config.cache_size_mb * _MIB
        self._cache: LRUCache[Any] = LRUCache(cached)
        self._lock = renewed(threading.RLock())
        kept = self._limit if config.enable_pooling else 0
        self._pool = BufferPool(kept, budget=self.budget, owner=f"tensor pool {next(_numbers)}")
        self._ledger = Ledger(self.budget, "tensors", on_end=self._pool.close)
        self._mlx: MlxPool | None = None
        self._foreign: dict[Hashable, int] = {}
        """Cached tensors that were allocated elsewhere, and their bytes."""
        self._allocated = self._reused = self._peak = 0
        self._closed = False
        weakref.finalize(self, _forget, self._ledger, self.budget).atexit = False

    @property
    def limit(self) -> int:
        """Bytes for tensors: the pool's size, or less while the budget is lowered."""
        return min(self._limit, self.budget.limit)

    def allocate_tensor(self, shape: int | Sequence[int], dtype: object = "float32") -> Any:
        """A tensor of zeros. A dtype of a framework (`mx.float32`, `torch.int64`) selects the framework; a name and a
        dtype of NumPy or Python select `config.backend`."""
        sizes = _sizes(shape)
        allocator = self._allocator(dtype)
        kind = allocator.dtype(dtype)
        nbytes = math.prod(sizes) * allocator.itemsize(kind)
        needed = size_class(nbytes) if allocator.pooled and self.config.enable_pooling else nbytes
        with self._lock:
            self._check_open()
            if not self._make_room(needed):
                raise PoolFullError(
                    f"a tensor of {kind} and shape {sizes} takes {format_bytes(needed)}; tensors in use have "
                    f"{format_bytes(self._in_use)} of {format_bytes(self.limit)}; drop some, make it smaller, or "
                    "raise pool_size_mb"
                )
            self._allocated += 1
            tensor = self._allocate(allocator, sizes, kind, nbytes, needed)
            self._settle()
            return tensor

    def cache_tensor(self, name: Hashable, tensor: Any) -> bool:
        """Keep a tensor by name, in place of an older one; whether there was room for it.

        A tensor that was allocated elsewhere is charged while it is cached.
        """
        nbytes = _nbytes(name, tensor)
        with self._lock:
            self._check_open()
            self.release(name)
            foreign = 0 if self._ledger.knows(tensor) else nbytes
            if not self._make_room(foreign) or not self._cache.put(name, tensor, nbytes):
                return False
            if foreign:
                self._foreign[name] = foreign
            self._settle()
            return True

    def get_tensor(self, name: Hashable) -> Any:
        """The cached tensor of that name, or None."""
        return self._cache.get(name)

    def get_or_build(self, name: Hashable, build: Callable[[], Any]) -> Any:
        """The cached tensor; made by `build` if it is missing, and kept if there is room."""
        tensor = self._cache.get(name)
        if tensor is not None:
            return tensor
        with self._cache.building(name):
            tensor = self._cache.peek(name)
            if tensor is None:
                tensor = build()
                self.cache_tensor(name, tensor)
        return tensor

    def release(self, name: Hashable) -> bool:
        """Remove a cached tensor; whether there was one."""
        found = self._cache.discard(name)
        self._settle()
        return found

    def clear_cache(self) -> None:
        """Remove all cached tensors."""
        self._cache.clear()
        self._settle()

    def get_statistics(self) -> dict[str, Any]:
        """Counters and sizes in bytes, as plain values."""
        with self._lock:
            self._settle()
            cache, pool = self._cache.stats(), self._pool.stats()
            return {
                "allocated": self._allocated,
                "reused": pool.reused + self._reused,
                "in_use": len(self._ledger),
                "in_use_bytes": self._in_use,
                "peak_bytes": self._peak,
                "cached": cache.items,
                "cached_bytes": cache.nbytes,
                "cache_limit_bytes": cache.max_bytes,
                "hits": cache.hits,
                "misses": cache.misses,
                "evictions": cache.evicted,
                "pool_bytes": pool.free_bytes,
                "limit_bytes": self.limit,
                "mlx": self._mlx.figures() if self._mlx is not None else None,
            }

    def close(self) -> None:
        """Empty the cache and the pool; idempotent."""
        with self._lock:
            self._closed = True
            self.clear_cache()
            self._pool.close()
            if self._mlx is not None:
                self._mlx.close()
                self._mlx = None
        self._ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        used = format_bytes(self._in_use)
        return f"UnifiedMemoryManager({used} in use of {format_bytes(self.limit)}, {len(self._cache)} cached)"

    @property
    def _in_use(self) -> int:
        return self._ledger.nbytes + sum(self._foreign.values())

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this memory manager is closed; make another one")

    def _allocator(self, dtype: object) -> Backend:
        given = framework_of(dtype)
        unified = self.config.enable_unified_memory
        if given == "mlx" and not unified:
            raise ConfigError(
                f"arrays of {dtype} lie in unified memory, and enable_unified_memory=False; allow it, or give a dtype "
                "of torch or NumPy"
            )
        if given in ("mlx", "torch"):
            return get_backend(given)
        return get_backend("numpy" if self.config.backend == "mlx" and not unified else self.config.backend)

    def _make_room(self, needed: int) -> bool:
        """Evict cached tensors if that makes room; whether there is any."""
        self._settle()
        if self._in_use + needed - self.limit > self._cache.nbytes:
            return False
        while self._in_use + needed > self.limit and self._cache.trim(self._cache.nbytes - 1):
            self._settle()
        return self._in_use + needed <= self.limit

    def _allocate(self, allocator: Backend, shape: tuple[int, ...], dtype: Any, nbytes: int, needed: int) -> Any:
        if not allocator.pooled:
            return self._allocate_mlx(allocator, shape, dtype, nbytes)
        if self.config.enable_pooling:
            memory = self._pool.acquire(nbytes).array()
            owner = memory.base  # lives exactly as long as any view of the memory
        else:
            owner = np.empty(nbytes + ALIGNMENT, np.uint8)
            start = -owner.ctypes.data % ALIGNMENT
            memory = owner[start : start + nbytes]
        tensor = allocator.zeros(memory, shape, dtype)
        self._ledger.add(owner, needed, address=memory.ctypes.data)
        # Free buffers of other sizes count too.
        if self._in_use + self._pool.stats().free_bytes > self.limit:
            self._pool.trim(max(0, self.limit - self._in_use))
        return tensor

    def _allocate_mlx(self, allocator: Backend, shape: tuple[int, ...], dtype: Any, nbytes: int) -> Any:
        if self._mlx is None:
            self._mlx = MlxPool(self._limit if self.config.enable_pooling else None)
        before = self._mlx.figures()["cached"]
        tensor = allocator.zeros(np.zeros(0, np.uint8), shape, dtype)
        self._reused += bool(nbytes) and before - self._mlx.figures()["cached"] >= nbytes
        self._ledger.add(tensor, nbytes)
        return tensor

    def _settle(self) -> None:
        """Release the charges of tensors that are gone."""
        with self._lock:
            self._ledger.settle()
            self._foreign = {name: nbytes for name, nbytes in self._foreign.items() if name in self._cache}
            self.budget.hold("tensors", sum(self._foreign.values()), by=(self._ledger, "foreign"))
            self._peak = max(self._peak, self._in_use)


def _forget(ledger: Ledger, budget: MemoryBudget) -> None:
    """End of a manager that was not closed."""
    budget.hold("tensors", 0, by=(ledger, "foreign"))
    ledger.forget()


def _sizes(shape: int | Sequence[int]) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(size) for size in (shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        raise ConfigError(f"a shape is a tuple of whole numbers, got {shape!r}") from None
    if any(size < 0 for size in sizes):
        raise ConfigError(f"the sizes of a shape cannot be negative, got {shape!r}")
    return sizes


def _nbytes(name: Hashable, tensor: Any) -> int:
    if not is_array(tensor):
        raise ConfigError(f"{name!r} must be a tensor of MLX, torch or NumPy, got {type(tensor).__name__}")
    return int(tensor.nbytes)
