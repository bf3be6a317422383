"""torch backend: tensors that share the memory of NumPy arrays; see `torch_device` for copies to a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import BaseBackend, Device
from penstock.batching.backends.numpy import NumpyOperations
from penstock.batching.backends.operations import AT_ONCE, CACHED, ArrayConversions, ArrayOperations, Operation
from penstock.batching.backends.torch_device import (
    DeviceBatchGroup,
    PinnedMemory,
    StreamCopy,
    TorchDeviceFields,
    resolve_device,
    stream_module,
)

if TYPE_CHECKING:
    from penstock.batching.collate import CompactBatch


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
        tensor = self._torch.from_numpy(array)
        return tensor if device is None else self.to(tensor, device)

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
        return None if module is None else StreamCopy(self._torch, module, arrays[0].device, arrays)

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
                whole.sent[target] = DeviceBatchGroup(self._torch, module, whole, target, self._pinned)
        return TorchDeviceFields(self, compact, whole.sent[target])

    def page_locked(self, device: Device, nbytes: int) -> Any | None:
        streams = stream_module(self._torch, self._torch.device(device))
        return self._pinned.empty(nbytes) if nbytes and streams is not None else None

    def pin_memory(self, array: Any) -> Any:
        if not isinstance(array, self._torch.Tensor):  # of a batch that torch's own loader converted
            array = self._torch.as_tensor(array)
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

    def operations(self, array: Any, *, gradients: bool = False) -> ArrayOperations:
        traced = self._torch.compiler.is_compiling()
        if array.device.type == "cpu" and not gradients and not traced:
            return HostTorchOperations(self._torch)
        check = array.device.type == "cpu" and not traced
        return TorchOperations(self, self._torch, array.device, check=check, traced=traced)


_SPELLED = {"truediv": "div"}
"""Names in torch for those of the module `operator`."""
_MOST_OF_DOT = (1 << 31) - 1
"""Elements of a dot product in BLAS."""
_EXPONENTS = 128
"""Exponents that are made at once, so that a second matrix of powers has its own among them."""


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


class TorchConversions(ArrayConversions):
    """torch on a device: tensors in float64, except on devices without it. The CPU does not wait for the device."""

    name = "torch"

    def __init__(self, backend: TorchBackend, torch: Any, device: Any, *, check: bool, traced: bool = False) -> None:
        self._backend, self.xp, self._device, self.check, self._traced = backend, torch, device, check, traced
        self.at_once = CACHED if check else AT_ONCE
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._zeros: dict[Any, Any] = {}
        """Zero of each type. Not kept for further calls, which may be on other streams."""
        self._exponents: Any = None

    def untraced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self._traced:
            return function
        found: Callable[..., Any] = self.xp.compiler.disable(function)
        return found

    def floats(self, values: Any, *, gradients: bool = False) -> Any:
        tensor, xp = self._tensor(values), self.xp
        if tensor.requires_grad and not gradients:
            tensor = tensor.detach()
        return tensor if tensor.dtype in (xp.float32, xp.float64) else tensor.to(xp.float32)

    def bools(self, values: Any) -> Any:
        return self._tensor(values).to(self.xp.bool)

    def wide(self, array: Any) -> Any:
        return array.to(self._wide)

    def like(self, array: Any, other: Any) -> Any:
        return array.to(other.dtype)

    def put(self, array: npt.NDArray[Any]) -> Any:
        if self._device.type == "mps" and array.dtype == np.float64:
            array = array.astype(np.float32)
        return self._tensor(self.xp.from_numpy(np.require(array, requirements=["C", "W"])))

    def put_all(self, *arrays: npt.NDArray[Any]) -> list[Any]:
        if self._device.type == "mps" or any(array.itemsize != 8 for array in arrays):
            return super().put_all(*arrays)
        ends = np.cumsum([len(array) for array in arrays]).tolist()
        whole = self.put(np.concatenate([array.view(np.int64) for array in arrays]))
        kinds = [self.xp.float64 if array.dtype.kind == "f" else self.xp.int64 for array in arrays]
        return [whole[end - len(array) : end].view(kind) for array, end, kind in zip(arrays, ends, kinds)]

    def zeros(self, size: int, like: Any) -> Any:
        return like.new_zeros(size)

    def true(self, shape: tuple[int, ...]) -> Any:
        return self.xp.ones(shape, dtype=self.xp.bool, device=self._device)

    def count_up(self, size: int, step: int = 1) -> Any:
        return self.xp.arange(0, size * step, step, device=self._device)

    def host(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array.detach().cpu() if isinstance(array, self.xp.Tensor) else array)

    def _tensor(self, values: Any) -> Any:
        """Values on this device. From main memory they are copied by way of pinned memory, without a wait."""
        if not isinstance(values, self.xp.Tensor):
            return self.put(np.asarray(values))
        if values.device == self._device:
            return values
        return self._backend.pin_memory(values).to(self._device, non_blocking=self._device.type != "cpu")


class TorchOperations(TorchConversions, ArrayOperations):
    """torch on a device: computes in float64, except on devices without it. The CPU does not wait for the device.

    Small arrays cost what it takes to launch their kernels, so operations here are chosen for few kernels: a number as
    argument of `where` is a kernel of its own, a copy in another type too.
    """

    def kept(self, mask: Any, array: Any, blank: Any = 0.0) -> Any:
        if isinstance(blank, float):
            if blank or self._traced:
                return self.xp.where(mask, array, blank)
            blank = self._zeros.get(array.dtype)
            if blank is None:
                blank = self._zeros[array.dtype] = array.new_zeros(())
        return self.xp.where(mask, array, blank)

    def into(self, operation: Operation, left: Any, right: Any, like: Any) -> Any:
        if self._traced:  # the compiler fuses the conversion
            return self.like(operation(left, right), like)
        function = getattr(self.xp, _SPELLED.get(operation.__name__, operation.__name__))
        return function(left, right, out=like.new_empty(0))

    def count_true(self, mask: Any, like: Any) -> Any:
        return mask.sum(dtype=like.dtype)

    def sum_of_squares(self, array: Any) -> Any:
        flat = array.reshape(-1)
        if flat.numel() > _MOST_OF_DOT:
            return super().sum_of_squares(array)
        return self.xp.dot(flat, flat)

    def nan_if_false(self, flags: Any) -> Any:
        return flags.acosh().to(self.xp.float32)  # of 1 it is 0, of 0 NaN; torch's default type may be another

    def segment_sum(self, array: Any, index: Any, count: int) -> Any:
        return array.new_zeros(count).index_add_(0, index, array)

    def scatter(self, array: Any, index: Any, size: int) -> Any:
        return array.new_zeros(size).scatter_(0, index, array)

    def stable_order(self, array: Any) -> Any:
        return self.xp.argsort(array, stable=True)

    def row_std_mean(self, array: Any, ddof: int) -> tuple[Any, Any] | None:
        std, mean = self.xp.std_mean(array, dim=1, correction=ddof)  # Welford's algorithm, hence exact
        return std, self.xp.add(mean, std, alpha=0.0)  # the mean of 1 and infinity is not NaN

    def running_counts(self, mask: Any) -> Any:
        return mask.cumsum(1)

    def add_at(self, array: Any, where: Any, values: Any, scale: float) -> Any:
        array[where].add_(values, alpha=scale)
        return array

    def suffix_sums(self, array: Any) -> Any:
        return array.flip(1).cumsum(1, dtype=self._wide).flip(1)

    def powers(self, base: float, size: int, like: Any) -> Any:
        if self._exponents is None or len(self._exponents) < size:
            places = self.xp.arange(max(size, _EXPONENTS), dtype=like.dtype, device=self._device)
            self._exponents = places[:, None] - places
        return (base ** self._exponents[:size, :size]).tril()

    def _empty(self, shape: tuple[int, int], like: Any) -> Any:
        return like.new_empty(shape)


def make() -> TorchBackend:
    return TorchBackend()
