"""The job that every engine does, and what it is made of. Imports nothing, so that no engine carries another's weight.

Read JSONL, lower-case `text`, add `words`, keep rows with 50 to 100,000 words, write Parquet (zstd, level 1).
"""

from __future__ import annotations

from typing import Any

MIN_WORDS, MAX_WORDS = 50, 100_000
COLUMNS = ["id", "text", "lang", "score", "words"]
ZSTD: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
WRITE_ROWS = 10_000
"""Rows per row group where that is ours to say."""


def tidy_row(row: dict[str, Any]) -> dict[str, Any]:
    """The job for one row, in plain Python."""
    return {**row, "text": row["text"].lower(), "words": len(row["text"].split())}


def keep_row(row: dict[str, Any]) -> bool:
    return MIN_WORDS <= row["words"] <= MAX_WORDS
