"""Lazy names of a package: the stub `__init__.pyi` lists them, and each is imported when it is first used."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock._syntax import parse

__all__ = ["attach"]


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose stub says `from module import name as name`.

    The stub is the one list of names, for type checkers and at run time; `from module import *` stands for the
    `__all__` of a module of penstock, which is read, not imported. Submodules are found too.
    """
    stub = parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    modules = {
        name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        for name in (_all_of(str(node.module)) if alias.name == "*" else [alias.name])
    }
    names = sorted(modules, key=lambda name: (not name.isupper(), name[0].islower(), name))

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(import_module(modules[name]), name)
        elif name.startswith("_") or find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            value = import_module(f"{package}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: names, names


def _all_of(module: str) -> list[str]:
    """The `__all__` of a module of penstock, from its source."""
    path = Path(__file__).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
    for node in parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ImportError(f"{module} has no __all__, and a stub imports * from it; list its names there")
