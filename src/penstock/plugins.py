"""Plugins: sources, transforms, sinks, formats, datasets, filters and chat templates of other packages, found by entry
points.

In the other package's `pyproject.toml`:

    [project.entry-points."penstock.transforms"]
    shout = "my_package:Shout"    # a class, or a function that returns a transform

    [project.entry-points."penstock.formats"]
    ini = "my_package:INI"        # a penstock.plugins.Format

    [project.entry-points."penstock.datasets"]
    my-competition = "my_package:MyDataset"    # a penstock.datasets.KaggleDataset

    [project.entry-points."penstock.metrics"]
    wmae = "my_package:WMAE"      # a penstock.datasets.Metric

    [project.entry-points."penstock.filters"]
    no-shouting = "my_package:NoShouting"      # makes a transform, given the column of text

    [project.entry-points."penstock.templates"]
    my-chat = "my_package:TEMPLATE"            # Jinja text, the path of a file with it, or a function that returns one

A plugin is imported when it is used by name; formats are imported when a file is opened by its suffix.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from penstock._suggest import did_you_mean
from penstock.errors import PluginError

__all__ = ["GROUPS", "Format", "Plugin", "find", "formats", "installed"]

GROUPS = ("sources", "transforms", "sinks", "formats", "datasets", "metrics", "filters", "templates")


@dataclass(frozen=True, slots=True)
class Format:
    """File format: its suffixes, and the source and sink for them (either may be missing)."""

    name: str
    suffixes: tuple[str, ...]
    source: Callable[..., Any] | None = None
    sink: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class Plugin:
    """Installed entry point."""

    group: str
    name: str
    target: str
    package: str
    version: str


def installed() -> list[Plugin]:
    """All installed plugins; none is imported."""
    return [
        Plugin(group, point.name, point.value, _package(point), point.dist.version if point.dist else "?")
        for group in GROUPS
        for point in _points(group)
    ]


def find(group: str, name: str) -> Any:
    """The object that a plugin registers under this name."""
    points = [point for point in _points(group) if point.name == name]
    if len(points) == 1:
        return _load(points[0], group)
    if points:
        packages = " and ".join(_package(point) for point in points)
        raise PluginError(f"plugin {name!r} in penstock.{group} comes from {packages}; uninstall all but one")
    names = sorted({point.name for point in _points(group)})
    hint = did_you_mean(name, names)
    raise PluginError(f"no plugin called {name!r} in penstock.{group}; installed: {names or 'none'}{hint}")


@cache
def formats() -> tuple[Format, ...]:
    """The file formats that plugins add."""
    return tuple(_load(point, "formats") for point in _points("formats"))


@cache
def _points(group: str) -> tuple[EntryPoint, ...]:
    return tuple(sorted(entry_points(group=f"penstock.{group}"), key=lambda point: (point.name, _package(point))))


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else "?"


def _load(point: EntryPoint, group: str) -> Any:
    package = _package(point)
    try:
        loaded = point.load()
    except Exception as error:
        raise PluginError(
            f"plugin {point.name!r} (penstock.{group}, from {package}) cannot be loaded: "
            f"{type(error).__name__}: {error}; update or uninstall {package}"
        ) from error
    texts = (str, os.PathLike) if group == "templates" else ()
    wanted = isinstance(loaded, Format) if group == "formats" else callable(loaded) or isinstance(loaded, texts)
    if not wanted:
        expected = "a penstock.plugins.Format" if group == "formats" else "a class or a function"
        expected = "Jinja text, a path or a function" if texts else expected
        raise PluginError(
            f"plugin {point.name!r} (penstock.{group}, from {package}) is {loaded!r:.80}, expected {expected}; "
            f"update or uninstall {package}"
        )
    return loaded
