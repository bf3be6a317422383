"""Array operations that frameworks spell differently, for code that is written once for all of them.

    arrays = operations_of(rewards)         # by the type of the array: no framework is imported here
    total = arrays.segment_sum(rewards, index, groups)
    larger = arrays.xp.where(total > 0, total, 0.0)

`xp` is the framework's own module, for what has one name in all of them (where, sum, sqrt, exp, concatenate, @). Each
backend has its operations next to it, a subclass of `ArrayOperations`.

Operations on a device never wait for it: shapes do not depend on values, and no value is read. Only `host` and a
`bool()` of an array do, which callers use where `check` is true.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.batching.backends.base import Array, Backend
from penstock.batching.backends.lookup import backend_name, get_backend
from penstock.errors import ConfigError

BlockFunction: TypeAlias = Callable[..., tuple[Array, ...]]
Operation: TypeAlias = Callable[[Any, Any], Any]

CACHED = 1 << 16
"""Elements of a block of rows on a CPU: a few float64 arrays of that size fit into cache."""
AT_ONCE = 1 << 27
"""Elements of a block of rows elsewhere: bounds the memory of intermediate results."""


class ArrayConversions:
    """Arrays of one framework on one device: from other arrays, from numbers, and in other types."""

    name: str
    xp: Any
    on_host: bool = False
    """True if arrays are NumPy's, so that their values may decide how to go on."""
    check: bool = False
    """True if values may be read to check them: they are in main memory, or the caller accepts the wait."""

    def floats(self, values: Any, *, gradients: bool = False) -> Array:
        """Values as float32, or float64 if they are that, on this device."""
        raise NotImplementedError

    def bools(self, values: Any) -> Array:
        raise NotImplementedError

    def wide(self, array: Array) -> Array:
        """Array in the widest floats that the framework and the device compute with."""
        raise NotImplementedError

    def like(self, array: Array, other: Array) -> Array:
        """Array in the type of `other`."""
        return array.astype(other.dtype)

    def put(self, array: npt.NDArray[Any]) -> Array:
        """NumPy array on this device."""
        raise NotImplementedError

    def put_all(self, *arrays: npt.NDArray[Any]) -> list[Array]:
        """NumPy arrays of one dimension on this device, in one copy if the framework can."""
        return [self.put(array) for array in arrays]

    def zeros(self, size: int, like: Array) -> Array:
        """Zeros in one dimension, in the type of `like`."""
        return self.xp.zeros(size, dtype=like.dtype)

    def true(self, shape: tuple[int, ...]) -> Array:
        """Mask that is true everywhere."""
        return self.xp.ones(shape, dtype=bool)

    def count_up(self, size: int, step: int = 1) -> Array:
        """0, step, 2 step ...: so many numbers."""
        return self.xp.arange(0, size * step, step)

    def host(self, array: Array) -> npt.NDArray[Any]:
        """NumPy array with the same values; waits for a device."""
        return np.asarray(array)

    def untraced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of arrays in main memory, to be called as it is even in a program that is compiled."""
        return function

    def give(self, array: Array) -> Array:
        """Result for the caller, in the caller's framework."""
        return array


class ArrayOperations(ArrayConversions):
    """Operations of one framework on one device; the defaults suit mutable arrays."""

    at_once: int = AT_ONCE
    """Elements of a block of rows that is processed at a time."""

    def kept(self, mask: Array, array: Array, blank: Array | float = 0.0) -> Array:
        """Array where the mask is true, `blank` elsewhere."""
        return self.xp.where(mask, array, blank)

    def into(self, operation: Operation, left: Array, right: Array | float, like: Array) -> Array:
        """`operation(left, right)` in the type of `like`; operations are those of the module `operator`."""
        return self.like(operation(left, right), like)

    def count_true(self, mask: Array, like: Array) -> Array:
        """Number of true elements, in the type of `like`."""
        return self.xp.sum(self.like(mask, like))

    def sum_of_squares(self, array: Array) -> Array:
        return self.xp.sum(array * array)

    def nan_if_false(self, flags: Array) -> Array:
        """0 for true, NaN for false."""
        return 0.0 / flags

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        """Sum of the elements of each of `count` segments; `index` is the segment of each element."""
        raise NotImplementedError

    def scatter(self, array: Array, index: Array, size: int) -> Array:
        """`size` zeros with the elements at these places; what several elements leave at one place is undefined."""
        raise NotImplementedError

    def stable_order(self, array: Array) -> Array:
        """Indices that sort an array; equal elements stay in order."""
        return self.xp.argsort(array)

    def row_std_mean(self, array: Array, ddof: int) -> tuple[Array, Array] | None:
        """Standard deviation and mean of each row, exactly 0 and exactly the number if a row is one number; both are
        NaN for a row with a number that is not finite. None if the framework has no such function."""
        return None

    def running_counts(self, mask: Array) -> Array:
        """Number of true elements of a row up to each one."""
        return self.xp.cumsum(mask * 1, axis=1)

    def suffix_sums(self, array: Array) -> Array:
        """Sum of each element of a row and all after it, in the widest floats."""
        return self.xp.cumsum(self.wide(array)[:, ::-1], axis=1)[:, ::-1]

    def powers(self, base: float, size: int, like: Array) -> Array:
        """`base ** (k - j)` where k >= j, else 0: a row times this is its discounted sums from each element on."""
        return self.like(self.put(host_powers(base, size)), like)

    def product(self, left: Array, right: Array) -> Array:
        """Matrix product in full precision."""
        return left @ right

    def add_at(self, array: Array, where: Any, values: Array, scale: float) -> Array:
        """`array[where] += scale * values`, in place or not: use the result."""
        array[where] += values * scale
        return array

    def by_rows(self, function: BlockFunction, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        """`function(*inputs)` for blocks of rows, in the type of the first input. Every block gives arrays of the same
        widths."""
        rows = len(inputs[0])
        step = max(1, self.at_once // max(1, width))
        if rows <= step and not self.on_host:
            return tuple(self.like(array, inputs[0]) for array in function(*inputs))
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


class FunctionalOperations(ArrayOperations):
    """Operations of frameworks with immutable arrays and `array.at[index].add(values)`: JAX and MLX."""

    def segment_sum(self, array: Array, index: Array, count: int) -> Array:
        return self.zeros(count, array).at[index].add(array)

    def scatter(self, array: Array, index: Array, size: int) -> Array:
        return self.segment_sum(array, index, size)

    def add_at(self, array: Array, where: Any, values: Array, scale: float) -> Array:
        return array.at[where].add(self.like(values, array) * scale)  # the product in the wider type

    def by_rows(self, function: BlockFunction, inputs: Sequence[Array], width: int) -> tuple[Array, ...]:
        return tuple(self.like(array, inputs[0]) for array in function(*inputs))


@lru_cache(maxsize=64)
def host_powers(base: float, size: int) -> npt.NDArray[np.float64]:
    exponents = np.subtract.outer(np.arange(size), np.arange(size))
    return np.where(exponents >= 0, np.float64(base) ** np.maximum(exponents, 0), 0.0)


_NAMES: dict[type, str | None] = {}
"""Frameworks of classes that were met; None for NumPy's arrays, and for what is no array."""
_LOADED: dict[str, Backend] = {}


def _framework(kind: type) -> str | None:
    """Framework of a class of arrays, in `_LOADED` from now on."""
    if kind not in _NAMES:
        name = backend_name(kind)
        if name is not None and name != "numpy":
            _LOADED[name] = get_backend(name)
        _NAMES[kind] = name if name in _LOADED else None
    return _NAMES[kind]


_framework._dynamo_marked_constant = True  # type: ignore[attr-defined] # torch.compile calls it instead of tracing it


def operations_of(*values: Any, gradients: bool = False, check: bool = False) -> ArrayOperations:
    """Operations of the framework of the arrays among `values`. Lists and numbers are NumPy's; NumPy goes with any.

    With `gradients`, operations let gradients pass. With `check`, values may be read although they are on a device.
    """
    chosen: ArrayOperations | None = None
    for value in values:
        name = _framework(type(value))
        if name is None:
            continue
        if chosen is not None and chosen.name != name:
            names = sorted({chosen.name, name})
            raise ConfigError(f"arrays must be of one framework, got {' and '.join(names)}; convert one of them")
        if chosen is None or chosen.on_host:  # arrays in main memory follow others
            found = _LOADED[name].operations(value, gradients=gradients)
            chosen = found if chosen is None or not found.on_host else chosen
    chosen = chosen or get_backend("numpy").operations(None)
    chosen.check = chosen.check or check
    return chosen
