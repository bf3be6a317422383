"""Backends by name, and by an array of theirs. A new backend is a module here and a line in `BACKENDS`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from penstock._suggest import did_you_mean
from penstock.batching.backends.base import Backend
from penstock.errors import ConfigError


class RegisteredBackend(NamedTuple):
    """Facts of a backend that are known without importing its framework."""

    integer: np.dtype[Any]
    """Type of token ids, labels and positions."""
    packages: tuple[str, ...]
    """Top packages that define its arrays and dtypes."""


BACKENDS: dict[str, RegisteredBackend] = {
    "numpy": RegisteredBackend(np.dtype(np.int64), ("numpy",)),
    "torch": RegisteredBackend(np.dtype(np.int64), ("torch",)),
    "mlx": RegisteredBackend(np.dtype(np.int32), ("mlx",)),
    "jax": RegisteredBackend(np.dtype(np.int32), ("jax", "jaxlib")),
}


def get_backend(name: str | Backend) -> Backend:
    """Backend by name, importing its framework; a backend is returned as it is.

    Raises ModuleNotFoundError, with what to install, when the framework is missing.
    """
    return _load(name) if isinstance(name, str) else name


def backend_of(array: object) -> Backend:
    """Backend of an array, by its class. Imports no framework that is not in use already."""
    name = backend_name(type(array))
    if name is None:
        raise ConfigError(
            f"not an array of a known framework: {type(array).__module__}.{type(array).__qualname__}; known are those "
            f"of {', '.join(BACKENDS)}"
        )
    return _load(name)


def backend_name(kind: type) -> str | None:
    """Name of the backend that a class of arrays or dtypes belongs to."""
    for base in kind.__mro__:
        package = base.__module__.partition(".")[0]
        for name, registered in BACKENDS.items():
            if package in registered.packages:
                return name
    return None


def framework_of(dtype: object) -> str | None:
    """Name of the framework of a dtype; None for a name, or a type of Python."""
    if isinstance(dtype, type):
        return "numpy" if issubclass(dtype, np.generic) else None
    return backend_name(type(dtype))


def is_array(value: object) -> bool:
    """True for an array or scalar of a known framework; imports nothing."""
    if isinstance(value, (np.ndarray, np.generic)):
        return True
    return hasattr(value, "shape") and backend_name(type(value)) is not None


def evaluate(value: Any) -> None:
    """Compute the lazy MLX arrays in a value, a list or a dict: another thread could not."""
    mx = sys.modules.get("mlx.core")
    if mx is not None:
        mx.eval(dict(value) if isinstance(value, Mapping) else value)


@cache
def _load(name: str) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}{did_you_mean(name, BACKENDS)}; known are {', '.join(BACKENDS)}")
    module = importlib.import_module(f"penstock.batching.backends.{name}")
    return cast(Backend, module.make())
