"""`penstock trace CONFIG --step N | --row SRC:ROW`: rows of a step, and steps of a row."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock._amounts import counted
from penstock.cli.console import emit, print_table, say, table, working
from penstock.cli.options import ConfigArgument, JsonOption, SetOption, command, opened, read_planned
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader


@command()
def trace(
    config: ConfigArgument,
    step: Annotated[int | None, typer.Option(metavar="N", help="Show the rows of this step, from 0.")] = None,
    row: Annotated[
        str | None,
        typer.Option(metavar="SRC:ROW", help="Show the steps of this row; the number alone for one source."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs of the source to search.")] = 1,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which rows make up a step, or which steps use a row.

    \b
    penstock trace train.yaml --step 1200
    penstock trace train.yaml --row web:4711 --epochs 3
    """
    if (step is None) == (row is None):
        raise typer.BadParameter("pass one of --step and --row", param_hint="--step / --row")
    with opened(read_planned(config, assignments)) as loader:
        try:
            facts = _of_step(loader, step) if step is not None else _of_row(loader, row or "", epochs)
        except IndexError as error:
            raise ConfigError(str(error)) from error
    emit(facts, lambda: _print_step(facts) if step is not None else _print_row(facts), as_json=as_json)


def _of_step(loader: DataLoader, number: int) -> dict[str, Any]:
    with working(f"planning step {number:,}"):
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
    with working(f"searching row {number:,} of {source}", unit="epochs") as progress:
        uses = loader.plan.trace(source, number, epochs=epochs, progress=progress)
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
    """Store and row in it, if the source has several stores."""
    table = loader.sources[source].inputs.table
    if len(table.stores) == 1:
        return {}
    store, within = table.origin(row)
    return {"store": store.shown, "store_row": within}


def _print_step(facts: dict[str, Any]) -> None:
    samples, tokens = counted(facts["samples"], "sample"), counted(facts["tokens"], "token")
    skipped = ", skipped: not delivered" * facts["skipped"]
    say(f"step {facts['step']:,}, epoch {facts['epoch']}: {samples}, {tokens}{skipped}", style="bold")
    stores = any("store" in part for part in facts["parts"])
    rows = (
        (
            str(part["sample"]),
            part["source"],
            str(part["row"]),
            f"{part['start']}..{part['start'] + part['tokens']}",
            *([part["store"], str(part["store_row"])] if stores else []),
        )
        for part in facts["parts"]
    )
    print_table(table([">sample", "source", ">row", ">tokens", *(["store", ">row there"] if stores else [])], rows))


def _print_row(facts: dict[str, Any]) -> None:
    store = f" ({facts['store']} row {facts['store_row']})" if "store" in facts else ""
    used = f"used {counted(len(facts['uses']), 'time')} in {counted(facts['epochs'], 'epoch')} of the source"
    say(f"{facts['source']} row {facts['row']}{store}: {used}", style="bold")
    rows = [
        (str(use["step"]), str(use["epoch"]), str(use["sample"]), "" if use["delivered"] else "not delivered")
        for use in facts["uses"]
    ]
    if rows:
        print_table(table([">step", ">epoch", ">sample", ""], rows))
