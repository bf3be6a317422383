"""Which stage a name means: the built-in ones, read off the packages themselves, and those of plugins.

A built-in source or sink is called as its class without the ending (`JsonlSource` is `jsonl`, `QueueSink` is `queue`),
a transform as its class (`CountWords` is `count_words`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any

import orjson
import typer

from penstock import __version__, sinks, sources, transforms
from penstock import plugins as installed_plugins
from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, PluginError
from penstock.fsqueue import QueueSink, QueueSource

__all__ = ["Entry", "built_in", "entries", "plugins", "resolve"]


Maker = Callable[..., Any]

_PACKAGES = {"sources": sources, "transforms": transforms, "sinks": sinks}
_ENDINGS = {"sources": "Source", "transforms": "", "sinks": "Sink"}
_METHODS = {"sources": "next_batch", "transforms": "transform", "sinks": "consume"}
_ELSEWHERE: dict[str, list[type]] = {"sources": [QueueSource], "transforms": [], "sinks": [QueueSink]}
"""Stages that live with what they belong to."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the catalogue."""

    group: str
    name: str
    package: str
    version: str
    target: str
    problem: str | None = None
    """Why it cannot be used, if it cannot."""


def built_in(group: str) -> dict[str, Maker]:
    """The stages that come with penstock, by name."""
    package, ending = _PACKAGES[group], _ENDINGS[group]
    found: dict[str, Maker] = {}
    for public in package.__all__:
        stage = getattr(package, public)
        if not isinstance(stage, type) or not hasattr(stage, _METHODS[group]):
            continue
        # A sink that writes nowhere is of no use to a command: what it held is gone when the command ends.
        if group == "sinks" and "path" not in inspect.signature(stage).parameters:
            continue
        found[_snake_case(public.removesuffix(ending))] = stage
    return found | {_snake_case(stage.__name__.removesuffix(ending)): stage for stage in _ELSEWHERE[group]}


def resolve(group: str, name: str) -> Maker:
    """What makes the stage of that name: built in, of a plugin, or, for sources and sinks, of a plugin's format."""
    own = built_in(group)
    if name in own:
        return own[name]
    installed = {(plugin.group, plugin.name) for plugin in installed_plugins.installed()}
    if (group, name) in installed:
        return installed_plugins.find(group, name)  # type: ignore[no-any-return]
    if group != "transforms" and ("formats", name) in installed:
        maker = getattr(installed_plugins.find("formats", name), group.removesuffix("s"))
        if maker is None:
            raise ConfigError(f"the format {name!r} has no {group.removesuffix('s')}")
        return maker  # type: ignore[no-any-return]
    known = [*own, *(there for kind, there in installed if kind in (group, "formats"))]
    hint = did_you_mean(name, known) or "; `penstock plugins` lists them"
    raise ConfigError(f"no {group.removesuffix('s')} is called {name!r}{hint}")


def entries() -> list[Entry]:
    """Everything that can be named, plugins loaded to see whether they can be."""
    own = [
        Entry(group, name, "penstock", __version__, f"{maker.__module__}:{maker.__qualname__}")
        for group in _PACKAGES
        for name, maker in sorted(built_in(group).items())
    ]
    return own + [
        Entry(plugin.group, plugin.name, plugin.package, plugin.version, plugin.target, _problem(plugin))
        for plugin in installed_plugins.installed()
    ]


def _problem(plugin: installed_plugins.Plugin) -> str | None:
    if plugin.group in _PACKAGES and plugin.name in built_in(plugin.group):
        return f"hidden by the built-in {plugin.name!r}"
    try:
        installed_plugins.find(plugin.group, plugin.name)
    except PluginError as error:
        return str(error)
    except SystemExit as error:
        return f"it calls sys.exit({error.code!r}) when it is imported; update or uninstall {plugin.package}"
    return None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object for each stage.")] = False,
) -> None:
    """List the built-in stages and those of installed plugins, with package, version and target.

    Plugins are loaded to see whether they can be; one that cannot is listed with the reason.
    """
    found = entries()
    if as_json:
        typer.echo(orjson.dumps([dataclasses.asdict(entry) for entry in found], option=orjson.OPT_INDENT_2))
        return
    order = {group: number for number, group in enumerate(dict.fromkeys(entry.group for entry in found))}
    for group, members in groupby(sorted(found, key=lambda entry: order[entry.group]), lambda entry: entry.group):
        typer.echo(f"{group}\n" + "\n".join(_lines(list(members))))


def _lines(members: list[Entry]) -> list[str]:
    cells = [[entry.name, f"{entry.package} {entry.version}", entry.target] for entry in members]
    widths = [max(map(len, column)) for column in zip(*cells)]
    lines = []
    for entry, row in zip(members, cells):
        line = "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip()
        lines.append(line if entry.problem is None else f"{line}\n    cannot be used: {entry.problem}")
    return lines
