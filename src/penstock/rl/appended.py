"""Rollouts that come one append after the other, put together in groups, and groups in rollout batches."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.errors import DataError
from penstock.rl.groups import check_group_prompts, is_unnamed
from penstock.rl.selection import SelectionRules
from penstock.rl.table import RolloutTable

__all__ = ["Gathering", "Taking", "empty_table", "from_text", "to_text"]

_RUN = re.compile(r"(\d+)(?:x(\d+))?(?::([\d,-]+))?")
Ints = npt.NDArray[np.int64]
Place = tuple[int, int]
"""The entry and the row of a rollout."""


class Gathering:
    """Rollouts as they come, put together in groups.

    A group is whole when it has `size` rollouts; None: those of one entry are. One that is not whole when `patience`
    entries have come after its first is given up.
    """

    def __init__(self, size: int | None, patience: int | None = None) -> None:
        self.size, self.patience = size, patience
        self.tables: dict[int, RolloutTable] = {}
        self.whole: deque[list[Place]] = deque()
        self.given_up = 0
        """Rollouts of groups that were not whole in time."""
        self._open: dict[Any, list[Place]] = {}
        """By name, in the order in which they were begun."""

    def feed(self, number: int, table: RolloutTable, rows: Iterable[int]) -> None:
        self.tables[number] = table
        for row in rows:
            name = table.groups[row]
            if self.size not in (None, 1) and is_unnamed(name):
                raise DataError(
                    f"rollout {table.ids[row]!r} names no group, so nobody knows to which group_size={self.size} "
                    "rollouts it belongs; give it one"
                )
            group = self._open.setdefault(name, [])
            group.append((number, row))
            if self.size is not None and len(group) >= self.size:
                self.whole.append(self._open.pop(name))
        if self.size is None:
            self.whole.extend(self._open.values())
            self._open.clear()
        while self.patience is not None and self._open:
            name = next(iter(self._open))
            if number - self._open[name][0][0] < self.patience:
                break
            self.given_up += len(self._open.pop(name))

    def drop_stale(self, oldest: int) -> int:
        """Forget groups that are not whole and have rollouts of a version before `oldest`: how many rollouts."""
        stale = [
            name
            for name, group in self._open.items()
            if any(0 <= self.tables[number].versions[row] < oldest for number, row in group)
        ]
        return sum(len(self._open.pop(name)) for name in stale)

    @property
    def unfinished(self) -> int:
        """Rollouts of groups that are not whole."""
        return sum(map(len, self._open.values()))

    def pending(self) -> dict[int, list[int]]:
        """What was fed and not used: the rows of each entry."""
        left: dict[int, list[int]] = {}
        for number, row in sorted(place for group in (*self.whole, *self._open.values()) for place in group):
            left.setdefault(number, []).append(row)
        return left


class Taking:
    """Whole groups on their way into a rollout batch."""

    def __init__(self, rules: SelectionRules) -> None:
        self.rules = rules
        self.count = 0
        self.dropped: Counter[str] = Counter()
        self._tables: list[RolloutTable] = []
        self._keys: list[Ints] = []
        self._groups = 0
        self._ids: set[Any] = set()

    def take(self, gathering: Gathering, wanted: int) -> bool:
        """Take groups until there are enough; whether there are."""
        while gathering.whole and self.count < wanted:
            groups = list(_so_many(gathering.whole, wanted - self.count))
            places = [place for group in groups for place in group]
            keys = self._groups + np.repeat(np.arange(len(groups)), [len(group) for group in groups])
            self._groups += len(groups)
            table = self.rules.scored(_rows_of(gathering.tables, places))
            if self.rules.options.group_prompts == "equal":
                check_group_prompts(table, keys.tolist())
            reasons = self.rules.judge(table, keys)
            self._mark_duplicates(table, reasons)
            self.dropped.update(reason for reason in reasons.tolist() if reason is not None)
            kept = np.flatnonzero(reasons == None)  # noqa: E711 - entry by entry
            if len(kept):
                self._tables.append(table.take(kept))
                self._keys.append(keys[kept])
                self.count += len(kept)
        return self.count >= wanted

    def _mark_duplicates(self, table: RolloutTable, reasons: npt.NDArray[np.object_]) -> None:
        """A rollout that is in the rollout batch already, by its id: an error, or dropped."""
        for row, name in enumerate(table.ids.tolist()):
            if reasons[row] is not None:
                continue
            if name in self._ids:
                if self.rules.options.duplicate_ids == "error":
                    raise DataError(
                        f"id {name!r} came twice, the second time in group {table.groups[row]!r}, and an id names one "
                        "rollout; append each rollout once, or pass duplicate_ids='drop' to leave out the second",
                        row=row,
                    )
                reasons[row] = "duplicate id"
            self._ids.add(name)

    def drop(self, reason: str, rollouts: int) -> None:
        if rollouts:
            self.dropped[reason] += rollouts

    def joined(self) -> tuple[RolloutTable, Ints]:
        if not self._tables:
            return empty_table(), np.empty(0, np.int64)
        return RolloutTable.joined(self._tables), np.concatenate(self._keys)


def to_text(rows: Mapping[int, Sequence[int]]) -> str:
    """Rows of entries as short text: `8x248 8:0-3,7 1` is row 0 of 248 entries from entry 8 on, and then, past 8 more,
    rows 0 to 3 and 7 of entries 264 and, past one, 266."""
    parts: list[str] = []
    end, told = 0, "0"
    runs = groupby(enumerate(sorted(rows)), key=lambda at: (at[1] - at[0], _ranges(rows[at[1]])))
    for (_, spelled), run in runs:
        numbers = [number for _, number in run]
        many = f"x{len(numbers)}" if len(numbers) > 1 else ""
        parts.append(f"{numbers[0] - end}{many}{'' if spelled == told else f':{spelled}'}")
        end, told = numbers[-1] + 1, spelled
    return " ".join(parts)


def from_text(text: str) -> dict[int, list[int]]:
    """The rows that `to_text` wrote; raises ValueError for other text."""
    rows: dict[int, list[int]] = {}
    end, of_each = 0, [0]
    for part in text.split():
        run = _RUN.fullmatch(part)
        if run is None:
            raise ValueError(f"not rows of entries: {part!r}")
        if run[3] is not None:
            bounds = [[int(bound) for bound in some.split("-")] for some in run[3].split(",")]
            of_each = [row for low, *high in bounds for row in range(low, (high or [low])[0] + 1)]
        start, many = end + int(run[1]), int(run[2] or 1)
        rows |= dict.fromkeys(range(start, start + many), of_each)
        end = start + many
    return rows


def _ranges(rows: Sequence[int]) -> str:
    """`0-3,7`"""
    runs = [[row for _, row in run] for _, run in groupby(enumerate(rows), key=lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _so_many(groups: deque[list[Place]], rows: int) -> Iterator[list[Place]]:
    """The fewest of the first groups that have so many rows, or all."""
    while groups and rows > 0:
        group = groups.popleft()
        rows -= len(group)
        yield group


def _rows_of(tables: Mapping[int, RolloutTable], places: list[Place]) -> RolloutTable:
    """Rows of several tables, in the order given."""
    order: dict[int, list[int]] = {}
    for at, (number, _) in enumerate(places):
        order.setdefault(number, []).append(at)
    parts = [tables[number].take([places[at][1] for at in ats]) for number, ats in order.items()]
    found = RolloutTable.joined(parts)
    ats = np.concatenate([np.array(ats) for ats in order.values()])
    return found if np.array_equal(ats, np.arange(len(ats))) else found.take(np.argsort(ats))


def empty_table() -> RolloutTable:
    """Of no rollouts."""
    ids, names = Ragged.of([], np.int64), np.empty(0, np.object_)
    return RolloutTable(
        prompt_ids=ids,
        response_ids=ids,
        loss_mask=Ragged.of([], np.bool_),
        rewards=np.empty(0),
        groups=names,
        versions=np.empty(0, np.int64),
        tokenized=np.empty(0, np.bool_),
        ids=names,
        finish_reasons=names,
        metadata=names,
    )
