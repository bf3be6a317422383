"""Suite `overhead`: cost of the engine per batch when no stage does anything.

python benchmarks/overhead.py FACTS
"""

from __future__ import annotations

import sys
import time
from statistics import median
from typing import Any

import pyarrow as pa
from facts import report_facts
from measure import CaseError, measure
from table import table

BATCHES = 20_000
REPEATS = 5
TARGET_MICROSECONDS = 50.0


class SameBatch:
    """Source that returns the same tiny batch repeatedly."""

    def __init__(self, batches: int) -> None:
        self._left = batches
        self._batch = pa.record_batch({"number": [1, 2, 3]})

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._left:
            return None
        self._left -= 1
        return self._batch


class Identity:
    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch


class Drop:
    def consume(self, batch: pa.RecordBatch) -> None:
        return

    def flush(self) -> None:
        return


def run_overhead() -> dict[str, Any]:
    """Measure, print, return the figures."""
    try:
        microseconds = measure([sys.executable, __file__]).facts["microseconds"]
    except CaseError as error:
        print(f"\n### engine overhead\n\nfailed: {error}")
        return {"problem": str(error)}
    middle = median(microseconds)
    print(f"\n### engine overhead, {BATCHES} batches, {REPEATS} runs\n")
    cells = [f"{value:.1f}" for value in (middle, min(microseconds), max(microseconds), TARGET_MICROSECONDS)]
    met = middle < TARGET_MICROSECONDS
    print(table(["µs a batch: median", "min", "max", "target below", "met"], [[*cells, "yes" if met else "NO"]]))
    return {"microseconds": microseconds, "median_microseconds": middle, "met": met}


def main(facts: str) -> None:
    """The measured process."""
    from penstock import MemoryBudget, Pipeline, PipelineConfig

    microseconds = []
    for _ in range(REPEATS):
        pipeline = Pipeline(
            SameBatch(BATCHES), [Identity()], Drop(), config=PipelineConfig(), budget=MemoryBudget("64 MiB")
        )
        start = time.perf_counter()
        pipeline.run()
        microseconds.append((time.perf_counter() - start) / BATCHES * 1e6)
    report_facts(facts, microseconds=microseconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
