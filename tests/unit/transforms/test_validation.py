"""Rules for rows, and what happens to those that break them."""

from __future__ import annotations

import math
import re
import threading
from typing import Any

import cloudpickle
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import DataError, SchemaError
from penstock.transforms.validation import Validate

people = st.lists(
    st.tuples(
        st.integers(0, 3) | st.none(),
        st.floats(-10, 10) | st.just(math.nan) | st.none(),
        st.text("ab@\n", max_size=4) | st.none(),
        st.sampled_from(["de", "fr", "xx"]) | st.none(),
    ),
    max_size=15,
)
RULES: dict[str, Any] = {
    "not_null": "id",
    "ranges": {"score": (-5, 5)},
    "regex": {"mail": "a+@b*"},
    "allowed": {"lang": ["de", "fr"]},
}


def as_batch(rows: list[tuple[Any, ...]], skip: int = 0) -> pa.RecordBatch:
    types = {"id": pa.int64(), "score": pa.float64(), "mail": pa.string(), "lang": pa.string()}
    arrays = [pa.array([row[i] for row in rows], dtype) for i, dtype in enumerate(types.values())]
    return pa.record_batch(arrays, names=list(types))[skip:]


def first_broken(row: tuple[Any, ...]) -> str | None:
    """The reference: the same rules in plain Python."""
    ident, score, mail, lang = row
    if ident is None:
        return "id: null"
    if score is not None and not -5 <= score <= 5:
        return "score: out of range"
    if mail is not None and not re.fullmatch("a+@b*", mail):
        return "mail: does not match"
    if lang is not None and lang not in ("de", "fr"):
        return "lang: not allowed"
    return None


@given(rows=people, skip=st.integers(0, 3))
def test_drop_keeps_the_valid_rows_and_counts_the_others_by_their_first_broken_rule(
    rows: list[tuple[Any, ...]], skip: int
) -> None:
    validate = Validate(**RULES, on_invalid="skip")
    out = validate.transform(as_batch(rows, skip))
    assert out.equals(as_batch([row for row in rows[skip:] if first_broken(row) is None]))
    reasons = [reason for row in rows[skip:] if (reason := first_broken(row))]
    assert validate.counts == {reason: reasons.count(reason) for reason in reasons}


@given(rows=people, skip=st.integers(0, 3))
def test_raise_names_the_first_bad_row_its_value_and_the_rule(rows: list[tuple[Any, ...]], skip: int) -> None:
    batch = as_batch(rows, skip)
    bad = [i for i, row in enumerate(rows[skip:]) if first_broken(row)]
    if not bad:
        assert Validate(**RULES).transform(batch) is batch
        return
    with pytest.raises(DataError) as caught:
        Validate(**RULES).transform(batch)
    name, problem = str(first_broken(rows[skip:][bad[0]])).split(": ")
    assert caught.value.row == bad[0]
    assert re.search(rf"{name!r}.*row {bad[0]}\b.*{re.escape(problem)}", str(caught.value))


@given(rows=people, skip=st.integers(0, 3))
def test_null_replaces_every_bad_value_and_keeps_the_rows(rows: list[tuple[Any, ...]], skip: int) -> None:
    rules = {k: v for k, v in RULES.items() if k != "not_null"}
    validate = Validate(**rules, on_invalid="null")
    out = validate.transform(as_batch(rows, skip))
    expected = [
        (
            ident,
            score if first_broken((0, score, None, None)) is None else None,
            mail if first_broken((0, None, mail, None)) is None else None,
            lang if first_broken((0, None, None, lang)) is None else None,
        )
        for ident, score, mail, lang in rows[skip:]
    ]
    assert out.to_pylist() == as_batch(expected).to_pylist()
    reasons = [f"{reason}, set to null" for row in rows[skip:] if (reason := first_broken((0, *row[1:])))]
    assert validate.counts == {reason: reasons.count(reason) for reason in reasons}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"not_null": ["n"]}, "column 'n', row 2 of the batch: null: None, expected a value"),
        ({"ranges": {"n": (0, 9)}}, "column 'n', row 1 of the batch: out of range: 10, expected 0 to 9"),
        ({"ranges": {"n": (2, None)}}, "column 'n', row 0 of the batch: out of range: 1, expected at least 2"),
        ({"ranges": {"n": (None, 5)}}, "column 'n', row 1 of the batch: out of range: 10, expected at most 5"),
        ({"regex": {"t": "a*"}}, "column 't', row 1 of the batch: does not match: 'ab', expected a match of 'a*'"),
        ({"allowed": {"t": ["a"]}}, "column 't', row 1 of the batch: not allowed: 'ab', expected one of ['a']"),
    ],
)
def test_messages_say_what_was_given_and_what_was_expected(rules: dict[str, Any], message: str) -> None:
    batch = pa.record_batch({"n": [1, 10, None], "t": ["a", "ab", None]})
    with pytest.raises(DataError) as caught:
        Validate(**rules).transform(batch)
    assert str(caught.value) == message


def test_of_several_bad_rows_the_first_is_raised_whatever_rule_it_breaks() -> None:
    batch = pa.record_batch({"a": [1, 99], "b": [99, 1]})
    with pytest.raises(DataError, match=r"'b'.*row 0\b"):
        Validate(ranges={"a": (0, 9), "b": (0, 9)}).transform(batch)


def test_a_batch_with_other_types_than_the_schema_is_an_error_even_when_rows_are_dropped() -> None:
    validate = Validate(pa.schema({"age": pa.int64()}), on_invalid="skip")
    with pytest.raises(SchemaError, match=r"'age'.*Cast\(\{'age': 'int64'\}\)"):
        validate.transform(pa.record_batch({"age": ["1"]}))
    with pytest.raises(SchemaError, match=r"'age'.*'agee'"):
        validate.transform(pa.record_batch({"agee": [1]}))
    more = pa.record_batch({"other": ["x"], "age": [1]})
    assert validate.transform(more) is more


def test_fields_that_are_not_nullable_are_not_null_rules() -> None:
    validate = Validate(pa.schema([pa.field("a", pa.int64(), nullable=False)]), not_null=["a", "b"], on_invalid="skip")
    out = validate.transform(pa.record_batch({"a": [1, None, 3], "b": ["x", "y", None]}))
    assert out.to_pylist() == [{"a": 1, "b": "x"}]
    assert validate.counts == {"a: null": 1, "b: null": 1}


def test_anything_that_knows_its_arrow_schema_is_a_schema() -> None:
    class Schema:
        def to_arrow(self) -> pa.Schema:
            return pa.schema({"a": pa.int64()})

    with pytest.raises(SchemaError, match=r"'a'.*\bint64\b"):
        Validate(Schema()).transform(pa.record_batch({"a": ["x"]}))


@pytest.mark.parametrize(
    "dtype", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_rules_apply_to_every_layout_of_text(dtype: pa.DataType) -> None:
    batch = pa.record_batch({"t": pa.array(["a", "b", "c", None]).cast(dtype)})
    assert Validate(allowed={"t": ["a", "b"]}, on_invalid="skip").transform(batch)["t"].to_pylist() == ["a", "b", None]
    assert Validate(regex={"t": "[bc]"}, on_invalid="skip").transform(batch)["t"].to_pylist() == ["b", "c", None]
    out = Validate(ranges={"t": ("b", None)}, on_invalid="null").transform(batch)
    assert out["t"].to_pylist() == [None, "b", "c", None]
    assert out.schema == batch.schema


def test_ranges_wider_than_the_type_and_columns_of_nothing_but_nulls_break_no_rule() -> None:
    batch = pa.record_batch(
        {"n": pa.array([-5, 100], pa.int8()), "half": pa.array([0, 1], pa.float16()), "nothing": pa.nulls(2)}
    )
    assert Validate(ranges={"half": (0, 1)}).transform(batch) is batch
    assert Validate(ranges={"n": (-1000, 1000)}).transform(batch) is batch
    rules: dict[str, Any] = {"ranges": {"nothing": (0, 1)}, "regex": {"nothing": "x"}, "allowed": {"nothing": [1]}}
    assert Validate(**rules).transform(batch) is batch


def test_rules_that_do_not_fit_the_type_of_the_column_are_errors() -> None:
    batch = pa.record_batch({"n": [1], "t": ["a"]})
    for value in ("x", 0.5, 2**70):
        with pytest.raises(SchemaError, match=rf"allowed=.*{value!r}"):
            Validate(allowed={"n": [value]}).transform(batch)
    with pytest.raises(SchemaError, match="'t'"):
        Validate(ranges={"t": (0, 1)}).transform(batch)
    with pytest.raises(SchemaError, match=r"'n'.*\bint64\b"):
        Validate(regex={"n": "x"}).transform(batch)


def test_constructors_refuse_what_cannot_work() -> None:
    with pytest.raises(ValueError, match=r"not_null.*ranges"):
        Validate()
    with pytest.raises(ValueError, match=r"on_invalid.*'drop'"):
        Validate(not_null="a", on_invalid="drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"on_invalid='null'.*'a'"):
        Validate(not_null="a", on_invalid="null")
    with pytest.raises(ValueError, match=r"'\('.*'a'"):
        Validate(regex={"a": "("})
    with pytest.raises(ValueError, match=r"allowed.*'a'"):
        Validate(allowed={"a": []})
    with pytest.raises(ValueError, match="'a'"):
        Validate(ranges={"a": (1, 0)})


def test_counts_from_many_threads_add_up_and_copies_start_from_nothing() -> None:
    validate, batch = Validate(ranges={"a": (0, 1)}, on_invalid="skip"), pa.record_batch({"a": [0, 5, 7]})
    threads = [threading.Thread(target=lambda: [validate.transform(batch) for _ in range(100)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert validate.counts == {"a: out of range": 1600}
    copy = cloudpickle.loads(cloudpickle.dumps(validate))
    assert copy.counts == {}
    assert copy.transform(batch).num_rows == 1


def test_empty_batches_pass() -> None:
    empty = as_batch([])
    for on_invalid in ("raise", "skip"):
        assert Validate(**RULES, on_invalid=on_invalid).transform(empty).equals(empty)


def test_it_prints_its_rules() -> None:
    assert repr(Validate(not_null="id", ranges={"age": (0, 120)}, on_invalid="skip")) == (
        "Validate(id: a value, age: 0 to 120, on_invalid='drop')"
    )
