"""`penstock show STORE|FILE --row N`: one row as a trainer sees it, coloured by what is trained on, or a
whole step of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import pyarrow as pa
import typer
from rich.text import Text

from penstock.cli.chat_options import ChatOption, chat_options
from penstock.cli.console import clear_exits, output
from penstock.cli.loader_files import SetOption, open_rank, read_planned
from penstock.cli.prepare import ColumnsOption, PreferenceOption, TemplateOption
from penstock.cli.tokens import STYLES, Pieces, bracketed, coloured, pieces_of, runs_of, tokenizer_of
from penstock.errors import ConfigError, DataError
from penstock.loaders import Recipe
from penstock.loaders.base import DataLoader
from penstock.loaders.inputs import Inputs
from penstock.loaders.loader_file import LoaderConfig
from penstock.store import open_store
from penstock.store.manifest import is_store
from penstock.transforms.tokenization import Tokenizer

__all__ = ["Document", "documents_of_step", "show"]


@dataclass(frozen=True, slots=True)
class Document:
    """A stretch of a row of a batch: the tokens of one document, or padding."""

    rank: int
    sample: int
    """Which row of the batch."""
    source: str | None
    """None for padding."""
    row: int | None
    tokens: Any
    labels: Any
    tokenizer: Tokenizer
    side: str = ""
    """Of a preference pair: chosen or rejected."""

    @property
    def supervised(self) -> Any:
        return self.labels != -100

    def pieces(self) -> Pieces:
        if self.source is None:
            return [("padding", "")] * len(self.tokens)
        return list(pieces_of(self.tokenizer, self.tokens, self.supervised))

    def __str__(self) -> str:
        where = f"rank {self.rank}, row {self.sample}"
        if self.source is None:
            return f"{where}: padding"
        return f"{where}: {self.source} row {self.row}" + (f", {self.side}" if self.side else "")


def documents_of_step(
    config: LoaderConfig, step: int, *, rank: int | None = None, tokenizer: str | None = None
) -> Iterator[Document]:
    """Every document of a step, rank by rank, in the order in which they lie in the batches."""
    world = int(config.arguments.get("world_size") or 1)
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"--rank {rank}: the file is made for {world} ranks, from 0 to {world - 1}")
    for each in range(world) if rank is None else [rank]:
        # Everything that says where documents are; NumPy, since nothing is computed.
        with open_rank(config, each, backend="numpy", fields=None, prefetch=0, device=None, pin_memory=False) as loader:
            yield from _documents(loader, step, each, tokenizer)


def _documents(loader: DataLoader, number: int, rank: int, tokenizer: str | None) -> Iterator[Document]:
    if loader.plan.skipped(number):
        raise ConfigError(f"step {number} is skipped by an edit, so there is no batch of it")
    try:
        loader.seek(number)
        batch = loader.get_batch()
    except (IndexError, StopIteration) as error:
        raise ConfigError(str(error)) from error
    tokenizers = [_tokenizer(stock.inputs, tokenizer) for stock in loader.sources]
    names = batch.metadata["sources"]
    assert batch.labels is not None
    parts, filled = _parts(loader, batch)
    for row, low, high, real in _stretches(batch):
        tokens, labels = batch.input_ids[row, low:high], batch.labels[row, low:high]
        if real and row in filled:
            source, number, side = next(parts)
            yield Document(rank, row, names[source], number, tokens, labels, tokenizers[source], side)
        else:
            yield Document(rank, row, None, None, tokens, labels, tokenizers[0])


def _parts(loader: DataLoader, batch: Any) -> tuple[Iterator[tuple[int, int, str]], set[int]]:
    """(source, row, side) of every part with tokens, in order; and the rows of the batch that are not blank."""
    sources, rows, samples = (batch.metadata[name] for name in ("source", "row", "sample"))
    lengths = np.zeros(len(rows), np.int64)
    for number, stock in enumerate(loader.sources):
        which = sources == number
        lengths[which] = stock.inputs.table.lengths(rows[which])
    some = lengths > 0
    sides = ("chosen", "rejected") if batch.metadata.get("sides") == 2 else ("",)
    own = list(zip(sources[some].tolist(), rows[some].tolist()))
    parts = ((source, row, side) for side in sides for source, row in own)
    if loader.options.padding_free or loader.options.max_tokens is not None:
        return parts, set(range(batch.batch_size)) if some.any() else set()
    half = batch.batch_size // len(sides)
    return parts, {sample + half * number for number in range(len(sides)) for sample in samples[some].tolist()}


def _stretches(batch: Any) -> Iterator[tuple[int, int, int, bool]]:
    """(row, from, to, whether it is a document and not padding)."""
    marks = batch.document_ids if batch.document_ids is not None else batch.attention_mask
    for row in range(batch.batch_size):
        cuts = [0, *(np.flatnonzero(np.diff(marks[row])) + 1).tolist(), marks.shape[1]]
        for low, high in pairwise(cuts):
            yield row, low, high, bool(marks[row, low])


def _tokenizer(inputs: Inputs, given: str | None) -> Tokenizer:
    """The tokenizer given, that of the file, or the one that the store names, if it still is the same."""
    if given is None and inputs.tokenizer is not None:
        return inputs.tokenizer
    return tokenizer_of(inputs.table.stores[0].manifest, given)


def show(
    data: Annotated[
        Path,
        typer.Argument(
            metavar="STORE|FILE|CONFIG", help="A store, a file of documents or chats, or, with --step, of a loader."
        ),
    ],
    row: Annotated[int, typer.Option("--row", metavar="N", help="Which row, from 0; negative ones count back.")] = 0,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="All rows of this step of the loader.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="With --step: only the batch of this rank.")] = None,
    assignments: SetOption = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="T", help="For a file; for a store only if its own cannot be found.")
    ] = None,
    template: TemplateOption = None,
    column: Annotated[str | None, typer.Option(help="The column with a document's text.")] = None,
    train_on: Annotated[str, typer.Option(metavar="WHAT", help="As in prepare; for files.")] = "assistant",
    eot: Annotated[bool, typer.Option(help="As in prepare; for files.")] = True,
    columns: ColumnsOption = "",
    more: ChatOption = None,
    preference: PreferenceOption = None,
    ids: Annotated[bool, typer.Option("--ids", help="One line for each token: id, text, what it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each sequence.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Print the tokens of a row: supervised ones green, masked ones dim, special ones yellow.

    Where there are no colours, supervised stretches stand between [[ and ]]. These are the tokens, decoded one by one,
    and not the text they came from. With --step, the documents of every row of the batch are named with their source
    and row, and what is supervised is what has a label: never the first token of a document.
    """
    with clear_exits(debug=debug):
        if step is not None:
            documents = documents_of_step(read_planned(data, assignments), step, rank=rank, tokenizer=tokenizer)
            sequences = [_Sequence(str(each), each.tokens, each.supervised, each.pieces()) for each in documents]
        else:
            chat = chat_options(train_on, columns, include_eot=eot, more=more)
            sequences = _of_row(data, row, tokenizer, template, column, chat, preference=preference)
    console = output()
    for sequence in sequences:
        if as_json:
            typer.echo(orjson.dumps(sequence.facts(), option=orjson.OPT_SERIALIZE_NUMPY))
            continue
        console.print(Text(sequence.title, style="bold"))
        if sequence.is_padding:
            continue
        if ids:
            for token, (kind, text) in zip(sequence.tokens.tolist(), sequence.pieces):
                line = Text(f"{token:>8}  {text!r}  {kind}", style=STYLES[kind])
                console.print(line, highlight=False)
        else:
            shown = coloured(sequence.pieces) if console.is_terminal else bracketed(sequence.pieces)
            console.print(shown, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """Some tokens, what they are called, and how they read."""

    name: str
    tokens: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any] | None
    pieces: Pieces

    @property
    def is_padding(self) -> bool:
        return all(kind == "padding" for kind, _ in self.pieces)

    @property
    def title(self) -> str:
        supervised = f", {int(self.mask.sum()):,} supervised" if self.mask is not None and not self.is_padding else ""
        return f"{self.name}: {len(self.tokens):,} tokens{supervised}"

    def facts(self) -> dict[str, Any]:
        return {
            "row": self.name,
            "input_ids": self.tokens,
            "loss_mask": self.mask.astype(np.uint8) if self.mask is not None else None,
            "pieces": [{"kind": kind, "text": text} for kind, text in runs_of(self.pieces)],
        }


def _of_row(
    data: Path,
    row: int,
    tokenizer: str | None,
    template: str | None,
    column: str | None,
    chat: dict[str, Any],
    *,
    preference: bool | None,
) -> list[_Sequence]:
    """One sequence of tokens; of a preference pair, two."""
    if is_store(data):
        loaded, rows = _stored(data, row, tokenizer)
    elif data.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{data}: of a loader one step is shown; pass --step N")
    else:
        recipe = Recipe(
            tokenizer=_needed(tokenizer), template=template, column=column, chat=chat, preference=preference
        )
        loaded, rows = _from_file(data, row, recipe)
    return [_Sequence(name, tokens, mask, list(pieces_of(loaded, tokens, mask))) for name, tokens, mask in rows]


Row = tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any] | None]


def _stored(path: Path, number: int, tokenizer: str | None) -> tuple[Tokenizer, list[Row]]:
    with open_store(path) as store:
        loaded = tokenizer_of(store.manifest, tokenizer)
        try:
            row = store[number]
        except IndexError:
            raise ConfigError(f"{path} has {len(store)} rows, there is no row {number}") from None
        row = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
    return loaded, _sides(row, f"{path.name} row {number}")


def _from_file(path: Path, number: int, recipe: Recipe) -> tuple[Tokenizer, list[Row]]:
    source: Any = recipe.open(path)
    if number < 0:
        raise ConfigError("rows of a file are counted from 0 on")
    steps = recipe.steps(source.schema)
    before = 0
    while (batch := source.next_batch(1024)) is not None:
        if number < before + batch.num_rows:
            try:
                made = steps.transforms[-1].transform(batch.slice(number - before, 1))
            except DataError as error:
                reason = error.reason.removeprefix("row 0 of the batch: ").replace("row 0 of the batch", "it")
                raise DataError(reason, file=str(path), row=number) from error
            if not made.num_rows:
                raise ConfigError(f"row {number} of {path} is left out: {steps.transforms[-1]!r} drops it")
            row = {name: _plain(made.column(name)[0]) for name in made.schema.names}
            return steps.tokenizer, _sides(row, f"{path.name} row {number}")
        before += batch.num_rows
    raise ConfigError(f"{path} has {before} rows, there is no row {number}")


def _plain(cell: Any) -> Any:
    return cell.values.to_numpy(zero_copy_only=False) if isinstance(cell, pa.ListScalar) else cell.as_py()


def _sides(row: dict[str, Any], name: str) -> list[Row]:
    """One sequence of tokens; of a preference pair, two."""
    sides = [column.removesuffix("input_ids") for column in row if column.endswith("input_ids")]
    if not sides:
        raise ConfigError(f"there are no tokens here, only {', '.join(row)}")
    if isinstance(row.get("label"), bool | np.bool_):
        name = f"{name}, label {'true' if row['label'] else 'false'}"
    found: list[Row] = []
    for side in sides:
        mask = row.get(f"{side}loss_mask")
        label = f"{name}, {side.rstrip('_')}" if side else name
        found.append((label, row[f"{side}input_ids"], mask.astype(bool) if mask is not None else None))
    return found


def _needed(tokenizer: str | None) -> str:
    if tokenizer is None:
        raise ConfigError("a file has no tokens yet: pass --tokenizer")
    return tokenizer
