from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from penstock.errors import ConfigError, ResumeError
from penstock.sources import MemorySource
from penstock.testing import assert_source_contract

ROWS = [{"a": i, "b": None if i % 3 else f"text {i}"} for i in range(20)]


def read(source: MemorySource) -> list[dict[str, Any]]:
    rows = []
    while (batch := source.next_batch(7)) is not None:
        rows += batch.to_pylist()
    return rows


@pytest.mark.parametrize(
    "data",
    [
        ROWS,
        tuple(ROWS),
        {"a": [row["a"] for row in ROWS], "b": [row["b"] for row in ROWS]},
        pa.Table.from_pylist(ROWS),
        pa.RecordBatch.from_pylist(ROWS),
        pa.Table.from_batches([pa.RecordBatch.from_pylist(ROWS[:3]), pa.RecordBatch.from_pylist(ROWS[3:])]),
        [pa.RecordBatch.from_pylist(ROWS[:3]), pa.RecordBatch.from_pylist(ROWS[3:])],
    ],
    ids=["list", "tuple", "dict", "table", "batch", "chunks", "batches"],
)
def test_rows_in_any_usual_form_are_read_as_they_are(data: Any) -> None:
    assert_source_contract(lambda: MemorySource(data), ROWS)
    assert MemorySource(data).size_hint() == 20


def test_ragged_rows_get_one_schema_and_plain_values_one_column() -> None:
    assert read(MemorySource([{"a": 1}, {"b": "x"}, {"a": 2.5}])) == [
        {"a": 1.0, "b": None},
        {"a": None, "b": "x"},
        {"a": 2.5, "b": None},
    ]
    assert read(MemorySource(["x", "y"])) == [{"value": "x"}, {"value": "y"}]
    assert read(MemorySource([])) == []


def test_a_data_frame_is_read_without_its_index_unless_that_has_a_name() -> None:
    frame = pd.DataFrame({"n": [1, 2, 3], "s": ["x", None, "z"]})
    rows = [{"n": 1, "s": "x"}, {"n": 2, "s": None}, {"n": 3, "s": "z"}]
    assert read(MemorySource(frame)) == rows
    assert read(MemorySource(frame[frame.n > 1])) == rows[1:]
    named = read(MemorySource(frame.set_index("n")))
    assert [row["n"] for row in named] == [1, 2, 3]
    assert MemorySource(frame).schema.metadata is None


def test_numpy_arrays_are_columns_without_a_copy() -> None:
    numbers = np.arange(10, dtype=np.int32)
    source = MemorySource(numbers)
    batch = source.next_batch(10)
    assert batch is not None
    assert batch["value"].to_numpy().ctypes.data == numbers.ctypes.data
    columns = MemorySource({"x": np.array([1.5, 2.5]), "y": np.array([True, False])})
    assert read(columns) == [{"x": 1.5, "y": True}, {"x": 2.5, "y": False}]


def test_an_array_of_more_dimensions_is_a_column_of_tensors() -> None:
    batch = MemorySource(np.arange(24, dtype=np.float32).reshape(4, 2, 3)).next_batch(10)
    assert batch is not None
    assert batch.schema.field("value").type == pa.fixed_shape_tensor(pa.float32(), [2, 3])
    assert batch["value"].to_numpy_ndarray().shape == (4, 2, 3)
    assert batch["value"].to_numpy_ndarray()[1, 1, 2] == 11


def test_a_structured_array_has_its_fields_as_columns() -> None:
    data = np.array([(1, 2.5), (3, 4.5)], dtype=[("id", "i8"), ("score", "f4")])
    assert read(MemorySource(data)) == [{"id": 1, "score": 2.5}, {"id": 3, "score": 4.5}]
    assert [str(field.type) for field in MemorySource(data).schema] == ["int64", "float"]


def test_a_schema_decides_about_types() -> None:
    schema = pa.schema([("a", pa.float32())])
    for data in ([{"a": 1}], {"a": [1]}, pa.table({"a": [1]}), pd.DataFrame({"a": [1]}), {"a": np.array([1])}):
        assert MemorySource(data, schema=schema).schema == schema


def test_empty_chunks_and_tables_without_rows_are_no_trouble() -> None:
    empty = pa.table({"a": pa.array([], pa.int64())})
    table = pa.concat_tables([empty, pa.table({"a": [1, 2]}), empty, pa.table({"a": [3]}), empty])
    assert read(MemorySource(table)) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert read(MemorySource(empty)) == []


def test_the_origin_is_the_first_row_of_the_last_batch() -> None:
    source = MemorySource(ROWS)
    rows = []
    while source.next_batch(6) is not None:
        origin = source.origin()
        assert origin is not None
        assert origin.file == "<memory>"
        rows.append(origin.row)
    assert rows == [0, 6, 12, 18]


def test_a_state_over_another_number_of_rows_is_refused() -> None:
    source = MemorySource(ROWS)
    source.next_batch(3)
    with pytest.raises(ResumeError, match=r"\b20\b.*\b19\b"):
        MemorySource(ROWS[1:]).load_state_dict(source.state_dict())


def test_something_else_is_refused() -> None:
    with pytest.raises(ConfigError, match="MemorySource"):
        MemorySource(5)
