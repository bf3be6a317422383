"""Backend protocol: everything in which NumPy, torch, MLX and JAX differ when a batch is delivered.

A batch is made in NumPy, once, and becomes the arrays of one framework at the very end:

    key                                                  numpy, torch   mlx, jax
    input_ids, labels, position_ids, attention_mask      int64          int32
    document_ids, cu_seqlens                             int32          int32
    loss_mask                                            as given, at most 32 bits of float

The values are the same in all of them. A value that does not fit a narrower type is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError

if TYPE_CHECKING:
    from penstock.batching.backends.operations import ArrayOperations
    from penstock.batching.collate import CompactBatch, PageLocked

# Arrays and devices of a framework: their types cannot be named without importing it.
Array = Any
Device = Any

ALIGNMENT = 64
"""Bytes: JAX on CPU shares memory with a NumPy array that starts at a multiple of this, and copies any other."""
NUMERIC_KINDS = "biufcSUmM"
"""Kinds of NumPy dtypes that are fully described by their bytes: no objects, no fields."""

_WIDE = frozenset({"input_ids", "labels", "position_ids", "attention_mask"})
_NARROW = frozenset({"document_ids", "cu_seqlens"})
_ALIASES = {
    "bool_": "bool",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
}


class PendingCopy(Protocol):
    """Copies to a device that may still be in progress."""

    def wait(self) -> None:
        """Order the calling thread's next uses of the arrays after their copies; the thread itself does not wait."""
        ...


class DeferredFields(Protocol):
    """Lazy fields of a batch. Each is computed when it is first read, and shares no memory with the others."""

    names: frozenset[str]
    backend: Backend

    @property
    def nbytes(self) -> int:
        """Bytes that the fields are made from."""
        ...

    def make(self, name: str) -> Array | int: ...

    def receive(self) -> None:
        """The current stream of this thread is the one that will use the fields."""
        ...

    def to(self, device: Device) -> DeferredFields | None:
        """The same fields, to be made on another device; None if they have to be made first."""
        ...


class Backend(Protocol):
    """Backend of one framework. Stateless: any number of threads may share one."""

    name: str
    integer: np.dtype[Any]
    """Type of token ids, labels and positions."""
    pooled: bool | None
    """True if `zeros` uses the memory it is given, False if the framework has a pool of its own, None if `zeros` is
    not supported."""

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Array:
        """Array of the framework with the same values, on `device` if given.

        Shares memory where the framework can, so do not write to the given array afterwards.
        """
        ...

    def converter(self, arrays: Iterable[npt.NDArray[Any]]) -> Callable[[npt.NDArray[Any]], Array]:
        """Conversion for parts of these arrays, which are contiguous; checks them once instead of every part."""
        ...

    def to_numpy(self, array: Array) -> npt.NDArray[Any]:
        """NumPy array with the same values, from any device; shares memory where possible."""
        ...

    def to(self, array: Array, device: Device, *, non_blocking: bool = False) -> Array:
        """Array on another device; itself if it is there already. A copy to main memory always blocks.

        `non_blocking` is for frameworks whose copies to a device would otherwise block (JAX).
        """
        ...

    def resolve_device(self, device: Device) -> Device:
        """Device that a name means in this thread: torch's "cuda" is the current device, by its number."""
        ...

    def copy_stream(self, device: Device) -> AbstractContextManager[object]:
        """Context in which copies to a device do not wait for the work that is queued on it."""
        ...

    def pending_copy(self, arrays: Sequence[Array]) -> PendingCopy | None:
        """Copies that this thread has just made of these arrays; None where the framework orders them by itself."""
        ...

    def compact_to(self, compact: CompactBatch, device: Device) -> DeferredFields | None:
        """Fields of a batch, to be made on a device from one copy; None if they have to be made in main memory."""
        ...

    def page_locked(self, device: Device, nbytes: int) -> PageLocked | None:
        """Memory that a device reads by itself; None if there is none, or the device does not copy from it."""
        ...

    def pin_memory(self, array: Array) -> Array:
        """Copy in page-locked memory; the array itself where the framework has no such thing."""
        ...

    def arange(self, count: int, *, like: Array) -> Array:
        """Numbers from 0 to `count`, on the device of `like`."""
        ...

    def additive(self, allowed: Array, dtype: str) -> Array:
        """Mask to be added to attention scores: 0 where it is allowed, the lowest number of `dtype` elsewhere."""
        ...

    def dtype(self, given: object) -> Any:
        """The framework's dtype for a dtype of it, of NumPy or of Python, or for a name."""
        ...

    def itemsize(self, dtype: Any) -> int: ...

    def zeros(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Array:
        """Array of zeros in this memory, which is large enough and kept alive by the array."""
        ...

    def operations(self, array: Array, *, gradients: bool = False) -> ArrayOperations:
        """Operations on arrays like this one; with `gradients`, gradients pass through them."""
        ...


class BaseBackend:
    """Defaults of a backend: no device streams, no pinned memory, no allocation."""

    name: str
    pooled: bool | None = None

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Array:
        raise NotImplementedError

    def converter(self, arrays: Iterable[npt.NDArray[Any]]) -> Callable[[npt.NDArray[Any]], Array]:
        convert = self.from_numpy
        return lambda array: convert(np.ascontiguousarray(array))

    def resolve_device(self, device: Device) -> Device:
        return device

    def copy_stream(self, device: Device) -> AbstractContextManager[object]:
        return nullcontext()

    def pending_copy(self, arrays: Sequence[Array]) -> PendingCopy | None:
        return None

    def compact_to(self, compact: CompactBatch, device: Device) -> DeferredFields | None:
        return None

    def page_locked(self, device: Device, nbytes: int) -> PageLocked | None:
        return None

    def pin_memory(self, array: Array) -> Array:
        return array

    def dtype(self, given: object) -> Any:
        raise ConfigError(f"tensors of backend {self.name!r} cannot be allocated; use 'mlx', 'torch' or 'numpy'")

    def itemsize(self, dtype: Any) -> int:
        return int(dtype.itemsize)

    def zeros(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Array:
        return self.dtype(dtype)

    def _named_dtype(self, module: Any, kind: type, given: object, renamed: str | None = None) -> Any:
        """Dtype of a framework's module by name."""
        if isinstance(given, kind):
            return given
        name = renamed or dtype_name(given)
        found = getattr(module, name, None)
        if not isinstance(found, kind):
            raise ConfigError(f"{self.name} has no dtype {given!r}{did_you_mean(name, dir(module))}")
        return found


def batch_dtype(key: str, given: np.dtype[Any], backend: Backend) -> np.dtype[Any]:
    """Dtype of a batch's array in a backend. Arrays in this dtype are delivered without a conversion."""
    if key in _WIDE:
        return backend.integer
    if key in _NARROW:
        return np.dtype(np.int32)
    return np.dtype(np.float32) if given == np.float64 else given.newbyteorder("=")


def dtype_name(given: object) -> str:
    """Name of a dtype: `float32` for "float32", `np.float32`, `np.dtype("f4")`, `torch.float32` or `float`."""
    if isinstance(given, type) and issubclass(given, np.generic):
        return np.dtype(given).name
    if isinstance(given, type):
        name = given.__name__
    else:
        name = given.name if isinstance(given, np.dtype) else str(given).rpartition(".")[2]
    return _ALIASES.get(name, name)


def exactly(array: npt.NDArray[Any], dtype: npt.DTypeLike, name: str = "array") -> npt.NDArray[Any]:
    """Array in another dtype, itself if it has that dtype; an error if a value does not survive."""
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return array
    if np.can_cast(array.dtype, wanted, "safe"):
        return array.astype(wanted)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(wanted)
    # Compared in the given dtype: the other direction could round both to the same value.
    same = converted.astype(array.dtype) == array
    if array.dtype.kind == "f":
        same |= np.isnan(array) & np.isnan(converted)
    else:
        same &= (converted < 0) == (array < 0)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise DataError(f"{name}{list(at)} is {array[at]!r}, which does not fit {wanted.name}; {array.dtype} holds it")
    return converted


def aligned_empty(shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Like `numpy.empty`, at a multiple of `ALIGNMENT` bytes: every framework that can share the memory does."""
    kind, sizes = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(sizes) * kind.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(kind).reshape(sizes)
