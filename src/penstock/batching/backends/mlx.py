"""MLX backend: one copy, into the memory that MLX's CPU and GPU share; and MLX's own pool of memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock._forks import renewed
from penstock._optional import require
from penstock.batching.backends.base import BaseBackend, Device, dtype_name, exactly
from penstock.batching.backends.operations import FunctionalOperations
from penstock.errors import ConfigError

_TAKEN = frozenset({np.dtype(np.int32), np.dtype(np.float32)})


class MlxBackend(BaseBackend):
    """MLX: operations have a device, arrays do not, so `device` changes nothing."""

    name = "mlx"
    integer: np.dtype[Any] = np.dtype(np.int32)
    pooled = False

    def __init__(self) -> None:
        self._mx: Any = require("mlx.core", "mlx")

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Any:
        if device is None and array.dtype in _TAKEN and _is_forward(array):
            return self._mx.array(array)  # every array of a collated batch
        # MLX rounds float64 to float32 by itself.
        dtype = np.dtype(np.float32) if array.dtype.kind == "f" and array.itemsize == 8 else array.dtype
        plain = np.require(
            exactly(array, dtype.newbyteorder("=")), requirements=["C", "A"]
        )  # MLX refuses reversed arrays
        return self.to(self._mx.array(plain), device)

    def converter(self, arrays: Iterable[npt.NDArray[Any]]) -> Callable[[npt.NDArray[Any]], Any]:
        plain: Callable[[npt.NDArray[Any]], Any] = self._mx.array
        return plain if all(array.dtype in _TAKEN and array.flags.carray for array in arrays) else self.from_numpy

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        # NumPy has no bfloat16; float32 holds each of its values.
        return np.array(array.astype(self._mx.float32) if array.dtype == self._mx.bfloat16 else array, copy=None)

    def to(self, array: Any, device: Device, *, non_blocking: bool = False) -> Any:
        name = getattr(getattr(device, "type", device), "name", device)  # mx.cpu, mx.Device(mx.cpu), "cpu"
        if name not in (None, "cpu", "gpu"):
            raise ConfigError(
                f"MLX arrays are in memory that 'cpu' and 'gpu' share, got device {device!r}; omit device, and choose "
                "the device of computations with mlx.core.set_default_device"
            )
        return array

    def arange(self, count: int, *, like: Any) -> Any:
        return self._mx.arange(count)

    def additive(self, allowed: Any, dtype: str) -> Any:
        kind = getattr(self._mx, dtype)
        return self._mx.where(allowed, self._mx.array(0, kind), self._mx.array(self._mx.finfo(kind).min, kind))

    def dtype(self, given: object) -> Any:
        name = dtype_name(given)
        return self._named_dtype(self._mx, self._mx.Dtype, given, {"bool": "bool_"}.get(name))

    def itemsize(self, dtype: Any) -> int:
        return int(dtype.size)

    def zeros(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Any:
        """Array of zeros in MLX's own memory: it takes no other."""
        array = self._mx.zeros(tuple(shape), dtype)
        self._mx.eval(array)  # another thread could not use a lazy array, and it would take its memory later
        return array

    def operations(self, array: Any, *, gradients: bool = False) -> MlxOperations:
        return MlxOperations(self._mx)


class MlxOperations(FunctionalOperations):
    """MLX: computes in float32, which is all that its GPUs have."""

    name = "mlx"
    check = True  # memory is shared with the CPU

    def __init__(self, mx: Any) -> None:
        self.xp = mx

    def floats(self, values: Any, *, gradients: bool = False) -> Any:
        array = self._array(values).astype(self.xp.float32)
        return array if gradients else self.xp.stop_gradient(array)

    def bools(self, values: Any) -> Any:
        return self._array(values).astype(self.xp.bool_)

    def wide(self, array: Any) -> Any:
        return array

    def host(self, array: Any) -> npt.NDArray[Any]:
        return np.array(array)

    def put(self, array: npt.NDArray[Any]) -> Any:
        return self.xp.array(array.astype(np.int32) if array.dtype == np.int64 else array)

    def true(self, shape: tuple[int, ...]) -> Any:
        return self.xp.ones(shape, dtype=self.xp.bool_)

    def _array(self, values: Any) -> Any:
        return values if isinstance(values, self.xp.array) else self.xp.array(np.asarray(values))


def _is_forward(array: npt.NDArray[Any]) -> bool:
    """True for a contiguous array, or rows of one: MLX copies those as they are, and no others."""
    flags = array.flags
    return bool(flags.carray or (flags.aligned and array.ndim == 2 and array.strides[0] >= array.strides[1] > 0))


class MlxPool:
    """Limit of the memory that MLX keeps for its next arrays; `nbytes=None` only reads figures.

    MLX has one limit for the process. The largest one that a living holder wants is in force; after the last holder is
    gone, the limit is what it was before the first.
    """

    # Reentrant: a holder may be collected on a thread that is in here.
    _lock = renewed(threading.RLock())
    _wanted: ClassVar[dict[int, int]] = {}
    _before: ClassVar[int | None] = None

    def __init__(self, nbytes: int | None) -> None:
        self._mx: Any = require("mlx.core", "mlx")
        self._key = id(self)
        self._close = weakref.finalize(self, _give_back, self._mx, self._key)
        self._close.atexit = False
        if nbytes is not None:
            with MlxPool._lock:
                if MlxPool._before is None:
                    MlxPool._before = self._mx.set_cache_limit(nbytes)
                MlxPool._wanted[self._key] = nbytes
                self._mx.set_cache_limit(max(MlxPool._wanted.values()))

    def close(self) -> None:
        """Give up the limit; idempotent."""
        self._close()

    def figures(self) -> dict[str, int]:
        """Bytes in arrays, and bytes kept for the next arrays, of the whole process."""
        return {"active": int(self._mx.get_active_memory()), "cached": int(self._mx.get_cache_memory())}


def _give_back(mx: Any, key: int) -> None:
    with MlxPool._lock:
        if MlxPool._wanted.pop(key, None) is None:
            return
        if MlxPool._wanted:
            mx.set_cache_limit(max(MlxPool._wanted.values()))
        elif MlxPool._before is not None:
            mx.set_cache_limit(MlxPool._before)
            MlxPool._before = None


def make() -> MlxBackend:
    return MlxBackend()
