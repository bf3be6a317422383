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
from penstock.batching.backends.numpy import NumpyOperations
from penstock.batching.backends.operations import AT_ONCE, CACHED, ArrayOperations

__all__ = ["StreamCopy", "TorchBackend", "TorchOperations", "make", "resolve_device", "stream_module"]

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

    def operations(self, array: Any, *, gradients: bool = False) -> ArrayOperations:
        traced = self._torch.compiler.is_compiling()
        if array.device.type == "cpu" and not gradients and not traced:
            return HostTorchOperations(self._torch)
        return TorchOperations(self, self._torch, array.device, check=array.device.type == "cpu" and not traced)


class HostTorchOperations(NumpyOperations):
    """torch in main memory: NumPy works on the same bytes, several times as fast on small arrays and with masks."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def floats(self, values: Any, *, gradients: bool = False) -> Any:
        return super().floats(self._viewed(values, self._torch.float32))

    def bools(self, values: Any) -> Any:
        return super().bools(self._viewed(values, self._torch.bool))

    def host(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(self._viewed(array, None))

    def give(self, array: Any) -> Any:
        return self._torch.from_numpy(np.require(array, requirements=["C", "W"]))

    def _viewed(self, values: Any, dtype: Any) -> Any:
        if not isinstance(values, self._torch.Tensor):
            return values
        tensor = values.detach().cpu()
        return (tensor if dtype is None or tensor.dtype == self._torch.float64 else tensor.to(dtype)).numpy()


class TorchOperations(ArrayOperations):
    """torch on a device: computes in float64, except on devices without it. The CPU does not wait for the device."""

    name = "torch"

    def __init__(self, backend: TorchBackend, torch: Any, device: Any, *, check: bool) -> None:
        self._backend, self.xp, self._device, self.check = backend, torch, device, check
        self.at_once = CACHED if check else AT_ONCE

    def floats(self, values: Any, *, gradients: bool = False) -> Any:
        tensor = self._tensor(values) if gradients else self._tensor(values).detach()
        return tensor if tensor.dtype == self.xp.float64 else tensor.to(self.xp.float32)

    def bools(self, values: Any) -> Any:
        return self._tensor(values).to(self.xp.bool)

    def wide(self, array: Any) -> Any:
        return array.to(self.xp.float32 if self._device.type == "mps" else self.xp.float64)

    def like(self, array: Any, other: Any) -> Any:
        return array.to(other.dtype)

    def host(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array.detach().cpu() if isinstance(array, self.xp.Tensor) else array)

    def put(self, array: npt.NDArray[Any]) -> Any:
        if self._device.type == "mps" and array.dtype == np.float64:
            array = array.astype(np.float32)
        return self._tensor(self.xp.from_numpy(np.require(array, requirements=["C", "W"])))

    def zeros(self, size: int, like: Any) -> Any:
        return like.new_zeros(size)

    def true(self, shape: tuple[int, ...]) -> Any:
        return self.xp.ones(shape, dtype=self.xp.bool, device=self._device)

    def count_up(self, size: int) -> Any:
        return self.xp.arange(size, device=self._device)

    def segment_sum(self, array: Any, index: Any, count: int) -> Any:
        return array.new_zeros(count).index_add(0, index, array)

    def scatter(self, array: Any, index: Any, size: int) -> Any:
        return array.new_zeros(size).scatter(0, index, array)

    def stable_order(self, array: Any) -> Any:
        return self.xp.argsort(array, stable=True)

    def row_std_mean(self, array: Any, ddof: int) -> tuple[Any, Any] | None:
        std, mean = self.xp.std_mean(array, dim=1, correction=ddof)  # Welford's algorithm, hence exact
        return std, mean

    def running_counts(self, mask: Any) -> Any:
        return mask.cumsum(1)

    def add_at(self, array: Any, where: Any, values: Any, scale: float) -> Any:
        array[where].add_(values, alpha=scale)
        return array

    def suffix_sums(self, array: Any) -> Any:
        return array.flip(1).cumsum(1).flip(1)

    def powers(self, base: float, size: int, like: Any) -> Any:
        places = self.xp.arange(size, dtype=like.dtype, device=self._device)
        return (base ** (places[:, None] - places)).tril()

    def _tensor(self, values: Any) -> Any:
        """Values on this device. From main memory they are copied by way of pinned memory, without a wait."""
        if not isinstance(values, self.xp.Tensor):
            return self.put(np.asarray(values))
        if values.device == self._device:
            return values
        return self._backend.pin_memory(values).to(self._device, non_blocking=self._device.type != "cpu")

    def _empty(self, shape: tuple[int, int], like: Any) -> Any:
        return like.new_empty(shape)


def make() -> TorchBackend:
    return TorchBackend()
