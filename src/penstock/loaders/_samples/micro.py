"""A micro-batch, before it is made."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.order.plan import Step

__all__ = ["Micro"]

Ints = npt.NDArray[np.int64]


class Micro:
    """One micro-batch: its rows on all ranks, and which of them are this rank's."""

    __slots__ = ("behind", "count", "high", "low", "number", "rows", "step")

    def __init__(self, step: Step, number: int, count: int, rows: Ints, low: int, high: int, behind: Any) -> None:
        self.step, self.number, self.count, self.behind = step, number, count, behind
        self.rows, self.low, self.high = rows, low, high

    @property
    def mine(self) -> Ints:
        return self.rows[self.low : self.high]

    @property
    def size(self) -> int:
        """Rows of this rank."""
        return self.high - self.low
