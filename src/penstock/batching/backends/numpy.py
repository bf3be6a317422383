"""NumPy backend: batches as they were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends.base import NUMERIC_KINDS, BaseBackend, Device, dtype_name
from penstock.errors import ConfigError

__all__ = ["NumpyBackend", "make"]


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


def make() -> NumpyBackend:
    return NumpyBackend()
