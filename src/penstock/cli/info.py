"""`penstock info STORE`: what a store holds and what it was made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.cli.prepare import store_table
from penstock.store import describe, open_store, versions

__all__ = ["info"]


def info(
    store: Annotated[Path, typer.Argument(metavar="STORE", help="The directory of the store.")],
    version: Annotated[int | None, typer.Option(help="An older version.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Read everything and compare the checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Show rows, tokens, lengths, columns, versions and origin of a store; with --verify, check every byte of it."""
    with clear_exits(debug=debug):
        with open_store(store, version, verify="full" if verify else "touch") as opened:
            facts = describe(opened)
        facts["versions"] = [
            {"version": each.version, "rows": each.rows, "tokens": each.tokens, "created": each.created}
            for each in versions(store)
        ]
        if verify:
            facts["verified"] = True
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
        return
    console = output()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    table.add_row("rows", f"{facts['rows']:,}")
    table.add_row("columns", Text(", ".join(f"{name} {kind}" for name, kind in facts["columns"].items())))
    table.add_row("created", f"{facts['created']}")
    table.add_row("tokenizer", Text(facts["tokenizer"] or "not known"))
    if facts["template"]:
        table.add_row("template", facts["template"])
    for number, name in enumerate(facts["inputs"][:10]):
        table.add_row("made of" if number == 0 else "", Text(name))
    if len(facts["inputs"]) > 10:
        table.add_row("", f"and {len(facts['inputs']) - 10} more files")
    for number, step in enumerate(facts["transforms"]):
        table.add_row("steps" if number == 0 else "", Text(step))
    for number, each in enumerate(facts["versions"]):
        mark = "  (this one)" if each["version"] == facts["version"] else ""
        line = f"{each['version']}: {each['rows']:,} row{'s' * (each['rows'] != 1)}, {each['created']}{mark}"
        table.add_row("versions" if number == 0 else "", line)
    if verify:
        table.add_row("checksums", "all right")
    print_table(console, store_table(facts))
    print_table(console, table)
