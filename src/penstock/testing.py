"""Contracts of stages and loaders as assertions, and small fakes, for the tests of your own stages.

    def test_my_source_keeps_its_promises(tmp_path):
        assert_source_contract(lambda: MySource(tmp_path / "in.my"), rows=[{"a": 1}, {"a": 2}])

    def test_my_transform_resumes():
        assert_resumes_exactly(lambda: Pipeline(RowsSource(rows), [MyTransform()]))

    def test_batches_of_my_loader_depend_on_plan_seed_and_step_alone(store):
        assert_loader_contract(lambda **options: MyLoader(store, backend="numpy", **options))

The cost is quadratic in the number of batches: use a few dozen rows.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.verification import verify_resume
from penstock.pipeline import Durable, Pipeline, PipelineConfig, Publishing, Sink, Source, State

__all__ = [
    "FailingTransform",
    "RowsSource",
    "SlowSink",
    "assert_loader_contract",
    "assert_resumes_exactly",
    "assert_sink_contract",
    "assert_source_contract",
]

Row = dict[str, Any]
_MOST_STATE_BYTES = 4096
_SAMPLE = [
    {"n": i, "x": i / 4 if i % 5 else None, "text": f'row {i}, "quoted"\nö', "even": i % 2 == 0} for i in range(13)
]


def assert_resumes_exactly(make_pipeline: Callable[[], Pipeline]) -> None:
    """Assert that a fresh pipeline, resumed at any batch, yields exactly the remaining rows.

    `make_pipeline` builds the same pipeline, without a sink, each time. States go through JSON, as in a checkpoint
    file, and must stay below 4 KiB. Batches may be cut differently after a resume.
    """
    pipeline = make_pipeline()
    rows: list[Row] = []
    stops = [(0, _saved(make_pipeline().state_dict()))]
    for batch in pipeline:
        rows += batch.to_pylist()
        stops.append((len(rows), _saved(pipeline.state_dict())))
    assert rows, "the pipeline under test produced nothing"
    for count, state in stops:
        fresh = make_pipeline()
        fresh.load_state_dict(state)
        again = [row for batch in fresh for row in batch.to_pylist()]
        _assert_same(again, rows[count:], f"resumed after row {count}")


def assert_source_contract(make_source: Callable[[], Source], rows: Sequence[Mapping[str, Any]]) -> None:
    """Assert that a source yields `rows` in order and once, for any `max_rows`, and resumes exactly.

    `make_source` builds the same source each time. Optional methods (`state_dict`, `reset`, `origin`, `next_block`)
    are tested if they exist.
    """
    wanted = [dict(row) for row in rows]
    for max_rows in (1, 3, 1 << 16):
        with _closing(make_source()) as source:
            _assert_same(_read(source, max_rows), wanted, f"read {max_rows} rows at a time")
            assert source.next_batch(1) is None, "next_batch() returned a batch after None"
            assert source.memory_usage() >= 0
            assert source.size_hint() in (None, len(wanted)), f"size_hint() is {source.size_hint()}"
            if callable(getattr(source, "reset", None)):
                source.reset()
                _assert_same(_read(source, max_rows), wanted, "read again after reset()")
    for max_rows in (1, 3):
        _assert_source_resumes(make_source, wanted, max_rows)
    for max_bytes in (1, 64, 1 << 20):
        _assert_blocks(make_source, wanted, max_bytes)
    for workers in (1, 4):
        with _closing(make_source()) as source, Pipeline(source, config=PipelineConfig(workers=workers)) as pipeline:
            _assert_same(
                [row for batch in pipeline for row in batch.to_pylist()], wanted, f"ran with {workers} workers"
            )


def assert_sink_contract(make_sink: Callable[[Path], Sink], read_back: Callable[[Sink], list[Row]]) -> None:
    """Assert that a sink keeps every row in order, publishes nothing before `flush`, and survives crashes.

    `make_sink` gets an empty directory, and the same one again for the sink after a crash. `read_back` returns the
    published rows, none if there is no output. Rows have an int, a float or null, a text and a bool. Crashes are tested
    for durable sinks only. A sink with `rows_published` may publish rows before `flush`, in order.
    """
    batches = pa.Table.from_pylist(_SAMPLE).to_batches(max_chunksize=5)
    with tempfile.TemporaryDirectory() as name, _closing(make_sink(Path(name))) as sink:
        durable = isinstance(sink, Durable)
        publishing = durable and isinstance(sink, Publishing)
        for batch in batches:
            sink.consume(batch)
            assert sink.memory_usage() >= 0
            if publishing:
                seen = read_back(sink)
                _assert_same(seen, _SAMPLE[: len(seen)], "published before flush()")
            else:
                assert not durable or not read_back(sink), "rows were published before flush()"
        sink.flush()
        _assert_same(read_back(sink), _SAMPLE, "flushed")
        sink.flush()
        _assert_same(read_back(sink), _SAMPLE, "flushed again")
    if durable:
        _assert_abort_leaves_nothing(make_sink, read_back, batches)
        for crash in range(len(batches) + 1):
            _assert_survives(make_sink, read_back, batches, crash)


def assert_loader_contract(
    make_loader: Callable[..., DataLoader], *, steps: int = 24, worlds: Sequence[int] = (1, 2), seed: int = 0
) -> None:
    """Assert that the batches of a loader depend on plan, seed and step alone.

    `make_loader(rank=, world_size=, batch_size=, prefetch=)` makes a fresh loader of the same plan each time. Its first
    `steps` batches, across epochs, are compared byte for byte: resumed after each of them, resumed at random steps
    (`seed`), on other numbers of ranks (`worlds`), with and without prefetching. States are the same on every rank,
    survive JSON, and stay below 4 KiB. Every rank has the same number of batches.

    Let `steps` cover two epochs or more, since errors show at ends of epochs. A stream (`streaming=True`) is tested in
    one process, since its ranks need a rendezvous.
    """
    if not worlds or min(worlds) < 1:
        raise ConfigError(f"worlds: expected world sizes of at least 1, got {list(worlds)}")
    size = 2 * lcm(*worlds)

    def make(**given: Any) -> DataLoader:
        return make_loader(**{"rank": 0, "world_size": 1, "batch_size": size, "prefetch": 0, **given})

    wanted, states = _assert_loader_alone(make, steps)
    for number, state in enumerate(states):
        prefetch = (0, 2, None)[number % 3]
        with make(prefetch=prefetch) as fresh:
            fresh.load_state_dict(state)
            when = f"resumed after {number} batches, prefetch={prefetch}"
            assert _saved(fresh.state_dict()) == state, (
                f"{when}: the state is {fresh.state_dict()}, not the {state} loaded"
            )
            _assert_batches([_facts(batch) for batch in _epochs(fresh, steps - number)], wanted[number:], when)
    if not _planned(make):
        return
    due = [(facts["epoch"], facts["step"]) for facts in wanted]
    for world in worlds:
        for rank in range(world):
            with make(rank=rank, world_size=world, batch_size=size // world) as loader:
                seen = [(batch.metadata["epoch"], batch.metadata["step"]) for batch in _epochs(loader, steps)]
                budgeted = loader.options.max_tokens is not None  # then each rank has a batch of its own in a step
                assert budgeted or seen == due, f"rank {rank} of {world} has the (epoch, step)s {seen}, expected {due}"
    difference = verify_resume(make, steps=max(steps, 2), worlds=worlds, seed=seed).difference
    assert difference is None, difference


class RowsSource(Source):
    """Source of rows from a list, at most `batch_rows` at a time; raises `error` at row `fail_at`."""

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        *,
        batch_rows: int = 4,
        fail_at: int | None = None,
        error: Exception | None = None,
    ) -> None:
        self._rows = pa.Table.from_pylist([dict(row) for row in rows]).combine_chunks()
        self._batch_rows, self._fail_at, self._error = (
            batch_rows,
            fail_at,
            error or RuntimeError("fail_at"),
        )
        self._row = 0

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row == self._fail_at:
            raise self._error
        count = min(max_rows, self._batch_rows, self._rows.num_rows - self._row)
        if self._fail_at is not None and self._row < self._fail_at:
            count = min(count, self._fail_at - self._row)
        if not count:
            return None
        self._row += count
        return self._rows.slice(self._row - count, count).to_batches()[0]

    def size_hint(self) -> int | None:
        return int(self._rows.num_rows)

    def reset(self) -> None:
        self._row = 0

    def state_dict(self) -> State:
        return {"row": self._row}

    def load_state_dict(self, state: State) -> None:
        self._row = state["row"]

    def __repr__(self) -> str:
        return f"RowsSource({self._rows.num_rows} rows)"


class FailingTransform:
    """Transform that raises ValueError for batches with one of `values` in `column`, and passes on others."""

    def __init__(self, column: str, values: Collection[Any]) -> None:
        self._column, self._values = column, values

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for value in batch[self._column].to_pylist():
            if value in self._values:
                raise ValueError(f"failing as requested at {value!r}")
        return batch

    def __repr__(self) -> str:
        return f"FailingTransform({self._column!r})"


class SlowSink(Sink):
    """Sink that keeps batches in memory, and takes `seconds` for each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.batches: list[pa.RecordBatch] = []
        self.flushed = False

    def consume(self, batch: pa.RecordBatch) -> None:
        time.sleep(self._seconds)
        self.batches.append(batch)

    def flush(self) -> None:
        self.flushed = True

    def rows(self) -> list[Row]:
        return [row for batch in self.batches for row in batch.to_pylist()]

    def __repr__(self) -> str:
        return "SlowSink()"


# -- helpers ---------------------------------------------------------------------------------------------------------


def _assert_source_resumes(make_source: Callable[[], Source], rows: list[Row], max_rows: int) -> None:
    with _closing(make_source()) as source:
        if not callable(getattr(source, "state_dict", None)):
            return
        stops = [(0, _saved(source.state_dict()))]
        count = 0
        while (batch := source.next_batch(max_rows)) is not None:
            if callable(getattr(source, "origin", None)):
                assert source.origin() is not None, "origin() is None after a batch"
            count += batch.num_rows
            stops.append((count, _saved(source.state_dict())))
    for count, state in stops:
        with _closing(make_source()) as fresh:
            fresh.load_state_dict(state)
            _assert_same(_read(fresh, max_rows + 1), rows[count:], f"resumed after row {count}")


def _assert_blocks(make_source: Callable[[], Source], rows: list[Row], max_bytes: int) -> None:
    with _closing(make_source()) as source:
        if not callable(getattr(source, "next_block", None)):
            return
        count, stops = 0, []
        while (block := source.next_block(max_bytes)) is not None:
            decoded = source.decode(block)
            assert not decoded.rejected, f"rejected {decoded.rejected[0]}"
            _assert_same(decoded.batch.to_pylist(), rows[count : count + decoded.batch.num_rows], "decoded a block")
            count += decoded.batch.num_rows
            if callable(getattr(source, "state_dict", None)):
                stops.append((count, _saved(source.state_dict())))
        assert count == len(rows), f"blocks of {max_bytes} bytes held {count} rows, expected {len(rows)}"
    for count, state in stops:
        with _closing(make_source()) as fresh:
            fresh.load_state_dict(state)
            _assert_same(_read(fresh, 7), rows[count:], f"resumed after the block that ends at row {count}")


def _assert_abort_leaves_nothing(
    make_sink: Callable[[Path], Sink], read_back: Callable[[Sink], list[Row]], batches: list[pa.RecordBatch]
) -> None:
    with tempfile.TemporaryDirectory() as name, _closing(make_sink(Path(name))) as sink:
        sink.consume(batches[0])
        sink.abort()
        assert isinstance(sink, Publishing) or not read_back(sink), "rows were published after abort()"
        left = [str(path) for path in Path(name).rglob("*")]
        assert not left, f"abort() left {left}"


def _assert_survives(
    make_sink: Callable[[Path], Sink],
    read_back: Callable[[Sink], list[Row]],
    batches: list[pa.RecordBatch],
    crash: int,
) -> None:
    """Crash after each checkpoint, and around publishing."""
    with tempfile.TemporaryDirectory() as name:
        for keep in range(crash + 1):
            directory = Path(name, str(keep))
            directory.mkdir()
            lost: Any = make_sink(directory)
            lost.restore({})
            for batch in batches[:keep]:
                lost.consume(batch)
            token = _saved(lost.checkpoint())
            for batch in batches[keep:crash]:
                lost.consume(batch)  # lost: there is no later checkpoint
            sink: Any = make_sink(directory)
            sink.restore(token)
            for batch in batches[keep:]:
                sink.consume(batch)
            finishing = _saved(sink.checkpoint()) | {"finishing": True}
            for moment in ("before publishing", "after publishing", "long after publishing"):
                sink = make_sink(directory)
                sink.restore(finishing)
                sink.flush()
                _assert_same(read_back(sink), _SAMPLE, f"restored {moment}, checkpoint {keep}, crash {crash}")
            with _closing(lost):
                lost.abort()


def _assert_loader_alone(make: Callable[..., DataLoader], steps: int) -> tuple[list[Row], list[State]]:
    """The batches of a loader that is never stopped, and the states before the first and after each of them."""
    with make() as loader:
        states, batches, begun = [_saved(loader.state_dict())], [], loader.epoch
        expected_count = _length(loader)
        for batch in _epochs(loader, steps):
            batches.append(_facts(batch))
            states.append(_saved(loader.state_dict()))
            if loader.epoch != begun:
                count = sum(facts["epoch"] == batches[-1]["epoch"] for facts in batches)
                assert expected_count in (None, count), f"len() is {expected_count} in an epoch of {count} batches"
                begun, expected_count = loader.epoch, _length(loader)
        assert batches, "the loader under test produced nothing"
        loader.reset()
        _assert_batches([_facts(batch) for batch in _epochs(loader, steps)], batches, "read again after reset()")
        loader.close()
    with make() as loader:
        facts = [_facts(loader.get_batch()) for _ in batches]
        _assert_batches(facts, batches, "read by get_batch()")
    return batches, states


def _epochs(loader: DataLoader, steps: int) -> Iterator[TrainingBatch]:
    """At most `steps` batches, across epochs."""
    found = True
    while steps > 0 and found:
        found = False
        for batch in loader:
            found = True
            yield batch
            steps -= 1
            if steps <= 0:
                return


def _planned(make: Callable[..., DataLoader]) -> bool:
    with make() as loader:
        try:
            return bool(loader.plan)
        except ConfigError:  # a stream has none
            return False


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:  # endless
        return None


def _facts(batch: TrainingBatch) -> Row:
    """Content of a batch, for comparison."""
    found = {**batch.metadata, **batch.to_numpy()}
    return {
        name: (str(value.dtype), value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in found.items()
    }


def _assert_batches(got: list[Row], wanted: Sequence[Row], when: str) -> None:
    for number, (batch, expected) in enumerate(zip(got, wanted)):
        different = [name for name in {**expected, **batch} if batch.get(name) != expected.get(name)]
        assert not different, f"{when}: {', '.join(different)} of batch {number} differ from the first reading"
    assert len(got) == len(wanted), f"{when}: {len(got)} batches, expected {len(wanted)}"


def _read(source: Source, max_rows: int) -> list[Row]:
    rows: list[Row] = []
    schema: pa.Schema | None = None
    while (batch := source.next_batch(max_rows)) is not None:
        assert batch.num_rows <= max_rows, f"expected at most {max_rows} rows, got {batch.num_rows}"
        assert schema is None or batch.schema.equals(schema), "the schema changed between two batches"
        schema = batch.schema
        rows += batch.to_pylist()
    return rows


def _saved(state: State) -> State:
    """A state after a round trip through JSON."""
    try:
        data = orjson.dumps(state)
    except TypeError as error:
        raise AssertionError(f"the state is not plain JSON: {error}") from None
    assert len(data) < _MOST_STATE_BYTES, f"the state takes {len(data)} bytes, more than {_MOST_STATE_BYTES}"
    back: State = orjson.loads(data)
    return back


def _assert_same(got: list[Row], wanted: Sequence[Row], when: str) -> None:
    """Rows are compared as they print, so that NaN equals NaN."""
    for number, (row, expected) in enumerate(zip(got, wanted)):
        assert repr(row) == repr(expected), f"{when}: row {number} is {row!r}, expected {expected!r}"
    assert len(got) == len(wanted), f"{when}: {len(got)} rows, expected {len(wanted)}"


@contextmanager
def _closing(stage: Any) -> Iterator[Any]:
    try:
        yield stage
    finally:
        close = getattr(stage, "close", None)
        if callable(close):
            close()
