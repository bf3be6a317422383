"""The few array operations that NumPy, torch, MLX and JAX do not spell alike, for code that is written once for all.

    arrays = arrays_of(rewards)             # by the type of the array: no framework is imported here
    total = arrays.segment_sum(rewards, index, groups)
    larger = arrays.xp.where(total > 0, total, 0.0)

`xp` is the framework's own module. What it has under one name in all four (where, sum, sqrt, exp, concatenate, @) is
called there. Whoever holds a tensor has imported its framework, so `sys.modules` is all that is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

__all__ = ["Array", "Arrays", "arrays_of"]

Array: TypeAlias = Any
"""An array of any of the four frameworks."""

Rows: TypeAlias = Callable[..., tuple[Array, ...]]

CACHED = 1 << 16
"""Elements of a block of rows on a CPU: the few float64 arrays of that size that a computation needs stay in cache."""
AT_ONCE = 1 << 27
"""Elements of a block of rows elsewhere: it bounds the memory of intermediate results."""


class Arrays(Protocol):
    """One framework, and one device of it."""

    name: str
    xp: Any
    at_once: int
    """Elements of a block of rows that is worked on at a time."""

    def floats(self, values: Any) -> Array:
        """As float32, or float64 where it was that, on this device and cut off from gradients."""
        ...

    def differentiable(self, values: Any) -> Array:
        """As `floats`, with its gradients."""
        ...

    def bools(self, values: Any) -> Array: ...

    def wide(self, array: Array) -> Array:
        """In the widest floats that this framework and device compute with."""
        ...

    def like(self, array: Array, other: Array) -> Array:
        """In the type of `other`."""
        ...

    def host(self, array: Array) -> npt.NDArray[Any]: ...

    def put(self, array: npt.NDArray[Any]) -> Array: ...

    def give(self, array: Array) -> Array:
        """For the caller, who may not see what it was computed with."""
        ...

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        """For each of `count` segments, the sum of the elements whose index it is."""
        ...

    def row_sums(self, array: Array) -> Array:
        """The sum of each row of a table."""
        ...

    def product(self, left: Array, right: Array) -> Array:
        """The matrix product, in all the digits of the type."""
        ...

    def select(self, array: Array, mask: Array) -> Array:
        """The elements where `mask` is true, row by row, as one row."""
        ...

    def place(self, flat: Array, mask: Array) -> Array:
        """What undoes `select`: zeros where `mask` is false."""
        ...

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        """`array[where] += values`, in place or not: go on with what is returned."""
        ...

    def by_rows(self, function: Rows, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        """`function(*inputs)` for blocks of rows small enough to be quick; the type of what comes is that of the first
        input. A function gives as many arrays, as wide, for every block."""
        ...


def arrays_of(*values: Any, gradients: bool = False) -> Arrays:
    """The framework of the arrays among `values`; lists and numbers are NumPy's, and NumPy's go with any other.

    With `gradients`, one whose operations they pass.
    """
    found = [namespace for value in values if (namespace := _namespace(value, gradients)) is not None]
    names = sorted({namespace.name for namespace in found})
    if len(names) > 1:
        raise ConfigError(f"arrays of one framework are needed, got {' and '.join(names)}; convert one of them")
    return found[0] if found else NumpyArrays()


def _namespace(value: Any, gradients: bool) -> Arrays | None:
    torch, jax, mx = map(sys.modules.get, ("torch", "jax", "mlx.core"))
    if torch is not None and isinstance(value, torch.Tensor):
        on_host = value.device.type == "cpu" and not gradients
        return HostTorchArrays(torch) if on_host else TorchArrays(torch, value.device)
    if jax is not None and isinstance(value, jax.Array):
        return JaxArrays(jax)
    if mx is not None and isinstance(value, mx.array):
        return MlxArrays(mx)
    return None


class NumpyArrays:
    """NumPy: computes in float64."""

    name = "numpy"
    xp: Any = np
    at_once = CACHED

    def floats(self, values: Any) -> Array:
        array = np.asarray(values)
        return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)

    def differentiable(self, values: Any) -> Array:
        return self.floats(values)

    def bools(self, values: Any) -> Array:
        return np.asarray(values).astype(bool, copy=False)

    def wide(self, array: Array) -> Array:
        return array.astype(np.float64, copy=False)

    def like(self, array: Array, other: Array) -> Array:
        return array.astype(other.dtype, copy=False)

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(array)

    def put(self, array: npt.NDArray[Any]) -> Array:
        return array

    def give(self, array: Array) -> Array:
        return array

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return np.bincount(index, array, count)

    def row_sums(self, array: Array) -> Array:
        return np.einsum("ij->i", array)  # for short rows far quicker than sum

    def product(self, left: Array, right: Array) -> Array:
        return left @ right

    def select(self, array: Array, mask: Array) -> Array:
        return array[mask]

    def place(self, flat: Array, mask: Array) -> Array:
        whole = np.zeros(mask.shape, flat.dtype)
        whole[mask] = flat
        return whole

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        array[where] += values
        return array

    def by_rows(self, function: Rows, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        return _in_blocks(function, inputs, width, self.at_once, lambda shape: np.empty(shape, inputs[0].dtype))


class HostTorchArrays(NumpyArrays):
    """torch in the memory of the host: NumPy works on the same bytes, several times as fast on small arrays, and where
    a mask picks elements."""

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def floats(self, values: Any) -> Array:
        return super().floats(self._viewed(values, self._torch.float32))

    def bools(self, values: Any) -> Array:
        return super().bools(self._viewed(values, self._torch.bool))

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(self._viewed(array, None))

    def give(self, array: Array) -> Array:
        return self._torch.from_numpy(np.require(array, requirements=["C", "W"]))

    def _viewed(self, values: Any, dtype: Any) -> Any:
        if not isinstance(values, self._torch.Tensor):
            return values
        tensor = values.detach().cpu()
        return (tensor if dtype is None or tensor.dtype == self._torch.float64 else tensor.to(dtype)).numpy()


class TorchArrays:
    """torch: computes in float64, but for the devices that have none."""

    name = "torch"

    def __init__(self, torch: Any, device: Any) -> None:
        self.xp, self._device = torch, device
        self.at_once = CACHED if device.type == "cpu" else AT_ONCE

    def floats(self, values: Any) -> Array:
        return self.differentiable(values).detach()

    def differentiable(self, values: Any) -> Array:
        tensor = self.xp.as_tensor(values, device=self._device)
        return tensor if tensor.dtype == self.xp.float64 else tensor.to(self.xp.float32)

    def bools(self, values: Any) -> Array:
        return self.xp.as_tensor(values, device=self._device).to(self.xp.bool)

    def wide(self, array: Array) -> Array:
        return array.to(self.xp.float32 if self._device.type == "mps" else self.xp.float64)

    def like(self, array: Array, other: Array) -> Array:
        return array.to(other.dtype)

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(array.detach().cpu() if isinstance(array, self.xp.Tensor) else array)

    def put(self, array: npt.NDArray[Any]) -> Array:
        if self._device.type == "mps" and array.dtype == np.float64:
            array = array.astype(np.float32)
        return self.xp.from_numpy(np.require(array, requirements=["C", "W"])).to(self._device)

    def give(self, array: Array) -> Array:
        return array

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return array.new_zeros(count).index_add(0, index, array)

    def row_sums(self, array: Array) -> Array:
        return self.xp.sum(array, axis=1)

    def product(self, left: Array, right: Array) -> Array:
        return left @ right

    def select(self, array: Array, mask: Array) -> Array:
        return array[mask]

    def place(self, flat: Array, mask: Array) -> Array:
        return flat.new_zeros(mask.shape).masked_scatter_(mask, flat)

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        array[where] += values
        return array

    def by_rows(self, function: Rows, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        return _in_blocks(function, inputs, width, self.at_once, inputs[0].new_empty)


class JaxArrays:
    """JAX: computes in float32, or in float64 where `jax_enable_x64` is set."""

    name = "jax"
    at_once = AT_ONCE

    def __init__(self, jax: Any) -> None:
        self.xp, self._jax = jax.numpy, jax

    def floats(self, values: Any) -> Array:
        return self._jax.lax.stop_gradient(self.differentiable(values))

    def differentiable(self, values: Any) -> Array:
        array = self.xp.asarray(values)
        return array if array.dtype == self.xp.float64 else array.astype(self.xp.float32)

    def bools(self, values: Any) -> Array:
        return self.xp.asarray(values).astype(bool)

    def wide(self, array: Array) -> Array:
        return array.astype(self._jax.dtypes.canonicalize_dtype(np.float64))

    def like(self, array: Array, other: Array) -> Array:
        return array.astype(other.dtype)

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(array)

    def put(self, array: npt.NDArray[Any]) -> Array:
        return self.xp.asarray(array, dtype=self._jax.dtypes.canonicalize_dtype(array.dtype))

    def give(self, array: Array) -> Array:
        return array

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return self.xp.zeros(count, array.dtype).at[index].add(array)

    def row_sums(self, array: Array) -> Array:
        return self.xp.sum(array, axis=1)

    def product(self, left: Array, right: Array) -> Array:
        return self.xp.matmul(left, right, precision="highest")  # GPUs would round to TF32

    def select(self, array: Array, mask: Array) -> Array:
        return array.reshape(-1)[self.put(np.flatnonzero(np.asarray(mask)))]

    def place(self, flat: Array, mask: Array) -> Array:
        where = self.put(np.flatnonzero(np.asarray(mask)))
        return self.xp.zeros(mask.size, flat.dtype).at[where].set(flat).reshape(mask.shape)

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        return array.at[where].add(values)

    def by_rows(self, function: Rows, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        return tuple(self.like(array, inputs[0]) for array in function(*inputs))


class MlxArrays:
    """MLX: computes in float32, which is all that its GPUs have."""

    name = "mlx"
    at_once = AT_ONCE

    def __init__(self, mx: Any) -> None:
        self.xp = mx

    def floats(self, values: Any) -> Array:
        return self.xp.stop_gradient(self.differentiable(values))

    def differentiable(self, values: Any) -> Array:
        return self._array(values).astype(self.xp.float32)

    def bools(self, values: Any) -> Array:
        return self._array(values).astype(self.xp.bool_)

    def wide(self, array: Array) -> Array:
        return array

    def like(self, array: Array, other: Array) -> Array:
        return array.astype(other.dtype)

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.array(array)

    def put(self, array: npt.NDArray[Any]) -> Array:
        return self.xp.array(array.astype(np.int32) if array.dtype == np.int64 else array)

    def give(self, array: Array) -> Array:
        return array

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return self.xp.zeros(count, array.dtype).at[index].add(array)

    def row_sums(self, array: Array) -> Array:
        return self.xp.sum(array, axis=1)

    def product(self, left: Array, right: Array) -> Array:
        return left @ right

    def select(self, array: Array, mask: Array) -> Array:
        return array.reshape(-1)[self.put(np.flatnonzero(np.array(mask)))]

    def place(self, flat: Array, mask: Array) -> Array:
        where = self.put(np.flatnonzero(np.array(mask)))
        return self.xp.zeros(mask.size, flat.dtype).at[where].add(flat).reshape(mask.shape)

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        return array.at[where].add(values)

    def by_rows(self, function: Rows, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        return tuple(self.like(array, inputs[0]) for array in function(*inputs))

    def _array(self, values: Any) -> Array:
        return values if isinstance(values, self.xp.array) else self.xp.array(np.asarray(values))


def _in_blocks(
    function: Rows, inputs: Sequence[Array], width: int, most: int, empty: Callable[[tuple[int, int]], Array]
) -> tuple[Array, ...]:
    rows = len(inputs[0])
    step = max(1, most // max(1, width))
    outputs: tuple[Array, ...] = ()
    for start in range(0, rows, step):
        block = slice(start, min(start + step, rows))
        results = function(*(array[block] for array in inputs))
        outputs = outputs or tuple(empty((rows, result.shape[1])) for result in results)
        for output, result in zip(outputs, results):
            output[block] = result
    return outputs
