"""torch backend: tensors that share the memory of NumPy arrays, and the order of device copies between streams.

A stream of a device runs its work in order; two streams know nothing of each other. A tensor that one thread copies on
its stream may be read on another stream only after the copy, and its memory reused only after that read:

    copying thread      copy ... copy, event
    using thread        its current stream waits for the event; every tensor is recorded on that stream
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import BaseBackend, Device

__all__ = ["StreamCopy", "TorchBackend", "make", "resolve_device", "stream_module"]

_NO_STREAMS = frozenset({"cpu", "meta"})


class StreamCopy:
    """Copies on the current stream of this thread, which may still be in progress."""

    def __init__(self, module: Any, tensors: Sequence[Any]) -> None:
        self._module, self._tensors = module, tuple(tensors)
        self._device = self._tensors[0].device
        self._stream = module.current_stream(self._device)
        self._event = self._stream.record_event()

    def wait(self) -> None:
        """Let the current stream of the calling thread use the tensors; the thread itself does not wait.

        The stream waits for the copies, and the allocator reuses the tensors' memory only after the stream's work.
        """
        stream = self._module.current_stream(self._device)
        if stream == self._stream:
            return  # in order already, and the memory belongs to that stream
        stream.wait_event(self._event)
        for tensor in self._tensors:
            tensor.record_stream(stream)


def resolve_device(torch: Any, device: Any) -> Any:
    """Device with its number: "cuda" is the current device of the calling thread; each thread has its own."""
    if device is None:
        return None
    found = torch.device(device)
    module = stream_module(torch, found)
    if module is None or found.index is not None:
        return found
    return torch.device(found.type, module.current_device())


def stream_module(torch: Any, device: Any) -> Any | None:
    """Module with the streams of a device, such as `torch.cuda` or `torch.xpu`; None if it has none."""
    module = None if device.type in _NO_STREAMS else getattr(torch, device.type, None)
    return module if hasattr(module, "current_stream") and hasattr(module, "current_device") else None


class TorchBackend(BaseBackend):
    """torch: tensors that share the memory of arrays; `device` is anything `torch.Tensor.to` takes."""

    name = "torch"
    integer: np.dtype[Any] = np.dtype(np.int64)
    pooled = True

    def __init__(self) -> None:
        self._torch: Any = require("torch", "torch")

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Any:
        if not (array.flags.carray and array.dtype.isnative):
            # torch refuses reversed arrays and foreign byte orders, and warns of read-only arrays.
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
        # Main memory is read without looking at streams, so a copy to it must block.
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

    def dtype(self, given: object) -> Any:
        return self._named_dtype(self._torch, self._torch.dtype, given)

    def zeros(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Any:
        count = math.prod(shape) * self.itemsize(dtype)
        if not count:  # torch does not view an empty tensor in another dtype
            return self._torch.zeros(tuple(shape), dtype=dtype)
        memory[:count] = 0
        return self._torch.from_numpy(memory[:count]).view(dtype).view(tuple(shape))

    def _can_pin(self) -> bool:
        """True if a device reads main memory by itself: torch refuses to pin without one."""
        accelerator = getattr(self._torch, "accelerator", None)  # from torch 2.6
        if accelerator is None:
            return bool(self._torch.cuda.is_available())
        # Apple's GPU reads main memory as it is.
        return bool(accelerator.is_available()) and accelerator.current_accelerator().type != "mps"


def make() -> TorchBackend:
    return TorchBackend()
