"""Which stage a name means: the built-in ones, read off the packages themselves, and those of plugins.

A built-in source or sink is called as its class without the ending (`JsonlSource` is `jsonl`, `QueueSink` is `queue`),
a transform as its class (`CountWords` is `count_words`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock import __version__, plugins, sinks, sources, transforms
from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError, PluginError
from penstock.fsqueue import QueueSink, QueueSource

__all__ = ["Entry", "built_in", "entries", "resolve"]

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
    installed = {(plugin.group, plugin.name) for plugin in plugins.installed()}
    if (group, name) in installed:
        return plugins.find(group, name)  # type: ignore[no-any-return]
    if group != "transforms" and ("formats", name) in installed:
        maker = getattr(plugins.find("formats", name), group.removesuffix("s"))
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
        for plugin in plugins.installed()
    ]


def _problem(plugin: plugins.Plugin) -> str | None:
    if plugin.group in _PACKAGES and plugin.name in built_in(plugin.group):
        return f"hidden by the built-in {plugin.name!r}"
    try:
        plugins.find(plugin.group, plugin.name)
    except PluginError as error:
        return str(error)
    except SystemExit as error:
        return f"it calls sys.exit({error.code!r}) when it is imported; update or uninstall {plugin.package}"
    return None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
