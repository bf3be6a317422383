"""`penstock convert SRC DST --to FORMAT`: token data between stores and files of Megatron or MDS."""

from __future__ import annotations

import logging
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock._amounts import counted
from penstock.cli.console import log_lines, print_json, print_table, say, working
from penstock.cli.options import JsonOption, QuietOption, command
from penstock.corpus.convert import FORMATS
from penstock.corpus.convert import convert as convert_tokens
from penstock.files.filesystems import shown_place
from penstock.memory import MemoryBudget
from penstock.observe import Extent, closing_table, progress_on


@command(stopped="stopped; run it again")
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A store, or token data of another program.")],
    out: Annotated[str, typer.Argument(metavar="DST", help="Directory, or the name of Megatron files.")],
    to: Annotated[str, typer.Option(help=f"Format to write: {', '.join(FORMATS)}.")],
    rows: Annotated[str | None, typer.Option(help="Rows of Megatron files: documents or sequences.")] = None,
    eot: Annotated[int | None, typer.Option(help="Id that separates the documents of a flat .bin file.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Type of tokens that a file does not name, such as int64.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the tokens.")] = None,
    mask: Annotated[str | None, typer.Option(metavar="COLUMN", help="Column of the mask of supervised tokens.")] = None,
    vocab_size: Annotated[int | None, typer.Option(min=1, help="Refuse ids from this number on.")] = None,
    drop_mask: Annotated[bool, typer.Option("--drop-mask", help="Write Megatron files without the mask.")] = False,
    compression: Annotated[str | None, typer.Option(help="Compression of MDS shards: zstd.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at DST.")] = False,
    budget: Annotated[str, typer.Option(help="Memory to use, such as 512MiB.")] = "1 GiB",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Convert token data; no text is tokenized, and every token stays as it is.

    \b
    penstock convert corpus_text_document corpus.store --to store
    penstock convert corpus.store corpus_mds --to mds --compression zstd
    penstock convert train.bin train.store --to store --eot 50256

    DST appears when it is whole. After a crash the same command does the work again, or continues if it makes a store.
    """
    console, memory = Console(stderr=True), MemoryBudget(budget)
    layout: Any = {"rows": rows, "eot": eot, "dtype": dtype, "tokens": tokens, "mask": mask, "vocab_size": vocab_size}
    title = f"converting {shown_place(source)}"
    with log_lines(console, logging.WARNING if quiet else logging.INFO), working(title, quiet=quiet):
        made = convert_tokens(
            source,
            out,
            to,
            drop_mask=drop_mask,
            compression=compression,
            overwrite=overwrite,
            budget=memory,
            progress=None if quiet else lambda run: progress_on(console, Extent.of(run.source), str(run)),
            **{name: value for name, value in layout.items() if value is not None},
        )
    path = shown_place(str(made.path))
    if as_json:
        print_json({"path": path, "rows": made.rows, "report": made.report.to_dict()}, indent=False)
    elif not quiet:
        print_table(closing_table(made.report, budget_bytes=memory.capacity))
        say(f"{path}: {counted(made.rows, 'row')}")
