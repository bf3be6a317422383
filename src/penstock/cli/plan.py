"""`penstock plan CONFIG`: figures of a run before it starts, and the effect of another config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from penstock._amounts import counted, percent
from penstock.cli.console import emit, fact_table, print_table, say, table, working
from penstock.cli.options import ConfigArgument, JsonOption, SetOption, command, opened, read_planned
from penstock.errors import ConfigError
from penstock.loaders.loader_file import LoaderConfig
from penstock.loaders.plan_summary import PlanSummary, summarize_plan
from penstock.memory.budget import format_bytes

_BYTES = ("batch_bytes", "prefetch_bytes")
_SHARES = ("padding_share", "packing_efficiency", "supervised_share", "share")


@command()
def plan(
    config: ConfigArgument,
    assignments: SetOption = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Number of epochs to count. Default: that of the file, or 1.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Stop counting here; needed for an endless mixture.")] = None,
    diff: Annotated[
        str | None, typer.Option(metavar="OTHER_CONFIG", help="Show only the differences to this config.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Count steps, tokens, padding, packing, supervised tokens, lost tokens and memory of a loader.

    The figures are exact. Masks are read, tokens are not; a million rows take a second or two. With --diff, --set
    applies to CONFIG alone, so `penstock plan a.yaml --set packing=best_fit --diff a.yaml` shows the effect of packing.
    """
    here = _planned(read_planned(config, assignments), epochs, steps)
    if assignments:
        here["config"] += f" ({', '.join(assignments)})"
    if diff is not None:
        _emit_diff(here, _planned(read_planned(diff, None), epochs, steps), as_json=as_json)
    else:
        emit(here, lambda: _print(here), as_json=as_json)


def _planned(config: LoaderConfig, epochs: int | None, steps: int | None) -> dict[str, Any]:
    with opened(config) as loader:
        if loader.plan.stopping == "never" and loader.plan.schedule is not None and steps is None:
            raise ConfigError(f"{config.name}: a mixture with stopping_strategy=never is endless; pass --steps")
        backend = str(config.arguments.get("backend") or "torch")
        with working(f"planning {config.name}", unit="steps") as progress:
            figures: PlanSummary = summarize_plan(
                loader,
                epochs or config.epochs,
                steps=steps,
                backend=backend,
                progress=lambda done, share: progress(done, share=share),
            )
        order = loader.plan.describe()
    return {"config": config.name, "settings": config.shown_tree, **figures.to_dict(), "order": order}


def _print(facts: Mapping[str, Any]) -> None:
    print_table(fact_table(_lines(facts)))
    if len(facts["sources"]) > 1:
        rows = (
            (
                source["name"],
                f"{source['passes']:.3f}",
                f"{source['samples']:,}",
                f"{source['tokens']:,}",
                f"{source['share']:.2%}",
                f"{source['rows']:,}",
            )
            for source in facts["sources"]
        )
        say("")
        print_table(table(["source", ">epochs", ">samples", ">tokens", ">share", ">rows"], rows))


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    epochs = facts["epochs"]
    by_epoch = " + ".join(f"{epoch['steps']:,}" for epoch in epochs[:8]) + " + ..." * (len(epochs) > 8)
    in_epochs = counted(len(epochs), "epoch") + (f": {by_epoch}" if len(epochs) > 1 else "")
    yield "steps", f"{facts['steps']:,}", in_epochs + (f", {facts['skipped']:,} skipped" if facts["skipped"] else "")
    each = f"{facts['batch_size']:,} for each of {_ranks(facts)}"
    yield "global batch", f"{facts['global_batch']:,}", f"samples, {each}"
    yield "samples", f"{facts['samples']:,}", f"of {facts['documents']:,} documents or parts of them"
    if (ranks := facts["imbalance"]) is not None:
        measured = f" (first {ranks['steps']:,} steps)" if ranks["steps"] < facts["steps"] else ""
        costs = f"cost of the slowest rank over the mean, if contiguous; {ranks['balanced']:.3f} if {ranks['sharding']}"
        yield "imbalance", f"{ranks['contiguous']:.3f}", costs + measured
    per_step = facts["tokens"] / facts["steps"] if facts["steps"] else 0
    yield "tokens", f"{facts['tokens']:,}", f"{per_step:,.0f} per step"
    yield "padding", percent(facts["padding_share"]), f"{facts['slots'] - facts['tokens']:,} of {facts['slots']:,}"
    if facts["packing_efficiency"] is not None:
        yield "packing", percent(facts["packing_efficiency"]), "of the space in samples is filled"
    yield "supervised", percent(facts["supervised_share"]), f"{facts['supervised']:,} tokens"
    yield "longest", f"{facts['longest_sample']:,}", f"tokens in a sample; {facts['longest_row']:,} with padding"
    for number, (reason, tokens) in enumerate(facts["lost_tokens"].items()):
        yield "tokens lost" if number == 0 else "", f"{tokens:,}", reason
    if not facts["lost_tokens"]:
        yield "tokens lost", "0", ""
    yield "a batch", format_bytes(facts["batch_bytes"]), f"at most; {format_bytes(facts['prefetch_bytes'])} prefetched"
    if len(facts["sources"]) == 1:
        source = facts["sources"][0]
        stored = f"{source['stored_tokens']:,} tokens in {source['rows']:,} rows"
        yield "source", f"{source['passes']:.2f}", f"times all of {source['name']}, {stored}"
    yield "plan", "", facts["plan"] + (f", {counted(facts['edits'], 'edit')}" if facts["edits"] else "")


def _ranks(facts: Mapping[str, Any]) -> str:
    """Data ranks; with sizes of a mesh also its processes, of which several share a data rank."""
    sharing = math.prod(facts["settings"].get(name) or 1 for name in ("cp", "tp", "pp"))
    if sharing == 1:
        return counted(facts["world_size"], "rank")
    return f"{counted(facts['world_size'], 'data rank')}, {facts['world_size'] * sharing:,} processes"


def _emit_diff(here: Mapping[str, Any], there: Mapping[str, Any], *, as_json: bool) -> None:
    ours, theirs = _flat(here), _flat(there)
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name != "config"]
    different = {name: [ours.get(name), theirs.get(name)] for name in names if ours.get(name) != theirs.get(name)}

    def show() -> None:
        if not different:
            say(f"{here['config']} and {there['config']} make the same plan")
            return
        rows = ((name, _shown(name, a), _shown(name, b), _change(name, a, b)) for name, (a, b) in different.items())
        print_table(table(["", f">{here['config']}", f">{there['config']}", ">"], rows))
        if here["plan"] == there["plan"] and here["edits"] == there["edits"] == 0:
            say("the order of samples is the same")

    emit({"config": here["config"], "other": there["config"], "differences": different}, show, as_json=as_json)


def _flat(facts: Any, above: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; items of lists by their name or number."""
    if isinstance(facts, Mapping):
        pairs = [(str(key), value) for key, value in facts.items()]
    elif isinstance(facts, list) and facts and all(isinstance(item, Mapping) for item in facts):
        pairs = [(str(item.get("name", number)), item) for number, item in enumerate(facts)]
    else:
        return {above: facts}
    found: dict[str, Any] = {}
    for key, value in pairs:
        found |= _flat(value, f"{above}.{key}" if above else key)
    return found


def _shown(name: str, value: Any) -> str:
    last = name.rpartition(".")[2]
    if value is None:
        return "-"
    if last in _BYTES:
        return format_bytes(value)
    if last in _SHARES:
        return percent(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _change(name: str, here: Any, there: Any) -> str:
    """Relative change of a number; none of a share."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (here, there))
    return f"{there / here - 1:+.1%}" if numbers and here and name.rpartition(".")[2] not in _SHARES else ""
