"""`penstock plan CONFIG`: what a run comes to, before it is started; and what another file would change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.console import clear_exits, output, print_table
from penstock.cli.loader_files import ConfigArgument, DebugOption, JsonOption, SetOption, opened, read_planned
from penstock.errors import ConfigError
from penstock.loaders.loader_file import LoaderConfig
from penstock.loaders.plan_summary import PlanSummary, summarize_plan
from penstock.memory.budget import format_bytes

__all__ = ["plan"]

_BYTES = ("batch_bytes", "prefetch_bytes")
_SHARES = ("padding_share", "packing_efficiency", "supervised_share", "share")


def plan(
    config: ConfigArgument,
    assignments: SetOption = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="How many to count; by default what the file says, or 1.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Count no further than this; needed for a mixture without end.")
    ] = None,
    diff: Annotated[
        Path | None, typer.Option(metavar="OTHER_CONFIG", help="Show only what differs in this one.")
    ] = None,
    as_json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Count every step of a loader: steps, tokens, padding, packing, what is learned, what is lost, memory.

    Nothing is estimated, and no token is read; only masks are. A million rows take a second or two. With --diff, --set
    applies to CONFIG alone, so `penstock plan a.yaml --set packing=best_fit --diff a.yaml` shows what packing changes.
    """
    with clear_exits(debug=debug):
        here = _planned(read_planned(config, assignments), epochs, steps)
        if assignments:
            here["config"] += f" ({', '.join(assignments)})"
        there = None if diff is None else _planned(read_planned(diff, None), epochs, steps)
    if there is not None:
        _print_diff(here, there, as_json=as_json)
    elif as_json:
        typer.echo(orjson.dumps(here, option=orjson.OPT_INDENT_2))
    else:
        _print(here)


def _planned(config: LoaderConfig, epochs: int | None, steps: int | None) -> dict[str, Any]:
    with opened(config) as loader:
        if loader.plan.stopping == "never" and loader.plan.schedule is not None and steps is None:
            raise ConfigError(
                f"{config.name}: a mixture with stopping_strategy=never has no end to count to; pass --steps"
            )
        backend = str(config.arguments.get("backend") or "torch")
        figures: PlanSummary = summarize_plan(loader, epochs or config.epochs, steps=steps, backend=backend)
        order = loader.plan.describe()
    return {"config": config.name, "settings": dict(config.tree), **figures.to_dict(), "order": order}


def _print(facts: Mapping[str, Any]) -> None:
    console = output()
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    for name, value, remark in _lines(facts):
        table.add_row(name, value, Text(remark))
    print_table(console, table)
    if len(facts["sources"]) > 1:
        console.print()
        print_table(console, _sources(facts))


def _lines(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    epochs = facts["epochs"]
    by_epoch = " + ".join(f"{epoch['steps']:,}" for epoch in epochs[:8]) + " + ..." * (len(epochs) > 8)
    skipped = f"{facts['skipped']:,} skipped" if facts["skipped"] else ""
    in_epochs = f"{len(epochs)} epochs: {by_epoch}" if len(epochs) > 1 else f"{len(epochs)} epoch"
    yield "steps", f"{facts['steps']:,}", ", ".join(filter(None, [in_epochs, skipped]))
    ranks = f"{facts['batch_size']:,} for each of {facts['world_size']:,} rank{'s' * (facts['world_size'] != 1)}"
    yield "global batch", f"{facts['global_batch']:,}", f"samples, {ranks}"
    yield "samples", f"{facts['samples']:,}", f"of {facts['documents']:,} documents or parts of them"
    yield "tokens", f"{facts['tokens']:,}", f"{_ratio(facts['tokens'], facts['steps']):,.0f} a step"
    yield "padding", _percent(facts["padding_share"]), f"{facts['slots'] - facts['tokens']:,} of {facts['slots']:,}"
    if facts["packing_efficiency"] is not None:
        yield "packing", _percent(facts["packing_efficiency"]), "of the room in samples is filled"
    yield "supervised", _percent(facts["supervised_share"]), f"{facts['supervised']:,} tokens"
    yield "longest", f"{facts['longest_sample']:,}", f"tokens of a sample; {facts['longest_row']:,} with padding"
    for number, (reason, tokens) in enumerate(facts["lost_tokens"].items()):
        yield "tokens lost" if number == 0 else "", f"{tokens:,}", reason
    if not facts["lost_tokens"]:
        yield "tokens lost", "0", ""
    yield "a batch", format_bytes(facts["batch_bytes"]), f"at most; {format_bytes(facts['prefetch_bytes'])} made ahead"
    if len(facts["sources"]) == 1:
        source = facts["sources"][0]
        stored = f"{source['stored_tokens']:,} tokens in {source['rows']:,} rows"
        yield "source", f"{source['passes']:.2f}", f"times all of {source['name']}, {stored}"
    edits = f", {facts['edits']} edit{'s' * (facts['edits'] != 1)}" if facts["edits"] else ""
    yield "plan", "", f"{facts['plan']}{edits}"


def _sources(facts: Mapping[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for _ in range(5):
        table.add_column(justify="right")
    table.add_row("source", "epochs", "samples", "tokens", "share", "rows", style="bold")
    for source in facts["sources"]:
        table.add_row(
            Text(source["name"]),
            f"{source['passes']:.3f}",
            f"{source['samples']:,}",
            f"{source['tokens']:,}",
            f"{source['share']:.2%}",
            f"{source['rows']:,}",
        )
    return table


def _print_diff(here: Mapping[str, Any], there: Mapping[str, Any], *, as_json: bool) -> None:
    ours, theirs = _flat(here), _flat(there)
    names = [name for name in dict.fromkeys([*ours, *theirs]) if name != "config"]
    different = {name: [ours.get(name), theirs.get(name)] for name in names if ours.get(name) != theirs.get(name)}
    if as_json:
        both = {"config": here["config"], "other": there["config"], "differences": different}
        typer.echo(orjson.dumps(both, option=orjson.OPT_INDENT_2))
        return
    console = output()
    if not different:
        console.print(Text(f"{here['config']} and {there['config']} make the same plan"))
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_row("", Text(here["config"]), Text(there["config"]), "")
    for name, (mine, other) in different.items():
        table.add_row(Text(name), Text(_shown(name, mine)), Text(_shown(name, other)), _change(name, mine, other))
    print_table(console, table)
    if here["plan"] == there["plan"] and here["edits"] == there["edits"] == 0:
        console.print("the order of samples is the same")


def _flat(facts: Any, above: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`; sources go by their names, other lists by number."""
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
        return _percent(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:,.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _change(name: str, here: Any, there: Any) -> str:
    """By how much the other one has more; shares speak for themselves."""
    if name.rpartition(".")[2] in _SHARES:
        return ""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (here, there))
    return f"{there / here - 1:+.1%}" if numbers and here else ""


def _percent(share: float | None) -> str:
    """With as many digits as a share close to all or nothing needs."""
    if share is None:
        return "-"
    digits = 1 if 0.001 <= share <= 0.999 or share in (0, 1) else 3
    return f"{share:.{digits}%}"


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
