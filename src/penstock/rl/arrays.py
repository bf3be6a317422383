"""Array operations that NumPy, torch, MLX and JAX spell differently, for code that is written once for all.

    arrays = arrays_of(rewards)             # by the type of the array: no framework is imported here
    total = arrays.segment_sum(rewards, index, groups)
    larger = arrays.xp.where(total > 0, total, 0.0)

`xp` is the framework's own module, for what has one name in all four (where, sum, sqrt, exp, concatenate, @). To add a
framework, write a subclass of `Arrays` (or of `FunctionalArrays`, if its arrays are immutable) and add it to
`FRAMEWORKS`. A caller that holds a tensor has imported its framework, so only `sys.modules` is searched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError

__all__ = ["FRAMEWORKS", "Array", "Arrays", "arrays_of"]

Array: TypeAlias = Any
"""Array of any of the four frameworks."""
BlockFunction: TypeAlias = Callable[..., tuple[Array, ...]]

CACHED = 1 << 16
"""Elements of a block of rows on a CPU: a few float64 arrays of that size fit into cache."""
AT_ONCE = 1 << 27
"""Elements of a block of rows elsewhere: bounds the memory of intermediate results."""


class Arrays:
    """Operations of one framework on one device; the defaults suit mutable arrays."""

    name: str
    xp: Any
    at_once: int = AT_ONCE
    """Elements of a block of rows that is processed at a time."""

    def differentiable(self, values: Any) -> Array:
        """Values as float32, or float64 if they are that, on this device, with gradients."""
        raise NotImplementedError

    def floats(self, values: Any) -> Array:
        """The same without gradients."""
        raise NotImplementedError

    def bools(self, values: Any) -> Array:
        raise NotImplementedError

    def wide(self, array: Array) -> Array:
        """Array in the widest floats that the framework and the device compute with."""
        raise NotImplementedError

    def put(self, array: npt.NDArray[Any]) -> Array:
        """NumPy array on this device."""
        raise NotImplementedError

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        """Sum of the elements of each of `count` segments; `index` is the segment of each element."""
        raise NotImplementedError

    def place(self, flat: Array, mask: Array) -> Array:
        """Inverse of `select`: zeros where `mask` is false."""
        raise NotImplementedError

    def like(self, array: Array, other: Array) -> Array:
        """Array in the type of `other`."""
        return array.astype(other.dtype)

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.asarray(array)

    def give(self, array: Array) -> Array:
        """Result for the caller, in the caller's framework."""
        return array

    def row_sums(self, array: Array) -> Array:
        return self.xp.sum(array, axis=1)

    def product(self, left: Array, right: Array) -> Array:
        """Matrix product in full precision."""
        return left @ right

    def select(self, array: Array, mask: Array) -> Array:
        """Elements where `mask` is true, in one dimension."""
        return array[mask]

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        """`array[where] += values`, in place or not: use the result."""
        array[where] += values
        return array

    def by_rows(self, function: BlockFunction, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        """`function(*inputs)` for blocks of rows, in the type of the first input. Every block gives arrays of the same
        widths."""
        rows = len(inputs[0])
        step = max(1, self.at_once // max(1, width))
        outputs: tuple[Array, ...] = ()
        for start in range(0, rows, step):
            block = slice(start, min(start + step, rows))
            results = function(*(array[block] for array in inputs))
            outputs = outputs or tuple(self._empty((rows, result.shape[1]), inputs[0]) for result in results)
            for output, result in zip(outputs, results):
                output[block] = result
        return outputs

    def _empty(self, shape: tuple[int, int], like: Array) -> Array:
        raise NotImplementedError


class NumpyArrays(Arrays):
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

    def put(self, array: npt.NDArray[Any]) -> Array:
        return array

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return np.bincount(index, array, count)

    def row_sums(self, array: Array) -> Array:
        return np.einsum("ij->i", array)  # much faster than sum for short rows

    def place(self, flat: Array, mask: Array) -> Array:
        whole = np.zeros(mask.shape, flat.dtype)
        whole[mask] = flat
        return whole

    def _empty(self, shape: tuple[int, int], like: Array) -> Array:
        return np.empty(shape, like.dtype)


class HostTorchArrays(NumpyArrays):
    """torch in host memory: NumPy works on the same bytes, several times as fast on small arrays and with masks."""

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


class TorchArrays(Arrays):
    """torch: computes in float64, except on devices without it."""

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

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return array.new_zeros(count).index_add(0, index, array)

    def place(self, flat: Array, mask: Array) -> Array:
        return flat.new_zeros(mask.shape).masked_scatter_(mask, flat)

    def _empty(self, shape: tuple[int, int], like: Array) -> Array:
        return like.new_empty(shape)


class FunctionalArrays(Arrays):
    """Frameworks with immutable arrays and `array.at[index].add(values)`: JAX and MLX."""

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return self.xp.zeros(count, array.dtype).at[index].add(array)

    def select(self, array: Array, mask: Array) -> Array:
        return array.reshape(-1)[self.put(np.flatnonzero(self.host(mask)))]

    def place(self, flat: Array, mask: Array) -> Array:
        where = self.put(np.flatnonzero(self.host(mask)))
        return self.xp.zeros(mask.size, flat.dtype).at[where].add(flat).reshape(mask.shape)

    def add_at(self, array: Array, where: Any, values: Array) -> Array:
        return array.at[where].add(values)

    def by_rows(self, function: BlockFunction, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        return tuple(self.like(array, inputs[0]) for array in function(*inputs))


class JaxArrays(FunctionalArrays):
    """JAX: computes in float32, or in float64 with `jax_enable_x64`."""

    name = "jax"

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

    def put(self, array: npt.NDArray[Any]) -> Array:
        return self.xp.asarray(array, dtype=self._jax.dtypes.canonicalize_dtype(array.dtype))

    def product(self, left: Array, right: Array) -> Array:
        return self.xp.matmul(left, right, precision="highest")  # GPUs would round to TF32

    def place(self, flat: Array, mask: Array) -> Array:
        where = self.put(np.flatnonzero(self.host(mask)))
        return self.xp.zeros(mask.size, flat.dtype).at[where].set(flat).reshape(mask.shape)


class MlxArrays(FunctionalArrays):
    """MLX: computes in float32, which is all that its GPUs have."""

    name = "mlx"

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

    def host(self, array: Array) -> npt.NDArray[Any]:
        return np.array(array)

    def put(self, array: npt.NDArray[Any]) -> Array:
        return self.xp.array(array.astype(np.int32) if array.dtype == np.int64 else array)

    def _array(self, values: Any) -> Array:
        return values if isinstance(values, self.xp.array) else self.xp.array(np.asarray(values))


def _torch_arrays(torch: Any, tensor: Any, gradients: bool) -> Arrays:
    on_host = tensor.device.type == "cpu" and not gradients
    return HostTorchArrays(torch) if on_host else TorchArrays(torch, tensor.device)


FRAMEWORKS: dict[str, tuple[str, Callable[[Any, Any, bool], Arrays]]] = {
    "torch": ("Tensor", _torch_arrays),
    "jax": ("Array", lambda module, array, gradients: JaxArrays(module)),
    "mlx.core": ("array", lambda module, array, gradients: MlxArrays(module)),
}
"""By module: the name of its array class, and `make(module, array, gradients)`."""


def arrays_of(*values: Any, gradients: bool = False) -> Arrays:
    """Operations of the framework of the arrays among `values`. Lists and numbers are NumPy's; NumPy goes with any.

    With `gradients`, operations let gradients pass.
    """
    found = [arrays for value in values if (arrays := _framework_of(value, gradients)) is not None]
    names = sorted({arrays.name for arrays in found})
    if len(names) > 1:
        raise ConfigError(f"arrays must be of one framework, got {' and '.join(names)}; convert one of them")
    return found[0] if found else NumpyArrays()


def _framework_of(value: Any, gradients: bool) -> Arrays | None:
    for name, (kind, make) in FRAMEWORKS.items():
        module = sys.modules.get(name)
        if module is not None and isinstance(value, getattr(module, kind)):
            return make(module, value, gradients)
    return None
