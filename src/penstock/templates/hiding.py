"""Columns that are not to be said for a while, whatever makes the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["hidden", "hiding"]

_HIDDEN: ContextVar[tuple[str, ...]] = ContextVar("hidden", default=())


@contextmanager
def hiding(columns: Sequence[str]) -> Iterator[None]:
    """Within it, a template that says whatever columns a row has says nothing of these; one that names them does.

    A dataset hides its target this way while it makes a sample, so that `TabularTextConverter().convert_row(row)` of a
    row that still has its label does not put the answer into the text.
    """
    token = _HIDDEN.set((*_HIDDEN.get(), *columns))
    try:
        yield
    finally:
        _HIDDEN.reset(token)


def hidden() -> tuple[str, ...]:
    """The columns that are hidden here."""
    return _HIDDEN.get()
