"""Batches as MLX arrays: one copy, into the memory that MLX's CPU and GPU share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import Device, exactly
from penstock.errors import ConfigError

__all__ = ["MlxBackend", "make"]

_TAKEN = frozenset({np.dtype(np.int32), np.dtype(np.float32)})


class MlxBackend:
    """MLX: arrays belong to no device, operations do; so naming one changes nothing."""

    name = "mlx"
    integer: np.dtype[Any] = np.dtype(np.int32)

    def __init__(self) -> None:
        self._mx: Any = require("mlx.core", "mlx")

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Any:
        if device is None and array.dtype in _TAKEN and _lies_forwards(array):
            return self._mx.array(array)  # as every array of a batch is that was made for this
        # MLX would make float32 of float64 by rounding.
        dtype = np.dtype(np.float32) if array.dtype.kind == "f" and array.itemsize == 8 else array.dtype
        plain = np.require(exactly(array, dtype.newbyteorder("=")), requirements=["C", "A"])  # it refuses reversed ones
        return self.to(self._mx.array(plain), device)

    def converter(self, arrays: Iterable[npt.NDArray[Any]]) -> Callable[[npt.NDArray[Any]], Any]:
        """What takes parts of these arrays, which lie forwards; looked at once instead of at each part."""
        plain: Callable[[npt.NDArray[Any]], Any] = self._mx.array
        return plain if all(array.dtype in _TAKEN and array.flags.carray for array in arrays) else self.from_numpy

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        # NumPy has no bfloat16; float32 holds each of its values.
        return np.array(array.astype(self._mx.float32) if array.dtype == self._mx.bfloat16 else array, copy=None)

    def to(self, array: Any, device: Device, *, non_blocking: bool = False) -> Any:
        name = getattr(getattr(device, "type", device), "name", device)  # mx.cpu, mx.Device(mx.cpu), "cpu"
        if name not in (None, "cpu", "gpu"):
            raise ConfigError(
                f"MLX arrays are in memory that 'cpu' and 'gpu' share, got device {device!r}; leave it out, and choose "
                f"where to compute with mlx.core.set_default_device"
            )
        return array

    def resolve_device(self, device: Device) -> Device:
        return device

    def pending_copy(self, arrays: Sequence[Any]) -> None:
        return None

    def pin_memory(self, array: Any) -> Any:
        return array

    def arange(self, count: int, *, like: Any) -> Any:
        return self._mx.arange(count)

    def additive(self, allowed: Any, dtype: str) -> Any:
        kind = getattr(self._mx, dtype)
        return self._mx.where(allowed, self._mx.array(0, kind), self._mx.array(self._mx.finfo(kind).min, kind))


def _lies_forwards(array: npt.NDArray[Any]) -> bool:
    """Whether an array is in one piece, or a part of such a one: MLX copies those, and no others, as they are."""
    flags = array.flags
    return bool(flags.carray or (flags.aligned and array.ndim == 2 and array.strides[0] >= array.strides[1] > 0))


def make() -> MlxBackend:
    return MlxBackend()
