"""Truncation of rows with a loss mask: after the gate, and with every dropped token counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.arrays.truncation import Truncation
from penstock.chat.masks import Flags, Ints
from penstock.chat.problems import TooLongError

__all__ = ["MaskedPieces", "TruncationCounts", "in_all", "tally", "too_long", "truncated"]

TOO_LONG = "longer than max_length"
SILENCED = "nothing supervised after truncation"
CHANGED = {"left": "truncated on the left", "right": "truncated on the right", "split": "split"}


@dataclass(frozen=True, slots=True)
class MaskedPieces:
    """Pieces of rows: piece i is tokens `starts[i]` to `stops[i]` of the batch, all of row `rows[i]`."""

    rows: Ints
    starts: Ints
    stops: Ints

    def where(self, kept: Flags) -> MaskedPieces:
        return MaskedPieces(self.rows[kept], self.starts[kept], self.stops[kept])


@dataclass(frozen=True, slots=True)
class TruncationCounts:
    """Rows and tokens that truncation removed or changed, by reason."""

    dropped: dict[str, int]
    """Rows of which nothing is left."""
    changed: dict[str, int]
    """Rows kept with something missing, or in several pieces."""
    tokens: dict[str, int]
    """Tokens that are in no piece."""


def truncated(offsets: Ints, mask: Flags, truncation: Truncation, *, supervised: bool) -> MaskedPieces:
    """The pieces of all rows; with `supervised`, pieces of long rows without a supervised token are dropped."""
    lengths = np.diff(offsets)
    for problem in too_long(lengths, truncation):
        advice = "; raise it, or pass truncation='right', 'left', 'split' or 'drop'"
        raise TooLongError(problem.reason + advice, row=problem.row)
    parts = truncation.parts(lengths)
    starts = offsets[parts.rows] + parts.starts
    pieces = MaskedPieces(parts.rows, starts, starts + parts.lengths)
    if not supervised or parts.lengths is lengths:
        return pieces
    total = np.concatenate(([0], np.cumsum(mask, dtype=np.int64)))
    whole = parts.lengths == lengths[parts.rows]
    return pieces.where(whole | (total[pieces.stops] > total[pieces.starts]))


def too_long(lengths: Ints, truncation: Truncation) -> list[TooLongError]:
    """An error for each row that is too long, with the policy "error"."""
    if truncation.max_length is None or truncation.policy != "error":
        return []
    return [
        TooLongError(f"{lengths[row]} tokens, more than max_length={truncation.max_length}", row=row)
        for row in np.flatnonzero(lengths > truncation.max_length).tolist()
    ]


def in_all(sides: Sequence[MaskedPieces]) -> list[MaskedPieces]:
    """The pieces of rows that have a piece on every side."""
    kept = sides[0].rows
    for side in sides[1:]:
        kept = np.intersect1d(kept, side.rows)
    return [side.where(np.isin(side.rows, kept)) for side in sides]


def tally(offsets: Sequence[Ints], sides: Sequence[MaskedPieces], policy: str) -> TruncationCounts:
    """Counts of rows and tokens, over all sides."""
    rows = len(offsets[0]) - 1
    kept = np.zeros(rows, np.bool_)
    kept[sides[0].rows] = True
    gone = TOO_LONG if policy == "drop" else SILENCED
    changed = np.zeros(rows, np.bool_)
    tokens = {gone: 0}
    for side, ends in zip(sides, offsets):
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
