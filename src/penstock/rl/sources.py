"""Sources of rollout batches: a table in memory, or appends that arrive while the trainer reads.

Sources are read by *cursor*, a small JSON value. The same cursor always gives the same rollout batch, so a state needs
only the cursor: rollouts that were generated and not trained on stay in the source.
"""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.states import check_fields
from penstock.rl.options import RolloutBatching
from penstock.rl.rollout import RolloutTable
from penstock.rl.selection import SelectionRules, check_group_prompts, group_by_prompt, is_unnamed, log_prompt_groups

logger = logging.getLogger(__name__)

_MANY_APPENDS = 1024
"""Appends after an incomplete group before a warning is logged."""
_RUN = re.compile(r"(\d+)(?:x(\d+))?(?::([\d,-]+))?")

Ints = npt.NDArray[np.int64]
Cursor: TypeAlias = Any
"""None is the beginning."""
AppendRow: TypeAlias = tuple[int, int]
"""Append number and row of a rollout."""


@dataclass(frozen=True, slots=True)
class SelectedRollouts:
    """One rollout batch: the rollouts that were kept, and counts of those that were not."""

    table: RolloutTable
    keys: Ints
    """Group number of each rollout."""
    next_cursor: Cursor
    """Start of the next rollout batch; None: there is none."""
    dropped: Mapping[str, int]


class RolloutSource(Protocol):
    """Rollout batches from any cursor on."""

    live: bool

    @property
    def name(self) -> str: ...
    def take(self, cursor: Cursor, rules: SelectionRules) -> SelectedRollouts | None:
        """Rollout batch at a cursor; waits for it, and returns None at the end."""

    def facts(self) -> dict[str, Any]:
        """Properties of the source that a state is bound to."""

    def check_saved(self, cursor: Cursor, *, between: bool) -> None:
        """Raise if a state with that cursor could not be resumed; `between`: nothing of its batch was used."""

    def restored(self, cursor: Cursor) -> Cursor:
        """Cursor to continue with, for one from a state; raises if the source cannot continue there."""

    def commit(self, cursor: Cursor) -> None:
        """Allow the source to delete everything before a cursor."""

    def close(self) -> None: ...


class TableRollouts:
    """Rollouts in memory. A rollout batch is the next whole groups with at least `rows` rollouts."""

    live = False

    def __init__(self, table: RolloutTable, rows: int | None, name: str | None = None) -> None:
        if not len(table):
            raise ConfigError("there are no rollouts: the data is empty")
        self.table, self.name = table, name or f"{len(table)} rollouts"
        numbers: dict[Any, int] = {}
        self.keys = np.array([numbers.setdefault(group, len(numbers)) for group in table.groups.tolist()], np.int64)
        order = np.argsort(self.keys, kind="stable")
        ends = np.cumsum(np.bincount(self.keys))
        cuts, last = [0], 0
        for end in ends.tolist() if rows is not None else ends[-1:].tolist():
            if rows is None or end - last >= rows or end == len(table):
                cuts.append(end)
                last = end
        # Rows keep the order of the data, so unshuffled batches are in that order.
        self._rows = [np.sort(order[low:high]) for low, high in pairwise(cuts)]
        self._digest: str | None = None

    def take(self, cursor: Cursor, rules: SelectionRules) -> SelectedRollouts | None:
        check_fields({"cursor": cursor}, {"cursor": (int, None)})
        number = cursor or 0
        if number >= len(self._rows):
            return None
        rows = self._rows[number]
        table = rules.scored(self.table if len(rows) == len(self.table) else self.table.take(rows))
        keys = self.keys[rows]
        reasons = rules.judge(table, keys)
        kept = np.flatnonzero(reasons == None)  # noqa: E711 - elementwise
        dropped = Counter(reason for reason in reasons.tolist() if reason is not None)
        if len(kept) < len(table):
            table, keys = table.take(kept), keys[kept]
        return SelectedRollouts(table, keys, number + 1 if number + 1 < len(self._rows) else None, dropped)

    def facts(self) -> dict[str, Any]:
        if self._digest is None:
            self._digest = _fingerprint(self.table)
        return {"rollouts": len(self.table), "fingerprint": self._digest}

    def check_saved(self, cursor: Cursor, *, between: bool) -> None:
        pass

    def restored(self, cursor: Cursor) -> Cursor:
        return cursor

    def commit(self, cursor: Cursor) -> None:
        pass

    def close(self) -> None:
        pass


class Appends(Protocol):
    """Appends of a live source, one table each, numbered from `first()` on."""

    @property
    def name(self) -> str: ...
    def first(self) -> int:
        """Number of the first append that is or will be there."""

    def get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        """An append; waits for it, and returns None if no more will come. `missing` describes what is waited for.

        An empty table stands for an append that could not be read.
        """

    def release(self, number: int, needed: Set[int]) -> None:
        """Forget appends before this one, except those that are needed."""

    def facts(self) -> dict[str, Any]: ...
    def check_saved(self, unused: bool) -> None: ...
    def restore(self, first: int) -> bool:
        """Continue with append `first`; False if appends do not survive the process, and are numbered anew."""

    def commit(self, number: int) -> None: ...
    def close(self) -> None: ...


class LiveRollouts:
    """Rollouts as they are appended. A rollout batch is the first complete groups, in the order of completion, with at
    least `rollout_batch_size` rollouts that are not dropped; at the end of the source it is the rest.

    A cursor is `{"next": next append to read, "pending": unused rows of earlier appends}`. Incomplete groups are
    dropped after `max_pending_appends` further appends, or when they are too stale to be used.
    """

    live = True

    def __init__(self, appends: Appends, options: RolloutBatching, *, by_prompt: bool = False) -> None:
        if options.rollout_batch_size is None:
            raise ConfigError("a live source needs rollout_batch_size=: it has no end to wait for")
        if options.max_pending_appends is not None and options.group_size is None:
            raise ConfigError("max_pending_appends is for groups that span appends; pass group_size= too")
        self.appends, self.rows = appends, options.rollout_batch_size
        self.group_size, self.max_pending = options.group_size, options.max_pending_appends
        self._by_prompt = by_prompt and options.group_size is None
        """Group rollouts of one append by equal prompts if they name no group."""
        self._logged_pending = self._logged_groups = False
        self.incomplete = 0
        """Rollouts that wait for the rest of their group, at the last append."""

    @property
    def name(self) -> str:
        return self.appends.name

    def take(self, cursor: Cursor, rules: SelectionRules) -> SelectedRollouts | None:
        following, pending = (self.appends.first(), {}) if cursor is None else (cursor["next"], _pending(cursor))
        self.appends.release(following, pending.keys())
        groups, builder = _PendingGroups(self.group_size, self.max_pending), _BatchBuilder(rules)
        for number, rows in pending.items():
            groups.add(number, self._get(number, groups, builder), rows)
        ended = False
        while not builder.take(groups, self.rows):
            table = self.appends.get(following, lambda: self._missing(groups, builder))
            if table is None:
                ended = True
                break
            builder.drop("unreadable append", not len(table))
            groups.add(following, self._grouped(table), range(len(table)))
            self.incomplete = groups.incomplete
            following += 1
        self._drop_incomplete(groups, builder, ended)
        if ended and not builder.count and not builder.dropped:
            return None
        left = {} if ended else groups.pending()
        self._log_pending(following, left)
        return SelectedRollouts(*builder.joined(), {"next": following, "pending": to_text(left)}, builder.dropped)

    def facts(self) -> dict[str, Any]:
        return self.appends.facts() | {"group_size": self.group_size}

    def check_saved(self, cursor: Cursor, *, between: bool) -> None:
        self.appends.check_saved(unused=not between or bool(cursor and cursor["pending"]))

    def restored(self, cursor: Cursor) -> Cursor:
        return cursor if cursor is None or self.appends.restore(_first_needed(cursor)) else None

    def commit(self, cursor: Cursor) -> None:
        if cursor is not None:
            self.appends.commit(_first_needed(cursor))

    def close(self) -> None:
        self.appends.close()

    def _get(self, number: int, groups: _PendingGroups, builder: _BatchBuilder) -> RolloutTable:
        table = self.appends.get(number, lambda: self._missing(groups, builder))
        if table is None:
            raise ResumeError(f"{self.name} ends before append {number}, and the state has unused rollouts of it")
        return self._grouped(table)

    def _grouped(self, table: RolloutTable) -> RolloutTable:
        """Append with equal prompts grouped, if that is wanted and no rollout of it names a group."""
        found = group_by_prompt(table) if self._by_prompt and len(table) else table
        if found is not table and not self._logged_groups:
            self._logged_groups = True
            log_prompt_groups(found, f"{self.name}, first append")
        return found

    def _drop_incomplete(self, groups: _PendingGroups, builder: _BatchBuilder, ended: bool) -> None:
        """Drop incomplete groups that will not be completed, or are too stale."""
        rules = builder.rules
        most, version = rules.staleness.max_staleness, rules.version
        if most is not None and rules.staleness.on_stale == "drop" and version is not None:
            builder.drop("stale", groups.drop_stale(version - most))
        builder.drop("incomplete group", groups.expired)
        if ended and (lost := groups.incomplete):
            logger.warning("%d rollouts of groups with fewer than group_size=%s are dropped", lost, self.group_size)
            builder.drop("incomplete group", lost)

    def _log_pending(self, following: int, left: Mapping[int, Any]) -> None:
        waited = following - min(left, default=following)
        if waited > _MANY_APPENDS and not self._logged_pending and self.group_size and self.max_pending is None:
            self._logged_pending = True
            logger.warning(
                "%s: a group has been incomplete (group_size=%d) for %d appends, none of which can be deleted until it "
                "is complete; pass max_pending_appends= to drop such groups",
                self.name,
                self.group_size,
                waited,
            )

    def _missing(self, groups: _PendingGroups, builder: _BatchBuilder) -> str:
        waiting = f", {groups.incomplete} more are in incomplete groups" if groups.incomplete else ""
        dropped = ", ".join(f"{count} {reason}" for reason, count in builder.dropped.items())
        return (
            f"rollouts: {builder.count} of the {self.rows} of a rollout batch have arrived{waiting}"
            f"{f'; dropped: {dropped}' if dropped else ''}"
        )


class _PendingGroups:
    """Groups of appended rollouts.

    A group is complete with `size` rollouts; None: with those of one append. One that is still incomplete `max_pending`
    appends after its first has expired.
    """

    def __init__(self, size: int | None, max_pending: int | None) -> None:
        self.size, self.max_pending = size, max_pending
        self.tables: dict[int, RolloutTable] = {}
        self.complete: deque[list[AppendRow]] = deque()
        self.expired = 0
        """Rollouts of expired groups."""
        self._open: dict[Any, list[AppendRow]] = {}
        """Incomplete groups by name, oldest first."""

    def add(self, number: int, table: RolloutTable, rows: Iterable[int]) -> None:
        self.tables[number] = table
        for row in rows:
            name = table.groups[row]
            if self.size not in (None, 1) and is_unnamed(name):
                raise DataError(
                    f"rollout {table.ids[row]!r} names no group, which group_size={self.size} needs; give it one"
                )
            group = self._open.setdefault(name, [])
            group.append((number, row))
            if self.size is not None and len(group) >= self.size:
                self.complete.append(self._open.pop(name))
        if self.size is None:
            self.complete.extend(self._open.values())
            self._open.clear()
        while self.max_pending is not None and self._open:
            name = next(iter(self._open))
            if number - self._open[name][0][0] < self.max_pending:
                break
            self.expired += len(self._open.pop(name))

    def drop_stale(self, oldest: int) -> int:
        """Forget incomplete groups with rollouts of a version before `oldest`; number of their rollouts."""
        stale = [
            name
            for name, group in self._open.items()
            if any(0 <= self.tables[number].versions[row] < oldest for number, row in group)
        ]
        return sum(len(self._open.pop(name)) for name in stale)

    @property
    def incomplete(self) -> int:
        """Rollouts of incomplete groups."""
        return sum(map(len, self._open.values()))

    def pending(self) -> dict[int, list[int]]:
        """Unused rows of each append."""
        left: dict[int, list[int]] = {}
        for number, row in sorted(place for group in (*self.complete, *self._open.values()) for place in group):
            left.setdefault(number, []).append(row)
        return left

    def first_rows(self, rows: int) -> Iterator[list[AppendRow]]:
        """Take the shortest prefix of complete groups with at least `rows` rows; all groups if there is none."""
        while self.complete and rows > 0:
            group = self.complete.popleft()
            rows -= len(group)
            yield group


class _BatchBuilder:
    """Rollout batch that is filled with complete groups."""

    def __init__(self, rules: SelectionRules) -> None:
        self.rules = rules
        self.count = 0
        self.dropped: Counter[str] = Counter()
        self._tables: list[RolloutTable] = []
        self._keys: list[Ints] = []
        self._groups = 0
        self._ids: set[Any] = set()

    def take(self, pending: _PendingGroups, wanted: int) -> bool:
        """Take groups until there are `wanted` rollouts; True if there are."""
        while pending.complete and self.count < wanted:
            groups = list(pending.first_rows(wanted - self.count))
            places = [place for group in groups for place in group]
            keys = self._groups + np.repeat(np.arange(len(groups)), [len(group) for group in groups])
            self._groups += len(groups)
            table = self.rules.scored(_rows_of(pending.tables, places))
            if self.rules.selection.group_prompts == "equal":
                check_group_prompts(table, keys.tolist())
            reasons = self.rules.judge(table, keys)
            self._mark_duplicates(table, reasons)
            self.dropped.update(reason for reason in reasons.tolist() if reason is not None)
            kept = np.flatnonzero(reasons == None)  # noqa: E711 - elementwise
            if len(kept):
                self._tables.append(table.take(kept))
                self._keys.append(keys[kept])
                self.count += len(kept)
        return self.count >= wanted

    def _mark_duplicates(self, table: RolloutTable, reasons: npt.NDArray[np.object_]) -> None:
        """Refuse or drop rollouts whose id is in the rollout batch already."""
        for row, name in enumerate(table.ids.tolist()):
            if reasons[row] is not None:
                continue
            if name in self._ids:
                if self.rules.selection.duplicate_ids == "error":
                    raise DataError(
                        f"id {name!r} was appended twice, the second time in group {table.groups[row]!r}, and ids must "
                        "be unique; append each rollout once, or pass duplicate_ids='drop' to drop the second",
                        row=row,
                    )
                reasons[row] = "duplicate id"
            self._ids.add(name)

    def drop(self, reason: str, rollouts: int) -> None:
        if rollouts:
            self.dropped[reason] += rollouts

    def joined(self) -> tuple[RolloutTable, Ints]:
        if not self._tables:
            return RolloutTable.empty(), np.empty(0, np.int64)
        return RolloutTable.joined(self._tables), np.concatenate(self._keys)


def to_text(rows: Mapping[int, Sequence[int]]) -> str:
    """Rows of appends as short text: `8x248 8:0-3,7 1` is row 0 of 248 appends from number 8 on; then, after 8 more,
    rows 0 to 3 and 7 of appends 264 and, after one more, 266."""
    parts: list[str] = []
    end, previous = 0, "0"
    runs = groupby(enumerate(sorted(rows)), key=lambda at: (at[1] - at[0], _ranges(rows[at[1]])))
    for (_, ranges), run in runs:
        numbers = [number for _, number in run]
        times = f"x{len(numbers)}" if len(numbers) > 1 else ""
        parts.append(f"{numbers[0] - end}{times}{'' if ranges == previous else f':{ranges}'}")
        end, previous = numbers[-1] + 1, ranges
    return " ".join(parts)


def from_text(text: str) -> dict[int, list[int]]:
    """Rows that `to_text` wrote; raises ValueError for other text."""
    rows: dict[int, list[int]] = {}
    end, of_each = 0, [0]
    for part in text.split():
        run = _RUN.fullmatch(part)
        if run is None:
            raise ValueError(f"not rows of appends: {part!r}")
        if run[3] is not None:
            bounds = [[int(bound) for bound in piece.split("-")] for piece in run[3].split(",")]
            of_each = [row for low, *high in bounds for row in range(low, (high or [low])[0] + 1)]
        start, times = end + int(run[1]), int(run[2] or 1)
        rows |= dict.fromkeys(range(start, start + times), of_each)
        end = start + times
    return rows


def _ranges(rows: Sequence[int]) -> str:
    """`0-3,7`"""
    runs = [[row for _, row in run] for _, run in groupby(enumerate(rows), key=lambda at: at[1] - at[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _rows_of(tables: Mapping[int, RolloutTable], places: list[AppendRow]) -> RolloutTable:
    """Rows of several tables, in the order given."""
    order: dict[int, list[int]] = {}
    for at, (number, _) in enumerate(places):
        order.setdefault(number, []).append(at)
    found = RolloutTable.joined(tables[number].take([places[at][1] for at in ats]) for number, ats in order.items())
    ats = np.concatenate([np.array(ats) for ats in order.values()])
    return found if np.array_equal(ats, np.arange(len(ats))) else found.take(np.argsort(ats))


def _pending(cursor: Cursor) -> dict[int, list[int]]:
    """Unused rows of each append."""
    try:
        return from_text(cursor["pending"])
    except (AttributeError, TypeError, ValueError) as error:
        raise ResumeError(f"the state is damaged ({error}): {cursor!r:.200}") from None


def _first_needed(cursor: Cursor) -> int:
    """First append that is still needed."""
    return min([int(cursor["next"]), *_pending(cursor)])


def _fingerprint(table: RolloutTable) -> str:
    """Hash of everything that batches are made of."""
    digest = xxhash.xxh3_128()
    for name in ("prompt_ids", "response_ids", "loss_mask", "token_rewards", "logprobs", "ref_logprobs", "values"):
        column: Ragged | None = getattr(table, name)
        digest.update(f"{name} {None if column is None else column.values.dtype}".encode())
        if column is not None:
            digest.update((column.offsets - column.offsets[0]).data)
            digest.update(np.ascontiguousarray(column.flat).data)
    for numbers in (table.rewards, table.versions):
        digest.update(np.ascontiguousarray(numbers).data)
    digest.update(repr(table.groups.tolist()).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
