"""The steps of a plan of several sources: each drawn so often as its weight says, each going on where it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.order.mixing import Mixture
from penstock.order.positions import PlanSource, Position, ended, left_of, nothing_to_deliver, pass_by, take
from penstock.order.sample_orders import OrderPosition
from penstock.order.samples import Samples

__all__ = ["STOPPING", "MixedSteps"]

Ints = npt.NDArray[np.int64]
STOPPING = ("first_exhausted", "all_exhausted", "all_exhausted_without_replacement", "never")
_REMEMBERED_EVERY = 64


class MixedSteps:
    """A way through a plan; see `Way`. A step asked for out of turn is walked to, from the nearest known one."""

    def __init__(self, feeds: Sequence[PlanSource], mixture: Mixture, *, drop_last: bool, stopping: str) -> None:
        self.feeds, self.mixture, self.size = feeds, mixture, mixture.samples_per_step
        self.drop_last, self.stopping = drop_last, stopping
        self._known: dict[int, Position] = {}
        self._steps: dict[int, int] = {}

    def start(self) -> Position:
        first = tuple(OrderPosition() for _ in self.feeds)
        return Position(first, drawn=self.mixture.start(), marks=first)

    def read(self, position: Position, count: int) -> tuple[tuple[Samples, Ints] | None, Position]:
        if self._has_passed(position):
            return None, position
        ids, moved = self._draw(position, count)
        if len(ids) < (count if self.drop_last else 1):
            return None, self.leave(position)
        wanted = np.bincount(ids, minlength=len(self.feeds)).tolist()
        taken = [take(f.order, p, n, stay=False) for f, p, n in zip(self.feeds, position.places, wanted)]
        # The k-th sample drawn from a source is the k-th that was taken of it.
        order = np.empty(len(ids), np.int64)
        order[np.argsort(ids, kind="stable")] = np.arange(len(ids))
        samples = Samples.concat([some for some, _ in taken]).take(order)
        sources = np.repeat(ids.astype(np.int64), np.diff(samples.offsets))
        return (samples, sources), moved._replace(places=tuple(behind for _, behind in taken))

    def is_over(self, position: Position, count: int) -> bool:
        return self._has_passed(position) or self._runs_dry(position, count)

    def leave(self, position: Position) -> Position:
        if self._has_passed(position):
            return position
        ends = (self._last_epoch(feed, mark) for feed, mark in zip(self.feeds, position.marks))
        places = (place if end is None else OrderPosition(end) for place, end in zip(position.places, ends))
        return position._replace(places=tuple(places))

    def steps_in(self, epoch: int) -> int:
        if self.stopping == "never":
            raise TypeError(
                "a mixture with stopping_strategy='never' has no end to count to; choose 'first_exhausted' or "
                "'all_exhausted', or count steps yourself"
            )
        if epoch not in self._steps:
            self._count_steps(epoch)
        return self._steps[epoch]

    def seek(self, number: int) -> Position:
        known = max((step for step in self._known if step <= number), default=None)
        position = self.start() if known is None else self._known[known]
        while position.step < number:
            position = self._walk(position)[1]
        return position

    def jump(self, position: Position, stop: int) -> Position | None:
        return None

    def find(self, which: int, epoch: int, sample: int) -> tuple[int, int] | None:
        order = self.feeds[which].order
        target = order.place_of(epoch, sample)
        position = self.start()
        for known in self._known.values():
            if known.step > position.step and known.places[which] <= target:
                position = known
        try:
            while True:
                begun, behind = self._walk(position)
                if behind.places[which] > target:
                    break
                if self._is_out(which, behind):
                    return None
                position = behind
        except IndexError:
            return None
        place = begun.places[which]
        if place > target:
            return None  # it was among what did not fill a batch
        inside = order.number_of(target) - order.number_of(place)
        inside += sum(order.count(earlier) for earlier in range(place.epoch, epoch))
        ids, _ = self._draw(begun, self.size)
        return begun.step, int(np.flatnonzero(ids == which)[inside])

    def _draw(self, position: Position, count: int) -> tuple[Ints, Position]:
        """The sources of the next samples; places are not moved."""
        assert position.drawn is not None
        ids, drawn = self.mixture.draw(position.drawn, count, self._limits(position, count))
        return ids, position._replace(drawn=drawn, step=position.step + 1, samples=position.samples + len(ids))

    def _limits(self, position: Position, count: int) -> list[int | None] | None:
        """The most samples of each source in all, as far as they could be reached by the next `count`."""
        assert position.drawn is not None
        limits: list[int | None] = []
        for feed, place, used, mark in zip(
            self.feeds, position.places, position.drawn.counts, position.marks, strict=True
        ):
            last = self._last_epoch(feed, mark)
            left = None if last is None else left_of(feed.order, place, last, count)
            limits.append(None if left is None else used + left)
        return limits if any(limit is not None for limit in limits) else None

    def _has_passed(self, position: Position) -> bool:
        """Whether so much of the sources was used as makes an epoch."""
        if self.stopping == "never" or not position.samples:
            return False
        passed = [place._replace(epoch=place.epoch - 1) >= mark for place, mark in zip(position.places, position.marks)]
        if self.stopping == "first_exhausted":
            return any(passed)
        # Nobody waits for a source that gives nothing any more.
        return any(passed) and all(done or self._is_out(which, position) for which, done in enumerate(passed))

    def _runs_dry(self, position: Position, count: int) -> bool:
        """Whether sources that end for good have no batch left between them."""
        if self._limits(position, count) is None:
            return False
        ids, _ = self._draw(position, count)
        return len(ids) < (count if self.drop_last else 1)

    def _last_epoch(self, feed: PlanSource, mark: OrderPosition) -> int | None:
        """The epoch of a source in which no sample of it may be used any more, as things are; None if there is none."""
        if self.stopping != "all_exhausted_without_replacement":
            return feed.max_epochs
        return mark.epoch + 1 if feed.max_epochs is None else min(mark.epoch + 1, feed.max_epochs)

    def _is_out(self, which: int, position: Position) -> bool:
        """Whether a source gives nothing any more: it was used as often as it may be, or is never weighed again."""
        most, silent = self.feeds[which].max_epochs, self._silent_from[which]
        used_up = most is not None and position.places[which].epoch >= most
        return used_up or (silent is not None and position.step >= silent)

    @cached_property
    def _silent_from(self) -> list[int | None]:
        """For each source the step from which on its weight is 0, if there is one."""
        schedule = self.mixture.schedule
        last = max(step for part in schedule.parts for step, _ in part.points)
        weights = schedule.weights_at(last)
        return [None if weights[feed.name] else last for feed in self.feeds]

    def _walk(self, position: Position) -> tuple[Position, Position]:
        """In front of and behind the next step, over the ends of epochs, without putting the samples together."""
        if ended(self.feeds, position) or self.is_over(position, self.size):
            position = next_epoch(self.leave(position))
        if ended(self.feeds, position):
            raise IndexError(f"the plan has {position.step} steps and ends there")
        ids, moved = self._draw(position, self.size)
        if len(ids) < (self.size if self.drop_last else 1):
            raise nothing_to_deliver(len(ids), self.size)
        counts = np.bincount(ids, minlength=len(self.feeds)).tolist()
        places = tuple(pass_by(f.order, p, n) for f, p, n in zip(self.feeds, position.places, counts))
        behind = moved._replace(places=places)
        if behind.step % _REMEMBERED_EVERY == 0:
            self._known[behind.step] = behind
        return position, behind

    def _count_steps(self, epoch: int) -> None:
        """Count the steps of the epochs up to one."""
        position, first = self.start(), 0
        while True:
            try:
                behind = self._walk(position)[1]
            except IndexError:
                self._steps[position.epoch] = position.step - first
                for later in range(position.epoch + 1, epoch + 1):
                    self._steps[later] = 0
                return
            if behind.epoch > position.epoch:
                self._steps[position.epoch] = position.step - first
                first = position.step
                if position.epoch == epoch:
                    return
            position = behind


def next_epoch(position: Position) -> Position:
    """Behind the end of an epoch, the beginning of the next."""
    drawn = position.drawn
    if drawn is not None and drawn.out:
        # Sources that were used up may be used again.
        drawn = replace(drawn, start=drawn.position, base=drawn.counts, owed=(), out=())
    return position._replace(epoch=position.epoch + 1, samples=0, marks=position.places, drawn=drawn)
