"""Counting by reason, from several threads and processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from penstock.pipeline.stages import Transform

__all__ = ["Counting", "Counts"]


class Counts:
    """How often each reason occurred.

    A pickled copy starts from nothing: what it counts in another process comes back by `drain` there and `add` here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[str] = Counter()
        self._undrained: Counter[str] = Counter()

    def add(self, reasons: Mapping[str, int]) -> None:
        """Count some more. Reasons that occurred no times leave no entry."""
        occurred = {reason: n for reason, n in reasons.items() if n}
        if not occurred:
            return
        with self._lock:
            self._totals.update(occurred)
            self._undrained.update(occurred)

    def drain(self) -> dict[str, int]:
        """What was added since the last drain."""
        with self._lock:
            drained = dict(self._undrained)
            self._undrained.clear()
        return drained

    def totals(self) -> dict[str, int]:
        """Everything since the start, or since `clear`."""
        with self._lock:
            return dict(self._totals)

    def clear(self) -> None:
        with self._lock:
            self._totals.clear()
            self._undrained.clear()

    def __reduce__(self) -> tuple[type[Counts], tuple[()]]:
        return Counts, ()


class Counting(Transform):
    """A transform that counts, by reason, the rows it drops or changes."""

    def __init__(self) -> None:
        self._counts = Counts()

    @property
    def counts(self) -> dict[str, int]:
        """Rows by reason, since the start or the last `reset`."""
        return self._counts.totals()

    def count(self, reasons: Mapping[str, int]) -> None:
        """Rows of this batch, by reason."""
        self._counts.add(reasons)

    def drain_counts(self) -> dict[str, int]:
        """Rows by reason since the last call."""
        return self._counts.drain()

    def add_counts(self, reasons: Mapping[str, int]) -> None:
        """Take over what a copy of this transform has drained, as if it had been counted here."""
        self._counts.add(reasons)

    def reset(self) -> None:
        """Start counting from zero."""
        self._counts.clear()
