"""`penstock lint FILE --tokenizer T --template X`: validation of a chat data set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from inspect import signature
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer
from rich.table import Table
from rich.text import Text

from penstock._amounts import counted
from penstock.chat.format_chat import FormatChat
from penstock.chat.format_preference import FormatPreference
from penstock.cli.advice import command_wording
from penstock.cli.console import found_problems, output, print_json, say, working
from penstock.cli.options import command
from penstock.corpus.raw_rows import RowNumbers
from penstock.corpus.recipe import OpenedRecipe, Recipe
from penstock.errors import ConfigError, DataError
from penstock.observe import Extent

_BATCH_ROWS = 1024
_ROW = "__row__"
_STYLES = {"prompt": "dim", "supervised": "green", "lost": "red", "changed": "red", "repeated": "red"}


@dataclass(frozen=True, slots=True)
class LintFinding:
    """Problem of one row."""

    file: str
    row: int | None
    kind: str
    reason: str
    shown: str = ""


@command(["tokenizer", "template", "columns", "transforms", "chat", "preference", "max_length", "allow_empty"])
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

    Exit codes: 0 every row passes; 1 an error; 3 there is a violation.
    """
    kinds: Counter[str] = Counter()
    opened, rows = OpenedRecipe.of(Recipe(**recipe), list(files)), 0
    if explained is not None:
        _explain(opened, explained, as_json=as_json)
        return
    with working(f"checking {files[0] if len(files) == 1 else counted(len(files), 'input')}", unit="rows") as progress:
        extent = Extent.of(opened.source)
        for finding, rows in _findings(opened):
            if finding is None:
                progress(rows, share=_share(extent, opened.source, rows))
                continue
            kinds[finding.kind] += 1
            if as_json:
                progress.clear()
                print_json(asdict(finding), indent=False)
            elif kinds.total() <= most:
                progress.clear()
                say(f"{finding.file}, row {finding.row}: {finding.kind}: {_worded(finding.reason)}")
                if finding.shown:
                    say(finding.shown, style="dim")
    if not as_json:
        for kind, number in kinds.most_common():
            say(f"{number:>8,}  {kind}")
        say(f"{counted(rows, 'row')}, {counted(kinds.total(), 'violation') if kinds else 'no violation'}")
    if kinds:
        found_problems()


def _share(extent: Extent, source: Any, rows: int) -> float | None:
    """Part of the input that was read: of its rows if their number is known, else of the bytes of its files."""
    read = getattr(source, "file_bytes_read", None)
    return extent.share({"rows_done": rows, "file_bytes_done": read() if callable(read) else None})


def _after(opened: OpenedRecipe, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Any]:
    """The rows after the transforms, and for each the number in the batch of the row that it was made of."""
    made = batch.append_column(_ROW, pa.array(np.arange(batch.num_rows)))
    for transform in opened.transforms if opened.recipe.transforms else ():  # they need the types of all rows
        made = RowNumbers(transform, _ROW).transform(made) if made.num_rows else made
    return made.drop_columns([_ROW]), made.column(_ROW).to_numpy()


def _explain(opened: OpenedRecipe, number: int, *, as_json: bool) -> None:
    """Print every part of one row, counted over all files, and where it ends up."""
    source, recipe, before = opened.source, opened.recipe, 0
    while (batch := source.next_batch(_BATCH_ROWS)) is not None:
        if number < before + batch.num_rows:
            break
        before += batch.num_rows
    else:
        raise ConfigError(f"--explain: expected a row below {before}, got {number}")
    batch, _ = _after(opened, batch.slice(number - before, 1))
    if not batch.num_rows:
        raise ConfigError(f"--explain: row {number} is dropped by --transform")
    check: Any = recipe.format_chat(recipe.load_tokenizer(), batch.schema)
    for side, parts, problem in check.explain(batch):
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


def _findings(opened: OpenedRecipe) -> Iterator[tuple[LintFinding | None, int]]:
    """Each finding with the number of rows read so far; None at the end of each batch."""
    source, recipe, rows = opened.source, opened.recipe, 0
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
        origin = source.origin()
        rows += batch.num_rows
        batch, numbers = _after(opened, batch)
        if check is None and batch.num_rows:
            check = recipe.format_chat(recipe.load_tokenizer(), batch.schema)
        for violation in check.check_rows(batch) if check is not None else ():
            row = origin.row + int(numbers[violation.row])
            shown = violation.shown.replace("⟦", "[[").replace("⟧", "]]")  # as `penstock show` prints them
            yield LintFinding(origin.file, row, violation.kind, violation.message, shown), rows
        yield None, rows
