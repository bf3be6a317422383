"""Sources, transforms, sinks and formats that other packages bring along, found by entry points.

In the other package's `pyproject.toml`:

    [project.entry-points."penstock.transforms"]
    shout = "my_package:Shout"

    [project.entry-points."penstock.formats"]
    ini = "my_package:INI"        # a penstock.plugins.Format

Nothing is imported until it is used by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock.errors import PluginError

__all__ = ["GROUPS", "Format", "Plugin", "find", "formats", "installed"]

GROUPS = ("sources", "transforms", "sinks", "formats")


@dataclass(frozen=True, slots=True)
class Format:
    """A file format: which suffixes it has, and what reads and writes it (either may be missing)."""

    name: str
    suffixes: tuple[str, ...]
    source: Callable[..., Any] | None = None
    sink: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed entry point."""

    group: str
    name: str
    target: str
    package: str
    version: str


def installed() -> list[Plugin]:
    """Every plugin that is installed, without importing any."""
    return [
        Plugin(group, point.name, point.value, point.dist.name if point.dist else "?", point.dist.version if point.dist else "?")
        for group in GROUPS
        for point in _points(group)
    ]


def find(group: str, name: str) -> Any:
    """The object behind an installed plugin's name."""
    points = {point.name: point for point in _points(group)}
    if name not in points:
        near = difflib.get_close_matches(name, points, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PluginError(f"no plugin called {name!r} in penstock.{group}; installed: {sorted(points) or 'none'}{hint}")
    return _load(points[name], group)


@cache
def formats() -> tuple[Format, ...]:
    """The file formats that plugins add."""
    found = []
    for point in _points("formats"):
        loaded = _load(point, "formats")
        if not isinstance(loaded, Format):
            raise PluginError(f"plugin {point.name!r} in penstock.formats is {loaded!r}, expected a penstock.plugins.Format")
        found.append(loaded)
    return tuple(found)


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=f"penstock.{group}"), key=lambda point: point.name))


def _load(point: EntryPoint, group: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else "?"
        raise PluginError(
            f"plugin {point.name!r} (penstock.{group}, from {package}) cannot be loaded: "
            f"{type(error).__name__}: {error}; update or uninstall {package}"
        ) from error
