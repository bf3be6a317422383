"""`penstock plugins`: every stage that can be named, where it comes from, and whether it can be loaded."""

from __future__ import annotations

import dataclasses
from itertools import groupby
from typing import Annotated

import orjson
import typer

from penstock.cli.catalogue import Entry, entries

__all__ = ["plugins"]


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
