"""Checkpointed run that is killed with SIGKILL and started again: the output has every row exactly once.

The job runs in a separate process, which the example kills. `--rows` sets the number of rows.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from penstock import Pipeline, PipelineConfig
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource


def slow_square(row: dict) -> dict:
    time.sleep(0.0005)
    return {**row, "square": row["id"] ** 2}


def job(folder: Path) -> None:
    """Start or resume the run: the call is the same."""
    source, sink = JsonlSource(folder / "in.jsonl"), ParquetSink(folder / "out.parquet")
    pipeline = Pipeline(source, [slow_square], sink, PipelineConfig(checkpoint_seconds=0.1), budget="1 MiB")
    report = pipeline.run(checkpoint=folder / "run")
    print(f"  finished; went on from a checkpoint: {report.resumed}; rows: {report.rows_out:,}", flush=True)


def kill_and_resume(folder: Path, rows: int) -> None:
    (folder / "in.jsonl").write_text("".join(json.dumps({"id": i, "pad": "x" * 80}) + "\n" for i in range(rows)))
    command = [sys.executable, str(Path(__file__).resolve()), "--job", str(folder)]
    process = subprocess.Popen(command)
    kept, done = folder / "run" / "checkpoint.json", 0
    while process.poll() is None and done < rows // 4:
        time.sleep(0.01)
        done = json.loads(kept.read_text())["rows_out"] if kept.exists() else 0
    process.kill()
    print(f"  killed (exit code {process.wait()}) after {done:,} of {rows:,} rows were safe")
    print(f"  output visible: {(folder / 'out.parquet').exists()}", flush=True)
    subprocess.run(command, check=True)
    ids = pq.read_table(folder / "out.parquet").column("id").to_pylist()
    print(f"  every row exactly once, in order: {ids == list(range(rows))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--job", type=Path)
    given = parser.parse_args()
    if given.job:
        job(given.job)
    else:
        with tempfile.TemporaryDirectory() as name:
            kill_and_resume(Path(name), given.rows)
