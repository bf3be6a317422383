"""The main job, on data made here: messy JSON Lines, partly gzipped, to clean Parquet under a small budget.

Then a run that is killed in the middle and goes on. `make demo` runs this; `--rows` makes it smaller or larger.
"""

import argparse
import contextlib
import gzip
import json
import random
import tempfile
from pathlib import Path

from checkpoint import kill_and_resume
from rich.console import Console

from penstock import Pipeline, PipelineConfig
from penstock.observe import Extent, closing_table, progress_on
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource
from penstock.transforms import CountWords, DropNulls, Filter, Lower, NormalizeWhitespace

WORDS = "Water runs downhill; the Penstock feeds the turbine all it can take and never more, größer geht nicht".split()


def make_corpus(folder: Path, rows: int) -> None:
    """Two files. The second is gzipped and has a field the first lacks; every 1500th line is cut in half."""
    folder.mkdir()
    rng = random.Random(7)
    sentences = [" ".join(rng.choices(WORDS, k=rng.randrange(4, 24))) for _ in range(2000)]
    for half, opener in enumerate((open, gzip.open)):
        with opener(folder / ("b.jsonl.gz" if half else "a.jsonl"), "wb") as file:
            for i in range(half * rows // 2, (half + 1) * rows // 2):
                text = " \t ".join(rng.choices(sentences, k=rng.randrange(8)))
                row = {"id": i, "text": text or None, "meta": {"tags": ["a", "b"][: i % 3]}} | ({"late": i} if half else {})
                line = json.dumps(row).encode()
                file.write((line if i % 1500 else line[: len(line) // 2]) + b"\n")


def main(rows: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make_corpus(Path("corpus"), rows)
        steps = [DropNulls("text"), NormalizeWhitespace("text"), Lower("text"), CountWords("text")]
        steps += [Filter("words >= 20", reason="too short"), lambda row: row | {"first": row["text"].split()[0]}]
        config = PipelineConfig(on_error="quarantine", max_failure_ratio=0.01)
        pipeline = Pipeline(JsonlSource("corpus"), steps, ParquetSink("clean.parquet"), config, budget="64 MiB")
        console.print(f"[bold]1. Clean {rows:,} rows[/]")
        console.print(pipeline, markup=False)
        with progress_on(Console(stderr=True), Extent.of(pipeline.source), "penstock") as progress:
            report = pipeline.run(progress=progress)
        console.print(closing_table(report, budget_bytes=pipeline.budget.capacity))
        bad = Path("clean.parquet.quarantine.jsonl").read_text().splitlines()
        console.print(f"the first of {len(bad)} quarantined rows:\n  {bad[0][:150]}...", markup=False)
        console.print("[bold]2. Kill a run in the middle, and go on[/]")
        kill_and_resume(Path(name), max(2000, rows // 20))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=120_000)
    main(parser.parse_args().rows)
