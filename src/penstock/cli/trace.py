"""`penstock trace CONFIG --step N | --row SRC:ROW`: which rows a step is made of, and which steps use a row."""

from __future__ import annotations

from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.cli.loader_files import ConfigArgument, DebugOption, JsonOption, SetOption, opened, read_planned
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader

__all__ = ["trace"]


def trace(
    config: ConfigArgument,
    step: Annotated[int | None, typer.Option(metavar="N", help="The rows of this step, counted from 0.")] = None,
    row: Annotated[
        str | None, typer.Option(metavar="SRC:ROW", help="The steps of this row; the number alone for one source.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the source of the row to look through.")] = 1,
    assignments: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Say what a step is made of, or which steps use a row, past and future.

    \b
    penstock trace train.yaml --step 1200
    penstock trace train.yaml --row web:4711 --epochs 3
    """
    if (step is None) == (row is None):
        raise typer.BadParameter("pass one of --step and --row", param_hint="--step / --row")
    with clear_exits(debug=debug), opened(read_planned(config, assignments)) as loader:
        try:
            facts = _of_step(loader, step) if step is not None else _of_row(loader, row or "", epochs)
        except IndexError as error:
            raise ConfigError(str(error)) from error
    if as_json:
        typer.echo(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    elif step is not None:
        _print_step(facts)
    else:
        _print_row(facts)


def _of_step(loader: DataLoader, number: int) -> dict[str, Any]:
    step = loader.plan.step(number)
    samples = step.samples
    parts = zip(
        samples.numbers().tolist(),
        step.sources.tolist(),
        samples.rows.tolist(),
        samples.starts.tolist(),
        samples.lengths.tolist(),
    )
    return {
        "step": number,
        "epoch": step.epoch,
        "skipped": loader.plan.skipped(number),
        "samples": len(samples),
        "tokens": samples.tokens,
        "parts": [
            {"sample": sample, "source": step.names[source], "row": row, "start": start, "tokens": length}
            | _origin(loader, source, row)
            for sample, source, row, start, length in parts
        ],
    }


def _of_row(loader: DataLoader, given: str, epochs: int) -> dict[str, Any]:
    source, number = _read_row(given, loader.plan.names)
    uses = loader.plan.trace(source, number, epochs=epochs)
    return {
        "source": source,
        "row": number,
        **_origin(loader, loader.plan.names.index(source), number),
        "epochs": epochs,
        "uses": [
            {"step": use.step, "epoch": use.epoch, "sample": use.sample, "delivered": not use.skipped} for use in uses
        ],
    }


def _read_row(given: str, names: tuple[str, ...]) -> tuple[str, int]:
    source, colon, number = given.rpartition(":")
    if not number.isdecimal() or (not colon and len(names) > 1):
        example = f"{names[0]}:4711" if len(names) > 1 else "4711"
        raise ConfigError(f"--row: expected a source and a row, as {example}, got {given!r}; sources: {list(names)}")
    return source if colon else names[0], int(number)


def _origin(loader: DataLoader, source: int, row: int) -> dict[str, Any]:
    """Where the row lies, if the source is more than one store."""
    table = loader.sources[source].inputs.table
    if len(table.stores) == 1:
        return {}
    store, within = table.origin(row)
    return {"store": store.shown, "store_row": within}


def _print_step(facts: dict[str, Any]) -> None:
    console = output()
    skipped = ", skipped: not delivered" if facts["skipped"] else ""
    console.print(
        f"step {facts['step']:,}, epoch {facts['epoch']}: {facts['samples']:,} samples, {facts['tokens']:,} tokens"
        f"{skipped}",
        style="bold",
        highlight=False,
    )
    stores = any("store" in part for part in facts["parts"])
    table = _table("sample", "source", "row", "tokens", *(["store", "row there"] if stores else []))
    for part in facts["parts"]:
        tokens = f"{part['start']}..{part['start'] + part['tokens']}"
        there = [part["store"], str(part["store_row"])] if stores else []
        table.add_row(str(part["sample"]), Text(part["source"]), str(part["row"]), tokens, *there)
    print_table(console, table)


def _print_row(facts: dict[str, Any]) -> None:
    console = output()
    passes = f"{facts['epochs']} epoch{'s' * (facts['epochs'] != 1)} of the source"
    there = f" ({facts['store']} row {facts['store_row']})" if "store" in facts else ""
    count = len(facts["uses"])
    console.print(
        Text(f"{facts['source']} row {facts['row']}{there}: used {count} time{'s' * (count != 1)} in {passes}"),
        style="bold",
    )
    if not count:
        return
    table = _table("step", "epoch", "sample", "")
    for use in facts["uses"]:
        table.add_row(
            str(use["step"]), str(use["epoch"]), str(use["sample"]), "" if use["delivered"] else "not delivered"
        )
    print_table(console, table)


def _table(*columns: str) -> Table:
    table = Table.grid(padding=(0, 2))
    for name in columns:
        table.add_column(justify="left" if name in ("source", "store", "") else "right")
    table.add_row(*columns, style="bold")
    return table
