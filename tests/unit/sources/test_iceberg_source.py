"""Iceberg tables: snapshots, columns by id, deletes, pruning, catalogs, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import FileScanTask
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Record
from pyiceberg.types import DoubleType, LongType
from tests.job_runs import Made, differences, job, run

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline import Pipeline
from penstock.sinks import JsonlSink, MemorySink
from penstock.sources import IcebergSource, ParquetSource, open_source


def read(source: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while (batch := source.next_batch(7)) is not None:
        rows += batch.to_pylist()
    return rows


def numbers(source: Any) -> list[int]:
    return sorted(row["n"] for row in read(source))


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    made = load_catalog("mine", type="sql", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}")
    assert isinstance(made, SqlCatalog)
    made.create_namespace("ns")
    yield made
    made.engine.dispose()


@pytest.fixture
def table(catalog: Catalog) -> Any:
    """A table of two snapshots: 0..9 in two partitions, then 10..19 without the even ones."""
    rows = pa.table({"n": range(10), "lang": ["de", "en"] * 5, "s": [{"a": n} for n in range(10)]})
    made = catalog.create_table("ns.t", schema=rows.schema)
    with made.update_spec() as change:
        change.add_field("lang", IdentityTransform(), "lang")
    made.append(rows)
    made.append(pa.table({"n": range(10, 20), "lang": ["fr"] * 10, "s": [None] * 10}, schema=rows.schema))
    return made


def where(table: Any) -> Path:
    return Path(table.location().removeprefix("file://"))


def test_values_of_partitions_and_directories_may_have_any_characters(catalog: Catalog, tmp_path: Path) -> None:
    rows = [{"n": 0, "lang": "a/b"}, {"n": 1, "lang": "ü 1:%20"}, {"n": 2, "lang": None}]
    made = catalog.create_table("ns.odd", schema=pa.Table.from_pylist(rows).schema, location=f"file://{tmp_path}/a b%c")
    with made.update_spec() as change:
        change.add_field("lang", IdentityTransform(), "lang")
    made.append(pa.Table.from_pylist(rows))
    assert sorted(read(IcebergSource(where(made))), key=lambda row: row["n"]) == rows
    assert numbers(IcebergSource(where(made), filter=[("lang", "=", "a/b")])) == [0]


def test_the_directory_of_a_table_is_read_as_a_table_and_not_as_its_files(table: Any) -> None:
    table.delete("n = 3 or n = 14")
    source = open_source(where(table))
    assert isinstance(source, IcebergSource)
    assert numbers(source) == [n for n in range(20) if n not in (3, 14)]
    with pytest.raises(ConfigError, match="is an Iceberg table"):
        read(ParquetSource(where(table)))
    with pytest.raises(ConfigError, match=r"is an Iceberg table.*IcebergSource"):
        open_source(where(table).parent)


def test_the_data_of_a_table_are_refused_and_its_files_are_warned_of(
    table: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"data' lies in '.*', which is an Iceberg table"):
        open_source(where(table) / "data")
    assert not caplog.records
    open_source(str(where(table) / "data" / "**" / "*.parquet"))
    assert "is an Iceberg table" in caplog.text


def test_a_snapshot_is_read_as_it_was_by_every_way_to_name_it(tmp_path: Path, table: Any) -> None:
    first, second = (each.snapshot_id for each in table.snapshots())
    database = f"sqlite:///{tmp_path}/catalog.db"
    for source in (
        IcebergSource(where(table), snapshot=first),
        open_source(f"{where(table)}@v{first}"),
        IcebergSource("ns.t", catalog=database, snapshot=first),
        IcebergSource("ns.t", catalog=f"{database}#mine", snapshot=first),
    ):
        assert numbers(source) == list(range(10))
    assert numbers(IcebergSource(table.metadata_location)) == list(range(20))
    assert numbers(open_source(table.metadata_location)) == list(range(20))
    assert IcebergSource("ns.t", catalog=database).version == second
    marks = {
        source.fingerprints()[0].xxh3
        for source in (IcebergSource(where(table)), IcebergSource(table.metadata_location))
    }
    assert len(marks) == 1


def test_a_table_that_moves_on_is_read_as_it_was_also_after_a_resume(table: Any) -> None:
    source = IcebergSource(where(table))
    first = source.next_batch(4)
    assert first is not None
    state = json.loads(json.dumps(source.state_dict()))
    table.append(pa.table({"n": [99], "lang": ["de"], "s": [None]}, schema=first.schema))
    table.delete("n > 4")
    with table.update_schema() as change:
        change.rename_column("n", "number")
    rest = read(source)
    resumed = IcebergSource(where(table))
    resumed.load_state_dict(state)
    assert read(resumed) == rest
    assert sorted([*first["n"].to_pylist(), *(row["n"] for row in rest)]) == list(range(20))


def test_columns_that_change_without_a_new_snapshot_are_as_they_were_when_the_run_began(table: Any) -> None:
    source = IcebergSource(where(table))
    assert source.next_batch(4) is not None
    state, snapshot = source.state_dict(), source.version
    with table.update_schema() as change:
        change.rename_column("n", "number")
    resumed, fresh = IcebergSource(where(table)), IcebergSource(where(table))
    resumed.load_state_dict(state)
    assert read(resumed) == read(source)
    assert (fresh.version, fresh.schema.names) == (snapshot, ["number", "lang", "s"])
    assert IcebergSource(where(table), snapshot=snapshot).schema.names == ["n", "lang", "s"]


def test_an_expired_snapshot_is_an_error_that_names_it(table: Any) -> None:
    source = IcebergSource(where(table), snapshot=table.snapshots()[0].snapshot_id)
    state = source.state_dict()
    table.maintenance.expire_snapshots().by_id(source.version).commit()
    with pytest.raises(ConfigError, match=f"has no snapshot {source.version}.*expired"):
        read(IcebergSource(where(table), snapshot=source.version))
    with pytest.raises(ResumeError, match=f"cannot be resumed.*{source.version}"):
        IcebergSource(where(table)).load_state_dict(state)
    for file in where(table).rglob("*.parquet"):
        file.unlink()
    with pytest.raises(DataError, match="its snapshot expired"):
        read(source)


def test_columns_are_found_by_id_so_that_a_renamed_one_is_the_same_one(table: Any) -> None:
    with table.update_schema() as change:
        change.rename_column("n", "number")
        change.rename_column(("s", "a"), "b")
    with table.update_schema() as change:
        change.add_column("n", DoubleType())
        change.add_column(("s", "c"), LongType())
    rows = {row["number"]: row for row in read(IcebergSource(where(table)))}
    assert rows[3] == {"number": 3, "lang": "en", "s": {"b": 3, "c": None}, "n": None}
    assert rows[12]["s"] is None
    assert len(read(IcebergSource(where(table), columns=["n"]))) == 20
    assert read(IcebergSource(where(table), columns=["s"], filter=[("number", "=", 5)])) == [{"s": {"b": 5, "c": None}}]


def test_types_that_were_widened_later_are_those_of_the_table(catalog: Catalog) -> None:
    table = catalog.create_table("ns.w", schema=pa.schema([("n", pa.int32()), ("x", pa.float32())]))
    table.append(pa.table({"n": pa.array([1], pa.int32()), "x": pa.array([0.5], pa.float32())}))
    with table.update_schema() as change:
        change.update_column("n", LongType())
        change.update_column("x", DoubleType())
    table.append(pa.table({"n": [1 << 40], "x": [0.25]}))
    source = IcebergSource(where(table))
    assert source.schema.equals(pa.schema([("n", pa.int64()), ("x", pa.float64())]))
    assert sorted(map(str, read(source))) == ["{'n': 1, 'x': 0.5}", "{'n': 1099511627776, 'x': 0.25}"]


def test_files_that_cannot_have_rows_of_the_filter_are_not_opened(table: Any) -> None:
    source = IcebergSource(where(table), filter=[("lang", "in", ["de", "en"]), ("n", "<", 4)], columns=["n"])
    assert {path.parent.name for path in source.files} == {"lang=de", "lang=en"}
    assert numbers(source) == [0, 1, 2, 3]
    assert len(IcebergSource(where(table), filter=[("n", ">", 12)]).files) == 1


def test_rows_with_position_deletes_are_left_out(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer of pyiceberg makes none, so a scan is given one, as it would find it in a manifest."""
    task = next(task for task in table.scan().plan_files() if "lang=fr" in task.file.file_path)
    deletes = tmp_path / "deletes.parquet"
    pq.write_table(pa.table({"file_path": [task.file.file_path] * 3, "pos": [0, 9, 4]}), deletes)
    file = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=str(deletes),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=3,
        file_size_in_bytes=deletes.stat().st_size,
    )
    planned = [FileScanTask(task.file, {file}, AlwaysTrue())]
    monkeypatch.setattr("pyiceberg.table.DataScan.plan_files", lambda scan: planned)
    source = IcebergSource(where(table))
    assert (numbers(source), source.size_hint()) == ([11, 12, 13, 15, 16, 17, 18], 7)
    sink = MemorySink()
    Pipeline(IcebergSource(where(table)), [], sink).run()
    assert [row["n"] for row in sink.rows()] == [11, 12, 13, 15, 16, 17, 18]


def test_equality_deletes_are_refused_and_not_passed_over(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    task = next(iter(table.scan().plan_files()))
    entry = type("Entry", (), {"data_file": task.file, "sequence_number": 1})()
    task.file._data[0] = DataFileContent.EQUALITY_DELETES
    monkeypatch.setattr("pyiceberg.table.ManifestGroupPlanner.plan_manifest_entries", lambda planner, files: [[entry]])
    with pytest.raises(ConfigError, match="has equality deletes, which penstock does not apply"):
        read(IcebergSource(where(table)))


def test_a_file_that_was_added_takes_its_columns_by_name_and_partition(table: Any, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"n": [77], "lang": ["it"], "s": [{"a": 5}]}), foreign)
    table.add_files([str(foreign)])
    with table.update_schema() as change:
        change.rename_column("n", "number")
    rows = {row["number"]: row for row in read(IcebergSource(where(table)))}
    assert (len(rows), rows[77]) == (21, {"number": 77, "lang": "it", "s": {"a": 5}})
    with table.transaction() as change:
        change.remove_properties("schema.name-mapping.default")
    with pytest.raises(SchemaError, match="has no column ids, and the table no mapping of names"):
        read(IcebergSource(where(table)))


def test_a_table_without_rows_has_columns_and_ends_at_once(catalog: Catalog) -> None:
    table = catalog.create_table("ns.empty", schema=pa.schema([("n", pa.int64())]))
    source = IcebergSource(where(table))
    assert (source.schema.names, read(source), source.size_hint()) == (["n"], [], 0)
    state = source.state_dict()
    table.append(pa.table({"n": [1]}))
    resumed = IcebergSource(where(table))
    resumed.load_state_dict(state)
    assert read(resumed) == []


def test_what_is_not_there_is_an_error_that_says_what(tmp_path: Path, table: Any) -> None:
    database = f"sqlite:///{tmp_path}/catalog.db"
    with pytest.raises(FileNotFoundError, match=r"no table 'ns.other' in the catalog"):
        read(IcebergSource("ns.other", catalog=database))
    with pytest.raises(FileNotFoundError, match=r"no such catalog: .*nope.db"):
        read(IcebergSource("ns.t", catalog=f"sqlite:///{tmp_path}/nope.db"))
    assert not (tmp_path / "nope.db").exists()
    with pytest.raises(FileNotFoundError, match="no Iceberg table at"):
        read(IcebergSource(tmp_path / "none"))
    with pytest.raises(ConfigError, match="has no snapshot 5"):
        read(IcebergSource(where(table), snapshot=5))
    with pytest.raises(ConnectionError) as caught:
        read(IcebergSource("ns.t", catalog="postgresql://me:hidden-word@127.0.0.1:1/db"))
    assert "hidden-word" not in str(caught.value) + repr(IcebergSource("a", catalog="postgresql://me:hidden-word@h/d"))


def test_damaged_or_doubtful_metadata_is_an_error_that_says_so(table: Any) -> None:
    newest = Path(table.metadata_location.removeprefix("file://"))
    twin = newest.with_name(f"{newest.name[:5]}-11111111-aaaa-4bbb-8ccc-222222222222.metadata.json")
    twin.write_bytes(newest.read_bytes())
    with pytest.raises(ConfigError, match="several metadata files of number"):
        read(IcebergSource(where(table)))
    twin.unlink()
    newest.write_text('{"format-version": 2, "table-')
    with pytest.raises(DataError, match="the metadata of the Iceberg table is damaged"):
        read(IcebergSource(where(table)))


def test_a_missing_package_is_named_with_its_extra(table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg.io.pyarrow", None)
    with pytest.raises(ConfigError, match=r"pip install 'penstock\[lakes\]'"):
        read(open_source(where(table)))


@pytest.mark.parametrize("nested", [False, True])
def test_a_column_that_was_added_with_a_default_has_it_in_older_files(table: Any, nested: bool) -> None:
    with table.update_schema() as change:
        change.add_column(("s", "more") if nested else "more", LongType())
    # pyiceberg reads version 3 of the format, which has defaults, and does not write it.
    path = Path(table.metadata_location.removeprefix("file://"))
    facts = json.loads(path.read_text()) | {"format-version": 3, "next-row-id": 0}
    fields = next(each["fields"] for each in facts["schemas"] if each["schema-id"] == facts["current-schema-id"])
    if nested:
        fields = next(each["type"]["fields"] for each in fields if each["name"] == "s")
    next(each for each in fields if each["name"] == "more")["initial-default"] = 7
    path.write_text(json.dumps(facts))
    if nested:
        with pytest.raises(ConfigError, match="default for 'more'"):
            read(IcebergSource(path))
    else:
        assert [row["more"] for row in read(IcebergSource(path, columns=["more"]))] == [7] * 20


def test_splits_of_a_job_have_the_partitions_of_their_own_files(tmp_path: Path, table: Any) -> None:
    def make(out: Path) -> Made:
        return IcebergSource(table.metadata_location), [], JsonlSink(out / "made.jsonl")

    local = run(make, tmp_path / "runs")
    assert local.counts["rows_out"] == 20
    assert not differences(local, run(make, tmp_path / "runs", engine=job(10)))
