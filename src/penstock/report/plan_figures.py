"""Figures of a plan over its steps: mixture, epochs, padding, packing, costs of ranks.

    figures = plan_figures(loader, epochs=2)
    figures.series.padding          # share of padding at up to 200 points
    figures.targets()               # weights of the schedule at the same points

Work is bounded. A plan of up to three million documents is counted whole, and every figure is exact. Of a longer one
the first steps are counted, and steps at even distances over the run are read where arithmetic gives them;
`figures.coverage` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.loaders.base import DataLoader
from penstock.loaders.plan_summary import PlanCounter, PlanSummary, samples_in_epoch
from penstock.loaders.rank_costs import RankCosts
from penstock.order.edits import Reweight
from penstock.order.mixing import Mixture
from penstock.order.plan import Plan, mixture_of
from penstock.order.sample_orders import Order
from penstock.order.statistics import passes_of, step_chunks
from penstock.report.distant_steps import distant_steps, is_limited, total_steps
from penstock.report.step_bins import Floats, Ints, PackedStep, StepBins, StepSeries

MOST_POINTS = 200
MOST_SOURCES = 8
"""Sources that are shown each by itself."""
MOST_DOCUMENTS = 3_000_000
"""Documents, or parts of them, that are counted: a few seconds."""
_STEP_COST = 200
"""Documents that take as long as a step that is read by itself."""
_MOST_EXACT_SOURCES = 256
_LEAST_ENDLESS_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Coverage:
    """Part of a plan that the figures are about."""

    counted: int
    """Steps that were counted one after another from the first, skipped ones included."""
    total: int | None
    """Steps of the plan, skipped ones included; None if only counting would tell."""
    distant: int = 0
    """Steps at even distances over the whole plan that were read instead; 0: the series are of the counted steps."""
    estimate: int | None = None
    """Steps of the plan, estimated from some windows, where `total` is not known."""
    endless: bool = False
    """True if the mixture never ends, and the number of steps was chosen here."""

    @property
    def whole(self) -> bool:
        """True if every step was counted, so that every figure is exact."""
        return self.counted == self.total

    def __str__(self) -> str:
        if self.whole:
            chosen = "; the mixture is endless, and the page stops there" if self.endless else ""
            return f"All {self.counted:,} steps were counted; every figure is exact{chosen}."
        about = "more steps than are counted here" if self.estimate is None else f"about {self.estimate:,} steps"
        total = about if self.total is None else f"{self.total:,} steps"
        first = f"The plan has {total}. Totals are of the first {self.counted:,} steps"
        if self.distant:
            return f"{first}; lines are {self.distant:,} single steps at even distances over the whole run, each exact."
        return f"{first}, and so are lines; epochs of packed sources are estimated from some windows."


@dataclass(frozen=True, slots=True)
class PlanFigures:
    """Figures of a plan."""

    plan: Plan
    summary: PlanSummary
    coverage: Coverage
    series: StepSeries
    examples: list[PackedStep]
    """Steps from all over the series, with the documents in their samples."""
    costs: RankCosts
    epochs: dict[int, Floats]
    """Passes over the largest sources, by their number, up to the end of each point."""

    def targets(self, series: StepSeries | None = None) -> Floats | None:
        """Weight of each source in the samples of each point, (points, sources); None for a single source.

        It is the weight of the schedule, whichever sources have ended. `series` are the same steps in other points.
        """
        mixture, series = mixture_of(self.plan), series or self.series
        if mixture is None:
            return None
        found = np.full(series.drawn.shape, np.nan)
        ends = series.reached.sum(axis=1)
        counts = series.drawn.sum(axis=1)
        for number, (end, count) in enumerate(zip(ends.tolist(), counts.tolist())):
            if count:
                found[number] = (_expected(mixture, end) - _expected(mixture, end - count)) / count
        return found

    def largest_deviation(self) -> tuple[float, int, str]:
        """Samples that a source is furthest from the sum of its weights at the end of a point, the step, the source."""
        mixture = mixture_of(self.plan)
        if mixture is None or not len(self.series):
            return 0.0, 0, self.plan.names[0]
        ends = self.series.reached.sum(axis=1).tolist()
        away = np.abs(self.series.reached - np.array([_expected(mixture, end) for end in ends]))
        point, source = np.unravel_index(int(away.argmax()), away.shape)
        return float(away[point, source]), int(self.series.stop[point]) - 1, self.plan.names[int(source)]

    def epoch_starts(self) -> list[int]:
        """First step of each epoch that was counted."""
        found = [0]
        for epoch in self.summary.epochs[:-1]:
            found.append(found[-1] + epoch.steps + epoch.skipped)
        return found


def plan_figures(
    loader: DataLoader,
    epochs: int = 1,
    *,
    steps: int | None = None,
    backend: str = "",
    points: int = MOST_POINTS,
    most_documents: int = MOST_DOCUMENTS,
) -> PlanFigures:
    """Figures of the first epochs, or of the first `steps`. An endless mixture needs no `steps`: some are chosen."""
    plan, endless = loader.plan, False
    if steps is None and plan.schedule is not None and plan.stopping == "never":
        steps, endless = _endless_steps(plan), True
    counter, bins = PlanCounter(loader, backend), StepBins(plan, points)
    counted, documents, whole, limited = 0, 0, True, is_limited(plan)
    for chunk in step_chunks(plan, epochs, steps):
        if documents >= most_documents:
            whole = False
            break
        bins.add(chunk, counter.add(chunk))
        counted = chunk.first + chunk.steps
        documents += len(chunk.samples.rows) + (_STEP_COST * chunk.steps if limited else 0)
    passes = epochs if whole and plan.schedule is None and steps is None else None
    summary = counter.result(passes, bounded=not whole)
    total = counted if whole else total_steps(plan, epochs, steps)
    series, examples = bins.result()
    distant = 0
    if not whole and total is not None and (found := distant_steps(loader, total, points)) is not None:
        series, examples = found
        distant = len(series)
    passes_by_source = {
        which: _passes(plan.sources[which].order, series.reached[:, which], whole=whole)
        for which in largest_sources(summary, MOST_SOURCES)
    }
    estimate = None
    if total is None and plan.schedule is None:
        estimate = round(samples_in_epoch(plan.sources[0].order) * epochs / plan.global_batch)
    coverage = Coverage(counted, total, distant, estimate, endless)
    return PlanFigures(plan, summary, coverage, series, examples, counter.costs, passes_by_source)


def largest_sources(summary: PlanSummary, most: int) -> Sequence[int]:
    """Numbers of the sources with the most tokens, in the order of the plan."""
    tokens = [source.tokens for source in summary.sources]
    return sorted(sorted(range(len(tokens)), key=lambda which: (-tokens[which], which))[:most])


def _passes(order: Order, reached: Ints, *, whole: bool) -> Floats:
    if order.even is not None:
        return np.asarray(reached / order.total)
    if whole:
        return np.array([passes_of(order, samples) for samples in reached.tolist()])
    return np.asarray(reached / max(samples_in_epoch(order), 1))


def _endless_steps(plan: Plan) -> int:
    """A quarter more steps than up to the last point at which the weights change."""
    assert plan.schedule is not None
    changes = [step for part in plan.schedule.parts for step, _ in part.points]
    changes += [edit.step for edit in plan.edits if isinstance(edit, Reweight)]
    return max(_LEAST_ENDLESS_STEPS, max(changes) * 5 // 4)


def _expected(mixture: Mixture, position: int) -> Floats:
    """Sum of the weights up to a position; in whole samples for very many sources, which is cheaper."""
    if len(mixture.names) > _MOST_EXACT_SOURCES:
        return mixture.expected_whole(position).astype(np.float64)
    return np.array([float(each) for each in mixture.expected(position)])
