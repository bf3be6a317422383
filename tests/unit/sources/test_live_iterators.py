"""Iterators that are filled while they are read, and iterators that belong to one thread."""

from __future__ import annotations

import gc
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from penstock import Pipeline, PipelineConfig
from penstock.errors import ConfigError, StageError, StalledError
from penstock.loaders import PretrainDataLoader, StreamOptions
from penstock.pipeline.prefetch import IteratorThread
from penstock.sinks import MemorySink
from penstock.sources import IteratorSource
from penstock.testing import assert_source_contract

SOON, LONG = 0.01, 20.0


class Feed:
    """Rows of which each part comes only after the consumer has seen the part before it."""

    def __init__(self, *parts: list[dict[str, Any]]) -> None:
        self.parts, self.seen, self.in_time = parts, threading.Event(), True

    def __call__(self) -> Iterator[dict[str, Any]]:
        for number, part in enumerate(self.parts):
            if number:
                self.in_time &= self.seen.wait(LONG)
                self.seen.clear()
            yield from part


def numbers(low: int, high: int) -> list[dict[str, Any]]:
    return [{"n": n} for n in range(low, high)]


@pytest.mark.parametrize(
    ("seconds", "config"),
    [
        (SOON, PipelineConfig()),
        (None, PipelineConfig(max_wait_seconds=SOON)),
        (None, PipelineConfig(max_wait_seconds=SOON, batch_rows=100)),
    ],
)
def test_rows_of_a_live_iterator_come_before_a_batch_is_full(seconds: float | None, config: PipelineConfig) -> None:
    feed = Feed(numbers(0, 3), numbers(3, 4), numbers(4, 9))
    found: list[dict[str, Any]] = []
    for batch in Pipeline(IteratorSource(feed, max_wait_seconds=seconds), config=config):
        found += batch.to_pylist()
        if found[-1]["n"] in (2, 3):
            feed.seen.set()
    assert feed.in_time
    assert found == numbers(0, 9)


def test_a_row_comes_within_the_default_time() -> None:
    feed = Feed(numbers(0, 1), numbers(1, 2))
    for _ in Pipeline(IteratorSource(feed)):
        feed.seen.set()
    assert feed.in_time


def test_a_sink_gets_the_rows_of_a_live_iterator_as_they_come() -> None:
    feed = Feed(numbers(0, 3), numbers(3, 5))

    class Seeing(MemorySink):
        def consume(self, batch: pa.RecordBatch) -> None:
            super().consume(batch)
            feed.seen.set()

    sink = Seeing()
    Pipeline(IteratorSource(feed, max_wait_seconds=SOON), sink=sink).run()
    assert feed.in_time
    assert sink.table().to_pylist() == numbers(0, 5)


def test_a_batch_of_a_given_size_is_full_unless_a_wait_is_given() -> None:
    def slow() -> Iterator[dict[str, Any]]:
        for row in numbers(0, 7):
            time.sleep(2 * SOON)
            yield row

    pipeline = Pipeline(IteratorSource(slow, max_wait_seconds=SOON), config=PipelineConfig(batch_rows=3))
    assert [batch.num_rows for batch in pipeline] == [3, 3, 1]


def test_the_schema_is_not_learned_before_every_column_has_a_type() -> None:
    late = [{"n": None, "tags": []}, {"n": None, "tags": ["x"]}, {"n": 1.5, "tags": []}]

    def slow() -> Iterator[dict[str, Any]]:
        for row in late:
            time.sleep(2 * SOON)
            yield row

    batches = list(Pipeline(IteratorSource(slow, max_wait_seconds=SOON)))
    assert [row for batch in batches for row in batch.to_pylist()] == late
    assert batches[0].schema.field("n").type == pa.float64()


@pytest.mark.parametrize("columns", [1, 2000])
def test_a_schema_that_was_learned_from_the_rows_in_time_is_that_of_the_resumed_run(columns: int) -> None:
    """2000 columns are too many for the state, which then says how many rows were looked at."""
    rows = [{f"c{number}": value for number in range(columns)} for value in (1, 2, 3)]
    feed = Feed(rows[:2], rows[2:])
    source = IteratorSource(feed, max_wait_seconds=0.2)
    first = source.next_batch(100)
    assert first is not None
    assert first.to_pylist() == rows[:2]
    state = source.state_dict()
    feed.seen.set()
    source.close()
    again = IteratorSource(lambda: [*rows[:2], {**rows[2], "c0": 3}], max_wait_seconds=None)
    again.load_state_dict(state)
    rest = again.next_batch(100)
    assert rest is not None
    assert rest.to_pylist() == rows[2:]
    assert rest.schema == first.schema


def test_leaving_a_loop_does_not_wait_for_the_next_row(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()

    def stuck() -> Iterator[dict[str, Any]]:
        yield {"n": 0}
        never.wait(LONG)

    for _ in Pipeline(IteratorSource(stuck, max_wait_seconds=SOON)):
        break
    assert not caplog.records, "no thread of the pipeline was abandoned"
    never.set()


def test_nothing_is_read_that_was_not_asked_for() -> None:
    made: list[int] = []

    def rows() -> Iterator[dict[str, Any]]:
        for n in range(10_000):
            made.append(n)
            yield {"n": n}

    source = IteratorSource(rows, schema=pa.schema([("n", pa.int64())]))
    for wanted in (7, 12, 20):
        while len(made) < wanted:
            assert source.next_batch(1) is not None
        assert len(made) == wanted


def test_rows_before_an_error_come_before_it() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from numbers(0, 3)
        raise OSError("the line is dead")

    source = IteratorSource(rows)
    batch = source.next_batch(10)
    assert batch is not None
    assert batch.to_pylist() == numbers(0, 3)
    with pytest.raises(OSError, match="the line is dead"):
        source.next_batch(10)
    assert source.next_batch(10) is None


def test_a_stalled_iterator_is_shown_where_it_is() -> None:
    gate = threading.Event()

    def waits_in_here() -> Iterator[dict[str, Any]]:
        gate.wait(LONG)
        yield {"n": 0}

    with pytest.raises(StalledError, match="waits_in_here"):
        list(Pipeline(IteratorSource(waits_in_here), config=PipelineConfig(stall_seconds=0.05)))
    gate.set()


def test_the_thread_of_an_iterator_that_nobody_uses_ends() -> None:
    closed = threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        try:
            yield from numbers(0, 1000)
        finally:
            closed.set()

    source = IteratorSource(rows)
    source.next_batch(1)
    del source
    gc.collect()
    assert closed.wait(LONG)


def test_an_iterator_that_was_given_as_such_stays_open() -> None:
    rows = (row for row in numbers(0, 1000))
    source = IteratorSource(rows, schema=pa.schema([("n", pa.int64())]))
    source.next_batch(5)
    source.close()
    assert next(rows) == {"n": 5}
    with pytest.raises(ValueError, match="closed"):
        source.next_batch(1)


@pytest.mark.parametrize("seconds", [0, -1, True, "1"])
def test_a_wait_is_a_positive_number(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="max_wait_seconds"):
        IteratorSource([], max_wait_seconds=seconds)
    with pytest.raises(ConfigError, match="max_wait_seconds"):
        PipelineConfig(max_wait_seconds=seconds)


@pytest.fixture
def query(tmp_path: Path) -> Callable[[], Iterator[dict[str, Any]]]:
    """Rows of a real database, whose connection refuses other threads, also to be closed."""
    path = tmp_path / "rows.db"
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("create table docs (n integer, text text)")
        database.executemany("insert into docs values (?, ?)", [(n, f"row {n}") for n in range(1000)])

    def rows() -> Iterator[dict[str, Any]]:
        with closing(sqlite3.connect(path)) as database:
            for n, text in database.execute("select n, text from docs order by n"):
                yield {"n": n, "text": text}

    return rows


def test_a_database_is_a_source_like_any_other(query: Callable[[], Iterator[dict[str, Any]]]) -> None:
    rows = [{"n": n, "text": f"row {n}"} for n in range(12)]
    assert_source_contract(lambda: IteratorSource(lambda: islice(query(), 12)), rows)


def test_a_pipeline_over_a_database_resumes_and_closes_its_connection(
    query: Callable[[], Iterator[dict[str, Any]]],
) -> None:
    def make() -> Pipeline:
        return Pipeline(IteratorSource(query), config=PipelineConfig(batch_rows=64))

    first, found = make(), []
    for batch in first:
        found += batch["n"].to_pylist()
        if len(found) >= 300:
            break
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    for _ in range(2):  # a pipeline can run again, too
        rest = [n for batch in second for n in batch["n"].to_pylist()]
        assert found + rest == list(range(1000))
        second.load_state_dict(state)


def test_a_streaming_loader_over_a_database_resumes(query: Callable[[], Iterator[dict[str, Any]]]) -> None:
    def make() -> PretrainDataLoader:
        return PretrainDataLoader(
            IteratorSource(query), "byte", 32, streaming=StreamOptions(shuffle_window=64), batch_size=4, backend="numpy"
        )

    with make() as loader:
        seen = [(batch.input_ids.tolist(), loader.state_dict()) for batch in islice(loader, 30)]
    for number in (0, 11, 28):
        with make() as loader:
            loader.load_state_dict(seen[number][1])
            assert loader.get_batch().input_ids.tolist() == seen[number + 1][0]


@pytest.mark.parametrize("packing", ["concat", None])
def test_an_unshuffled_loader_gives_a_batch_as_soon_as_its_rows_are_there(packing: Any) -> None:
    """An endless stream of which each part comes only after a batch was delivered; the windows change no batch."""
    texts = [{"text": f"row {number}"} for number in range(64)]
    parts = [texts[:8], texts[8:16], texts[16:]]
    feed = Feed(*parts)
    options: dict[str, Any] = {"streaming": True, "packing": packing, "shuffle": False, "batch_size": 2}
    options |= {"truncation": "right", "backend": "numpy", "prefetch": 0}
    source = IteratorSource(feed, schema=pa.schema([("text", pa.string())]), max_wait_seconds=SOON)
    with PretrainDataLoader(source, "byte", 8, **options) as loader:
        found = [loader.get_batch().input_ids.tolist()]
        feed.seen.set()
        while found[-1] and len(found) < 6:
            found.append(loader.get_batch().input_ids.tolist())
            feed.seen.set()
    assert feed.in_time
    with PretrainDataLoader(texts, "byte", 8, **options | {"streaming": StreamOptions(streams=1)}) as loader:
        assert [loader.get_batch().input_ids.tolist() for _ in found] == found


def test_a_cursor_of_another_thread_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as database:
        database.execute("create table docs (n integer)")
        cursor = database.execute("select n from docs")
        with pytest.raises((ConfigError, StageError), match="function that opens it"):
            list(Pipeline(IteratorSource(cursor)))


def test_a_batch_that_is_taken_before_it_was_counted_does_not_lose_the_next_demand() -> None:
    def is_whole(item: int) -> bool:
        """Slow enough for the consumer to take the first item and to ask for the next one."""
        while item == 0 and reader._line._goal < 2:
            time.sleep(0.001)
        return True

    reader = IteratorThread(lambda: iter(range(2)), owned=True, is_whole=is_whole)
    with closing(reader):
        assert reader.take(1) == [0]
        assert reader.take(1) == [1]
