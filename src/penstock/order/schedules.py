"""Schedules of weights over steps: exact fractions, so that a target can be met to the sample.

A weight is the number it reads as: 0.1 is one tenth, not the nearest double. Weights are divided by their sum. With a
common denominator of at most 2**40 the result is exact; otherwise (thirds to 16 digits, square roots) each weight is
rounded to a multiple of 2**-40, which is one sample in 10**12.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Rational
from typing import Any, Literal

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError

_FINEST = 1 << 40

Interpolation = Literal["constant", "linear"]
Weights = Mapping[str, float | Fraction]


@dataclass(frozen=True, slots=True)
class ScheduleSegment:
    """Segment of a schedule: points of (step, shares).

    Shares are integers in the order of the schedule's names; a weight is a share divided by the sum of its point.
    """

    points: tuple[tuple[int, tuple[int, ...]], ...]
    interpolation: Interpolation

    @property
    def step(self) -> int:
        return self.points[0][0]

    def only(self, kept: Iterable[int]) -> ScheduleSegment | None:
        """Segment with some of the sources only, which share by their weights; None if no weight is left.

        A point at which all kept sources have weight 0 takes the weights of the next one.
        """
        keep = set(kept)
        points: list[tuple[int, tuple[int, ...]]] = []
        following: tuple[int, ...] | None = None
        for step, shares in reversed(self.points):
            left = _shares([Fraction(share if i in keep else 0) for i, share in enumerate(shares)])
            following = left or following
            if following is None:
                return None
            points.append((step, following))
        return ScheduleSegment(tuple(reversed(points)), self.interpolation)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Weights of sources over steps; made with `constant` or `of`.

        Schedule.of([(0, {"web": 0.9, "code": 0.1}), (1000, {"web": 0.5, "code": 0.5})], interpolation="linear")

    `names` are sorted, so that equal schedules compare equal. The first of the `parts` holds from the start. Each
    further one is a change (`with_change`): nothing before its step depends on it.
    """

    names: tuple[str, ...]
    parts: tuple[ScheduleSegment, ...]

    @classmethod
    def constant(cls, weights: Weights) -> Schedule:
        """The same weights at every step."""
        return cls.of([(0, weights)])

    @classmethod
    def of(cls, points: Sequence[tuple[int, Weights]], interpolation: Interpolation = "constant") -> Schedule:
        """Weights from given steps on: constant until the next point, or moving linearly towards it.

        Weights are constant within a step; those of the last point hold from there on.
        """
        if interpolation not in ("constant", "linear"):
            hint = did_you_mean(str(interpolation), ("constant", "linear"))
            raise ConfigError(f"interpolation must be 'constant' or 'linear', got {interpolation!r}{hint}")
        if not points or not points[0][1]:
            raise ConfigError("a schedule needs at least one point and one source, such as (0, {'web': 1.0})")
        for step, _ in points:
            _check_step(step)
        if points[0][0] != 0:
            raise ConfigError(f"the first point of a schedule must be at step 0, got step {points[0][0]}")
        for (before, _), (step, _) in pairwise(points):
            if step <= before:
                raise ConfigError(f"the steps of a schedule must increase, got {step} after {before}; sort the points")
        names = tuple(sorted(points[0][1]))
        part = ScheduleSegment(tuple((step, _read(weights, names, step)) for step, weights in points), interpolation)
        return cls(names, (part,))

    def with_change(self, step: int, weights: Weights) -> Schedule:
        """Schedule with these weights from `step` on, in place of its later points. Earlier draws do not change."""
        _check_step(step)
        part = ScheduleSegment(((step, _read(weights, self.names, step)),), "constant")
        return Schedule(self.names, (*(earlier for earlier in self.parts if earlier.step < step), part))

    def weights_at(self, step: int) -> dict[str, Fraction]:
        """Exact weights of a step; they sum to 1."""
        _check_step(step)
        part = self.parts[bisect_right(self.parts, step, key=lambda part: part.step) - 1]
        at = bisect_right(part.points, step, key=lambda point: point[0]) - 1
        start, shares = part.points[at]
        weights = weights_of(shares)
        if part.interpolation == "linear" and at + 1 < len(part.points):
            stop, target = part.points[at + 1]
            progress = Fraction(step - start, stop - start)
            weights = tuple(here + (there - here) * progress for here, there in zip(weights, weights_of(target)))
        return dict(zip(self.names, weights))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: names, and for each part its points of (step, shares); exact."""
        parts = [
            {"interpolation": part.interpolation, "points": [[step, list(shares)] for step, shares in part.points]}
            for part in self.parts
        ]
        return {"names": list(self.names), "parts": parts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """Schedule from the result of `to_dict`."""
        try:
            names = [str(name) for name in data["names"]]
            first, *changes = data["parts"]
            points = [(step, dict(zip(names, shares, strict=True))) for step, shares in first["points"]]
            schedule = cls.of(points, first["interpolation"])
            for change in changes:
                ((step, shares),) = change["points"]
                schedule = schedule.with_change(step, dict(zip(names, shares, strict=True)))
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a schedule: {error!r}; expected the result of Schedule.to_dict()") from None
        return schedule


def temperature_weights(sizes: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Weights proportional to size ** (1 / temperature): 1 follows the sizes, larger values even the shares out."""
    if not (isinstance(temperature, int | float) and temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(f"temperature must be a positive finite number, got {temperature!r}")
    for name, size in sizes.items():
        if not (size >= 0 and math.isfinite(size)):
            raise ConfigError(f"the size of {name!r} must be a finite number of at least 0, got {size!r}")
    largest = max(sizes.values(), default=0)
    if largest == 0:
        raise ConfigError(f"temperature_weights needs a source with a size above 0, got {dict(sizes)!r}")
    if temperature == 1:
        return {name: size / sum(sizes.values()) for name, size in sizes.items()}
    # Relative to the largest, so that no power overflows.
    powers = {name: (size / largest) ** (1 / temperature) for name, size in sizes.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"a step must be an integer of at least 0, got {step!r}")


def weights_of(shares: Sequence[int]) -> tuple[Fraction, ...]:
    """Weights of shares: each divided by their sum."""
    total = sum(shares)
    return tuple(Fraction(share, total) for share in shares)


def _read(weights: Weights, names: Sequence[str], step: int) -> tuple[int, ...]:
    known = frozenset(names)
    for name in weights:
        if name not in known:
            hint = did_you_mean(str(name), names)
            raise ConfigError(f"weight of unknown source {name!r} at step {step}{hint}; the sources are {list(names)}")
    missing = [name for name in names if name not in weights]
    if missing:
        raise ConfigError(
            f"the weights of {', '.join(map(repr, missing))} are missing at step {step}; give every source a weight "
            "(0 for one that is not drawn)"
        )
    shares = _shares([_exact(weights[name], name, step) for name in names])
    if shares is None:
        raise ConfigError(f"all weights at step {step} are 0: {dict(weights)!r}; at least one must be positive")
    return shares


def _exact(weight: float | Fraction, name: str, step: int) -> Fraction:
    """Weight as the number it reads as."""
    try:
        if isinstance(weight, Rational):
            exact = Fraction(weight.numerator, weight.denominator)
        else:
            exact = Fraction(repr(float(weight)))
    except (TypeError, ValueError):  # no number, infinite, or NaN
        exact = Fraction(-1)
    if exact < 0 or isinstance(weight, bool):
        raise ConfigError(f"the weight of {name!r} at step {step} must be finite and at least 0, got {weight!r}")
    return exact


def _shares(weights: Sequence[Fraction]) -> tuple[int, ...] | None:
    """Smallest integers in the same proportion, at most 2**40 in all; None if all weights are 0."""
    if not any(weights):
        return None
    whole = math.lcm(*(weight.denominator for weight in weights))
    shares = _reduced([int(weight * whole) for weight in weights])
    if (total := sum(shares)) > _FINEST:
        # At least 1, so that a source with a tiny weight is still drawn; the largest takes the rest.
        shares = [share and max(1, share * _FINEST // total) for share in shares]
        shares[shares.index(max(shares))] += _FINEST - sum(shares)
    return tuple(_reduced(shares))


def _reduced(shares: list[int]) -> list[int]:
    common = math.gcd(*shares)
    return [share // common for share in shares]
