"""Truncation of rows that are longer than a limit: one set of policies, and their arithmetic on lengths.

cut = Truncation("split", max_length=2048)
parts = cut.parts(lengths)                  # part i: tokens starts[i] to starts[i] + lengths[i] of row rows[i]
cut.lost_tokens(lengths)                    # tokens that are in no part
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError

Ints = npt.NDArray[np.int64]
Policy = Literal["error", "drop", "left", "right", "split"]
POLICIES: tuple[str, ...] = get_args(Policy)
_MEANINGS = {"right": " (keep the beginning)", "left": " (keep the end)"}


class TruncatedParts(NamedTuple):
    """Parts of rows: part i is tokens `starts[i]` to `starts[i] + lengths[i]` of row `rows[i]`."""

    rows: Ints
    starts: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True)
class Truncation:
    """Policy for rows longer than `max_length` tokens; None: rows of any length pass.

    "error" refuses the row, "drop" leaves it out, "right" cuts its end off, "left" its beginning, and "split" makes
    several parts of it.
    """

    policy: Policy = "error"
    max_length: int | None = None
    choices: tuple[str, ...] = ("right", "left", "split", "drop")
    """Policies that the user may choose instead of "error"."""

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            hint = did_you_mean(str(self.policy), POLICIES)
            raise ConfigError(f"truncation must be one of {', '.join(POLICIES)}, got {self.policy!r}{hint}")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length must be at least 1 token, got {self.max_length}")

    @property
    def one_to_one(self) -> bool:
        """True if every row becomes exactly one part."""
        return self.max_length is None or self.policy in ("error", "left", "right")

    def parts(self, lengths: Ints, rows: Ints | None = None) -> TruncatedParts:
        """Parts of rows with these lengths, in order. `rows` are the numbers of the rows, if not 0, 1, 2, ..."""
        if rows is None:
            rows = np.arange(len(lengths), dtype=np.int64)
        starts, limit = np.zeros(len(rows), np.int64), self.max_length
        if limit is None or not (long := lengths > limit).any():
            return TruncatedParts(rows, starts, lengths)
        if self.policy == "drop":
            return TruncatedParts(rows[~long], starts[~long], lengths[~long])
        if self.policy == "right":
            return TruncatedParts(rows, starts, np.minimum(lengths, limit))
        if self.policy == "left":
            return TruncatedParts(rows, np.maximum(lengths - limit, 0), np.minimum(lengths, limit))
        if self.policy == "split":
            counts = np.maximum(-(-lengths // limit), 1)
            starts = (np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)) * limit
            return TruncatedParts(
                np.repeat(rows, counts), starts, np.minimum(np.repeat(lengths, counts) - starts, limit)
            )
        row = int(rows[first := int(np.argmax(long))])
        raise DataError(
            f"row {row} has {int(lengths[first])} tokens, more than the limit of {limit}; raise the limit, or pass "
            f"truncation={', '.join(repr(each) + _MEANINGS.get(each, '') for each in self.choices)}",
            row=row,
        )

    def lost_tokens(self, lengths: Ints) -> int:
        """Tokens of rows with these lengths that are in no part."""
        if self.max_length is None or self.policy in ("error", "split"):
            return 0
        long = lengths[lengths > self.max_length]
        return int(long.sum()) - (0 if self.policy == "drop" else len(long) * self.max_length)
