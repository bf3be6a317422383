"""Live buffer: rollouts in memory that inference engines append while the trainer reads. `queue` is the durable form.

buffer = LiveBuffer(capacity=4096)                    # threads of this process
queue = RolloutQueue("rollouts/")                     # any process, on any machine that sees the directory
queue.append(rollouts)                                # in the inference engine
loader = RolloutDataLoader(RolloutQueue("rollouts/"), rollout_batch_size=512, ...)    # in the trainer
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError, DataError, ResumeError, StalledError
from penstock.metrics.targets import Metrics, MetricsConfig
from penstock.metrics.watch import MetricsWatch
from penstock.pipeline.prefetch import IteratorThread
from penstock.rl.read.columns import as_objects, read_columns
from penstock.rl.read.engines import engine_rollouts
from penstock.rl.read.rollouts import column_fields, read_rollouts
from penstock.rl.read.text import TextRule
from penstock.rl.rollout import PER_TOKEN, Rollout, RolloutTable
from penstock.rl.selection import is_unnamed
from penstock.rl.sources import Appends

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

GroupPrompts = Literal["equal", "any"]


class LiveBuffer:
    """Rollouts in memory, appended by threads and taken by one loader, in the order of the appends.

    `capacity` is the number of rollouts that may wait. An append to a full buffer waits for room, up to
    `timeout_seconds`, or raises at once with `on_full="raise"`. An append that the loader waits for is always admitted.
    The loader waits as long for rollouts, and then raises StalledError. `close()` ends the source.

    Its rollouts are lost with the process, so its loader can only be saved once everything appended has been used; use
    a `RolloutQueue` otherwise. With several ranks, each has its own buffer, and `replicated=True` promises that all are
    given the same rollouts in the same order. `template`, `add_bos` and `add_eos` are for rollouts of text, as of
    `RolloutDataLoader`. `metrics` is where the buffer's metrics go; a loader with metrics has them too.
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
        group_prompts: GroupPrompts = "equal",
        template: str | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
        metrics: Metrics = None,
    ) -> None:
        if capacity is not None and (isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1):
            raise ConfigError(f"capacity must be a whole number of at least 1, or None, got {capacity!r}")
        if on_full not in ("wait", "raise"):
            raise ConfigError(f"on_full must be 'wait' or 'raise', got {on_full!r}")
        self.capacity, self.on_full, self.replicated = capacity, on_full, replicated
        self.timeout_seconds = check_timeout(timeout_seconds)
        text_rule = TextRule(chat_template=template, add_bos=add_bos, add_eos=add_eos)
        self.reader = AppendReader(tokenizer, columns, group_prompts, text_rule)
        self._tables: dict[int, RolloutTable] = {}
        self._first = self._next = 0
        self._append_of: dict[Any, int] = {}
        """Append of each rollout in the buffer, by id."""
        self._columns: list[str] | None = None
        """Per-token columns of the first append, which all others must have."""
        self._read = 0
        """Next append that the loader has not read."""
        self._closed = False
        self._changed = threading.Condition()
        self._appended = 0
        """Rollouts of all appends."""
        self._metrics = None if metrics is None else MetricsConfig.of(metrics)
        self._watch: MetricsWatch | None = None

    def append(self, rollouts: Any) -> None:
        """Append one rollout or several: all of them, or none if one is invalid.

        A dict with the values of one rollout is one; a dict of columns is several. A rollout without an id is named by
        its append and row, `"17:0"`. The id of a rollout that is waiting in the buffer is refused.
        """
        table, unnamed = self.reader.read(rollouts)
        deadline = self._deadline()
        with self._changed:
            while not self._closed and not self._has_room():
                if self.on_full == "raise":
                    raise StalledError(
                        f"{len(self)} rollouts wait in a buffer of capacity {self.capacity}; append fewer, or later"
                    )
                self._wait(
                    deadline,
                    lambda: (
                        f"room in the buffer: {len(self)} rollouts wait, and its capacity is {self.capacity}; check "
                        "that the trainer is reading"
                    ),
                )
            if self._closed:
                raise ConfigError("the buffer is closed, so nothing can be appended")
            if self._columns is None:
                self._columns = table.per_token
            check_same_columns(self._columns, table)
            table = with_ids(table, unnamed, self._next)
            self._check_new_ids(table)
            self._tables[self._next] = table
            self._next += 1
            self._appended += len(table)
            self._changed.notify_all()
            if self._metrics is not None and self._watch is None:
                here = weakref.ref(self)
                self._watch = self._metrics.watch(
                    "rollouts", "LiveBuffer", lambda: None if (buffer := here()) is None else buffer.metrics()
                )

    def metrics(self) -> dict[str, float]:
        """Metrics of the buffer under the names that exporters use."""
        capacity = {} if self.capacity is None else {"penstock_rollouts_capacity": self.capacity}
        return {
            "penstock_rollouts_waiting": len(self),
            "penstock_rollouts_appends_total": self._next,
            "penstock_rollouts_appended_total": self._appended,
            **capacity,
        }

    def close(self) -> None:
        """End the source; rollouts in the buffer are still used. A second call does nothing."""
        self._end(None)

    def appends(self, rank: Rank, tokenizer: Tokenizer | None) -> Appends:
        """Appends for a loader."""
        if rank.world_size > 1 and not self.replicated:
            raise ConfigError(
                f"a LiveBuffer is only seen by its own process, and this is {rank}; use a RolloutQueue, which all "
                "ranks read, or LiveBuffer(replicated=True) if every rank is given the same rollouts"
            )
        self.reader.tokenizer = self.reader.tokenizer or tokenizer
        return _BufferAppends(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._watch is not None:
            self._watch.end(error=error)

    def __len__(self) -> int:
        """Rollouts that wait to be read."""
        return sum(len(table) for number, table in list(self._tables.items()) if number >= self._read)

    def __bool__(self) -> bool:
        return True  # independent of the length

    def __repr__(self) -> str:
        return f"LiveBuffer({len(self)} rollouts)"

    def _check_new_ids(self, table: RolloutTable) -> None:
        """Refuse ids of rollouts that are waiting."""
        for name in table.ids.tolist():
            number = self._append_of.get(name)
            if number is not None and number >= self._read:
                raise DataError(
                    f"id {name!r} is that of an unused rollout of append {number}, and ids must be unique; append each "
                    "rollout once"
                )
        self._append_of.update(dict.fromkeys(table.ids.tolist(), self._next))

    def _has_room(self) -> bool:
        # While the loader waits it has read everything, so the append that it waits for always finds room.
        return self.capacity is None or len(self) < self.capacity

    def _deadline(self) -> float | None:
        return None if self.timeout_seconds is None else time.monotonic() + self.timeout_seconds

    def _wait(self, deadline: float | None, missing: Callable[[], str]) -> None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise StalledError(f"waited {self.timeout_seconds:g} s for {missing()}")
        self._changed.wait(left)

    def _get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        deadline = self._deadline()
        with self._changed:
            if number < self._next and number not in self._tables:
                raise ResumeError(
                    f"the rollouts of append {number} were used and deleted; use a RolloutQueue to be able to go back"
                )
            while number not in self._tables and not self._closed:
                self._wait(deadline, lambda: f"{missing()}; check that an inference engine is appending")
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


class _BufferAppends:
    """Appends of a buffer."""

    name = "a LiveBuffer"

    def __init__(self, buffer: LiveBuffer) -> None:
        self._buffer = buffer
        self.get, self.release = buffer._get, buffer._release

    def first(self) -> int:
        return self._buffer._first

    def facts(self) -> dict[str, Any]:
        return {"kind": "LiveBuffer"}

    def check_saved(self, unused: bool) -> None:
        if unused or len(self._buffer):
            raise ConfigError(
                "unused rollouts of a LiveBuffer would be lost with the process; save after the last minibatch of a "
                "rollout batch, once everything appended has been used, or use a RolloutQueue, whose state can be "
                "taken at any time"
            )

    def restore(self, first: int) -> bool:
        return False

    def commit(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass  # the buffer belongs to its creator


class IteratorAppends:
    """Appends of an iterator, as it makes them, or of a function that makes one.

    An item is a rollout, or several that belong together. Rollouts that follow each other and name the same group, or
    with `by_prompt` none and have equal prompts, are one append. It is complete when another one follows; with
    `joined=False` every item is an append. A function can be resumed: its iterator passes over the appends before.
    """

    name = "an iterator of rollouts"

    def __init__(
        self, items: Iterator[Any] | Callable[[], Iterable[Any]], reader: AppendReader, *, by_prompt: bool, joined: bool
    ) -> None:
        self._reader, self._by_prompt, self._joined = reader, by_prompt, joined
        self._repeatable = callable(items)
        self._make: Callable[[], Iterator[Any]] = lambda: iter(items()) if callable(items) else items
        self._begin()

    def _begin(self) -> None:
        self._items: IteratorThread[Any] = IteratorThread(self._make, owned=self._repeatable)
        self._ahead: list[tuple[Any, _ReadAppend]] = []
        """Item that was taken and begins the next append."""
        self._tables: dict[int, RolloutTable] = {}
        self._next = 0

    def first(self) -> int:
        return 0

    def get(self, number: int, missing: Callable[[], str]) -> RolloutTable | None:
        while self._next <= number:
            found = self._append()
            if found is None:
                return None
            self._tables[self._next] = with_ids(*found, self._next)
            self._next += 1
        if number not in self._tables:
            if not self._repeatable:
                raise ResumeError(
                    f"the rollouts of append {number} were used, and an iterator cannot go back; pass a function that "
                    "makes it"
                )
            self.restore(number)
            return self.get(number, missing)
        return self._tables[number]

    def release(self, number: int, needed: Set[int]) -> None:
        for old in [held for held in self._tables if held < number and held not in needed]:
            del self._tables[old]

    def facts(self) -> dict[str, Any]:
        return {"kind": "iterator"}

    def check_saved(self, unused: bool) -> None:
        if not self._repeatable and (unused or self._ahead):
            raise ConfigError(
                "unused rollouts of an iterator would be lost with the process; pass a function that makes the "
                "iterator, which is then read again up to the state, or use a RolloutQueue"
            )

    def restore(self, first: int) -> bool:
        if not self._repeatable:
            return False
        if self._next > first:
            self.close()
            self._begin()
        while self._next < first:
            if self._append() is None:
                raise ResumeError(f"the state was saved after append {first}, the iterator ended after {self._next}")
            self._next += 1
        return True

    def commit(self, number: int) -> None:
        pass

    def close(self) -> None:
        self._items.close()

    def _append(self) -> _ReadAppend | None:
        """Rollouts of the next append."""
        taken = self._ahead.pop() if self._ahead else self._take()
        if taken is None:
            return None
        item, read = taken
        key = self._key(read[0])
        run = [item]
        while key is not None and (taken := self._take()) is not None:
            if self._key(taken[1][0]) != key:
                self._ahead.append(taken)
                break
            run.append(taken[0])
        return read if len(run) == 1 else self._reader.read(run)

    def _take(self) -> tuple[Any, _ReadAppend] | None:
        taken = self._items.take(1)
        return (taken[0], self._reader.read(taken[0])) if taken else None

    def _key(self, table: RolloutTable) -> Any:
        """Group of a single rollout; None if it is an append by itself."""
        if not self._joined or len(table) != 1:
            return None
        if not is_unnamed(table.groups[0]):
            return ("group", table.groups[0])
        return ("prompt", tuple(table.prompt_ids.values.tolist())) if self._by_prompt else None


_ReadAppend = tuple[RolloutTable, npt.NDArray[np.bool_]]
"""Rollouts of an append, and the rows without an id."""


class AppendReader:
    """Reader of appended rollouts."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        columns: Mapping[str, Any] | None,
        group_prompts: GroupPrompts,
        text: TextRule,
    ) -> None:
        if group_prompts not in ("equal", "any"):
            raise ConfigError(f"group_prompts must be 'equal' or 'any', got {group_prompts!r}")
        self.tokenizer, self.columns, self.text = tokenizer, columns, text
        self.group_prompts: GroupPrompts = group_prompts

    def read(self, rollouts: Any) -> tuple[RolloutTable, npt.NDArray[np.bool_]]:
        """Table of one append, and the rows without an id. The loader selects what is trained on."""
        if self.columns is None and (outputs := engine_rollouts(rollouts)) is not None:
            rollouts = outputs
        elif _is_single(rollouts):
            rollouts = [rollouts]
        elif isinstance(rollouts, Iterable) and not hasattr(rollouts, "__len__"):
            rollouts = list(rollouts)  # read twice
        table = read_rollouts(
            rollouts,
            tokenizer=self.tokenizer,
            columns=self.columns,
            missing_rewards="keep",
            empty_responses="keep",
            all_masked="keep",
            group_prompts=self.group_prompts,
            text=self.text,
        )
        return table, self._rows_without_id(rollouts, table)

    def _rows_without_id(self, rollouts: Any, table: RolloutTable) -> npt.NDArray[np.bool_]:
        by_row = np.array([name.lstrip("~") == str(row) for row, name in enumerate(table.ids.tolist())], np.bool_)
        if table is rollouts or not by_row.any():
            return np.zeros(len(table), np.bool_)
        given = read_columns(rollouts, engines=self.columns is None)
        name = column_fields(given, self.columns).fields.get("id")
        if name is None:
            return by_row
        return np.array([cell is None for cell in as_objects(given.columns[name])], np.bool_)


def with_ids(table: RolloutTable, unnamed: npt.NDArray[np.bool_], number: int) -> RolloutTable:
    """Table whose rollouts without an id are named by the append and their row."""
    if not unnamed.any():
        return table
    ids = table.ids.copy()
    for row in np.flatnonzero(unnamed).tolist():
        ids[row] = f"{number}:{row}"
    return replace(table, ids=ids)


def check_same_columns(columns: Collection[str], table: RolloutTable) -> None:
    """Refuse a table whose per-token columns differ from those of earlier appends: a batch could not hold both."""
    for name in PER_TOKEN:
        if (name in columns) != (getattr(table, name) is not None):
            with_it, without = ("earlier", "these") if name in columns else ("these", "earlier")
            raise DataError(
                f"{with_it} rollouts have {name}, {without} do not; give it for all rollouts of a run, or for none"
            )


def check_timeout(seconds: float | None) -> float | None:
    if seconds is not None and not seconds > 0:
        raise ConfigError(f"timeout_seconds must be positive, or None, got {seconds!r}")
    return seconds


def _is_single(rollouts: Any) -> bool:
    """True for one rollout. A dict of columns holds lists of texts or of lists, and no text itself."""
    if not isinstance(rollouts, Mapping):
        return isinstance(rollouts, Rollout)
    values = list(rollouts.values())
    return any(isinstance(value, str) for value in values) or not any(map(_has_rows, values))


def _has_rows(value: Any) -> bool:
    if hasattr(value, "ndim"):
        return bool(value.ndim > 1 or (value.ndim and getattr(value.dtype, "kind", "") in ("O", "U", "S")))
    if isinstance(value, Sequence):
        return any(isinstance(cell, str | Sequence) or getattr(cell, "ndim", 0) for cell in value[:1])
    return not isinstance(value, Mapping) and hasattr(value, "__len__")  # an Arrow column
