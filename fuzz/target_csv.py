"""CSV files."""

from __future__ import annotations

from fuzz.target_jsonl import read
from penstock.sources import CsvSource


def run(data: bytes) -> None:
    read(CsvSource, "rows.csv", data)
