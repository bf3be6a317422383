"""What every source promises, by itself and in a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import penstock.sources
from penstock.errors import DataError, StageError
from penstock.memory.budget import MemoryBudget
from penstock.pipeline import Map, Pipeline, PipelineConfig, Stateful, Transform
from penstock.sinks import MemorySink
from penstock.sources import (
    ArrowSource,
    CsvSource,
    IteratorSource,
    JsonlSource,
    JsonSource,
    MemorySource,
    ParquetSource,
    TextSource,
)
from penstock.testing import SlowSink, assert_resumes_exactly, assert_source_contract


class Numbered(Transform):
    """Adds the number of each row; needs order, so it runs alone."""

    def __init__(self) -> None:
        self._next = 0

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        first, self._next = self._next, self._next + batch.num_rows
        return batch.append_column("number", pa.array(range(first, self._next), pa.int64()))

    def reset(self) -> None:
        self._next = 0

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = state["next"]


class Choking(Transform):
    """Raises when it is given the row with this number among all rows it sees; must run on one worker."""

    def __init__(self, rows: list[dict[str, Any]], number: int) -> None:
        self._wanted = repr(rows[number])

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if any(repr(row) == self._wanted for row in batch.to_pylist()):
            raise ZeroDivisionError("choked")
        return batch

    def __repr__(self) -> str:
        return "Choking()"


def test_every_source_is_covered(source_kinds: set[type]) -> None:
    public = {getattr(penstock.sources, name) for name in penstock.sources.__all__}
    assert source_kinds == {thing for thing in public if isinstance(thing, type)}


def test_a_source_keeps_its_contract_by_itself(source_case: Any) -> None:
    assert_source_contract(source_case.make, source_case.rows)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("budget", ["64 KiB", "256 MiB"])
def test_rows_come_in_order_and_once_whatever_the_workers_and_the_budget(
    source_case: Any, workers: int, budget: str
) -> None:
    sink, limit = MemorySink(), MemoryBudget(budget)
    same = Map(lambda batch: batch, batch=True)
    report = Pipeline(source_case.make(), [same, Numbered()], sink, PipelineConfig(workers=workers), limit).run()
    wanted = [{**row, "number": i} for i, row in enumerate(source_case.rows)]
    assert sink.rows() == wanted
    assert (report.rows_in, report.rows_out) == (len(wanted), len(wanted))
    assert limit.used == 0


@pytest.mark.parametrize("batch_rows", [1, 7])
def test_stopping_after_any_batch_and_resuming_is_exact(source_case: Any, batch_rows: int) -> None:
    if batch_rows == 1 and len(source_case.rows) > 20:
        batch_rows = 3
    config = PipelineConfig(workers=2, batch_rows=batch_rows)
    assert isinstance(source_case.make(), Stateful)
    assert_resumes_exactly(lambda: Pipeline(source_case.make(), [Numbered()], config=config))


@pytest.mark.parametrize("workers", [1, 4])
def test_a_failing_transform_is_named_with_the_file_and_the_row(source_case: Any, workers: int) -> None:
    for number in (0, len(source_case.rows) // 2 + 1, len(source_case.rows) - 1):
        choking = Choking(source_case.rows, number)
        wanted = next(i for i, row in enumerate(source_case.rows) if repr(row) == choking._wanted)
        sink = MemorySink()
        pipeline = Pipeline(source_case.make(), [choking], sink, PipelineConfig(workers=workers))
        with pytest.raises(StageError, match=r"Choking\(\).*ZeroDivisionError") as caught:
            pipeline.run()
        assert (caught.value.stage, caught.value.file, caught.value.row) == ("Choking()", *source_case.places[wanted])
        assert pipeline.budget.used == 0


def test_bad_input_surfaces_in_the_caller_with_file_and_row(bad_source: Any) -> None:
    source, file, row = bad_source()
    pipeline = Pipeline(source, [], MemorySink(), PipelineConfig(workers=4))
    with pytest.raises(DataError) as caught:
        pipeline.run()
    assert (caught.value.file, caught.value.row) == (file, row)
    assert str(caught.value).startswith(f"{file}, row {row}")
    assert pipeline.budget.used == 0


def test_bad_input_surfaces_when_iterated_and_not_behind_its_place(bad_source: Any) -> None:
    source, file, row = bad_source()
    count = 0
    with pytest.raises(DataError) as caught:  # noqa: PT012
        for batch in Pipeline(source, config=PipelineConfig(batch_rows=1)):
            count += batch.num_rows
    assert (caught.value.file, caught.value.row) == (file, row)
    assert count <= max(row, 40)  # a damaged second file has the forty rows of the first before it


def test_the_good_rows_arrive_if_bad_input_may_be_skipped(bad_source: Any) -> None:
    source, _, row = bad_source()
    sink = MemorySink()
    report = Pipeline(source, [], sink, PipelineConfig(on_error="skip")).run()
    assert sum(report.skipped.values()) == 1
    assert len(sink.rows()) >= row
    assert report.rows_out == len(sink.rows())


LONG = [{"n": i, "text": f"{i:08d}" * 25} for i in range(10_000)]


def long_source(kind: str, home: Path) -> Any:
    table = pa.Table.from_pylist(LONG)
    match kind:
        case "JSON lines":
            (home / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LONG))
            return JsonlSource(home / "a.jsonl")
        case "JSON":
            (home / "a.json").write_text(json.dumps(LONG))
            return JsonSource(home / "a.json")
        case "CSV":
            (home / "a.csv").write_text("n,text\n" + "".join(f"{row['n']},t{row['text']}\n" for row in LONG))
            return CsvSource(home / "a.csv")
        case "text":
            (home / "a.txt").write_text("".join(f"{row['text']}\n" for row in LONG))
            return TextSource(home / "a.txt")
        case "Parquet":
            pq.write_table(table, home / "a.parquet")
            return ParquetSource(home / "a.parquet")
        case "Arrow":
            with pa.OSFile(str(home / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            return ArrowSource(home / "a.arrow")
        case "memory":
            return MemorySource(table)
    return IteratorSource(LONG)


@pytest.mark.parametrize("kind", ["JSON lines", "JSON", "CSV", "text", "Parquet", "Arrow", "memory", "iterator"])
@pytest.mark.parametrize("workers", [1, 4])
def test_the_budget_is_held_however_slow_the_sink_is(tmp_path: Path, kind: str, workers: int) -> None:
    sink, budget = SlowSink(0.001), MemoryBudget("1 MiB")
    Pipeline(long_source(kind, tmp_path), [], sink, PipelineConfig(workers=workers), budget).run()
    assert len(sink.rows()) == len(LONG)
    # Growing never waits: an item may turn out larger than what was reserved for it.
    assert budget.peak <= budget.capacity + (512 << 10)
    assert budget.used == 0


def test_one_row_larger_than_the_budget_goes_through_alone(tmp_path: Path) -> None:
    rows = [{"text": "x" * size} for size in (10, 3_000_000, 20, 2_000_000, 30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sink, budget = MemorySink(), MemoryBudget("256 KiB")
    Pipeline(JsonlSource(tmp_path / "a.jsonl"), [], sink, PipelineConfig(workers=4), budget).run()
    assert sink.rows() == rows
    assert budget.used == 0
