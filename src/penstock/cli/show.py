"""`penstock show STORE|FILE --row N`: one row as a trainer sees it, coloured by what is trained on, or a
whole step of a loader."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import pyarrow as pa
import typer
from rich.text import Text

from penstock.cli.chat_options import ChatOption, chat_options
from penstock.cli.consoles import output
from penstock.cli.exits import clear_exits
from penstock.cli.loading import SetOption, read_planned
from penstock.cli.prepare import ColumnsOption, PreferenceOption, TemplateOption
from penstock.cli.show_step import documents_of_step
from penstock.cli.tokens import STYLES, Pieces, bracketed, coloured, pieces_of, runs_of, tokenizer_of
from penstock.errors import ConfigError, DataError
from penstock.loaders import Recipe
from penstock.store import open_store
from penstock.store.manifest import is_store
from penstock.transforms.tokenization import Tokenizer

__all__ = ["show"]


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
