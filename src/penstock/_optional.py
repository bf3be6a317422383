"""Packages that are not always installed: imported when first needed, with a hint when they are missing."""

from __future__ import annotations

import importlib
import re
from functools import cache
from types import ModuleType

__all__ = ["package_version", "require"]

_VERSION = re.compile(r"^Version:[ \t]*(\S+)", re.MULTILINE)


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


@cache
def package_version(name: str) -> str | None:
    """Version of an installed package; None if there is none.

    `importlib.metadata.version` parses the whole description as an e-mail: 2 to 5 ms, with the interpreter lock.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(name)
    except PackageNotFoundError:
        return None
    line = _VERSION.search(found.read_text("METADATA") or "")
    return found.version if line is None else line[1]
