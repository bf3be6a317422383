"""Rows of a target, a page at a time: what stores and files have in common."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.ui.matches import Query

PAGE_ROWS = 50
SEARCH_SECONDS = 0.7
"""Time that one request searches; the next one continues where it stopped."""
SNIPPET_TOKENS, SNIPPET_CHARACTERS = 160, 320


@dataclass(frozen=True, slots=True, order=True)
class RowPlace:
    """Row of a target: its file, the byte in it where reading may begin, and its number in the file."""

    file: int = 0
    offset: int = 0
    row: int = 0

    def __str__(self) -> str:
        return f"{self.file}-{self.offset}-{self.row}"

    @classmethod
    def parse(cls, text: str) -> RowPlace:
        parts = text.split("-")
        if len(parts) != 3 or not all(part.isascii() and part.isdecimal() and len(part) < 19 for part in parts):
            raise ConfigError(f"a place is FILE-OFFSET-ROW, such as 0-0-17, got {text[:80]!r}")
        return cls(*map(int, parts))


@dataclass(frozen=True, slots=True)
class RowSummary:
    """A row in a list."""

    place: RowPlace
    length: int | None
    """Tokens, or characters of text."""
    text: str
    """Beginning of its text, or the text around what was found."""
    supervised: int | None = None
    problem: str = ""
    """Reason why it is no row."""


@dataclass(frozen=True, slots=True)
class RowPage:
    """Some rows in order, and how far the search for them looked."""

    rows: Sequence[RowSummary]
    first: RowPlace
    """Where looking began."""
    last: RowPlace | None
    """Where it goes on; None at the end."""


@dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens of a row: all of them, or one side of a preference pair."""

    name: str
    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class RowDetail:
    """One row with everything in it."""

    place: RowPlace
    values: Mapping[str, Any]
    tokens: Sequence[TokenPart] = ()
    raw: str = ""
    """The record as it stands in the file, if it is text."""
    problem: str = ""
    following: RowPlace | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class RowTable(Protocol):
    """Rows that can be looked at: of a store, or of files."""

    unit: str
    """Unit of lengths: tokens or characters."""

    def files(self) -> Sequence[tuple[str, int | None]]:
        """Name of each file, and its rows where that is known."""
        ...

    def page(self, at: RowPlace, count: int) -> RowPage: ...

    def search(self, query: Query, at: RowPlace, count: int, deadline: Deadline) -> RowPage: ...

    def find(self, file: int, row: int, deadline: Deadline) -> tuple[RowPlace, bool]:
        """Place of a row, and True; or how far the search for it came until the deadline, and False."""
        ...

    def row(self, at: RowPlace) -> RowDetail: ...


class Deadline:
    """Time at which a request answers with what it has."""

    def __init__(self, seconds: float = SEARCH_SECONDS) -> None:
        self._until = time.monotonic() + seconds

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until


def snippet(text: str, query: Query | None = None) -> str:
    """The beginning of a text, or what is around the text of a query, on one line."""
    begin = 0
    if query is not None and query.text:
        at = (text.lower() if query.folds else text).find(query.text)
        begin = max(0, at - SNIPPET_CHARACTERS // 4) if at > SNIPPET_CHARACTERS // 2 else 0
    cut = text[begin : begin + SNIPPET_CHARACTERS]
    line = " ".join(cut.split())
    return f"{'...' if begin else ''}{line}{'...' if begin + SNIPPET_CHARACTERS < len(text) else ''}"
