"""The job in penstock."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pyarrow.compute as pc
from job import MAX_WORDS, MIN_WORDS, ZSTD, tidy_row

from engines import Work
from penstock import MemoryBudget, Pipeline, PipelineConfig
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource
from penstock.transforms import CountWords, Filter, Lower, Map

BUDGET = "256 MiB"


def vector(source: Path, output: Path) -> Work:
    return Pipeline(
        JsonlSource(source),
        [Lower("text"), CountWords("text", into="words"), _long_enough()],
        ParquetSink(output, **ZSTD),
        config=PipelineConfig(),
        budget=MemoryBudget(BUDGET),
    ).run


def row(source: Path, output: Path) -> Work:
    return _rows(source, output, workers="process")


def row_in_threads(source: Path, output: Path) -> Work:
    return _rows(source, output, workers="auto")


def _rows(source: Path, output: Path, workers: Literal["auto", "process"]) -> Work:
    return Pipeline(
        JsonlSource(source),
        [Map(tidy_row), _long_enough()],
        ParquetSink(output, **ZSTD),
        config=PipelineConfig(workers=workers),
        budget=MemoryBudget(BUDGET),
    ).run


def _long_enough() -> Filter:
    """Filter by an expression in both versions, as in Polars: only the function per row is Python."""
    words = pc.field("words")
    return Filter((words >= MIN_WORDS) & (words <= MAX_WORDS))
