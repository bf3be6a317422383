"""What every sink promises, by itself and in a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock.sinks
from penstock.errors import ConfigError, FailureBudgetError, StageError
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Pipeline, PipelineConfig, Transform
from penstock.sinks import MemorySink
from penstock.sources import MemorySource
from penstock.testing import FailingTransform, RowsSource, assert_sink_contract

ROWS = [{"n": i, "text": f'row {i}, "quoted"\n', "x": i / 4 + 0.1 if i % 5 else None} for i in range(60)]


def left_in(directory: Path) -> list[str]:
    return [str(path.relative_to(directory)) for path in directory.rglob("*")]


def test_every_sink_is_covered(sink_kinds: set[type]) -> None:
    public = {getattr(penstock.sinks, name) for name in penstock.sinks.__all__}
    assert sink_kinds == {thing for thing in public if isinstance(thing, type)}


def test_a_sink_keeps_its_contract_by_itself(sink_case: Any) -> None:
    assert_sink_contract(sink_case.make, sink_case.see)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("budget", ["32 KiB", "256 MiB"])
def test_every_row_arrives_once_and_in_order_whatever_the_workers_and_the_budget(
    tmp_path: Path, sink_case: Any, workers: int, budget: str
) -> None:
    sink, limit = sink_case.make(tmp_path), MemoryBudget(budget)
    report = Pipeline(RowsSource(ROWS), [], sink, PipelineConfig(workers=workers), limit).run()
    assert sink_case.see(sink) == ROWS
    assert (report.rows_in, report.rows_out) == (60, 60)
    assert limit.used == 0


def test_a_run_without_rows_ends_well(tmp_path: Path, sink_case: Any) -> None:
    sink = sink_case.make(tmp_path)
    nothing = MemorySource(pa.table({"n": pa.array([], pa.int64())}))
    assert Pipeline(nothing, [], sink).run().rows_out == 0
    assert sink_case.see(sink) == []


def test_a_failed_run_leaves_nothing_behind(tmp_path: Path, sink_case: Any) -> None:
    sink = sink_case.make(tmp_path)
    with pytest.raises(StageError, match=r"\b55\b"):
        Pipeline(RowsSource(ROWS), [FailingTransform("n", [55])], sink).run()
    assert left_in(tmp_path) == []


def test_a_run_that_is_stopped_leaves_nothing_behind(tmp_path: Path, sink_case: Any) -> None:
    sink = sink_case.make(tmp_path)
    numbers = MemorySource(pa.table({"n": range(1_000_000)}))
    pipeline = Pipeline(numbers, [], sink, PipelineConfig(batch_rows=100), budget="64 KiB")
    pipeline.start()
    pipeline.stop()
    assert left_in(tmp_path) == []


class Broken(MemorySink):
    """Fails at its third batch."""

    def consume(self, batch: pa.RecordBatch) -> None:
        if len(self.batches) == 2:
            raise RuntimeError("gone")
        super().consume(batch)

    def __repr__(self) -> str:
        return "Broken()"


def test_a_sink_that_fails_is_named() -> None:
    with pytest.raises(StageError, match=r"Broken\(\).*RuntimeError"):
        Pipeline(RowsSource(ROWS), [], Broken()).run()


@pytest.mark.parametrize("stage", ["the sink", "the failure budget"])
def test_memory_is_given_back_when_delivery_fails(stage: str) -> None:
    if stage == "the sink":
        pipeline = Pipeline(RowsSource(ROWS), [], Broken())
    else:
        config = PipelineConfig(on_error="skip", max_failures=0)
        pipeline = Pipeline(RowsSource(ROWS), [FailingTransform("n", [7])], MemorySink(), config)
    with pytest.raises((StageError, FailureBudgetError)):
        pipeline.run()
    assert pipeline.budget.used == 0


class Stumbling(Transform):
    """Raises at a row the first time, and is cured when a file appears."""

    def __init__(self, cured: Path, number: int) -> None:
        self._cured, self._number = cured, number

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._cured.exists() and self._number in batch["n"].to_pylist():
            raise ConnectionError("stumbled")
        return batch

    def __repr__(self) -> str:
        return "Stumbling()"


@pytest.mark.parametrize("number", [0, 23, 59])
def test_a_run_with_a_checkpoint_goes_on_after_a_failure_and_repeats_nothing(
    tmp_path: Path, sink_case: Any, number: int
) -> None:
    out, cured = tmp_path / "out", tmp_path / "cured"
    out.mkdir()
    config = PipelineConfig(checkpoint_seconds=0, batch_rows=4)

    def make() -> Any:
        return Pipeline(RowsSource(ROWS), [Stumbling(cured, number)], sink_case.make(out), config)

    if not sink_case.durable:
        with pytest.raises(ConfigError, match=r"checkpoint=.*Sink\(\)"):
            make().run(tmp_path / "checkpoint")
        return
    with pytest.raises(StageError, match="stumbled"):
        make().run(tmp_path / "checkpoint")
    assert [name for name in left_in(out) if not name.startswith(".")] == []
    cured.touch()
    pipeline = make()
    report = pipeline.run(tmp_path / "checkpoint")
    assert sink_case.see(pipeline.sink) == ROWS
    assert (report.rows_in, report.rows_out) == (60, 60)
    # A finished run says so again, and touches nothing.
    again = make()
    assert again.run(tmp_path / "checkpoint").rows_out == 60
    assert sink_case.see(again.sink) == ROWS
