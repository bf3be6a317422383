"""Scales of charts: where a value lies between the edges of a drawing, and which values its axis names."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.html.markup import shown_number


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` on a line from 0 to 1; logarithmic if asked, then `low` is above 0."""

    low: float
    high: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Place of a value, from 0 to 1; one beyond the ends is at the end."""
        if not math.isfinite(value):
            return 0.0
        low, high = self._bent(self.low), self._bent(self.high)
        return min(1.0, max(0.0, (self._bent(max(value, self.low)) - low) / ((high - low) or 1.0)))

    def ticks(self, most: int = 5) -> list[float]:
        """Round values for an axis, at most about `most` of them."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            powers = [10.0**power for power in range(first, last + 1, max(1, math.ceil((last - first + 1) / most)))]
            return powers if len(powers) > 1 else [self.low, self.high]
        width = (self.high - self.low) or 1.0
        step = 10.0 ** math.floor(math.log10(width / most))
        step *= next(factor for factor in (1, 2, 5, 10) if width / (step * factor) <= most)
        first = math.ceil(self.low / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]

    def _bent(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value


def short_number(value: float) -> str:
    """`12k`, `3.4M`, `0.25`: the label of an axis."""
    for size, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{mark}"
    return shown_number(round(value, 6))
