"""Cases that once went wrong, or could: each has its test."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import ConfigError, MemoryBudget, Pipeline, PipelineConfig, ResumeError
from penstock.errors import StageError, StalledError, StoppedError
from penstock.sinks import CsvSink, IteratorSink, JsonlSink, MemorySink, ParquetSink
from penstock.sources import JsonlSource, MemorySource
from penstock.transforms import Filter, Map

SKIP = PipelineConfig(on_error="skip")


class Numbered:
    """Numbers the rows it sees, across batches."""

    def __init__(self) -> None:
        self.seen = 0

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        numbers = list(range(self.seen, self.seen + batch.num_rows))
        self.seen += batch.num_rows
        return batch.append_column("number", pa.array(numbers, pa.int64()))

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class HoldLast:
    """Hands the last row of the input out at the end only."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values = self.held + batch.column("x").to_pylist()
        self.held = values[-1:]
        return pa.record_batch({"x": pa.array(values[:-1], pa.int64())})

    def finish(self) -> pa.RecordBatch:
        return pa.record_batch({"x": pa.array(self.held, pa.int64())})


def refuse(*bad: int) -> Map:
    def check(row: dict[str, Any]) -> dict[str, Any]:
        if row["x"] in bad:
            raise ValueError(f"not {row['x']}")
        return row

    return Map(check)


def numbers(count: int) -> MemorySource:
    return MemorySource({"x": list(range(count))})


def test_a_stateful_transform_sees_no_row_twice_when_a_later_one_refuses_a_row() -> None:
    sink = MemorySink()
    Pipeline(numbers(10), [Numbered(), refuse(5)], sink, SKIP).run()
    # The refused row never was: the ones after it get the numbers they would have without it.
    assert [(row["x"], row["number"]) for row in sink.rows()] == [(i, i - (i > 5)) for i in range(10) if i != 5]


def test_what_holds_rows_back_must_be_able_to_go_back_if_rows_may_be_skipped() -> None:
    with pytest.raises(ConfigError, match=r"HoldLast.*state_dict"):
        Pipeline(numbers(10), [HoldLast()], MemorySink(), SKIP)
    sink = MemorySink()
    Pipeline(numbers(10), [HoldLast()], sink).run()
    assert [row["x"] for row in sink.rows()] == list(range(10))


@pytest.mark.timeout(60)
def test_batches_larger_than_the_budget_still_come(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"x": i, "pad": "y" * 100}) + "\n" for i in range(20_000)))
    pipeline = Pipeline(JsonlSource(path), config=PipelineConfig(batch_rows=15_000), budget="512 KiB")
    assert [batch.num_rows for batch in pipeline] == [15_000, 5_000]
    assert pipeline.budget.used == 0


def test_a_hang_in_finish_is_named() -> None:
    released = threading.Event()

    class Stuck(HoldLast):
        def finish(self) -> pa.RecordBatch:
            released.wait(30)
            return super().finish()

    try:
        with pytest.raises(StalledError, match=r"stall_seconds=0\.3"):
            Pipeline(numbers(10), [Stuck()], MemorySink(), PipelineConfig(stall_seconds=0.3)).run()
    finally:
        released.set()


def test_rows_that_were_held_back_obey_on_error_too() -> None:
    class Patient(HoldLast):
        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = state["held"]

    sink = MemorySink()
    report = Pipeline(numbers(10), [Patient(), refuse(9)], sink, SKIP).run()
    assert [row["x"] for row in sink.rows()] == list(range(9))
    assert sum(report.skipped.values()) == 1


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_row_that_was_held_back_and_is_refused_behind_that_blames_no_other(on_error: Any) -> None:
    class OneLate(HoldLast):
        def state_dict(self) -> dict[str, Any]:
            return {"held": self.held}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.held = state["held"]

    sink = MemorySink()
    with pytest.raises(StageError, match=r"not known which.*not 5.*put .* before"):
        Pipeline(numbers(10), [OneLate(), refuse(5)], sink, PipelineConfig(on_error=on_error)).run()
    Pipeline(numbers(10), [refuse(5), OneLate()], sink := MemorySink(), SKIP).run()  # as the message says
    assert [row["x"] for row in sink.rows()] == [0, 1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("batch_rows", ["auto", 300, 1000])
def test_what_a_row_function_returned_first_is_not_overruled_by_skipping(batch_rows: Any) -> None:
    late = Map(lambda row: {"y": row["x"] if row["x"] < 700 else row["x"] + 0.5})
    config = PipelineConfig(batch_rows=batch_rows, on_error="skip")
    with pytest.raises(StageError, match=r"'y'.*schema="):
        Pipeline(numbers(2000), [late], MemorySink(), config).run()
    told = Map(lambda row: {"y": row["x"] if row["x"] < 700 else "?"}, schema=pa.schema([("y", pa.float64())]))
    assert Pipeline(numbers(2000), [told], MemorySink(), config).run().rows_out == 700


def test_a_stage_that_breaks_its_promise_is_an_error_even_if_rows_may_be_skipped() -> None:
    with pytest.raises(StageError, match=r"pyarrow\.RecordBatch"):
        Pipeline(numbers(10), [Map(lambda batch: None, batch=True)], MemorySink(), SKIP).run()


def test_running_again_replaces_what_the_first_run_made(tmp_path: Path) -> None:
    memory = MemorySink()
    twice = Pipeline(numbers(3), [], memory)
    twice.run()
    twice.run()
    assert len(memory.rows()) == 3
    to_file = Pipeline(numbers(3), [], JsonlSink(tmp_path / "o.jsonl"))
    to_file.run()
    to_file.run()
    assert len((tmp_path / "o.jsonl").read_text().splitlines()) == 3


def test_a_directory_can_be_written_after_a_run_that_failed(tmp_path: Path) -> None:
    broken = [True]

    def work(row: dict[str, Any]) -> dict[str, Any]:
        if broken[0] and row["x"] == 900:
            raise ValueError("broken")
        return row

    pipeline = Pipeline(numbers(1000), [Map(work)], JsonlSink(tmp_path / "parts", rows_per_file=100))
    with pytest.raises(StageError, match="broken"):
        pipeline.run()
    broken[0] = False
    pipeline.run()
    assert len(list((tmp_path / "parts").iterdir())) == 10


def test_a_source_that_was_used_up_is_read_again_by_another_pipeline() -> None:
    source = numbers(5)
    assert Pipeline(source, [], MemorySink()).run().rows_out == 5
    assert Pipeline(source, [], MemorySink()).run().rows_out == 5


def test_a_checkpoint_of_another_output_or_of_a_lost_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"x": 1}\n')
    Pipeline(JsonlSource(path), [], JsonlSink(tmp_path / "a.jsonl")).run(checkpoint=tmp_path / "kept")
    with pytest.raises(ResumeError, match=r"JsonlSink\('.*a\.jsonl'\)"):
        Pipeline(JsonlSource(path), [], JsonlSink(tmp_path / "b.jsonl")).run(checkpoint=tmp_path / "kept")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ResumeError, match="checkpoint"):
        Pipeline(JsonlSource(path), [], JsonlSink(tmp_path / "a.jsonl")).run(checkpoint=tmp_path / "kept")


def test_the_quarantine_of_an_iteration_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    config = PipelineConfig(on_error="quarantine", quarantine=tmp_path / "bad.jsonl", batch_rows=30, workers=1)

    def make() -> Pipeline:
        return Pipeline(numbers(2000), [refuse(*range(0, 2000, 100))], config=config)

    pipeline = make()
    iterator = iter(pipeline)
    for _ in range(20):
        next(iterator)
    iterator.close()  # type: ignore[attr-defined]
    state = json.loads(json.dumps(pipeline.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    for _ in resumed:
        pass
    written = [json.loads(line)["data"]["x"] for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert written == list(range(0, 2000, 100)), "each bad row once, whatever was delivered of its batch"


def test_waiting_closes_the_run() -> None:
    before = threading.active_count()
    pipeline = Pipeline(numbers(100), [], MemorySink()).start()
    pipeline.wait(timeout_seconds=30)
    assert threading.active_count() == before
    assert pipeline.budget.used == 0


def test_two_pipelines_on_one_budget_do_not_touch_each_others_charges() -> None:
    budget = MemoryBudget("64 MiB")
    first = iter(Pipeline(numbers(1_000_000), budget=budget))
    next(first)
    during = budget.by_owner()
    Pipeline(numbers(100), [], MemorySink(), budget=budget).run()
    assert set(during) <= set(budget.by_owner()) | {"delivery", "source", "transforms"}
    first.close()  # type: ignore[attr-defined]
    assert budget.used == 0


def test_an_iteration_that_is_stopped_elsewhere_does_not_just_end() -> None:
    pipeline = Pipeline(numbers(10_000_000), budget="1 MiB")
    with pytest.raises(StoppedError):  # noqa: PT012 - the loop is what is tested
        for _ in pipeline:
            pipeline.stop()


def test_iterating_over_a_sink_whose_pipeline_failed_says_so() -> None:
    sink = IteratorSink()
    pipeline = Pipeline(numbers(1000), [refuse(900)], sink).start()
    with pytest.raises(StoppedError, match=r"wait\(\)"):
        list(sink)
    with pytest.raises(StageError, match="not 900"):
        pipeline.wait(timeout_seconds=30)


@pytest.mark.parametrize("name", ["o.parquet", "o.csv"])
def test_an_output_without_rows_still_has_its_columns(tmp_path: Path, name: str) -> None:
    sink = ParquetSink(tmp_path / name) if name.endswith("parquet") else CsvSink(tmp_path / name)
    stages = [Filter("x > 100"), Map({"y": Filter("x > 1")._condition})]
    Pipeline(numbers(10), stages, sink).run()
    names = pq.read_schema(tmp_path / name).names if name.endswith("parquet") else (tmp_path / name).read_text()
    assert names == (["x", "y"] if name.endswith("parquet") else '"x","y"\n')


def test_the_peak_in_the_report_is_what_was_charged() -> None:
    report = Pipeline(numbers(10), [], MemorySink(), budget="1 GiB").run()
    assert report.peak_bytes < 64 << 20


def test_a_start_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"x": 1}\n')
    pipeline = Pipeline(JsonlSource(path), [], JsonlSink(tmp_path / "there" / "o.jsonl"))
    with pytest.raises(FileNotFoundError):
        pipeline.run(checkpoint=tmp_path / "kept")
    (tmp_path / "there").mkdir()
    assert pipeline.run(checkpoint=tmp_path / "kept").rows_out == 1


def test_a_function_that_cannot_arrive_in_a_process_is_an_error_at_once() -> None:
    class Poison:
        def __reduce__(self) -> Any:
            return (os._exit, (3,))

    poison = Poison()
    config = PipelineConfig(workers="process", max_workers=1, batch_rows=100)
    since = time.monotonic()
    with pytest.raises(Exception, match=r"\b3 worker processes"):
        Pipeline(numbers(1000), [Map(lambda row, poison=poison: row)], MemorySink(), config).run()
    assert time.monotonic() - since < 60


def test_the_same_error_is_counted_alike_in_a_process() -> None:
    config = PipelineConfig(workers="process", max_workers=1, batch_rows=100, on_error="skip")
    report = Pipeline(numbers(1000), [refuse(5, 995)], MemorySink(), config).run()
    assert report.skipped == {"Map(check): ValueError": 2}


def test_leaving_by_system_exit_gives_the_memory_back() -> None:
    def leave(row: dict[str, Any]) -> dict[str, Any]:
        raise SystemExit(3)

    pipeline = Pipeline(numbers(10), [Map(leave)], MemorySink())
    with pytest.raises(SystemExit):
        pipeline.run()
    assert pipeline.budget.used == 0


def test_one_step_need_not_be_a_list_and_a_path_or_rows_may_be_the_source(tmp_path: Path) -> None:
    assert Pipeline(numbers(5), Filter("x > 2"), MemorySink()).run().rows_out == 2
    assert Pipeline(numbers(5), lambda row: row, MemorySink()).run().rows_out == 5
    path = tmp_path / "in.jsonl"
    with pytest.raises(FileNotFoundError, match=r"in\.jsonl"):
        Pipeline(str(path))
    path.write_text('{"x": 1}\n{"x": 2}\n')
    assert Pipeline(str(path), Filter("x > 1"), MemorySink()).run().rows_out == 1
    assert Pipeline([{"x": 1}], [], MemorySink()).run().rows_out == 1
    Pipeline(numbers(1), [], tmp_path / "out.jsonl").run()
    assert (tmp_path / "out.jsonl").read_text() == '{"x":0}\n'


def test_a_file_that_was_rewritten_is_refused_and_one_that_has_grown_is_not(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"x": i}) + "\n" for i in range(1000)))

    def make() -> Pipeline:
        return Pipeline(JsonlSource(path), config=PipelineConfig(batch_rows=100))

    pipeline = make()
    iterator = iter(pipeline)
    next(iterator)
    state = pipeline.state_dict()
    iterator.close()  # type: ignore[attr-defined]
    with open(path, "a") as file:
        file.write('{"x": 1000}\n')
    grown = make()
    grown.load_state_dict(state)
    assert [x for batch in grown for x in batch["x"].to_pylist()] == list(range(100, 1001))
    path.write_text("".join(json.dumps({"x": i + 4000}) + "\n" for i in range(1000)))
    rewritten = make()
    rewritten.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"in\.jsonl"):
        next(iter(rewritten))
