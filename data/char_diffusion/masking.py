"""Masking of characters: how many, in runs of which length, and what replaces them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import Setting

__all__ = ["CHECKS", "SETTINGS", "Ids", "Stage", "choose_characters"]

Ids = npt.NDArray[np.int64]
Rate = float | Sequence[float]
"""Share of characters that is masked, or `(low, high)`: every row draws its own share between the two."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Masking during one stage of the training."""

    mask_probability: Rate
    mask_span: int = 1
    """Length of a run of masked characters."""
    mask_keep: float = 0.0
    """Share of the masked characters that stay as they are, and are predicted all the same."""
    mask_random: float = 0.0
    """Share of the masked characters that are replaced by another character instead of the mask."""
    until: int | None = None
    """First batch of `train` after this stage; None: no end."""
    weight: float | None = None
    """Relative frequency of this stage."""

    def hide(self, ids: Ids, rng: np.random.Generator, mask_token_id: int) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Masked rows, and which characters are to be predicted: at least one per row."""
        rows, length = ids.shape
        if isinstance(self.mask_probability, Sequence):
            rates = rng.uniform(self.mask_probability[0], self.mask_probability[1], size=(rows, 1))
        else:
            rates = np.full((rows, 1), float(self.mask_probability))
        hidden = choose_characters(rng, rates, length, self.mask_span)
        seen = np.where(hidden, mask_token_id, ids)
        if self.mask_keep or self.mask_random:
            fate = rng.random(ids.shape)
            others = rng.integers(0, mask_token_id, size=ids.shape)
            seen = np.where(hidden & (fate < self.mask_keep + self.mask_random), others, seen)
            seen = np.where(hidden & (fate < self.mask_keep), ids, seen)
        return seen, hidden


def choose_characters(
    rng: np.random.Generator, rates: npt.NDArray[np.float64], length: int, span: int = 1
) -> npt.NDArray[np.bool_]:
    """Choice of characters in rows of `length`, in runs of `span`, at the rates [rows, 1] of the rows.

    Every character has the same probability, at the edges as in the middle: runs may begin before the row. A row
    without any gets the run that was closest to being drawn.
    """
    draws = rng.random((len(rates), length + span - 1))
    # A character is spared if none of the `span` runs that would cover it begins.
    with np.errstate(divide="ignore"):  # a rate of 1: the logarithm of nothing, and all runs begin
        begins = draws < -np.expm1(np.log1p(-rates) / span)
    begins[np.arange(len(rates)), draws.argmin(axis=1)] = True
    if span == 1:
        return begins
    begun = np.cumsum(begins, axis=1, dtype=np.int32)
    chosen = begun[:, span - 1 :] > 0
    chosen[:, 1:] = begun[:, span:] > begun[:, : length - 1]
    return chosen


def check_rate(value: Any) -> str | None:
    """Problem of a `mask_probability`, or None."""
    numbers = value if isinstance(value, Sequence) and len(value) == 2 else [value]
    if all(_is_number(number) and 0 < number <= 1 for number in numbers) and numbers[0] <= numbers[-1]:
        return None
    return "expected a number in (0, 1], or a pair (low, high) of such numbers"


def check_share(value: Any) -> str | None:
    return None if _is_number(value) and 0 <= value <= 1 else "expected a number from 0 to 1"


def check_span(value: Any) -> str | None:
    return None if _is_whole(value) and value >= 1 else "expected a whole number, 1 or more"


CHECKS = {
    "mask_probability": check_rate,
    "mask_span": check_span,
    "mask_keep": check_share,
    "mask_random": check_share,
}


def check_stages(value: Sequence[Mapping[str, Any]]) -> str | None:
    """Problems of a list of stages, or None."""
    problems = [f"stage {number}: {problem}" for number, stage in enumerate(value) for problem in _wrong_with(stage)]
    weighted = [number for number, stage in enumerate(value) if "weight" in stage]
    if weighted and len(weighted) < len(value):
        problems.append(f"all stages have a weight or none, here those numbered {weighted} have one")
    if value and not weighted and not problems:
        ends: list[Any]
        *ends, last = (stage.get("until") for stage in value)
        if None in ends or any(first >= second for first, second in pairwise(ends)):
            problems.append(f"every stage but the last needs an until, each later than the one before, not {ends}")
        if last is not None:
            problems.append(f"the last stage must not end, leave out its until = {last}")
    return "; ".join(problems) or None


def _wrong_with(stage: Mapping[str, Any]) -> list[str]:
    known = [*CHECKS, "until", "weight"]
    problems = [f"no such key {key!r}, there are {', '.join(known)}" for key in stage if key not in known]
    problems += [
        f"{key} = {stage[key]!r}: {said}" for key in CHECKS if key in stage and (said := CHECKS[key](stage[key]))
    ]
    until, weight = stage.get("until"), stage.get("weight", 1)
    if until is not None and not (_is_whole(until) and until >= 1):
        problems.append(f"until = {until!r}: expected a number of batches, 1 or more, or None")
    if not (_is_number(weight) and weight > 0):
        problems.append(f"weight = {weight!r}: expected a number above 0")
    if "until" in stage and "weight" in stage:
        problems.append("stages follow each other (until) or are drawn (weight), not both")
    return problems


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


SETTINGS = {
    "mask_probability": Setting(
        float | tuple[float, float],
        (0.1, 0.9),
        check=check_rate,
        text="share of masked characters, or (low, high)",
    ),
    "mask_span": Setting(int, 1, check=check_span, text="length of a run of masked characters"),
    "mask_keep": Setting(float, 0.0, check=check_share, text="share of the masked characters that stay as they are"),
    "mask_random": Setting(float, 0.0, check=check_share, text="share of the masked characters that are replaced"),
    "stages": Setting(list[dict[str, Any]], [], check=check_stages, text="stages, by batch number or by weight"),
}
"""Settings of the config; the first four are defaults of the stages."""
