"""Where rollouts come from: a table that is there, or what inference engines append while the trainer reads.

Everything is read by a *cursor*, a small value that JSON can hold. What is taken at a cursor is the same whenever it is
taken, so a state needs nothing but the cursor: rollouts that were generated and not trained on stay where they are.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.rl.rollout import RolloutTable
from penstock.rl.selection import SelectionRules, check_group_prompts, group_by_prompt, is_unnamed, log_prompt_groups

__all__ = [
    "Entries",
    "Fixed",
    "Gathering",
    "Live",
    "RolloutSource",
    "Taken",
    "Taking",
    "empty_table",
    "from_text",
    "group_numbers",
    "to_text",
]


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


logger = logging.getLogger(__name__)

_LONG = 1024
"""Appends that a group which is not whole may stay behind before that is said."""
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
    def take(self, cursor: Cursor, rules: SelectionRules) -> Taken | None:
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

    def take(self, cursor: Cursor, rules: SelectionRules) -> Taken | None:
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
        """An entry, waiting for it; None if no more will come. `missing` says what it is waited for.

        One of no rollouts stands for an append that could not be read.
        """

    def release(self, number: int, needed: Set[int]) -> None:
        """Entries before this one are not asked for again, but for those that are needed."""

    def facts(self) -> dict[str, Any]: ...
    def check_saved(self, unused: bool) -> None: ...
    def restore(self, first: int) -> bool:
        """Go on with entry `first`; False where entries do not outlive the process, and are counted anew."""

    def commit(self, number: int) -> None: ...
    def close(self) -> None: ...


class Live:
    """Rollouts as they come. A rollout batch is the first whole groups, in the order they became whole, with `rows`
    rollouts or more that are not dropped. At the end, what is left is the last one.

    A cursor is `{"next": the entry to be read next, "pending": rows of those before it}`: what came and was not used.
    Groups that stay unfinished are dropped when `max_pending` entries have come after them, and when they are so old
    that they would be dropped if they were whole.
    """

    live = True

    def __init__(
        self,
        entries: Entries,
        rows: int | None,
        group_size: int | None,
        max_pending: int | None = None,
        *,
        by_prompt: bool = False,
    ) -> None:
        if rows is None:
            raise ConfigError("a live source has no end to wait for; pass rollout_batch_size=")
        if max_pending is not None and group_size is None:
            raise ConfigError("max_pending_appends is for groups that come in several appends; pass group_size= too")
        self.entries, self.rows, self.group_size, self.max_pending = entries, rows, group_size, max_pending
        self._by_prompt = by_prompt and group_size is None
        """Whether rollouts of one append that name no group are grouped by equal prompts."""
        self._said = self._told_groups = False

    @property
    def name(self) -> str:
        return self.entries.name

    def take(self, cursor: Cursor, rules: SelectionRules) -> Taken | None:
        following, pending = (self.entries.first(), {}) if cursor is None else (cursor["next"], _pending(cursor))
        self.entries.release(following, pending.keys())
        gathering, taken = Gathering(self.group_size, self.max_pending), Taking(rules)
        for number, rows in pending.items():
            gathering.feed(number, self._get(number, gathering, taken), rows)
        ended = False
        while not taken.take(gathering, self.rows):
            entry = self.entries.get(following, lambda: self._missing(gathering, taken))
            if entry is None:
                ended = True
                break
            taken.drop("unreadable append", not len(entry))
            gathering.feed(following, self._grouped(entry), range(len(entry)))
            following += 1
        self._give_up(gathering, taken, ended)
        if ended and not taken.count and not taken.dropped:
            return None
        left = {} if ended else gathering.pending()
        self._say_what_waits(following, left)
        return Taken(*taken.joined(), {"next": following, "pending": to_text(left)}, taken.dropped)

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

    def _get(self, number: int, gathering: Gathering, taken: Taking) -> RolloutTable:
        entry = self.entries.get(number, lambda: self._missing(gathering, taken))
        if entry is None:
            raise ResumeError(f"{self.name} ends before entry {number}, of which the state has rollouts still to use")
        return self._grouped(entry)

    def _grouped(self, entry: RolloutTable) -> RolloutTable:
        """The append with equal prompts grouped, if that is wanted and no rollout of it names a group."""
        found = group_by_prompt(entry) if self._by_prompt and len(entry) else entry
        if found is not entry and not self._told_groups:
            self._told_groups = True
            log_prompt_groups(found, f"{self.name}, first append")
        return found

    def _give_up(self, gathering: Gathering, taken: Taking, ended: bool) -> None:
        """Drop what is not whole, and will not be or need not be."""
        options, version = taken.rules.options, taken.rules.version
        if options.max_staleness is not None and options.on_stale == "drop" and version is not None:
            taken.drop("stale", gathering.drop_stale(version - options.max_staleness))
        taken.drop("incomplete group", gathering.given_up)
        if ended and (lost := gathering.unfinished):
            logger.warning("%d rollouts of groups with fewer than group_size=%s are dropped", lost, self.group_size)
            taken.drop("incomplete group", lost)

    def _say_what_waits(self, following: int, left: Mapping[int, Any]) -> None:
        behind = following - min(left, default=following)
        if behind > _LONG and not self._said and self.group_size is not None and self.max_pending is None:
            self._said = True
            logger.warning(
                "%s: a group has waited for the rest of its group_size=%d rollouts while %d appends came, and none of "
                "them can be deleted before it is whole; pass max_pending_appends= to drop such groups",
                self.name,
                self.group_size,
                behind,
            )

    def _missing(self, gathering: Gathering, taken: Taking) -> str:
        waiting = f", {gathering.unfinished} more are in groups that are not whole" if gathering.unfinished else ""
        dropped = ", ".join(f"{count} {reason}" for reason, count in taken.dropped.items())
        return (
            f"rollouts: {taken.count} of the {self.rows} of a rollout batch are there{waiting}"
            f"{f'; dropped were {dropped}' if dropped else ''}"
        )


def _pending(cursor: Cursor) -> dict[int, list[int]]:
    """The rows of each entry that came and were not used."""
    try:
        return from_text(cursor["pending"])
    except (AttributeError, TypeError, ValueError) as error:
        raise ResumeError(f"the state is damaged ({error}): {cursor!r:.200}") from None


def _low(cursor: Cursor) -> int:
    """The first entry that is still needed."""
    return min([int(cursor["next"]), *_pending(cursor)])


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
