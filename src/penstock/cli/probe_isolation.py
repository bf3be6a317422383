"""`penstock probe-isolation CONFIG --model M`: whether packed documents see each other in the model that is trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.batching.backends.attention import (
    AS_IT_IS,
    LEAK_TOLERANCE,
    LOSS_TOLERANCE,
    Isolation,
    load_causal_model,
    packed_rows,
)
from penstock.batching.backends.attention import probe_isolation as probe
from penstock.cli.console import clear_exits, output, print_table
from penstock.cli.loader_files import ConfigArgument, DebugOption, JsonOption, SetOption, opened, read_planned
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader

__all__ = ["probe_isolation"]

_MOST_BATCHES = 20


def probe_isolation(
    config: ConfigArgument,
    model: Annotated[
        Path, typer.Option(metavar="M", help="A directory with a transformers model; nothing is fetched.")
    ],
    step: Annotated[int, typer.Option(min=0, help="The first step to look for packed rows in.")] = 0,
    seed: Annotated[int, typer.Option(help="Decides what the changed document becomes.")] = 0,
    assignments: SetOption = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Change one document of a packed batch and see whether the logits of any other move; compare the loss of the
    packed batch with that of its documents one by one. In float32 on the CPU.

    Exit codes: 0 `model(**batch)` keeps documents apart; 1 it does not, or an error.
    """
    with clear_exits(debug=debug):
        try:
            loaded = load_causal_model(model)
            with opened(read_planned(config, assignments), backend="torch", device=None, pin_memory=False) as loader:
                batch = _packed_batch(loader, step)
                ways = probe(loaded, batch, seed=seed)
        except ModuleNotFoundError as error:
            raise ConfigError(str(error)) from error
    verdict = next(way for way in ways if way.way == AS_IT_IS)
    if as_json:
        typer.echo(orjson.dumps(_facts(batch, ways), option=orjson.OPT_INDENT_2))
    else:
        _print(batch, ways, verdict)
    if not verdict.isolates:
        raise typer.Exit(1)


def _packed_batch(loader: DataLoader, step: int) -> Any:
    """The first batch with several documents in a row."""
    loader.seek(step)
    for _ in range(_MOST_BATCHES):
        try:
            batch = loader.get_batch()
        except StopIteration:
            break
        if batch.document_ids is None:
            raise ConfigError(
                "batches have no document_ids: rows are not packed (set packing=best_fit or concat), or fields leave "
                "document_ids out; there is nothing to isolate, or no telling what"
            )
        if packed_rows(batch.to_numpy()["document_ids"]):
            return batch
    raise ConfigError(f"no row holds two documents in {_MOST_BATCHES} steps from {step} on; nothing to isolate")


def _facts(batch: Any, ways: list[Isolation]) -> dict[str, Any]:
    return {
        "step": batch.metadata["step"],
        "leak_tolerance": LEAK_TOLERANCE,
        "loss_tolerance": LOSS_TOLERANCE,
        "ways": [asdict(way) | {"isolates": way.isolates, "loss_difference": way.loss_difference} for way in ways],
    }


def _print(batch: Any, ways: list[Isolation], verdict: Isolation) -> None:
    console = output()
    table = Table.grid(padding=(0, 2))
    table.add_row("way", "attention", "isolates", "logits moved", "loss packed", "unpacked", style="bold")
    for way in ways:
        says = "yes" if way.isolates else "NO" if way.problem is None else "fails"
        figures = [f"{way.leak:.1e}", f"{way.packed_loss:.6f}", f"{way.unpacked_loss:.6f}"]
        cells = figures if way.problem is None else [way.problem]
        table.add_row(way.way, way.attention, says, *(Text(cell) for cell in cells))
    print_table(console, table)
    rows, tokens = batch.input_ids.shape
    console.print(
        f"step {batch.metadata['step']}, {rows} x {tokens} tokens; isolating means: logits of other documents move by "
        f"at most {LEAK_TOLERANCE:.0e} of the largest, loss differs by at most {LOSS_TOLERANCE:.0e}",
        highlight=False,
        soft_wrap=True,
    )
    if not verdict.isolates:
        better = [way for way in ways if way.isolates]
        advice = "; ".join(dict.fromkeys(_advice(way) for way in better)) or "train without packing"
        console.print(Text(f"{AS_IT_IS} lets documents see each other; {advice}"), style="bold red", soft_wrap=True)


def _advice(way: Isolation) -> str:
    if way.way == "block mask":
        kind = "bool" if way.attention == "sdpa" else "the model's own type"
        return f"use model(**batch.as_dict(block_mask=...)) with {kind} and attention {way.attention!r}"
    return f"pass position_ids and no attention_mask, with attention {way.attention!r}"
