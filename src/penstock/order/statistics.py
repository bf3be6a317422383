"""All steps of a plan, many at once, on lengths alone: what figures of a plan are counted from.

A single source is planned window by window, a mixture in blocks of steps; only where sources end for good, step by
step, since what a step draws then depends on what is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.order.edits import Reweight
from penstock.order.mixing import Mixture
from penstock.order.plan import Plan
from penstock.order.positions import Step, take
from penstock.order.sample_orders import ChopOrder, Order, OrderPosition, PackedOrder
from penstock.order.samples import Samples
from penstock.order.schedules import Schedule

__all__ = ["Chunk", "capacity_of", "chunks_of", "passes_of"]

Ints = npt.NDArray[np.int64]
_STEPS_AT_ONCE = 256
_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some steps of one epoch: step `first + i` holds the samples `bounds[i]` to `bounds[i + 1]`."""

    epoch: int
    first: int
    bounds: Ints
    samples: Samples
    sources: Ints
    """Of each part."""
    left_over: bool = False
    """Samples at the end of an epoch that fill no batch and are dropped; there are no steps then."""

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1

    def drawn(self, sources: int) -> Ints:
        """Samples of each source."""
        return np.bincount(self.sources[self.samples.offsets[:-1]], minlength=sources)

    def step_of_part(self) -> Ints:
        return self.first + np.searchsorted(self.bounds, self.samples.numbers(), side="right") - 1


def chunks_of(plan: Plan, epochs: int, most_steps: int | None = None) -> Iterator[Chunk]:
    """All steps of the first epochs, those skipped and rows banned included, up to `most_steps` of them."""
    whole = replace(plan, edits=()).edited(*(edit for edit in plan.edits if isinstance(edit, Reweight)))
    if plan.schedule is None:
        chunks = _alone(whole, epochs)
    elif _ends_for_good(plan):
        chunks = _step_by_step(whole, epochs, most_steps)
    else:
        chunks = _mixed(whole, plan.schedule, epochs, most_steps)
    for chunk in chunks:
        if most_steps is None or chunk.first + chunk.steps <= most_steps:
            yield chunk
        else:
            if (left := most_steps - chunk.first) > 0:
                yield _beginning(chunk, left)
            return


def capacity_of(order: Order) -> int | None:
    """Tokens that a sample has room for, where rows are put together; None where a row is a sample."""
    if isinstance(order, PackedOrder):
        return order.capacity
    return order.length if isinstance(order, ChopOrder) else None


def passes_of(order: Order, samples: int) -> float:
    """How often so many samples are all of a source."""
    epoch = 0
    while samples >= (count := order.count(epoch)) > 0:
        samples, epoch = samples - count, epoch + 1
    return epoch + samples / count if count else 0.0


def _alone(plan: Plan, epochs: int) -> Iterator[Chunk]:
    order, size, step = plan.feeds[0].order, plan.global_batch, 0
    for epoch in range(epochs):
        waiting: list[Samples] = []
        for window in range(order.windows):
            waiting.append(order.plan_window(epoch, window))
            if sum(map(len, waiting)) < max(size, _SAMPLES_AT_ONCE) and window + 1 < order.windows:
                continue
            samples = Samples.concat(waiting)
            whole = len(samples) // size
            if whole:
                yield _cut(epoch, step, samples.slice(0, whole * size), size)
                step += whole
            waiting = [samples.slice(whole * size, len(samples))]
        rest = Samples.concat(waiting)
        if not len(rest):
            continue
        chunk = _cut(epoch, step, rest, size)
        if plan.drop_last:
            yield replace(chunk, bounds=chunk.bounds[:1], left_over=True)
        else:
            yield chunk
            step += 1


def _cut(epoch: int, first: int, samples: Samples, size: int) -> Chunk:
    bounds = np.append(np.arange(0, len(samples), size, dtype=np.int64), len(samples))
    return Chunk(epoch, first, bounds, samples, np.zeros(len(samples.rows), np.int64))


def _ends_for_good(plan: Plan) -> bool:
    """Whether a source may drop out of the mixture."""
    return plan.stopping == "all_exhausted_without_replacement" or any(feed.max_epochs for feed in plan.feeds)


def _mixed(plan: Plan, schedule: Schedule, epochs: int, most_steps: int | None) -> Iterator[Chunk]:
    for edit in plan.edits:
        if isinstance(edit, Reweight):
            schedule = schedule.with_change(edit.step, edit.weights)
    mixture, size = Mixture(plan.names, schedule, plan.global_batch), plan.global_batch
    block = max(_SAMPLES_AT_ONCE // size, 1) * size
    orders = [feed.order for feed in plan.feeds]
    drawn, places, epoch, step = mixture.start(), [OrderPosition()] * len(orders), 0, 0
    marks = places
    while epoch < epochs and (most_steps is None or step < most_steps):
        ids, behind = mixture.draw(drawn, block)
        end = _end_of_epoch(plan.stopping, ids, orders, places, marks)
        if end is not None:
            # The step in which the epoch ends is its last.
            ids, behind = mixture.draw(drawn, -(-end // size) * size)
        samples, sources, places = _taken(ids, orders, places)
        yield Chunk(epoch, step, np.arange(0, len(ids) + 1, size), samples, sources)
        drawn, step = behind, step + len(ids) // size
        if end is not None:
            epoch, marks = epoch + 1, places


def _end_of_epoch(
    stopping: str, ids: Ints, orders: Sequence[Order], places: Sequence[OrderPosition], marks: Sequence[OrderPosition]
) -> int | None:
    """After how many of these samples the first source, or the last, has been used once; None if it goes on."""
    if stopping == "never":
        return None
    ends: list[int] = []
    for number, (order, place, mark) in enumerate(zip(orders, places, marks, strict=True)):
        own = np.flatnonzero(ids == number)
        left = _samples_until(order, place, mark._replace(epoch=mark.epoch + 1), len(own))
        if left is not None:
            ends.append(int(own[left - 1]) + 1 if left else 0)
    if stopping == "first_exhausted":
        return min(ends, default=None)
    return max(ends) if len(ends) == len(orders) else None


def _samples_until(order: Order, place: OrderPosition, target: OrderPosition, most: int) -> int | None:
    """Samples of a source from a place on until it is at another, or past it; None if there are more than `most`."""
    count = 0
    while (place.epoch, place.window) < (target.epoch, target.window):
        count += order.size_of(place.epoch, place.window) - place.index
        if count > most:
            return None
        last = place.window + 1 == order.windows
        place = OrderPosition(place.epoch + 1) if last else OrderPosition(place.epoch, place.window + 1)
    if (place.epoch, place.window) == (target.epoch, target.window) and place.index < target.index:
        # Windows of another epoch may have fewer samples; past the last of them is past the target.
        count += min(target.index, order.size_of(place.epoch, place.window)) - place.index
    return None if count > most else count


def _taken(
    ids: Ints, orders: Sequence[Order], places: Sequence[OrderPosition]
) -> tuple[Samples, Ints, list[OrderPosition]]:
    """The samples of some draws, the source of each of their parts, and the places behind them."""
    found = [
        take(order, place, int(np.count_nonzero(ids == number)), stay=False)
        for number, (order, place) in enumerate(zip(orders, places, strict=True))
    ]
    # The k-th sample drawn from a source is the k-th that was taken of it.
    which = np.empty(len(ids), np.int64)
    which[np.argsort(ids, kind="stable")] = np.arange(len(ids))
    samples = Samples.concat([samples for samples, _ in found]).take(which)
    return samples, np.repeat(ids, np.diff(samples.offsets)), [place for _, place in found]


def _step_by_step(plan: Plan, epochs: int, most_steps: int | None) -> Iterator[Chunk]:
    position, found = plan.start(), list[Step]()
    while position.epoch < epochs and (most_steps is None or position.step < most_steps):
        step, behind = plan.read(position)
        if step is not None:
            found.append(step)
        if found and (step is None or len(found) == _STEPS_AT_ONCE):
            yield _together(found)
            found = []
        if step is None and (plan.ended(behind) or position.at_start):
            return
        position = plan.next_epoch(behind) if step is None else behind
    if found:
        yield _together(found)


def _together(steps: list[Step]) -> Chunk:
    bounds = np.cumsum([0, *map(len, steps)])
    samples = Samples.concat([step.samples for step in steps])
    return Chunk(steps[0].epoch, steps[0].number, bounds, samples, np.concatenate([step.sources for step in steps]))


def _beginning(chunk: Chunk, steps: int) -> Chunk:
    samples = chunk.samples.slice(0, int(chunk.bounds[steps]))
    return replace(chunk, bounds=chunk.bounds[: steps + 1], samples=samples, sources=chunk.sources[: len(samples.rows)])
