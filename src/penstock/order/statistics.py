"""Steps of a plan in large chunks, on lengths alone: what the summary of a plan is counted from.

A single source is planned window by window and a mixture in blocks of steps. Where sources are used up, what a step
draws depends on what is left, so such plans are read step by step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.order.edits import Reweight
from penstock.order.mixing import Mixture
from penstock.order.plan import Plan, mixture_of
from penstock.order.positions import Step
from penstock.order.sample_orders import Order, OrderPosition
from penstock.order.samples import Samples
from penstock.order.steps import interleaved, next_epoch

Ints = npt.NDArray[np.int64]
_STEPS_AT_ONCE = 256
_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class StepChunk:
    """Consecutive steps of one epoch: step `first + i` holds the samples `bounds[i]` to `bounds[i + 1]`."""

    epoch: int
    first: int
    bounds: Ints
    samples: Samples
    sources: Ints
    """Source of each part."""
    left_over: bool = False
    """True for samples at the end of an epoch that fill no batch and are dropped; such a chunk has no steps."""

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1

    def drawn(self, sources: int) -> Ints:
        """Number of samples from each source."""
        return np.bincount(self.sources[self.samples.offsets[:-1]], minlength=sources)


def step_chunks(plan: Plan, epochs: int, most_steps: int | None = None) -> Iterator[StepChunk]:
    """Steps of the first epochs, up to `most_steps`, including skipped steps and banned rows."""
    plan = replace(plan, edits=tuple(edit for edit in plan.edits if isinstance(edit, Reweight)))
    mixture = mixture_of(plan)
    if mixture is None:
        chunks = _single(plan, epochs)
    elif plan.stopping == "all_exhausted_without_replacement" or any(source.max_epochs for source in plan.sources):
        chunks = _step_by_step(plan, epochs, most_steps)
    else:
        chunks = _mixed(plan, mixture, epochs, most_steps)
    for chunk in chunks:
        if most_steps is None or chunk.first + chunk.steps <= most_steps:
            yield chunk
            continue
        if (steps := most_steps - chunk.first) > 0:
            samples = chunk.samples.slice(0, int(chunk.bounds[steps]))
            sources = chunk.sources[: len(samples.rows)]
            yield replace(chunk, bounds=chunk.bounds[: steps + 1], samples=samples, sources=sources)
        return


def passes_of(order: Order, samples: int) -> float:
    """Passes over a source that a number of samples makes."""
    epoch = 0
    while samples >= (count := order.count(epoch)) > 0:
        samples, epoch = samples - count, epoch + 1
    return epoch + samples / count if count else 0.0


def _single(plan: Plan, epochs: int) -> Iterator[StepChunk]:
    order, size, step = plan.sources[0].order, plan.global_batch, 0
    for epoch in range(epochs):
        pending: list[Samples] = []
        for window in range(order.windows):
            pending.append(order.plan_window(epoch, window))
            if sum(map(len, pending)) < max(size, _SAMPLES_AT_ONCE) and window + 1 < order.windows:
                continue
            samples = Samples.concat(pending)
            whole = len(samples) // size
            if whole:
                yield _cut(epoch, step, samples.slice(0, whole * size), size)
                step += whole
            pending = [samples.slice(whole * size, len(samples))]
        rest = Samples.concat(pending)
        if not len(rest):
            continue
        chunk = _cut(epoch, step, rest, size)
        if plan.drop_last:
            yield replace(chunk, bounds=chunk.bounds[:1], left_over=True)
        else:
            yield chunk
            step += 1


def _cut(epoch: int, first: int, samples: Samples, size: int) -> StepChunk:
    bounds = np.append(np.arange(0, len(samples), size, dtype=np.int64), len(samples))
    return StepChunk(epoch, first, bounds, samples, np.zeros(len(samples.rows), np.int64))


def _mixed(plan: Plan, mixture: Mixture, epochs: int, most_steps: int | None) -> Iterator[StepChunk]:
    size, orders = plan.global_batch, [source.order for source in plan.sources]
    block = max(_SAMPLES_AT_ONCE // size, 1) * size
    drawn, epoch, step = mixture.start(), 0, 0
    epoch_starts = cursors = (OrderPosition(),) * len(orders)
    while epoch < epochs and (most_steps is None or step < most_steps):
        ids, following = mixture.draw(drawn, block)
        end = _end_of_epoch(plan.stopping, ids, orders, cursors, epoch_starts)
        if end is not None:
            # The step in which the epoch ends is its last.
            ids, following = mixture.draw(drawn, -(-end // size) * size)
        samples, sources, cursors = interleaved(ids, plan.sources, cursors)
        yield StepChunk(epoch, step, np.arange(0, len(ids) + 1, size), samples, sources)
        drawn, step = following, step + len(ids) // size
        if end is not None:
            epoch, epoch_starts = epoch + 1, cursors


def _end_of_epoch(
    stopping: str,
    ids: Ints,
    orders: Sequence[Order],
    cursors: Sequence[OrderPosition],
    epoch_starts: Sequence[OrderPosition],
) -> int | None:
    """Number of these samples after which the first source, or the last, was used once; None if the epoch goes on."""
    if stopping == "never":
        return None
    ends: list[int] = []
    for number, (order, cursor, start) in enumerate(zip(orders, cursors, epoch_starts, strict=True)):
        own = np.flatnonzero(ids == number)
        left = _samples_until(order, cursor, start._replace(epoch=start.epoch + 1), len(own))
        if left is not None:
            ends.append(int(own[left - 1]) + 1 if left else 0)
    if stopping == "first_exhausted":
        return min(ends, default=None)
    return max(ends) if len(ends) == len(orders) else None


def _samples_until(order: Order, cursor: OrderPosition, target: OrderPosition, most: int) -> int | None:
    """Samples of a source from a cursor up to a target; None if there are more than `most`."""
    count = 0
    while cursor[:2] < target[:2]:
        count += order.size_of(cursor.epoch, cursor.window) - cursor.index
        if count > most:
            return None
        last = cursor.window + 1 == order.windows
        cursor = OrderPosition(cursor.epoch + 1) if last else OrderPosition(cursor.epoch, cursor.window + 1)
    if cursor[:2] == target[:2] and cursor.index < target.index:
        # Windows of another epoch may have fewer samples; past the last of them is past the target.
        count += min(target.index, order.size_of(cursor.epoch, cursor.window)) - cursor.index
    return None if count > most else count


def _step_by_step(plan: Plan, epochs: int, most_steps: int | None) -> Iterator[StepChunk]:
    position, found = plan.start(), list[Step]()
    while position.epoch < epochs and (most_steps is None or position.step < most_steps):
        step, following = plan.read(position)
        if step is not None:
            found.append(step)
        if found and (step is None or len(found) == _STEPS_AT_ONCE):
            yield _joined(found)
            found = []
        if step is None and (plan.ended(following) or position.at_start):
            return
        position = next_epoch(following) if step is None else following
    if found:
        yield _joined(found)


def _joined(steps: list[Step]) -> StepChunk:
    bounds = np.cumsum([0, *map(len, steps)])
    samples = Samples.concat([step.samples for step in steps])
    return StepChunk(steps[0].epoch, steps[0].number, bounds, samples, np.concatenate([step.sources for step in steps]))
