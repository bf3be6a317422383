"""Tensors from a pool, and the ones worth keeping, inside the same budget as the engine.

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
import numpy.typing as npt

from penstock.batching.backends.base import ALIGNMENT, Backend
from penstock.batching.backends.lookup import framework_of, get_backend, is_array
from penstock.batching.backends.mlx import MlxPool
from penstock.batching.options import configured
from penstock.errors import ConfigError, PoolFullError
from penstock.memory.budget import MemoryBudget, format_bytes
from penstock.memory.cost_cache import CostAwareCache
from penstock.memory.ledger import Ledger
from penstock.memory.pool import BufferPool, size_class

__all__ = ["MemoryConfig", "UnifiedMemoryManager"]

_MIB = 1 << 20
_numbers = itertools.count(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryConfig:
    """How much memory tensors may take, and of which framework they are."""

    pool_size_mb: int = 512
    """MiB for tensors in use and memory kept for the next ones, together."""
    enable_pooling: bool = True
    """Whether the memory of tensors that are gone is kept for others."""
    enable_unified_memory: bool = True
    """Whether MLX arrays may be made, which lie in memory that its CPU and GPU share. Without it a type that belongs
    to no framework makes a NumPy array, and one of MLX is an error."""
    cache_size_mb: int | None = None
    """MiB for tensors kept by name; half of the pool unless said otherwise."""
    budget: MemoryBudget | None = None
    """The budget of the engine, shared: what tensors take is not there for batches. One of the pool's size if None."""
    backend: Literal["mlx", "torch", "numpy"] = "mlx"
    """Whose arrays they are when the type does not tell: "float32", float, np.float32."""

    def __post_init__(self) -> None:
        for name in ("pool_size_mb", "cache_size_mb"):
            value = getattr(self, name)
            if name == "cache_size_mb" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < (name == "pool_size_mb"):
                raise ConfigError(f"{name} must be a positive number of MiB, got {value!r}")
        if self.cache_size_mb is not None and self.cache_size_mb > self.pool_size_mb:
            raise ConfigError(
                f"a cache of {self.cache_size_mb} MiB does not fit into a pool of {self.pool_size_mb} MiB"
            )
        if self.backend not in ("mlx", "torch", "numpy"):
            raise ConfigError(f"backend must be 'mlx', 'torch' or 'numpy', got {self.backend!r}")
        if self.budget is not None and self.pool_size_mb * _MIB > self.budget.capacity:
            raise ConfigError(
                f"a pool of {self.pool_size_mb} MiB does not fit into a budget of "
                f"{format_bytes(self.budget.capacity)}; make the pool smaller, or the budget larger"
            )


class UnifiedMemoryManager:
    """Tensors of zeros from a pool, counted until they are gone, and a cache of those worth keeping.

        manager = UnifiedMemoryManager(MemoryConfig(pool_size_mb=512))
        manager = UnifiedMemoryManager(pool_size_mb=512)

    Arrays of NumPy and tensors of torch lie in buffers of ours: their memory is used again when the last view of them
    is gone. Arrays of MLX come from its own pool, which is made as large as ours while the manager lives; one counts as
    gone when the array itself is, whatever shares its memory. All are a standing charge on the budget: they do not wait
    for batches in flight, but these wait for them.

    What does not fit first drives out what is only cached, then is a `PoolFullError`. Any thread may do anything.
    `close` forgets the cache and gives everything back; tensors in use stay valid, and are counted no more.
    """

    def __init__(self, config: MemoryConfig | None = None, **overrides: Any) -> None:
        self.config = config = configured(MemoryConfig, config, overrides)
        self._limit = config.pool_size_mb * _MIB
        self.budget = config.budget if config.budget is not None else MemoryBudget(self._limit)
        cached = self._limit // 2 if config.cache_size_mb is None else config.cache_size_mb * _MIB
        self._cache: CostAwareCache[Any] = CostAwareCache(cached)
        self._lock = threading.RLock()
        kept = self._limit if config.enable_pooling else 0
        self._pool = BufferPool(kept, budget=self.budget, owner=f"tensor pool {next(_numbers)}")
        self._ledger = Ledger(self.budget, "tensors", at_the_end=self._pool.close)
        self._mlx: MlxPool | None = None
        self._foreign: dict[Hashable, int] = {}
        """Cached tensors that were made elsewhere, and their bytes."""
        self._allocated = self._reused = 0
        self._closed = False
        weakref.finalize(self, self._ledger.forget).atexit = False

    @property
    def limit(self) -> int:
        """Bytes that tensors may take: the pool's size, or less while the budget is lowered."""
        return min(self._limit, self.budget.limit)

    def allocate_tensor(self, shape: int | Sequence[int], dtype: object = "float32") -> Any:
        """A tensor of zeros. The type says whose it is (`mx.float32`, `torch.int64`); for a name, a type of NumPy or of
        Python, that is `config.backend`."""
        sizes = _sizes(shape)
        allocator = self._allocator(dtype)
        kind = allocator.dtype(dtype)
        nbytes = math.prod(sizes) * allocator.itemsize(kind)
        needed = size_class(nbytes) if allocator.pooled and self.config.enable_pooling else nbytes
        with self._lock:
            if self._closed:
                raise ConfigError("this memory manager is closed; make another one")
            self._make_room(needed, sizes, kind)
            tensor = self._allocate(allocator, sizes, kind, nbytes, needed)
            self._allocated += 1
            return tensor

    def cache_tensor(self, name: Hashable, tensor: Any, cost_seconds: float | None = None) -> bool:
        """Keep a tensor by name while it is worth its bytes; whether it is kept.

        `cost_seconds`: what making it again would take. It need not have been allocated here; then it counts while it
        is kept, and is not kept where it would be more than the pool has room for.
        """
        nbytes = _nbytes(name, tensor)
        with self._lock:
            if self._closed:
                raise ConfigError("this memory manager is closed; make another one")
            if not self._ledger.knows(tensor) and self._over(nbytes) > self._cache.nbytes:
                self.release(name)  # no need to drive out anything: that would not be enough
                return False
            kept = self._cache.put(name, tensor, nbytes, cost_seconds)
            self._count_cached(name, tensor, nbytes)
            return kept and name in self._cache

    def get_tensor(self, name: Hashable) -> Any:
        """The cached tensor of that name, or None."""
        return self._cache.get(name)

    def get_or_build(self, name: Hashable, build: Callable[[], Any]) -> Any:
        """The cached tensor; made by `build` if it is not there, and kept if it is worth it by the time that took."""
        tensor = self._cache.get_or_build(name, build, lambda made: _nbytes(name, made))
        with self._lock:
            if self._cache.peek(name) is tensor:
                self._count_cached(name, tensor, _nbytes(name, tensor))
            self._settle()
        return tensor

    def release(self, name: Hashable) -> bool:
        """Forget a cached tensor; whether there was one."""
        found = self._cache.discard(name)
        self._settle()
        return found

    def clear_cache(self) -> None:
        """Forget all cached tensors."""
        self._cache.clear()
        self._settle()

    def get_statistics(self) -> dict[str, Any]:
        """What was done so far and what is held now, as plain values; sizes in bytes."""
        with self._lock:
            self._settle()
            cache, pool, ledger = self._cache.stats(), self._pool.stats(), self._ledger
            return {
                "allocated": self._allocated,
                "reused": pool.reused + self._reused,
                "in_use": ledger.tensors,
                "in_use_bytes": ledger.nbytes,
                "peak_bytes": ledger.peak,
                "cached": cache.items,
                "cached_bytes": cache.nbytes,
                "cache_limit_bytes": cache.max_bytes,
                "hits": cache.hits,
                "misses": cache.misses,
                "evictions": cache.evicted,
                "saved_seconds": cache.saved_seconds,
                "pool_bytes": pool.free_bytes,
                "limit_bytes": self.limit,
                "mlx": self._mlx.figures() if self._mlx is not None else None,
            }

    def close(self) -> None:
        """Give everything back; idempotent."""
        with self._lock:
            self._closed = True
            self._cache.close()
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
        used = format_bytes(self._ledger.nbytes)
        return f"UnifiedMemoryManager({used} in use of {format_bytes(self.limit)}, {len(self._cache)} cached)"

    def _allocator(self, dtype: object) -> Backend:
        given = framework_of(dtype)
        unified = self.config.enable_unified_memory
        if given == "mlx" and not unified:
            raise ConfigError(
                f"arrays of {dtype} lie in unified memory, which enable_unified_memory=False rules out; allow it, or "
                "give a type of torch or NumPy"
            )
        if given in ("mlx", "torch"):
            return get_backend(given)
        return get_backend("numpy" if self.config.backend == "mlx" and not unified else self.config.backend)

    def _make_room(self, needed: int, shape: tuple[int, ...], dtype: Any) -> None:
        """Drive out what is cached and used by nobody else, if that is what it takes."""
        over = self._over(needed)
        if over > 0 and needed <= self.limit:
            self._cache.trim(max(0, self._cache.nbytes - over))
            if self._over(needed) > 0:
                self._cache.trim()
        if self._over(needed) > 0:
            raise PoolFullError(
                f"a tensor of {dtype} and shape {shape} takes {format_bytes(needed)}; tensors in use have "
                f"{format_bytes(self._ledger.nbytes)} of {format_bytes(self.limit)}; drop some, make it smaller, or "
                "raise pool_size_mb"
            )

    def _over(self, needed: int) -> int:
        self._settle()
        return self._ledger.nbytes + needed - self.limit

    def _allocate(self, allocator: Backend, shape: tuple[int, ...], dtype: Any, nbytes: int, needed: int) -> Any:
        if not allocator.pooled:
            return self._from_mlx(allocator, shape, dtype, nbytes)
        memory, owner = self._memory(nbytes)
        tensor = allocator.zeros(memory, shape, dtype)
        self._ledger.add(owner, needed, address=memory.ctypes.data)
        # Free buffers of other sizes must not add to what is in use until both are more than the pool.
        free = self._pool.stats().free_bytes
        if self._ledger.nbytes + free > self.limit:
            self._pool.trim(max(0, self.limit - self._ledger.nbytes))
        return tensor

    def _memory(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], Any]:
        """Memory, and the object that lives exactly as long as any view of it."""
        if self.config.enable_pooling:
            memory = self._pool.acquire(nbytes).array()
            return memory, memory.base
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + nbytes], raw

    def _from_mlx(self, allocator: Backend, shape: tuple[int, ...], dtype: Any, nbytes: int) -> Any:
        if self._mlx is None:
            self._mlx = MlxPool(self._limit if self.config.enable_pooling else None)
        before = self._mlx.figures()["cached"]
        tensor = allocator.zeros(np.zeros(0, np.uint8), shape, dtype)
        self._reused += bool(nbytes) and before - self._mlx.figures()["cached"] >= nbytes
        self._ledger.add(tensor, nbytes)
        return tensor

    def _count_cached(self, name: Hashable, tensor: Any, nbytes: int) -> None:
        """Count what is cached, if it is not counted yet; or give it up, if there is no room for it beside the tensors
        in use, also in the place of others that are only cached and worth less."""
        self._foreign.pop(name, None)
        self._settle()
        if name not in self._cache or self._ledger.knows(tensor):
            return
        over = self._over(nbytes)
        if 0 < over <= self._cache.nbytes - nbytes:
            self._cache.trim(self._cache.nbytes - over)
            over = self._over(nbytes)
        if over > 0:
            self._cache.discard(name)
        elif name in self._cache:
            self._foreign[name] = nbytes
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            self._foreign = {name: nbytes for name, nbytes in self._foreign.items() if name in self._cache}
            self._ledger.settle(sum(self._foreign.values()))


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
        raise ConfigError(
            f"{name!r} is to be a tensor, got {type(tensor).__name__}; give an array of MLX, torch or NumPy"
        )
    return int(tensor.nbytes)
