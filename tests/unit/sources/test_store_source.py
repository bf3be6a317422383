from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import MemorySink
from penstock.sources import StoreSource, open_source
from penstock.store import StoreWriter, append, checkout
from penstock.testing import assert_source_contract


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with StoreWriter(tmp_path / "a.store", shard_bytes=300) as writer:
        writer.write(batch(0, 50))
        writer.publish()
    return tmp_path / "a.store"


def batch(start: int, count: int) -> pa.RecordBatch:
    ids = pa.array([[n, n + 1] for n in range(start, start + count)], pa.list_(pa.uint16()))
    return pa.record_batch({"input_ids": ids, "n": range(start, start + count)})


def read(source: StoreSource, max_rows: int = 7) -> list[int]:
    got = []
    while (part := source.next_batch(max_rows)) is not None:
        got += part["n"].to_pylist()
    return got


def test_columns_are_chosen_and_checked(path: Path) -> None:
    assert_source_contract(lambda: StoreSource(path, columns=["n"]), [{"n": n} for n in range(50)])
    assert StoreSource(path, columns=["n", "input_ids"]).schema.names == ["n", "input_ids"]
    with pytest.raises(SchemaError, match=r"'m'.*'input_ids'"):
        _ = StoreSource(path, columns=["m"]).schema
    with pytest.raises(ConfigError, match="columns"):
        StoreSource(path, columns="n")


def test_batches_that_are_in_use_outlive_a_truncated_store(path: Path) -> None:
    source = StoreSource(path)
    first = source.next_batch(1000)
    assert first is not None
    for shard in path.rglob("*.arrow"):
        os.truncate(shard, 0)
    assert first["n"].to_pylist() == list(range(first.num_rows))
    with pytest.raises(DataError, match=r"\.arrow"):
        read(source)


def test_a_source_keeps_the_version_it_began_with(path: Path) -> None:
    source = StoreSource(path)
    first = source.next_batch(3)
    assert first is not None
    append(path, [batch(50, 10)])
    assert first["n"].to_pylist() + read(source) == list(range(50))
    assert read(StoreSource(path)) == list(range(60))
    assert read(StoreSource(path, version=1)) == list(range(50))
    assert StoreSource(path, version=1).size_hint() == 50


def test_a_position_belongs_to_a_version(path: Path) -> None:
    source = StoreSource(path)
    source.next_batch(9)
    state = source.state_dict()
    append(path, [batch(50, 10)])
    with pytest.raises(ResumeError, match=r"version 1\b.*version 2\b"):
        StoreSource(path).load_state_dict(state)
    older = StoreSource(path, version=1)
    older.load_state_dict(state)
    rest = read(older)
    assert rest[-1] == 49
    checkout(path, 1)
    again = StoreSource(path)
    again.load_state_dict(state)
    assert read(again) == rest


def test_a_missing_shard_is_named_where_its_rows_would_have_come(path: Path) -> None:
    source = StoreSource(path)
    lost = source.manifest.shards[2]
    (path / lost.file).unlink()
    with pytest.raises(DataError, match=rf"{lost.name}\.arrow"):
        read(source)
    sink = MemorySink()
    report = Pipeline(StoreSource(path), [], sink, PipelineConfig(on_error="skip")).run()
    assert sum(report.skipped.values()) == 1
    assert len(sink.rows()) == 50 - lost.rows


def test_a_flipped_bit_is_noticed_unless_told_not_to_look(path: Path) -> None:
    shard = StoreSource(path).manifest.shards[1]
    file = path / shard.file
    data = file.read_bytes()
    file.write_bytes(data[:-300] + bytes([data[-300] ^ 1]) + data[-299:])
    with pytest.raises(DataError, match=rf"{shard.name}\.arrow.*row 0\b"):
        read(StoreSource(path))
    source = StoreSource(path, verify="full")
    with pytest.raises(DataError, match=rf"{shard.name}\.arrow.*row 0\b"):
        source.next_batch(1)
    assert len(read(StoreSource(path, verify="fast"))) == 50
    sink = MemorySink()
    Pipeline(StoreSource(path), [], sink, PipelineConfig(on_error="skip")).run()
    assert len(sink.rows()) == 50 - shard.rows
    with pytest.raises(ConfigError, match=r"verify.*'slow'"):
        StoreSource(path, verify="slow")  # type: ignore[arg-type]
    assert open_source(path, verify="fast").next_batch(3) is not None


def test_a_source_stays_where_it_was_made(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    source = StoreSource(path.name)
    assert repr(source) == f"StoreSource({path.name!r})"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read(source) == list(range(50))


def test_nothing_is_read_before_it_is_needed(tmp_path: Path) -> None:
    source = StoreSource(tmp_path / "later.store", version=3)
    assert repr(source) == f"StoreSource({str(tmp_path / 'later.store')!r}, version=3)"
    with pytest.raises(FileNotFoundError, match=r"later\.store"):
        source.next_batch(1)
