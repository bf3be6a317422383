"""Order in which sources are drawn, such that every source is within one sample of its target at every prefix.

The target of a source after t samples is the sum of its weights so far. With k sources, let a margin be 1 / (2k - 2).
The next sample of a source may be drawn once its target exceeds its count by a margin, and must be drawn before its
target exceeds its count by 1 less a margin: that is its window. Of all sources with an open window, the one whose
window closes first is drawn. This is Tijdeman's rule for the chairman assignment problem. It meets every window, so no
count is ever more than 1 - 1 / (2k - 2) from its target, and no rule does better. (The usual rule, which draws the
source with the largest deficit, is off by more than 1 when there are many sources.)

An order may start with debts, left by an unannounced change of weights. Then windows can be missed. Of the sources that
missed theirs, the one with the largest deficit is drawn, until all windows can be met again.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
import numpy.typing as npt

from penstock.order.schedules import ScheduleSegment, weights_of

_NEVER = 1 << 80
# Longest table of draws: four decimals of weight make a period of 10,000.
_MOST_TABLED = 20_000
_MOST_SKIPPED = 1 << 20
_CHECKPOINT_EVERY = 8192
_REMEMBERED = 4
"""Positions from which drawing goes on without setting it up again."""


@dataclass(frozen=True, slots=True)
class WeightSegment:
    """Segment of samples from `start` on, with constant weights, or with `slopes` by which they change at each step."""

    start: int
    weights: tuple[Fraction, ...]
    slopes: tuple[Fraction, ...] | None = None


def weight_segments(part: ScheduleSegment, samples_per_step: int) -> list[WeightSegment]:
    """Weight segments of a part of a schedule."""
    points = [(step, weights_of(shares)) for step, shares in part.points]
    segments: list[WeightSegment] = []
    for (step, weights), (stop, target) in zip(points, [*points[1:], points[-1]]):
        start = step * samples_per_step
        if part.interpolation == "linear" and weights != target:
            slopes = tuple((there - here) / (stop - step) for here, there in zip(weights, target))
            segments.append(WeightSegment(start, weights, slopes))
        elif not segments or segments[-1].slopes or segments[-1].weights != weights:
            segments.append(WeightSegment(start, weights))
    return segments


class _Run:
    """Drawing in progress: what the rule knows about each source before the sample at `position`."""

    __slots__ = ("closes", "counts", "draws", "gates", "lines", "position", "ready", "recent", "waiting")

    def __init__(self, position: int, counts: list[int]) -> None:
        self.position, self.counts = position, counts
        self.recent = [(position, tuple(counts))]
        """Positions between the last draws, and their counts: drawing may go on from each."""
        self.draws = np.empty(0, np.int64)
        """Sources from the first of these positions on."""
        self.gates: list[int] = []
        """Target at which the window of each source opens."""
        self.closes: list[int] = []
        self.lines: list[tuple[int, int, int, int]] = []
        # A moment and a source in one integer, so that heaps compare fast.
        self.ready: list[int] = []
        self.waiting: list[int] = []


class MixOrder:
    """Source of each sample from `start` on, where each source is `owed` some samples (empty: none).

    All numbers are integers over one denominator. Positions are those of the stream; counts are since `start`.
    """

    def __init__(
        self, segments: Sequence[WeightSegment], start: int, samples_per_step: int, owed: Sequence[Fraction] = ()
    ) -> None:
        self.start, self._step, self._owing = start, samples_per_step, bool(owed)
        self._sources = len(segments[0].weights)
        numbers = [*owed, *(x for segment in segments for x in (*segment.weights, *(segment.slopes or ())))]
        self._drawn = [i for i in range(self._sources) if any(segment.weights[i] for segment in segments)]
        margins = max(2, 2 * len(self._drawn) - 2)
        self._unit = unit = margins * math.lcm(*(number.denominator for number in numbers))
        self._margin = unit // margins
        self._starts = [segment.start for segment in segments]
        self._rates = [[int(x * unit) for x in segment.weights] for segment in segments]
        self._slopes = [segment.slopes and [int(x * unit) for x in segment.slopes] for segment in segments]
        # Targets at the start of each segment, by source.
        self._reached = [[0] for _ in range(self._sources)]
        for n, stop in enumerate(self._starts[1:]):
            for i in range(self._sources):
                self._reached[i].append(self._within(i, n, stop))
        debts = [int(debt * unit) for debt in owed] or [0] * self._sources
        self._offsets = [self._target(i, start) - debt for i, debt in enumerate(debts)]
        self._checkpoints: list[tuple[int, tuple[int, ...]]] = [(start, (0,) * self._sources)]
        self._latest = self._checkpoints[0]
        self._runs: list[_Run] = []
        """Where the last draw ended; drawing on from there costs nothing for sources that are not drawn."""
        self._head, self._period = self._table()

    def walked(self, position: int) -> int:
        """Samples that `counts` draws one by one up to a position, at most: those whose order does not repeat."""
        if self._period is not None:
            return 0
        found = 0
        for segment, (start, stop) in enumerate(zip(self._starts, [*self._starts[1:], _NEVER])):
            length = min(position, stop) - max(self.start, start)
            if length > 0:
                period = _NEVER if self._slopes[segment] else self._period_of(segment)
                found += length if period > _MOST_SKIPPED else min(length, 4 * period)
        return found

    def targets(self, position: int) -> list[Fraction]:
        """Target of each source since `start`, debts included."""
        return [Fraction(self._target(i, position) - self._offsets[i], self._unit) for i in range(self._sources)]

    def whole_targets(self, position: int) -> list[int]:
        """The same without debts, rounded down: cheaper for many sources."""
        start, unit = self.start, self._unit
        return [(self._target(i, position) - self._target(i, start)) // unit for i in range(self._sources)]

    def draw(self, position: int, counts: Sequence[int], count: int) -> npt.NDArray[np.int64]:
        """Sources of the `count` samples at `position`; `counts` have been drawn since `start`."""
        if self._period is None:
            return self._draw_on(position, tuple(counts), count)
        at = np.arange(position - self.start, position - self.start + count)
        head = len(self._head)
        if len(at) and at[-1] >= head:
            at[at >= head] = head - self._period + (at[at >= head] - head) % self._period
        return self._head[at]

    def counts(self, position: int) -> tuple[int, ...]:
        """Samples drawn from each source between `start` and `position`."""
        if self._period is None:
            return self._walk(position)
        at, head = position - self.start, len(self._head)
        periods, rest = divmod(max(0, at - head), self._period)
        low = head - self._period
        found = np.bincount(self._head[:at], minlength=self._sources)
        found += np.bincount(self._head[low : low + rest], minlength=self._sources)
        found += periods * np.bincount(self._head[low:], minlength=self._sources)
        return tuple(found.tolist())

    def _draw_on(self, position: int, counts: tuple[int, ...], count: int) -> npt.NDArray[np.int64]:
        """As `draw`, without a table: continues what was drawn last, if that is known to lead here."""
        try:
            run = self._runs.pop()  # a thread that draws meanwhile begins anew
        except IndexError:
            run = None
        if run is None or (position, counts) not in run.recent:
            run = self._begin(position, list(counts))
        first = run.recent[0][0]
        if (more := position + count - run.position) > 0:
            run.draws = np.concatenate([run.draws, np.array(self._advance(run, more), np.int64)])
            run.recent.append((run.position, tuple(run.counts)))
        found = run.draws[position - first : position - first + count]
        if len(run.recent) > _REMEMBERED:
            del run.recent[:-_REMEMBERED]
            run.draws = run.draws[run.recent[0][0] - first :]
        self._runs[:] = [run]
        return found

    def _table(self) -> tuple[npt.NDArray[np.int64], int | None]:
        """Draws until they repeat, and the number of draws that repeat; None if the table would be too long."""
        last = max(self.start, self._starts[-1])
        period = self._period_of(len(self._starts) - 1)
        empty = np.empty(0, np.int64)
        if self._slopes[-1] or last - self.start > _MOST_TABLED or period > _MOST_TABLED:
            return empty, None
        counts = [0] * self._sources
        draws = self._run(self.start, counts, last - self.start)
        for _ in range(4):
            before = tuple(counts)
            draws += self._run(self.start + len(draws), counts, period)
            if self._is_periodic(len(self._starts) - 1, before, counts, period):
                return np.array(draws, np.int64), period
        return empty, None

    def _walk(self, position: int) -> tuple[int, ...]:
        """Counts without a table: from the nearest checkpoint, in whole periods where draws repeat."""
        at, counts = self._checkpoints[bisect_right(self._checkpoints, position, key=lambda point: point[0]) - 1]
        if at < self._latest[0] <= position:
            at, counts = self._latest
        skipped = -1
        while at < position:
            segment = bisect_right(self._starts, at) - 1
            stop = self._starts[segment + 1] if segment + 1 < len(self._starts) else _NEVER
            period = _NEVER if self._slopes[segment] else self._period_of(segment)
            # A window that is open within the skipped samples must close within the segment: no longer than a period.
            periods = (min(position, stop - period - 2) - at) // period
            if periods > 1 and period <= _MOST_SKIPPED and skipped != segment:
                now = list(counts)
                self._run(at, now, period)
                if self._is_periodic(segment, counts, now, period):
                    counts = tuple(was + (new - was) * periods for was, new in zip(counts, now))
                    at, skipped = at + periods * period, segment
                else:
                    counts, at = tuple(now), at + period
            else:
                now = list(counts)
                count = min(position - at, _CHECKPOINT_EVERY)
                self._run(at, now, count)
                counts, at = tuple(now), at + count
            below = bisect_right(self._checkpoints, at, key=lambda point: point[0]) - 1
            if at - self._checkpoints[below][0] >= _CHECKPOINT_EVERY:
                insort(self._checkpoints, (at, counts))
        self._latest = at, counts
        return counts

    def _run(self, position: int, counts: list[int], count: int) -> list[int]:
        """Next `count` sources; updates `counts`."""
        return self._advance(self._begin(position, counts), count)

    @property
    def _width(self) -> int:
        """Rise of a target between the opening and the closing of a window."""
        return self._unit - 2 * self._margin + 1

    def _begin(self, position: int, counts: list[int]) -> _Run:
        """Drawing from a position on, at which sources were drawn `counts` times; the cost is by sources."""
        run, n, width = _Run(position, counts), self._sources, self._width
        run.gates = [drawn * self._unit + offset + self._margin - 1 for drawn, offset in zip(counts, self._offsets)]
        run.closes = [self._last(i, gate + width) for i, gate in enumerate(run.gates)]
        opens = [self._last(i, run.gates[i]) * n + i for i in self._drawn]
        first = (position + 1) * n
        run.waiting = [opening for opening in opens if opening >= first]
        run.ready = [run.closes[opening % n] * n + opening % n for opening in opens if opening < first]
        heapify(run.waiting)
        heapify(run.ready)
        run.lines = [self._line(i, position) for i in range(n)]
        return run

    def _advance(self, run: _Run, count: int) -> list[int]:
        """Next `count` sources of a run, and the run after them; a sample costs the logarithm of the sources."""
        n, unit, width = self._sources, self._unit, self._width
        counts, gates, closes, lines = run.counts, run.gates, run.closes, run.lines
        waiting, ready = run.waiting, run.ready
        first = (run.position + 1) * n
        drawn_now = []
        for now in range(first, first + count * n, n):
            while waiting and waiting[0] < now:
                i = heappop(waiting) % n
                heappush(ready, closes[i] * n + i)
            if self._owing and (not ready or ready[0] < now):
                self._put_first(ready, waiting, now, counts)
            i = ready[0] % n
            drawn_now.append(i)
            counts[i] += 1
            gates[i] = gate = gates[i] + unit
            start, base, rate, end = lines[i]
            if not base <= gate < end - width:
                start, base, rate, end = lines[i] = self._line(i, now // n)
            if base <= gate < end - width:
                opening = start + (gate - base) // rate
                closing = start + (gate + width - base) // rate
            else:
                opening, closing = self._last(i, gate), self._last(i, gate + width)
            closes[i] = closing
            if opening * n < now + n:
                heapreplace(ready, closing * n + i)
            else:
                heappop(ready)
                heappush(waiting, opening * n + i)
        run.position += count
        return drawn_now

    def _put_first(self, ready: list[int], waiting: list[int], now: int, counts: Sequence[int]) -> None:
        """Make the source with the largest deficit the next of `ready`, where windows were missed."""
        late = [key for key in ready if key < now]
        if len(late) == 1:
            return
        n = self._sources
        # When no window is open, sources that are never drawn again hold the debts: another has to be early.
        chosen = max(late or waiting, key=lambda key: (self._deficit(key % n, now // n, counts), -(key % n)))
        heap = ready if late else waiting
        heap.remove(chosen)
        heapify(heap)
        # Before all others; its true key is computed once it is drawn.
        heappush(ready, chosen % n - (n << 80))

    def _deficit(self, source: int, position: int, counts: Sequence[int]) -> int:
        return self._target(source, position) - self._offsets[source] - counts[source] * self._unit

    def _target(self, source: int, position: int) -> int:
        return self._within(source, bisect_right(self._starts, position) - 1, position)

    def _within(self, source: int, segment: int, position: int) -> int:
        """Target at a position in a segment, or at its end."""
        at = position - self._starts[segment]
        base, rate, slopes = self._reached[source][segment], self._rates[segment][source], self._slopes[segment]
        if not slopes:
            return base + rate * at
        steps, rest = divmod(at, self._step)
        slope = slopes[source]
        return base + self._step * (rate * steps + slope * (steps * (steps - 1) // 2)) + (rate + slope * steps) * rest

    def _line(self, source: int, position: int) -> tuple[int, int, int, int]:
        """Line of a target around a position: its start, its value there, its rise per sample, its last value."""
        segment = bisect_right(self._starts, position) - 1
        start, slopes, last = self._starts[segment], self._slopes[segment], segment + 1 == len(self._starts)
        rate, base = self._rates[segment][source], self._reached[source][segment]
        if slopes:
            steps = (position - start) // self._step
            start, rate = start + steps * self._step, rate + slopes[source] * steps
            base = self._within(source, segment, start)
            end = base + rate * self._step
        else:
            end = base + rate * _NEVER if last else self._reached[source][segment + 1]
        return start, base, rate, end

    def _last(self, source: int, value: int) -> int:
        """Last position at which the target of a source is at most `value`."""
        reached = self._reached[source]
        segment = bisect_right(reached, value) - 1
        if segment < 0:
            return self._starts[0] - 1
        start, slopes = self._starts[segment], self._slopes[segment]
        rate, more = self._rates[segment][source], value - reached[segment]
        if not slopes or not slopes[source]:
            return start + more // rate if rate else _NEVER
        # Steps after which a sum of evenly changing weights reaches `more`: an estimate, then exactly.
        slope, each = slopes[source], more / self._step
        middle = rate - slope / 2
        root = middle + math.sqrt(max(0.0, middle * middle + 2 * slope * each))
        most = (self._starts[segment + 1] - start) // self._step - 1
        steps = min(most, max(0, int(2 * each / root))) if root > 0 else most
        while steps and self._within(source, segment, start + steps * self._step) > value:
            steps -= 1
        while steps < most and self._within(source, segment, start + (steps + 1) * self._step) <= value:
            steps += 1
        at = start + steps * self._step
        return at + (value - self._within(source, segment, at)) // (rate + slope * steps)

    def _period_of(self, segment: int) -> int:
        return self._unit // math.gcd(self._unit, *self._rates[segment])

    def _is_periodic(self, segment: int, before: Sequence[int], after: Sequence[int], period: int) -> bool:
        rates = self._rates[segment]
        return all((new - was) * self._unit == rate * period for was, new, rate in zip(before, after, rates))
