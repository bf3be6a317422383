"""Batches as NumPy arrays: handed over as they were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.backends.base import Device
from penstock.errors import ConfigError

__all__ = ["NumpyBackend", "make"]


class NumpyBackend:
    """NumPy: arrays in main memory, nothing to convert."""

    name = "numpy"
    integer: np.dtype[Any] = np.dtype(np.int64)

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> npt.NDArray[Any]:
        return self.to(np.asarray(array), device)

    def to_numpy(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def to(self, array: npt.NDArray[Any], device: Device, *, non_blocking: bool = False) -> npt.NDArray[Any]:
        if device is not None and str(device) != "cpu":
            raise ConfigError(f"NumPy arrays are on 'cpu' only, got device {device!r}; choose backend='torch' or 'jax'")
        return array

    def resolve_device(self, device: Device) -> Device:
        return device

    def pending_copy(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        return None

    def pin_memory(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array

    def arange(self, count: int, *, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.arange(count)

    def additive(self, allowed: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
        kind = np.dtype(dtype)
        return np.where(allowed, np.zeros((), kind), np.array(np.finfo(kind).min, kind))


def make() -> NumpyBackend:
    return NumpyBackend()
