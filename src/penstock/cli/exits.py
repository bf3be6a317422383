"""How a command ends: 0 if all went well, 1 with a clear line on stderr, 130 after Ctrl-C."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import typer

from penstock.errors import PenstockError

__all__ = ["clear_exits"]


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
