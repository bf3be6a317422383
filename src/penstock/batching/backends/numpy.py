"""NumPy backend: batches as they were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends.base import NUMERIC_KINDS, Array, BaseBackend, Device, dtype_name
from penstock.batching.backends.operations import CACHED, ArrayOperations
from penstock.errors import ConfigError


class NumpyBackend(BaseBackend):
    """NumPy: arrays in main memory."""

    name = "numpy"
    integer: np.dtype[Any] = np.dtype(np.int64)
    pooled = True

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> npt.NDArray[Any]:
        return self.to(np.asarray(array), device)

    def to_numpy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def to(self, array: npt.NDArray[Any], device: Device, *, non_blocking: bool = False) -> npt.NDArray[Any]:
        if device is not None and str(device) != "cpu":
            raise ConfigError(f"NumPy arrays are on 'cpu' only, got device {device!r}; choose backend='torch' or 'jax'")
        return array

    def arange(self, count: int, *, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.arange(count)

    def additive(self, allowed: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        return np.where(allowed, np.zeros((), kind), np.array(np.finfo(kind).min, kind))

    def dtype(self, given: object) -> np.dtype[Any]:
        try:
            found = np.dtype(given if isinstance(given, (np.dtype, type)) else dtype_name(given))
        except TypeError:
            raise ConfigError(f"NumPy has no dtype {given!r}; choose another, or backend='mlx' or 'torch'") from None
        if found.kind not in NUMERIC_KINDS:
            raise ConfigError(f"dtype must be of numbers or bools, got {found}")
        return found

    def zeros(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = np.ndarray(tuple(shape), dtype, memory)
        array.fill(0)
        return array

    def operations(self, array: Any, *, gradients: bool = False) -> NumpyOperations:
        return NumpyOperations()


class NumpyOperations(ArrayOperations):
    """NumPy: computes in float64."""

    name = "numpy"
    xp: Any = np
    at_once = CACHED
    on_host = check = True

    def floats(self, values: Any, *, gradients: bool = False) -> Array:
        array = np.asarray(values)
        return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)

    def bools(self, values: Any) -> Array:
        return np.asarray(values).astype(bool, copy=False)

    def wide(self, array: Array) -> Array:
        return array.astype(np.float64, copy=False)

    def like(self, array: Array, other: Array) -> Array:
        return array.astype(other.dtype, copy=False)

    def put(self, array: npt.NDArray[Any]) -> Array:
        return array

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return np.bincount(index, array, count)

    def scatter(self, array: Array, index: Array, size: int) -> Array:
        found = np.zeros(size, array.dtype)
        found[index] = array
        return found

    def stable_order(self, array: Array) -> Array:
        return np.argsort(array, kind="stable")

    def _empty(self, shape: tuple[int, int], like: Array) -> Array:
        return np.empty(shape, like.dtype)


def make() -> NumpyBackend:
    return NumpyBackend()
