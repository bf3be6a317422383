"""Arrays of a framework in given memory; and MLX's own pool of memory.

allocator = get_allocator("torch")
tensor = allocator.over(memory, (32, 512), "float32")     # lies in the memory given
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock._suggest import did_you_mean
from penstock.batching.backends.lookup import backend_of
from penstock.errors import ConfigError

__all__ = ["Allocator", "MlxPool", "evaluate", "framework_of", "get_allocator", "is_array"]

_KINDS = "biufcSUmM"
"""NumPy's types whose bytes say everything: not objects, and nothing with fields of its own."""
_ALIASES = {
    "bool_": "bool",
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long": "int64",
}


class Allocator:
    """Makes arrays of one framework by shape and type. `pooled`: in memory that it is given, and not in its own."""

    pooled = True

    def __init__(self, name: str, module: Any) -> None:
        self.name, self._module = name, module

    def dtype(self, given: object) -> Any:
        """The framework's type for a type of it, of NumPy, of Python, or for a name."""
        if isinstance(given, self._module.dtype):
            return given
        name = dtype_name(given)
        found = getattr(self._module, name, None)
        if not isinstance(found, self._module.dtype):
            raise ConfigError(f"{self.name} has no type {given!r}{did_you_mean(name, dir(self._module))}")
        return found

    def itemsize(self, dtype: Any) -> int:
        return int(dtype.itemsize)

    def over(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Any:
        """An array of zeros in this memory, which is at least as long, and kept alive by it."""
        count = math.prod(shape) * self.itemsize(dtype)
        if not count:  # torch does not look at nothing in another type
            return self._module.zeros(tuple(shape), dtype=dtype)
        memory[:count] = 0
        return self._module.from_numpy(memory[:count]).view(dtype).view(tuple(shape))


class NumpyAllocator(Allocator):
    def __init__(self) -> None:
        super().__init__("numpy", np)

    def dtype(self, given: object) -> np.dtype[Any]:
        try:
            found = np.dtype(given if isinstance(given, (np.dtype, type)) else dtype_name(given))
        except TypeError:
            raise ConfigError(
                f"NumPy has no type {given!r}; choose another type, or backend='mlx' or 'torch'"
            ) from None
        if found.kind not in _KINDS:
            raise ConfigError(f"a tensor holds numbers or bools, got {found}")
        return found

    def over(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Any:
        array: npt.NDArray[Any] = np.ndarray(tuple(shape), dtype, memory)
        array.fill(0)
        return array


class MlxAllocator(Allocator):
    """MLX takes memory from its own pool only; `over` ignores what it is given."""

    pooled = False

    def __init__(self) -> None:
        super().__init__("mlx", require("mlx.core", "mlx"))

    def dtype(self, given: object) -> Any:
        if isinstance(given, self._module.Dtype):
            return given
        name = {"bool": "bool_"}.get(dtype_name(given), dtype_name(given))
        found = getattr(self._module, name, None)
        if not isinstance(found, self._module.Dtype):
            raise ConfigError(f"MLX has no type {given!r}{did_you_mean(name, dir(self._module))}")
        return found

    def itemsize(self, dtype: Any) -> int:
        return int(dtype.size)

    def over(self, memory: npt.NDArray[np.uint8], shape: Sequence[int], dtype: Any) -> Any:
        array = self._module.zeros(tuple(shape), dtype)
        self._module.eval(array)  # a lazy one could not be used by another thread, and would take its memory later
        return array


class MlxPool:
    """The memory that MLX keeps for its next arrays: as large as whoever needs most of it says.

    MLX has one limit for the process. The largest that a living holder asks for is in force, and when the last one is
    gone, in whatever order they go, the limit is what it was before the first. None only looks.
    """

    # Reentrant: a holder may be collected on a thread that is in here.
    _lock = threading.RLock()
    _wanted: ClassVar[dict[int, int]] = {}
    _before: ClassVar[int | None] = None

    def __init__(self, nbytes: int | None) -> None:
        self._mx: Any = require("mlx.core", "mlx")
        self._key = id(self)
        self._close = weakref.finalize(self, _give_back, self._mx, self._key)
        self._close.atexit = False
        if nbytes is not None:
            with MlxPool._lock:
                if MlxPool._before is None:
                    MlxPool._before = self._mx.set_cache_limit(nbytes)
                MlxPool._wanted[self._key] = nbytes
                self._mx.set_cache_limit(max(MlxPool._wanted.values()))

    def close(self) -> None:
        """Ask for nothing any more; idempotent."""
        self._close()

    def figures(self) -> dict[str, int]:
        """Bytes in arrays, and bytes kept for the next ones, of the whole process."""
        return {"active": int(self._mx.get_active_memory()), "cached": int(self._mx.get_cache_memory())}


def _give_back(mx: Any, key: int) -> None:
    with MlxPool._lock:
        if MlxPool._wanted.pop(key, None) is None:
            return
        if MlxPool._wanted:
            mx.set_cache_limit(max(MlxPool._wanted.values()))
        elif MlxPool._before is not None:
            mx.set_cache_limit(MlxPool._before)
            MlxPool._before = None


@cache
def get_allocator(name: str) -> Allocator:
    """By the name of its framework, which is imported here."""
    if name == "numpy":
        return NumpyAllocator()
    if name == "torch":
        return Allocator("torch", require("torch", "torch"))
    if name == "mlx":
        return MlxAllocator()
    raise ConfigError(f"tensors are allocated for 'mlx', 'torch' or 'numpy', got backend {name!r}")


def framework_of(dtype: object) -> str | None:
    """Whose type it is, told by its class; None for a name, or a type of Python."""
    home = type(dtype).__module__.partition(".")[0]
    if isinstance(dtype, type):
        home = "numpy" if issubclass(dtype, np.generic) else ""
    return home if home in ("mlx", "torch", "numpy") else None


def dtype_name(given: object) -> str:
    """`float32` for "float32", `np.float32`, `np.dtype("f4")`, `torch.float32`, `mx.float32`, `float`."""
    if isinstance(given, type) and issubclass(given, np.generic):
        return np.dtype(given).name
    if isinstance(given, type):
        name = given.__name__
    elif isinstance(given, np.dtype):
        name = given.name
    else:
        name = str(given).rpartition(".")[2]
    return _ALIASES.get(name, name)


def is_array(value: object) -> bool:
    """Whether it is an array, or a scalar, of a framework we know; nothing is imported to find out."""
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    home = type(value).__module__.partition(".")[0]
    if home not in ("mlx", "torch", "jax", "jaxlib") and not hasattr(value, "__dlpack__"):
        return False
    try:
        backend_of(value)
    except ConfigError:
        return False
    return hasattr(value, "shape")


def evaluate(value: Any) -> None:
    """Compute the lazy MLX arrays in a value, a list or a dict: another thread could not."""
    mx = sys.modules.get("mlx.core")
    if mx is not None:
        mx.eval(dict(value) if isinstance(value, Mapping) else value)
