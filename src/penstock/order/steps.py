"""Steps of a plan before its edits: of one source, or of several sources mixed by weight, each with its own cursor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from penstock.order.mixing import Mixture
from penstock.order.positions import (
    PlanSource,
    Position,
    advance,
    exhausted,
    moved,
    nothing_to_deliver,
    samples_left,
    take,
)
from penstock.order.sample_orders import OrderPosition
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]
STOPPING = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement", "never")
_CHECKPOINT_STEPS = 64


class StepSequence(Protocol):
    """Sequence of the steps of a plan, before its edits."""

    def start(self) -> Position: ...

    def read(self, position: Position, count: int) -> tuple[tuple[Samples, Ints] | None, Position]:
        """Next samples with the source of each part, and the next position; None at the end of an epoch."""
        ...

    def is_over(self, position: Position, count: int) -> bool:
        """True if the epoch of a position has no batch of `count` samples left."""
        ...

    def leave(self, position: Position) -> Position:
        """Position after the samples of an epoch that do not fill a batch."""
        ...

    def steps_in(self, epoch: int) -> int: ...

    def seek(self, number: int) -> Position:
        """Position before a step."""
        ...

    def jump(self, position: Position, stop: int) -> Position | None:
        """Position before a later step, where arithmetic gives it; otherwise None."""
        ...

    def find(self, which: int, epoch: int, sample: int) -> tuple[int, int] | None:
        """Step that uses a sample of a source, and the sample's number in it; None if it is in no batch."""
        ...


class SingleSourceSteps:
    """Steps of one source: its samples in order, and no batch across the end of an epoch."""

    def __init__(self, source: PlanSource, size: int, *, drop_last: bool) -> None:
        self.source, self.size, self.drop_last = source, size, drop_last
        self._fixed = source.order.even is not None

    def start(self) -> Position:
        return Position((OrderPosition(),), epoch_starts=(OrderPosition(),))

    def read(self, position: Position, count: int) -> tuple[tuple[Samples, Ints] | None, Position]:
        cursor = position.cursors[0]
        if cursor.epoch > position.epoch:
            return None, position
        samples, cursor = take(self.source.order, cursor, count, stay=True)
        if not len(samples) or (self.drop_last and len(samples) < count):
            return None, self.leave(position)
        following = Position(
            (cursor,), position.step + 1, position.epoch, position.samples + len(samples), None, position.epoch_starts
        )
        return (samples, np.zeros(len(samples.rows), np.int64)), following

    def read_block(self, position: Position, most: int) -> list[tuple[Samples, Position]]:
        """Up to `most` full steps within one window, each with the next position; none if fewer than two fit.

        Equal to reading them one by one, and cheaper.
        """
        cursor, order, size = position.cursors[0], self.source.order, self.size
        if cursor.epoch > position.epoch:
            return []
        block = order.read(cursor, most * size)
        count = len(block) // size
        if count < 2:
            return []
        found: list[tuple[Samples, Position]] = []
        epoch, epoch_starts = position.epoch, position.epoch_starts
        for number in range(1, count + 1):
            done = number * size
            behind = OrderPosition(epoch, cursor.window, cursor.index + done)
            if number == count:
                behind = moved(order, cursor, behind.index, order.size_of(epoch, cursor.window))
            following = Position((behind,), position.step + number, epoch, position.samples + done, None, epoch_starts)
            found.append((block.slice(done - size, done), following))
        return found

    def is_over(self, position: Position, count: int) -> bool:
        cursor = position.cursors[0]
        if cursor.epoch > position.epoch:
            return True
        needed = count if self.drop_last else 1  # windows may be empty
        return samples_left(self.source.order, cursor, cursor.epoch + 1, needed - 1) is not None

    def leave(self, position: Position) -> Position:
        if position.cursors[0].epoch > position.epoch:
            return position
        return position._replace(cursors=(OrderPosition(position.epoch + 1),))

    def steps_in(self, epoch: int) -> int:
        samples = self.source.order.count(epoch)
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def seek(self, number: int) -> Position:
        left, epoch = number, 0
        if self._fixed:
            steps = self.steps_in(0)
            epoch, left = divmod(number, steps) if steps else (0, 0)
        else:
            while not self._has_step(epoch, left):
                steps = self.steps_in(epoch)
                if not steps:
                    raise nothing_to_deliver(self.source.order.count(epoch), self.size)
                left, epoch = left - steps, epoch + 1
        samples = left * self.size
        cursor = self.source.order.position_of(epoch, samples)
        return Position((cursor,), step=number, epoch=epoch, samples=samples, epoch_starts=(OrderPosition(epoch),))

    def jump(self, position: Position, stop: int) -> Position | None:
        if not self._fixed:
            return None
        # Only if all steps so far had the size of this plan.
        here = self.seek(position.step)
        return self.seek(stop) if (here.cursors, here.epoch) == (position.cursors, position.epoch) else None

    def find(self, which: int, epoch: int, sample: int) -> tuple[int, int] | None:
        within, slot = divmod(sample, self.size)
        if not self._has_step(epoch, within):
            return None
        before = epoch * self.steps_in(0) if self._fixed else sum(map(self.steps_in, range(epoch)))
        return before + within, slot

    def _has_step(self, epoch: int, number: int) -> bool:
        """True if an epoch has a step of this number; counts no more windows than that takes."""
        return self.source.order.has(epoch, number * self.size + (self.size if self.drop_last else 1))


class MixedSteps:
    """Steps of several sources, interleaved by weight. Seeking walks from the nearest checkpoint."""

    def __init__(self, sources: Sequence[PlanSource], mixture: Mixture, *, drop_last: bool, stopping: str) -> None:
        self.sources, self.mixture, self.size = sources, mixture, mixture.samples_per_step
        self.drop_last, self.stopping = drop_last, stopping
        self._checkpoints: dict[int, Position] = {}
        self._steps: dict[int, int] = {}

    def start(self) -> Position:
        first = tuple(OrderPosition() for _ in self.sources)
        return Position(first, drawn=self.mixture.start(), epoch_starts=first)

    def read(self, position: Position, count: int) -> tuple[tuple[Samples, Ints] | None, Position]:
        if self._has_passed(position):
            return None, position
        ids, following = self._draw(position, count)
        if len(ids) < (count if self.drop_last else 1):
            return None, self.leave(position)
        samples, sources, cursors = interleaved(ids, self.sources, position.cursors)
        return (samples, sources), following._replace(cursors=cursors)

    def is_over(self, position: Position, count: int) -> bool:
        if self._has_passed(position):
            return True
        if self._limits(position, count) is None:
            return False
        ids, _ = self._draw(position, count)
        return len(ids) < (count if self.drop_last else 1)

    def leave(self, position: Position) -> Position:
        if self._has_passed(position):
            return position
        ends = (self._last_epoch(source, start) for source, start in zip(self.sources, position.epoch_starts))
        cursors = (cursor if end is None else OrderPosition(end) for cursor, end in zip(position.cursors, ends))
        return position._replace(cursors=tuple(cursors))

    def steps_in(self, epoch: int) -> int:
        if self.stopping == "never":
            raise TypeError(
                "a mixture with stopping_strategy='never' has no number of steps; choose 'first_exhausted' or "
                "'all_exhausted', or count steps yourself"
            )
        if epoch not in self._steps:
            self._count_steps(epoch)
        return self._steps[epoch]

    def seek(self, number: int) -> Position:
        known = max((step for step in self._checkpoints if step <= number), default=None)
        position = self.start() if known is None else self._checkpoints[known]
        while position.step < number:
            position = self._walk(position)[1]
        return position

    def jump(self, position: Position, stop: int) -> Position | None:
        return None

    def find(self, which: int, epoch: int, sample: int) -> tuple[int, int] | None:
        order = self.sources[which].order
        target = order.position_of(epoch, sample)
        position = self.start()
        for known in self._checkpoints.values():
            if known.step > position.step and known.cursors[which] <= target:
                position = known
        try:
            while True:
                here, following = self._walk(position)
                if following.cursors[which] > target:
                    break
                if self._is_out(which, following):
                    return None
                position = following
        except IndexError:
            return None
        cursor = here.cursors[which]
        if cursor > target:
            return None  # it was among the samples that did not fill a batch
        inside = order.number_of(target) - order.number_of(cursor)
        inside += sum(order.count(earlier) for earlier in range(cursor.epoch, epoch))
        ids, _ = self._draw(here, self.size)
        return here.step, int(np.flatnonzero(ids == which)[inside])

    def _draw(self, position: Position, count: int) -> tuple[Ints, Position]:
        """Sources of the next samples; cursors are not moved."""
        assert position.drawn is not None
        ids, drawn = self.mixture.draw(position.drawn, count, self._limits(position, count))
        return ids, position._replace(drawn=drawn, step=position.step + 1, samples=position.samples + len(ids))

    def _limits(self, position: Position, count: int) -> list[int | None] | None:
        """Most samples of each source in all, as far as the next `count` could reach them."""
        assert position.drawn is not None
        limits: list[int | None] = []
        for source, cursor, used, start in zip(
            self.sources, position.cursors, position.drawn.counts, position.epoch_starts, strict=True
        ):
            last = self._last_epoch(source, start)
            left = None if last is None else samples_left(source.order, cursor, last, count)
            limits.append(None if left is None else used + left)
        return limits if any(limit is not None for limit in limits) else None

    def _has_passed(self, position: Position) -> bool:
        """True if the sources were used as often as the stopping strategy asks for."""
        if self.stopping == "never" or not position.samples:
            return False
        pairs = zip(position.cursors, position.epoch_starts)
        passed = [cursor._replace(epoch=cursor.epoch - 1) >= start for cursor, start in pairs]
        if self.stopping == "first_exhausted":
            return any(passed)
        # A source that gives nothing more is not waited for.
        return any(passed) and all(done or self._is_out(which, position) for which, done in enumerate(passed))

    def _last_epoch(self, source: PlanSource, start: OrderPosition) -> int | None:
        """First epoch of a source that may not be used; None if there is none."""
        if self.stopping != "all_exhausted_without_replacement":
            return source.max_epochs
        return start.epoch + 1 if source.max_epochs is None else min(start.epoch + 1, source.max_epochs)

    def _is_out(self, which: int, position: Position) -> bool:
        """True if a source gives nothing more: its epochs are used up, or its weight stays 0."""
        most, silent = self.sources[which].max_epochs, self._silent_from[which]
        used_up = most is not None and position.cursors[which].epoch >= most
        return used_up or (silent is not None and position.step >= silent)

    @cached_property
    def _silent_from(self) -> list[int | None]:
        """For each source, the step from which on its weight is 0, if there is one."""
        schedule = self.mixture.schedule
        last = max(step for part in schedule.parts for step, _ in part.points)
        weights = schedule.weights_at(last)
        return [None if weights[source.name] else last for source in self.sources]

    def _walk(self, position: Position) -> tuple[Position, Position]:
        """Positions before and after the next step, across the ends of epochs, without building the samples."""
        if exhausted(self.sources, position) or self.is_over(position, self.size):
            position = next_epoch(self.leave(position))
        if exhausted(self.sources, position):
            raise IndexError(f"the plan ends after {position.step} steps")
        ids, following = self._draw(position, self.size)
        if len(ids) < (self.size if self.drop_last else 1):
            raise nothing_to_deliver(len(ids), self.size)
        counts = np.bincount(ids, minlength=len(self.sources)).tolist()
        cursors = tuple(advance(s.order, c, n) for s, c, n in zip(self.sources, position.cursors, counts))
        following = following._replace(cursors=cursors)
        if following.step % _CHECKPOINT_STEPS == 0:
            self._checkpoints[following.step] = following
        return position, following

    def _count_steps(self, epoch: int) -> None:
        """Count the steps of all epochs up to this one."""
        position, first = self.start(), 0
        while True:
            try:
                following = self._walk(position)[1]
            except IndexError:
                self._steps[position.epoch] = position.step - first
                for later in range(position.epoch + 1, epoch + 1):
                    self._steps[later] = 0
                return
            if following.epoch > position.epoch:
                self._steps[position.epoch] = position.step - first
                first = position.step
                if position.epoch == epoch:
                    return
            position = following


def interleaved(
    ids: Ints, sources: Sequence[PlanSource], cursors: Sequence[OrderPosition]
) -> tuple[Samples, Ints, tuple[OrderPosition, ...]]:
    """Samples drawn from sources `ids`, the source of each part, and the cursors after them."""
    counts = np.bincount(ids, minlength=len(sources)).tolist()
    taken = [take(s.order, c, n, stay=False) for s, c, n in zip(sources, cursors, counts, strict=True)]
    # The k-th sample drawn from a source is the k-th that was taken from it.
    order = np.empty(len(ids), np.int64)
    order[np.argsort(ids, kind="stable")] = np.arange(len(ids))
    samples = Samples.concat([some for some, _ in taken]).take(order)
    part_sources = np.repeat(ids.astype(np.int64), np.diff(samples.offsets))
    return samples, part_sources, tuple(cursor for _, cursor in taken)


def next_epoch(position: Position) -> Position:
    """Beginning of the next epoch, from the end of one."""
    drawn = position.drawn
    if drawn is not None and drawn.out:
        # Sources that were used up may be used again.
        drawn = replace(drawn, start=drawn.position, base=drawn.counts, owed=(), out=())
    return position._replace(epoch=position.epoch + 1, samples=0, epoch_starts=position.cursors, drawn=drawn)
