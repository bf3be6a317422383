"""Edits of a plan during training: steps to skip, rows to ban, other weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Rational, Real
from typing import Any

import orjson
import xxhash

from penstock.errors import ConfigError, ResumeError


@dataclass(frozen=True, slots=True)
class Skip:
    """Edit: steps `start` to `stop` are not delivered."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if not (_is_step(self.start) and _is_step(self.stop) and self.start < self.stop):
            raise ConfigError(f"steps to skip must be a range like (340, 360), got ({self.start!r}, {self.stop!r})")
        object.__setattr__(self, "start", int(self.start))
        object.__setattr__(self, "stop", int(self.stop))

    @property
    def step(self) -> int:
        """First step that the edit changes."""
        return self.start

    def to_json(self) -> list[Any]:
        return ["skip", self.start, self.stop]

    def __str__(self) -> str:
        return f"skip({self.start}, {self.stop})"


@dataclass(frozen=True, slots=True)
class Ban:
    """Edit: some rows of a source are left out from `step` on."""

    step: int
    source: str
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", _checked_step(self.step))

    def to_json(self) -> list[Any]:
        return ["ban", self.step, self.source, list(self.rows)]

    def __str__(self) -> str:
        return f"ban({len(self.rows)} rows of {self.source!r} from step {self.step})"


@dataclass(frozen=True, slots=True)
class Reweight:
    """Edit: sources are mixed by other weights from `step` on."""

    step: int
    weights: Mapping[str, float] = field(hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", _checked_step(self.step))
        object.__setattr__(self, "weights", {name: _plain(weight) for name, weight in self.weights.items()})

    def to_json(self) -> list[Any]:
        exact = {name: str(weight) if isinstance(weight, Fraction) else weight for name, weight in self.weights.items()}
        return ["reweight", self.step, exact]

    def __str__(self) -> str:
        return f"reweight({self.step}, {dict(self.weights)})"


Edit = Skip | Ban | Reweight


def edit_from_json(facts: Sequence[Any]) -> Edit:
    """Edit from the result of `to_json`."""
    try:
        kind, *values = facts
        if kind == "skip":
            return Skip(*values)
        if kind == "ban":
            step, source, rows = values
            if not all(map(_is_step, rows)):
                raise ValueError("rows must be integers")
            return Ban(step, source, tuple(rows))
        if kind == "reweight":
            step, weights = values
            exact: Any = {str(name): Fraction(w) if isinstance(w, str) else w for name, w in weights.items()}
            return Reweight(step, exact)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ResumeError(f"the state has an edit that cannot be read: {facts!r:.200}") from error
    raise ResumeError(f"the state has an edit of the unknown kind {kind!r}; a newer release of penstock wrote it")


def edits_digest(edits: Sequence[Edit]) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps([edit.to_json() for edit in edits], option=orjson.OPT_SORT_KEYS))


def _is_step(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _checked_step(step: Any) -> int:
    if not _is_step(step):
        raise ConfigError(f"step must be an integer of at least 0, got step={step!r}")
    return int(step)


def _plain(weight: Any) -> Any:
    """Weight in a form that JSON or `Fraction` can hold: NumPy numbers become plain, fractions stay exact."""
    if isinstance(weight, bool):
        return weight
    if isinstance(weight, Integral):
        return int(weight)
    if isinstance(weight, Rational):
        return Fraction(int(weight.numerator), int(weight.denominator))
    return float(weight) if isinstance(weight, Real) else weight
