"""All steps of a plan, many at once, on lengths alone: what figures of a plan are counted from.

A single source is planned window by window; a mixture step by step, since what a step draws depends on where each of
its sources is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.order.edits import Reweight
from penstock.order.orders import ChopOrder, Order, PackedOrder
from penstock.order.plan import Plan
from penstock.order.positions import Step
from penstock.order.samples import Samples

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
    chunks = _alone(whole, epochs) if plan.schedule is None else _mixed(whole, epochs, most_steps)
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


def _mixed(plan: Plan, epochs: int, most_steps: int | None) -> Iterator[Chunk]:
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
