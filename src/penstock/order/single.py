"""The steps of a plan of one source: its samples one after the other, and no batch over the end of an epoch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.order.positions import PlanSource, Position, behind_of, left_of, nothing_to_deliver, take
from penstock.order.sample_orders import OrderPosition
from penstock.order.samples import Samples

__all__ = ["SingleSourceSteps"]

Ints = npt.NDArray[np.int64]


class SingleSourceSteps:
    """A way through a plan; see `Way`. Where the number of samples is arithmetic, so is everything here."""

    def __init__(self, feed: PlanSource, size: int, *, drop_last: bool) -> None:
        self.feed, self.size, self.drop_last = feed, size, drop_last
        self._plain = feed.order.plain_counts() is not None

    def start(self) -> Position:
        return Position((OrderPosition(),), marks=(OrderPosition(),))

    def read(self, position: Position, count: int) -> tuple[tuple[Samples, Ints] | None, Position]:
        place = position.places[0]
        if place.epoch > position.epoch:
            return None, position
        samples, behind = take(self.feed.order, place, count, stay=True)
        if not len(samples) or (self.drop_last and len(samples) < count):
            return None, self.leave(position)
        moved = Position(
            (behind,), position.step + 1, position.epoch, position.samples + len(samples), None, position.marks
        )
        return (samples, np.zeros(len(samples.rows), np.int64)), moved

    def read_block(self, position: Position, most: int) -> list[tuple[Samples, Position]]:
        """Up to `most` whole steps that lie in one window, each with the position behind it; none if fewer than two do.

        The same as reading them one by one, for less.
        """
        place, order, size = position.places[0], self.feed.order, self.size
        if place.epoch > position.epoch:
            return []
        block = order.some(place, most * size)
        count = len(block) // size
        if count < 2:
            return []
        found: list[tuple[Samples, Position]] = []
        epoch, marks = position.epoch, position.marks
        for number in range(1, count + 1):
            done = number * size
            behind = OrderPosition(epoch, place.window, place.index + done)
            if number == count:
                behind = behind_of(order, place, behind.index, order.size_of(epoch, place.window))
            moved = Position((behind,), position.step + number, epoch, position.samples + done, None, marks)
            found.append((block.slice(done - size, done), moved))
        return found

    def is_over(self, position: Position, count: int) -> bool:
        place = position.places[0]
        if place.epoch > position.epoch:
            return True
        needed = count if self.drop_last else 1  # there may be windows without any
        return left_of(self.feed.order, place, place.epoch + 1, needed - 1) is not None

    def leave(self, position: Position) -> Position:
        if position.places[0].epoch > position.epoch:
            return position
        return position._replace(places=(OrderPosition(position.epoch + 1),))

    def steps_in(self, epoch: int) -> int:
        samples = self.feed.order.count(epoch)
        return samples // self.size if self.drop_last else -(-samples // self.size)

    def seek(self, number: int) -> Position:
        left, epoch = number, 0
        if self._plain:
            steps = self.steps_in(0)
            epoch, left = divmod(number, steps) if steps else (0, 0)
        else:
            while left >= (steps := self.steps_in(epoch)):
                if not steps:
                    raise nothing_to_deliver(self.feed.order.count(epoch), self.size)
                left, epoch = left - steps, epoch + 1
        samples = left * self.size
        place = self.feed.order.place_of(epoch, samples)
        return Position((place,), step=number, epoch=epoch, samples=samples, marks=(OrderPosition(epoch),))

    def jump(self, position: Position, stop: int) -> Position | None:
        """Straight to a later step, if that is arithmetic and the steps so far were all of one size."""
        if not self._plain:
            return None
        here = self.seek(position.step)
        return self.seek(stop) if (here.places, here.epoch) == (position.places, position.epoch) else None

    def find(self, which: int, epoch: int, sample: int) -> tuple[int, int] | None:
        within, slot = divmod(sample, self.size)
        if within >= self.steps_in(epoch):
            return None
        before = epoch * self.steps_in(0) if self._plain else sum(map(self.steps_in, range(epoch)))
        return before + within, slot
