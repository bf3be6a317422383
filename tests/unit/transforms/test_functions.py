"""Map, Filter and FlatMap by themselves, and expressions as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ConfigError, Schema
from penstock.errors import SchemaError
from penstock.transforms import Filter, FlatMap, Map, parse_expression

BATCH = pa.record_batch({"n": [1, 2, 3, None], "s": ["a", "bb", None, "dddd"], "l": [[1], [], None, [1, 2]]})


def rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return batch.to_pylist()


def test_a_row_function_gets_dicts_and_its_dicts_are_the_new_rows() -> None:
    made = Map(lambda row: {"m": (row["n"] or 0) * 2, "s": row["s"]}).transform(BATCH)
    assert rows(made) == [{"m": 2, "s": "a"}, {"m": 4, "s": "bb"}, {"m": 6, "s": None}, {"m": 0, "s": "dddd"}]
    assert made.schema == pa.schema([("m", pa.int64()), ("s", pa.string())])


def test_untouched_columns_are_passed_on_without_a_copy() -> None:
    made = Map(lambda row: {**row, "new": 1}).transform(BATCH)
    for name in ("n", "s", "l"):
        assert made.column(name).buffers()[1].address == BATCH.column(name).buffers()[1].address


def test_a_column_keeps_its_type_if_the_values_still_fit_and_gets_another_if_not() -> None:
    narrow = pa.record_batch({"x": pa.array([1, 2], pa.int8())})
    assert Map(lambda row: {"x": row["x"] + 1}).transform(narrow).schema.field("x").type == pa.int8()
    assert Map(lambda row: {"x": row["x"] / 2}).transform(narrow).column("x").to_pylist() == [0.5, 1.0]
    assert Map(lambda row: {"x": row["x"] * 1000}).transform(narrow).column("x").to_pylist() == [1000, 2000]


def test_later_rows_must_fit_the_first_ones_and_nothing_is_rounded_in_silence() -> None:
    stage = Map(lambda row: {"x": row["x"]})
    stage.transform(pa.record_batch({"x": [1, 2]}))
    with pytest.raises(SchemaError, match=r"'x'.*schema="):
        stage.transform(pa.record_batch({"x": [0.5]}))
    assert stage.transform(pa.record_batch({"x": pa.array([None, 3], pa.int64())})).column("x").to_pylist() == [None, 3]


def test_a_new_key_in_a_later_row_is_named() -> None:
    stage = Map(lambda row: row)
    stage.transform(pa.record_batch({"x": [1]}))
    with pytest.raises(SchemaError, match=r"'y'.*'x'"):
        stage.transform(pa.record_batch({"y": [1]}))


@pytest.mark.parametrize("kind", [Schema, dict])
def test_a_given_schema_decides_and_may_be_a_penstock_schema_or_a_dict(kind: type) -> None:
    schema = kind({"x": "float32", "y": "string"})
    made = Map(lambda row: {"x": row["x"]}, schema=schema).transform(pa.record_batch({"x": [1, 2]}))
    assert made.schema.types == [pa.float32(), pa.string()]
    assert made.column("y").to_pylist() == [None, None]


def test_reset_forgets_what_was_learned_but_not_what_was_given() -> None:
    stage = Map(lambda row: row)
    stage.transform(pa.record_batch({"x": [1]}))
    stage.reset()
    assert stage.learning
    given = Map(lambda row: row, schema=pa.schema([("x", pa.int64())]))
    given.reset()
    assert not given.learning


def test_expressions_add_and_replace_columns() -> None:
    made = Map({"n": pc.field("n") + 1, "len": pc.utf8_length(pc.field("s"))}).transform(BATCH)
    assert made.schema.names == ["n", "s", "l", "len"]
    assert made.column("n").to_pylist() == [2, 3, 4, None]
    assert made.column("len").to_pylist() == [1, 2, None, 4]


def test_a_batch_function_is_known_by_its_annotation_or_by_the_flag() -> None:
    def upper(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch.select(["s"])

    assert Map(upper).transform(BATCH).schema.names == ["s"]
    assert Map(lambda batch: batch.select(["n"]), batch=True).transform(BATCH).schema.names == ["n"]


@pytest.mark.parametrize(
    "condition",
    [
        lambda row: row["n"] is not None and row["n"] > 1,
        pc.field("n") > 1,
        "n > 1",
    ],
)
def test_the_three_kinds_of_filter_agree_and_null_does_not_keep(condition: Any) -> None:
    stage = Filter(condition)
    assert stage.transform(BATCH).column("n").to_pylist() == [2, 3]
    assert sum(stage.counts.values()) == 2


def test_a_batch_condition_may_return_arrow_or_numpy_booleans() -> None:
    assert Filter(lambda b: pc.is_valid(b.column("n")), batch=True).transform(BATCH).num_rows == 3
    assert Filter(lambda b: np.array([True, False, False, True]), batch=True).transform(BATCH).num_rows == 2
    with pytest.raises(SchemaError, match=r"\bint64\b"):
        Filter(lambda b: [1, 2], batch=True).transform(BATCH)


def test_a_reason_names_what_is_left_out() -> None:
    stage = Filter("n > 1", reason="too small")
    stage.transform(BATCH)
    assert stage.counts == {"too small": 2}


def test_flat_map_refuses_what_is_not_rows() -> None:
    assert FlatMap(lambda row: [{"c": c} for c in row["s"] or ""]).transform(BATCH).column("c").to_pylist() == list(
        "abbdddd"
    )
    with pytest.raises(SchemaError, match="FlatMap"):
        FlatMap(lambda row: {"x": 1}).transform(BATCH)
    with pytest.raises(SchemaError, match="FlatMap"):
        FlatMap(lambda batch: [], batch=True).transform(BATCH)
    assert FlatMap(lambda batch: [batch, batch], batch=True).transform(BATCH).num_rows == 8


@given(
    st.lists(st.tuples(st.integers(-50, 50), st.integers(1, 50), st.sampled_from(["en", "de", "fr"])), min_size=1),
)
def test_text_expressions_mean_what_they_mean_in_python(values: list[tuple[int, int, str]]) -> None:
    batch = pa.record_batch(dict(zip(["a", "b", "lang"], map(list, zip(*values)))))
    for text in (
        "a > 3 and lang == 'en'",
        "not (a <= 3 or b > 10)",
        "-5 < a < 20",
        "lang in ['en', 'fr'] and a + b * 2 != 7",
        "lang not in ('de',)",
        "a / b > 0.5",
        "len(lang) == 2 and a - -1 >= b",
    ):
        kept = Filter(text).transform(batch).to_pylist()
        assert kept == [row for row in batch.to_pylist() if eval(text, {"len": len}, row)], text


def test_none_is_compared_with_is() -> None:
    assert Filter("n is None").transform(BATCH).num_rows == 1
    assert Filter("n is not None").transform(BATCH).num_rows == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a >", "'a >'"),
        ("__import__('os')", "'__import__'"),
        ("a.b.c()", "Call"),
        ("lambda: 1", "'lambda: 1'"),
        ("utf8_lenght(a) > 1", "'utf8_length'"),
        ("a is 3", "'is'"),
        ("a ** 2", "BinOp"),
        ("[x for x in a]", "ListComp"),
    ],
)
def test_anything_else_is_refused_with_the_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        parse_expression(text)


def test_a_missing_column_in_an_expression_lists_the_columns_there_are() -> None:
    with pytest.raises(SchemaError, match=r"'n'.*'s'"):
        Filter("nn > 1").transform(BATCH)
    with pytest.raises(SchemaError, match=r"'n'.*'s'"):
        Map({"x": pc.field("nn")}).transform(BATCH)
