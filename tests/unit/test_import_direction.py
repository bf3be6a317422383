"""Imports point down: a package knows the levels below its own, never those above, nor its neighbours."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock

ROOT = Path(penstock.__file__).parent

# From the bottom up. Names on one line are siblings and do not import each other.
LEVELS = [
    "_amounts errors _syntax",
    "_forks _suggest _lazy",
    "_optional arrays",
    "html memory types",
    "files",
    "metrics",
    "connections",
    "plugins",
    "pipeline",
    "tokenizers distributed",
    "order store",
    "sources sinks transforms",
    "chat",
    "corpus",
    "engines batching",
    "observe",
    "templates config",
    "fsqueue",
    "rl",
    "loaders datasets",
    "__init__ testing",
    "feed",
    "report",
    "ui",
    "cli integrations",
    "__main__",
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names.split()}
# Names that the design documents print, kept importable: they hold no code, only names of packages above.
DOORS = {"transforms/formatting.py", "transforms/filtering.py"}
FRAMEWORKS = {"torch", "mlx", "jax", "pandas", "ray"}
FILES = sorted(ROOT.rglob("*.py"))


def package_of(path: Path) -> str:
    """The package or module directly below `penstock` that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: write the import in full, from penstock..."
            # `from penstock import sinks` means the package, `from penstock import Pipeline` what __init__ offers.
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def own_package(name: str) -> str | None:
    """Which of our packages a dotted name leads to, if any."""
    top, *rest = name.split(".")
    if top != "penstock":
        return None
    return rest[0] if rest and rest[0] in LEVEL else "__init__"


def test_every_package_has_its_level() -> None:
    here = {package_of(path) for path in FILES}
    assert here <= LEVEL.keys(), f"add to LEVELS: {sorted(here - LEVEL.keys())}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    if path.relative_to(ROOT).as_posix() in DOORS:
        return
    here = package_of(path)
    for line, name in imported_modules(path):
        there = own_package(name)
        if there is not None and there != here:
            assert LEVEL[there] < LEVEL[here], f"{path}:{line}: {here} must not import {there} ({name})"


def test_frameworks_are_imported_in_backends_only() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in FILES
        for line, name in imported_modules(path)
        if name.split(".")[0] in FRAMEWORKS and path.parent.name != "backends"
    ]
    assert not found
