"""Process workers for slow pure-Python functions: lambdas work, and no `if __name__ == "__main__"` is needed."""

import os

from penstock import Pipeline, PipelineConfig
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.transforms import Filter


def collatz(row: dict) -> dict:
    """Pure Python, which holds the interpreter lock: threads would not run in parallel."""
    steps, n = 0, row["start"]
    while n != 1:
        n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
    return {**row, "steps": steps, "pid": os.getpid()}


least = 50
sink = MemorySink()
pipeline = Pipeline(
    MemorySource({"start": list(range(1, 8_001))}),
    [collatz, Filter(lambda row: row["steps"] >= least)],  # a lambda over a local variable: both are sent
    sink,
    PipelineConfig(workers="process", max_workers=2, batch_rows=500),
)
report = pipeline.run()
rows = sink.rows()
# The main process handles the first batch, to infer the columns that the function returns.
others = {row["pid"] for row in rows} - {os.getpid()}
print(f"{report.rows_out:,} of {report.rows_in:,} rows kept; {len(others)} other processes worked on them")
print("in order:", [row["start"] for row in rows] == sorted(row["start"] for row in rows))
print("the longest:", max(rows, key=lambda row: row["steps"]) | {"pid": "..."})
