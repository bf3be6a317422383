"""`penstock prepare IN... --tokenizer T --out STORE`: raw files to a token store."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock._amounts import counted
from penstock.cli.console import emit, fact_table, log_lines, print_json, print_table, say, working
from penstock.cli.join import remove_splits, save_arguments
from penstock.cli.options import EngineOption, JsonOption, MetricsOption, QuietOption, command
from penstock.engines.driver import JobOptions
from penstock.engines.run import JobEngine, RayEngine, engine_of
from penstock.errors import ConfigError, UnfinishedJobError
from penstock.files.filesystems import shown
from penstock.loaders import Prepared, Recipe
from penstock.loaders import prepare as prepare_store
from penstock.memory import MemoryBudget
from penstock.memory.budget import format_bytes
from penstock.memory.pressure import free_large_blocks_at_once
from penstock.observe import Extent, closing_table, progress_on
from penstock.pipeline import PipelineConfig
from penstock.store import describe


@command([field.name for field in fields(Recipe) if field.init], stopped="stopped; the same command resumes")
def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="IN", help="Files, directories or globs.")],
    out: Annotated[str, typer.Option(metavar="STORE", help="Directory of the store, or its URL in an object store.")],
    recipe: Any,
    mode: Annotated[
        str, typer.Option(help="create, append, or overwrite; the last two make a new version of the store.")
    ] = "create",
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory to use, such as 512MiB; with --engine, of one task. Default: 1 GiB, 256 MiB of a task."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Number of threads. Default: as many as help.")] = None,
    on_error: Annotated[str, typer.Option(help="Policy for bad rows: raise, skip, quarantine.")] = "raise",
    quarantine: Annotated[str | None, typer.Option(metavar="FILE", help="JSONL file for quarantined rows.")] = None,
    wait_seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Wait for another process at the same store.")
    ] = 0.0,
    cache: Annotated[
        str | None, typer.Option(metavar="URL", help="Cache that machines share: redis://, s3://, or a directory.")
    ] = None,
    engine: EngineOption = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="I/N", help="Do this part of the work, 1/16 to 16/16; `penstock join STORE` does the rest."
        ),
    ] = None,
    metrics: MetricsOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Tokenize files into a store that training reads at random, memory-mapped.

    \b
    penstock prepare corpus/*.jsonl --tokenizer model/ --out corpus.store --filter gopher,c4 --dedup exact,minhash
    penstock prepare chats.jsonl --tokenizer model/ --out chats.store --template chatml --max-length 4096

    Rows with a column `text` are documents. Chats (messages, ShareGPT, Alpaca, prompt/completion) are rendered with the
    template and validated. Pairs of answers (chosen, rejected) and answers with a label (KTO) need --preference. The
    same command resumes after a crash, and does nothing if the store is complete.

    With --engine ray, a cluster does the work; with --split I/N, N processes of a Slurm array or a Kubernetes job that
    share a file system. The shards have the same bytes.
    """
    free_large_blocks_at_once()
    console, memory = Console(stderr=True), MemoryBudget(budget or "1 GiB")
    asked: dict[str, Any] = {"inputs": inputs, "out": out, "recipe": recipe, "mode": mode}
    asked |= {"on_error": on_error, "quarantine": quarantine, "budget": budget or "1 GiB", "workers": workers}
    chosen: Any = None if engine in (None, "local") else engine
    if chosen is not None and split is not None:
        raise ConfigError("--split is for runs without an engine, and --engine shares out the work itself; omit one")
    share = None if split is None else _share_of(split)
    if chosen is not None:
        chosen = RayEngine(
            address=None if engine == "ray" else engine, memory=budget or "256 MiB", cpus_per_task=workers or 1
        )
        engine_of(engine)
    with (
        log_lines(console, logging.WARNING if quiet else logging.INFO),
        working(f"preparing {shown(out)}", quiet=quiet),
    ):
        if split is not None:
            if cache is not None:
                raise ConfigError("--cache is for a store that one process makes, and --split makes a part; omit one")
            chosen = JobEngine(share=share, options=JobOptions(task_budget_bytes=memory.capacity))
            save_arguments(asked)
        try:
            prepared = prepare_store(
                inputs,
                out,
                Recipe(**recipe),
                mode=mode,
                config=PipelineConfig(workers=workers or "auto", on_error=on_error, quarantine=quarantine),  # type: ignore[arg-type]
                budget=memory,
                wait_seconds=wait_seconds,
                progress=None if quiet else lambda made: progress_on(console, Extent.of(made.source), str(made)),
                cache=cache,
                engine=chosen,
                metrics=metrics or None,
            )
        except UnfinishedJobError as state:
            unfinished = {"split": split, "finished": False, "state": str(state)}
            emit(unfinished, lambda: say(f"split {split}: {unfinished['state']}"), as_json=as_json)
            return
        remove_splits(asked, prepared)
    print_prepared(prepared, memory, as_json=as_json, quiet=quiet)


def _share_of(split: str) -> tuple[int, int]:
    """The part of the work that `3/16` names: 2 of 16, since parts are counted from 0."""
    part, _, parts = split.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise typer.BadParameter(
            f"expected a number and the number of splits, 1/16 to 16/16, got {split!r}", param_hint="--split"
        )
    return int(part) - 1, int(parts)


def print_prepared(
    prepared: Prepared,
    memory: MemoryBudget,
    *,
    as_json: bool,
    quiet: bool,
    why: str = "it was made of the same input in the same way before",
) -> None:
    """Print the store and the report of the run that made it, or why there is none."""
    if as_json:
        print_json(_facts(prepared), indent=False)
    elif not quiet:
        if prepared.report is None:
            say(f"{shown(prepared.path)} is ready: {why}")
        else:
            print_table(closing_table(prepared.report, budget_bytes=memory.capacity))
        print_table(fact_table(store_lines(_facts(prepared)["store"], prepared.tokens_per_second)))


def _facts(prepared: Prepared) -> dict[str, Any]:
    report = prepared.report
    with prepared.open() as store:
        facts = describe(store)
    return {
        "store": facts,
        "made": report is not None,
        "report": report.to_dict() if report is not None else None,
        "dropped_tokens": dict(prepared.dropped_tokens),
        "tokens_per_second": prepared.tokens_per_second,
    }


def store_lines(facts: dict[str, Any], tokens_per_second: float | None = None) -> Iterator[tuple[str, str, str]]:
    """Tokens, throughput, supervised share and row lengths of a store."""
    if facts["tokens"] is not None:
        rate = f"{tokens_per_second / 1e6:,.2f} M tokens/s" if tokens_per_second else ""
        yield "tokens", f"{facts['tokens']:,}", rate
    if facts["supervised_share"] is not None:
        yield "supervised", f"{facts['supervised_share']:.1%}", f"{facts['supervised']:,} tokens"
    if facts["lengths"]:
        spread = ", ".join(f"{name} {value:,}" for name, value in facts["lengths"].items() if name != "p50")
        yield "row length", f"{facts['lengths']['p50']:,}", f"median; {spread}"
    shards = counted(facts["shards"], "shard")
    yield "store", format_bytes(facts["bytes"]), f"{facts['path']}, version {facts['version']}, {shards}"
