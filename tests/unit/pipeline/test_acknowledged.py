"""A source is told what is done with: what was asked past, what is published, what a checkpoint keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.errors import DataError, StageError
from penstock.pipeline import Pipeline, PipelineConfig, Transform
from penstock.pipeline.stages import Acknowledged
from penstock.sinks import MemorySink, ParquetSink
from penstock.testing import FailingTransform, RowsSource

ROWS = [{"n": n} for n in range(40)]


class Told(RowsSource):
    """Rows that are kept until it is said that they are done with."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.calls: list[tuple[str, int]] = []

    def hold(self) -> None:
        self.calls.append(("hold", 0))

    def delivered(self, state: dict[str, Any]) -> None:
        self.calls.append(("delivered", rows_before(state)))

    def commit(self, state: dict[str, Any]) -> None:
        self.calls.append(("commit", rows_before(state)))


def rows_before(state: dict[str, Any]) -> int:
    """How many rows a source had handed out at a state: those that one which begins there has no more."""
    source = RowsSource(ROWS)
    source.load_state_dict(state)
    rest = 0
    while (batch := source.next_batch(1000)) is not None:
        rest += batch.num_rows
    return len(ROWS) - rest


class HoldsBack(Transform):
    """Gives out every batch when the next one comes."""

    def __init__(self) -> None:
        self._held: pa.RecordBatch | None = None

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        held, self._held = self._held, batch
        return batch.slice(0, 0) if held is None else held

    def finish(self) -> pa.RecordBatch | None:
        held, self._held = self._held, None
        return held


def config(rows: int, **options: Any) -> PipelineConfig:
    return PipelineConfig(workers=1, batch_rows=rows, **options)


def test_a_source_without_these_methods_is_not_told() -> None:
    assert isinstance(Told(), Acknowledged)
    assert not isinstance(RowsSource(ROWS), Acknowledged)


def test_a_batch_is_delivered_when_the_one_after_is_asked_for() -> None:
    source = Told()
    stream = iter(Pipeline(source, config=config(10)))
    assert next(stream).num_rows == 10
    assert source.calls == [("hold", 0)]
    assert next(stream).num_rows == 10
    kind, rows = source.calls[-1]
    assert kind == "delivered"
    assert rows <= 10
    stream.close()  # type: ignore[attr-defined]
    assert max(rows for _, rows in source.calls) <= 10


def test_at_the_end_of_a_loop_everything_is_delivered_and_nothing_committed() -> None:
    source = Told()
    seen = 0
    for batch in Pipeline(source, config=config(7)):
        assert max((rows for _, rows in source.calls), default=0) <= seen
        seen += batch.num_rows
    assert source.calls[-1] == ("delivered", 40)
    assert [rows for _, rows in source.calls] == sorted(rows for _, rows in source.calls)
    assert {kind for kind, _ in source.calls} == {"hold", "delivered"}


def test_a_loop_that_fails_leaves_the_batch_in_hand_undone() -> None:
    source = Told()

    def loop() -> None:
        for batch in Pipeline(source, config=config(10)):
            if batch.column("n")[0].as_py() >= 20:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop()
    assert max(rows for _, rows in source.calls) <= 20


def test_rows_that_a_transform_holds_are_not_done_with() -> None:
    source = Told()
    rows = 0
    for batch in Pipeline(source, [HoldsBack()], config=config(4)):
        rows += batch.num_rows
        assert source.calls == [("hold", 0)]
    assert rows == 40
    assert source.calls == [("hold", 0), ("delivered", 40)]


def test_a_run_commits_once_when_its_output_is_published() -> None:
    source = Told()

    class Watched(MemorySink):
        def flush(self) -> None:
            assert source.calls == [("hold", 0)]
            super().flush()

    Pipeline(source, [], Watched(), config(5)).run()
    assert source.calls == [("hold", 0), ("commit", 40)]


def test_a_sink_that_publishes_as_it_goes_lets_the_source_go_of_what_is_published() -> None:
    class Publishes(MemorySink):
        """Publishes sixteen rows at a time."""

        rows_published = 7  # of a run before

        def consume(self, batch: pa.RecordBatch) -> None:
            super().consume(batch)
            seen = sum(held.num_rows for held in self.batches)
            self.rows_published = 7 + seen // 16 * 16
            assert max(rows for _, rows in source.calls) <= seen // 16 * 16

    source = Told()
    Pipeline(source, [], Publishes(), config(5)).run()
    assert source.calls[-1] == ("commit", 40)
    assert [kind for kind, _ in source.calls].count("commit") > 1
    source = Told()
    Pipeline(source, [HoldsBack()], Publishes(), config(5)).run()
    assert source.calls == [("hold", 0), ("commit", 40)]


@pytest.mark.parametrize("where", ["transform", "flush"])
def test_a_run_that_fails_commits_nothing(where: str) -> None:
    source = Told()

    class Full(MemorySink):
        def flush(self) -> None:
            raise DataError("the disk is full")

    failing = [FailingTransform("n", [30]).transform] if where == "transform" else []
    with pytest.raises((StageError, DataError)):
        Pipeline(source, failing, Full(), config(5)).run()
    assert source.calls == [("hold", 0)]


def test_with_a_checkpoint_what_it_keeps_is_committed_and_no_more(tmp_path: Path) -> None:
    source = Told()
    checkpoints: list[int] = []
    whole = ParquetSink.checkpoint

    class Counted(ParquetSink):
        def checkpoint(self) -> dict[str, Any]:
            checkpoints.append(sum(kind == "commit" for kind, _ in source.calls))
            return whole(self)

    sink = Counted(tmp_path / "out.parquet")
    report = Pipeline(source, [], sink, config(5, checkpoint_seconds=1e-9)).run(tmp_path / "kept")
    committed = [rows for kind, rows in source.calls if kind == "commit"]
    assert report.rows_out == 40
    assert committed[-1] == 40
    assert len(committed) > 2
    assert committed == sorted(committed)
    # Each came after its checkpoint: when one is begun, only those before it have been committed.
    assert checkpoints == list(range(len(checkpoints)))


def test_a_stopped_run_commits_what_its_last_checkpoint_keeps(tmp_path: Path) -> None:
    source = Told()
    reached = []

    class Slow(ParquetSink):
        def consume(self, batch: pa.RecordBatch) -> None:
            super().consume(batch)
            reached.append(batch.num_rows)
            if sum(reached) >= 20:
                pipeline._runner.halt()  # type: ignore[union-attr]

    pipeline = Pipeline(source, [], Slow(tmp_path / "out.parquet"), config(5, checkpoint_seconds=1000))
    pipeline.start(tmp_path / "kept")
    assert pipeline._drain is not None
    assert pipeline._drain.done.wait(10)
    pipeline.stop()
    assert source.calls[-1][0] == "commit"
    assert 20 <= source.calls[-1][1] <= sum(reached)
