"""Messy JSON Lines to clean Parquet under a small budget; then a run that is killed and resumes."""

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

WORDS = "Water runs downhill; the Penstock feeds the turbine all it can take and never more, größer geht nicht"


def make_corpus(folder: Path, rows: int) -> None:
    """Write two files. The second is gzipped and has a field the first lacks; some lines of both are truncated."""
    folder.mkdir()
    rng = random.Random(7)
    sentences = [" ".join(rng.choices(WORDS.split(), k=rng.randrange(4, 24))) for _ in range(2000)]
    lines = []
    for i in range(rows):
        text = " \t ".join(rng.choices(sentences, k=rng.randrange(8)))
        row = {"id": i, "text": text or None, "tags": ["a", "b"][: i % 3]} | ({"late": i} if i >= rows // 2 else {})
        line = json.dumps(row).encode()
        lines.append(line if i % (rows // 12) else line[: len(line) // 2])
    (folder / "a.jsonl").write_bytes(b"\n".join(lines[: rows // 2]) + b"\n")
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines[rows // 2 :]) + b"\n", compresslevel=1))


def main(rows: int) -> None:
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        make_corpus(Path("corpus"), rows)
        steps = [DropNulls("text"), NormalizeWhitespace("text"), Lower("text"), CountWords("text")]
        steps += [Filter("words >= 20", reason="too short"), lambda row: row | {"first": row["text"].split()[0]}]
        config = PipelineConfig(on_error="quarantine", max_failure_ratio=0.01)
        pipeline = Pipeline(JsonlSource("corpus"), steps, ParquetSink("clean.parquet"), config, budget="64 MiB")
        console.print(f"[bold]1. Clean {rows:,} rows[/]\n{pipeline}".replace("[budget", r"\[budget"))
        with progress_on(Console(stderr=True), Extent.of(pipeline.source), "penstock") as progress:
            report = pipeline.run(progress=progress)
        console.print(closing_table(report, budget_bytes=pipeline.budget.capacity))
        bad = Path("clean.parquet.quarantine.jsonl").read_text().splitlines()
        console.print(f"the first of {len(bad)} quarantined rows: {bad[0][:110]}...", markup=False)
        console.print("[bold]2. Kill a run in the middle, and go on[/]")
        kill_and_resume(Path(name), max(2000, rows // 20))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=120_000)
    main(parser.parse_args().rows)
