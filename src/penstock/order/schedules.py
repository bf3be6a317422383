"""Weights of sources, over steps: exact fractions, so that a target can be kept to the sample.

A weight is what it reads as: 0.1 is one tenth, not the double nearest to it. Weights are divided by their sum. Where
the result has a common denominator of at most 2**40 it is exact; otherwise (thirds to 16 digits, square roots) each
weight is rounded to a multiple of 2**-40, which is one sample in 10**12.
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

__all__ = ["Schedule", "ScheduleSegment", "temperature_weights"]

_FINEST = 1 << 40

Interpolation = Literal["constant", "linear"]
Weights = Mapping[str, float | Fraction]


@dataclass(frozen=True, slots=True)
class ScheduleSegment:
    """A stretch of a schedule that is known from its start: points of (step, shares).

    Shares are integers in the order of the schedule's names; a weight is a share divided by the sum of its point.
    """

    points: tuple[tuple[int, tuple[int, ...]], ...]
    interpolation: Interpolation

    @property
    def step(self) -> int:
        return self.points[0][0]

    def only(self, kept: Iterable[int]) -> ScheduleSegment | None:
        """The same with some sources alone, which share by their weights; None when there is nothing left to draw.

        A point where all that is left has weight 0 takes the weights of the next one: what is left comes earlier.
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
    """The weights of sources over steps; make one with `constant` or `of`.

        Schedule.of([(0, {"web": 0.9, "code": 0.1}), (1000, {"web": 0.5, "code": 0.5})], interpolation="linear")

    `names` are sorted, so that two schedules that say the same are equal. The first of the `parts` is known from the
    start. Each further one is a change (`with_change`): nothing before its step depends on it.
    """

    names: tuple[str, ...]
    parts: tuple[ScheduleSegment, ...]

    @classmethod
    def constant(cls, weights: Weights) -> Schedule:
        """The same weights at every step."""
        return cls.of([(0, weights)])

    @classmethod
    def of(cls, points: Sequence[tuple[int, Weights]], interpolation: Interpolation = "constant") -> Schedule:
        """Weights from given steps on: held until the next point, or (`linear`) moving evenly towards it.

        Weights are constant within a step; those of the last point hold for ever.
        """
        if interpolation not in ("constant", "linear"):
            raise ConfigError(
                f"interpolation must be 'constant' or 'linear', got {interpolation!r}"
                + did_you_mean(str(interpolation), ("constant", "linear"))
            )
        if not points:
            raise ConfigError("a schedule needs at least one point, got none; start with (0, {name: weight, ...})")
        for step, _ in points:
            _check_step(step)
        if points[0][0] != 0:
            raise ConfigError(
                f"the schedule has a gap: its first point is at step {points[0][0]}, so steps 0 to {points[0][0] - 1} "
                "have no weights; add a point at step 0"
            )
        for (before, _), (step, _) in pairwise(points):
            if step <= before:
                raise ConfigError(
                    f"the steps of a schedule must increase, got {step} after {before}; sort the points and give each "
                    "step once"
                )
        names = tuple(sorted(points[0][1]))
        if not names:
            raise ConfigError("a schedule needs the weight of at least one source, got none at step 0")
        part = ScheduleSegment(tuple((step, _read(weights, names, step)) for step, weights in points), interpolation)
        return cls(names, (part,))

    def with_change(self, step: int, weights: Weights) -> Schedule:
        """These weights from `step` on; what the schedule said for later steps no longer holds.

        What is drawn before `step` stays as it was, to the sample.
        """
        _check_step(step)
        part = ScheduleSegment(((step, _read(weights, self.names, step)),), "constant")
        return Schedule(self.names, (*(earlier for earlier in self.parts if earlier.step < step), part))

    def weights_at(self, step: int) -> dict[str, Fraction]:
        """The exact weights of a step, which sum to 1."""
        _check_step(step)
        part = self.parts[bisect_right(self.parts, step, key=lambda part: part.step) - 1]
        at = bisect_right(part.points, step, key=lambda point: point[0]) - 1
        start, shares = part.points[at]
        weights = [Fraction(share, sum(shares)) for share in shares]
        if part.interpolation == "linear" and at + 1 < len(part.points):
            stop, target = part.points[at + 1]
            way = Fraction(step - start, stop - start)
            weights = [w + (Fraction(share, sum(target)) - w) * way for w, share in zip(weights, target)]
        return dict(zip(self.names, weights))

    def to_dict(self) -> dict[str, Any]:
        """As JSON: names, and for each part its points of (step, shares); nothing is rounded."""
        parts = [
            {"interpolation": part.interpolation, "points": [[step, list(shares)] for step, shares in part.points]}
            for part in self.parts
        ]
        return {"names": list(self.names), "parts": parts}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """What `to_dict` wrote."""
        try:
            names = [str(name) for name in data["names"]]
            first, *changes = data["parts"]
            points = [(step, dict(zip(names, shares, strict=True))) for step, shares in first["points"]]
            schedule = cls.of(points, first["interpolation"])
            for change in changes:
                ((step, shares),) = change["points"]
                schedule = schedule.with_change(step, dict(zip(names, shares, strict=True)))
        except ConfigError:
            raise
        except (KeyError, TypeError, ValueError) as e:
            raise ConfigError(f"not a schedule: {e!r}; expected what Schedule.to_dict() returns") from None
        return schedule


def temperature_weights(sizes: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Weights proportional to size ** (1 / temperature): 1 follows the sizes, more moves towards even shares."""
    if not sizes:
        raise ConfigError("temperature_weights needs the size of at least one source, got none")
    if not (isinstance(temperature, int | float) and temperature > 0 and math.isfinite(temperature)):
        raise ConfigError(
            f"temperature must be positive and finite, got {temperature!r}; 1 follows the sizes, 5 is nearly even"
        )
    for name, size in sizes.items():
        if not (size >= 0 and math.isfinite(size)):
            raise ConfigError(f"the size of {name!r} must be a finite number of at least 0, got {size!r}")
    largest = max(sizes.values())
    if largest == 0:
        raise ConfigError(f"all sizes are 0: {dict(sizes)!r}; at least one source must hold something")
    if temperature == 1:
        return {name: size / sum(sizes.values()) for name, size in sizes.items()}
    # Relative to the largest, so that no power overflows.
    powers = {name: (size / largest) ** (1 / temperature) for name, size in sizes.items()}
    return {name: power / sum(powers.values()) for name, power in powers.items()}


def _check_step(step: int) -> None:
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(f"a step must be an integer of at least 0, got {step!r}")


def _read(weights: Weights, names: Sequence[str], step: int) -> tuple[int, ...]:
    where = f"at step {step}"
    for name in weights:
        if name not in names:
            raise ConfigError(
                f"unknown source {name!r} in the weights {where}; the sources are {', '.join(map(repr, names))}"
                + did_you_mean(str(name), names)
            )
    missing = [name for name in names if name not in weights]
    if missing:
        raise ConfigError(
            f"the schedule has a gap: {where} the weights of {', '.join(map(repr, missing))} are missing; give every "
            "source a weight (0 for one that is not drawn)"
        )
    shares = _shares([_exact(weights[name], name, where) for name in names])
    if shares is None:
        raise ConfigError(f"all weights {where} are 0: {dict(weights)!r}; at least one must be positive")
    return shares


def _exact(weight: float | Fraction, name: str, where: str) -> Fraction:
    """A weight as the number it reads as."""
    expected = f"the weight of {name!r} {where} must be a finite number of at least 0, got {weight!r}"
    if isinstance(weight, bool):
        raise ConfigError(expected)
    if isinstance(weight, Rational):
        exact = Fraction(weight.numerator, weight.denominator)
    else:
        try:
            exact = Fraction(repr(float(weight)))
        except (TypeError, ValueError):
            raise ConfigError(expected) from None
    if exact < 0:
        raise ConfigError(f"{expected}; 0 leaves a source out")
    return exact


def _shares(weights: Sequence[Fraction]) -> tuple[int, ...] | None:
    """The smallest integers in the same proportion, at most 2**40 in all; None when all weights are 0."""
    if not any(weights):
        return None
    whole = math.lcm(*(weight.denominator for weight in weights))
    shares = _reduced([int(weight * whole) for weight in weights])
    if (total := sum(shares)) > _FINEST:
        # At least 1, so that a source with a tiny weight is not left out for ever; the largest takes up the rest.
        shares = [share and max(1, share * _FINEST // total) for share in shares]
        shares[shares.index(max(shares))] += _FINEST - sum(shares)
    return tuple(_reduced(shares))


def _reduced(shares: list[int]) -> list[int]:
    common = math.gcd(*shares)
    return [share // common for share in shares]
