"""Which backend: by name, or by an array of it."""

from __future__ import annotations

import importlib
from functools import cache
from typing import cast

from penstock._suggest import did_you_mean
from penstock.batching.backends.base import Backend
from penstock.errors import ConfigError

__all__ = ["BACKENDS", "backend_of", "get_backend"]

BACKENDS = ("numpy", "torch", "mlx", "jax")

# The top package that an array's class is defined in.
_HOMES = {"numpy": "numpy", "torch": "torch", "mlx": "mlx", "jax": "jax", "jaxlib": "jax"}


def get_backend(name: str | Backend) -> Backend:
    """The backend of that name, importing its framework; a backend is returned as it is.

    Raises ModuleNotFoundError, with what to install, when the framework is missing.
    """
    return _load(name) if isinstance(name, str) else name


def backend_of(array: object) -> Backend:
    """The backend an array belongs to, told by its class. No framework is imported that is not in use already."""
    name = _name_of(type(array))
    if name is None:
        raise ConfigError(
            f"not an array of a known framework: {type(array).__module__}.{type(array).__qualname__}; "
            f"known are those of {', '.join(BACKENDS)}"
        )
    return _load(name)


def _name_of(kind: type) -> str | None:
    homes = (base.__module__.partition(".")[0] for base in kind.__mro__)
    return next((_HOMES[home] for home in homes if home in _HOMES), None)


@cache
def _load(name: str) -> Backend:
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}{did_you_mean(name, BACKENDS)}; known are {', '.join(BACKENDS)}")
    module = importlib.import_module(f"penstock.batching.backends.{name}")
    return cast(Backend, module.make())
