"""Selecting, dropping, renaming and casting columns."""

from __future__ import annotations

import math

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.transforms.columns import Cast, Drop, Rename, Select, column


@pytest.fixture
def batch() -> pa.RecordBatch:
    fields = [pa.field("id", pa.int64(), metadata={"role": "key"}), ("text", pa.string()), ("score", pa.float64())]
    schema = pa.schema(fields, metadata={"origin": "test"})
    return pa.record_batch([[1, 2, 3], ["a", None, "c"], [0.5, 1.0, None]], schema=schema)


def test_select_keeps_the_named_columns_in_the_order_asked_for(batch: pa.RecordBatch) -> None:
    out = Select(["score", "id"]).transform(batch)
    assert out.schema.names == ["score", "id"]
    assert out.schema.metadata == {b"origin": b"test"}
    assert out.schema.field("id").metadata == {b"role": b"key"}


def test_drop_keeps_the_others(batch: pa.RecordBatch) -> None:
    assert Drop("text").transform(batch).schema.names == ["id", "score"]


def test_drop_refuses_to_leave_no_columns(batch: pa.RecordBatch) -> None:
    with pytest.raises(SchemaError, match=r"Drop\(\['id', 'text', 'score'\]\)"):
        Drop(["id", "text", "score"]).transform(batch)


def test_rename_keeps_values_order_and_metadata(batch: pa.RecordBatch) -> None:
    out = Rename({"id": "text", "text": "id"}).transform(batch)
    assert out.schema.names == ["text", "id", "score"]
    assert out.column(0).to_pylist() == [1, 2, 3]
    assert out.schema.metadata == {b"origin": b"test"}
    assert out.schema.field(0).metadata == {b"role": b"key"}


def test_rename_refuses_to_make_two_columns_of_one_name(batch: pa.RecordBatch) -> None:
    with pytest.raises(SchemaError, match="'score'"):
        Rename({"id": "score"}).transform(batch)


def test_a_missing_column_is_named_with_those_there_are_and_a_suggestion(batch: pa.RecordBatch) -> None:
    with pytest.raises(
        SchemaError,
        match=r"'txet'.*'text'",
    ):
        column(batch, "txet")
    with pytest.raises(SchemaError, match=r"'zzz'.*'id'"):
        Select("zzz").transform(batch)
    for transform in (Drop("zzz"), Rename({"zzz": "a"}), Cast({"zzz": "int8"})):
        with pytest.raises(SchemaError, match="'zzz'"):
            transform.transform(batch)


def test_a_name_that_occurs_twice_is_an_error() -> None:
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(SchemaError, match="'a'"):
        column(twice, "a")


def test_constructors_refuse_names_that_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"(?i)column"):
        Select([])
    with pytest.raises(ValueError, match="'a'"):
        Drop(["a", "a"])
    with pytest.raises(ValueError, match=r"(?i)column.*\b3\b"):
        Select(["a", 3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"\bnames\b"):
        Rename({})
    with pytest.raises(ValueError, match="'c'"):
        Rename({"a": "c", "b": "c"})
    with pytest.raises(ValueError, match=r"\btypes\b"):
        Cast({})
    with pytest.raises(ValueError, match=r"'integer'.*'int32'"):
        Cast({"a": "integer"})


def test_cast_takes_types_and_their_names(batch: pa.RecordBatch) -> None:
    out = Cast({"id": "float32", "score": pa.string()}).transform(batch)
    assert out.schema.types == [pa.float32(), pa.string(), pa.string()]
    assert out.column("score").to_pylist() == ["0.5", "1", None]
    assert out.schema.field("id").metadata == {b"role": b"key"}


@given(values=st.lists(st.integers(-300, 300) | st.none()), skip=st.integers(0, 5))
def test_cast_agrees_with_numpy_or_names_the_first_value_that_does_not_fit(values: list[int | None], skip: int) -> None:
    batch = pa.record_batch({"n": pa.array(values, pa.int64())})[skip:]
    left = values[skip:]
    unfit = [i for i, value in enumerate(left) if value is not None and not -128 <= value <= 127]
    if unfit:
        row = unfit[0]
        message = rf"'n'.*row {row}\b.*{left[row]}.*\bint8\b"
        with pytest.raises(SchemaError, match=message):
            Cast({"n": "int8"}).transform(batch)
    else:
        out = Cast({"n": "int8"}).transform(batch).column("n")
        assert out.type == pa.int8()
        assert out.to_pylist() == [None if v is None else int(np.int8(v)) for v in left]


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (["1", "x"], "int64", r"row 1\b.*'x'.*\bint64\b"),
        ([1.0, 2.0, 2.5], "int32", r"row 2\b.*2\.5.*\bint32\b"),
        ([1.0, math.inf, 1e300], "float32", r"row 2\b.*1e\+300.*float"),
        (["1", "1e300"], "float32", r"row 1\b.*'1e300'.*float"),
        ([-1], "uint8", r"row 0\b.*-1\b.*\buint8\b"),
        (["y" * 200], "int64", r"row 0\b.*'y{76}\.\.\. .*\bint64\b"),
    ],
)
def test_cast_names_the_row_and_the_value_that_do_not_fit(values: list[object], dtype: str, message: str) -> None:
    with pytest.raises(SchemaError, match="'a'.*" + message):
        Cast({"a": dtype}).transform(pa.record_batch({"a": values}))


def test_cast_says_when_a_type_cannot_become_another() -> None:
    with pytest.raises(SchemaError, match=r"'a'.*\bint64\b"):
        Cast({"a": "int64"}).transform(pa.record_batch({"a": [[1], [2]]}))


def test_cast_unpacks_dictionaries_and_string_views() -> None:
    batch = pa.record_batch(
        {"d": pa.array(["1", "2", "1"]).dictionary_encode(), "v": pa.array(["1", None, "3"], pa.string_view())}
    )
    out = Cast({"d": "int8", "v": "int8"}).transform(batch)
    assert out.to_pydict() == {"d": [1, 2, 1], "v": [1, None, 3]}


def test_empty_batches_keep_the_promised_types(batch: pa.RecordBatch) -> None:
    empty = batch[:0]
    assert Select("id").transform(empty).num_rows == 0
    assert Cast({"text": "int64"}).transform(empty).schema.types == [pa.int64(), pa.int64(), pa.float64()]


def test_transforms_print_as_they_are_written_and_survive_pickling(batch: pa.RecordBatch) -> None:
    transforms = [Select("a"), Select(["a", "b"]), Drop("a"), Rename({"a": "b"}), Cast({"a": "int8"})]
    assert [repr(t) for t in transforms] == [
        "Select('a')",
        "Select(['a', 'b'])",
        "Drop('a')",
        "Rename({'a': 'b'})",
        "Cast({'a': 'int8'})",
    ]
    for transform in transforms:
        assert repr(cloudpickle.loads(cloudpickle.dumps(transform))) == repr(transform)
