"""`penstock verify-resume CONFIG`: exact resumption of a loader, checked by stopping it at many steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from penstock._amounts import counted
from penstock.cli.console import emit, found_problems, print_table, say, table, working
from penstock.cli.options import ConfigArgument, JsonOption, SetOption, command, open_rank, opened, read_planned
from penstock.loaders.verification import ResumeReport
from penstock.loaders.verification import verify_resume as verify


@command()
def verify_resume(
    config: ConfigArgument,
    steps: Annotated[int, typer.Option(min=2, metavar="N", help="Number of steps to compare in each run.")] = 100,
    stops: Annotated[int, typer.Option(min=1, metavar="K", help="Stops per run, in addition to ends of epochs.")] = 4,
    worlds: Annotated[
        str, typer.Option(metavar="1,2,4", help="World sizes to change between; the global batch stays.")
    ] = "1,2,4",
    seed: Annotated[int, typer.Option(help="Seed of the steps to stop at.")] = 0,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop and resume the loader at random steps and at ends of epochs, on other numbers of ranks, with and without
    prefetching, and compare every batch, byte for byte, with a run that was never stopped.

    Exit codes: 0 all batches are the same; 1 an error; 3 a batch differs.
    """
    sizes = _read_worlds(worlds)
    described = read_planned(config, assignments)
    shared: dict[str, Any] = {}
    if described.arguments.get("tokenizer") is not None:
        # Dozens of loaders share one tokenizer.
        with opened(described) as loader:
            shared["tokenizer"] = loader.sources[0].inputs.tokenizer
    with working(f"stopping and resuming {described.name}", unit="steps") as progress:
        report = verify(
            lambda **more: open_rank(described, **shared, **more),
            steps=steps,
            stops=stops,
            worlds=sizes,
            seed=seed,
            progress=progress,
        )
    emit(asdict(report), lambda: _print(report), as_json=as_json)
    if report.difference is not None:
        found_problems()


def _read_worlds(given: str) -> list[int]:
    try:
        worlds = [int(word) for word in given.split(",")]
    except ValueError:
        worlds = [0]
    if min(worlds) < 1:
        raise typer.BadParameter(f"expected numbers such as 1,2,4, got {given!r}", param_hint="--worlds")
    return worlds


def _print(report: ResumeReport) -> None:
    runs = (
        ["auto" if run.prefetch is None else str(run.prefetch), _listed(run.worlds), _listed(run.stops)]
        for run in report.runs
    )
    print_table(table(["prefetch", "ranks", "stopped before steps"], runs))
    for reason in report.left_out:
        say(f"left out: {reason}")
    if report.difference is not None:
        say(f"NOT the same: {report.difference}", style="bold red")
        return
    ends = f", with {counted(len(report.epoch_ends), 'end')} of an epoch" if report.epoch_ends else ""
    say(
        f"the same, byte for byte: {report.steps} steps{ends}, {report.stops} stops in {len(report.runs)} runs; "
        f"the state has {report.state_bytes} bytes"
    )


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
