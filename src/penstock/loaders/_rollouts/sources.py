"""Where rollouts come from: a table that is there, or what inference engines append while the trainer reads.

Everything is read by a *cursor*, a small value that JSON can hold. What is taken at a cursor is the same whenever it is
taken, so a state needs nothing but the cursor: rollouts that were generated and not trained on stay where they are.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.loaders._rollouts.rules import Rules
from penstock.loaders._rollouts.table import Ragged, RolloutTable

__all__ = ["Entries", "Fixed", "Live", "RolloutSource", "Taken", "group_numbers"]

logger = logging.getLogger(__name__)

_UNNAMED = re.compile(r"~+\d+")
"""How `read_rollouts` calls the group of a rollout that has none."""
Ints = npt.NDArray[np.int64]
Cursor = Any
"""None is the beginning."""


@dataclass(frozen=True, slots=True)
class Taken:
    """One rollout batch: what was kept, and what came of the rest."""

    table: RolloutTable
    keys: Ints
    """The number of each rollout's group."""
    behind: Cursor
    """Where the next one begins; None: there is no next one."""
    dropped: Mapping[str, int]


class RolloutSource(Protocol):
    """Rollout batches, from any cursor on."""

    live: bool

    @property
    def name(self) -> str: ...
    def take(self, cursor: Cursor, rules: Rules) -> Taken | None:
        """The rollout batch at a cursor, waiting for it; None at the end."""

    def facts(self) -> dict[str, Any]:
        """What a state is bound to."""

    def check_saved(self, cursor: Cursor, *, between: bool) -> None:
        """Raises if a state with that cursor could not be resumed; `between`: nothing of the batch there was used."""

    def restored(self, cursor: Cursor) -> Cursor:
        """The cursor to go on with, of one that came with a state; raises if it cannot be gone on with."""

    def commit(self, cursor: Cursor) -> None:
        """What lies before a cursor is done with."""

    def close(self) -> None: ...


class Fixed:
    """Rollouts that are all there: a rollout batch is the next whole groups with `rows` rollouts or more."""

    live = False

    def __init__(self, table: RolloutTable, rows: int | None, name: str | None = None) -> None:
        if not len(table):
            raise ConfigError("there are no rollouts: the data is empty")
        self.table, self.name = table, name or f"{len(table)} rollouts"
        self.keys = group_numbers(table.groups)
        order = np.argsort(self.keys, kind="stable")
        ends = np.cumsum(np.bincount(self.keys))
        cuts, last = [0], 0
        for end in ends.tolist() if rows is not None else ends[-1:].tolist():
            if rows is None or end - last >= rows or end == len(table):
                cuts.append(end)
                last = end
        # Rows stay in the order of the data, so that a batch without shuffling is what somebody wrote.
        self._rows = [np.sort(order[low:high]) for low, high in pairwise(cuts)]
        self._digest: str | None = None

    def take(self, cursor: Cursor, rules: Rules) -> Taken | None:
        number = cursor or 0
        if number >= len(self._rows):
            return None
        rows = self._rows[number]
        table = rules.scored(self.table if len(rows) == len(self.table) else self.table.take(rows))
        keys = self.keys[rows]
        reasons = rules.judge(table, keys)
        kept = np.flatnonzero(reasons == None)  # noqa: E711 - entry by entry
        dropped = Counter(reason for reason in reasons.tolist() if reason is not None)
        if len(kept) < len(table):
            table, keys = table.take(kept), keys[kept]
        return Taken(table, keys, number + 1 if number + 1 < len(self._rows) else None, dropped)

    def facts(self) -> dict[str, Any]:
        if self._digest is None:
            self._digest = fingerprint(self.table)
        return {"rollouts": len(self.table), "fingerprint": self._digest}

    def check_saved(self, cursor: Cursor, *, between: bool) -> None:
        pass

    def restored(self, cursor: Cursor) -> Cursor:
        return cursor

    def commit(self, cursor: Cursor) -> None:
        pass

    def close(self) -> None:
        pass


class Entries(Protocol):
    """What was appended, one entry after the other, each a table; numbered from `first()` on."""

    @property
    def name(self) -> str: ...
    def first(self) -> int:
        """The number of the first entry that is there, or will be."""

    def get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        """An entry, waiting for it; None if no more will come. `missing` says what it is waited for."""

    def release(self, number: int) -> None:
        """Entries before this one are not asked for again."""

    def facts(self) -> dict[str, Any]: ...
    def check_saved(self, unused: bool) -> None: ...
    def restore(self, first: int) -> bool:
        """Go on with entry `first`; False where entries do not outlive the process, and are counted anew."""

    def commit(self, number: int) -> None: ...
    def close(self) -> None: ...


class Live:
    """Rollouts as they come. A rollout batch is the first whole groups, in the order they became whole, with `rows`
    rollouts or more that are not dropped. At the end, what is left is the last one.

    A cursor is `{"next": the entry to be read next, "pending": [[entry, [rows]]]}`: what came before and was not used.
    """

    live = True

    def __init__(self, entries: Entries, rows: int | None, group_size: int | None) -> None:
        if rows is None:
            raise ConfigError("a live source has no end to wait for; pass rollout_batch_size=")
        self.entries, self.rows, self.group_size = entries, rows, group_size

    @property
    def name(self) -> str:
        return self.entries.name

    def take(self, cursor: Cursor, rules: Rules) -> Taken | None:
        following, pending = (self.entries.first(), []) if cursor is None else (cursor["next"], cursor["pending"])
        self.entries.release(min([following, *(number for number, _ in pending)]))
        gathering = Gathering(self.group_size)
        for number, rows in pending:
            gathering.feed(number, self._get(number, gathering, 0), rows)
        taken = _Taking(rules)
        ended = False
        while not taken.take(gathering, self.rows):
            entry = self.entries.get(following, lambda: self._missing(gathering, taken.count))
            if entry is None:
                ended = True
                break
            gathering.feed(following, entry, range(len(entry)))
            following += 1
        if ended and (lost := gathering.unfinished):
            logger.warning("%d rollouts of groups with fewer than group_size=%s are dropped", lost, self.group_size)
            taken.dropped["incomplete group"] += lost
        if not taken.tables:
            if taken.dropped:
                logger.warning("nothing is left of the last rollouts of %s: %s", self.name, dict(taken.dropped))
            return None
        behind = {"next": following, "pending": [] if ended else gathering.pending()}
        return Taken(*taken.joined(), behind, taken.dropped)

    def facts(self) -> dict[str, Any]:
        return self.entries.facts() | {"group_size": self.group_size}

    def check_saved(self, cursor: Cursor, *, between: bool) -> None:
        self.entries.check_saved(unused=not between or bool(cursor and cursor["pending"]))

    def restored(self, cursor: Cursor) -> Cursor:
        return cursor if cursor is None or self.entries.restore(_low(cursor)) else None

    def commit(self, cursor: Cursor) -> None:
        if cursor is not None:
            self.entries.commit(_low(cursor))

    def close(self) -> None:
        self.entries.close()

    def _get(self, number: int, gathering: Gathering, count: int) -> RolloutTable:
        entry = self.entries.get(number, lambda: self._missing(gathering, count))
        if entry is None:
            raise ResumeError(f"{self.name} ends before entry {number}, of which the state has rollouts still to use")
        return entry

    def _missing(self, gathering: Gathering, count: int) -> str:
        waiting = f", {gathering.unfinished} more are in groups that are not whole" if gathering.unfinished else ""
        return f"rollouts: {count} of the {self.rows} of a rollout batch are there{waiting}"


class Gathering:
    """Rollouts as they come, put together in groups."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.tables: dict[int, RolloutTable] = {}
        self.whole: deque[list[tuple[int, int]]] = deque()
        """Groups, as the entries and rows of their rollouts."""
        self._open: dict[Any, list[tuple[int, int]]] = {}

    def feed(self, number: int, table: RolloutTable, rows: Iterable[int]) -> None:
        self.tables[number] = table
        for row in rows:
            name = table.groups[row]
            if self.size not in (None, 1) and isinstance(name, str) and _UNNAMED.fullmatch(name):
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

    @property
    def unfinished(self) -> int:
        """Rollouts of groups that are not whole."""
        return sum(map(len, self._open.values()))

    def pending(self) -> list[Any]:
        """What was fed and not used, as a cursor has it."""
        left: dict[int, list[int]] = {}
        for number, row in sorted(place for group in (*self.whole, *self._open.values()) for place in group):
            left.setdefault(number, []).append(row)
        return [[number, rows] for number, rows in left.items()]


class _Taking:
    """Whole groups on their way into a rollout batch."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.count = 0
        self.dropped: Counter[str] = Counter()
        self.tables: list[RolloutTable] = []
        self._keys: list[Ints] = []
        self._groups = 0

    def take(self, gathering: Gathering, wanted: int) -> bool:
        """Take groups until there are enough; whether there are."""
        while gathering.whole and self.count < wanted:
            groups = list(_so_many(gathering.whole, wanted - self.count))
            places = [place for group in groups for place in group]
            keys = self._groups + np.repeat(np.arange(len(groups)), [len(group) for group in groups])
            self._groups += len(groups)
            table = self.rules.scored(_rows_of(gathering.tables, places))
            reasons = self.rules.judge(table, keys)
            self.dropped.update(reason for reason in reasons.tolist() if reason is not None)
            kept = np.flatnonzero(reasons == None)  # noqa: E711
            if len(kept):
                self.tables.append(table.take(kept))
                self._keys.append(keys[kept])
                self.count += len(kept)
        return self.count >= wanted

    def joined(self) -> tuple[RolloutTable, Ints]:
        return RolloutTable.joined(self.tables), np.concatenate(self._keys)


def _so_many(groups: deque[list[tuple[int, int]]], rows: int) -> Iterator[list[tuple[int, int]]]:
    """The fewest of the first groups that have so many rows, or all."""
    while groups and rows > 0:
        group = groups.popleft()
        rows -= len(group)
        yield group


def _rows_of(tables: Mapping[int, RolloutTable], places: list[tuple[int, int]]) -> RolloutTable:
    """Rows of several tables, in the order given."""
    order: dict[int, list[int]] = {}
    for at, (number, _) in enumerate(places):
        order.setdefault(number, []).append(at)
    parts = [tables[number].take([places[at][1] for at in ats]) for number, ats in order.items()]
    found = RolloutTable.joined(parts)
    ats = np.concatenate([np.array(ats) for ats in order.values()])
    return found if np.array_equal(ats, np.arange(len(ats))) else found.take(np.argsort(ats))


def _low(cursor: Cursor) -> int:
    """The first entry that is still needed."""
    numbers: list[int] = [cursor["next"], *(number for number, _ in cursor["pending"])]
    return min(numbers)


def group_numbers(groups: npt.NDArray[np.object_]) -> Ints:
    """A number for the group of each rollout, in the order in which they appear."""
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(name, len(numbers)) for name in groups.tolist()], np.int64)


def fingerprint(table: RolloutTable) -> str:
    """A hash of everything that batches are made of."""
    digest = xxhash.xxh3_128()
    for name in ("prompt_ids", "response_ids", "loss_mask", "token_rewards", "logprobs", "ref_logprobs", "values"):
        column: Ragged | None = getattr(table, name)
        digest.update(f"{name} {None if column is None else column.values.dtype}".encode())
        if column is not None:
            digest.update((column.offsets - column.offsets[0]).data)
            digest.update(np.ascontiguousarray(column.values[column.offsets[0] : column.offsets[-1]]).data)
    for numbers in (table.rewards, table.versions):
        digest.update(np.ascontiguousarray(numbers).data)
    digest.update(repr(table.groups.tolist()).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
