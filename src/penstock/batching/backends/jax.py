"""JAX backend: on CPU the memory of aligned NumPy arrays, otherwise a transfer."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._optional import require
from penstock.batching.backends.base import BaseBackend, Device, exactly
from penstock.batching.backends.operations import FunctionalOperations
from penstock.errors import ConfigError


class JaxBackend(BaseBackend):
    """JAX: `device` is a `jax.Device`, a sharding, or a name such as "cpu", "gpu" or "tpu:1".

    Sharing needs a start at a multiple of 64 bytes (`aligned_empty`). Without `jax_enable_x64` there are no 64-bit
    types: such arrays are narrowed, and refused if a value does not fit.
    """

    name = "jax"
    integer: np.dtype[Any] = np.dtype(np.int32)

    def __init__(self) -> None:
        self._jax: Any = require("jax", "jax")

    def from_numpy(self, array: npt.NDArray[Any], *, device: Device = None) -> Any:
        # JAX would narrow by itself, silently and unchecked.
        native = array.dtype.newbyteorder("=")
        return self._jax.device_put(exactly(array, self._jax.dtypes.canonicalize_dtype(native)), self._device(device))

    def to_numpy(self, array: Any) -> npt.NDArray[Any]:
        return np.asarray(array)

    def to(self, array: Any, device: Device, *, non_blocking: bool = False) -> Any:
        if device is None:
            return array
        moved = self._jax.device_put(array, self._device(device))
        return moved if non_blocking else moved.block_until_ready()

    def arange(self, count: int, *, like: Any) -> Any:
        return self._jax.numpy.arange(count)

    def additive(self, allowed: Any, dtype: str) -> Any:
        jnp = self._jax.numpy
        kind = jnp.dtype(dtype)
        return jnp.where(allowed, jnp.zeros((), kind), jnp.asarray(jnp.finfo(kind).min, kind))

    def _device(self, device: Device) -> Any:
        if not isinstance(device, str):
            return device
        platform, _, number = device.partition(":")
        try:
            return self._jax.devices(platform)[int(number or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ConfigError(
                f"JAX has no device {device!r}: {error}; it has {', '.join(map(str, self._jax.devices()))}"
            ) from None

    def operations(self, array: Any, *, gradients: bool = False) -> JaxOperations:
        traced = isinstance(array, self._jax.core.Tracer)
        return JaxOperations(self._jax, check=not traced and all(place.platform == "cpu" for place in array.devices()))


class JaxOperations(FunctionalOperations):
    """JAX: computes in float32, or in float64 with `jax_enable_x64`."""

    name = "jax"

    def __init__(self, jax: Any, *, check: bool) -> None:
        self.xp, self._jax, self.check = jax.numpy, jax, check

    def floats(self, values: Any, *, gradients: bool = False) -> Any:
        array = self.xp.asarray(values)
        array = array if array.dtype == self.xp.float64 else array.astype(self.xp.float32)
        return array if gradients else self._jax.lax.stop_gradient(array)

    def bools(self, values: Any) -> Any:
        return self.xp.asarray(values).astype(bool)

    def wide(self, array: Any) -> Any:
        return array.astype(self._jax.dtypes.canonicalize_dtype(np.float64))

    def put(self, array: npt.NDArray[Any]) -> Any:
        return self.xp.asarray(array, dtype=self._jax.dtypes.canonicalize_dtype(array.dtype))

    def product(self, left: Any, right: Any) -> Any:
        return self.xp.matmul(left, right, precision="highest")  # GPUs would round to TF32


def make() -> JaxBackend:
    return JaxBackend()
