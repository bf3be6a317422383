from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from penstock.errors import StalledError, StoppedError
from penstock.sinks import IteratorSink, MemorySink
from penstock.testing import assert_sink_contract

BATCHES = pa.table({"n": range(10)}).to_batches(max_chunksize=3)


def test_a_memory_sink_keeps_the_contract_of_sinks() -> None:
    assert_sink_contract(lambda directory: MemorySink(), lambda sink: sink.rows())  # type: ignore[attr-defined]


def test_a_memory_sink_keeps_everything_and_says_how_much_that_is() -> None:
    sink = MemorySink()
    assert sink.table().num_rows == 0
    for batch in BATCHES:
        sink.consume(batch)
    assert sink.table().column("n").to_pylist() == list(range(10))
    assert sink.rows()[-1] == {"n": 9}
    assert sink.memory_usage() == 80
    sink.reset()
    assert (sink.batches, sink.memory_usage()) == ([], 0)


def test_an_iterator_sink_hands_over_in_order_and_ends_when_flushed() -> None:
    sink = IteratorSink(max_batches=2)
    seen: list[int] = []

    def consume() -> None:
        seen.extend(value for batch in sink for value in batch["n"].to_pylist())

    thread = threading.Thread(target=consume)
    thread.start()
    for batch in BATCHES:
        assert sink.wait_for_room(10)
        sink.consume(batch)
    sink.flush()
    thread.join(10)
    assert seen == list(range(10))
    assert sink.memory_usage() == 0


def test_an_iterator_sink_has_room_for_so_many_batches() -> None:
    sink = IteratorSink(max_batches=2)
    for batch in BATCHES[:2]:
        assert sink.wait_for_room(0)
        sink.consume(batch)
    assert not sink.wait_for_room(0)
    assert sink.memory_usage() == 48
    next(iter(sink))
    assert sink.wait_for_room(0)
    with pytest.raises(ValueError, match="max_batches"):
        IteratorSink(0)


def test_iterating_raises_after_what_is_there_when_the_pipeline_fails() -> None:
    sink = IteratorSink()
    sink.consume(BATCHES[0])
    sink.abort()
    batches = iter(sink)
    next(batches)
    with pytest.raises(StoppedError, match=r"wait\(\)"):
        next(batches)
    sink.reset()
    sink.consume(BATCHES[1])
    sink.flush()
    assert len(list(sink)) == 1


def test_waiting_for_a_batch_has_a_deadline_if_asked_for() -> None:
    sink = IteratorSink(timeout_seconds=0.01)
    with pytest.raises(StalledError):
        next(iter(sink))
