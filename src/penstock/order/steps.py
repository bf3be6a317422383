"""Steps of a plan before its edits: of one source, or of several sources mixed by weight, each with its own cursor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
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
from penstock.order.sample_orders import Order, OrderPosition
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]
STOPPING = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement", "never")
_CHECKPOINT_STEPS = 64
_LEAST_CHECKPOINTS = 16
_MOST_CHECKPOINT_CURSORS = 1 << 20
"""Cursors of all sources in all checkpoints of a mixture together."""


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
        for number, samples in enumerate(block.cut(size, count), 1):
            done = number * size
            behind = OrderPosition(epoch, cursor.window, cursor.index + done)
            if number == count:
                behind = moved(order, cursor, behind.index, order.size_of(epoch, cursor.window))
            following = Position((behind,), position.step + number, epoch, position.samples + done, None, epoch_starts)
            found.append((samples, following))
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
        self._checkpoint_steps = _CHECKPOINT_STEPS
        self._steps: dict[int, int] = {}
        self._limited = stopping == "all_exhausted_without_replacement" or any(
            source.max_epochs is not None for source in sources
        )
        for source in sources:
            source.order.share_memory(len(sources))

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
        if not self._limited:
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
        """Sources of the next samples; cursors are not moved.

        Only sources that are drawn can end, so that what is left is looked up for those: of rows that are packed, that
        may plan a window.
        """
        assert position.drawn is not None
        limits = self._limits_reached(position) if self._limited else None
        known: dict[int, int] = {}
        while True:
            ids, drawn = self.mixture.draw(position.drawn, count, limits)
            fresh = {} if limits is None else {which: n for which, n in _drawn(ids) if n > known.get(which, 0)}
            found = {which: self._limit(which, position, n) for which, n in fresh.items()}
            if limits is None or all(limit is None for limit in found.values()):
                break
            known |= fresh
            for which, limit in found.items():
                limits[which] = limit
        return ids, position._replace(drawn=drawn, step=position.step + 1, samples=position.samples + len(ids))

    def _limits_reached(self, position: Position) -> list[int | None]:
        """Most samples of each source in all, for sources that have given them; None for the others."""
        assert position.drawn is not None
        limits: list[int | None] = []
        for source, cursor, used, start in zip(
            self.sources, position.cursors, position.drawn.counts, position.epoch_starts, strict=True
        ):
            last = self._last_epoch(source, start)
            ended = last is not None and cursor.epoch >= last
            if last is not None and not ended and _may_drop(source.order):
                ended = samples_left(source.order, cursor, last, 0) is not None  # the rest may be empty windows
            limits.append(used if ended else None)
        return limits

    def _limit(self, which: int, position: Position, count: int) -> int | None:
        """Most samples of a source in all, if the next `count` of it reach them."""
        assert position.drawn is not None
        source, cursor = self.sources[which], position.cursors[which]
        last = self._last_epoch(source, position.epoch_starts[which])
        if last is None:
            return None
        if source.order.even is None and cursor.epoch < last:
            source.order.read(cursor, count)  # which are needed next, and say how many the window has
        left = samples_left(source.order, cursor, last, count)
        return None if left is None else position.drawn.counts[which] + left

    def _has_passed(self, position: Position) -> bool:
        """True if the sources were used as often as the stopping strategy asks for."""
        if self.stopping == "never" or not position.samples:
            return False
        if _epochs(position.cursors) == _epochs(position.epoch_starts):
            return False  # as nearly always
        passed = [_has_passed(cursor, start) for cursor, start in zip(position.cursors, position.epoch_starts)]
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
        cursors = list(position.cursors)
        for number, count in _drawn(ids):
            cursors[number] = advance(self.sources[number].order, cursors[number], count)
        following = following._replace(cursors=tuple(cursors))
        if following.step % self._checkpoint_steps == 0:
            self._checkpoints[following.step] = following
            self._thin_out()
        return position, following

    def _thin_out(self) -> None:
        """Keep every other checkpoint, and make as few from now on, where they would take too much memory."""
        if len(self._checkpoints) > max(_LEAST_CHECKPOINTS, _MOST_CHECKPOINT_CURSORS // len(self.sources)):
            self._checkpoint_steps *= 2
            kept = {step: at for step, at in self._checkpoints.items() if step % self._checkpoint_steps == 0}
            self._checkpoints = kept

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


def _epochs(cursors: Sequence[OrderPosition]) -> list[int]:
    return list(map(itemgetter(0), cursors))


def _has_passed(cursor: OrderPosition, start: OrderPosition) -> bool:
    """True if a source was used once since a cursor."""
    return (cursor.epoch - 1, *cursor[1:]) >= start


def _may_drop(order: Order) -> bool:
    """True if windows may have no samples."""
    return order.truncation is not None and order.truncation.policy == "drop"


def interleaved(
    ids: Ints, sources: Sequence[PlanSource], cursors: Sequence[OrderPosition]
) -> tuple[Samples, Ints, tuple[OrderPosition, ...]]:
    """Samples drawn from sources `ids`, the source of each part, and the cursors after them."""
    following, taken = list(cursors), []
    for number, count in _drawn(ids):
        some, following[number] = take(sources[number].order, cursors[number], count, stay=False)
        taken.append(some)
    # The k-th sample drawn from a source is the k-th that was taken from it.
    order = np.empty(len(ids), np.int64)
    order[np.argsort(ids, kind="stable")] = np.arange(len(ids))
    samples = Samples.concat(taken).take(order)
    part_sources = np.repeat(ids.astype(np.int64), np.diff(samples.offsets))
    return samples, part_sources, tuple(following)


def _drawn(ids: Ints) -> Iterator[tuple[int, int]]:
    """Sources that are drawn, and how often each is; not those of a large mixture that are not."""
    numbers, counts = np.unique(ids, return_counts=True)
    return zip(numbers.tolist(), counts.tolist())


def next_epoch(position: Position) -> Position:
    """Beginning of the next epoch, from the end of one."""
    drawn = position.drawn
    if drawn is not None and drawn.out:
        # Sources that were used up may be used again.
        drawn = replace(drawn, start=drawn.position, base=drawn.counts, owed=(), out=())
    return position._replace(epoch=position.epoch + 1, samples=0, epoch_starts=position.cursors, drawn=drawn)
