"""`penstock lint FILE --tokenizer T --template X`: validation of a chat data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from penstock.chat.format_chat import FormatChat
from penstock.chat.format_preference import FormatPreference
from penstock.cli.advice import command_wording
from penstock.cli.console import count, output, print_json, say
from penstock.cli.options import command
from penstock.errors import ConfigError, DataError
from penstock.loaders import Recipe

_BATCH_ROWS = 1024
_STYLES = {"prompt": "dim", "supervised": "green", "lost": "red", "changed": "red", "repeated": "red"}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Problem of one row."""

    file: str
    row: int | None
    kind: str
    reason: str
    shown: str = ""


@command(["tokenizer", "template", "columns", "chat", "preference", "max_length", "allow_empty"])
def lint(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Files, directories or globs of chats.")],
    recipe: Any,
    explained: Annotated[
        int | None, typer.Option("--explain", metavar="ROW", min=0, help="Show where each part of this row ends up.")
    ] = None,
    most: Annotated[int, typer.Option("--most", help="Number of violations to show.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each violation.")] = False,
) -> None:
    """Check every row of a chat data set: it has supervised tokens, its turns end with their token, it has one BOS,
    its prompt tokenizes as it does at inference, and no role header is supervised. With --preference also: chosen and
    rejected answers follow the same tokens, and labels are true or false.

    Exit codes: 0 every row passes; 1 there is a violation, or an error.
    """
    kinds: Counter[str] = Counter()
    made, rows = Recipe(**recipe), 0
    source = made.open([Path(file) for file in files])
    if explained is not None:
        _explain(source, made, explained, as_json=as_json)
        return
    for finding, rows in _findings(source, made):  # noqa: B007
        if finding is None:
            continue
        kinds[finding.kind] += 1
        if as_json:
            print_json(asdict(finding), indent=False)
        elif kinds.total() <= most:
            say(f"{finding.file}, row {finding.row}: {finding.kind}: {_worded(finding.reason)}")
            if finding.shown:
                say(finding.shown, style="dim")
    if not as_json:
        for kind, number in kinds.most_common():
            say(f"{number:>8,}  {kind}")
        say(f"{count(rows, 'row')}, {count(kinds.total(), 'violation') if kinds else 'no violation'}")
    if kinds:
        raise typer.Exit(1)


def _explain(source: Any, recipe: Recipe, number: int, *, as_json: bool) -> None:
    """Print every part of one row, counted over all files, and where it ends up."""
    before = 0
    while (batch := source.next_batch(_BATCH_ROWS)) is not None:
        if number < before + batch.num_rows:
            break
        before += batch.num_rows
    else:
        raise ConfigError(f"--explain: expected a row below {before}, got {number}")
    check: Any = recipe.format_chat(recipe.load_tokenizer(), batch.schema)
    for side, parts, problem in check.explain(batch.slice(number - before, 1)):
        if as_json:
            facts = {"row": number, "side": side, "parts": [asdict(part) for part in parts], "refused": problem}
            print_json(facts, indent=False)
            continue
        table = Table("message", "part", "where", "text", box=None, title=side or None, title_justify="left")
        for part in parts:
            message = part.role if part.message is None else f"{part.message} {part.role}"
            text = part.text if len(part.text) <= 100 else f"{part.text[:70]} ... {part.text[-25:]}"
            table.add_row(message, part.name, Text(part.where, style=_STYLES[part.where]), Text(repr(text)[1:-1]))
        output().print(table)
        say("every part is in the text" if problem is None else f"refused: {_worded(problem)}")


def _worded(reason: str) -> str:
    """A reason in the words of this command."""
    return command_wording(signature(lint).parameters.values())(reason)


def _findings(source: Any, recipe: Recipe) -> Iterator[tuple[LintFinding | None, int]]:
    """Each finding with the number of rows read so far; None at the end of each batch."""
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
            shown = violation.shown.replace("⟦", "[[").replace("⟧", "]]")  # as `penstock show` prints them
            yield LintFinding(origin.file, row, violation.kind, violation.message, shown), rows
        yield None, rows
