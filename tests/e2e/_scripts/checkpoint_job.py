"""A pipeline with a checkpoint that drops, refuses and changes rows, slowly enough to be killed in the middle."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from penstock import MemoryBudget, Pipeline, PipelineConfig
from penstock.pipeline import Sink
from penstock.sinks import DeltaSink, ParquetSink, open_sink
from penstock.sources import JsonlSource
from penstock.transforms import Filter, Map


def work(row: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.0003)
    if row["n"] % 500 == 499:
        raise ValueError("bad")
    return {"n": row["n"], "twice": 2 * row["n"], "text": row["text"].upper()}


def sink_of(out: str) -> Sink:
    if out.endswith(".delta"):
        return DeltaSink(out, commit="checkpoint" if out.endswith("live.delta") else "end", mode="overwrite")
    return ParquetSink(out) if out.endswith("parts") else open_sink(out)


def main(source: str, out: str, kept: str) -> None:
    report = Pipeline(
        JsonlSource(source),
        [Filter("bit_wise_and(n, 31) != 7"), Map(work)],
        sink_of(out),
        PipelineConfig(checkpoint_seconds=0.01, on_error="quarantine", quarantine=f"{kept}/bad.jsonl"),
        MemoryBudget("64 KiB"),
    ).run(checkpoint=kept)
    print(report.rows_in, report.rows_out, sum(report.quarantined.values()), sum(report.dropped.values()))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
