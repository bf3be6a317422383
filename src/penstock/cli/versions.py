"""`penstock versions STORE`: every version of a store, what differs between two, and which one is current."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.errors import ConfigError, DataError
from penstock.memory.budget import format_bytes
from penstock.store import Difference, Manifest, checkout, diff
from penstock.store import versions as all_versions
from penstock.store.manifest import read_manifest, store_path

__all__ = ["versions"]

_LONG = 40


def versions(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The directory of the store.")],
    new: Annotated[
        int | None, typer.Argument(metavar="[NEW]", help="With --diff: the version to compare with.")
    ] = None,
    old: Annotated[
        int | None,
        typer.Option("--diff", metavar="OLD [NEW]", help="Show what NEW has that OLD has not; NEW: the current one."),
    ] = None,
    number: Annotated[
        int | None, typer.Option("--checkout", metavar="N", help="Make version N the current one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """List the versions of a store: when each was made, of what, and how much it holds; * marks the current one.

    A version is a list of shards that versions share, so --checkout is instant and loses nothing; whoever has the store
    open keeps the version it has.
    """
    with clear_exits(debug=debug):
        if old is not None and number is not None:
            raise ConfigError("--diff and --checkout were both given; expected one of them")
        if new is not None and old is None:
            raise ConfigError(f"{new} is the second version of --diff OLD NEW, and --diff is not there")
        if old is not None:
            found = diff(store, old, new)
            if as_json:
                typer.echo(orjson.dumps(dataclasses.asdict(found), option=orjson.OPT_INDENT_2))
            else:
                print_table(output(), _difference(found))
            return
        if number is not None:
            checkout(store, number)
        facts = _facts(store)
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    else:
        print_table(output(), _listed(facts))
        if facts["problem"]:
            typer.echo(f"penstock: {facts['problem']}", err=True)


def _facts(store: Path) -> dict[str, Any]:
    found = all_versions(store)
    current, problem = None, None
    try:
        current = read_manifest(store_path(store)).version
    except (DataError, FileNotFoundError) as error:  # the versions are there: one can be checked out
        problem = str(error)
    return {
        "path": str(store),
        "current": current,
        "problem": problem,
        "versions": [_version(manifest) for manifest in found],
    }


def _version(manifest: Manifest) -> dict[str, Any]:
    run = manifest.lineage[-1] if manifest.lineage else None
    return {
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "shards": len(manifest.shards),
        "bytes": manifest.bytes,
        "key": manifest.key,
        "inputs": [file.name for file in run.inputs] if run is not None else [],
        "transforms": list(run.transforms) if run is not None else [],
        "tokenizer": manifest.tokenizer,
        "runs": len(manifest.lineage),
    }


def _listed(facts: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("version", "created", "rows", "tokens", "shards", "size", "made of"):
        table.add_column(name, justify="left" if name in ("created", "made of") else "right")
    for each in facts["versions"]:
        table.add_row(
            f"{'*' * (each['version'] == facts['current'])}{each['version']}",
            each["created"],
            f"{each['rows']:,}",
            "-" if each["tokens"] is None else f"{each['tokens']:,}",
            f"{each['shards']:,}",
            format_bytes(each["bytes"]),
            Text(_made_of(each)),
        )
    return table


def _made_of(each: dict[str, Any]) -> str:
    """`version 1 + part-1.jsonl and 3 more files: ExactDedup, Tokenize`, as far as it is known; --json has it all."""
    inputs = each["inputs"]
    more = len(inputs) - 1
    files = f"{inputs[0]} and {more} more file{'s' * (more > 1)}" if more > 0 else "".join(inputs)
    steps = ", ".join(map(_name_of, each["transforms"]))
    if not files and not steps:
        files = f"tokenizer {each['tokenizer']}" if each["tokenizer"] else "not known"
    before = f"version {each['parent']} + " if each["runs"] > 1 and each["parent"] is not None else ""
    return before + ": ".join(part for part in (files, steps) if part)


def _name_of(step: str) -> str:
    """What a transform is called, of all that it says about itself."""
    told = re.match(r'\{.*?"transform":"(\w+)"', step)
    return told[1] if told else step if len(step) <= _LONG else f"{step[:_LONG]}..."


def _difference(found: Difference) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row(f"version {found.old} to {found.new}", "added", "removed")
    table.add_row("rows", f"+{found.rows_added:,}", f"-{found.rows_removed:,}")
    table.add_row("tokens", f"+{found.tokens_added:,}", f"-{found.tokens_removed:,}")
    table.add_row("shards", f"+{len(found.shards_added):,}", f"-{len(found.shards_removed):,}")
    for name, (was, now) in found.changed.items():
        table.add_row(f"{name} changed", Text(str(was)), Text(f"-> {now}"))
    return table
