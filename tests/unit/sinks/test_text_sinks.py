from __future__ import annotations

import csv
import datetime as dt
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, SchemaError
from penstock.sinks import CsvSink, JsonlSink
from penstock.sources import CsvSource, JsonlSource
from penstock.types import from_numpy

same_directory = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)


def write(sink: Any, *batches: pa.RecordBatch) -> Path:
    for batch in batches:
        sink.consume(batch)
    sink.flush()
    path: Path = sink.path
    return path


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


rows = st.lists(
    st.fixed_dictionaries(
        {
            "n": st.none() | st.integers(-(2**63), 2**63 - 1),
            "x": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "s": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
            "l": st.none() | st.lists(st.booleans(), max_size=3),
        }
    ),
    min_size=1,
    max_size=6,
)
SCHEMA = pa.schema([("n", pa.int64()), ("x", pa.float64()), ("s", pa.string()), ("l", pa.list_(pa.bool_()))])


@same_directory
@given(rows=rows)
def test_json_lines_are_what_the_json_module_reads_back(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = write(JsonlSink(tmp_path / "a.jsonl"), pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    assert [json.loads(line) for line in path.read_bytes().splitlines() if line] == rows
    source = JsonlSource(path, schema=SCHEMA)
    assert source.next_batch(10).to_pylist() == rows  # type: ignore[union-attr]
    source.close()


@same_directory
@given(rows=rows, delimiter=st.sampled_from([",", ";", "\t"]))
def test_csv_is_what_the_csv_module_reads_back(tmp_path: Path, rows: list[dict[str, Any]], delimiter: str) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=SCHEMA).drop_columns(["l"])
    path = write(CsvSink(tmp_path / "a.csv", delimiter=delimiter), batch)
    with path.open(newline="") as file:
        header, *records = csv.reader(file, delimiter=delimiter)
    assert header == ["n", "x", "s"]
    assert [record[2] or None for record in records] == [row["s"] or None for row in rows]
    assert [int(record[0]) if record[0] else None for record in records] == [row["n"] for row in rows]
    source = CsvSource(path, schema=batch.schema, delimiter=delimiter)
    wanted = [{"n": row["n"], "x": row["x"], "s": row["s"] or None} for row in rows]
    assert source.next_batch(10).to_pylist() == wanted  # type: ignore[union-attr]
    source.close()


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (pa.array([1, 2**63], pa.uint64()), [1, 2**63]),
        (pa.array([0.1, float("nan"), float("inf")]), [0.1, None, None]),
        (pa.array([1, None], pa.timestamp("us", "UTC")), ["1970-01-01T00:00:00.000001+00:00", None]),
        (pa.array([1_000_000_001], pa.timestamp("ns")), ["1970-01-01T00:00:01.000000001"]),
        (pa.array([dt.date(2020, 2, 3)]), ["2020-02-03"]),
        (pa.array([dt.time(1, 2, 3)]), ["01:02:03"]),
        (pa.array([dt.timedelta(seconds=90)]), ["0:01:30"]),
        (pa.array([decimal.Decimal("1.50")]), ["1.50"]),
        (pa.array(["x", None]).dictionary_encode(), ["x", None]),
        (pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int64())), [{"a": 1}, {}]),
        (pa.array([[(1, "a")]], pa.map_(pa.int64(), pa.string())), [{"1": "a"}]),
        (pa.array([{"x": [1, None]}, None]), [{"x": [1, None]}, None]),
        (pa.nulls(2), [None, None]),
        (pa.array(["x"], pa.large_string()), ["x"]),
    ],
)
def test_values_of_every_kind_have_a_form_in_json(tmp_path: Path, column: pa.Array, text: list[Any]) -> None:
    path = write(JsonlSink(tmp_path / "a.jsonl"), pa.RecordBatch.from_arrays([column], ["v"]))
    assert [row["v"] for row in lines(path)] == text


def test_tensors_are_nested_lists(tmp_path: Path) -> None:
    batch = from_numpy({"v": np.arange(8, dtype=np.float32).reshape(2, 2, 2)})
    assert [row["v"] for row in lines(write(JsonlSink(tmp_path / "a.jsonl"), batch))] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.list_(pa.binary()), pa.struct([("x", pa.binary(2))])]
)
def test_binary_columns_have_no_form_in_json(tmp_path: Path, kind: pa.DataType) -> None:
    sink = JsonlSink(tmp_path / "a.jsonl")
    with pytest.raises(SchemaError, match="'v'"):
        sink.consume(pa.record_batch({"v": pa.nulls(1, kind)}))
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.struct([("x", pa.int64())]), pa.binary()])
def test_nested_and_binary_columns_have_no_form_in_csv(tmp_path: Path, kind: pa.DataType) -> None:
    sink = CsvSink(tmp_path / "a.csv")
    with pytest.raises(SchemaError, match="'v'"):
        sink.consume(pa.record_batch({"v": pa.nulls(1, kind), "n": [1]}))
    sink.abort()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("values", [[1, None, 3], ["x", None, ""], [None, None, None], [True, None, False]])
def test_a_single_column_keeps_its_nulls(tmp_path: Path, values: list[Any]) -> None:
    kind = pa.array(values).type
    path = write(CsvSink(tmp_path / "a.csv"), pa.RecordBatch.from_arrays([pa.array(values)], ["v"]))
    source = CsvSource(path)
    assert [row["v"] for row in source.next_batch(10).to_pylist()] == [
        value or None if value == "" else value for value in values
    ]  # type: ignore[union-attr]
    assert source.schema.field("v").type == kind
    source.close()
    frame = pd.read_csv(path)
    assert len(frame) == 3


def test_csv_values_of_every_flat_kind_come_back(tmp_path: Path) -> None:
    batch = pa.record_batch(
        {
            "d": pa.array([dt.date(2020, 2, 3), None]),
            "t": pa.array([dt.datetime(2020, 2, 3, 4, 5, 6), None], pa.timestamp("s")),
            "z": pa.array([dt.datetime(2020, 2, 3, tzinfo=dt.UTC), None], pa.timestamp("s", "UTC")),
            "b": pa.array([True, None]),
            "f": pa.array([1e300, None]),
            "c": pa.array(["x", None]).dictionary_encode(),
            "v": pa.array(["y", None], pa.string_view()),
            "n": pa.nulls(2),
        }
    )
    source = CsvSource(write(CsvSink(tmp_path / "a.csv"), batch))
    back = source.next_batch(10)
    source.close()
    assert back is not None
    assert back.to_pylist() == batch.to_pylist()
    kinds = ["date32[day]", "timestamp[s]", "timestamp[s, tz=UTC]", "bool", "double", "string", "string", "null"]
    assert [str(field.type) for field in back.schema] == kinds


def test_odd_column_names_are_quoted(tmp_path: Path) -> None:
    names = ['a"b', "c,d", "e\nf", " g "]
    path = write(CsvSink(tmp_path / "a.csv"), pa.RecordBatch.from_arrays([pa.array([1])] * 4, names))
    source = CsvSource(path)
    assert source.schema.names == names
    assert source.next_batch(1).to_pylist() == [dict.fromkeys(names, 1)]  # type: ignore[union-attr]


def test_a_tsv_name_means_tabs(tmp_path: Path) -> None:
    path = write(CsvSink(tmp_path / "a.tsv"), pa.record_batch({"a": [1], "b": ["x,y"]}))
    assert path.read_text() == '"a"\t"b"\n1\t"x,y"\n'
    with pytest.raises(ConfigError, match="delimiter"):
        CsvSink(tmp_path / "a.csv", delimiter="::")


def test_a_compression_level_is_passed_on_or_refused(tmp_path: Path) -> None:
    batch = pa.record_batch({"t": [f"some text {i * 7919 % 1000}" for i in range(20_000)]})
    small = write(JsonlSink(tmp_path / "a.jsonl.gz", compression_level=9), batch).stat().st_size
    large = write(JsonlSink(tmp_path / "b.jsonl.gz", compression_level=1), batch).stat().st_size
    assert small < large
    sink = CsvSink(tmp_path / "a.csv.lz4", compression_level=3)
    with pytest.raises(ConfigError, match=r"\.lz4"):
        sink.consume(batch)
    sink.abort()
