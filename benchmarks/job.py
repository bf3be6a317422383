"""Job of the speed suite, with its constants. Imports nothing, so that no engine pays for the imports of another.

Read JSONL, lower-case `text`, add `words`, keep rows with 50 to 100,000 words, write Parquet (zstd, level 1).
"""

from __future__ import annotations

from typing import Any

MIN_WORDS, MAX_WORDS = 50, 100_000
COLUMNS = ["id", "text", "lang", "score", "words"]
ZSTD: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
WRITE_ROWS = 10_000
"""Rows per row group, for engines where it can be set."""


def tidy_row(row: dict[str, Any]) -> dict[str, Any]:
    """Job for one row, in plain Python."""
    return {**row, "text": row["text"].lower(), "words": len(row["text"].split())}


def keep_row(row: dict[str, Any]) -> bool:
    return MIN_WORDS <= row["words"] <= MAX_WORDS
