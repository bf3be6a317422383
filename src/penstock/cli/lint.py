"""`penstock lint FILE --tokenizer T --template X`: the supervision gate over a data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from penstock.chat.format_chat import FormatChat
from penstock.chat.format_preference import FormatPreference
from penstock.cli.chat_options import ChatOption, chat_options
from penstock.cli.console import clear_exits, output
from penstock.cli.prepare import ColumnsOption, PreferenceOption, TemplateOption, TokenizerOption
from penstock.errors import ConfigError, DataError
from penstock.loaders import Recipe

__all__ = ["lint"]

_BATCH_ROWS = 1024
_STYLES = {"prompt": "dim", "supervised": "green", "lost": "red", "changed": "red", "repeated": "red"}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One thing that is wrong with one row."""

    file: str
    row: int | None
    kind: str
    reason: str
    shown: str = ""


def lint(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Files, directories or globs of chats.")],
    tokenizer: TokenizerOption,
    template: TemplateOption = None,
    train_on: Annotated[str, typer.Option(metavar="WHAT", help="As in prepare.")] = "assistant",
    eot: Annotated[bool, typer.Option(help="As in prepare.")] = True,
    columns: ColumnsOption = "",
    more: ChatOption = None,
    preference: PreferenceOption = None,
    max_length: Annotated[int | None, typer.Option(min=1, help="Longer rows are violations.")] = None,
    explained: Annotated[
        int | None, typer.Option("--explain", metavar="ROW", min=0, help="Show where each part of this row went.")
    ] = None,
    most: Annotated[int, typer.Option("--most", help="How many violations to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each violation.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Check every row of a chat data set: something is supervised, turns end with their token, one BOS, the prompt in
    training is the prompt in use, no role header is trained on. With --preference also: chosen and rejected answers
    stand behind the same tokens, and labels are true or false.

    Exit codes: 0 every row passes; 1 there is a violation, or an error.
    """
    console = output()
    kinds: Counter[str] = Counter()
    with clear_exits(debug=debug):
        options: dict[str, Any] = chat_options(train_on, columns, include_eot=eot, more=more)
        recipe = Recipe(
            tokenizer=tokenizer, template=template, chat=options, max_length=max_length, preference=preference
        )
        rows = 0
        source = recipe.open([Path(file) for file in files])
        if explained is not None:
            _explain(source, recipe, explained, as_json=as_json)
            return
        for finding, rows in _findings(source, recipe):  # noqa: B007
            if finding is None:
                continue
            kinds[finding.kind] += 1
            if as_json:
                typer.echo(orjson.dumps(asdict(finding)))
            elif sum(kinds.values()) <= most:
                console.print(Text(f"{finding.file}, row {finding.row}: {finding.kind}: {finding.reason}"))
                if finding.shown:
                    console.print(Text(finding.shown), style="dim")
    if not as_json:
        for kind, count in kinds.most_common():
            console.print(Text(f"{count:>8,}  {kind}"))
        found = sum(kinds.values())
        verdict = f"{found:,} violations" if found != 1 else "1 violation"
        console.print(f"{rows:,} rows, {verdict if found else 'no violation'}")
    if kinds:
        raise typer.Exit(1)


def _explain(source: Any, recipe: Recipe, number: int, *, as_json: bool) -> None:
    """Print every part of one row, counted over all files, and where it went."""
    console, before = output(), 0
    while (batch := source.next_batch(_BATCH_ROWS)) is not None:
        if number < before + batch.num_rows:
            break
        before += batch.num_rows
    else:
        raise ConfigError(f"there are {before} rows, and no row {number}")
    check: Any = recipe.format_chat(recipe.load_tokenizer(), batch.schema)
    for side, parts, problem in check.explain(batch.slice(number - before, 1)):
        if as_json:
            facts = {"row": number, "side": side, "parts": [asdict(part) for part in parts], "refused": problem}
            typer.echo(orjson.dumps(facts))
            continue
        table = Table("message", "part", "where", "text", box=None, title=side or None, title_justify="left")
        for part in parts:
            message = part.role if part.message is None else f"{part.message} {part.role}"
            text = part.text if len(part.text) <= 100 else f"{part.text[:70]} ... {part.text[-25:]}"
            table.add_row(message, part.name, Text(part.where, style=_STYLES[part.where]), Text(repr(text)[1:-1]))
        console.print(table)
        verdict = "every part is in the text" if problem is None else f"refused: {problem}"
        console.print(Text(verdict), soft_wrap=True)


def _findings(source: Any, recipe: Recipe) -> Iterator[tuple[LintFinding | None, int]]:
    """Each finding, and how many rows have been seen; None at the end of a batch without one."""
    rows = 0
    check: FormatChat | FormatPreference | None = None
    while True:
        try:
            batch = source.next_batch(_BATCH_ROWS)
        except DataError as error:
            rows += 1
            yield LintFinding(error.file or "", error.row, "unreadable", error.reason), rows
            source.skip_file()
            continue
        if batch is None:
            return
        if check is None:
            check = recipe.format_chat(recipe.load_tokenizer(), batch.schema)
        origin = source.origin()
        rows += batch.num_rows
        for violation in check.check_rows(batch):
            row = origin.row + violation.row
            yield LintFinding(origin.file, row, violation.kind, violation.message, _bracketed(violation.shown)), rows
        yield None, rows


def _bracketed(shown: str) -> str:
    """With the marks that `penstock show` has."""
    return shown.replace("⟦", "[[").replace("⟧", "]]")
