"""Plan: which samples make up step s, from the orders of all sources, their weights, and edits.

    plan = Plan([PlanSource("web", order)], global_batch=256)
    plan.step(1000).rows        # rows of step 1000
    plan.trace("web", 4711)     # steps that use row 4711, past and future

A plan is a value. It knows nothing of ranks, threads or time. An edit (`skip`, `ban`, `reweight`) makes a new plan
that equals the old one up to the step of the edit, and neither loses nor repeats anything after it.

`SingleSourceSteps` and `MixedSteps` give the steps; epochs and edits, which both have in common, are here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError
from penstock.html import facts, fragment, table
from penstock.order.block_shuffle import described
from penstock.order.edits import Ban, Edit, Reweight, Skip
from penstock.order.mixing import Mixture
from penstock.order.positions import PlanSource, Position, RowUse, Step, StepRanges, exhausted, nothing_to_deliver
from penstock.order.schedules import Schedule
from penstock.order.steps import STOPPING, MixedSteps, SingleSourceSteps, StepSequence, next_epoch

__all__ = ["Plan", "PlanSource", "Position", "RowUse", "Step", "mixture_of"]

Ints = npt.NDArray[np.int64]
_VERSION = 1


@dataclass(frozen=True)
class Plan:
    """Order of all steps of a run: sources, weights, batch size and edits."""

    sources: tuple[PlanSource, ...]
    global_batch: int
    """Samples of a step, of all ranks together."""
    schedule: Schedule | None = None
    """Weights of the sources; None for a single source, whose epochs then end batches."""
    drop_last: bool = False
    stopping: str = "first_exhausted"
    edits: tuple[Edit, ...] = ()
    parts: dict[str, str] | None = field(default=None, init=False, repr=False, compare=False)
    """Digest of each part, once a state needed them."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError("a plan needs at least one source")
        if self.global_batch < 1:
            raise ConfigError(f"global_batch must be at least 1, got {self.global_batch}")
        if self.stopping not in STOPPING:
            hint = did_you_mean(self.stopping, STOPPING)
            raise ConfigError(f"stopping_strategy must be one of {', '.join(STOPPING)}, got {self.stopping!r}{hint}")
        if self.schedule is None and len(self.sources) > 1:
            raise ConfigError(f"{len(self.sources)} sources need weights")
        if len(set(self.names)) < len(self.names):
            raise ConfigError(f"the names of sources must differ, got {list(self.names)}")
        for source in self.sources:
            self._check_not_empty(source)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources)

    @property
    def counts_steps(self) -> bool:
        """True if edits or a schedule name steps, so that the batch size cannot change."""
        changes = self.schedule is not None and any(len(part.points) > 1 for part in self.schedule.parts)
        return bool(self.edits) or changes

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that name the plan without its edits."""
        return xxhash.xxh3_64_hexdigest(orjson.dumps(self.describe(), option=orjson.OPT_SORT_KEYS))

    def describe(self) -> dict[str, Any]:
        """Everything that decides the content of steps, except edits and batch size."""
        return {
            "version": _VERSION,
            "sources": [
                {
                    "name": source.name,
                    "rows": source.identity,
                    "shuffle": described(source.order.shuffle),
                    "seed": source.order.seed,
                    "order": source.order.describe(),
                    "max_epochs": source.max_epochs,
                }
                for source in self.sources
            ],
            "weights": None if self.schedule is None else self.schedule.to_dict(),
            "stopping": None if self.schedule is None else self.stopping,
            "drop_last": self.drop_last,
        }

    def _repr_html_(self) -> str:
        """Sources and their orders for a notebook."""
        shown: list[tuple[object, ...]] = [("samples of a step", self.global_batch), ("sources", len(self.sources))]
        shown += [("weights", "by schedule")] if self.schedule is not None else []
        shown += [("edits", len(self.edits))] if self.edits else []
        rows = [
            (
                each["name"],
                str(each["shuffle"]),
                each["seed"],
                str(each["order"]),
                str(each["max_epochs"] or "no limit"),
            )
            for each in self.describe()["sources"]
        ]
        columns = ["source", "shuffle", "seed", "order", "epochs"]
        return fragment(facts(shown), table(rows, columns, caption=f"Plan {self.fingerprint}"))

    # Reading

    def start(self) -> Position:
        return self._steps.start()

    def read(self, position: Position, count: int | None = None) -> tuple[Step | None, Position]:
        """Step at a position, and the next position. None at the end of an epoch; `next_epoch` leads on from there.

        `count` is the number of samples, by default a global batch. Skipped steps are passed over.
        """
        return self._read(self._past_skipped(position), count or self.global_batch)

    def read_block(self, position: Position, most: int) -> list[tuple[Step, Position]]:
        """Up to `most` steps of one epoch, each with the position of the next delivered step.

        Empty at the end of an epoch. Equal to `read` and `next_delivered` step by step, and cheaper.
        """
        steps, size = self._steps, self.global_batch
        if isinstance(steps, SingleSourceSteps) and not self.edits and self._unlimited and most > 1:
            names, epoch = self.names, position.epoch
            block = steps.read_block(position, most)
            if block and block[0][0].single:
                sources = list(np.zeros((len(block), size), np.int64))
            else:
                sources = [np.zeros(len(samples.rows), np.int64) for samples, _ in block]
            found = [
                (Step(after.step - 1, epoch, samples, source, names, size), after)
                for (samples, after), source in zip(block, sources)
            ]
            if found:
                # An epoch can end only after the last of them.
                found[-1] = found[-1][0], self.next_delivered(found[-1][1])
                return found
        step, following = self.read(position)
        return [] if step is None else [(step, self.next_delivered(following))]

    def next_delivered(self, position: Position, count: int | None = None) -> Position:
        """Position before the next delivered step, which may be in another epoch.

        `count` is the number of samples of that step, by default a global batch.
        """
        while True:
            position, over = self._crossed(self._past_skipped(position), count)
            if not over or self.ended(position) or not self.skipped(position.step):
                return position

    def ended(self, position: Position) -> bool:
        """True if no epoch has anything left: every source was used as often as `max_epochs` allows."""
        return not self._unlimited and exhausted(self.sources, position)

    def step(self, number: int) -> Step:
        """Step by its number, counted from the beginning of the first epoch."""
        position = self.seek(number)
        step, _ = self._read(position, self.global_batch)
        if step is None:
            raise IndexError(f"step {number} does not exist; the plan has {position.step} steps")
        return step

    def seek(self, number: int) -> Position:
        """Position before a step. Arithmetic for a single source with fixed counts."""
        if number < 0:
            raise IndexError(f"steps are counted from 0, got {number}")
        return self._crossed(self._steps.seek(number))[0]

    def seek_epoch(self, epoch: int) -> Position:
        """Position before an epoch."""
        return self.seek(sum(self.steps_in(earlier) for earlier in range(epoch)))

    def steps_in(self, epoch: int) -> int:
        """Number of steps of an epoch, skipped ones included."""
        return self._steps.steps_in(epoch)

    def delivered_steps(self, epoch: int) -> Sequence[int]:
        """Numbers of the steps of an epoch that are delivered. The last answer is cached."""
        cached = self._delivered.get(epoch)
        if cached is None:
            first = sum(self.steps_in(earlier) for earlier in range(epoch))
            steps = range(first, first + self.steps_in(epoch))
            skips = [edit for edit in self.edits if isinstance(edit, Skip)]
            cached = StepRanges(steps, [(skip.start, skip.stop) for skip in skips]) if skips else steps
            self._delivered.clear()
            self._delivered[epoch] = cached
        return cached

    def trace(
        self,
        source: str | int,
        row: int | None = None,
        *,
        epochs: int = 1,
        progress: Callable[[int, int], object] | None = None,
    ) -> list[RowUse]:
        """All uses of a row in the first `epochs` passes over its source, in order.

        `trace("web", 4711)`, or `trace(4711)` if there is a single source. `progress(done, epochs)` is called after
        each pass.
        """
        if row is None:
            if len(self.sources) > 1 or isinstance(source, str):
                raise ConfigError(f"trace needs a source and a row, such as trace({self.names[0]!r}, 4711)")
            return self.trace(self.names[0], source, epochs=epochs, progress=progress)
        source = str(source)
        which = self._index(source)
        order, most = self.sources[which].order, self.sources[which].max_epochs
        if not 0 <= row < order.table.rows:
            raise IndexError(f"row {row} of {source!r} does not exist; it has {order.table.rows} rows")
        uses: list[RowUse] = []
        passes = epochs if most is None else min(epochs, most)
        for epoch in range(passes):
            for sample in order.find(epoch, row):
                found = self._steps.find(which, epoch, sample)
                if found is not None:
                    number, slot = found
                    uses.append(RowUse(number, epoch, slot, skipped=self._is_withheld(number, source, row)))
            if progress is not None:
                progress(epoch + 1, passes)
        return uses

    # Edits

    def skip(self, start: int, stop: int) -> Plan:
        """Plan that does not deliver steps `start` to `stop` (exclusive). Other steps keep their numbers and rows."""
        return self.edited(Skip(start, stop))

    def ban(self, rows: Mapping[str, Iterable[int]] | Iterable[int], *, step: int = 0) -> Plan:
        """Plan without some rows from `step` on. Other rows stay where they are; an emptied sample is a blank."""
        if not isinstance(rows, Mapping):
            if len(self.sources) > 1:
                raise ConfigError(f"ban needs a source of {list(self.names)} for its rows, such as ban({{'a': [3]}})")
            rows = {self.names[0]: rows}
        plan = self
        for name, numbers in rows.items():
            size = self.sources[self._index(name)].order.table.rows
            banned = tuple(sorted(_row_numbers(numbers)))
            if banned and not (banned[0] >= 0 and banned[-1] < size):
                raise ConfigError(f"rows {banned[0]} to {banned[-1]} of {name!r} do not exist; it has {size} rows")
            plan = plan.edited(Ban(step, name, banned))
        return plan

    def reweight(self, step: int, weights: Mapping[str, float]) -> Plan:
        """Plan with other weights from `step` on. Every source continues at its cursor."""
        if self.schedule is None:
            raise ConfigError("reweight needs a mixture; this plan has a single source without weights")
        return self.edited(Reweight(step, dict(weights)))

    def edited(self, *edits: Edit) -> Plan:
        """Plan with further edits."""
        schedule = self.schedule
        for edit in edits:
            if isinstance(edit, Reweight) and schedule is not None:
                schedule = schedule.with_change(edit.step, edit.weights)
                Mixture(self.names, schedule, self.global_batch)
            if isinstance(edit, Ban):
                self._index(edit.source)
        return replace(self, edits=(*self.edits, *edits))

    def skipped(self, number: int) -> bool:
        """True if a step is not delivered."""
        return any(isinstance(edit, Skip) and edit.start <= number < edit.stop for edit in self.edits)

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without what is quickly computed again."""
        return {name: value for name, value in self.__dict__.items() if name != "_delivered"}

    @cached_property
    def _delivered(self) -> dict[int, Sequence[int]]:
        return {}

    @cached_property
    def _unlimited(self) -> bool:
        return any(source.max_epochs is None for source in self.sources)

    @cached_property
    def _steps(self) -> StepSequence:
        mixture = mixture_of(self)
        if mixture is None:
            return SingleSourceSteps(self.sources[0], self.global_batch, drop_last=self.drop_last)
        return MixedSteps(self.sources, mixture, drop_last=self.drop_last, stopping=self.stopping)

    def _read(self, position: Position, count: int) -> tuple[Step | None, Position]:
        """As `read`, including skipped steps."""
        if self.ended(position):
            return None, position
        found, following = self._steps.read(position, count)
        if found is None:
            return None, following
        samples, sources = found
        for edit in self.edits:
            if isinstance(edit, Ban) and edit.step <= position.step:
                gone = (sources == self._index(edit.source)) & np.isin(samples.rows, np.asarray(edit.rows, np.int64))
                if gone.any():
                    samples, sources = samples.where(~gone), sources[~gone]
        return Step(position.step, position.epoch, samples, sources, self.names, count), following

    def _crossed(self, position: Position, count: int | None = None) -> tuple[Position, bool]:
        """Position in the next epoch if this one is over, and whether it is."""
        if not self.ended(position) and not self._steps.is_over(position, count or self.global_batch):
            return position, False
        return next_epoch(self._steps.leave(position)), True

    def _past_skipped(self, position: Position) -> Position:
        while self.skipped(position.step):
            skips = (edit for edit in self.edits if isinstance(edit, Skip))
            stop = max(edit.stop for edit in skips if edit.start <= position.step < edit.stop)
            following = self._steps.jump(position, stop)
            if following is None:
                step, following = self._read(position, self.global_batch)
                if step is None:
                    return position
            position = following
        return position

    def _is_withheld(self, number: int, source: str, row: int) -> bool:
        banned = (
            isinstance(edit, Ban) and edit.source == source and edit.step <= number and row in edit.rows
            for edit in self.edits
        )
        return self.skipped(number) or any(banned)

    def _index(self, name: str) -> int:
        if name not in self.names:
            hint = did_you_mean(name, self.names)
            raise ConfigError(f"unknown source {name!r}{hint}; the sources are {list(self.names)}")
        return self.names.index(name)

    def _check_not_empty(self, source: PlanSource) -> None:
        table = source.order.table
        if not table.rows or not table.tokens:
            raise ConfigError(f"source {source.name!r} has {table.rows} rows and {table.tokens} tokens; it is empty")
        order = source.order
        if order.even is not None and self.schedule is None and self.drop_last and order.total < self.global_batch:
            raise nothing_to_deliver(order.total, self.global_batch)


def mixture_of(plan: Plan) -> Mixture | None:
    """Mixture of the sources of a plan, with the weights of all edits; None for a single source. Kept by the plan."""
    schedule = plan.schedule
    if schedule is None:
        return None
    kept: Mixture | None = plan.__dict__.get("_mixture")
    if kept is None:
        for edit in plan.edits:
            if isinstance(edit, Reweight):
                schedule = schedule.with_change(edit.step, edit.weights)
        kept = plan.__dict__["_mixture"] = Mixture(plan.names, schedule, plan.global_batch)
    return kept


def _row_numbers(numbers: Iterable[int]) -> set[int]:
    try:
        return {index(number) for number in numbers}
    except TypeError:
        raise ConfigError(f"rows to ban must be integers, such as ban([3, 5]), got {numbers!r}") from None
