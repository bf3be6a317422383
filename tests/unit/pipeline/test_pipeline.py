"""Runs and iterations: rows, order, errors, limits, state."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock import ConfigError, MemoryBudget, Pipeline, PipelineConfig, ResumeError
from penstock.errors import FailureBudgetError, SchemaError, StageError, StalledError, StoppedError
from penstock.sinks import IteratorSink, MemorySink
from penstock.sources import IteratorSource, JsonlSource, MemorySource
from penstock.transforms import CountWords, Filter, FlatMap, Lower, Map

ROWS = [{"id": i, "text": f"Row Number {i}", "even": i % 2 == 0} for i in range(1000)]


class Chunks:
    """A source of numbered rows in batches of a fixed size, with a state."""

    def __init__(self, rows: int, size: int = 10) -> None:
        self.rows, self.size, self.at = rows, size, 0

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self.at >= self.rows:
            return None
        start, self.at = self.at, min(self.rows, self.at + self.size)
        return pa.record_batch({"id": pa.array(range(start, self.at), pa.int64())})

    def reset(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class RunningSum:
    """A transform that needs order: each row gets the sum of all ids so far."""

    def __init__(self) -> None:
        self.total = 0

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        sums = []
        for value in batch.column("id").to_pylist():
            self.total += value
            sums.append(self.total)
        return batch.append_column("sum", pa.array(sums, pa.int64()))

    def reset(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


class Pairs:
    """Holds a row back until its partner comes, so something is left at the end of an odd number of rows."""

    def __init__(self) -> None:
        self.held: list[int] = []

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values = self.held + batch.column("id").to_pylist()
        cut = len(values) // 2 * 2
        self.held = values[cut:]
        return pa.record_batch({"id": pa.array(values[:cut], pa.int64())})

    def finish(self) -> pa.RecordBatch | None:
        left, self.held = self.held, []
        return pa.record_batch({"id": pa.array(left, pa.int64())}) if left else None

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


def ids(pipeline: Pipeline) -> list[int]:
    return [i for batch in pipeline for i in batch.column("id").to_pylist()]


@pytest.mark.parametrize("workers", [1, 4, "auto"])
def test_rows_come_out_in_the_order_they_went_in(workers: Any) -> None:
    def jitter(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.001 * (batch.column("id")[0].as_py() % 3))
        return batch

    pipeline = Pipeline(Chunks(500), [jitter], config=PipelineConfig(workers=workers))
    assert ids(pipeline) == list(range(500))


def test_a_run_reports_rows_drops_time_memory_and_stages() -> None:
    sink = MemorySink()
    report = Pipeline(
        MemorySource(ROWS), [Lower("text"), CountWords("text", into="words"), Filter(pc.field("even"))], sink
    ).run()
    assert (report.rows_in, report.rows_out) == (1000, 500)
    assert report.dropped == {"Filter(even)": 500}
    assert report.seconds > 0
    assert report.peak_bytes > 0
    assert [stage["kind"] for stage in report.stages] == ["source", "transform", "transform", "transform", "sink"]
    assert sink.rows()[1] == {"id": 2, "text": "row number 2", "even": True, "words": 3}
    assert json.loads(json.dumps(report.to_dict()))["rows_out"] == 500


def test_a_pipeline_prints_as_its_stages_and_starts_nothing() -> None:
    before = threading.active_count()
    pipeline = Pipeline(MemorySource(ROWS), [Lower("text")], MemorySink(), budget=MemoryBudget("1 MiB"))
    assert str(pipeline) == "MemorySource(list, 1000 rows) -> Lower('text') -> MemorySink()  [budget 1.0 MiB]"
    assert threading.active_count() == before


def test_iterating_yields_batches_of_exactly_the_size_asked_for() -> None:
    pipeline = Pipeline(Chunks(105, 10), [], config=PipelineConfig(batch_rows=16))
    batches = list(pipeline)
    assert [batch.num_rows for batch in batches] == [16] * 6 + [9]
    assert [i for batch in batches for i in batch.column("id").to_pylist()] == list(range(105))


def test_iterating_twice_gives_the_same_rows_twice() -> None:
    pipeline = Pipeline(Chunks(50), [RunningSum()])
    assert ids(pipeline) == ids(pipeline) == list(range(50))


def test_leaving_a_loop_early_ends_the_threads_and_gives_memory_back() -> None:
    budget = MemoryBudget("1 MiB")
    before = threading.active_count()
    iterator = iter(Pipeline(Chunks(100_000), [], budget=budget))
    next(iterator)
    assert threading.active_count() > before
    iterator.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
    assert budget.used == 0


def test_with_closes_what_was_started() -> None:
    before = threading.active_count()
    sink = IteratorSink()
    with Pipeline(Chunks(100_000), [], sink).start():
        batch = next(iter(sink))
        assert batch.column("id")[0].as_py() == 0
    assert threading.active_count() == before


def test_start_and_wait_run_in_the_background() -> None:
    sink = MemorySink()
    pipeline = Pipeline(Chunks(100), [], sink).start()
    assert pipeline.wait(timeout_seconds=30).rows_out == 100


def test_waiting_after_a_stop_says_that_it_was_stopped() -> None:
    pipeline = Pipeline(Chunks(10_000_000), [], MemorySink()).start()
    pipeline.stop()
    with pytest.raises(StoppedError):
        pipeline.wait(timeout_seconds=30)


def test_a_running_pipeline_refuses_a_second_start() -> None:
    pipeline = Pipeline(Chunks(10_000_000), [], MemorySink(), budget="4 MiB").start()
    with pipeline, pytest.raises(ConfigError):
        pipeline.start()


def test_a_transform_that_needs_order_gets_it_from_any_number_of_workers() -> None:
    expected, total = [], 0
    for i in range(300):
        total += i
        expected.append(total)
    pipeline = Pipeline(Chunks(300, 7), [Map(lambda r: r), RunningSum()], config=PipelineConfig(workers=4))
    assert [s for batch in pipeline for s in batch.column("sum").to_pylist()] == expected


def test_what_a_transform_still_holds_at_the_end_comes_out() -> None:
    assert ids(Pipeline(Chunks(25, 7), [Pairs()])) == list(range(25))


def test_plain_functions_are_taken_as_stages() -> None:
    def doubled(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.record_batch({"id": pc.multiply(batch.column("id"), 2)})

    pipeline = Pipeline(Chunks(20), [doubled, lambda row: {"id": row["id"] + 1}])
    assert ids(pipeline) == [2 * i + 1 for i in range(20)]


@pytest.mark.parametrize(
    ("source", "transforms", "sink", "message"),
    [
        (object(), [], None, r"cannot be read.*a Source"),
        (Chunks(1), [3], None, r"\b3\b.*transform"),
        (Chunks(1), [], object(), "consume.*flush"),
    ],
)
def test_a_stage_without_its_methods_is_refused_at_once(source: Any, transforms: Any, sink: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(source, transforms, sink)


def test_a_sink_may_be_a_path_or_the_url_of_a_database(tmp_path: Path) -> None:
    for target in (
        tmp_path / "a.parquet",
        str(tmp_path / "b.jsonl"),
        f"sqlite:///{tmp_path}/c.db?table=t&mode=replace",
    ):
        assert Pipeline(MemorySource(ROWS), [], target).run().rows_out == 1000
        if "sqlite" not in str(target):
            assert sum(batch.num_rows for batch in Pipeline(target)) == 1000
    assert sum(batch.num_rows for batch in Pipeline(f"sqlite:///{tmp_path}/c.db?table=t")) == 1000
    with pytest.raises(ConfigError, match=r"no sink writes '\.unknown'"):
        Pipeline(MemorySource(ROWS), [], "a.unknown")


def test_running_without_a_sink_and_iterating_with_one_say_what_to_do() -> None:
    with pytest.raises(ConfigError):
        Pipeline(Chunks(1)).run()
    with pytest.raises(ConfigError, match=r"run\(\)"):
        next(iter(Pipeline(Chunks(1), [], MemorySink())))


def test_an_exception_names_the_stage_the_file_and_the_row(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(100)))

    def invert(row: dict[str, Any]) -> dict[str, Any]:
        return {"x": 1 / (row["n"] - 57)}

    with pytest.raises(StageError) as caught:
        Pipeline(JsonlSource(path), [Map(invert)], MemorySink()).run()
    error = caught.value
    offset = sum(len(json.dumps({"n": i})) + 1 for i in range(57))
    assert f"byte {offset}" in str(error)
    assert (error.stage, error.file, error.row, error.offset) == ("Map(invert)", str(path), 57, offset)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_the_row_is_found_behind_a_filter_and_by_a_batch_function() -> None:
    def refuse(batch: pa.RecordBatch) -> pa.RecordBatch:
        if 700 in batch.column("id").to_pylist():
            raise KeyError("seven hundred")
        return batch

    with pytest.raises(StageError, match=r"row 700\b.*'seven hundred'"):
        Pipeline(MemorySource(ROWS), [Filter(pc.field("even")), refuse], MemorySink()).run()


def test_rows_before_the_failing_batch_are_delivered_first() -> None:
    def refuse(row: dict[str, Any]) -> dict[str, Any]:
        if row["id"] == 55:
            raise ValueError("no")
        return row

    seen: list[int] = []
    with pytest.raises(StageError):  # noqa: PT012 - what was seen before it is the point
        for batch in Pipeline(Chunks(100), [Map(refuse)], config=PipelineConfig(workers=4)):
            seen += batch.column("id").to_pylist()
    assert seen == list(range(50))


def test_an_error_in_a_source_or_sink_surfaces_with_its_name() -> None:
    def rows() -> Iterator[dict[str, int]]:
        yield {"id": 1}
        raise RuntimeError("the tap ran dry")

    with pytest.raises(StageError, match=r"IteratorSource\(rows\).*RuntimeError"):
        Pipeline(IteratorSource(rows), [], MemorySink()).run()

    class Broken(MemorySink):
        def consume(self, batch: pa.RecordBatch) -> None:
            raise RuntimeError("no room")

    with pytest.raises(StageError, match=r"MemorySink\(\).*RuntimeError"):
        Pipeline(Chunks(10), [], Broken()).run()


def divide(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "x": 100 // (row["id"] % 10)}


def test_skipping_drops_bad_rows_and_counts_them() -> None:
    sink = MemorySink()
    report = Pipeline(
        MemorySource(ROWS), [Filter(pc.field("even")), Map(divide)], sink, PipelineConfig(on_error="skip")
    ).run()
    assert report.skipped == {"Map(divide): ZeroDivisionError": 100}
    assert report.dropped == {"Filter(even)": 500}
    assert [row["id"] for row in sink.rows()] == [i for i in range(0, 1000, 2) if i % 10]
    assert report.rows_out == 400


def test_quarantine_writes_the_row_its_place_and_the_reason(tmp_path: Path) -> None:
    path, bad = tmp_path / "in.jsonl", tmp_path / "bad.jsonl"
    lines = [json.dumps({"id": i}).encode() for i in range(20)]
    lines[7] = b'{"id": 7'
    path.write_bytes(b"\n".join(lines) + b"\n")
    sink = MemorySink()
    report = Pipeline(
        JsonlSource(path), [Map(divide)], sink, PipelineConfig(on_error="quarantine", quarantine=bad)
    ).run()
    written = [json.loads(line) for line in bad.read_text().splitlines()]
    assert [entry["row"] for entry in written] == [0, 7, 10]
    for entry in written:
        data = path.read_bytes()[entry["offset"] :].split(b"\n")[0]
        assert data == lines[entry["row"]]
        assert entry["file"] == str(path)
    assert written[1]["raw"] == '{"id": 7'
    assert "not valid JSON" in written[1]["reason"]
    assert written[0]["data"] == {"id": 0}
    assert written[0]["reason"].startswith("ZeroDivisionError")
    assert report.quarantined == {"reading JSON Lines: invalid JSON": 1, "Map(divide): ZeroDivisionError": 2}
    assert [row["id"] for row in sink.rows()] == [i for i in range(20) if i % 10 and i != 7]


def test_quarantine_without_a_place_to_write_says_so() -> None:
    with pytest.raises(ConfigError, match="PipelineConfig"):
        Pipeline(Chunks(10), [], MemorySink(), PipelineConfig(on_error="quarantine")).run()


def test_the_failure_budget_turns_bad_rows_back_into_an_error() -> None:
    config = PipelineConfig(on_error="skip", max_failures=10)
    with pytest.raises(FailureBudgetError, match=r"max_failures=10.*ZeroDiv"):
        Pipeline(MemorySource(ROWS), [Map(divide)], MemorySink(), config).run()
    config = PipelineConfig(on_error="skip", max_failure_ratio=0.05)
    with pytest.raises(FailureBudgetError, match=r"max_failure_ratio=0\.05"):
        Pipeline(MemorySource(ROWS), [Map(divide)], MemorySink(), config).run()
    config = PipelineConfig(on_error="skip", max_failure_ratio=0.2, max_failures=100)
    assert Pipeline(MemorySource(ROWS), [Map(divide)], MemorySink(), config).run().rows_out == 900


def test_a_hanging_transform_is_named_with_its_stack() -> None:
    released = threading.Event()

    def hang(batch: pa.RecordBatch) -> pa.RecordBatch:
        released.wait(30)
        return batch

    try:
        with pytest.raises(StalledError, match=r"(?s)Map\(hang\).*released\.wait"):
            Pipeline(Chunks(10), [hang], MemorySink(), PipelineConfig(stall_seconds=0.3)).run()
    finally:
        released.set()


def test_a_hanging_sink_and_a_hanging_source_are_named() -> None:
    released = threading.Event()

    class StuckSink(MemorySink):
        def consume(self, batch: pa.RecordBatch) -> None:
            released.wait(30)

    class StuckSource(Chunks):
        def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
            released.wait(30)
            return None

    try:
        with pytest.raises(StalledError, match=r"MemorySink\(\)"):
            Pipeline(Chunks(10), [], StuckSink(), PipelineConfig(stall_seconds=0.3)).run()
        with pytest.raises(StalledError, match="StuckSource"):
            Pipeline(StuckSource(1), [], MemorySink(), PipelineConfig(stall_seconds=0.3)).run()
    finally:
        released.set()


def test_memory_held_by_a_stranger_slows_a_pipeline_down_but_does_not_stop_it() -> None:
    budget = MemoryBudget("1 MiB")
    with budget.reserve(1 << 20, owner="somebody else"):
        assert Pipeline(Chunks(100), [], MemorySink(), budget=budget).run().rows_out == 100


def test_a_stage_that_changes_its_schema_or_returns_no_batch_is_named() -> None:
    def sometimes(batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.column("id")[0].as_py() >= 50:
            return batch.rename_columns(["other"])
        return batch

    with pytest.raises(StageError, match=r"'id'.*'other'"):
        Pipeline(Chunks(100), [sometimes], MemorySink(), PipelineConfig(workers=1)).run()
    with pytest.raises(StageError, match=r"NoneType.*pyarrow\.RecordBatch"):
        Pipeline(Chunks(100), [Map(lambda batch: None, batch=True)], MemorySink()).run()
    with pytest.raises(StageError, match=r"row 0\b"):
        Pipeline(Chunks(100), [Map(lambda row: [])], MemorySink()).run()


def test_types_of_a_row_function_come_from_its_first_rows_whatever_the_timing() -> None:
    def late(row: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.002 if row["id"] == 0 else 0)
        return {"id": row["id"], "x": 1 if row["id"] < 10 else 2.0}

    for _ in range(5):
        pipeline = Pipeline(Chunks(100), [Map(late)], config=PipelineConfig(workers=4))
        assert {str(batch.schema.field("x").type) for batch in pipeline} == {"int64"}
    with pytest.raises(StageError, match="schema="):
        list(Pipeline(Chunks(100), [Map(lambda r: {"x": "a" if r["id"] > 50 else 1})]))


def test_a_budget_smaller_than_a_batch_still_lets_everything_through() -> None:
    budget = MemoryBudget(1000)
    sink = MemorySink()
    report = Pipeline(MemorySource({"x": ["y" * 2000] * 50}), [], sink, budget=budget).run()
    assert report.rows_out == 50
    assert budget.used == 0


def test_flat_map_gives_any_number_of_rows() -> None:
    pipeline = Pipeline(Chunks(6), [FlatMap(lambda row: [{"id": row["id"]}] * row["id"])])
    assert ids(pipeline) == [i for i in range(6) for _ in range(i)]


@pytest.mark.parametrize("batch_rows", ["auto", 1, 7, 16])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_state_taken_after_any_batch_goes_on_with_the_next_row(batch_rows: Any, workers: int) -> None:
    def make() -> Pipeline:
        stages = [Map(lambda r: r), Filter(lambda r: r["id"] % 3 > 0), RunningSum(), Pairs()]
        return Pipeline(Chunks(103, 10), stages, config=PipelineConfig(batch_rows=batch_rows, workers=workers))

    pipeline, seen, states = make(), [], [make().state_dict()]
    for batch in pipeline:
        seen += batch.column("id").to_pylist()
        states.append((len(seen), json.loads(json.dumps(pipeline.state_dict()))))  # type: ignore[arg-type]
    assert seen == [i for i in range(103) if i % 3]
    for count, state in states[1:]:  # type: ignore[misc]
        fresh = make()
        fresh.load_state_dict(state)
        assert fresh.state_dict() == state
        assert ids(fresh) == seen[count:]
        assert len(json.dumps(state)) < 4096


def test_a_state_of_another_pipeline_or_release_is_refused() -> None:
    state = Pipeline(Chunks(10), [RunningSum()]).state_dict()
    with pytest.raises(ResumeError, match="RunningSum"):
        Pipeline(Chunks(10), [Pairs()]).load_state_dict(state)
    with pytest.raises(ResumeError, match=r"version 99\b"):
        Pipeline(Chunks(10), [RunningSum()]).load_state_dict(state | {"version": 99})
    with pytest.raises(ResumeError, match="state_dict"):
        Pipeline(type("Bare", (), {"next_batch": lambda self, n: None})()).state_dict()


def test_progress_is_called_with_snapshots_that_are_plain_data() -> None:
    seen: list[dict[str, Any]] = []

    def slow(batch: pa.RecordBatch) -> pa.RecordBatch:
        time.sleep(0.02)
        return batch

    Pipeline(Chunks(400), [slow], MemorySink(), PipelineConfig(workers=1)).run(progress=seen.append)
    assert len(seen) >= 2
    last = json.loads(json.dumps(seen[-1]))
    assert last["rows_out"] == 400
    assert set(last["buffers"]) == {"read", "lanes", "settled", "ready"}
    assert "Map(slow" in last["bottleneck"]


def test_schema_error_messages_are_ours() -> None:
    with pytest.raises(StageError, match="missing"):
        Pipeline(Chunks(5), [Filter(pc.field("missing") > 1)], MemorySink()).run()
    assert issubclass(SchemaError, ValueError)
