"""JSON files of any layout."""

from __future__ import annotations

from fuzz.target_jsonl import read
from penstock.sources import JsonSource


def run(data: bytes) -> None:
    read(JsonSource, "rows.json", data)
