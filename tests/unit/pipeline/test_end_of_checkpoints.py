"""Runs with a checkpoint that end once more after they had come to their end, and may have published their rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.errors import StoppedError
from penstock.pipeline import Pipeline
from penstock.pipeline.checkpoint import Checkpoint
from penstock.sinks import JsonlSink, StoreSink, open_sink
from penstock.sources import JsonlSource
from penstock.transforms import Filter

SAVE = Checkpoint.save


def save_no_report(self: Checkpoint, *given: Any, report: Any = None, **more: Any) -> None:
    """The end of a process between its publication of the output and the end of its run."""
    if report is not None:
        raise OSError("the disk is gone")
    SAVE(self, *given, **more)


def sink_into(out: Path) -> Any:
    if out.suffix == ".store":
        return StoreSink(out, tokens=None)
    return open_sink(out) if out.suffix else JsonlSink(out)


def pipeline_into(out: Path, *, least: int = 0) -> Pipeline:
    source = out.with_name("in.jsonl")
    source.write_text("".join(f'{{"n": {n}}}\n' for n in range(100)))
    return Pipeline(JsonlSource(source), [Filter(f"n >= {least}")], sink_into(out))


def publish(out: Path, **options: Any) -> None:
    with patch.object(Checkpoint, "save", save_no_report), pytest.raises(OSError, match="the disk is gone"):
        pipeline_into(out, **options).run(out.with_name("checkpoint"))


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out.csv", "directory", "out.store"])
def test_a_run_that_was_stopped_after_its_output_was_published_is_completed(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    publish(out)
    pipeline = pipeline_into(out)
    source: Any = pipeline.source
    next_block = source.next_block

    def late(max_bytes: int) -> Any:
        runner: Any = pipeline._runner
        runner.context.stop.wait()
        return next_block(max_bytes)

    source.next_block = late
    pipeline.start(tmp_path / "checkpoint")
    pipeline.stop()
    with pytest.raises(StoppedError):
        pipeline.wait()
    report = pipeline_into(out).run(tmp_path / "checkpoint")
    assert (report.rows_in, report.rows_out) == (100, 100)


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "out.csv", "directory", "out.store"])
def test_a_run_without_rows_is_completed_after_its_output_was_published(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    publish(out, least=200)
    report = pipeline_into(out, least=200).run(tmp_path / "checkpoint")
    assert (report.rows_in, report.rows_out) == (100, 0)
