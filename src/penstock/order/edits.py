"""What may be changed in a plan while it is being trained on: steps to skip, rows to ban, other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

import orjson
import xxhash

from penstock.errors import ConfigError, ResumeError

__all__ = ["Ban", "Edit", "Reweight", "Skip", "edit_from_json", "edits_digest"]


@dataclass(frozen=True, slots=True)
class Skip:
    """The steps `start` to `stop` are not delivered."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not (_is_whole(self.start) and _is_whole(self.stop) and 0 <= self.start < self.stop):
            raise ConfigError(f"steps to skip are a range like (340, 360), got ({self.start!r}, {self.stop!r})")
        object.__setattr__(self, "start", int(self.start))
        object.__setattr__(self, "stop", int(self.stop))

    @property
    def step(self) -> int:
        """The first step that is not as it was before the edit."""
        return self.start

    def to_json(self) -> list[Any]:
        return ["skip", self.start, self.stop]

    def __str__(self) -> str:
        return f"skip({self.start}, {self.stop})"


@dataclass(frozen=True, slots=True)
class Ban:
    """Some rows of a source are left out from `step` on."""

    step: int
    source: str
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        if not _is_whole(self.step) or self.step < 0:
            raise ConfigError(f"steps are whole numbers, counted from 0, got step={self.step!r}")
        object.__setattr__(self, "step", int(self.step))

    def to_json(self) -> list[Any]:
        return ["ban", self.step, self.source, list(self.rows)]

    def __str__(self) -> str:
        return f"ban({len(self.rows)} rows of {self.source!r} from step {self.step})"


@dataclass(frozen=True, slots=True)
class Reweight:
    """Sources are mixed by other weights from `step` on."""

    step: int
    weights: Mapping[str, float] = field(hash=False)

    def __post_init__(self) -> None:
        if not _is_whole(self.step) or self.step < 0:
            raise ConfigError(f"steps are whole numbers, counted from 0, got step={self.step!r}")
        object.__setattr__(self, "step", int(self.step))
        object.__setattr__(self, "weights", {name: _plain(weight) for name, weight in self.weights.items()})

    def to_json(self) -> list[Any]:
        exact = {name: str(weight) if isinstance(weight, Fraction) else weight for name, weight in self.weights.items()}
        return ["reweight", self.step, exact]

    def __str__(self) -> str:
        return f"reweight({self.step}, {dict(self.weights)})"


Edit = Skip | Ban | Reweight


def edit_from_json(facts: Sequence[Any]) -> Edit:
    try:
        kind, *values = facts
        if kind == "skip":
            return Skip(*values)
        if kind == "ban":
            step, source, rows = values
            if not all(map(_is_whole, rows)):
                raise ValueError("rows are whole numbers")
            return Ban(step, source, tuple(rows))
        if kind == "reweight":
            step, weights = values
            return Reweight(step, {str(name): _weight_from_json(weight) for name, weight in weights.items()})
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ResumeError(f"the state holds an edit that cannot be read: {facts!r:.200}") from error
    raise ResumeError(f"the state holds an edit of a kind this release does not know: {kind!r}; update penstock")


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _plain(weight: Any) -> Any:
    """A weight as something that can be written down: numbers of NumPy are numbers, fractions stay exact."""
    if isinstance(weight, bool):
        return weight
    if isinstance(weight, Integral):
        return int(weight)
    if isinstance(weight, Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))
    return float(weight) if isinstance(weight, Real) else weight


def _weight_from_json(weight: Any) -> Any:
    return Fraction(weight) if isinstance(weight, str) else weight


def edits_digest(edits: Sequence[Edit]) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps([edit.to_json() for edit in edits], option=orjson.OPT_SORT_KEYS))
