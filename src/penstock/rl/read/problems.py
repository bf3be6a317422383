"""What is wrong with a data set of rollouts, said all at once, each with the row it is about."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError

__all__ = ["RolloutProblems", "RowNames"]

MOST = 10
"""Problems that are told; the rest are counted."""
ALIKE = 3
"""Rows that are named for one and the same problem."""


@dataclass(slots=True)
class RowNames:
    """Where each row came from: its file and number there, or its number alone; and what it is called."""

    starts: list[int] = field(default_factory=list)
    """The rows at which another stretch of a file begins."""
    files: list[tuple[str, int]] = field(default_factory=list)
    """The file of each stretch, and the number in it of the first row."""
    first_row: int = 0
    ids: Sequence[Any] | None = None

    def of(self, row: int) -> tuple[str | None, int]:
        """The file of a row, if it came from one, and its number."""
        if not self.starts:
            return None, self.first_row + row
        stretch = bisect_right(self.starts, row) - 1
        file, first = self.files[stretch]
        return file, first + row - self.starts[stretch]

    def told(self, row: int) -> str:
        """`rollouts.jsonl, row 5 (id 'a')`"""
        file, number = self.of(row)
        name = self.ids[row] if self.ids is not None else None
        return (f"{file}, " if file is not None else "") + f"row {number}" + (f" (id {name!r})" if name else "")


class RolloutProblems:
    """Collects what is wrong; `refuse` raises one error with all of it."""

    def __init__(self, places: RowNames) -> None:
        self.places = places
        self._told: list[str] = []
        self._more = 0
        self._rows: set[int] = set()
        self._first: int | None = None

    def __bool__(self) -> bool:
        return bool(self._told)

    def add(self, rows: npt.ArrayLike, tell: Callable[[int], str] | str) -> None:
        """The same trouble in some rows; `tell` says it, of each of them or of all.

        A row is told of once: what else is wrong with it may follow from that.
        """
        bad = np.asarray(rows, np.int64).reshape(-1)
        if len(bad) and self._rows:
            bad = bad[~np.isin(bad, list(self._rows))]
        if not len(bad):
            return
        self._rows.update(bad.tolist())
        if self._first is None:
            self._first = int(bad[0])
        for number, row in enumerate(bad[:ALIKE].tolist(), 1):
            more = f" (and {len(bad) - ALIKE} more rows like it)" if number == ALIKE < len(bad) else ""
            text = tell if isinstance(tell, str) else tell(row)
            self._tell(f"{self.places.told(row)}: {text}{more}")

    def add_whole(self, text: str) -> None:
        """Something that is about no single row."""
        self._tell(text)

    def refuse(self) -> None:
        """Raise one `DataError` with every problem, if there are any."""
        if not self._told:
            return
        if len(self._told) + self._more == 1:
            text = self._told[0]
        else:
            rest = [f"... and {self._more} more"] if self._more else []
            text = "\n  ".join([f"{len(self._told) + self._more} problems with the rollouts:", *self._told, *rest])
        error = DataError(text)
        if self._first is not None:
            error.file, error.row = self.places.of(self._first)
        raise error

    def _tell(self, text: str) -> None:
        if len(self._told) < MOST:
            self._told.append(text)
        else:
            self._more += 1
