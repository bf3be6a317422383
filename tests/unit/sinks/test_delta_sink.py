"""Delta tables written: modes, partitions, types, commits of checkpoints, several writers, and what is refused."""

from __future__ import annotations

import datetime
import json
import shutil
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.connections.delta import open_table, transaction_version
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline import Pipeline
from penstock.sinks import DeltaSink, open_sink
from penstock.sources import DeltaSource, MemorySource


def rows_of(path: Path, key: str = "n") -> list[dict[str, Any]]:
    """The rows as deltalake itself reads them."""
    found = pa.RecordBatchReader.from_stream(DeltaTable(path).scan()).read_all()
    return sorted(found.to_pylist(), key=lambda row: str(row[key]))


def put(sink: DeltaSink, table: pa.Table, max_rows: int = 1000) -> None:
    for batch in table.to_batches(max_chunksize=max_rows):
        sink.consume(batch)
    sink.flush()


def numbers(start: int, stop: int) -> pa.Table:
    return pa.table({"n": range(start, stop)})


def test_rows_are_added_or_replaced_and_older_versions_stay(tmp_path: Path) -> None:
    put(DeltaSink(tmp_path / "t"), numbers(0, 3))
    put(DeltaSink(tmp_path / "t"), numbers(3, 5))
    assert [row["n"] for row in rows_of(tmp_path / "t")] == [0, 1, 2, 3, 4]
    put(DeltaSink(tmp_path / "t", mode="overwrite"), numbers(9, 10))
    assert [row["n"] for row in rows_of(tmp_path / "t")] == [9]
    assert DeltaTable(tmp_path / "t").version() == 2
    assert DeltaSource(tmp_path / "t", version=1).size_hint() == 5
    sink = DeltaSink(tmp_path / "t", mode="overwrite")
    sink.consume(pa.RecordBatch.from_pylist([], pa.schema([("n", pa.int64())])))  # no rows replace the others too
    sink.flush()
    assert DeltaSource(tmp_path / "t").next_batch(9) is None


def test_a_log_that_fails_after_it_was_opened_is_named(tmp_path: Path) -> None:
    put(DeltaSink(tmp_path / "t"), numbers(0, 3))
    table = open_table(tmp_path / "t")
    shutil.rmtree(tmp_path / "t")
    with pytest.raises(DataError, match=r"t: the log of the Delta table is damaged: .*File not found"):
        transaction_version(table, tmp_path / "t", "run")


PARTITIONED = pa.Table.from_pylist(
    [
        {"n": 0, "lang": "a b/c%=", "day": datetime.date(2024, 2, 29), "i": 7, "b": True, "d": Decimal("1.50")},
        {"n": 1, "lang": None, "day": None, "i": None, "b": None, "d": None},
        {"n": 2, "lang": "ü" * 90, "day": datetime.date(1969, 12, 31), "i": -3, "b": False, "d": Decimal("-2.25")},
        {"n": 3, "lang": "a b/c%=", "day": datetime.date(2024, 2, 29), "i": 7, "b": True, "d": Decimal("1.50")},
    ]
)


def test_partitions_of_all_types_and_characters_are_read_back_by_both(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t", partition_by=["lang", "day", "i", "b", "d"])
    put(sink, PARTITIONED, max_rows=2)
    assert rows_of(tmp_path / "t") == PARTITIONED.to_pylist()
    source, found = DeltaSource(tmp_path / "t"), []
    while (batch := source.next_batch(10)) is not None:
        found += batch.to_pylist()
    assert sorted(found, key=lambda row: row["n"]) == PARTITIONED.to_pylist()
    chosen = DeltaTable(tmp_path / "t").file_uris(file_pruning_predicate=[("i", "=", 7)])
    assert len(chosen) == 1
    put(DeltaSink(tmp_path / "t"), PARTITIONED.slice(0, 1))  # the table knows its partitions
    assert len(rows_of(tmp_path / "t")) == 5


def test_times_in_partitions_are_those_of_the_rows(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 5, 1, 12, 30, 15, 250000, tzinfo=datetime.UTC)
    put(
        DeltaSink(tmp_path / "t", partition_by=["at"]),
        pa.table({"n": [1], "at": pa.array([moment], pa.timestamp("us", "UTC"))}),
    )
    assert rows_of(tmp_path / "t") == [{"n": 1, "at": moment}]


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        (pa.decimal128(20, 10), Decimal("0.0000000001"), "0.0000000001"),
        (pa.timestamp("us"), datetime.datetime(1, 1, 1), "0001-01-01 00:00:00.000000"),
        (pa.float64(), float("inf"), "Infinity"),
    ],
)
def test_values_of_partitions_are_spelled_as_other_readers_know_them(
    tmp_path: Path, kind: Any, value: Any, text: str
) -> None:
    rows = pa.table({"n": [1], "p": pa.array([value], kind)})
    put(DeltaSink(tmp_path / "t", partition_by=["p"]), rows)
    assert f'"partitionValues":{{"p":"{text}"}}' in "".join(log.read_text() for log in tmp_path.rglob("*.json"))
    assert rows_of(tmp_path / "t") == rows.to_pylist()


@pytest.mark.parametrize(
    ("given", "made"),
    [
        (pa.array([255], pa.uint8()), pa.int16()),
        (pa.array([[65535]], pa.list_(pa.uint16())), pa.list_(pa.int32())),
        (pa.array([{"a": 2**32 - 1}], pa.struct([("a", pa.uint32())])), pa.struct([("a", pa.int64())])),
        (pa.array([2**64 - 1], pa.uint64()), pa.decimal128(20, 0)),
        (pa.array([1.5], pa.float16()), pa.float32()),
        (pa.array([1000], pa.timestamp("ns")), pa.timestamp("us")),
        (pa.array([1], pa.timestamp("ms", "Europe/Berlin")), pa.timestamp("us", "UTC")),
        (pa.array(["a"]).dictionary_encode(), pa.string()),
    ],
    ids=str,
)
def test_a_new_table_has_types_that_hold_all_values(tmp_path: Path, given: Any, made: Any) -> None:
    put(DeltaSink(tmp_path / "t"), pa.table({"v": given}))
    source = DeltaSource(tmp_path / "t")
    batch = source.next_batch(1)
    source.close()
    assert batch is not None
    assert batch.column("v") == given.cast(made)


def test_more_partitions_than_files_may_be_open_are_written(tmp_path: Path) -> None:
    put(
        DeltaSink(tmp_path / "t", partition_by=["p"]),
        pa.table({"n": range(300), "p": [n % 100 for n in range(300)]}),
        50,
    )
    assert [row["n"] for row in sorted(rows_of(tmp_path / "t"), key=lambda row: row["n"])] == list(range(300))


def test_statistics_never_hide_a_row(tmp_path: Path) -> None:
    table = pa.table(
        {
            "n": [5, None, -3],
            "x": [1.0, float("nan"), 2.0],
            "s": ["b" * 50, "a", None],
            "t": ["short", "z", "m"],
            "empty": pa.array([None, None, None], pa.int64()),
        }
    )
    put(DeltaSink(tmp_path / "t"), table)
    facts = pa.table(DeltaTable(tmp_path / "t").get_add_actions(flatten=True)).to_pylist()[0]
    assert (facts["num_records"], facts["min.n"], facts["max.n"], facts["null_count.n"]) == (3, -3, 5, 1)
    assert (facts["min.t"], facts["max.t"], facts["null_count.empty"]) == ("m", "z", 3)
    assert facts.get("max.x") is None  # there is NaN, which counts as the greatest elsewhere
    for condition, count in (("s > 'bbb'", 1), ("n < 0", 1), ("t = 'm'", 1), ("empty IS NULL", 3)):
        found = pa.RecordBatchReader.from_stream(DeltaTable(tmp_path / "t").scan(predicate=condition)).read_all()
        assert found.num_rows == count, condition


def test_an_empty_text_in_a_partition_is_refused_since_it_would_become_null(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t", partition_by=["lang"])
    with pytest.raises(SchemaError, match=r"has an empty text.*same as null"):
        put(sink, pa.table({"n": [1], "lang": [""]}))
    sink.abort()
    assert list(tmp_path.iterdir()) == []


def test_rows_become_visible_with_the_checkpoint_after_theirs_and_once(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t", commit="checkpoint")
    sink.restore({})
    sink.consume(numbers(0, 3).to_batches()[0])
    first = sink.checkpoint()
    assert not (tmp_path / "t").exists()
    sink.consume(numbers(3, 5).to_batches()[0])
    second = sink.checkpoint()
    assert [row["n"] for row in rows_of(tmp_path / "t")] == [0, 1, 2]
    # Killed before the second was saved: the first is in force, and its rows are in the table already.
    again = DeltaSink(tmp_path / "t", commit="checkpoint")
    again.restore(first)
    again.consume(numbers(3, 6).to_batches()[0])
    third = again.checkpoint()
    assert [row["n"] for row in rows_of(tmp_path / "t")] == [0, 1, 2]
    again.flush()
    again.flush()
    assert [row["n"] for row in rows_of(tmp_path / "t")] == [0, 1, 2, 3, 4, 5]
    for token in (third | {"finishing": True},):
        late = DeltaSink(tmp_path / "t", commit="checkpoint")
        late.restore(json.loads(json.dumps(token)))
        late.flush()
        assert len(rows_of(tmp_path / "t")) == 6
    assert second["run"] == first["run"]
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_a_commit_whose_answer_was_lost_is_not_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(DeltaSink(tmp_path / "t"), numbers(0, 1))
    sink = DeltaSink(tmp_path / "t")
    sink.consume(numbers(1, 3).to_batches()[0])
    real = DeltaTable.create_write_transaction

    def lost(*given: Any, **options: Any) -> None:
        real(*given, **options)
        raise OSError("the connection was closed")

    monkeypatch.setattr(DeltaTable, "create_write_transaction", lost)
    with pytest.raises(ConnectionError, match="could not be added"):
        sink.flush()
    monkeypatch.undo()
    sink.flush()
    assert [row["n"] for row in rows_of(tmp_path / "t")] == [0, 1, 2]


def test_several_sinks_add_to_one_table_at_once(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            put(DeltaSink(tmp_path / "t"), numbers(10 * number, 10 * number + 10), 3)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert sorted(row["n"] for row in rows_of(tmp_path / "t")) == list(range(40))


def test_columns_are_cast_to_those_of_the_table_and_missing_ones_are_null(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"n": [1], "s": ["x"], "f": [0.5]}))
    put(DeltaSink(tmp_path / "t"), pa.table({"s": pa.array(["y"], pa.large_string()), "n": pa.array([2], pa.int16())}))
    assert rows_of(tmp_path / "t") == [{"n": 1, "s": "x", "f": 0.5}, {"n": 2, "s": "y", "f": None}]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"n": [1], "other": [1]}, "column 'other' is not in the Delta table"),
        ({"n": ["one"]}, "column 'n' is string, and int64 in the Delta table"),
        ({"s": ["x"]}, "have no column 'n', which"),
    ],
)
def test_columns_that_do_not_fit_the_table_are_refused(tmp_path: Path, columns: Any, told: str) -> None:
    DeltaTable.create(tmp_path / "t", pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())]))
    sink = DeltaSink(tmp_path / "t")
    with pytest.raises(SchemaError, match=told):
        put(sink, pa.table(columns))
    sink.abort()
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_what_cannot_be_written_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mode must be"):
        DeltaSink(tmp_path / "t", mode="replace")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="commit must be"):
        DeltaSink(tmp_path / "t", commit="often")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no column 'lang'"):
        put(DeltaSink(tmp_path / "t", partition_by=["lang"]), numbers(0, 1))
    with pytest.raises(ConfigError, match="all columns"):
        put(DeltaSink(tmp_path / "t", partition_by="n"), numbers(0, 1))
    with pytest.raises(ConfigError, match="no type of partitions"):
        put(DeltaSink(tmp_path / "t", partition_by=["l"]), pa.table({"n": [1], "l": [[1]]}))
    with pytest.raises(FileNotFoundError, match="no such directory"):
        put(DeltaSink(tmp_path / "no" / "t"), numbers(0, 1))
    with pytest.raises(SchemaError, match="column 'n' has no type"):
        put(DeltaSink(tmp_path / "t"), pa.table({"n": pa.array([None])}))
    with pytest.raises(SchemaError, match="cannot hold these columns"):
        put(DeltaSink(tmp_path / "t"), pa.table({"n": pa.array([None], pa.duration("s"))}))
    put(DeltaSink(tmp_path / "t"), numbers(0, 1))
    with pytest.raises(ConfigError, match=r"is partitioned by \[\]"):
        put(DeltaSink(tmp_path / "t", partition_by=["n"]), numbers(0, 1))


@pytest.mark.parametrize(
    ("settings", "mode", "told"),
    [
        ({"delta.columnMapping.mode": "name"}, "append", "columnMapping"),
        ({"delta.appendOnly": "true"}, "overwrite", "append-only"),
    ],
)
def test_tables_with_rules_that_would_be_broken_are_refused(
    tmp_path: Path, settings: dict[str, str | None], mode: Any, told: str
) -> None:
    DeltaTable.create(tmp_path / "t", pa.schema([("n", pa.int64())]), configuration=settings)
    with pytest.raises(ConfigError, match=told):
        put(DeltaSink(tmp_path / "t", mode=mode), numbers(0, 1))


def test_a_table_with_a_constraint_is_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", numbers(1, 3))
    DeltaTable(tmp_path / "t").alter.add_constraint({"positive": "n > 0"})
    with pytest.raises(ConfigError, match=r"does not keep"):
        put(DeltaSink(tmp_path / "t"), numbers(-3, 0))


def test_a_checkpoint_whose_files_are_gone_is_refused(tmp_path: Path) -> None:
    sink = DeltaSink(tmp_path / "t")
    sink.restore({})
    sink.consume(numbers(0, 3).to_batches()[0])
    token = sink.checkpoint()
    (file,) = tmp_path.rglob("*.parquet")
    file.unlink()
    with pytest.raises(ResumeError, match="which is gone; delete the checkpoint"):
        DeltaSink(tmp_path / "t").restore(token)
    (journal,) = tmp_path.rglob("files-*.json")
    journal.unlink()
    with pytest.raises(ResumeError, match="which is gone; delete the checkpoint"):
        DeltaSink(tmp_path / "t").restore(token)


def test_a_table_is_written_by_yaml(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"n": 1, "lang": "de"}\n{"n": 2, "lang": "en"}\n')
    job, sink = tmp_path / "job.yaml", {"type": "delta", "path": str(tmp_path / "t"), "partition_by": ["lang"]}
    job.write_text(json.dumps({"source": str(tmp_path / "in.jsonl"), "sink": sink}))
    result = CliRunner().invoke(app, ["run", str(job)])
    assert result.exit_code == 0, result.output
    assert rows_of(tmp_path / "t") == [{"n": 1, "lang": "de"}, {"n": 2, "lang": "en"}]
    # The path of a table that exists is enough.
    job.write_text(json.dumps({"source": str(tmp_path / "in.jsonl"), "sink": str(tmp_path / "t")}))
    assert CliRunner().invoke(app, ["run", str(job)]).exit_code == 0
    assert len(rows_of(tmp_path / "t")) == 4
    assert isinstance(open_sink(tmp_path / "t"), DeltaSink)


def test_a_table_goes_through_a_pipeline_into_another(tmp_path: Path) -> None:
    put(DeltaSink(tmp_path / "a"), numbers(0, 5000))
    Pipeline(DeltaSource(tmp_path / "a"), [], DeltaSink(tmp_path / "b")).run(tmp_path / "kept")
    assert Pipeline(MemorySource(numbers(0, 1)), [], DeltaSink(tmp_path / "b")).run().rows_out == 1
    assert len(rows_of(tmp_path / "b")) == 5001
