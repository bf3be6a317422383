"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["lazy"]


def lazy(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are in the modules that `places` says.

    Modules of the package are found too, whether or not anybody has imported them yet.
    """

    def get(name: str) -> Any:
        if name in places:
            value = getattr(import_module(places[name]), name)
        elif name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            value = import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get
