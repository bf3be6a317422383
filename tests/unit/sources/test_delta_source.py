"""Delta tables: versions, deleted rows, columns by mapping, pruning, and what is refused."""

from __future__ import annotations

import json
import pickle
import struct
import sys
import zlib
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap
from tests.job_runs import Made, differences, job, run

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.pipeline import Pipeline
from penstock.sinks import DeltaSink, JsonlSink, MemorySink
from penstock.sources import DeltaSource, JsonlSource, MemorySource, ParquetSource, columnar, open_source


def read(source: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while (batch := source.next_batch(7)) is not None:
        rows += batch.to_pylist()
    return rows


def numbers(source: Any, column: str = "n") -> list[int]:
    return sorted(row[column] for row in read(source))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """A table of three versions: 0..9, then 10..19, then without the even ones below 10."""
    path = tmp_path / "table"
    write_deltalake(path, pa.table({"n": range(10), "text": [f"t{n}" for n in range(10)]}))
    write_deltalake(path, pa.table({"n": range(10, 20), "text": ["x"] * 10}), mode="append")
    DeltaTable(path).delete("n < 10 AND n % 2 = 0")
    return path


def test_bytes_in_a_partition_are_those_that_were_written(tmp_path: Path) -> None:
    rows = [{"n": 1, "p": b"\x00\xff"}, {"n": 2, "p": b"a/b"}, {"n": 3, "p": None}]
    write_deltalake(tmp_path / "t", pa.Table.from_pylist(rows), partition_by=["p"])
    assert sorted(read(DeltaSource(tmp_path / "t")), key=lambda row: row["n"]) == rows
    assert numbers(DeltaSource(tmp_path / "t", filter=[("p", "=", b"a/b")])) == [2]


def test_negative_decimals_in_a_partition_are_those_that_were_written(tmp_path: Path) -> None:
    values = [Decimal("-0.01"), Decimal("-3.25"), Decimal("2.00"), None]
    rows = [{"n": number, "p": value} for number, value in enumerate(values)]
    schema = pa.schema({"n": pa.int64(), "p": pa.decimal128(10, 2)})
    Pipeline(MemorySource(pa.Table.from_pylist(rows, schema)), [], DeltaSink(tmp_path / "t", partition_by=["p"])).run()
    for _ in range(2):  # from the entry of the log, and from its checkpoint
        assert sorted(read(DeltaSource(tmp_path / "t")), key=lambda row: row["n"]) == rows
        assert numbers(DeltaSource(tmp_path / "t", filter=[("p", "<", Decimal("0.00"))])) == [0, 1]
        DeltaTable(tmp_path / "t").create_checkpoint()


@pytest.mark.parametrize(
    ("value", "spelt", "message"),
    [
        (Decimal("7.77"), "0.-1", r"t: .* partition column 'p' of p=7\.77/part.* '0\.-1', which deltalake cannot read"),
        (7, " 7", r"t: .* partition column 'p' of p=7/part.* ' 7', which deltalake cannot read as long"),
        (date(2024, 1, 2), "-0001-01-01", r"t/p=2024-01-02/part.*: the partition column 'p' .* no date32"),
    ],
)
def test_a_partition_that_is_spelt_oddly_is_named(tmp_path: Path, value: Any, spelt: str, message: str) -> None:
    write_deltalake(tmp_path / "t", pa.table({"n": [1], "p": [value]}), partition_by=["p"])
    log = tmp_path / "t/_delta_log/00000000000000000000.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    for entry in entries:
        if "add" in entry:
            entry["add"]["partitionValues"]["p"] = spelt
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(DataError, match=message):
        read(DeltaSource(tmp_path / "t"))


EVEN_GONE = [*range(1, 10, 2), *range(10, 20)]


def test_a_directory_with_a_log_is_read_as_a_table_and_not_as_its_files(table: Path) -> None:
    assert len(list(table.glob("*.parquet"))) == 3  # one of them was removed from the table
    source = open_source(table)
    assert isinstance(source, DeltaSource)
    assert numbers(source) == EVEN_GONE


def test_removed_rows_do_not_come_back_by_another_way(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"is a Delta table.*DeltaSource"):
        read(ParquetSource(table))
    with pytest.raises(ConfigError, match=r"is a Delta table.*open_source"):
        open_source(table.parent)
    with pytest.raises(ConfigError, match=r"a table is read alone; got 2 paths"):
        open_source([table, table])
    assert not caplog.records
    open_source(str(table / "*.parquet"))
    assert "is a Delta table" in caplog.text


def test_a_partition_of_a_table_is_refused_and_its_files_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table"
    rows = pa.table({"n": range(20), "lang": ["de", "en"] * 10, "year": [2025] * 20})
    write_deltalake(path, rows, partition_by=["lang", "year"])
    DeltaTable(path).delete("n >= 10")
    for part in (path / "lang=de", path / "lang=de" / "year=2025"):
        with pytest.raises(ConfigError, match=r"lies in '.*table', which is a Delta table.*open_source"):
            open_source(part)
    assert numbers(open_source(path, filter=[("lang", "=", "de")])) == [0, 2, 4, 6, 8]  # as the error says
    assert not caplog.records
    open_source([str(file) for file in (path / "lang=de").rglob("*.parquet")])
    assert "table is a Delta table" in caplog.text


def test_a_partition_of_a_table_with_relative_paths_is_refused(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (table / "n=1").mkdir()
    pq.write_table(pa.table({"text": ["x"]}), table / "n=1" / "old.parquet")
    monkeypatch.chdir(table)
    with pytest.raises(ConfigError, match="which is a Delta table"):
        open_source("n=1")


@pytest.mark.parametrize(("version", "rows"), [(0, list(range(10))), (1, list(range(20))), (2, EVEN_GONE)])
def test_each_version_is_read_as_it_was(table: Path, version: int, rows: list[int]) -> None:
    assert numbers(DeltaSource(table, version=version)) == rows
    named = open_source(f"{table}@v{version}")
    assert isinstance(named, DeltaSource)
    assert (numbers(named), named.version) == (rows, version)
    assert numbers(open_source(str(table), version=version)) == rows


def test_a_table_that_moves_on_is_read_as_it_was_also_after_a_resume(table: Path) -> None:
    source = DeltaSource(table)
    first = source.next_batch(4)
    state = json.loads(json.dumps(source.state_dict()))
    assert first is not None
    assert state["snapshot"] == 2
    write_deltalake(table, pa.table({"n": [99], "text": ["late"]}), mode="append")
    write_deltalake(table, pa.table({"other": ["x"]}), mode="overwrite", schema_mode="overwrite")
    rest = read(source)
    resumed = DeltaSource(table)
    resumed.load_state_dict(state)
    assert read(resumed) == rest
    assert sorted([*first["n"].to_pylist(), *(row["n"] for row in rest)]) == EVEN_GONE
    assert resumed.version == 2
    assert read(DeltaSource(table)) == [{"other": "x"}]


def test_a_state_of_another_version_than_requested_is_refused(table: Path) -> None:
    state = DeltaSource(table, version=1).state_dict()
    with pytest.raises(ResumeError, match=r"in version 1 .* version 0 was requested"):
        DeltaSource(table, version=0).load_state_dict(state)


def test_a_state_of_another_table_at_the_same_place_is_refused(tmp_path: Path, table: Path) -> None:
    state = DeltaSource(table).state_dict()
    table.rename(tmp_path / "old")
    for _ in range(3):
        write_deltalake(table, pa.table({"n": [1]}), mode="append")
    with pytest.raises(ResumeError, match="not the table that the state was saved in"):
        DeltaSource(table).load_state_dict(state)


def test_a_vacuumed_version_is_an_error_that_names_it(table: Path) -> None:
    source = DeltaSource(table, version=1)
    state = source.state_dict()
    DeltaTable(table).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    with pytest.raises(DataError, match=r"version 1 of .* needs the file .*which is gone: it was vacuumed"):
        read(DeltaSource(table, version=1))
    resumed = DeltaSource(table)
    resumed.load_state_dict(state)
    with pytest.raises(DataError, match=r"version 1 of .*vacuumed"):
        read(resumed)
    assert numbers(DeltaSource(table)) == EVEN_GONE


def test_a_file_that_is_vacuumed_during_the_run_is_an_error_that_names_it(table: Path) -> None:
    source = DeltaSource(table, version=1)
    assert source.next_batch(3) is not None
    source.close()
    for file in source.files:
        file.unlink()
    with pytest.raises(DataError, match=r"version 1 of .*vacuumed"):
        read(source)


@pytest.mark.parametrize("content", ["{nope", '{"commitInfo":{}}\n'])
def test_a_damaged_log_is_an_error_that_says_so(table: Path, content: str) -> None:
    for entry in (table / "_delta_log").glob("*.json"):
        entry.write_text(content)
    with pytest.raises(DataError, match=r"the log of the Delta table is damaged: Kernel error"):
        read(DeltaSource(table))


def test_what_is_not_there_is_an_error_that_says_what(tmp_path: Path, table: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Delta table at"):
        read(DeltaSource(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="no Delta table at"):
        read(DeltaSource(tmp_path))
    with pytest.raises(ConfigError, match=r"has no version 9: the last is 2"):
        read(DeltaSource(table, version=9))
    with pytest.raises(ConfigError, match="whole number, got 'last'"):
        DeltaSource(table, version="last")  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"column 'nope' not in the Delta table"):
        read(DeltaSource(table, columns=["nope"]))


def test_a_missing_package_is_named_with_its_extra(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[lakes\]'"):
        read(open_source(table))


def test_partition_columns_are_kept_with_their_types(tmp_path: Path) -> None:
    rows = [
        {"n": 0, "lang": "a b/c%=", "day": date(2024, 2, 29), "shard": 7},
        {"n": 1, "lang": None, "day": date(1969, 12, 31), "shard": None},
        {"n": 2, "lang": "ü", "day": None, "shard": -3},
    ]
    schema = pa.schema([("n", pa.int64()), ("lang", pa.string()), ("day", pa.date32()), ("shard", pa.int32())])
    write_deltalake(tmp_path / "t", pa.Table.from_pylist(rows, schema), partition_by=["lang", "day", "shard"])
    source = DeltaSource(tmp_path / "t")
    assert source.schema.equals(schema)
    assert sorted(read(source), key=lambda row: row["n"]) == rows
    assert sorted(map(str, read(DeltaSource(tmp_path / "t", columns=["shard"])))) == sorted(
        str({"shard": row["shard"]}) for row in rows
    )
    chosen = DeltaSource(tmp_path / "t", filter=[("day", ">", "2000-01-01")], columns=["n"])
    assert (read(chosen), len(chosen.files)) == ([{"n": 0}], 1)


def test_files_that_cannot_have_rows_of_the_filter_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for start in (0, 10, 20):
        write_deltalake(path, pa.table({"n": range(start, start + 10), "s": ["a", None] * 5}), mode="append")
    source = DeltaSource(path, filter=[("n", ">", 17), ("s", "=", "a")])
    assert len(source.files) == 2
    unread = next(file for file in path.glob("*.parquet") if file not in source.files)
    unread.write_bytes(b"not even Parquet")
    assert numbers(source) == [18, 20, 22, 24, 26, 28]
    sink = MemorySink()
    Pipeline(DeltaSource(path, filter=[("n", "in", [13, 25]), ("n", "not in", [13])]), [], sink).run()
    assert sink.rows() == [{"n": 25, "s": None}]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([("n", "~", 1)], "unknown operator '~'"),
        ([("n", "=", [1])], "'=' takes one value"),
        ([("n", "in", 1)], "'in' takes a list of values"),
        ([("n", "=", None)], "null is no value to compare with"),
        ("n > 3", "must be a list of"),
        ([("n", "=", "many")], "'many' is no int64"),
    ],
)
def test_a_filter_that_cannot_be_applied_is_refused(table: Path, given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read(DeltaSource(table, filter=given))


def test_columns_that_were_added_later_are_null_in_older_files(table: Path) -> None:
    more = pa.table({"n": pa.array([50]), "text": ["new"], "score": [1.5]})
    write_deltalake(table, more, mode="append", schema_mode="merge")
    found = {row["n"]: row["score"] for row in read(DeltaSource(table))}
    assert (found[50], found[1], len(found)) == (1.5, None, 16)
    alone = DeltaSource(table, columns=["score"])
    assert len(read(alone)) == 16  # older files have none of the columns


def test_columns_are_found_as_the_mapping_of_the_table_says(tmp_path: Path) -> None:
    path, inner = tmp_path / "t", pa.struct([("i j", pa.int64())])
    schema = pa.schema([("a b", pa.int64()), ("p,q", pa.string()), ("s", inner), ("l", pa.list_(inner))])
    DeltaTable.create(path, schema, partition_by=["p,q"], configuration={"delta.columnMapping.mode": "name"})
    rows = [
        {"a b": 1, "p,q": "x", "s": {"i j": 5}, "l": [{"i j": 1}, {"i j": 2}]},
        {"a b": 2, "p,q": None, "s": None, "l": []},
        {"a b": 3, "p,q": "x", "s": {"i j": None}, "l": None},
    ]
    write_deltalake(path, pa.Table.from_pylist(rows, schema), mode="append")
    (first, *_) = DeltaSource(path).files
    assert "a b" not in pq.read_schema(first).names
    assert sorted(read(DeltaSource(path)), key=lambda row: row["a b"]) == rows
    assert read(DeltaSource(path, columns=["s"], filter=[("a b", "=", 1)])) == [{"s": {"i j": 5}}]


def with_deletion_vector(path: Path, deleted: list[int]) -> None:
    """Mark rows of the one file of a table as deleted, as Spark does: by a vector beside the file."""
    entry = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    add = next(action["add"] for action in actions if "add" in action)
    bitmap = BitMap(deleted).serialize()
    data = struct.pack("<IQI", 1681511377, 1, 0) + bitmap
    (path / "deleted.bin").write_bytes(
        b"\x01" + struct.pack(">I", len(data)) + data + struct.pack(">I", zlib.crc32(data))
    )
    vector = {
        "storageType": "p",
        "pathOrInlineDv": (path / "deleted.bin").as_uri(),
        "offset": 1,
        "sizeInBytes": len(data),
        "cardinality": len(deleted),
    }
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7}
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    remove = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True}
    changed = [{"protocol": protocol | features}, {"remove": remove}, {"add": add | {"deletionVector": vector}}]
    (path / "_delta_log" / f"{1:020}.json").write_text("".join(json.dumps(action) + "\n" for action in changed))


def test_rows_that_a_deletion_vector_marks_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, pa.table({"n": range(100)}))
    gone = [0, 1, 50, 98]
    with_deletion_vector(path, gone)
    left = [n for n in range(100) if n not in gone]
    source = DeltaSource(path)
    assert (read(source), source.size_hint()) == ([{"n": n} for n in left], 96)
    sink = MemorySink()
    Pipeline(DeltaSource(path, filter=[("n", "<", 60)]), [], sink).run()
    assert [row["n"] for row in sink.rows()] == [n for n in left if n < 60]
    # The same file, with and without the vector, is other content.
    marks = {DeltaSource(path, version=version).fingerprints()[0].xxh3 for version in (0, 1)}
    assert len(marks) == 2


@pytest.mark.parametrize(("name", "lang"), [("with space ü", "de"), ("t", "a b/ä%")])
def test_names_may_have_any_characters_and_deleted_rows_stay_deleted(tmp_path: Path, name: str, lang: str) -> None:
    path = tmp_path / name
    write_deltalake(path, pa.table({"n": range(10), "lang": [lang] * 10}), partition_by=["lang"])
    assert len(read(DeltaSource(path))) == 10
    with_deletion_vector(path, [0, 5])
    assert [row["n"] for row in read(DeltaSource(path, columns=["n"]))] == [1, 2, 3, 4, 6, 7, 8, 9]


def test_deleted_rows_of_a_file_that_is_not_found_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    write_deltalake(path, pa.table({"n": range(10)}))
    with_deletion_vector(path, [0])
    monkeypatch.setattr("penstock.sources.lakes.delta._Names.of_vector", lambda *_: "other.parquet")
    with pytest.raises(DataError, match=r"other\.parquet are marked as deleted"):
        read(DeltaSource(path))


def test_a_reader_feature_that_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, pa.table({"n": range(10)}))
    features = {"readerFeatures": ["rowsInVerse"], "writerFeatures": ["rowsInVerse"]}
    protocol = {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7} | features}
    (path / "_delta_log" / f"{1:020}.json").write_text(json.dumps(protocol) + "\n")
    with pytest.raises((ConfigError, DataError), match="rowsInVerse"):
        read(DeltaSource(path))


def test_a_pickled_source_reads_the_version_that_it_was_pickled_with(table: Path) -> None:
    data = pickle.dumps(DeltaSource(table, columns=["n"]))
    write_deltalake(table, pa.table({"n": [99], "text": ["late"]}), mode="append")
    assert numbers(pickle.loads(data)) == EVEN_GONE  # noqa: S301 - made above


def test_copies_of_a_source_that_decodes_the_next_file_begin_one_of_their_own(table: Path) -> None:
    source = DeltaSource(table)
    with patch.multiple(columnar, available_cores=lambda: 2, _LEAST_BUDGET=0):
        source.fit_budget(1 << 10)
    source._whole_bytes = 0
    while source._following is None:
        assert source.next_block(1) is not None
    other = source.with_columns(["n"])
    other.reset()
    assert other._following is None
    assert source._following is not None
    assert numbers(pickle.loads(pickle.dumps(other))) == EVEN_GONE  # noqa: S301 - made here
    again = pickle.loads(pickle.dumps(source))  # noqa: S301 - made here
    again.reset()
    assert numbers(again) == EVEN_GONE
    source.close()


def test_a_log_that_lies_beside_other_rows_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata" / "notes.jsonl").write_text('{"a": 1}\n')
    assert isinstance(open_source(tmp_path), JsonlSource)


def test_splits_of_a_job_have_the_partitions_and_the_deleted_rows_of_their_own_files(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "days", pa.table({"n": range(90), "day": ["a", "b", "c"] * 30}), partition_by=["day"])
    path = tmp_path / "vectors"
    write_deltalake(path, pa.table({"n": range(10)}))
    with_deletion_vector(path, [2, 7])
    write_deltalake(path, pa.table({"n": range(10, 20)}), mode="append")
    for table, count in ((tmp_path / "days", 90), (path, 18)):

        def make(out: Path, table: Path = table) -> Made:
            return DeltaSource(table), [], JsonlSink(out / "made.jsonl")

        local = run(make, tmp_path)
        assert local.counts["rows_out"] == count
        assert not differences(local, run(make, tmp_path, engine=job(10)))
