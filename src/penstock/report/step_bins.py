"""Sums over runs of consecutive steps: a plan of any length as a few hundred points."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.loaders.plan_summary import DeliveredSteps
from penstock.order.plan import Plan
from penstock.order.statistics import StepChunk

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_MOST_DRAWN_SAMPLES, _MOST_DRAWN_DOCUMENTS = 12, 64


@dataclass(frozen=True, slots=True)
class SampleSpan:
    """Sample of a step as it is drawn: the source and the length of its documents, in order."""

    documents: list[tuple[int, int]]
    hidden_documents: int
    hidden_tokens: int
    """Documents that are too many to draw, and their tokens."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """First samples of a step, with the documents in each."""

    number: int
    samples: list[SampleSpan]
    size: int
    """Number of all samples of the step."""
    width: int
    """Tokens that the longest row of the batch has room for, padding included."""


@dataclass(frozen=True, slots=True)
class StepSeries:
    """Figures of a plan by points. A point is the steps `first[i]` to `stop[i]`, all of which were counted."""

    first: Ints
    stop: Ints
    steps: Ints
    """Delivered steps of each point."""
    drawn: Ints
    """Samples drawn from each source, (points, sources), including those that are skipped or fill no batch."""
    reached: Ints
    """Samples drawn from each source up to the end of a point, (points, sources)."""
    tokens: Ints
    """Delivered tokens of each source, (points, sources)."""
    slots: Ints
    """Places for tokens in all batches, padding included."""
    packed: Ints
    room: Ints
    """Tokens in samples that rows are packed into, and the room of these."""
    least_padding: Floats
    most_padding: Floats
    """Padding share of the steps of a point that have the least and the most; NaN without a step."""

    def __len__(self) -> int:
        return len(self.first)

    @property
    def padding(self) -> Floats:
        """Padding share of each point; NaN where nothing was delivered."""
        return 1.0 - _divided(self.tokens.sum(axis=1), self.slots)

    @property
    def packing_efficiency(self) -> Floats:
        """Filled share of the samples that rows are packed into; NaN where there are none."""
        return _divided(self.packed, self.room)

    @property
    def sample_shares(self) -> Floats:
        """Share of each source in the samples drawn, (points, sources)."""
        return _divided(self.drawn, self.drawn.sum(axis=1, keepdims=True))

    @property
    def token_shares(self) -> Floats:
        """Share of each source in the delivered tokens, (points, sources)."""
        return _divided(self.tokens, self.tokens.sum(axis=1, keepdims=True))

    def grouped(self, most: int) -> StepSeries:
        """The same figures in at most `most` points, each the sum of neighbours."""
        width = -(-len(self) // most) or 1
        if width == 1:
            return self
        starts = np.arange(0, len(self), width)
        ends = np.minimum(starts + width, len(self)) - 1
        sums = {
            name: np.add.reduceat(getattr(self, name), starts, axis=0)
            for name in ("steps", "drawn", "tokens", "slots", "packed", "room")
        }
        return StepSeries(
            first=self.first[starts],
            stop=self.stop[ends],
            reached=self.reached[ends],
            least_padding=np.fmin.reduceat(self.least_padding, starts),
            most_padding=np.fmax.reduceat(self.most_padding, starts),
            **sums,
        )


class StepBins:
    """Sums over runs of `width` steps from `first` on. The width doubles whenever there would be over `most` runs."""

    def __init__(self, plan: Plan, most: int, *, first: int = 0) -> None:
        if most < 2 or most % 2:
            raise ValueError(f"most must be even and at least 2, got {most}")
        self.width, self._most, self._count, self._first = 1, most, 0, first
        sources = len(plan.sources)
        self._capacities = np.array([source.order.capacity or 0 for source in plan.sources], np.int64)
        self._drawn, self._tokens = np.zeros((2, most, sources), np.int64)
        self._steps, self._slots, self._packed, self._room = np.zeros((4, most), np.int64)
        self._least, self._most_padding = np.full(most, np.nan), np.full(most, np.nan)
        self._examples: dict[int, PackedStep] = {}

    def add(self, chunk: StepChunk, delivered: DeliveredSteps | None) -> None:
        """Count a chunk of steps, and what is delivered of it."""
        last = chunk.first + max(chunk.steps, 1) - 1
        if chunk.left_over:
            last = max(chunk.first - 1, 0)  # what fills no batch is drawn after the last step
        while (last - self._first) // self.width >= self._most:
            self._halve()
        self._count = max(self._count, (last - self._first) // self.width + 1)
        first = chunk.sources[chunk.samples.offsets[:-1]]
        numbers = np.full(len(first), last)
        if not chunk.left_over:
            numbers = np.repeat(chunk.first + np.arange(chunk.steps), np.diff(chunk.bounds))
        self._drawn += self._by_source(self._bins(numbers), first)
        if delivered is not None and len(delivered.numbers):
            self._deliver(delivered)

    def _deliver(self, delivered: DeliveredSteps) -> None:
        samples, sources = delivered.samples, delivered.sources
        bins, slots = self._bins(delivered.numbers), delivered.slots.sum(axis=1)
        of_sample = np.repeat(bins, np.diff(delivered.bounds))
        of_part = of_sample[samples.numbers()]
        self._tokens += self._by_source(of_part, sources, samples.lengths)
        self._steps += np.bincount(bins, minlength=self._most)
        np.add.at(self._slots, bins, slots)
        sizes = samples.sizes()
        tokens = np.zeros(len(bins), np.int64)
        np.add.at(tokens, np.repeat(np.arange(len(bins)), np.diff(delivered.bounds)), sizes)
        padding = 1.0 - tokens / slots
        np.fmin.at(self._least, bins, padding)
        np.fmax.at(self._most_padding, bins, padding)
        packing = self._capacities[sources] > 0
        np.add.at(self._packed, of_part[packing], samples.lengths[packing])
        full = np.flatnonzero(np.diff(samples.offsets) > 0)
        capacities = self._capacities[sources[samples.offsets[:-1][full]]]
        np.add.at(self._room, of_sample[full], capacities)
        for number in np.unique(bins, return_index=True)[1].tolist():
            if (at := int(bins[number])) not in self._examples:
                self._examples[at] = _example(delivered, number)

    def result(self) -> tuple[StepSeries, list[PackedStep]]:
        """The points, and the first delivered step of each."""
        count, first = self._count, self._first + np.arange(self._count) * self.width
        series = StepSeries(
            first,
            first + self.width,
            self._steps[:count],
            self._drawn[:count],
            self._drawn[:count].cumsum(axis=0),
            self._tokens[:count],
            self._slots[:count],
            self._packed[:count],
            self._room[:count],
            self._least[:count],
            self._most_padding[:count],
        )
        return series, [self._examples[at] for at in sorted(self._examples)]

    def _bins(self, numbers: Ints) -> Ints:
        return np.asarray((numbers - self._first) // self.width)

    def _by_source(self, bins: Ints, sources: Ints, amounts: Ints | None = None) -> Ints:
        """Amounts by run and source; without amounts, their number."""
        flat = bins * self._drawn.shape[1] + sources
        if amounts is None:
            return np.bincount(flat, minlength=self._drawn.size).reshape(self._drawn.shape)
        found = np.zeros(self._drawn.size, np.int64)
        np.add.at(found, flat, amounts)
        return found.reshape(self._drawn.shape)

    def _halve(self) -> None:
        self.width, half = self.width * 2, self._most // 2
        for sums in (self._drawn, self._tokens, self._steps, self._slots, self._packed, self._room):
            sums[:half] = sums[0::2] + sums[1::2]
            sums[half:] = 0
        for extremes, join in ((self._least, np.fmin), (self._most_padding, np.fmax)):
            extremes[:half] = join(extremes[0::2], extremes[1::2])
            extremes[half:] = np.nan
        kept: dict[int, PackedStep] = {}
        for at in sorted(self._examples):
            kept.setdefault(at // 2, self._examples[at])
        self._examples, self._count = kept, -(-self._count // 2)


def _example(delivered: DeliveredSteps, index: int) -> PackedStep:
    low, high = delivered.bounds[index : index + 2].tolist()
    samples, offsets = delivered.samples, delivered.samples.offsets
    spans: list[SampleSpan] = []
    for number in range(low, min(high, low + _MOST_DRAWN_SAMPLES)):
        start, stop = int(offsets[number]), int(offsets[number + 1])
        cut = min(stop, start + _MOST_DRAWN_DOCUMENTS)
        documents = list(zip(delivered.sources[start:cut].tolist(), samples.lengths[start:cut].tolist()))
        spans.append(SampleSpan(documents, stop - cut, int(samples.lengths[cut:stop].sum())))
    ranks = delivered.slots.shape[1]
    rows = max(high - low, 1)
    width = int(delivered.slots[index].sum()) // rows if ranks else 0
    return PackedStep(int(delivered.numbers[index]), spans, high - low, width)


def _divided(part: Ints, whole: Ints) -> Floats:
    found = np.full(np.broadcast_shapes(part.shape, whole.shape), np.nan)
    np.divide(part, whole, out=found, where=whole != 0)
    return found
