"""`penstock plugins`: names of the built-in stages and of those of plugins.

The name of a built-in source or sink is its class without the ending (`JsonlSource` is `jsonl`, `QueueSink` is
`queue`), that of a transform its class (`CountWords` is `count_words`).
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Annotated, Any

import typer

from penstock import __version__, sinks, sources, transforms
from penstock import plugins as installed_plugins
from penstock._suggest import did_you_mean
from penstock.cli.console import emit, working
from penstock.cli.options import command
from penstock.errors import ConfigError, PluginError
from penstock.fsqueue import QueueSink, QueueSource
from penstock.plugins import Format

Maker = Callable[..., Any]

_PACKAGES = {"sources": sources, "transforms": transforms, "sinks": sinks}
_ENDINGS = {"sources": "Source", "transforms": "", "sinks": "Sink"}
_METHODS = {"sources": "next_batch", "transforms": "transform", "sinks": "consume"}
_ELSEWHERE: dict[str, list[type]] = {"sources": [QueueSource], "transforms": [], "sinks": [QueueSink]}
"""Stages of other packages."""


@dataclass(frozen=True, slots=True)
class StageEntry:
    """Stage in the listing."""

    group: str
    name: str
    package: str
    version: str
    target: str
    summary: str = ""
    """First sentence of its documentation."""
    arguments: list[str] = field(default_factory=list)
    """As they are written in Python: `column`, `into='words'`, `*, strict=False`."""
    problem: str | None = None
    """Reason why it cannot be used."""


def built_in(group: str) -> dict[str, Maker]:
    """The stages that come with penstock, by name."""
    package, ending = _PACKAGES[group], _ENDINGS[group]
    found: dict[str, Maker] = {}
    for public in package.__all__:
        stage = getattr(package, public)
        if not isinstance(stage, type) or not hasattr(stage, _METHODS[group]):
            continue
        # Without a path, the output of a sink would be lost when the command ends.
        if group == "sinks" and not {"path", "url"} & inspect.signature(stage).parameters.keys():
            continue
        found[_snake_case(public.removesuffix(ending))] = stage
    return found | {_snake_case(stage.__name__.removesuffix(ending)): stage for stage in _ELSEWHERE[group]}


def resolve(group: str, name: str) -> Maker:
    """The class or function of a stage: built in, of a plugin, or, for sources and sinks, of a plugin's format."""
    own = built_in(group)
    if name in own:
        return own[name]
    installed = {(plugin.group, plugin.name) for plugin in installed_plugins.installed()}
    if (group, name) in installed:
        return installed_plugins.find(group, name)  # type: ignore[no-any-return]
    if group != "transforms" and ("formats", name) in installed:
        maker = getattr(installed_plugins.find("formats", name), group.removesuffix("s"))
        if maker is None:
            raise ConfigError(f"format {name!r} has no {group.removesuffix('s')}")
        return maker  # type: ignore[no-any-return]
    known = [*own, *(plugin for kind, plugin in installed if kind in (group, "formats"))]
    hint = did_you_mean(name, known) or "; `penstock plugins` lists them"
    raise ConfigError(f"no {group.removesuffix('s')} is called {name!r}{hint}")


def entries() -> list[StageEntry]:
    """All stages; plugins are loaded to check them."""
    own = [
        StageEntry(group, name, "penstock", __version__, f"{maker.__module__}:{maker.__qualname__}", *_described(maker))
        for group in _PACKAGES
        for name, maker in sorted(built_in(group).items())
    ]
    return own + [_entry(plugin) for plugin in installed_plugins.installed()]


def _entry(plugin: installed_plugins.Plugin) -> StageEntry:
    entry = StageEntry(plugin.group, plugin.name, plugin.package, plugin.version, plugin.target)
    if plugin.group in _PACKAGES and plugin.name in built_in(plugin.group):
        return replace(entry, problem=f"hidden by the built-in {plugin.name!r}")
    try:
        found = installed_plugins.find(plugin.group, plugin.name)
    except PluginError as error:
        return replace(entry, problem=str(error))
    except SystemExit as error:
        reason = f"it calls sys.exit({error.code!r}) when it is imported; update or uninstall {plugin.package}"
        return replace(entry, problem=reason)
    summary, arguments = _described(found)
    return replace(entry, summary=summary, arguments=arguments)


def _described(stage: Any) -> tuple[str, list[str]]:
    """First sentence of the documentation of a stage, and its arguments; a format has suffixes instead."""
    if isinstance(stage, Format):
        sides = [name for name in ("source", "sink") if getattr(stage, name) is not None]
        return f"Files that end in {', '.join(stage.suffixes)}: {' and '.join(sides)}.", []
    text = " ".join((inspect.getdoc(stage) or "").partition("\n\n")[0].split())
    if isinstance(stage, type) and text.startswith(f"{stage.__name__}("):
        text = ""  # a dataclass without documentation
    try:
        parameters = inspect.signature(stage).parameters.values()
    except (TypeError, ValueError):
        return text, []
    shown = [re.sub(r"^(\**\w+)\s*:.*?(\s*=.*)?$", r"\1\2", str(each)).replace(" = ", "=") for each in parameters]
    sentence = re.match(r".+?(?<!\bal)\.(?=\s|$)", text)
    return sentence[0] if sentence else text, shown


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@command()
def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array, one object for each stage.")] = False,
) -> None:
    """List the built-in stages and those of installed plugins: what each does, and its arguments.

    Plugins are loaded to check them; one that cannot be loaded is listed with the reason.
    """
    with working("loading plugins"):
        found = entries()

    def show() -> None:
        order = {group: number for number, group in enumerate(dict.fromkeys(entry.group for entry in found))}
        for group, members in groupby(sorted(found, key=lambda entry: order[entry.group]), lambda entry: entry.group):
            typer.echo("\n".join([group, *_lines(list(members))]))

    emit([dataclasses.asdict(entry) for entry in found], show, as_json=as_json)


def _lines(members: list[StageEntry]) -> Iterator[str]:
    """Name and summary, with the arguments below; of a plugin also its package and target."""
    width = max(len(entry.name) for entry in members)
    for entry in members:
        yield f"  {entry.name:<{width}}  {entry.summary or entry.target}"
        margin = " " * (width + 4)
        if entry.arguments:
            yield margin + ", ".join(entry.arguments)
        if entry.package != "penstock":
            yield f"{margin}{entry.package} {entry.version}, {entry.target}"
        if entry.problem is not None:
            yield f"{margin}cannot be used: {entry.problem}"
