"""Batches as torch tensors: the memory of the NumPy arrays they were made in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import Device
from penstock.batching.backends.streams import StreamCopy, resolve_device, stream_module

__all__ = ["TorchBackend", "make"]


class TorchBackend:
    """torch: tensors that share the arrays' memory; `device` is whatever `torch.Tensor.to` takes."""

    name = "torch"
    integer: np.dtype[Any] = np.dtype(np.int64)

    def __init__(self) -> None:
        self._torch: Any = require("torch", "torch")

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Any:
        if not (array.flags.carray and array.dtype.isnative):
            # Without a copy torch refuses reversed arrays and those of foreign byte order, and warns of read-only ones.
            native = np.asarray(array, array.dtype.newbyteorder("="))
            array = np.require(native, requirements=["C", "A", "W"])
        tensor = self._torch.from_numpy(array)
        return tensor if device is None else tensor.to(device)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = array.detach().cpu().numpy()
        return found

    def to(self, array: Any, device: Device, *, non_blocking: bool = False) -> Any:
        if device is None:
            return array
        # What comes to main memory is read without looking at streams: it would be read before it is there.
        fetched = non_blocking and self._torch.device(device).type == "cpu"
        return array.to(device, non_blocking=non_blocking and not fetched)

    def resolve_device(self, device: Device) -> Device:
        return resolve_device(self._torch, device)

    def pending_copy(self, arrays: Sequence[Any]) -> StreamCopy | None:
        module = stream_module(self._torch, arrays[0].device) if arrays else None
        return None if module is None else StreamCopy(module, arrays)

    def pin_memory(self, array: Any) -> Any:
        return array.pin_memory() if self._can_pin() and array.device.type == "cpu" else array

    def arange(self, count: int, *, like: Any) -> Any:
        return self._torch.arange(count, device=like.device)

    def additive(self, allowed: Any, dtype: str) -> Any:
        kind = getattr(self._torch, dtype)
        zeros = self._torch.zeros(allowed.shape, dtype=kind, device=allowed.device)
        return zeros.masked_fill_(~allowed, self._torch.finfo(kind).min)

    def _can_pin(self) -> bool:
        """Whether there is a device that fetches by itself: torch refuses to pin without one."""
        accelerator = getattr(self._torch, "accelerator", None)  # from torch 2.6
        if accelerator is None:
            return bool(self._torch.cuda.is_available())
        # Apple's GPU reads main memory as it is.
        return bool(accelerator.is_available()) and accelerator.current_accelerator().type != "mps"


def make() -> TorchBackend:
    return TorchBackend()
