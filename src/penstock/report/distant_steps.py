"""Steps at even distances over a plan that is too long to count, where arithmetic gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from penstock.loaders.base import DataLoader
from penstock.loaders.plan_summary import PlanCounter
from penstock.order.edits import Reweight
from penstock.order.mixing import Mixture
from penstock.order.plan import Plan, mixture_of
from penstock.order.sample_orders import Order
from penstock.order.statistics import StepChunk
from penstock.order.steps import interleaved
from penstock.report.step_bins import Ints, PackedStep, StepBins, StepSeries

_MOST_WALKED = 5_000_000
"""Samples of a mixture that are drawn one by one to find a step: about as many microseconds."""
_MOST_SAMPLES = 1_000_000
"""Samples of all distant steps together."""
_LONGEST = 1 << 44


def total_steps(plan: Plan, epochs: int, steps: int | None) -> int | None:
    """Steps of the first epochs, skipped ones included; None where only counting would give them."""
    if not _is_arithmetic(plan):
        return None
    mixture = mixture_of(plan)
    if mixture is None:
        total = plan.steps_in(0) * epochs
    elif plan.stopping == "never":
        return steps
    else:
        found = _mixed_steps(plan, mixture, epochs)
        if found is None:
            return None
        total = found
    return total if steps is None else min(steps, total)


def distant_steps(loader: DataLoader, total: int, points: int) -> tuple[StepSeries, list[PackedStep]] | None:
    """Figures of single steps at even distances; None if finding them takes too long."""
    plan = replace(loader.plan, edits=tuple(edit for edit in loader.plan.edits if isinstance(edit, Reweight)))
    mixture = mixture_of(plan)
    if mixture is not None and mixture.walked(total * plan.global_batch) > _MOST_WALKED:
        return None
    points = min(points, total, max(16, _MOST_SAMPLES // plan.global_batch))
    numbers = np.unique(np.linspace(0, total - 1, points).astype(np.int64)).tolist()
    counter, found, examples, reached = PlanCounter(loader), list[StepSeries](), list[PackedStep](), list[Ints]()
    read: Callable[[int], tuple[StepChunk, Ints]] = _reader(plan, mixture)
    for number in numbers:
        chunk, after = read(number)
        bins = StepBins(loader.plan, 2, first=number)
        bins.add(chunk, counter.add(chunk))
        series, shown = bins.result()
        found.append(series)
        examples += shown
        reached.append(after)
    joined = {name: np.concatenate([getattr(each, name) for each in found]) for name in StepSeries.__slots__}
    return StepSeries(**{**joined, "reached": np.array(reached, np.int64)}), examples


def is_limited(plan: Plan) -> bool:
    """True if a source can be used up, so that steps depend on all steps before them."""
    endless = plan.stopping != "all_exhausted_without_replacement"
    return plan.schedule is not None and not (endless and all(source.max_epochs is None for source in plan.sources))


def _is_arithmetic(plan: Plan) -> bool:
    return not is_limited(plan) and all(source.order.even is not None for source in plan.sources)


def _reader(plan: Plan, mixture: Mixture | None) -> Callable[[int], tuple[StepChunk, Ints]]:
    """Function that gives a step, and the samples drawn from each source up to its end."""
    size, orders = plan.global_batch, [source.order for source in plan.sources]

    def single(number: int) -> tuple[StepChunk, Ints]:
        step = plan.step(number)
        chunk = StepChunk(0, number, np.array([0, len(step)]), step.samples, step.sources)
        within, total = number - step.epoch * plan.steps_in(0), orders[0].total
        reached = total if within + 1 == plan.steps_in(0) else (within + 1) * size
        return chunk, np.array([step.epoch * total + reached])

    def mixed(number: int) -> tuple[StepChunk, Ints]:
        assert mixture is not None
        state = mixture.seek(number * size)
        ids, after = mixture.draw(state, size)
        cursors = [order.position_of(*divmod(count, order.total)) for order, count in zip(orders, state.counts)]
        samples, sources, _ = interleaved(ids, plan.sources, cursors)
        return StepChunk(0, number, np.array([0, size]), samples, sources), np.array(after.counts)

    return single if mixture is None else mixed


def _mixed_steps(plan: Plan, mixture: Mixture, epochs: int) -> int | None:
    """Steps of the first epochs: each ends with the step in which the first source, or the last, was used once."""
    size, orders = plan.global_batch, [source.order for source in plan.sources]
    schedule = mixture.schedule
    last = max(step for part in schedule.parts for step, _ in part.points)
    silent = [not weight for weight in (schedule.weights_at(last)[name] for name in plan.names)]
    done, before = 0, (0,) * len(orders)
    for _ in range(epochs):
        start, base = done, before

        def is_over(steps: int, start: int = start, base: Sequence[int] = base) -> bool:
            counts = mixture.seek((start + steps) * size).counts
            return _has_passed(plan.stopping, orders, counts, base, silent if start + steps >= last else ())

        high = 1
        while not is_over(high):
            high *= 2
            if high > _LONGEST or mixture.walked((done + high) * size) > _MOST_WALKED:
                return None
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_over(middle) else (middle, high)
        done += high
        before = mixture.seek(done * size).counts
    return done


def _has_passed(
    stopping: str, orders: Sequence[Order], counts: Sequence[int], base: Sequence[int], silent: Sequence[bool]
) -> bool:
    passed = [now - then >= order.total for order, now, then in zip(orders, counts, base)]
    if stopping == "first_exhausted":
        return any(passed)
    ended = silent or [False] * len(passed)
    return any(passed) and all(done or out for done, out in zip(passed, ended))
