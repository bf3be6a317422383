"""Mixture of sources: the source of each sample of a mixed stream.

    mixture = Mixture(["web", "code"], Schedule.constant({"web": 0.9, "code": 0.1}), samples_per_step=512)
    sources, drawn = mixture.draw(mixture.start(), 512)     # array of 0 and 1; drawn.counts: samples of each source

At every prefix, each of k sources is within 1 - 1 / (2k - 2) of a sample of its target, the sum of its weights so far,
for every schedule (see `mix_order`). Two unannounced events start a new segment:

A change (`Schedule.with_change`) keeps every count, so nothing is lost or repeated. The deviation of each source at
that moment is carried over and evened out. Until then, deviations may be larger: not with two sources, below 1 with
three, above with many. No rule without knowledge of the future avoids this: changing the weights after every sample, in
favour of what was not drawn, drives one of k sources 1/2 + 1/3 + ... + 1/k below its target.

A source that reaches its limit drops out. The others share by their weights, with targets that start at their counts.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, ResumeError
from penstock.order.mix_order import MixOrder, weight_segments
from penstock.order.schedules import Schedule, ScheduleSegment

Limits = Sequence[int | None]

_FINEST_DEBT = 1 << 64


@dataclass(frozen=True, slots=True)
class Drawn:
    """State of a mixed stream: `counts` of each source, which sum to `position`, and what resuming needs.

    Targets are counted since `start`, where the counts were `base` and each source was `owed` some samples (empty:
    none). The sources `out` have reached their limit.
    """

    position: int
    counts: tuple[int, ...]
    start: int
    base: tuple[int, ...]
    owed: tuple[Fraction, ...] = ()
    out: tuple[int, ...] = ()

    def to_json(self) -> list[Any]:
        """Integers and lists of them; 30 bytes and about 20 for each source, twice that after a change."""
        unit = math.lcm(*(debt.denominator for debt in self.owed))
        owed = [unit, *(int(debt * unit) for debt in self.owed)] if self.owed else []
        base = list(self.base) if self.start else []
        return [self.position, list(self.counts), self.start, base, owed, list(self.out)]

    @classmethod
    def from_json(cls, data: Any) -> Drawn:
        """State from the result of `to_json`."""
        try:
            position, counts, start, base, owed, out = data
            debts = tuple(Fraction(debt, owed[0]) for debt in owed[1:])
            return cls(position, tuple(counts), start, tuple(base) or (0,) * len(counts), debts, tuple(out)).checked()
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as e:
            if isinstance(e, ResumeError):
                raise
            raise ResumeError(f"not the state of a mixture: {e}; expected what Drawn.to_json() returns") from None

    def checked(self) -> Drawn:
        """The same; an error if it is no state of any mixture."""
        count = len(self.counts)
        valid = all(type(n) is int and n >= 0 for n in (self.position, self.start, *self.counts, *self.base, *self.out))
        if not valid or not (
            sum(self.counts) == self.position
            and sum(self.base) == self.start
            and len(self.base) == count
            and len(self.owed) in (0, count)
            and all(here <= now for here, now in zip(self.base, self.counts))
            and all(source < count for source in self.out)
        ):
            shown = [self.position, list(self.counts), self.start, list(self.base)]
            raise ResumeError(f"damaged state of a mixture: {shown!r:.400}; its counts do not match its position")
        return self


class Mixture:
    """Stream of several sources, mixed by the weights of a schedule: a pure function of the position.

    Weights are constant within a step of `samples_per_step` samples. A source whose weight a schedule lowers to 0 may
    still give the one sample it owes; after a change to 0 it gives none.

    With constant weights of a common denominator of at most 20,000, the order repeats, and drawing and seeking look it
    up. Otherwise drawing takes about a microsecond a sample. A `seek` skips periods between the points of a schedule;
    where nothing repeats, it takes as long as drawing (from a checkpoint the next time).
    """

    def __init__(self, names: Sequence[str], schedule: Schedule, samples_per_step: int) -> None:
        self.names, self.schedule, self.samples_per_step = tuple(names), schedule, samples_per_step
        known, place = frozenset(self.names), {name: at for at, name in enumerate(schedule.names)}
        if len(known) != len(self.names):
            raise ConfigError(f"source names must differ, got {list(self.names)!r}")
        for name in schedule.names:
            if name not in known:
                hint = did_you_mean(name, self.names)
                raise ConfigError(f"weight for unknown source {name!r}{hint}; the sources are {list(self.names)}")
        for name in self.names:
            if name not in place:
                raise ConfigError(
                    f"no weight for source {name!r}; the schedule has weights for {list(schedule.names)}; give every "
                    "source a weight (0 for one that is not drawn)"
                )
        if not isinstance(samples_per_step, int) or samples_per_step < 1:
            raise ConfigError(f"samples_per_step must be a positive integer, got {samples_per_step!r}")
        order = [place[name] for name in self.names]
        self._parts = [
            ScheduleSegment(
                tuple((step, tuple(shares[i] for i in order)) for step, shares in part.points), part.interpolation
            )
            for part in schedule.parts
        ]
        self._changes = [part.step * samples_per_step for part in self._parts]
        self._order = lru_cache(maxsize=32)(self._make_order)
        self._current: tuple[tuple[int, int], Any, Any, MixOrder | None] | None = None
        """The order of the last draw, found without hashing what is owed to all sources."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Cached orders are not pickled.
        return Mixture, (self.names, self.schedule, self.samples_per_step)

    def start(self) -> Drawn:
        """State before the first sample."""
        nothing = (0,) * len(self.names)
        return Drawn(0, nothing, 0, nothing)

    def draw(self, state: Drawn, count: int, limits: Limits | None = None) -> tuple[npt.NDArray[np.int64], Drawn]:
        """Sources of the next `count` samples, and the state after them.

        `limits` are the most samples of each source in all (None: no limit). Once every source has reached its limit,
        the array is shorter than `count`. Drawing at once or one by one gives the same result.
        """
        self._check(state, limits)
        if count < 0:
            raise ConfigError(f"cannot draw {count} samples; give a count of at least 0")
        pieces = [np.empty(0, np.int64)]
        stop = state.position + count
        while state.position < stop:
            state, order = self._settle(state, limits)
            if order is None:
                break
            wanted = min(stop, self._next_change(state.position)) - state.position
            relative: Sequence[int] = state.counts
            if state.start:
                relative = [now - then for now, then in zip(state.counts, state.base)]
            sources = order.draw(state.position, relative, wanted)
            for i, left in _near(state, limits or (), wanted):
                sources = sources[: _end_of(sources, i, left)]
            pieces.append(sources)
            state = self._moved(state, sources)
        return np.concatenate(pieces), state

    def seek(self, position: int, limits: Limits | None = None) -> Drawn:
        """State at a position, or at the end of the stream if `limits` end it earlier."""
        state = self.start()
        self._check(state, limits)
        if position < 0:
            raise ConfigError(f"cannot seek to position {position}; give one of at least 0")
        while state.position < position:
            state, order = self._settle(state, limits)
            if order is None:
                break
            stop = min(position, self._next_change(state.position))
            counts = self._counts_at(state, order, stop)
            if limits is not None and _reached(counts, limits, state.out):
                low, high = state.position, stop
                while high - low > 1:
                    middle = (low + high) // 2
                    reached = _reached(self._counts_at(state, order, middle), limits, state.out)
                    low, high = (low, middle) if reached else (middle, high)
                stop, counts = high, self._counts_at(state, order, high)
            state = replace(state, position=stop, counts=counts)
        return state

    def targets(self, state: Drawn) -> tuple[Fraction, ...]:
        """Exact target of each source: the sum of its weights so far, counted anew after a source drops out."""
        order = self._order(self._part_at(state.start), state.start, state.owed, state.out)
        if order is None:
            return tuple(map(Fraction, state.base))
        return tuple(base + more for base, more in zip(state.base, order.targets(state.position)))

    def expected(self, position: int) -> list[Fraction]:
        """Sum of the weights of each source up to a position, whatever was drawn and whichever sources ended."""
        found = [Fraction(0)] * len(self.names)
        for order, stop in self._plain_orders(position):
            found = [before + more for before, more in zip(found, order.targets(stop))]
        return found

    def expected_whole(self, position: int) -> npt.NDArray[np.int64]:
        """About the same in whole samples, rounded down at every change: cheaper for many sources."""
        found = np.zeros(len(self.names), np.int64)
        for order, stop in self._plain_orders(position):
            found += np.array(order.whole_targets(stop), np.int64)
        return found

    def walked(self, position: int) -> int:
        """Samples that a `seek` draws one by one, at most: about a microsecond each."""
        return sum(order.walked(stop) for order, stop in self._plain_orders(position))

    def _plain_orders(self, position: int) -> Iterator[tuple[MixOrder, int]]:
        """Order of each part of the schedule up to a position, without debts, and the end of the part."""
        for part, start in enumerate(self._changes):
            stop = min(position, self._next_change(start))
            if start < stop and (order := self._order(part, start, (), ())) is not None:
                yield order, stop

    @staticmethod
    def debts(owed: Sequence[Fraction]) -> tuple[Fraction, ...]:
        """Debts as a state keeps them; none if nothing is owed."""
        return _short(owed) if any(owed) else ()

    def _settle(self, state: Drawn, limits: Limits | None) -> tuple[Drawn, MixOrder | None]:
        """State at the start of a new segment, if a change or a limit is at this position; and the segment's order."""
        part = self._part_at(state.position)
        if part != self._part_at(state.start):
            owed = self.debts([target - count for target, count in zip(self.targets(state), state.counts)])
            state = replace(state, start=state.position, base=state.counts, owed=owed)
        if limits is not None and (full := _reached(state.counts, limits, state.out)):
            out = tuple(sorted((*state.out, *full)))
            state = replace(state, start=state.position, base=state.counts, owed=(), out=out)
        current = self._current
        if current is None or current[0] != (part, state.start) or current[1:3] != (state.owed, state.out):
            order = self._order(part, state.start, state.owed, state.out)
            current = self._current = (part, state.start), state.owed, state.out, order
        return state, current[3]

    def _make_order(self, part: int, start: int, owed: tuple[Fraction, ...], out: tuple[int, ...]) -> MixOrder | None:
        gone = set(out)
        left = self._parts[part].only(i for i in range(len(self.names)) if i not in gone)
        if left is None:
            return None
        return MixOrder(weight_segments(left, self.samples_per_step), start, self.samples_per_step, owed)

    def _part_at(self, position: int) -> int:
        return bisect_right(self._changes, position) - 1

    def _next_change(self, position: int) -> int:
        following = self._part_at(position) + 1
        return self._changes[following] if following < len(self._changes) else 1 << 80

    def _counts_at(self, state: Drawn, order: MixOrder, position: int) -> tuple[int, ...]:
        return tuple(then + more for then, more in zip(state.base, order.counts(position)))

    def _moved(self, state: Drawn, sources: npt.NDArray[np.int64]) -> Drawn:
        counts = list(state.counts)
        for source, more in zip(*(found.tolist() for found in np.unique(sources, return_counts=True))):
            counts[source] += more
        return replace(state, position=state.position + len(sources), counts=tuple(counts))

    def _check(self, state: Drawn, limits: Limits | None) -> None:
        if len(state.counts) != len(self.names):
            raise ResumeError(
                f"the state has {len(state.counts)} sources, and this mixture {len(self.names)}: {list(self.names)}"
            )
        if limits is None:
            return
        if len(limits) != len(self.names):
            raise ConfigError(f"limits must have one entry for each of {len(self.names)} sources, got {len(limits)}")
        for name, limit in zip(self.names, limits):
            if limit is not None and limit < 0:
                raise ConfigError(f"the limit of source {name!r} must be at least 0 or None, got {limit!r}")


def _short(debts: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """Debts rounded to 2**-64 where a common denominator would have more than 20 digits; they still sum to 0."""
    if math.lcm(*(debt.denominator for debt in debts)) <= _FINEST_DEBT:
        return tuple(debts)
    short = [math.floor(debt * _FINEST_DEBT) for debt in debts]
    short[short.index(min(short))] -= sum(short)
    return tuple(Fraction(debt, _FINEST_DEBT) for debt in short)


def _reached(counts: Sequence[int], limits: Limits, out: Sequence[int]) -> list[int]:
    """Sources that have reached their limit and are not out yet."""
    pairs, gone = enumerate(zip(counts, limits)), set(out)
    return [i for i, (count, limit) in pairs if limit is not None and count >= limit and i not in gone]


def _near(state: Drawn, limits: Limits, count: int) -> list[tuple[int, int]]:
    """Sources that `count` samples could bring to their limit, and the samples they have left."""
    pairs, gone = enumerate(zip(state.counts, limits)), set(state.out)
    left = ((i, limit - used) for i, (used, limit) in pairs if limit is not None and i not in gone)
    return [(i, most) for i, most in left if most <= count]


def _end_of(sources: npt.NDArray[np.int64], source: int, left: int) -> int:
    """Number of samples up to and including the `left`-th of one source."""
    if left > len(sources):
        return len(sources)
    places = np.flatnonzero(sources == source)
    return int(places[left - 1]) + 1 if len(places) >= left else len(sources)
