"""`penstock show STORE|FILE --row N`: the tokens of a row, or of a step of a loader, coloured by supervision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from penstock.cli.console import output, print_json, say, working
from penstock.cli.options import SetOption, command, open_rank, planned_world, read_planned
from penstock.corpus.recipe import OpenedRecipe, Recipe
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import is_remote, local_or_none, shown_place
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig
from penstock.loaders.source import Inputs
from penstock.observe import WorkProgress
from penstock.store import open_store
from penstock.store.foreign.lookup import is_foreign
from penstock.store.manifest import is_bucket_store, is_store, refuse_remote_store
from penstock.store.origin import store_tokenizer
from penstock.tokenizers.base import Tokenizer
from penstock.tokenizers.pieces import STYLES, Pieces, bracketed, coloured, harmless, runs, token_pieces


@command(["template", "column", "columns", "transforms", "add_bos", "add_eos", "chat", "preference"])
def show(
    data: Annotated[
        str,
        typer.Argument(
            metavar="STORE|FILE|CONFIG",
            help="A store, a file of documents or chats (also a URL), or, with --step, a loader file.",
        ),
    ],
    recipe: Any,
    row: Annotated[
        int | None, typer.Option("--row", metavar="N", help="Row, from 0 (the default); negative ones from the end.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="All rows of this step of the loader.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, help="With --step: only the batch of this rank.")] = None,
    assignments: SetOption = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="T", help="Required for a file; for a store only if its own is not found.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="One line for each token: id, text, kind.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each sequence.")] = False,
) -> None:
    """Print the tokens of a row: supervised ones green, masked ones dim, special ones yellow.

    Without colours, supervised spans are between [[ and ]]. The text is that of the tokens, decoded one by one. With
    --step, every document of the batch is printed with its source and row, and supervised tokens are those with a
    label: never the first token of a document.
    """
    if step is not None and row is not None:
        raise ConfigError("--row and --step exclude each other: a step has rows of its own")
    row = row or 0
    if step is not None:
        with working(f"making step {step:,}"):
            sequences = list(sequences_of_step(read_planned(data, assignments), step, rank=rank, tokenizer=tokenizer))
    elif not is_remote(data) and not Path(data).exists():
        raise ConfigError(f"{data} does not exist")
    elif (local := local_or_none(data)) is not None and (is_store(local) or is_foreign(local)):
        sequences = _from_store(local, row, tokenizer)
    elif is_bucket_store(data):
        sequences = _from_store(data, row, tokenizer)
    elif shown_place(data).endswith((".yaml", ".yml")):
        raise ConfigError(f"{shown_place(data)} describes a loader; pass --step N")
    elif tokenizer is None:
        raise ConfigError("a file has no tokens yet: pass --tokenizer")
    else:
        with working(f"reading {shown_place(data)}", unit="rows", total=row + 1) as progress:
            sequences = _from_file(data, row, Recipe(tokenizer=tokenizer, **recipe), progress)
    for sequence in sequences:
        if as_json:
            print_json(sequence.facts(), indent=False)
        else:
            _print(sequence, ids=ids)


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens with a title: a row, one side of a preference pair, a document of a batch, or padding."""

    name: str
    tokens: np.ndarray[Any, Any]
    mask: np.ndarray[Any, Any] | None
    tokenizer: Tokenizer | None
    """None for padding."""

    @property
    def title(self) -> str:
        supervised = f", {int(self.mask.sum()):,} supervised" if self.mask is not None and self.tokenizer else ""
        return f"{self.name}: {len(self.tokens):,} tokens{supervised}"

    def pieces(self) -> Pieces:
        if self.tokenizer is None:
            return [("padding", "")] * len(self.tokens)
        return list(token_pieces(self.tokenizer, self.tokens, self.mask))

    def facts(self) -> dict[str, Any]:
        return {
            "row": self.name,
            "input_ids": self.tokens,
            "loss_mask": self.mask.astype(np.uint8) if self.mask is not None else None,
            "pieces": [{"kind": kind, "text": harmless(text)} for kind, text in runs(self.pieces())],
        }


def sequences_of_step(
    config: LoaderConfig, step: int, *, rank: int | None = None, tokenizer: str | None = None
) -> Iterator[TokenSequence]:
    """Every document of a step, rank by rank, in the order of the batches."""
    world = planned_world(config)
    if rank is not None and not 0 <= rank < world:
        raise ConfigError(f"--rank {rank}: expected a rank from 0 to {world - 1}")
    for each in range(world) if rank is None else [rank]:
        # All fields, which say where documents are; NumPy, since nothing is computed.
        with open_rank(config, each, backend="numpy", fields=None, prefetch=0, device=None, pin_memory=False) as loader:
            yield from _from_batch(loader, step, each, tokenizer)


def _from_batch(loader: DataLoader, step: int, rank: int, tokenizer: str | None) -> Iterator[TokenSequence]:
    if loader.plan.skipped(step):
        raise ConfigError(f"step {step} is skipped by an edit, so it has no batch")
    try:
        loader.seek(step)
        batch = loader.get_batch()
    except (IndexError, StopIteration) as error:
        raise ConfigError(str(error)) from error
    tokenizers = [_tokenizer(stock.inputs, tokenizer) for stock in loader.sources]
    names = batch.metadata["sources"]
    assert batch.labels is not None
    parts, filled = _parts(loader, batch)
    for sample, low, high, real in _spans(batch):
        name, tokens = f"rank {rank}, row {sample}", batch.input_ids[sample, low:high]
        mask = batch.labels[sample, low:high] != -100
        if real and sample in filled:
            source, row, side = next(parts)
            title = f"{name}: {names[source]} row {row}" + (f", {side}" if side else "")
            yield TokenSequence(title, tokens, mask, tokenizers[source])
        else:
            yield TokenSequence(f"{name}: padding", tokens, mask, None)


def _parts(loader: DataLoader, batch: Any) -> tuple[Iterator[tuple[int, int, str]], set[int]]:
    """(source, row, side) of every part with tokens, in order; and the rows of the batch that are not blank."""
    sources, rows, samples = (batch.metadata[name] for name in ("source", "row", "sample"))
    lengths = np.zeros(len(rows), np.int64)
    for number, stock in enumerate(loader.sources):
        own = sources == number
        lengths[own] = stock.inputs.table.lengths(rows[own])
    filled = lengths > 0
    sides = ("chosen", "rejected") if batch.metadata.get("sides") == 2 else ("",)
    pairs = list(zip(sources[filled].tolist(), rows[filled].tolist()))
    parts = ((source, row, side) for side in sides for source, row in pairs)
    if loader.options.padding_free or loader.options.max_tokens is not None:
        return parts, set(range(batch.batch_size)) if filled.any() else set()
    half = batch.batch_size // len(sides)
    return parts, {sample + half * number for number in range(len(sides)) for sample in samples[filled].tolist()}


def _spans(batch: Any) -> Iterator[tuple[int, int, int, bool]]:
    """(row, start, end, True for a document and False for padding)."""
    marks = batch.document_ids if batch.document_ids is not None else batch.attention_mask
    for row in range(batch.batch_size):
        cuts = [0, *(np.flatnonzero(np.diff(marks[row])) + 1).tolist(), marks.shape[1]]
        for low, high in pairwise(cuts):
            yield row, low, high, bool(marks[row, low])


def _tokenizer(inputs: Inputs, given: str | None) -> Tokenizer:
    """The tokenizer given, that of the file, or that of the store."""
    if given is None and inputs.tokenizer is not None:
        return inputs.tokenizer
    return store_tokenizer(inputs.table.stores[0].manifest, given)


def _from_store(path: Path | str, number: int, tokenizer: str | None) -> list[TokenSequence]:
    with open_store(path) as store:
        loaded = store_tokenizer(store.manifest, tokenizer)
        try:
            row = store[number]
        except IndexError:
            raise ConfigError(f"--row: {store.shown} has {len(store)} rows, got {number}") from None
        row = {name: np.array(value) if isinstance(value, np.ndarray) else value for name, value in row.items()}
        name = PurePath(store.shown).name
    return _sides(row, f"{name} row {number}", loaded)


def _from_file(path: str, number: int, recipe: Recipe, progress: WorkProgress) -> list[TokenSequence]:
    refuse_remote_store(path)
    if number < 0:
        raise ConfigError(f"--row: expected 0 or more for a file, got {number}")
    opened, place = OpenedRecipe.of(recipe, path), shown_place(path)
    source, steps = opened.source, opened.steps()
    before = 0
    while (batch := source.next_batch(1024)) is not None:
        if number < before + batch.num_rows:
            try:
                made = batch.slice(number - before, 1)
                for transform in (*opened.transforms, steps.transforms[-1]):
                    made = transform.transform(made) if made.num_rows else made
            except DataError as error:
                reason = error.reason.removeprefix("row 0 of the batch: ").replace("row 0 of the batch", "it")
                raise DataError(reason, file=place, row=number) from error
            if not made.num_rows:
                raise ConfigError(f"row {number} of {place} is dropped by {transform!r}")
            row = {name: _plain(made.column(name)[0]) for name in made.schema.names}
            return _sides(row, f"{PurePath(place).name} row {number}", steps.tokenizer)
        before += batch.num_rows
        progress(before)
    raise ConfigError(f"--row: {place} has {before} rows, got {number}")


def _plain(cell: Any) -> Any:
    return cell.values.to_numpy(zero_copy_only=False) if isinstance(cell, pa.ListScalar) else cell.as_py()


def _sides(row: dict[str, Any], name: str, tokenizer: Tokenizer) -> list[TokenSequence]:
    """One sequence of tokens; two for a preference pair."""
    sides = [column.removesuffix("input_ids") for column in row if column.endswith("input_ids")]
    if not sides:
        raise ConfigError(f"expected a column input_ids, got {', '.join(row)}")
    if isinstance(row.get("label"), bool | np.bool_):
        name = f"{name}, label {'true' if row['label'] else 'false'}"
    found = []
    for side in sides:
        mask = row.get(f"{side}loss_mask")
        title = f"{name}, {side.rstrip('_')}" if side else name
        mask = mask.astype(bool) if mask is not None else None
        found.append(TokenSequence(title, row[f"{side}input_ids"], mask, tokenizer))
    return found


def _print(sequence: TokenSequence, *, ids: bool) -> None:
    say(sequence.title, style="bold")
    if sequence.tokenizer is None:
        return
    if ids:
        for token, (kind, text) in zip(sequence.tokens.tolist(), sequence.pieces()):
            say(f"{token:>8}  {harmless(text)!r}  {kind}", style=STYLES[kind])
        return
    console = output()
    colours = console.color_system is not None and not console.no_color
    shown = coloured(sequence.pieces()) if colours else bracketed(sequence.pieces())
    console.print(shown, highlight=False, soft_wrap=True)
