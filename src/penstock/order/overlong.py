"""What becomes of rows that are longer than a sample may be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError
from penstock.order.samples import Samples

__all__ = ["Fit", "Truncation"]

Ints = npt.NDArray[np.int64]
Truncation = Literal["error", "drop", "left", "right", "split"]
_TRUNCATIONS = ("error", "drop", "left", "right", "split")


@dataclass(frozen=True, slots=True)
class Fit:
    """What becomes of rows longer than a sample may be: `right` keeps the beginning, `left` the end, `split` all."""

    max_length: int | None
    truncation: Truncation = "error"

    def __post_init__(self) -> None:
        if self.truncation not in _TRUNCATIONS:
            hint = did_you_mean(str(self.truncation), _TRUNCATIONS)
            raise ConfigError(f"truncation must be one of {', '.join(_TRUNCATIONS)}, got {self.truncation!r}{hint}")
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"a sample holds at least one token, got a length of {self.max_length}")

    @property
    def keeps_count(self) -> bool:
        """Whether a row is always one part."""
        return self.max_length is None or self.truncation in ("error", "left", "right")

    def describe(self) -> dict[str, Any]:
        return {"max_length": self.max_length, "truncation": self.truncation}

    def parts(self, rows: Ints, lengths: Ints) -> Samples:
        """Each row as a sample of one part; as several, or none, if it is too long for one."""
        starts = np.zeros(len(rows), np.int64)
        limit = self.max_length
        if limit is None or not (long := lengths > limit).any():
            return _singles(rows, starts, lengths)
        if self.truncation == "drop":
            return _singles(rows[~long], starts[~long], lengths[~long])
        if self.truncation == "right":
            return _singles(rows, starts, np.minimum(lengths, limit))
        if self.truncation == "left":
            return _singles(rows, np.maximum(lengths - limit, 0), np.minimum(lengths, limit))
        if self.truncation == "split":
            pieces = np.maximum(-(-lengths // limit), 1)
            number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            begin = number * limit
            return _singles(np.repeat(rows, pieces), begin, np.minimum(np.repeat(lengths, pieces) - begin, limit))
        first = int(np.argmax(long))
        raise DataError(
            f"row {int(rows[first])} has {int(lengths[first])} tokens, and a sample holds {limit}; pass a larger "
            "length, or truncation='right' (keep the beginning), 'left' (keep the end), 'split' or 'drop'",
            row=int(rows[first]),
        )


def _singles(rows: Ints, starts: Ints, lengths: Ints) -> Samples:
    return Samples(np.arange(len(rows) + 1, dtype=np.int64), rows, starts, lengths, single=True)
