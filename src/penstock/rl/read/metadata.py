"""What is known of a rollout as a whole: its id, group, reward, policy version, how it ended, and free metadata."""

from __future__ import annotations

import contextlib
import reprlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from penstock.rl.column_aliases import Meaning
from penstock.rl.groups import check_unique_ids
from penstock.rl.read.columns import Column, Intake, as_numbers, as_objects
from penstock.rl.read.problems import RolloutProblems

__all__ = ["Whole", "read_whole"]

Objects = npt.NDArray[np.object_]


class Whole:
    """The columns with one entry per rollout."""

    def __init__(self, intake: Intake, meaning: Meaning, problems: RolloutProblems) -> None:
        self._intake, self._meaning, self._problems = intake, meaning, problems
        self.ids = self._ids()
        self.finish_reasons = self._finish_reasons()
        self.rewards = self._rewards()
        self.versions = self._versions()
        self.groups = self._groups()
        self.metadata = self._metadata()
        self.tokenized = self._tokenized()

    def column(self, field: str) -> Column | None:
        """What was given for a field."""
        name = self._meaning.fields.get(field)
        return None if name is None else self._intake.columns[name]

    def cells(self, field: str) -> list[Any]:
        """The same as Python objects; None in every row if it was not given."""
        column = self.column(field)
        return [None] * self._intake.rows if column is None else as_objects(column)

    def _ids(self) -> Objects:
        cells = self.cells("id")
        if any(cell is not None for cell in cells):
            cells = [None if cell is None else str(cell) for cell in cells]
            self._problems.places.ids = cells
        given = np.array([cell is not None for cell in cells], np.bool_)
        if given.any():
            check_unique_ids(cells, given, self._meaning.fields["id"], self._problems)
        first, known, mark = self._problems.places.first_row, set(cells), ""
        while given.any() and any(f"{mark}{first + row}" in known for row in np.flatnonzero(~given).tolist()):
            mark += "~"
        return _objects([f"{mark}{first + row}" if cell is None else cell for row, cell in enumerate(cells)])

    def _finish_reasons(self) -> Objects:
        cells = [_reason(cell) for cell in self.cells("finish_reason")]
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, str | None)]
        self._problems.add(wrong, lambda row: f"finish_reason is {reprlib.repr(cells[row])}, expected text")
        return _objects(cells)

    def _rewards(self) -> npt.NDArray[np.float64]:
        column = self.column("reward")
        if column is None:
            return np.full(self._intake.rows, np.nan)
        name, found = self._meaning.fields["reward"], as_numbers(column)
        self._problems.add(
            found.odd,
            lambda row: (
                f"{name} is {found.describe(row)}, expected one number for the whole response; rewards of its tokens "
                "are token_rewards"
            ),
        )
        endless = np.flatnonzero(np.isinf(found.values))
        self._problems.add(endless, lambda row: f"{name} is {found.values[row]}, expected a finite number")
        return found.values

    def _versions(self) -> npt.NDArray[np.int64]:
        column = self.column("policy_version")
        if column is None:
            return np.full(self._intake.rows, -1, np.int64)
        found = as_numbers(column)
        known = ~np.isnan(found.values)
        with np.errstate(invalid="ignore"):
            wrong = known & ~((found.values >= 0) & (found.values % 1 == 0) & (found.values < 2**53))
        wrong[found.odd] = True
        cells = as_objects(column) if wrong.any() else []
        self._problems.add(
            np.flatnonzero(wrong),
            lambda row: f"policy_version is {reprlib.repr(cells[row])}, expected a whole number from 0 on",
        )
        return np.where(known & ~wrong, np.nan_to_num(found.values, posinf=0.0), -1).astype(np.int64)

    def _groups(self) -> Objects:
        """Names; if nobody gave one, each rollout has a group of its own, called by its number."""
        cells = [_name(cell) for cell in self.cells("group")]
        wrong = [row for row, cell in enumerate(cells) if not isinstance(cell, str | int | None)]
        self._problems.add(wrong, lambda row: f"group is {reprlib.repr(cells[row])}, expected text or a whole number")
        named = sum(isinstance(cell, str | int) for cell in cells)
        if named:
            lacking = [row for row, cell in enumerate(cells) if cell is None]
            self._problems.add(
                lacking, f"group is missing, and {named} other rows have one; give it for all rows, or for none"
            )
        first = self._problems.places.first_row
        return _objects([f"~{first + row}" if cell is None else cell for row, cell in enumerate(cells)])

    def _metadata(self) -> Objects:
        cells = [self._mapping(row, cell) for row, cell in enumerate(self.cells("metadata"))]
        for name in self._meaning.extras:
            for row, value in enumerate(as_objects(self._intake.columns[name])):
                if value is None:
                    continue
                if name in cells[row]:
                    self._problems.add([row], f"{name!r} is a column and a key of metadata")
                cells[row][name] = value
        return _objects(cells)

    def _mapping(self, row: int, cell: Any) -> dict[str, Any]:
        if cell is None:
            return {}
        if isinstance(cell, str):
            with contextlib.suppress(ValueError):  # told below
                cell = orjson.loads(cell)
        if not isinstance(cell, Mapping):
            self._problems.add([row], f"metadata is {reprlib.repr(cell)}, expected a dict, or its JSON")
            return {}
        if isinstance(self.column("metadata"), pa.ChunkedArray):
            return {key: value for key, value in cell.items() if value is not None}
        return dict(cell)

    def _tokenized(self) -> npt.NDArray[np.bool_]:
        return np.array([bool(cell) for cell in self.cells("tokenized")], np.bool_)


def read_whole(intake: Intake, meaning: Meaning, problems: RolloutProblems) -> Whole:
    """Everything that is one entry per rollout; what cannot be is a problem."""
    return Whole(intake, meaning, problems)


def _reason(cell: Any) -> Any:
    """The word for it: engines wrap it in an object, or an enumeration."""
    if isinstance(cell, Mapping) and "type" in cell:
        return cell["type"]
    return cell.value if isinstance(cell, Enum) else cell


def _name(cell: Any) -> Any:
    if isinstance(cell, bool | np.bool_):
        return float(cell)  # no name for a group
    if isinstance(cell, np.integer | np.str_):
        return cell.item()
    return cell


def _objects(cells: list[Any]) -> Objects:
    found = np.empty(len(cells), np.object_)
    found[:] = cells
    return found
