"""Rows that become many: a batch is delivered in parts, in order, and a run resumes between any two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import StageError
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import JsonlSource
from penstock.testing import assert_resumes_exactly
from penstock.transforms import Filter, FlatMap

ROWS, TIMES = 700, 40
EXPECTED = [{"id": row, "k": k} for row in range(ROWS) for k in range(TIMES) if k != 7]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"id": row}) + "\n" for row in range(ROWS)))
    return path


def explode(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"id": row["id"], "k": k} for k in range(TIMES)]


def pipeline(rows: Path, sink: Any = None, **config: Any) -> Pipeline:
    stages = [FlatMap(explode), Filter("k != 7")]
    return Pipeline(JsonlSource(rows), stages, sink, PipelineConfig(**config), budget="1 MiB")


@pytest.mark.parametrize("workers", [1, 3])
def test_parts_come_in_order_and_small(rows: Path, workers: int) -> None:
    with pipeline(rows, workers=workers) as running:
        batches = list(running)
    assert [row for batch in batches for row in batch.to_pylist()] == EXPECTED
    # After the first rows, from which it is known what a row becomes.
    assert max(batch.nbytes for batch in batches[1:]) < 1 << 17
    assert len(batches) > 5


def test_a_run_resumes_between_any_two_parts(rows: Path) -> None:
    rows.write_text("".join(json.dumps({"id": row}) + "\n" for row in range(300)))
    assert_resumes_exactly(lambda: pipeline(rows, workers=2))
    assert_resumes_exactly(lambda: pipeline(rows, workers=2, batch_rows=777))


def test_a_checkpoint_between_two_parts_loses_and_repeats_nothing(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, checkpoint, sink = tmp_path / "out.jsonl", tmp_path / "checkpoint", JsonlSink(tmp_path / "out.jsonl")
    consume, consumed = sink.consume, []

    def fail_later(batch: pa.RecordBatch) -> None:
        consumed.append(batch.num_rows)
        if len(consumed) == 4:
            raise RuntimeError("the disk is gone")
        consume(batch)

    monkeypatch.setattr(sink, "consume", fail_later)
    with pytest.raises(StageError, match="the disk is gone"):
        pipeline(rows, sink, checkpoint_seconds=0).run(checkpoint)
    assert 0 < sum(consumed) < len(EXPECTED)
    report = pipeline(rows, JsonlSink(out), checkpoint_seconds=0).run(checkpoint)
    assert [json.loads(line) for line in out.read_text().splitlines()] == EXPECTED
    assert report.rows_out == len(EXPECTED)


def test_a_bad_row_of_a_later_part_is_named(rows: Path) -> None:
    def fail(row: dict[str, Any]) -> list[dict[str, Any]]:
        if row["id"] == 612:
            raise ValueError("unwanted")
        return explode(row)

    sink = MemorySink()
    run = Pipeline(JsonlSource(rows), [FlatMap(fail)], sink, PipelineConfig(on_error="skip"), budget="1 MiB").run
    assert sum(run().skipped.values()) == 1
    assert [row["id"] for row in sink.rows()][::TIMES] == [row for row in range(ROWS) if row != 612]
    with pytest.raises(StageError, match=r"row 612\b.*unwanted"):
        Pipeline(JsonlSource(rows), [FlatMap(fail)], MemorySink(), budget="1 MiB").run()
