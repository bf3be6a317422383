"""What a backend is: the few things that differ between NumPy, torch, MLX and JAX when a batch is handed over.

A batch is made in NumPy, once, and becomes the arrays of one framework at the very end. What each of its arrays is:

    key                                                  numpy, torch   mlx, jax
    input_ids, labels, position_ids, attention_mask      int64          int32
    document_ids, cu_seqlens                             int32          int32
    loss_mask                                            as given, at most 32 bits of float

The values are the same in all of them. A value that a narrower type cannot hold is an error, never another value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError

__all__ = ["ALIGNMENT", "Array", "Backend", "Device", "PendingCopy", "aligned_empty", "batch_dtype", "exactly"]

# An array of a framework, and what a framework takes for a device: their types cannot be named without importing them.
Array = Any
Device = Any

ALIGNMENT = 64
"""Bytes: JAX on CPU shares memory with a NumPy array that starts at a multiple of this, and copies any other."""

_WIDE = frozenset({"input_ids", "labels", "position_ids", "attention_mask"})
_NARROW = frozenset({"document_ids", "cu_seqlens"})


class PendingCopy(Protocol):
    """Copies to a device that were asked for, and may still be under way."""

    def wait(self) -> None:
        """Order what the calling thread does next with the arrays behind their copies; the thread itself goes on."""
        ...


class Backend(Protocol):
    """One framework, as far as batches need it. Stateless: any number of threads may use one."""

    name: str
    integer: np.dtype[Any]
    """The type of token ids, labels and positions."""

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Array:
        """The same values as an array of the framework, on `device` if one is named.

        Shares memory where the framework can, so the array given is the framework's from then on: do not write to it.
        """
        ...

    def to_numpy(self, array: Array) -> npt.NDArray[Any]:
        """The same values in NumPy, from whatever device they are on; shares memory where that is possible."""
        ...

    def to(self, array: Array, device: Device, *, non_blocking: bool = False) -> Array:
        """The array on another device; itself if it is there already. Without waiting only if the values are safe so:
        a copy to main memory is always waited for."""
        ...

    def resolve_device(self, device: Device) -> Device:
        """The device that a name stands for in this thread: torch's "cuda" is whichever is current, by its number."""
        ...

    def pending_copy(self, arrays: Sequence[Array]) -> PendingCopy | None:
        """What orders the use of these arrays behind the copies that this thread has just made of them; None where the
        framework does so by itself. To be asked right behind the copies, by the thread that made them."""
        ...

    def pin_memory(self, array: Array) -> Array:
        """A copy in page-locked memory, which a device can read by itself; itself where there is no such thing."""
        ...

    def arange(self, count: int, *, like: Array) -> Array:
        """0 to `count`, on the device of `like`."""
        ...

    def additive(self, allowed: Array, dtype: str) -> Array:
        """A mask to be added to attention scores: 0 where it is allowed, the lowest number of `dtype` elsewhere."""
        ...


def batch_dtype(key: str, given: np.dtype[Any], backend: Backend) -> np.dtype[Any]:
    """The type of a batch's array in a backend. Arrays made in it are handed over without a conversion."""
    if key in _WIDE:
        return backend.integer
    if key in _NARROW:
        return np.dtype(np.int32)
    return np.dtype(np.float32) if given == np.float64 else given.newbyteorder("=")


def exactly(array: npt.NDArray[Any], dtype: npt.DTypeLike, what: str = "array") -> npt.NDArray[Any]:
    """The array in another type, without a copy if it is of that type; an error if a value does not survive."""
    wanted = np.dtype(dtype)
    if array.dtype == wanted:
        return array
    if np.can_cast(array.dtype, wanted, "safe"):
        return array.astype(wanted)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = array.astype(wanted)
    # Comparing in the type given: the other direction could round both to the same value.
    same = converted.astype(array.dtype) == array
    if array.dtype.kind == "f":
        same |= np.isnan(array) & np.isnan(converted)
    else:
        same &= (converted < 0) == (array < 0)
    if not same.all():
        at = tuple(int(i) for i in np.argwhere(~same)[0])
        raise DataError(f"{what}{list(at)} is {array[at]!r}, which {wanted.name} cannot hold; {array.dtype} can")
    return converted


def aligned_empty(shape: int | Sequence[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Like `numpy.empty`, starting at a multiple of `ALIGNMENT` bytes: every framework that can share it, does."""
    kind, sizes = np.dtype(dtype), (shape,) if isinstance(shape, int) else tuple(shape)
    nbytes = math.prod(sizes) * kind.itemsize
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes].view(kind).reshape(sizes)
