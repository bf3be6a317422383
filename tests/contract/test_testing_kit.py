"""The assertions that are shipped for plugin authors notice what they are there to notice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock.pipeline import Pipeline, PipelineConfig, Transform
from penstock.sinks import JsonlSink, MemorySink
from penstock.testing import (
    FailingTransform,
    RowsSource,
    SlowSink,
    assert_resumes_exactly,
    assert_sink_contract,
    assert_source_contract,
)

ROWS = [{"n": i} for i in range(17)]


def test_a_good_source_a_good_sink_and_a_good_pipeline_pass() -> None:
    assert_source_contract(lambda: RowsSource(ROWS), ROWS)
    assert_sink_contract(lambda directory: SlowSink(0.0), lambda sink: sink.rows())  # type: ignore[attr-defined]
    assert_resumes_exactly(lambda: Pipeline(RowsSource(ROWS), config=PipelineConfig(workers=2)))


class Forgetful(RowsSource):
    """Resumes one row too late."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"row": min(state["row"] + 1, 17)})


class Greedy(RowsSource):
    """Returns more rows than were asked for."""

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        return super().next_batch(max_rows + 1)


class Wordy(RowsSource):
    """Has a state that is far too large."""

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"history": ["x" * 100] * 50}


class Boastful(RowsSource):
    """Says that there are more rows than there are."""

    def size_hint(self) -> int | None:
        return 1000


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        (Forgetful, r"row 0\b.*'n'"),
        (Greedy, r"\b1\b.*\b2\b"),
        (Wordy, r"\b4096\b"),
        (Boastful, r"size_hint\(\)"),
    ],
)
def test_a_source_that_breaks_a_promise_is_caught(kind: type[RowsSource], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        assert_source_contract(lambda: kind(ROWS), ROWS)


def test_a_source_with_other_rows_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"\b17\b.*\b16\b"):
        assert_source_contract(lambda: RowsSource(ROWS), ROWS[:-1])


class Running(Transform):
    """The sum of all rows so far, which it forgets to keep in its state."""

    def __init__(self) -> None:
        self._sum = 0

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        sums = []
        for value in batch["n"].to_pylist():
            self._sum += value
            sums.append(self._sum)
        return pa.record_batch({"sum": sums})

    def reset(self) -> None:
        self._sum = 0

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return


def test_a_transform_whose_buffer_is_not_in_its_state_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"row 0\b"):
        assert_resumes_exactly(lambda: Pipeline(RowsSource(ROWS), [Running()]))


def test_a_pipeline_that_yields_nothing_proves_nothing() -> None:
    nothing = pa.schema([("n", pa.int64())]).empty_table().to_pylist()
    with pytest.raises(AssertionError, match="nothing"):
        assert_resumes_exactly(lambda: Pipeline(RowsSource(nothing)))


class Losing(MemorySink):
    """Drops its last batch."""

    def flush(self) -> None:
        self.batches.pop()


class Hasty(JsonlSink):
    """Shows its rows before they are flushed."""

    def consume(self, batch: pa.RecordBatch) -> None:
        super().consume(batch)
        self.path.write_text("".join(json.dumps(row) + "\n" for row in batch.to_pylist()))


class Untidy(JsonlSink):
    """Leaves something behind when it is told to give up."""

    def abort(self) -> None:
        super().abort()
        self.path.with_suffix(".log").write_text("aborted")


class Leaky(JsonlSink):
    """Finishes a segment with every batch, and takes over whatever segments it finds."""

    def consume(self, batch: pa.RecordBatch) -> None:
        super().consume(batch)
        if self._durable:
            self._end()

    def restore(self, token: dict[str, Any]) -> None:
        found = sorted(self._output.staging.glob("part-*")) if self._output.staging.exists() else []
        super().restore(token | {"segments": len(found)} if token else token)


def visible(sink: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.path.read_text().splitlines()] if sink.path.exists() else []


@pytest.mark.parametrize(
    ("make", "see", "complaint"),
    [
        (lambda directory: Losing(), lambda sink: sink.rows(), r"\b10\b.*\b13\b"),
        (lambda directory: Hasty(directory / "a.jsonl"), visible, "flush"),
        (lambda directory: Untidy(directory / "a.jsonl"), visible, r"a\.log"),
        (lambda directory: Leaky(directory / "a.jsonl"), visible, r"row 5\b.*'n'"),
    ],
)
def test_a_sink_that_breaks_a_promise_is_caught(make: Any, see: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        assert_sink_contract(make, see)


def test_the_fakes_do_what_they_say(tmp_path: Path) -> None:
    source = RowsSource(ROWS, batch_rows=5, fail_at=7, error=ConnectionError("gone"))
    assert [source.next_batch(100).num_rows for _ in range(2)] == [5, 2]  # type: ignore[union-attr]
    with pytest.raises(ConnectionError, match="gone"):
        source.next_batch(100)
    failing = FailingTransform("n", {3})
    batch = pa.record_batch({"n": [1, 2]})
    assert failing.transform(batch) is batch
    with pytest.raises(ValueError, match=r"\b3\b"):
        failing.transform(pa.record_batch({"n": [2, 3]}))
    sink = SlowSink(0.0)
    Pipeline(RowsSource(ROWS), [], sink).run()
    assert sink.flushed
    assert sink.rows() == ROWS
