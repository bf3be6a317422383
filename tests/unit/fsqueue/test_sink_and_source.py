"""Pipelines into a queue and out of one: every row once, whatever its columns."""

from __future__ import annotations

import datetime
import itertools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.waits import wait_for

from penstock.errors import (
    ConfigError,
    DataError,
    QueueNotFoundError,
    ResumeError,
    SchemaError,
    StageError,
    StaleQueueError,
    StalledError,
)
from penstock.files.states import with_checksum
from penstock.fsqueue import QueueSink, QueueSource
from penstock.fsqueue.consumer import DatasetConsumer
from penstock.fsqueue.publisher import Limits
from penstock.fsqueue.queue import Queue
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import MemorySink
from penstock.sources import JsonlSource
from penstock.testing import (
    FailingTransform,
    RowsSource,
    assert_resumes_exactly,
    assert_sink_contract,
    assert_source_contract,
)
from penstock.types import Field, Schema, from_rows

ROWS = [{"n": i, "text": f"row {i}", "x": i / 4 if i % 5 else None} for i in range(40)]


def batches_of(rows: list[dict[str, Any]], per_batch: int = 3) -> list[pa.RecordBatch]:
    return list(pa.Table.from_pylist(rows).combine_chunks().to_batches(max_chunksize=per_batch))


def fill(path: Path, batches: list[pa.RecordBatch], **options: Any) -> None:
    with QueueSink(path, **options) as sink:
        for batch in batches:
            sink.consume(batch)


def read_rows(path: Path, **options: Any) -> list[dict[str, Any]]:
    with QueueSource(path, timeout_seconds=120, **options) as source:
        return [row for batch in source for row in batch.to_pylist()]


def ready(path: Path, split: str = "train") -> list[tuple[int, int]]:
    """(number, batches) of the files that wait."""
    return [(file.number, file.batches) for file in Queue.open(path).split(split).files() if file.owner is None]


# -- what goes in comes out ------------------------------------------------------------------------------------------

MOMENT = datetime.datetime(2024, 5, 17, 12, 30, tzinfo=datetime.UTC)
TABLES: dict[str, pa.Table] = {
    "strings and nulls": pa.table({"s": ["a", None, "", "ü" * 300]}),
    "lists": pa.table({"tokens": pa.array([[1, 2], [], None, [3]], pa.list_(pa.int32()))}),
    "rollouts": pa.Table.from_pylist(
        [
            {"prompt": f"p{i}", "completions": [{"text": "t" * i, "logprobs": [0.5] * i, "reward": None}] * (i % 3)}
            for i in range(5)
        ]
    ),
    "large types": pa.table(
        {"s": pa.array(["a", "b"], pa.large_string()), "l": pa.array([[1], []], pa.large_list(pa.int8()))}
    ),
    "times and decimals": pa.table(
        {"t": pa.array([MOMENT, None], pa.timestamp("us", "UTC")), "d": pa.array([1, 2], pa.decimal128(10, 2))}
    ),
    "dictionaries": pa.table({"d": pa.array(["a", "b", "a"]).dictionary_encode()}),
    "maps": pa.table({"m": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64()))}),
    "lists with another name for their items": pa.table(
        {"l": pa.array([[1], [2, 3]], pa.list_(pa.field("element", pa.int64(), nullable=False)))}
    ),
    "bytes and bools": pa.table({"b": [b"\x00\xff", None], "t": [True, False], "f": pa.array([1.5, 2], pa.float16())}),
    "not null": pa.table([pa.array([1, 2])], schema=pa.schema([pa.field("n", pa.int64(), nullable=False)])),
    "structs": pa.table({"s": [{"a": {"b": [1, None]}}, None, {"a": None}]}),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_kind_of_column_comes_out_as_it_went_in(tmp_path: Path, table: pa.Table, compression: str | None) -> None:
    fill(tmp_path / "q", table.to_batches(max_chunksize=1), batches_per_file=3, compression=compression)
    assert read_rows(tmp_path / "q") == table.to_pylist()


def test_tensors_roles_and_sparse_vectors_keep_what_they_are(tmp_path: Path) -> None:
    schema = Schema(
        [
            Field("image", "float32", shape=(2, 3), role="input", nullable=False),
            Field("frames", "int16", shape=(None, 2), role="target"),
            Field("terms", "sparse<float32>[9]"),
        ]
    )
    rows = [
        {"image": np.full((2, 3), i, np.float32), "frames": np.ones((i, 2), np.int16), "terms": ([i], [0.5])}
        for i in range(1, 4)
    ]
    batch = from_rows(rows, schema)
    fill(tmp_path / "q", [batch])
    with QueueSource(tmp_path / "q") as source:
        again = list(source)
        assert [field.to_arrow().type for field in Schema.from_arrow(source.schema)] == batch.schema.types
        assert [field.role for field in Schema.from_arrow(again[0].schema)] == ["input", "target", None]
        assert again[0].to_pylist() == batch.to_pylist()
        assert source.schema.equals(again[0].schema, check_metadata=True)


CELLS: dict[pa.DataType, st.SearchStrategy[Any]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.string(): st.text(max_size=5),
    pa.list_(pa.float64()): st.lists(st.floats(allow_nan=False), max_size=3),
    pa.struct([("a", pa.bool_()), ("b", pa.list_(pa.string()))]): st.fixed_dictionaries(
        {"a": st.booleans() | st.none(), "b": st.lists(st.text(max_size=2), max_size=2) | st.none()}
    ),
}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_table_in_any_pieces_comes_out_whole_and_in_order(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    types = data.draw(st.lists(st.sampled_from(list(CELLS)), min_size=1, max_size=3))
    rows = data.draw(st.integers(0, 12))
    columns = [
        pa.array(data.draw(st.lists(CELLS[kind] | st.none(), min_size=rows, max_size=rows)), kind) for kind in types
    ]
    table = pa.table(columns, names=[f"c{i}" for i in range(len(columns))])
    path = tmp_path_factory.mktemp("any") / "q"
    fill(
        path,
        table.to_batches(max_chunksize=data.draw(st.integers(1, 4))),
        schema=table.schema,
        batch_rows=data.draw(st.none() | st.integers(1, 5)),
        batches_per_file=data.draw(st.integers(1, 3)),
    )
    order: Any = data.draw(st.sampled_from(["any", "strict"]))
    max_rows = data.draw(st.integers(1, 6))
    with QueueSource(path, order=order, timeout_seconds=120) as source:
        found = []
        while (batch := source.next_batch(max_rows)) is not None:
            assert batch.num_rows <= max_rows
            found += batch.to_pylist()
    assert found == table.to_pylist()


def test_batches_with_dictionaries_of_their_own_go_into_one_file(tmp_path: Path) -> None:
    nested = [
        pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), pa.array(values).dictionary_encode())
        for values in (["a", "b"], ["c", "a"])
    ]
    parts = [
        pa.record_batch({"d": pa.array(values).dictionary_encode(), "l": lists})
        for values, lists in zip((["x", "y"], ["z", "x"]), nested)
    ]
    fill(tmp_path / "q", parts)
    assert read_rows(tmp_path / "q") == [row for part in parts for row in part.to_pylist()]


# -- files and ends --------------------------------------------------------------------------------------------------


def test_files_hold_as_many_batches_as_asked_and_the_last_the_rest(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS), batches_per_file=4)
    assert ready(tmp_path / "q") == [(0, 4), (1, 4), (2, 4), (3, 2)]


def test_batches_are_cut_and_joined_to_the_rows_asked_for(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 7), batch_rows=16, batches_per_file=1)
    with QueueSource(tmp_path / "q") as source:
        sizes = [batch.num_rows for batch in source]
    assert sizes == [16, 16, 8]


@pytest.mark.parametrize("order", ["any", "strict"])
@pytest.mark.parametrize("count", [1, 8, 9, 15, 16])
def test_a_reader_stops_where_the_sink_stopped(tmp_path: Path, order: Any, count: int) -> None:
    rows = ROWS[1 : count + 1]
    fill(tmp_path / "q", batches_of(rows, 1))
    assert read_rows(tmp_path / "q", order=order) == rows


def test_a_sink_that_got_no_rows_makes_a_queue_that_is_at_its_end(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS)[:1][0:0], schema=pa.schema([("n", pa.int64())]))
    assert read_rows(tmp_path / "q") == []


def test_without_an_end_a_reader_waits_for_more_and_says_what_for(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS), end=False)
    with QueueSource(tmp_path / "q", timeout_seconds=0.2) as source:
        assert sum(source.next_batch(100).num_rows for _ in range(14)) == 40  # type: ignore[union-attr]
        with pytest.raises(StalledError, match="'train'"):
            source.next_batch(100)


def test_a_sink_without_an_end_is_flushed_as_often_as_one_likes(tmp_path: Path) -> None:
    sink = QueueSink(tmp_path / "q", end=False)
    for batch in batches_of(ROWS, 10):
        sink.consume(batch)
        sink.flush()
    assert ready(tmp_path / "q") == [(number, 1) for number in range(4)]
    assert list((tmp_path / "q" / "members").iterdir()) == []


def test_a_sink_that_has_ended_its_split_says_how_to_go_on(tmp_path: Path) -> None:
    sink = QueueSink(tmp_path / "q")
    sink.consume(batches_of(ROWS)[0])
    sink.flush()
    sink.flush()
    with pytest.raises(ConfigError, match=r"'train'.*end=False"):
        sink.consume(batches_of(ROWS)[0])


def test_one_of_two_sinks_that_ends_the_split_too_early_is_found_out(tmp_path: Path) -> None:
    one, other = (QueueSink(tmp_path / "q", batches_per_file=1) for _ in range(2))
    one.consume(batches_of(ROWS)[0])
    other.consume(batches_of(ROWS)[1])
    one.flush()
    with pytest.raises(ConfigError, match=r"'train'.*end=False"):
        other.consume(batches_of(ROWS)[2])
    other.abort()


def test_several_sinks_share_a_split_and_the_last_one_ends_it(tmp_path: Path) -> None:
    sinks = [QueueSink(tmp_path / "q", batches_per_file=2, end=False) for _ in range(3)]

    def push(sink: QueueSink, rows: list[dict[str, Any]]) -> None:
        for batch in batches_of(rows, 1):
            sink.consume(batch)
        sink.flush()

    threads = [threading.Thread(target=push, args=(sink, ROWS[i::3])) for i, sink in enumerate(sinks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fill(tmp_path / "q", batches_of(ROWS, 1)[:0], schema=batches_of(ROWS)[0].schema, batches_per_file=2)
    assert sorted(read_rows(tmp_path / "q"), key=lambda row: row["n"]) == ROWS


def test_a_run_into_a_queue_that_has_ended_in_the_middle_of_a_file_says_what_can_be_done(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=8)
    with pytest.raises(ConfigError) as caught:
        Pipeline(RowsSource(ROWS), [], QueueSink(tmp_path / "q")).run()
    said = str(caught.value)
    assert "10 batches" in said
    assert str(tmp_path / "q") in said
    assert "another directory" in said
    assert "end=False" in said
    assert "prepare.py" not in said
    assert "max_batches" not in said
    assert read_rows(tmp_path / "q") == ROWS


def test_a_second_run_of_the_same_pipeline_adds_to_the_queue(tmp_path: Path) -> None:
    pipeline = Pipeline(RowsSource(ROWS), [], QueueSink(tmp_path / "q", batch_rows=5, batches_per_file=8))
    pipeline.run()
    pipeline.run()
    assert read_rows(tmp_path / "q") == ROWS + ROWS


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_batch_with_other_columns_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    sink = QueueSink(tmp_path / "q")
    sink.consume(pa.record_batch({"a": [1], "b": ["x"]}))
    with pytest.raises(SchemaError, match=r"'a'.*\bint64\b"):
        sink.consume(pa.record_batch({"a": ["1"], "b": ["x"]}))
    with pytest.raises(SchemaError, match=r"'b'.*'c'"):
        sink.consume(pa.record_batch({"a": [1], "c": ["x"]}))
    sink.consume(pa.record_batch({"b": ["y"], "a": [2]}))  # another order is no difference
    sink.consume(pa.record_batch({"b": pa.nulls(1), "a": [3]}))  # a column that happens to be null has no type
    sink.flush()
    assert read_rows(tmp_path / "q") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": None}]


def test_a_column_without_a_type_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match=r"'b'.*schema="):
        QueueSink(tmp_path / "q").consume(pa.record_batch({"a": [1], "b": pa.nulls(1)}))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batches_per_file": 2}, "batches_per_file"),
        ({"meta": {"policy": "b"}}, r"\bmeta\b.*policy"),
    ],
)
def test_a_queue_that_was_made_otherwise_is_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    fill(tmp_path / "q", batches_of(ROWS), meta={"policy": "a"})
    with pytest.raises(StaleQueueError, match=str(said)):
        QueueSink(tmp_path / "q", **{"meta": {"policy": "a"}, **options}).consume(batches_of(ROWS)[0])


def test_the_meta_reaches_the_reader(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS), meta={"policy": "a", "vocab_size": 7}, splits=["train", "val"])
    source = QueueSource(tmp_path / "q", "val")
    assert (source.meta["policy"], source.meta["vocab_size"]) == ("a", 7)
    assert source.schema.names == ["n", "text", "x"]


@pytest.mark.parametrize(
    "options",
    [
        {"batch_rows": 0},
        {"batches_per_file": True},
        {"timeout_seconds": 0},
        {"splits": ["val"]},
        {"limits": {"files": 3}},
        {"limits": {"backlog_files": 0}},
    ],
)
def test_a_sink_with_options_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        QueueSink(tmp_path / "q", **options)


@pytest.mark.parametrize(
    "options", [{"order": "some"}, {"acknowledge": "x"}, {"on_error": "x"}, {"timeout_seconds": -1}]
)
def test_a_source_with_options_that_cannot_work_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        QueueSource(tmp_path / "q", **options)


def test_a_queue_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(QueueNotFoundError, match=str(tmp_path)):
        QueueSource(tmp_path / "q").next_batch(1)


# -- room ------------------------------------------------------------------------------------------------------------


def test_a_full_queue_makes_the_sink_wait_and_then_say_what_for(tmp_path: Path) -> None:
    sink = QueueSink(tmp_path / "q", batches_per_file=1, limits=Limits(2), timeout_seconds=0.2)
    for batch in batches_of(ROWS)[:3]:
        assert sink.wait_for_room(0)
        sink.consume(batch)
    assert len(ready(tmp_path / "q")) == 2
    assert not sink.wait_for_room(0.01)
    with pytest.raises(StalledError, match="'train'"):
        sink.consume(batches_of(ROWS)[3])
    source = QueueSource(tmp_path / "q")
    source.next_batch(100)
    source.next_batch(100)  # the first file is done with
    assert sink.wait_for_room(5)
    sink.flush()
    assert [batch.to_pylist() for batch in source] == [batches_of(ROWS)[2].to_pylist()]
    source.close()


def test_a_pipeline_that_waits_for_room_can_be_stopped(tmp_path: Path) -> None:
    sink = QueueSink(tmp_path / "q", batch_rows=1, batches_per_file=1, limits=Limits(2))
    pipeline = Pipeline(RowsSource(ROWS), [], sink)
    pipeline.start()
    wait_for(lambda: (tmp_path / "q").exists() and len(ready(tmp_path / "q")) == 2)
    pipeline.stop()
    assert len(ready(tmp_path / "q")) == 2
    assert list((tmp_path / "q" / "members").iterdir()) == []
    assert all("by" not in lane.name for lane in (tmp_path / "q" / "train" / "lanes").iterdir())


def test_limits_may_be_a_mapping_as_a_file_has_them(tmp_path: Path) -> None:
    assert QueueSink(tmp_path / "q", limits={"backlog_files": 3}).limits == Limits(3)


# -- pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["any", "strict"])
def test_two_pipelines_in_two_threads_are_joined_by_a_directory(tmp_path: Path, order: Any) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    sink = QueueSink(tmp_path / "q", batch_rows=3, batches_per_file=2, limits=Limits(3))
    writing = Pipeline(JsonlSource(tmp_path / "in.jsonl"), [], sink)
    source = QueueSource(tmp_path / "q", order=order, wait_for_queue_seconds=120, timeout_seconds=120)
    writing.start()
    rows = [row for batch in Pipeline(source) for row in batch.to_pylist()]
    report = writing.wait(10)
    writing.stop()
    assert rows == ROWS
    assert report.rows_out == 40
    assert ready(tmp_path / "q") == []
    assert list((tmp_path / "q" / "members").iterdir()) == []


WRITER = """
import sys
from penstock.fsqueue.publisher import Limits
from penstock.fsqueue import QueueSink
from penstock.pipeline import Pipeline
from penstock.sources import JsonlSource
sink = QueueSink(sys.argv[2], batch_rows=3, batches_per_file=2, limits=Limits(2))
Pipeline(JsonlSource(sys.argv[1]), [], sink).run()
"""


def test_two_pipelines_in_two_processes_are_joined_by_a_directory(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "in.jsonl"), str(tmp_path / "q")])
    try:
        source = QueueSource(tmp_path / "q", wait_for_queue_seconds=120, timeout_seconds=120)
        sink = MemorySink()
        Pipeline(source, [], sink).run()
        assert sink.rows() == ROWS
    finally:
        writer.wait(30)
    assert writer.returncode == 0


def test_a_pipeline_that_reads_an_empty_queue_can_be_stopped(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS), end=False)
    seen = MemorySink()
    pipeline = Pipeline(QueueSource(tmp_path / "q"), [], seen)
    pipeline.start()
    wait_for(lambda: len(seen.rows()) == 40)
    pipeline.stop()
    assert seen.rows() == ROWS
    assert list((tmp_path / "q" / "members").iterdir()) == []


def test_a_failed_pipeline_leaves_what_was_published_and_no_traces_of_itself(tmp_path: Path) -> None:
    sink = QueueSink(tmp_path / "q", batches_per_file=1)
    with pytest.raises(StageError, match=r"\b30\b"):
        Pipeline(RowsSource(ROWS), [FailingTransform("n", [30]).transform], sink, PipelineConfig(workers=1)).run()
    assert list((tmp_path / "q" / "members").iterdir()) == []
    assert not [name for name in Queue.open(tmp_path / "q").split("train").names() if name.endswith(".tmp")]


def test_a_sink_keeps_the_contract_of_sinks() -> None:
    def see(sink: Any) -> list[dict[str, Any]]:
        if not sink.path.exists():
            return []
        return read_rows(sink.path, order="strict", acknowledge="committed")

    assert_sink_contract(lambda directory: QueueSink(directory / "q", batches_per_file=2), see)


def copies(path: Path) -> Callable[[], Path]:
    """A new copy of a queue with each call: a state that is loaded says what is done with."""
    numbers = itertools.count()

    def copy() -> Path:
        return Path(shutil.copytree(path, path.with_name(f"{path.name}-{next(numbers)}")))

    return copy


@pytest.mark.parametrize("order", ["strict", "any"])
def test_a_source_keeps_the_contract_of_sources(tmp_path: Path, order: Any) -> None:
    fill(tmp_path / "q", batches_of(ROWS[:11], 4), batches_per_file=2)
    copy = copies(tmp_path / "q")
    assert_source_contract(
        lambda: QueueSource(copy(), order=order, acknowledge="committed", timeout_seconds=120), ROWS[:11]
    )


@pytest.mark.parametrize("order", ["strict", "any"])
def test_a_pipeline_from_a_queue_resumes_at_every_batch(
    tmp_path: Path, order: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "q", batches_of(ROWS[:14], 4), batches_per_file=2)
    copy, config = copies(tmp_path / "q"), PipelineConfig(workers=1, batch_rows=3)
    # The same pipeline, as far as it says, whichever copy it reads.
    monkeypatch.setattr(QueueSource, "__repr__", lambda source: "QueueSource()")
    assert_resumes_exactly(lambda: Pipeline(QueueSource(copy(), order=order, acknowledge="committed"), config=config))


# -- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["any", "strict"])
@pytest.mark.parametrize("died", [False, True])
def test_a_state_in_the_middle_of_a_batch_resumes_at_the_row(tmp_path: Path, order: Any, died: bool) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 8), batches_per_file=2)
    options: dict[str, Any] = {"order": order, "acknowledge": "committed", "timeout_seconds": 120}
    source = QueueSource(tmp_path / "q", **options)
    begun = [row for _ in range(4) for row in source.next_batch(7).to_pylist()]  # type: ignore[union-attr]
    state = orjson.loads(orjson.dumps(source.state_dict()))
    source.next_batch(7)
    if not died:
        source.close()
    elif order == "strict":
        assert source._input is not None
        source._input.member.leave()  # as whoever tidies up after it does
    again = QueueSource(tmp_path / "q", **options)
    again.load_state_dict(state)
    assert orjson.loads(orjson.dumps(again.state_dict()))["row"] == state["row"]
    rest = [row for batch in again for row in batch.to_pylist()]
    assert begun + rest == ROWS
    again.close()
    source.close()


@pytest.mark.parametrize("taken", [3, 4, 7, 8, 11, 16, 19])
def test_a_state_holds_after_a_second_run_from_it_has_died_too(tmp_path: Path, taken: int) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2)
    options: dict[str, Any] = {"acknowledge": "committed", "timeout_seconds": 120, "lease_seconds": 0.5}
    runs = [QueueSource(tmp_path / "q", **options) for _ in range(3)]
    begun: list[dict[str, Any]] = []
    while len(begun) < taken:
        begun += runs[0].next_batch(taken - len(begun)).to_pylist()  # type: ignore[union-attr]
    state = orjson.loads(orjson.dumps(runs[0].state_dict()))
    runs[0].next_batch(1)
    for number, run in enumerate(runs[:2]):
        if number:
            run.load_state_dict(state)
            run.next_batch(1)
        assert run._input is not None
        run._input.member.leave()  # its claims stay until somebody finds that it is dead
    runs[2].load_state_dict(state)
    rest = [row for batch in runs[2] for row in batch.to_pylist()]
    assert sorted(row["n"] for row in begun + rest) == list(range(len(ROWS)))
    for run in reversed(runs):
        run.close()


def test_what_was_committed_is_deleted_and_the_rest_stays(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2)
    for order in ("strict", "any"):
        source = QueueSource(tmp_path / "q", order=order, acknowledge="committed")
        for _ in range(3):
            source.next_batch(100)
        source.commit()
        source.close()
    assert [number for number, _ in ready(tmp_path / "q")] == [3, 4]


def test_commit_takes_the_state_of_a_pipeline(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2)
    source = QueueSource(tmp_path / "q", order="strict", acknowledge="committed")
    pipeline = Pipeline(source, config=PipelineConfig(batch_rows=8))
    stream = iter(pipeline)
    next(stream), next(stream)
    source.commit(pipeline.state_dict())
    stream.close()  # type: ignore[attr-defined]
    assert [number for number, _ in ready(tmp_path / "q")] == [2, 3, 4]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 9}, "version 9"),
        ({"order": "strict"}, "order='strict'"),
        ({"split": "val"}, "split='val'"),
        ({"fingerprint": "0"}, "fingerprint"),
    ],
)
def test_a_state_of_something_else_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    fill(tmp_path / "q", batches_of(ROWS))
    with QueueSource(tmp_path / "q") as source:
        source.next_batch(1)
        state = with_checksum(source.state_dict() | change)
        with pytest.raises(ResumeError, match=said):
            source.load_state_dict(state)
        with pytest.raises(ResumeError, match="'row'"):
            source.load_state_dict({"row": 0})


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_loop_over_a_source_is_done_with_a_file_when_the_next_is_asked_for(tmp_path: Path, order: Any) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2)
    with QueueSource(tmp_path / "q", order=order) as source:
        stream = iter(source)
        for _ in range(4):
            next(stream)
        left = Queue.open(tmp_path / "q").split("train").files()
        assert [file.number for file in left] == [1, 2, 3, 4]
    # What was handed out whole is done with, also if nothing more was asked for.
    assert read_rows(tmp_path / "q", order=order) == ROWS[16:]


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_loop_that_has_come_to_the_end_leaves_no_file_even_if_nobody_closes(tmp_path: Path, order: Any) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=4)
    source = QueueSource(tmp_path / "q", order=order)
    assert sum(batch.num_rows for batch in source) == 40
    assert Queue.open(tmp_path / "q").split("train").files() == []
    source.close()


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_source_that_is_closed_in_the_middle_of_a_batch_gives_it_back_whole(tmp_path: Path, order: Any) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2)
    with QueueSource(tmp_path / "q", order=order) as source:
        for _ in range(3):
            assert source.next_batch(3) is not None
    assert read_rows(tmp_path / "q", order=order) == ROWS[4:]


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_failed_run_leaves_the_queue_as_it_was(tmp_path: Path, order: Any) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2)
    source = QueueSource(tmp_path / "q", order=order)
    with pytest.raises(StageError, match=r"\b30\b"):
        Pipeline(source, [FailingTransform("n", [30]).transform], MemorySink(), PipelineConfig(workers=1)).run()
    assert read_rows(tmp_path / "q", order=order) == ROWS


@pytest.mark.parametrize("order", ["any", "strict"])
def test_a_run_deletes_what_it_has_published(tmp_path: Path, order: Any) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=4)
    seen = MemorySink()
    Pipeline(QueueSource(tmp_path / "q", order=order), [], seen).run()
    assert seen.rows() == ROWS
    assert Queue.open(tmp_path / "q").split("train").files() == []


@pytest.mark.parametrize("order", ["any", "strict"])
def test_from_an_endless_queue_into_another_files_are_deleted_as_theirs_are_published(
    tmp_path: Path, order: Any
) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 4), batches_per_file=2, end=False)
    sink = QueueSink(tmp_path / "r", batch_rows=5, batches_per_file=1, end=False)
    pipeline = Pipeline(QueueSource(tmp_path / "q", order=order), [], sink)
    pipeline.start()
    wait_for(lambda: not Queue.open(tmp_path / "q").split("train").files())
    pipeline.stop()
    with QueueSource(tmp_path / "r", order="strict", timeout_seconds=0.2) as source:
        again = [row for _ in range(8) for row in source.next_batch(5).to_pylist()]  # type: ignore[union-attr]
    assert again == ROWS


def test_a_state_of_a_queue_that_was_made_anew_since_is_refused(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS))
    with QueueSource(tmp_path / "q") as source:
        source.next_batch(1)
        state = source.state_dict()
    shutil.rmtree(tmp_path / "q")
    fill(tmp_path / "q", batches_of(ROWS))
    with QueueSource(tmp_path / "q") as source, pytest.raises(ResumeError, match=str(tmp_path)):
        source.load_state_dict(state)


def test_a_consumer_of_arrays_names_the_column_that_has_nulls(tmp_path: Path) -> None:
    fill(tmp_path / "q", [pa.record_batch({"a": [1, 2], "b": [1.5, None]})])
    with DatasetConsumer(tmp_path / "q", backend="numpy") as consumer, pytest.raises(SchemaError, match="'b'"):
        consumer.get_batch("train")


# -- damage ----------------------------------------------------------------------------------------------------------


def damage(path: Path, number: int) -> None:
    [file] = path.glob(f"train/{number:012d}-*.arrow")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_a_damaged_file_is_named_and_skipped_only_if_that_was_asked(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 10), batches_per_file=1)
    damage(tmp_path / "q", 1)
    with QueueSource(tmp_path / "q", acknowledge="committed") as source, pytest.raises(DataError, match="checksum"):
        list(source)
    with QueueSource(tmp_path / "q", on_error="skip") as source:
        assert [row for batch in source for row in batch.to_pylist()] == ROWS[:10] + ROWS[20:]
        assert source.counts.skipped == 1


def test_a_pipeline_that_may_skip_bad_input_puts_a_damaged_file_aside_and_counts_it(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS, 10), batches_per_file=1)
    damage(tmp_path / "q", 1)
    sink = MemorySink()
    report = Pipeline(QueueSource(tmp_path / "q"), [], sink, PipelineConfig(on_error="skip")).run()
    assert sink.rows() == ROWS[:10] + ROWS[20:]
    [(reason, count)] = report.skipped.items()
    assert "queue" in reason
    assert count == 1


def test_a_batch_knows_which_file_and_row_it_came_from(tmp_path: Path) -> None:
    fill(tmp_path / "q", batches_of(ROWS[:12], 3), batches_per_file=2)
    source = QueueSource(tmp_path / "q")
    places = []
    while source.next_batch(2) is not None:
        origin = source.origin()
        assert origin is not None
        places.append((Path(origin.file).name, origin.row))
    source.close()
    first, second = "000000000000", "000000000001"
    assert places == [*[(first, row) for row in (0, 2, 3, 5)], *[(second, row) for row in (0, 2, 3, 5)]]


def test_limits_in_bytes_are_numbers_or_text() -> None:
    assert Limits(backlog_bytes="1 MiB").most_bytes == Limits(backlog_bytes=1 << 20).most_bytes == 1 << 20
    for wrong in ("1 cow", 0, 1.5):
        with pytest.raises(ConfigError):
            Limits(backlog_bytes=wrong)  # type: ignore[arg-type]
