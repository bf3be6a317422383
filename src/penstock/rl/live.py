"""Where inference engines put rollouts while the trainer reads: here in memory; `queueing` has the directory.

buffer = LiveBuffer(capacity=4096)                    # threads of this process
queue = RolloutQueue("rollouts/")                     # any process, on any machine that sees the directory
queue.append(rollouts)                                # in the inference engine
loader = RolloutDataLoader(RolloutQueue("rollouts/"), rollout_batch_size=512, ...)    # in the trainer
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError, ResumeError, StalledError
from penstock.rl.column_aliases import meaning_of
from penstock.rl.read.columns import as_objects, is_listed, take_in
from penstock.rl.read.rollouts import read_rollouts
from penstock.rl.rollout import Rollout
from penstock.rl.sources import Entries
from penstock.rl.table import RolloutTable

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

__all__ = [
    "LiveBuffer",
    "check_alike",
    "check_group_rule",
    "columns_of",
    "is_single",
    "listed",
    "read_entry",
    "rows_without_id",
    "with_ids",
]

_OPTIONAL = ("token_rewards", "logprobs", "ref_logprobs", "values")


class LiveBuffer:
    """Rollouts in memory, appended by threads and taken by one loader, in the order in which they came.

    `capacity` is how many rollouts may wait to be taken. An append that finds so many waits until there is room, up to
    `timeout_seconds`, or with `on_full="raise"` raises at once. One that the loader is waiting for is always let in.
    The loader waits as long for rollouts, and then raises StalledError; `close()` says that no more will come.

    What is in it dies with the process: a loader over it can be saved only when everything that was appended has been
    used. For all else there is `RolloutQueue`. On several ranks, each has a buffer of its own and all are given the
    same rollouts in the same order, which `replicated=True` promises.
    """

    def __init__(
        self,
        *,
        capacity: int | None = None,
        on_full: Literal["wait", "raise"] = "wait",
        timeout_seconds: float | None = 600.0,
        tokenizer: Tokenizer | None = None,
        columns: Mapping[str, Any] | None = None,
        replicated: bool = False,
        group_prompts: Literal["equal", "any"] = "equal",
    ) -> None:
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
            raise ConfigError(f"capacity must be a whole number of rollouts from 1 on, or None, got {capacity!r}")
        if on_full not in ("wait", "raise"):
            raise ConfigError(f"on_full is 'wait' or 'raise', got {on_full!r}")
        if timeout_seconds is not None and not timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds must be positive, or None, got {timeout_seconds!r}")
        check_group_rule(group_prompts)
        self.capacity, self.on_full, self.timeout_seconds = capacity, on_full, timeout_seconds
        self.tokenizer, self.columns, self.replicated = tokenizer, columns, replicated
        self.group_prompts: Literal["equal", "any"] = group_prompts
        self._tables: dict[int, RolloutTable] = {}
        self._first = self._next = 0
        self._append_of: dict[Any, int] = {}
        """The append of each rollout that is held, by its id."""
        self._columns: list[str] | None = None
        """Those of the first append, which all others have to have."""
        self._read = 0
        """The entries before this one were asked for."""
        self._closed = False
        self._changed = threading.Condition()

    def append(self, rollouts: Any) -> None:
        """One rollout, or several; all of them, or none if something is wrong with one.

        A dict whose values are those of one rollout is one; a dict of columns is several. Rollouts without an id are
        called by their append and their row in it, `"17:0"`. The id of a rollout that waits here already is refused.
        """
        rollouts = listed(rollouts)
        table = read_entry(rollouts, self.tokenizer, self.columns, group_prompts=self.group_prompts)
        unnamed = rows_without_id(rollouts, table, self.columns)
        until = None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds
        with self._changed:
            while not self._closed and not self._has_room():
                if self.on_full == "raise":
                    raise StalledError(
                        f"{len(self)} rollouts wait in a buffer of capacity {self.capacity}; append fewer, or later"
                    )
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise StalledError(
                        f"waited {self.timeout_seconds:g} s for room in the buffer: {len(self)} rollouts wait, and its "
                        f"capacity is {self.capacity}; is the trainer still reading?"
                    )
                self._changed.wait(left)
            if self._closed:
                raise ConfigError("the buffer is closed: it was said that no more rollouts would come")
            if self._columns is None:
                self._columns = columns_of(table)
            check_alike(self._columns, table)
            table = with_ids(table, unnamed, self._next)
            self._check_new(table)
            self._tables[self._next] = table
            self._next += 1
            self._changed.notify_all()

    def _check_new(self, table: RolloutTable) -> None:
        """Raises if a rollout that waits has the id of one in the table."""
        for name in table.ids.tolist():
            number = self._append_of.get(name)
            if number is not None and number >= self._read:
                raise DataError(
                    f"id {name!r} is that of a rollout of append {number}, which is not used yet, and an id names one "
                    "rollout; append each rollout once"
                )
        self._append_of.update(dict.fromkeys(table.ids.tolist(), self._next))

    def close(self) -> None:
        """No more rollouts will come; those that are there are still used. A second call does nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __len__(self) -> int:
        """Rollouts that wait to be taken."""
        return sum(len(table) for number, table in list(self._tables.items()) if number >= self._read)

    def __bool__(self) -> bool:
        return True  # and not the length

    def __repr__(self) -> str:
        return f"LiveBuffer({len(self)} rollouts)"

    def entries(self, rank: Rank, tokenizer: Tokenizer | None) -> Entries:
        """For a loader."""
        if rank.world_size > 1 and not self.replicated:
            raise ConfigError(
                f"a LiveBuffer is seen by its own process alone, and this is {rank}; use a RolloutQueue, which all "
                "ranks read, or LiveBuffer(replicated=True) if every rank is given the same rollouts"
            )
        self.tokenizer = self.tokenizer or tokenizer
        return _BufferEntries(self)

    def _has_room(self) -> bool:
        # While the loader waits, it has read all there is: so an append that it waits for always finds room.
        return self.capacity is None or len(self) < self.capacity

    # What the loader does

    def _get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        until = None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds
        with self._changed:
            if number < self._next and number not in self._tables:
                raise ResumeError(
                    f"the rollouts of append {number} were used and are gone; a LiveBuffer keeps nothing, use a "
                    "RolloutQueue to go back"
                )
            while number not in self._tables and not self._closed:
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise StalledError(f"waited {self.timeout_seconds:g} s for {missing()}; is anybody appending?")
                self._changed.wait(left)
            self._read = max(self._read, number + 1)
            self._changed.notify_all()
            return self._tables.get(number)

    def _release(self, number: int, needed: Set[int]) -> None:
        with self._changed:
            for old in [held for held in self._tables if held < number and held not in needed]:
                for name in self._tables.pop(old).ids.tolist():
                    if self._append_of.get(name) == old:
                        del self._append_of[name]
            self._first = max(self._first, min([number, *needed]))
            self._changed.notify_all()


class _BufferEntries:
    """The entries of a buffer."""

    name = "a LiveBuffer"

    def __init__(self, buffer: LiveBuffer) -> None:
        self._buffer = buffer

    def first(self) -> int:
        return self._buffer._first

    def get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        return self._buffer._get(number, missing)

    def release(self, number: int, needed: Set[int]) -> None:
        self._buffer._release(number, needed)

    def facts(self) -> dict[str, Any]:
        return {"kind": "LiveBuffer"}

    def check_saved(self, unused: bool) -> None:
        if unused or len(self._buffer):
            raise ConfigError(
                "rollouts in a LiveBuffer that were not trained on would be lost with the process; save when all that "
                "was appended is used, behind the last minibatch of a rollout batch, or use a RolloutQueue, of which "
                "a state can be taken at any time"
            )

    def restore(self, first: int) -> bool:
        return False

    def commit(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass  # the buffer belongs to whoever made it


def read_entry(
    rollouts: Any,
    tokenizer: Tokenizer | None,
    columns: Mapping[str, Any] | None,
    *,
    group_prompts: Literal["equal", "any"] = "equal",
) -> RolloutTable:
    """What was appended at once, as a table. Whether it is trained on, others decide."""
    return read_rollouts(
        [rollouts] if is_single(rollouts) else rollouts,
        tokenizer=tokenizer,
        columns=columns,
        missing_rewards="keep",
        empty_responses="keep",
        all_masked="keep",
        group_prompts=group_prompts,
    )


def listed(rollouts: Any) -> Any:
    """What may be looked at twice."""
    return rollouts if hasattr(rollouts, "__len__") or not isinstance(rollouts, Iterable) else list(rollouts)


def check_group_rule(group_prompts: str) -> None:
    if group_prompts not in ("equal", "any"):
        raise ConfigError(f"group_prompts is 'equal' or 'any', got {group_prompts!r}")


def rows_without_id(rollouts: Any, table: RolloutTable, columns: Mapping[str, Any] | None) -> npt.NDArray[np.bool_]:
    """Which rollouts were given without an id, and so are called by their row."""
    by_row = np.array([name.lstrip("~") == str(row) for row, name in enumerate(table.ids.tolist())], np.bool_)
    if table is rollouts or not by_row.any():
        return np.zeros(len(table), np.bool_)
    intake = take_in([rollouts] if is_single(rollouts) else rollouts)
    held = {name: is_listed(column) for name, column in intake.columns.items()}
    name = meaning_of(list(intake.columns), columns, held).fields.get("id")
    if name is None:
        return by_row
    return np.array([cell is None for cell in as_objects(intake.columns[name])], np.bool_)


def with_ids(table: RolloutTable, unnamed: npt.NDArray[np.bool_], number: int) -> RolloutTable:
    """The table, its rollouts without an id called by the append and their row in it."""
    if not unnamed.any():
        return table
    ids = table.ids.copy()
    for row in np.flatnonzero(unnamed).tolist():
        ids[row] = f"{number}:{row}"
    return replace(table, ids=ids)


def is_single(rollouts: Any) -> bool:
    """Whether it is one rollout: a dict of columns has text or lists in the lists it holds, and no text beside them."""
    if not isinstance(rollouts, Mapping):
        return isinstance(rollouts, Rollout)
    values = list(rollouts.values())
    return any(isinstance(value, str) for value in values) or not any(map(_has_rows, values))


def _has_rows(value: Any) -> bool:
    if hasattr(value, "ndim"):
        return bool(value.ndim > 1 or (value.ndim and getattr(value.dtype, "kind", "") in ("O", "U", "S")))
    if isinstance(value, Sequence):
        return any(isinstance(cell, str | Sequence) or getattr(cell, "ndim", 0) for cell in value[:1])
    return not isinstance(value, Mapping) and hasattr(value, "__len__")  # a column of Arrow


def columns_of(table: RolloutTable) -> list[str]:
    """Which of the columns that rollouts may go without it has."""
    return [name for name in _OPTIONAL if getattr(table, name) is not None]


def check_alike(columns: Collection[str], table: RolloutTable) -> None:
    """Raises if the table has other columns than those before it: they could not be in one batch."""
    for name in _OPTIONAL:
        if (name in columns) != (getattr(table, name) is not None):
            with_it, without = ("earlier", "these") if name in columns else ("these", "earlier")
            raise DataError(
                f"{with_it} rollouts have {name}, {without} have not; give it for all rollouts of a run, or for none"
            )
