"""What the verbs about a loader have in common: the file that describes it, what is changed in it, and opening it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock.cli.console import log_lines
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig, load_config

__all__ = [
    "ConfigArgument",
    "DebugOption",
    "JsonOption",
    "SetOption",
    "open_rank",
    "opened",
    "read_config",
    "read_planned",
]

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML or JSON file that describes a loader, or a token store.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the file, e.g. --set batch_size=4 --set weights.web=0.5. The value is YAML. May be "
        "given several times.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def read_config(path: Path, assignments: Sequence[str] | None) -> LoaderConfig:
    """What the file describes, with what `--set` changed."""
    for assignment in assignments or ():
        if not assignment.partition("=")[0].strip() or "=" not in assignment:
            raise typer.BadParameter(f"expected a.b=value, got {assignment!r}", param_hint="--set")
    return load_config(path, assignments or ())


def read_planned(path: Path, assignments: Sequence[str] | None) -> LoaderConfig:
    """The same, if it has a plan: steps that can be counted, looked at and gone to."""
    config = read_config(path, assignments)
    if config.arguments.get("streaming"):
        raise ConfigError(
            f"{config.name}: a stream has no plan, since what is in it is known when it has been read; prepare the "
            "data first, or try this with --set streaming=false"
        )
    return config


def open_rank(config: LoaderConfig, rank: int = 0, **more: Any) -> DataLoader:
    """The loader of one of the ranks that the file is made for, wherever this command runs.

    Batches are NumPy's unless the file names a backend: no verb needs a framework to look at them.
    """
    arguments = config.arguments
    place = {"rank": rank, "world_size": arguments.get("world_size") or 1, "model_parallel_size": 1}
    defaults = {"backend": arguments.get("backend") or "numpy", **place}
    return config.open(**{**defaults, **more})


@contextmanager
def opened(config: LoaderConfig, **more: Any) -> Iterator[DataLoader]:
    """The loader of the first rank; what is made of raw files on the way is told on stderr."""
    with log_lines(Console(stderr=True), logging.WARNING), open_rank(config, **more) as loader:
        yield loader
