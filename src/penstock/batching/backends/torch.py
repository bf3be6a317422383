"""torch backend: tensors that share the memory of NumPy arrays; see `torch_device` for copies to a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import BaseBackend, Device
from penstock.batching.backends.torch_device import (
    PinnedMemory,
    SentBatches,
    StreamCopy,
    TorchDeviceFields,
    resolve_device,
    stream_module,
)

if TYPE_CHECKING:
    from penstock.batching.collate import CompactBatch

__all__ = ["TorchBackend", "make"]


class TorchBackend(BaseBackend):
    """torch: tensors that share the memory of arrays; `device` is anything `torch.Tensor.to` takes."""

    name = "torch"
    integer: np.dtype[Any] = np.dtype(np.int64)
    pooled: bool | None = True

    def __init__(self) -> None:
        self._torch: Any = require("torch", "torch")
        self._pinned = PinnedMemory(self._torch)
        self._streams: dict[Any, Any] = {}

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Any:
        if not (array.flags.carray and array.dtype.isnative):
            # torch refuses reversed arrays and foreign byte orders, and warns of read-only arrays.
            native = np.asarray(array, array.dtype.newbyteorder("="))
            array = np.require(native, requirements=["C", "A", "W"])
        return self.to(self._torch.from_numpy(array), device)

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = array.detach().cpu().numpy()
        return found

    def to(self, array: Any, device: Device, *, non_blocking: bool = False) -> Any:
        """Tensor on a device. A copy to a GPU is through pinned memory and asynchronous; one to the CPU blocks."""
        if device is None:
            return array
        target = resolve_device(self._torch, device)
        if array.device.type != "cpu" or stream_module(self._torch, target) is None:
            # Main memory is read without looking at streams, so a copy to it must block.
            return array.to(target, non_blocking=non_blocking and target.type != "cpu")
        staged = self._pinned.copy_of(array)
        return array.to(target) if staged is None else staged.to(target, non_blocking=True)

    def resolve_device(self, device: Device) -> Device:
        return None if device is None else resolve_device(self._torch, device)

    def copy_stream(self, device: Device) -> AbstractContextManager[object]:
        module = stream_module(self._torch, device)
        if module is None:
            return nullcontext()
        if device not in self._streams:
            self._streams[device] = module.Stream(device)
        entered: AbstractContextManager[object] = module.stream(self._streams[device])
        return entered

    def pending_copy(self, arrays: Sequence[Any]) -> StreamCopy | None:
        module = stream_module(self._torch, arrays[0].device) if arrays else None
        return None if module is None else StreamCopy(module, arrays[0].device, arrays)

    def compact_to(self, compact: CompactBatch, device: Device) -> TorchDeviceFields | None:
        whole = compact.whole
        if device in whole.sent:
            return TorchDeviceFields(self, compact, whole.sent[device])
        target = self.resolve_device(device)
        module = None if target is None else stream_module(self._torch, target)
        if module is None:
            return None
        if target not in whole.sent:
            with self.copy_stream(target):
                whole.sent[target] = SentBatches(self._torch, module, whole, target, self._pinned)
        return TorchDeviceFields(self, compact, whole.sent[target])

    def pin_memory(self, array: Any) -> Any:
        if not self._pinned.available or array.device.type != "cpu":
            return array
        copy = self._pinned.copy_of(array)
        return array if copy is None else copy

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


def make() -> TorchBackend:
    return TorchBackend()
