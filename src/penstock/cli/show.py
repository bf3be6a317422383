"""`penstock show STORE|FILE --row N`: one row as a trainer sees it, coloured by what is trained on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import orjson
import pyarrow as pa
import typer
from rich.text import Text

from penstock.cli.consoles import output
from penstock.cli.exits import clear_exits
from penstock.cli.prepare import ColumnsOption, TemplateOption, chat_options
from penstock.errors import ConfigError, DataError
from penstock.loaders import Recipe
from penstock.store import open_store
from penstock.store.manifest import is_store
from penstock.transforms.tokenization import Tokenizer, load_tokenizer

__all__ = ["show"]

_STYLES = {"supervised": "bold green", "masked": "dim", "special": "yellow", "supervised special": "bold yellow"}


_STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def show(
    data: Annotated[Path, typer.Argument(metavar="STORE|FILE", help="A store, or a file of documents or chats.")],
    row: Annotated[int, typer.Option("--row", metavar="N", help="Which row, from 0; negative ones count back.")] = 0,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="T", help="For a file; for a store only if its own cannot be found.")
    ] = None,
    template: TemplateOption = None,
    column: Annotated[str | None, typer.Option(help="The column with a document's text.")] = None,
    train_on: Annotated[str, typer.Option(metavar="WHAT", help="As in prepare; for files.")] = "assistant",
    eot: Annotated[bool, typer.Option(help="As in prepare; for files.")] = True,
    columns: ColumnsOption = "",
    ids: Annotated[bool, typer.Option("--ids", help="One line for each token: id, text, what it is.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each sequence: one, or chosen and rejected.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Print the tokens of a row: supervised ones green, masked ones dim, special ones yellow.

    Where there are no colours, supervised stretches stand between [[ and ]]. These are the tokens, decoded one by one,
    and not the text they came from.
    """
    with clear_exits(debug=debug):
        if is_store(data):
            loaded, rows = _stored(data, row, tokenizer)
        else:
            loaded, rows = _from_file(
                data,
                row,
                Recipe(
                    tokenizer=_needed(tokenizer),
                    template=template,
                    column=column,
                    chat=chat_options(train_on, columns, include_eot=eot),
                ),
            )
        drawn = [list(_pieces(loaded, tokens, mask)) for _, tokens, mask in rows]
    console = output()
    for (name, tokens, mask), pieces in zip(rows, drawn):
        if as_json:
            typer.echo(orjson.dumps(_facts(name, tokens, mask, pieces), option=orjson.OPT_SERIALIZE_NUMPY))
            continue
        supervised = f", {int(mask.sum()):,} supervised" if mask is not None else ""
        console.print(Text(f"{name}: {len(tokens):,} tokens{supervised}", style="bold"))
        if ids:
            for token, (kind, text) in zip(tokens.tolist(), pieces):
                line = Text(f"{token:>8}  {text!r}  {kind}", style=_STYLES[kind])
                console.print(line, highlight=False)
        else:
            shown = _coloured(pieces) if console.is_terminal else _bracketed(pieces)
            console.print(shown, highlight=False, soft_wrap=True)


Row = tuple[str, np.ndarray[Any, Any], np.ndarray[Any, Any] | None]


def _stored(path: Path, number: int, tokenizer: str | None) -> tuple[Tokenizer, list[Row]]:
    with open_store(path) as store:
        loaded = _tokenizer_of(store.manifest, tokenizer)
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
    found: list[Row] = []
    for side in sides:
        mask = row.get(f"{side}loss_mask")
        label = f"{name}, {side.rstrip('_')}" if side else name
        found.append((label, row[f"{side}input_ids"], mask.astype(bool) if mask is not None else None))
    return found


def _tokenizer_of(manifest: Any, given: str | None) -> Tokenizer:
    """The tokenizer the store was made with: the one given, or the one it names, if it still is the same."""
    known = manifest.lineage[-1].notes.get("tokenizer_path") if manifest.lineage else None
    if given is None and known is None:
        raise ConfigError("the store does not say where its tokenizer is; pass --tokenizer")
    loaded = load_tokenizer(given or known)
    if manifest.tokenizer not in (None, loaded.fingerprint):
        raise ConfigError(
            f"{given or known} is not the tokenizer of this store: its fingerprint is {loaded.fingerprint}, the "
            f"store was made with {manifest.tokenizer}; pass the right one with --tokenizer"
        )
    return loaded


def _needed(tokenizer: str | None) -> str:
    if tokenizer is None:
        raise ConfigError("a file has no tokens yet: pass --tokenizer")
    return tokenizer


def _pieces(tokenizer: Tokenizer, tokens: Any, mask: Any) -> Iterator[tuple[str, str]]:
    """What each token is, and its text. A character over several tokens stands with the last of them."""
    special = set(tokenizer.special.named.values())
    left, kind = b"", "masked"
    for position, token in enumerate(tokens.tolist()):
        supervised = mask is not None and bool(mask[position])
        if token in special:
            text = (_decoded(left) if left else "") + _decoded(tokenizer.token_bytes(token))
            yield ("supervised special" if supervised else "special"), text
            left = b""
            continue
        kind = "supervised" if supervised else "masked"
        left += tokenizer.token_bytes(token)
        whole = _whole_characters(left)
        yield kind, _decoded(left[:whole])
        left = left[whole:]
    if left:
        yield kind, _decoded(left)


def _whole_characters(data: bytes) -> int:
    """How many bytes can be decoded without cutting the last character."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if back < needed else len(data)
    return len(data)


def _decoded(data: bytes) -> str:
    """As text; what would steer a terminal is spelled out."""
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), data.decode(errors="replace"))


def _coloured(pieces: list[tuple[str, str]]) -> Text:
    text = Text()
    for kind, run in _runs(pieces):
        text.append(run, _STYLES[kind])
    return text


def _bracketed(pieces: list[tuple[str, str]]) -> Text:
    """For where there are no colours."""
    text, inside = Text(), False
    for kind, run in _runs(pieces):
        if kind.startswith("supervised") != inside:
            text.append("]]" if inside else "[[")
            inside = not inside
        text.append(f"<{run}>" if kind.endswith("special") and not run.startswith("<") else run)
    return text.append("]]") if inside else text


def _runs(pieces: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Neighbours of one kind together; special tokens stay apart."""
    kind, run = "", ""
    for now, text in pieces:
        if now != kind or "special" in now:
            if run:
                yield kind, run
            kind, run = now, ""
        run += text
    if run:
        yield kind, run


def _facts(name: str, tokens: Any, mask: Any, pieces: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "row": name,
        "input_ids": tokens,
        "loss_mask": mask.astype(np.uint8) if mask is not None else None,
        "pieces": [{"kind": kind, "text": text} for kind, text in _runs(pieces)],
    }
