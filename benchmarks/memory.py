"""Suite `memory`: does the process stay under base + budget when one end of the pipeline is slow?

Base is the peak of the same process after the same pipeline ran on a few rows: imports done, threads started. Then the
large input goes through, and the peak that the kernel records shows how far memory rose.

    python benchmarks/memory.py sink|source BUDGET TINY_INPUT LARGE_INPUT OUTPUT FACTS
"""

from __future__ import annotations

import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from facts import own_peak_bytes, report_facts
from job import MAX_WORDS, MIN_WORDS, ZSTD
from measure import CaseError, measure
from table import table

from corpus import DATA, Corpus, read_through, repeat

BUDGETS = ["64 MiB", "256 MiB", "1 GiB"]
INPUT_BYTES = 2_000_000_000
TINY_ROWS = 200
SLOW_BYTES_PER_SECOND = 60e6
"""Sleep of the slow stage: 2 GB take over half a minute, and the other end fills its buffers."""


def run_memory(corpus: Corpus) -> dict[str, Any]:
    """Measure every budget with each slow end, print the table, return the figures."""
    large = repeat(corpus, -(-INPUT_BYTES // corpus.bytes))
    tiny = _first_rows(corpus.path, TINY_ROWS)
    read_through(large)
    figures = {}
    for slow in ("sink", "source"):
        for budget in BUDGETS:
            figures[f"slow {slow}, {budget}"] = one = _run_once(slow, budget, tiny, large)
            print(f"  slow {slow}, {budget}: {one.get('problem') or _short(one)}", flush=True)
    print(f"\n### peak memory against the budget, {large.stat().st_size / 1e6:.0f} MB\n")
    headers = [
        "case",
        "budget MiB",
        "base MiB",
        "peak MiB",
        "rise MiB",
        "rise/budget",
        "private MiB",
        "charged MiB",
        "seconds",
        "held",
    ]
    print(table(headers, [[name, *_cells(one)] for name, one in figures.items()]))
    return figures


def _run_once(slow: str, budget: str, tiny: Path, large: Path) -> dict[str, Any]:
    output = DATA / "out" / "memory.parquet"
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        run = measure([sys.executable, __file__, slow, budget, tiny, large, output])
    except CaseError as error:
        return {"problem": f"failed: {error}"}
    finally:
        output.unlink(missing_ok=True)
    facts = run.facts
    rise = run.peak_bytes - facts["base_bytes"]
    return {
        "budget_bytes": facts["budget_bytes"],
        "base_bytes": facts["base_bytes"],
        "peak_bytes": run.peak_bytes,
        "rise_bytes": rise,
        "private_bytes": run.private_bytes,
        "charged_bytes": facts["charged_bytes"],
        "seconds": facts["seconds"],
        "held": rise <= facts["budget_bytes"],
    }


def _cells(one: dict[str, Any]) -> list[str]:
    if "problem" in one:
        return [*["-"] * 8, one["problem"]]
    sizes = [one["budget_bytes"], one["base_bytes"], one["peak_bytes"], one["rise_bytes"]]
    return [
        *(f"{size / (1 << 20):.0f}" for size in sizes),
        f"{one['rise_bytes'] / one['budget_bytes']:.2f}",
        f"{one['private_bytes'] / (1 << 20):.0f}",
        f"{one['charged_bytes'] / (1 << 20):.0f}",
        f"{one['seconds']:.0f}",
        "yes" if one["held"] else "NO",
    ]


def _short(one: dict[str, Any]) -> str:
    return f"rose by {one['rise_bytes'] / (1 << 20):.0f} MiB in {one['seconds']:.0f} s"


def _first_rows(path: Path, rows: int) -> Path:
    tiny = path.with_name(f"{path.stem}-first-{rows}.jsonl")
    with path.open("rb") as file:
        tiny.write_bytes(b"".join(islice(file, rows)))
    return tiny


def main(slow: str, limit: str, tiny: str, large: str, output: str, facts: str) -> None:
    """The measured process."""
    from penstock import MemoryBudget, Pipeline, PipelineConfig
    from penstock.pipeline.stages import Block
    from penstock.sinks import ParquetSink
    from penstock.sources import JsonlSource
    from penstock.transforms import CountWords, Filter, Lower

    # Subclasses, not wrappers: other capabilities of a stage (blocks, state, durability) stay visible to the engine.
    class SlowSource(JsonlSource):
        def next_block(self, max_bytes: int) -> Block | None:
            block = super().next_block(max_bytes)
            if block is not None:
                time.sleep(block.nbytes / SLOW_BYTES_PER_SECOND)
            return block

    class SlowSink(ParquetSink):
        def consume(self, batch: pa.RecordBatch) -> None:
            time.sleep(batch.nbytes / SLOW_BYTES_PER_SECOND)
            super().consume(batch)

    source_type = SlowSource if slow == "source" else JsonlSource
    sink_type = SlowSink if slow == "sink" else ParquetSink
    words = pc.field("words")

    def run(path: str) -> MemoryBudget:
        budget = MemoryBudget(limit)
        Pipeline(
            source_type(path),
            [Lower("text"), CountWords("text", into="words"), Filter((words >= MIN_WORDS) & (words <= MAX_WORDS))],
            sink_type(output, **ZSTD),
            config=PipelineConfig(),
            budget=budget,
        ).run()
        return budget

    run(tiny)
    base = own_peak_bytes()
    start = time.perf_counter()
    budget = run(large)
    seconds = time.perf_counter() - start
    report_facts(facts, seconds=seconds, base_bytes=base, budget_bytes=budget.capacity, charged_bytes=budget.peak)


if __name__ == "__main__":
    main(*sys.argv[1:])
