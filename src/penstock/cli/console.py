"""Output of the commands: results on standard output, progress and log lines on standard error; exit codes."""

from __future__ import annotations

import contextlib
import logging
import select
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from typing import Any, NoReturn

import orjson
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.errors import PenstockError
from penstock.observe import LineDisplay, WorkProgress, is_live, work_progress


class ExitCode(IntEnum):
    """Exit codes of all commands, as `docs/command-line.md` lists them."""

    OK = 0
    ERROR = 1
    """The command could not do its work; a message says why."""
    USAGE = 2
    """The command line is wrong; raised by typer."""
    FINDINGS = 3
    """The command has done its work, and what it checked is not as it should be."""
    INTERRUPTED = 130


def emit(facts: Any, show: Callable[[], object], *, as_json: bool) -> None:
    """Print the facts as JSON, or let `show` print them for people."""
    if as_json:
        print_json(facts)
    else:
        show()


def print_json(facts: Any, *, indent: bool = True) -> None:
    """One JSON value; without `indent`, on one line."""
    options = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY | (orjson.OPT_INDENT_2 if indent else 0)
    typer.echo(orjson.dumps(facts, default=str, option=options))


def fact_table(facts: Iterable[tuple[RenderableType, ...]]) -> Table:
    """A fact per row: its bold name and its value, or name, right-aligned figure and remark."""
    rows = list(facts)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    for number in range(1, max(map(len, rows), default=1)):
        grid.add_column(justify="right" if number == 1 and len(rows[0]) == 3 else "left")
    for row in rows:
        grid.add_row(*map(_cell, row))
    return grid


def table(columns: Iterable[str], rows: Iterable[Iterable[RenderableType]]) -> Table:
    """A table with bold headers; a column whose name begins with `>` is right-aligned."""
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        made.add_row(*map(_cell, row))
    return made


def _cell(value: RenderableType) -> RenderableType:
    return Text(value) if isinstance(value, str) else value  # plain text: brackets are no markup


def output() -> Console:
    """Standard output: without escape codes where they are not wanted; without a terminal wide, so that no line is
    folded."""
    console = Console(width=None if sys.stdout.isatty() else 1000)
    if console.is_terminal and not is_live(console):
        return Console(color_system=None, force_terminal=False)
    return console


def print_table(drawn: RenderableType) -> None:
    """Print a table; without a terminal, without trailing spaces."""
    console = output()
    if console.is_terminal:
        console.print(drawn)
        return
    with console.capture() as captured:
        console.print(drawn)
    for line in captured.get().splitlines():
        say(line.rstrip())


def say(text: str, style: str = "") -> None:
    """Print a line on standard output as it is."""
    output().print(Text(text), style=style, highlight=False, soft_wrap=True)


def warn(text: str) -> None:
    """Print a line on standard error."""
    typer.echo(f"penstock: {text}", err=True)


def found_problems() -> NoReturn:
    """End the command: it has worked, and found that something is not as it should be."""
    raise typer.Exit(ExitCode.FINDINGS)


def working(
    title: str, *, unit: str = "", total: float | None = None, interval_seconds: float = 0.25, quiet: bool = False
) -> WorkProgress:
    """Progress of a command on standard error, once it has lasted a second; none if it is `quiet`."""
    if quiet:
        return WorkProgress(LineDisplay(lambda line: None), unit=unit, total=total)
    return work_progress(title, unit=unit, total=total, interval_seconds=interval_seconds)


@contextlib.contextmanager
def log_lines(console: Console, level: int) -> Iterator[None]:
    """Show log records of the library on the console, above a live display if there is one."""
    log, handler = logging.getLogger("penstock"), _ConsoleHandler(console)
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _ConsoleHandler(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"penstock: {self.format(record)}", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def report_errors(
    *, debug: bool, stopped: str = "stopped", wording: Callable[[str], str] = lambda message: message
) -> Iterator[None]:
    """Turn errors that users can fix into a message and an exit code; bugs keep their traceback.

    `wording` puts advice of the library in the words of the command.
    """
    try:
        yield
    except KeyboardInterrupt:
        warn(stopped)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (PenstockError, OSError) as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            raise  # as in `penstock plugins | head`: the command ends without a message
        if debug:
            typer.echo("".join(traceback.format_exception(error)), err=True)
        if isinstance(error, OSError) and error.strerror and error.filename:
            warn(f"{error.strerror}: {str(error.filename)!r}")
        else:
            warn(wording(str(error)) or type(error).__name__)
        raise typer.Exit(ExitCode.ERROR) from None


def _reader_is_gone() -> bool:
    """True if nobody reads standard output any more; also where the system cannot tell."""
    try:
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
        return bool(watched.poll(0))
    except (AttributeError, OSError, ValueError):
        return True
