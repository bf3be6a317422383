"""`penstock verify-resume CONFIG`: stop the loader again and again, and see whether anyone could tell."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.cli.loader_files import (
    ConfigArgument,
    DebugOption,
    JsonOption,
    SetOption,
    open_rank,
    opened,
    read_planned,
)
from penstock.loaders.verification import ResumeReport
from penstock.loaders.verification import verify_resume as verify

__all__ = ["verify_resume"]


def verify_resume(
    config: ConfigArgument,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="How many steps to compare in each run.")] = 100,
    stops: Annotated[int, typer.Option(min=1, metavar="K", help="Stops in each run, beside those at epoch ends.")] = 4,
    worlds: Annotated[
        str, typer.Option(metavar="1,2,4", help="Numbers of ranks to change between; the global batch stays.")
    ] = "1,2,4",
    seed: Annotated[int, typer.Option(help="Decides where to stop.")] = 0,
    assignments: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Stop and resume the loader at random steps and at ends of epochs, on other numbers of ranks, with and without
    prefetching, and compare every batch with the run that was never stopped, byte for byte.

    Exit codes: 0 all batches are the same; 1 one is not, and which, or an error.
    """
    ranks = _read_worlds(worlds)
    with clear_exits(debug=debug):
        described = read_planned(config, assignments)
        shared: dict[str, Any] = {}
        if described.arguments.get("tokenizer") is not None:
            # There will be dozens of loaders, and one tokenizer is enough.
            with opened(described) as loader:
                shared["tokenizer"] = loader.sources[0].inputs.tokenizer

        def make(**more: Any) -> Any:
            return open_rank(described, **shared, **more)

        report = verify(make, steps=steps, stops=stops, worlds=ranks, seed=seed)
    if as_json:
        typer.echo(orjson.dumps(asdict(report), option=orjson.OPT_INDENT_2))
    else:
        _print(report)
    if report.difference is not None:
        raise typer.Exit(1)


def _read_worlds(given: str) -> list[int]:
    try:
        worlds = [int(word) for word in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, got {given!r}", param_hint="--worlds") from None
    if min(worlds) < 1:
        raise typer.BadParameter(f"a world has at least one rank, got {given!r}", param_hint="--worlds")
    return worlds


def _print(report: ResumeReport) -> None:
    console = output()
    table = Table.grid(padding=(0, 2))
    table.add_row("prefetch", "ranks", "stopped before steps", style="bold")
    for run in report.runs:
        prefetch = "auto" if run.prefetch is None else str(run.prefetch)
        table.add_row(prefetch, ", ".join(map(str, run.worlds)), ", ".join(map(str, run.stops)))
    print_table(console, table)
    for reason in report.left_out:
        console.print(Text(f"left out: {reason}"))
    if report.difference is not None:
        console.print(Text(f"NOT the same: {report.difference}"), style="bold red")
        return
    ends = len(report.epoch_ends)
    over = f", {ends} end{'s' * (ends != 1)} of an epoch among them" if ends else ""
    console.print(
        f"the same, byte for byte: {report.steps} steps{over}, {report.stops} stops in {len(report.runs)} runs; "
        f"the state has {report.state_bytes} bytes",
        highlight=False,
    )
