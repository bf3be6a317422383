"""Where a command's words go: results to standard output, progress and log lines to standard error."""

from __future__ import annotations

import contextlib
import logging
import sys
import traceback
from collections.abc import Iterator

import typer
from rich.console import Console, RenderableType

from penstock.errors import PenstockError

__all__ = ["clear_exits", "log_lines", "output", "print_table"]


def output() -> Console:
    """Standard output; as wide as needed where it is no terminal, so that nothing is folded in a file."""
    return Console(width=None if sys.stdout.isatty() else 1000)


def print_table(console: Console, table: RenderableType) -> None:
    """A table; where it does not go to a terminal, without the space that fills up its last column."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as drawn:
        console.print(table)
    for line in drawn.get().splitlines():
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def log_lines(console: Console, level: int) -> Iterator[None]:
    """What the engine logs, as lines on the console, above a live display if there is one."""
    log, handler = logging.getLogger("penstock"), _ConsoleLines(console)
    before = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


class _ConsoleLines(logging.Handler):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.print(f"penstock: {self.format(record)}", markup=False, highlight=False, soft_wrap=True)


@contextlib.contextmanager
def clear_exits(*, debug: bool, stopped: str = "stopped") -> Iterator[None]:
    """Turn what users can mend into a message and an exit code; anything else is a bug and keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"penstock: {stopped}", err=True)
        raise typer.Exit(130) from None
    except (PenstockError, OSError) as error:
        if debug:
            typer.echo("".join(traceback.format_exception(error)), err=True)
        typer.echo(f"penstock: {_message(error)}", err=True)
        raise typer.Exit(1) from None


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.strerror}: {str(error.filename)!r}"
    return str(error) or type(error).__name__
