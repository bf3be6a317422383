"""`penstock prepare IN... --tokenizer T --out STORE`: raw files to a token store."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.chat.templates import BUILT_IN
from penstock.cli.chat_options import ChatOption, chat_options, names
from penstock.cli.console import clear_exits, log_lines, output, print_table
from penstock.loaders import Prepared, Recipe
from penstock.loaders import prepare as prepare_store
from penstock.memory import MemoryBudget
from penstock.memory.budget import format_bytes
from penstock.observe import Extent, closing_table, progress_on
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.store import describe

__all__ = ["prepare"]

TokenizerOption = Annotated[
    str,
    typer.Option(
        metavar="T", help="tokenizer.json, a model directory, a SentencePiece model, a tiktoken name, or byte."
    ),
]
TemplateOption = Annotated[
    str | None,
    typer.Option(
        metavar="X",
        help=f"Chat template: {', '.join(BUILT_IN)}, or a .jinja file. By default the tokenizer's own.",
    ),
]

ColumnsOption = Annotated[
    str,
    typer.Option(
        metavar="ROLE=COLUMN,...", help="Chats in plain columns, such as user=question,assistant=answer,system=context."
    ),
]

PreferenceOption = Annotated[
    bool | None,
    typer.Option(
        "--preference/--no-preference",
        help="Take rows with chosen and rejected answers, or with a label (KTO), as preferences; or as plain chats, of "
        "which chosen, or every answer whatever its label, is trained on. By default they are refused.",
    ),
]


def prepare(
    inputs: Annotated[list[str], typer.Argument(metavar="IN...", help="Files, directories or globs.")],
    tokenizer: TokenizerOption,
    out: Annotated[Path, typer.Option(metavar="STORE", help="The directory of the store.")],
    template: TemplateOption = None,
    column: Annotated[str | None, typer.Option(help="The column with a document's text. By default: text.")] = None,
    filters: Annotated[
        str, typer.Option("--filter", metavar="A,B", help="Quality filters: gopher, c4, fineweb, length, latin.")
    ] = "",
    dedup: Annotated[str, typer.Option(metavar="A,B", help="Drop duplicates: exact, minhash, or both.")] = "",
    train_on: Annotated[
        str, typer.Option(metavar="WHAT", help="Of chats: assistant, last, all, flags, or roles, comma-separated.")
    ] = "assistant",
    eot: Annotated[bool, typer.Option(help="Train on the token that ends an assistant turn.")] = True,
    columns: ColumnsOption = "",
    chat: ChatOption = None,
    preference: PreferenceOption = None,
    max_prompt_length: Annotated[
        int | None, typer.Option(min=1, help="Of preferences: a longer prompt loses its beginning.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="The most tokens a row may have.")] = None,
    truncation: Annotated[
        str, typer.Option(help="What becomes of longer rows: error, drop, left, right, split.")
    ] = "error",
    bos: Annotated[bool, typer.Option(help="Begin every document with BOS.")] = False,
    eos: Annotated[
        bool | None, typer.Option(help="End every document with EOS; by default if the tokenizer has one.")
    ] = None,
    keep: Annotated[str, typer.Option(metavar="A,B", help="Columns to keep beside the tokens.")] = "",
    mode: Annotated[
        str, typer.Option(help="create, append, or overwrite; the last two make a new version of the store.")
    ] = "create",
    budget: Annotated[str, typer.Option(help="Memory to use, such as 512MiB.")] = "1 GiB",
    workers: Annotated[int | None, typer.Option(min=1, help="Threads; by default as many as help.")] = None,
    on_error: Annotated[str, typer.Option(help="What becomes of bad rows: raise, skip, quarantine.")] = "raise",
    quarantine: Annotated[Path | None, typer.Option(metavar="FILE", help="JSONL file for quarantined rows.")] = None,
    fast: Annotated[bool, typer.Option(help="Use the fast tokenizer where it gives the reference's ids.")] = True,
    wait: Annotated[float, typer.Option(metavar="SECONDS", help="Wait for another process at the same store.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object on stdout.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no closing table.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Tokenize files into a store that training reads at random, memory-mapped.

    \b
    penstock prepare corpus/*.jsonl --tokenizer model/ --out corpus.store --filter gopher,c4 --dedup exact,minhash
    penstock prepare chats.jsonl --tokenizer model/ --out chats.store --template chatml --max-length 4096

    Rows with a column `text` are documents; chats (messages, ShareGPT, Alpaca, prompt/completion) are rendered with the
    template, and every row passes the supervision gate. Pairs of answers (chosen, rejected) and answers with a label
    (KTO) need --preference. The same command, killed or not, never does the same work twice: it goes on where it was,
    or says that the store is ready.
    """
    console = Console(stderr=True)
    stopped = "stopped; the same command goes on where it was"
    level = logging.WARNING if quiet else logging.INFO
    with clear_exits(debug=debug, stopped=stopped), log_lines(console, level):
        recipe = Recipe(
            tokenizer=tokenizer,
            template=template,
            column=column,
            filters=names(filters),
            dedup=names(dedup),
            max_length=max_length,
            truncation=truncation,
            add_bos=bos,
            add_eos=eos,
            keep=names(keep),
            fast=fast,
            chat=chat_options(train_on, columns, include_eot=eot, more=chat),
            preference=preference,
            max_prompt_length=max_prompt_length,
        )
        prepared = prepare_store(
            inputs,
            out,
            recipe,
            mode=mode,
            config=PipelineConfig(workers=workers or "auto", on_error=on_error, quarantine=quarantine),  # type: ignore[arg-type]
            budget=MemoryBudget(budget),
            wait_seconds=wait,
            progress=None if quiet else _progress(console),
        )
    if as_json:
        typer.echo(orjson.dumps(_facts(prepared), str, orjson.OPT_NON_STR_KEYS))
    elif not quiet:
        _print(prepared, MemoryBudget(budget).capacity)


def _progress(console: Console) -> Any:
    @contextlib.contextmanager
    def shown(pipeline: Pipeline) -> Iterator[Any]:
        with progress_on(console, Extent.of(pipeline.source), str(pipeline)) as progress:
            yield progress

    return shown


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


def _print(prepared: Prepared, budget_bytes: int) -> None:
    console = output()
    facts = _facts(prepared)
    if prepared.report is None:
        console.print(f"{prepared.path} is ready: made of the same input in the same way before", markup=False)
    else:
        print_table(console, closing_table(prepared.report, budget_bytes=budget_bytes))
    print_table(console, store_table(facts["store"], facts["tokens_per_second"]))


def store_table(facts: dict[str, Any], tokens_per_second: float | None = None) -> Table:
    """Tokens, their rate, the supervised share, and how long rows are."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column()
    if facts["tokens"] is not None:
        rate = f"{tokens_per_second / 1e6:,.2f} M tokens/s" if tokens_per_second else ""
        table.add_row("tokens", f"{facts['tokens']:,}", rate)
    if facts["supervised_share"] is not None:
        table.add_row("supervised", f"{facts['supervised_share']:.1%}", f"{facts['supervised']:,} tokens")
    if facts["lengths"]:
        spread = ", ".join(f"{name} {value:,}" for name, value in facts["lengths"].items() if name != "p50")
        table.add_row("row length", f"{facts['lengths']['p50']:,}", f"median; {spread}")
    shards = f"{facts['shards']} shard{'s' * (facts['shards'] != 1)}"
    table.add_row("store", format_bytes(facts["bytes"]), Text(f"{facts['path']}, version {facts['version']}, {shards}"))
    return table
