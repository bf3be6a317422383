"""Which source each sample of a mixed stream comes from.

    mixture = Mixture(["web", "code"], Schedule.constant({"web": 0.9, "code": 0.1}), samples_per_step=512)
    sources, drawn = mixture.draw(mixture.start(), 512)     # array of 0 and 1; drawn.counts: where each source stands

At every prefix each of k sources has given at most 1 - 1 / (2k - 2) of a sample more or less than its target, the sum
of its weights so far, whatever the schedule (see `courses`). Two things that nobody could foresee start a new stretch:

A change (`Schedule.with_change`) leaves every count where it is, so nothing is lost or repeated. What a source is ahead
or behind at that moment is carried over and evened out. While that goes on, counts may be further off: not with two
sources, less than 1 with three, more with many. No rule that does not know the future can avoid it: whoever changes the
weights after every sample, in favour of what has not been drawn, drives one of k sources 1/2 + 1/3 + ... + 1/k behind.

A source that reaches its limit drops out, and the others share by their weights, with targets that start at their
counts of that moment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, ResumeError
from penstock.order.mix_order import MixOrder, pieces_of
from penstock.order.schedules import Schedule, ScheduleSegment

__all__ = ["Drawn", "Mixture"]

Limits = Sequence[int | None]

_FINEST_DEBT = 1 << 64


@dataclass(frozen=True, slots=True)
class Drawn:
    """Where a mixed stream stands: `counts` of each source, which sum to `position`, and what it needs to go on.

    Targets have been followed since `start`, where the counts were `base`, and each source was `owed` that many samples
    (none, when empty). The sources `out` have reached their limit.
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
        """What `to_json` wrote."""
        try:
            position, counts, start, base, owed, out = data
            debts = tuple(Fraction(debt, owed[0]) for debt in owed[1:])
            state = cls(position, tuple(counts), start, tuple(base) or (0,) * len(counts), debts, tuple(out))
            whole = (position, start, *state.counts, *state.base, *out)
            valid = all(type(number) is int and number >= 0 for number in whole) and (
                sum(state.counts) == position
                and sum(state.base) == start
                and len(state.base) == len(state.counts)
                and len(debts) in (0, len(counts))
                and all(here <= now for here, now in zip(state.base, state.counts))
                and all(source < len(counts) for source in out)
            )
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as e:
            raise ResumeError(f"not the state of a mixture: {e}; expected what Drawn.to_json() returns") from None
        if not valid:
            raise ResumeError(f"damaged state of a mixture: {data!r}; its counts do not agree with its position")
        return state


class Mixture:
    """A stream mixed of several sources by the weights of a schedule: a pure function of the position.

    Weights are constant within a step of `samples_per_step` samples. A source whose weight a schedule lowers to 0 may
    still give the one sample it was behind; after a change to 0 it gives none.

    Where the weights are constant and have a common denominator of at most 20,000 the order repeats, and drawing and
    seeking look it up. Otherwise drawing takes about a microsecond a sample; a `seek` skips what repeats between the
    points of a schedule, and takes as long as drawing up to there where nothing does (from a checkpoint, next time).
    """

    def __init__(self, names: Sequence[str], schedule: Schedule, samples_per_step: int) -> None:
        self.names, self.schedule, self.samples_per_step = tuple(names), schedule, samples_per_step
        if len(set(self.names)) != len(self.names):
            raise ConfigError(f"source names must differ, got {list(self.names)!r}")
        for name in schedule.names:
            if name not in self.names:
                raise ConfigError(
                    f"the schedule has a weight for the unknown source {name!r}; the sources are "
                    f"{', '.join(map(repr, self.names))}" + did_you_mean(name, self.names)
                )
        for name in self.names:
            if name not in schedule.names:
                raise ConfigError(
                    f"the schedule has no weight for the source {name!r}; it has weights for "
                    f"{', '.join(map(repr, schedule.names))}; give every source a weight (0 for one not drawn)"
                )
        if isinstance(samples_per_step, bool) or not isinstance(samples_per_step, int) or samples_per_step < 1:
            raise ConfigError(f"samples_per_step must be a positive integer, got {samples_per_step!r}")
        order = [schedule.names.index(name) for name in self.names]
        self._parts = [
            ScheduleSegment(
                tuple((step, tuple(shares[i] for i in order)) for step, shares in part.points), part.interpolation
            )
            for part in schedule.parts
        ]
        self._changes = [part.step * samples_per_step for part in self._parts]
        self._course = lru_cache(maxsize=32)(self._make_course)

    def __reduce__(self) -> tuple[Any, ...]:
        # Courses are made anew where they are needed.
        return Mixture, (self.names, self.schedule, self.samples_per_step)

    def start(self) -> Drawn:
        """Nothing drawn yet."""
        nothing = (0,) * len(self.names)
        return Drawn(0, nothing, 0, nothing)

    def draw(self, state: Drawn, count: int, limits: Limits | None = None) -> tuple[npt.NDArray[np.int64], Drawn]:
        """The sources of the next `count` samples, and the state behind them.

        `limits` are the most samples of each source in all (None: no limit). When every source has reached its limit
        the array is shorter than asked. In one go or one by one, the result is the same.
        """
        self._check(state, limits)
        if count < 0:
            raise ConfigError(f"cannot draw {count} samples; give a count of at least 0")
        pieces = [np.empty(0, np.int64)]
        stop = state.position + count
        while state.position < stop:
            state, course = self._settle(state, limits)
            if course is None:
                break
            wanted = min(stop, self._next_change(state.position)) - state.position
            relative = [now - then for now, then in zip(state.counts, state.base)]
            sources = course.draw(state.position, relative, wanted)
            for i, limit in enumerate(limits or ()):
                if limit is not None and i not in state.out:
                    sources = sources[: _end_of(sources, i, limit - state.counts[i])]
            pieces.append(sources)
            state = self._moved(state, np.bincount(sources, minlength=len(self.names)).tolist())
        return np.concatenate(pieces), state

    def seek(self, position: int, limits: Limits | None = None) -> Drawn:
        """The state at a position, or at the end of the stream if `limits` end it before."""
        state = self.start()
        self._check(state, limits)
        if position < 0:
            raise ConfigError(f"cannot seek to position {position}; give one of at least 0")
        while state.position < position:
            state, course = self._settle(state, limits)
            if course is None:
                break
            stop = min(position, self._next_change(state.position))
            counts = self._counts_at(state, course, stop)
            if limits is not None and _reached(counts, limits, state.out):
                low, high = state.position, stop
                while high - low > 1:
                    middle = (low + high) // 2
                    reached = _reached(self._counts_at(state, course, middle), limits, state.out)
                    low, high = (low, middle) if reached else (middle, high)
                stop, counts = high, self._counts_at(state, course, high)
            state = replace(state, position=stop, counts=counts)
        return state

    def targets(self, state: Drawn) -> tuple[Fraction, ...]:
        """What each source should have given by now, exactly: the sums of weights, as they were in force.

        After a drop-out they start again at the counts of that moment.
        """
        course = self._course(self._part_at(state.start), state.start, state.owed, state.out)
        if course is None:
            return tuple(map(Fraction, state.base))
        return tuple(base + more for base, more in zip(state.base, course.targets(state.position)))

    def _settle(self, state: Drawn, limits: Limits | None) -> tuple[Drawn, MixOrder | None]:
        """The state at the start of a new stretch, if a change or a limit lies at this position; and its course."""
        part = self._part_at(state.position)
        if part != self._part_at(state.start):
            owed = _short([target - count for target, count in zip(self.targets(state), state.counts)])
            state = replace(state, start=state.position, base=state.counts, owed=owed if any(owed) else ())
        if limits is not None and (full := _reached(state.counts, limits, state.out)):
            out = tuple(sorted((*state.out, *full)))
            state = replace(state, start=state.position, base=state.counts, owed=(), out=out)
        return state, self._course(part, state.start, state.owed, state.out)

    def _make_course(self, part: int, start: int, owed: tuple[Fraction, ...], out: tuple[int, ...]) -> MixOrder | None:
        left = self._parts[part].only(i for i in range(len(self.names)) if i not in out)
        if left is None:
            return None
        return MixOrder(pieces_of(left, self.samples_per_step), start, self.samples_per_step, owed)

    def _part_at(self, position: int) -> int:
        return bisect_right(self._changes, position) - 1

    def _next_change(self, position: int) -> int:
        following = self._part_at(position) + 1
        return self._changes[following] if following < len(self._changes) else 1 << 80

    def _counts_at(self, state: Drawn, course: MixOrder, position: int) -> tuple[int, ...]:
        return tuple(then + more for then, more in zip(state.base, course.counts(position)))

    def _moved(self, state: Drawn, more: Sequence[int]) -> Drawn:
        counts = tuple(count + new for count, new in zip(state.counts, more))
        return replace(state, position=state.position + sum(more), counts=counts)

    def _check(self, state: Drawn, limits: Limits | None) -> None:
        if len(state.counts) != len(self.names):
            raise ResumeError(
                f"the state is of a mixture of {len(state.counts)} sources, this one has {len(self.names)}: "
                f"{', '.join(map(repr, self.names))}"
            )
        if limits is None:
            return
        if len(limits) != len(self.names):
            raise ConfigError(f"limits must have one entry for each of {len(self.names)} sources, got {len(limits)}")
        for name, limit in zip(self.names, limits):
            if limit is not None and limit < 0:
                raise ConfigError(f"the limit of source {name!r} must be at least 0 or None, got {limit!r}")


def _short(debts: Sequence[Fraction]) -> tuple[Fraction, ...]:
    """The same, rounded to 2**-64 where a common denominator would have more than 20 digits; they still sum to 0."""
    if math.lcm(*(debt.denominator for debt in debts)) <= _FINEST_DEBT:
        return tuple(debts)
    short = [math.floor(debt * _FINEST_DEBT) for debt in debts]
    short[short.index(min(short))] -= sum(short)
    return tuple(Fraction(debt, _FINEST_DEBT) for debt in short)


def _reached(counts: Sequence[int], limits: Limits, out: Sequence[int]) -> list[int]:
    """The sources that have come to their limit and are not out yet."""
    pairs = enumerate(zip(counts, limits))
    return [i for i, (count, limit) in pairs if limit is not None and count >= limit and i not in out]


def _end_of(sources: npt.NDArray[np.int64], source: int, left: int) -> int:
    """How many samples may be drawn until `left` of one source are among them."""
    if left > len(sources):
        return len(sources)
    places = np.flatnonzero(sources == source)
    return int(places[left - 1]) + 1 if len(places) >= left else len(sources)
