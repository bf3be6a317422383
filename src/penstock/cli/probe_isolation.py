"""`penstock probe-isolation CONFIG --model M`: test whether a model keeps packed documents apart."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.batching.backends.attention import (
    AS_IT_IS,
    LEAK_TOLERANCE,
    LOSS_TOLERANCE,
    Isolation,
    load_causal_model,
    packed_rows,
)
from penstock.batching.backends.attention import probe_isolation as probe
from penstock.cli.console import emit, found_problems, print_table, say, table, working
from penstock.cli.options import ConfigArgument, JsonOption, SetOption, command, opened, read_planned
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader

_MOST_BATCHES = 20


@command()
def probe_isolation(
    config: ConfigArgument,
    model: Annotated[Path, typer.Option(metavar="M", help="Directory of a transformers model; nothing is downloaded.")],
    step: Annotated[int, typer.Option(min=0, help="First step to search for packed rows.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the changed document.")] = 0,
    assignments: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change one document of a packed batch and check that the logits of the others stay; compare the loss of the
    packed batch with that of its documents one by one. In float32 on the CPU.

    Exit codes: 0 `model(**batch)` keeps documents apart; 1 an error; 3 it does not.
    """
    try:
        with working(f"loading {model}"):
            loaded = load_causal_model(model)
        with opened(read_planned(config, assignments), backend="torch", device=None, pin_memory=False) as loader:
            batch = _packed_batch(loader, step)
            with working(f"probing {model}"):
                ways = probe(loaded, batch, seed=seed)
    except ModuleNotFoundError as error:
        raise ConfigError(str(error)) from error
    verdict = next(way for way in ways if way.way == AS_IT_IS)
    emit(_facts(batch, ways), lambda: _print(batch, ways, verdict), as_json=as_json)
    if not verdict.isolates:
        found_problems()


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
                "batches have no document_ids: rows are not packed (set packing=best_fit or concat), or fields lacks "
                "document_ids"
            )
        if packed_rows(batch.to_numpy()["document_ids"]):
            return batch
    raise ConfigError(f"no row has two documents in {_MOST_BATCHES} steps from step {step} on; pass another --step")


def _facts(batch: Any, ways: list[Isolation]) -> dict[str, Any]:
    return {
        "step": batch.metadata["step"],
        "leak_tolerance": LEAK_TOLERANCE,
        "loss_tolerance": LOSS_TOLERANCE,
        "ways": [asdict(way) | {"isolates": way.isolates, "loss_difference": way.loss_difference} for way in ways],
    }


def _print(batch: Any, ways: list[Isolation], verdict: Isolation) -> None:
    rows = []
    for way in ways:
        isolates = "yes" if way.isolates else "NO" if way.problem is None else "fails"
        figures = [f"{way.leak:.1e}", f"{way.packed_loss:.6f}", f"{way.unpacked_loss:.6f}"]
        rows.append([way.way, way.attention, isolates, *(figures if way.problem is None else [way.problem])])
    print_table(table(["way", "attention", "isolates", "logits moved", "loss packed", "unpacked"], rows))
    size, tokens = batch.input_ids.shape
    say(
        f"step {batch.metadata['step']}, {size} x {tokens} tokens; isolated means: logits of other documents move by "
        f"at most {LEAK_TOLERANCE:.0e} of the largest, loss differs by at most {LOSS_TOLERANCE:.0e}"
    )
    if not verdict.isolates:
        advice = "; ".join(dict.fromkeys(_advice(way) for way in ways if way.isolates)) or "train without packing"
        say(f"{AS_IT_IS} lets documents see each other; {advice}", style="bold red")


def _advice(way: Isolation) -> str:
    if way.way == "block mask":
        kind = "bool" if way.attention == "sdpa" else "the model's own type"
        return f"use model(**batch.as_dict(block_mask=...)) with {kind} and attention {way.attention!r}"
    return f"pass position_ids and no attention_mask, with attention {way.attention!r}"
