"""Examples of rows that a filter leaves out: a few for each reason, for people who want to see what is lost."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock._forks import renewed

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
