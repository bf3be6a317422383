"""Making rows fit a length: after the mask is known, and with every token that goes counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.chat.masks import Flags, Ints
from penstock.chat.problems import TooLongError

__all__ = ["POLICIES", "TruncatedPieces", "TruncationCounts", "cut", "gathered", "in_all", "tally"]

POLICIES = ("error", "drop", "left", "right", "split")
TOO_LONG = "longer than max_length"
SILENCED = "nothing supervised after truncation"
CHANGED = {"left": "truncated on the left", "right": "truncated on the right", "split": "split"}


@dataclass(frozen=True, slots=True)
class TruncatedPieces:
    """What is left of rows: piece i is tokens `starts[i]` to `stops[i]`, all of row `rows[i]`."""

    rows: Ints
    starts: Ints
    stops: Ints

    def where(self, kept: Flags) -> TruncatedPieces:
        return TruncatedPieces(self.rows[kept], self.starts[kept], self.stops[kept])


@dataclass(frozen=True, slots=True)
class TruncationCounts:
    """What the cutting cost, by reason."""

    dropped: dict[str, int]
    """Rows of which nothing is left."""
    changed: dict[str, int]
    """Rows kept with something missing, or in several pieces."""
    tokens: dict[str, int]
    """Tokens that are in no piece."""


def cut(bounds: Ints, mask: Flags, max_length: int | None, policy: str, *, supervised: bool) -> TruncatedPieces:
    """Apply the policy to rows longer than `max_length`; with `supervised`, pieces that lost all supervision go."""
    starts, stops = bounds[:-1], bounds[1:]
    rows = np.arange(len(starts))
    lengths = stops - starts
    long = lengths > (max_length if max_length is not None else np.iinfo(np.int64).max)
    if max_length is None or not long.any():
        return TruncatedPieces(rows, starts, stops)
    if policy == "error":
        row = int(long.argmax())
        raise TooLongError(
            f"{lengths[row]} tokens, more than max_length={max_length}; raise it, or pass truncation='right', 'left', "
            "'split' or 'drop'",
            row=row,
        )
    if policy == "drop":
        return TruncatedPieces(rows, starts, stops).where(~long)
    if policy == "split":
        pieces = np.maximum(-(-lengths // max_length), 1)
        rows = np.repeat(rows, pieces)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = starts[rows] + place * max_length
        made = TruncatedPieces(rows, starts, np.minimum(starts + max_length, stops[rows]))
    elif policy == "right":
        made = TruncatedPieces(rows, starts, np.minimum(stops, starts + max_length))
    else:
        made = TruncatedPieces(rows, np.maximum(starts, stops - max_length), stops)
    if not supervised:
        return made
    total = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
    return made.where(~long[made.rows] | (total[made.stops] > total[made.starts]))


def in_all(sides: Sequence[TruncatedPieces]) -> list[TruncatedPieces]:
    """The pieces of rows of which every side has some."""
    kept = sides[0].rows
    for side in sides[1:]:
        kept = np.intersect1d(kept, side.rows)
    return [side.where(np.isin(side.rows, kept)) for side in sides]


def tally(bounds: Sequence[Ints], sides: Sequence[TruncatedPieces], policy: str) -> TruncationCounts:
    """Rows and tokens that did not make it, or not in one piece."""
    rows = len(bounds[0]) - 1
    kept = np.zeros(rows, np.bool_)
    kept[sides[0].rows] = True
    gone = TOO_LONG if policy == "drop" else SILENCED
    changed = np.zeros(rows, np.bool_)
    tokens = {gone: 0}
    for side, ends in zip(sides, bounds):
        lengths = np.diff(ends)
        left = np.bincount(side.rows, side.stops - side.starts, rows).astype(np.int64)
        pieces = np.bincount(side.rows, minlength=rows)
        changed |= kept & ((left < lengths) | (pieces > 1))
        tokens[gone] += int(lengths[~kept].sum())
        lost = SILENCED if policy == "split" else CHANGED.get(policy, gone)
        tokens[lost] = tokens.get(lost, 0) + int((lengths - left)[kept].sum())
    return TruncationCounts(
        {gone: int(np.count_nonzero(~kept))},
        {CHANGED.get(policy, gone): int(np.count_nonzero(changed))},
        {reason: n for reason, n in tokens.items() if n},
    )


def gathered(values: npt.NDArray[Any], made: TruncatedPieces) -> tuple[npt.NDArray[Any], Ints]:
    """The values of the pieces, one after the other, and where each begins."""
    lengths = made.stops - made.starts
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    if len(made.starts) and np.array_equal(made.starts[1:], made.stops[:-1]):
        return values[made.starts[0] : made.stops[-1]], bounds
    at = np.arange(bounds[-1]) + np.repeat(made.starts - bounds[:-1], lengths)
    return values[at], bounds
