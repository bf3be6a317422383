"""Which samples make up step s: the orders of all sources, how they are mixed, and what was changed on the way.

    plan = Plan([PlanSource("web", order)], global_batch=256)
    plan.step(1000).rows        # what step 1000 is made of
    plan.trace("web", 4711)     # the steps that use row 4711, past and future

A plan is a value. Nothing in it knows about ranks, threads or time. An edit (`skip`, `ban`, `reweight`) makes a new
plan that is the old one up to the step it begins with, and loses and repeats nothing after it.

One source and several go through their samples in different ways, `alone` and `together`; what is the same for both,
epochs and edits, is here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import index
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError
from penstock.order.edits import Ban, Edit, Reweight, Skip
from penstock.order.mixed import STOPPING, MixedSteps, next_epoch
from penstock.order.mixing import Mixture
from penstock.order.positions import PlanSource, Position, RowUse, Step, ended, nothing_to_deliver
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule
from penstock.order.single import SingleSourceSteps

__all__ = ["Plan", "PlanSource", "Position", "RowUse", "Step"]

Ints = npt.NDArray[np.int64]
_VERSION = 1


class StepSequence(Protocol):
    """How the samples of steps follow one another, before anything is edited."""

    def start(self) -> Position: ...

    def read(self, position: Position, count: int) -> tuple[tuple[Samples, Ints] | None, Position]:
        """The next samples and the source of each part, and the position behind them; None at the end of an epoch."""
        ...

    def is_over(self, position: Position, count: int) -> bool:
        """Whether there is no batch of so many samples left in the epoch of a position."""
        ...

    def leave(self, position: Position) -> Position:
        """Past what is left of an epoch and fills no batch."""
        ...

    def steps_in(self, epoch: int) -> int: ...

    def seek(self, number: int) -> Position:
        """The position in front of a step."""
        ...

    def jump(self, position: Position, stop: int) -> Position | None:
        """The same from a position on, where that is quicker than reading; None where it is not."""
        ...

    def find(self, which: int, epoch: int, sample: int) -> tuple[int, int] | None:
        """The step that uses a sample of a source, and which of its samples it is; None if it is in no batch."""
        ...


@dataclass(frozen=True)
class Plan:
    """The order of everything, step by step. See the module's text."""

    feeds: tuple[PlanSource, ...]
    global_batch: int
    schedule: Schedule | None = None
    """Weights of the sources; None for a single source, whose epochs then end batches."""
    drop_last: bool = False
    stopping: str = "first_exhausted"
    edits: tuple[Edit, ...] = ()

    def __post_init__(self) -> None:
        if not self.feeds:
            raise ConfigError("a plan needs at least one source")
        if self.global_batch < 1:
            raise ConfigError(f"a batch holds at least one sample, got {self.global_batch}")
        if self.stopping not in STOPPING:
            hint = did_you_mean(self.stopping, STOPPING)
            raise ConfigError(f"stopping_strategy must be one of {', '.join(STOPPING)}, got {self.stopping!r}{hint}")
        if self.schedule is None and len(self.feeds) > 1:
            raise ConfigError(f"{len(self.feeds)} sources need weights")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"the names of sources must differ, got {list(self.names)}")
        for feed in self.feeds:
            self._check_not_empty(feed)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(feed.name for feed in self.feeds)

    @cached_property
    def _unlimited(self) -> bool:
        return any(feed.max_epochs is None for feed in self.feeds)

    @property
    def counts_steps(self) -> bool:
        """Whether anything in it is said in steps, which are other steps if batches have another size."""
        changes = self.schedule is not None and any(len(part.points) > 1 for part in self.schedule.parts)
        return bool(self.edits) or changes

    @property
    def version(self) -> int:
        """How many edits were made."""
        return len(self.edits)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that name the plan without its edits."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS))

    def describe(self) -> dict[str, Any]:
        """Everything that decides what the steps hold, but the edits and the size of a batch."""
        return {
            "version": _VERSION,
            "sources": [
                {
                    "name": feed.name,
                    "rows": feed.identity,
                    "shuffle": feed.order.shuffle,
                    "seed": feed.order.seed,
                    "order": feed.order.describe(),
                    "max_epochs": feed.max_epochs,
                }
                for feed in self.feeds
            ],
            "weights": None if self.schedule is None else self.schedule.to_dict(),
            "stopping": None if self.schedule is None else self.stopping,
            "drop_last": self.drop_last,
        }

    # Reading

    def start(self) -> Position:
        return self._way.start()

    def read(self, position: Position, count: int | None = None) -> tuple[Step | None, Position]:
        """The step at a position, and the position behind it. None at the end of an epoch; ask again for the next one.

        `count` is the number of samples, by default a global batch. Steps that are skipped are passed over.
        """
        return self._read(self._past_skipped(position), count or self.global_batch)

    def read_some(self, position: Position, most: int) -> list[tuple[Step, Position]]:
        """Up to `most` steps of one epoch from a settled position on, each with the settled position behind it.

        Nothing at the end of an epoch. The same as `read` and `settle` step by step, for less.
        """
        way, size = self._way, self.global_batch
        if isinstance(way, SingleSourceSteps) and not self.edits and self._unlimited and most > 1:
            names, epoch = self.names, position.epoch
            found = [
                (Step(moved.step - 1, epoch, samples, np.zeros(len(samples.rows), np.int64), names, size), moved)
                for samples, moved in way.read_block(position, most)
            ]
            if found:
                # Only behind the last of them an epoch can end.
                found[-1] = found[-1][0], self.settle(found[-1][1])[0]
                return found
        step, behind = self.read(position)
        return [] if step is None else [(step, self.settle(behind)[0])]

    def settle(self, position: Position, count: int | None = None) -> tuple[Position, bool]:
        """The position in front of the next step that is delivered, and whether that is in another epoch.

        `count` is the number of samples that the next step is asked for, by default a global batch.
        """
        crossed = False
        while True:
            position, over = self._crossed(self._past_skipped(position), count)
            crossed = crossed or over
            if not over or self.ended(position) or not self.skipped(position.step):
                return position, crossed

    def ended(self, position: Position) -> bool:
        """Whether nothing comes any more, in any epoch: every source was used as often as it may be."""
        return not self._unlimited and ended(self.feeds, position)

    def step(self, number: int) -> Step:
        """What step `number` is made of, counted from the beginning of the first epoch."""
        position = self.seek(number)
        step, _ = self._read(position, self.global_batch)
        if step is None:
            raise IndexError(f"the plan has {position.step} steps, so there is no step {number}")
        return step

    def seek(self, number: int) -> Position:
        """The position in front of a step. Arithmetic for one source, if the number of its samples is; see `counts`."""
        if number < 0:
            raise IndexError(f"steps are counted from 0, got {number}")
        return self._crossed(self._way.seek(number))[0]

    def seek_epoch(self, epoch: int) -> Position:
        """The position in front of an epoch."""
        return self.seek(sum(self.steps_in(earlier) for earlier in range(epoch)))

    def steps_in(self, epoch: int) -> int:
        """Steps of an epoch, skipped ones included."""
        return self._way.steps_in(epoch)

    def delivered_in(self, epoch: int) -> int:
        """Steps of an epoch that are delivered."""
        steps = self.steps_in(epoch)
        if not any(isinstance(edit, Skip) for edit in self.edits):
            return steps
        first = sum(self.steps_in(earlier) for earlier in range(epoch))
        return sum(not self.skipped(number) for number in range(first, first + steps))

    def next_epoch(self, position: Position) -> Position:
        """Behind the end of an epoch, the beginning of the next."""
        return next_epoch(position)

    def trace(self, source: str | int, row: int | None = None, *, epochs: int = 1) -> list[RowUse]:
        """Every use of a row in the first `epochs` passes over its source, in order.

        `trace("web", 4711)`, or `trace(4711)` if there is a single source.
        """
        if row is None:
            if len(self.feeds) > 1 or isinstance(source, str):
                raise ConfigError(f"say which row of which source: trace({self.names[0]!r}, 4711)")
            return self.trace(self.names[0], source, epochs=epochs)
        source = str(source)
        which = self._index(source)
        order = self.feeds[which].order
        if not 0 <= row < order.table.rows:
            raise IndexError(f"row {row} of {source!r}, which has {order.table.rows} rows")
        uses: list[RowUse] = []
        most = self.feeds[which].max_epochs
        for epoch in range(epochs if most is None else min(epochs, most)):
            for sample in order.find(epoch, row):
                found = self._way.find(which, epoch, sample)
                if found is not None:
                    number, slot = found
                    uses.append(RowUse(number, epoch, slot, skipped=self._is_withheld(number, source, row)))
        return uses

    # Edits

    def skip(self, start: int, stop: int) -> Plan:
        """Never deliver the steps `start` to `stop` (not included). The others keep their numbers and their rows."""
        return self.edited(Skip(start, stop))

    def ban(self, rows: Mapping[str, Iterable[int]] | Iterable[int], *, step: int = 0) -> Plan:
        """Leave out some rows from `step` on. All others stay where they are; a sample left empty is a blank."""
        if not isinstance(rows, Mapping):
            if len(self.feeds) > 1:
                raise ConfigError(
                    f"say of which source: ban({{'{self.names[0]}': [...]}}); there are {list(self.names)}"
                )
            rows = {self.names[0]: rows}
        plan = self
        for name, numbers in rows.items():
            size = self.feeds[self._index(name)].order.table.rows
            banned = tuple(sorted(_row_numbers(numbers)))
            if banned and not (banned[0] >= 0 and banned[-1] < size):
                raise ConfigError(f"rows {banned[0]} to {banned[-1]} of {name!r}, which has {size} rows")
            plan = plan.edited(Ban(step, name, banned))
        return plan

    def reweight(self, step: int, weights: Mapping[str, float]) -> Plan:
        """Mix by other weights from `step` on. Every source goes on where it is."""
        if self.schedule is None:
            raise ConfigError("there is nothing to weigh: this plan has a single source without weights")
        return self.edited(Reweight(step, dict(weights)))

    def edited(self, *edits: Edit) -> Plan:
        """The plan with some edits more."""
        schedule = self.schedule
        for edit in edits:
            if isinstance(edit, Reweight) and schedule is not None:
                schedule = schedule.with_change(edit.step, edit.weights)
                Mixture(self.names, schedule, self.global_batch)
            if isinstance(edit, Ban):
                self._index(edit.source)
        return replace(self, edits=(*self.edits, *edits))

    def skipped(self, number: int) -> bool:
        """Whether a step is not delivered."""
        return any(isinstance(edit, Skip) and edit.start <= number < edit.stop for edit in self.edits)

    # Behind the scenes

    @cached_property
    def _way(self) -> StepSequence:
        schedule = self.schedule
        if schedule is None:
            return SingleSourceSteps(self.feeds[0], self.global_batch, drop_last=self.drop_last)
        for edit in self.edits:
            if isinstance(edit, Reweight):
                schedule = schedule.with_change(edit.step, edit.weights)
        mixture = Mixture(self.names, schedule, self.global_batch)
        return MixedSteps(self.feeds, mixture, drop_last=self.drop_last, stopping=self.stopping)

    def _read(self, position: Position, count: int) -> tuple[Step | None, Position]:
        """As `read`, but of skipped steps too."""
        if self.ended(position):
            return None, position
        found, behind = self._way.read(position, count)
        if found is None:
            return None, behind
        samples, sources = found
        return self._step(position.step, position.epoch, samples, sources, count), behind

    def _step(self, number: int, epoch: int, samples: Samples, sources: Ints, wanted: int) -> Step:
        for edit in self.edits:
            if isinstance(edit, Ban) and edit.step <= number:
                which = self._index(edit.source)
                gone = (sources == which) & np.isin(samples.rows, np.asarray(edit.rows, np.int64))
                if gone.any():
                    samples, sources = samples.where(~gone), sources[~gone]
        return Step(number, epoch, samples, sources, self.names, wanted)

    def _crossed(self, position: Position, count: int | None = None) -> tuple[Position, bool]:
        """In the next epoch, if there is nothing left of this one; and whether that is so."""
        if not self.ended(position) and not self._way.is_over(position, count or self.global_batch):
            return position, False
        return next_epoch(self._way.leave(position)), True

    def _past_skipped(self, position: Position) -> Position:
        while self.skipped(position.step):
            skips = (edit for edit in self.edits if isinstance(edit, Skip))
            stop = max(edit.stop for edit in skips if edit.start <= position.step < edit.stop)
            behind = self._way.jump(position, stop)
            if behind is None:
                step, behind = self._read(position, self.global_batch)
                if step is None:
                    return position
            position = behind
        return position

    def _is_withheld(self, number: int, source: str, row: int) -> bool:
        banned = (
            isinstance(edit, Ban) and edit.source == source and edit.step <= number and row in edit.rows
            for edit in self.edits
        )
        return self.skipped(number) or any(banned)

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise ConfigError(
                f"no source is called {name!r}{did_you_mean(name, self.names)}; there are {list(self.names)}"
            )
        return self.names.index(name)

    def _check_not_empty(self, feed: PlanSource) -> None:
        if not feed.order.table.rows:
            raise ConfigError(f"there are no rows in {feed.name!r}, so there is nothing to train on")
        if not feed.order.table.tokens:
            raise ConfigError(f"there are no tokens in the rows of {feed.name!r}, so there is nothing to train on")
        plain = feed.order.plain_counts()
        if plain is None or self.schedule is not None or not self.drop_last:
            return
        if int(plain.sum()) < self.global_batch:
            raise nothing_to_deliver(int(plain.sum()), self.global_batch)


def _row_numbers(numbers: Iterable[int]) -> set[int]:
    try:
        return {index(number) for number in numbers}
    except TypeError:
        raise ConfigError(f"rows to ban are whole numbers, such as ban([3, 5]), got {numbers!r}") from None
