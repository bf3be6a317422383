"""Packages that are not always installed: imported when first needed, with a hint when they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["require"]


def require(module: str, extra: str) -> ModuleType:
    """The module; if it is not installed, an error that says which extra of penstock brings it.

        torch = require("torch", "torch")
        mx = require("mlx.core", "mlx")

    A module that is there but cannot find something of its own raises what it raises: that is another mistake.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"{module} is needed here and is not installed; install it with: pip install 'penstock[{extra}]'",
            name=error.name,
        ) from None
