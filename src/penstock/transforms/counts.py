"""Counting by reason, from several threads and processes."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock._forks import renewed
from penstock.pipeline.stages import Transform


class Counts:
    """Counts by reason.

    A pickled copy starts from nothing; what it counts in another process comes back by `end_attempt`, and `add` here.
    """

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())
        self._totals: Counter[str] = Counter()
        self._attempt = threading.local()

    def add(self, reasons: Mapping[str, int]) -> None:
        """Count some more. Reasons that occurred no times leave no entry."""
        occurred = {reason: n for reason, n in reasons.items() if n}
        if not occurred:
            return
        attempt: Counter[str] | None = getattr(self._attempt, "counted", None)
        if attempt is not None:
            attempt.update(occurred)
        with self._lock:
            self._totals.update(occurred)

    def begin_attempt(self) -> None:
        """Remember what this thread counts from here on, so that it can be taken back."""
        self._attempt.counted = Counter()

    def end_attempt(self) -> dict[str, int]:
        """Counts of this thread since `begin_attempt`."""
        attempt: Counter[str] | None = getattr(self._attempt, "counted", None)
        self._attempt.counted = None
        return dict(attempt) if attempt else {}

    def undo_attempt(self) -> None:
        """Take back what this thread counted since `begin_attempt`: the batch failed and will be tried in parts."""
        attempt = Counter(self.end_attempt())
        if attempt:
            with self._lock:
                self._totals.subtract(attempt)
                self._totals = +self._totals

    def totals(self) -> dict[str, int]:
        """Everything since the start, or since `clear`."""
        with self._lock:
            return dict(self._totals)

    def clear(self) -> None:
        with self._lock:
            self._totals.clear()

    def __reduce__(self) -> tuple[type[Counts], tuple[()]]:
        return Counts, ()


class CountingTransform(Transform):
    """A transform that counts, by reason, the rows it leaves out and the rows it changes for cause but keeps."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._changes = Counts()
        self.dropped_examples = DroppedExamples()

    @property
    def counts(self) -> dict[str, int]:
        """Rows by reason, left out or changed, since the start or the last `reset`."""
        return self._counts.totals() | self._changes.totals()

    def count(self, reasons: Mapping[str, int]) -> None:
        """Rows of this batch that are left out, by reason."""
        self._counts.add(reasons)

    def count_kept(self, reasons: Mapping[str, int]) -> None:
        """Rows of this batch that are kept with something changed, by reason."""
        self._changes.add(reasons)

    def add_counts(self, dropped: Mapping[str, int], changed: Mapping[str, int] = MappingProxyType({})) -> None:
        """Take over what a copy of this transform has counted, as if it had been counted here."""
        self._counts.add(dropped)
        self._changes.add(changed)

    def begin_attempt(self) -> None:
        """A batch begins in this thread: `end_attempt` tells what was counted for it, `undo_attempt` takes it back."""
        self._counts.begin_attempt()
        self._changes.begin_attempt()

    def end_attempt(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counts of the batch: rows left out, rows changed but kept."""
        return self._counts.end_attempt(), self._changes.end_attempt()

    def undo_attempt(self) -> None:
        self._counts.undo_attempt()
        self._changes.undo_attempt()

    def reset(self) -> None:
        """Start counting from zero."""
        self._counts.clear()
        self._changes.clear()


MOST_EXAMPLES = 3
"""Rows kept for each reason."""
_MOST_OFFERED = 16
"""Rows looked at in a batch for each reason, so that a filter that drops millions costs nothing more."""
MOST_CHARACTERS = 1000
_MOST_REASONS = 50


class DroppedExamples:
    """Rows by reason. Of all rows that are offered, those with the smallest hashes are kept, in any order of threads.

    A pickled copy starts from nothing, and what it keeps in another process stays there.
    """

    def __init__(self) -> None:
        self._lock = renewed(threading.Lock())
        self._kept: dict[str, dict[int, str]] = {}

    def add(self, reason: str, batch: pa.RecordBatch, dropped: np.ndarray[Any, Any], column: str | None = None) -> None:
        """Offer the first rows of a batch that are marked as dropped."""
        for row in np.flatnonzero(dropped)[:_MOST_OFFERED].tolist():
            text = _shown(batch.slice(row, 1), column)
            key = xxhash.xxh3_64_intdigest(text.encode("utf-8", "replace"))
            with self._lock:
                kept = self._kept.get(reason)
                if kept is None:
                    if len(self._kept) >= _MOST_REASONS:
                        return
                    kept = self._kept[reason] = {}
                kept[key] = text
                if len(kept) > MOST_EXAMPLES:
                    del kept[max(kept)]

    def all(self) -> dict[str, list[str]]:
        """The rows as text, by reason, in order."""
        with self._lock:
            return {reason: [kept[key] for key in sorted(kept)] for reason, kept in sorted(self._kept.items())}

    def __reduce__(self) -> tuple[type[DroppedExamples], tuple[()]]:
        return DroppedExamples, ()


def _shown(row: pa.RecordBatch, column: str | None) -> str:
    """The text of a row, or all its columns as JSON; cut, with the number of characters that are missing."""
    if column is not None and column in row.schema.names:
        value = row.column(column)[0].as_py()
    else:
        value = row.to_pylist()[0]
    text = (
        value if isinstance(value, str) else orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
    )
    more = len(text) - MOST_CHARACTERS
    return text if more <= 0 else f"{text[:MOST_CHARACTERS]} ... ({more:,} more characters)"
