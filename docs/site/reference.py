"""The reference: one page for each package, with every name that its stub or `__all__` lists.

A name is documented once, on the page of the nearest package that offers it; other packages link there.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TRAINERS = "penstock.integrations"
"""Its modules import the trainers, so they are found, but not imported."""


@dataclass(frozen=True)
class Entry:
    """A public name of a package, and the place that defines it."""

    package: str
    name: str
    home: str
    """Path of the definition: module and name."""


def packages() -> list[str]:
    """Packages and modules with a page: those whose names are public."""
    return sorted({entry.package for entry in entries()}, key=lambda name: (name.count(".") > 0, name))


@cache
def entries() -> tuple[Entry, ...]:
    """All public names: of packages, of modules with an `__all__` in no package's list, and of the integrations."""
    import penstock

    names = ["penstock", *(info.name for info in pkgutil.walk_packages(penstock.__path__, "penstock."))]
    found: list[Entry] = []
    for name in names:
        if "._" in name or name.startswith((f"{TRAINERS}.", "penstock.cli")):
            continue
        module = importlib.import_module(name)
        if hasattr(module, "__path__") or name.count(".") == 1:
            found.extend(Entry(name, public, home_of(module, public)) for public in getattr(module, "__all__", ()))
    return (*found, *trainer_entries(Path(penstock.__path__[0])))


def trainer_entries(source: Path) -> list[Entry]:
    """Classes and functions of the integrations that have no underscore, read from their files."""
    found = []
    for path in sorted((source / "integrations").glob("[a-z]*.py")):
        if path.stem == "loader_facts":
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name[0] != "_":
                found.append(Entry(TRAINERS, node.name, f"{TRAINERS}.{path.stem}.{node.name}"))
    return found


@cache
def pages() -> dict[str, str]:
    """The text of each page, by package, and of the index."""
    shown = owners()
    texts = {"index": index()}
    for package in packages():
        listed = [entry for entry in entries() if entry.package == package]
        lines = [f"# {package}", "", summary(package), ""]
        elsewhere = [entry for entry in listed if shown[entry.home] != entry]
        if elsewhere:
            lines += ["| name | documented as |", "|---|---|"]
            lines += [f"| `{entry.name}` | [{entry.home.rpartition('.')[2]}][{entry.home}] |" for entry in elsewhere]
            lines.append("")
        for entry in listed:
            if shown[entry.home] == entry:
                lines += [f"::: {entry.home}", "    options:", f"      heading: {entry.name}", ""]
        texts[package] = "\n".join(lines)
    return texts


def owners() -> dict[str, Entry]:
    """The entry under which each definition is documented: of the package nearest to it, not of another name."""
    best: dict[str, Entry] = {}
    for entry in entries():
        if entry.home not in best or nearness(entry) > nearness(best[entry.home]):
            best[entry.home] = entry
    return best


def nearness(entry: Entry) -> tuple[bool, bool, int]:
    """How well a page fits a definition."""
    return entry.home.endswith(f".{entry.name}"), entry.home.startswith(f"{entry.package}."), len(entry.package)


def index() -> str:
    """The page that lists the packages and their names."""
    lines = [
        "# Reference",
        "",
        "Every public name, with the package to import it from. Names that are not here may change at any time.",
        "",
        "| package | |",
        "|---|---|",
    ]
    for package in packages():
        names = " ".join(f"`{entry.name}`" for entry in entries() if entry.package == package)
        lines.append(f"| [{package}]({package}.md) | {summary(package)}<br>{names} |")
    return "\n".join(lines) + "\n"


def summary(package: str) -> str:
    """The first paragraph of the docstring of a package."""
    text = (importlib.import_module(package).__doc__ or "").strip().split("\n\n")[0]
    return " ".join(text.split())


def home_of(module: Any, name: str) -> str:
    """Path of the definition of a name: that of the object, if it says one and is there, else of the module."""
    value = getattr(module, name)
    where, what = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    named = isinstance(where, str) and isinstance(what, str) and where.startswith("penstock") and "<" not in what
    if named and hasattr(importlib.import_module(where), what.split(".")[0]):
        return f"{where}.{what}"
    return f"{module.__name__}.{name}"
