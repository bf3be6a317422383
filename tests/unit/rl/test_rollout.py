"""Tables of rollouts: rows taken and joined, rollouts one by one, and the way through record batches."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.ragged import Ragged
from penstock.errors import DataError, SchemaError
from penstock.rl.read.rollouts import read_rollouts
from penstock.rl.rollout import ROLLOUT_SCHEMA, RolloutTable, from_record_batch, to_record_batch

NUMBERS = ("token_rewards", "logprobs", "ref_logprobs", "values")


def assert_same(first: RolloutTable, second: RolloutTable) -> None:
    """Every column, to the last bit and type."""
    for name in RolloutTable.__slots__:
        ours, theirs = getattr(first, name), getattr(second, name)
        if ours is None:
            assert theirs is None, name
        elif isinstance(ours, Ragged):
            np.testing.assert_array_equal(ours.lengths, theirs.lengths, name)
            used = [column.values[column.offsets[0] : column.offsets[-1]] for column in (ours, theirs)]
            assert used[0].dtype == used[1].dtype, name
            assert used[0].tobytes() == used[1].tobytes(), name
        elif ours.dtype == object:
            assert [repr(cell) for cell in ours] == [repr(cell) for cell in theirs], name
        else:
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_array_equal(ours, theirs, name)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    given_numbers = draw(st.sets(st.sampled_from(NUMBERS)))
    rows: list[dict[str, Any]] = []
    names = st.text() | st.integers() if draw(st.booleans()) else st.none()
    prompts: dict[Any, list[int]] = {}
    for _ in range(draw(st.integers(1, 5))):
        group = draw(names)
        drawn = draw(st.lists(st.integers(0, 2**63 - 1), max_size=3))
        length = draw(st.integers(1, 4))
        per_token = st.lists(floats, min_size=length, max_size=length)
        row = {
            "prompt_ids": drawn if group is None else prompts.setdefault(group, drawn),
            "response_ids": draw(st.lists(st.integers(0, 2**40), min_size=length, max_size=length)),
            "loss_mask": draw(st.lists(st.booleans(), min_size=length, max_size=length)),
            "reward": draw(st.none() | st.floats(allow_infinity=False)),
            "group": group,
            "policy_version": draw(st.none() | st.integers(0, 2**50)),
            "finish_reason": draw(st.none() | st.text()),
            "id": draw(st.none() | st.text(min_size=1).filter(lambda name: name not in [row["id"] for row in rows])),
            "metadata": draw(st.dictionaries(st.text(), json_values, max_size=3)),
        }
        numbers = {name: draw(per_token) for name in sorted(given_numbers)}
        for name in given_numbers & {"logprobs", "ref_logprobs"}:
            numbers[name] = [-abs(number) for number in numbers[name]]
        rows.append(row | numbers)
    return rows


def read(rows: list[dict[str, Any]]) -> RolloutTable:
    return read_rollouts(rows, missing_rewards="keep", all_masked="keep")


@given(rollouts())
def test_a_table_goes_through_a_record_batch_unchanged(rows: list[dict[str, Any]]) -> None:
    table = read(rows)
    batch = to_record_batch(table)
    ROLLOUT_SCHEMA.validate(batch)
    assert_same(from_record_batch(batch), table)


@given(rollouts(), st.data())
def test_some_rows_go_through_a_record_batch_as_they_go_through_take(
    rows: list[dict[str, Any]], data: st.DataObject
) -> None:
    table = read(rows)
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=1, max_size=4))
    batch = to_record_batch(table)
    taken = from_record_batch(batch.take(pa.array(chosen)))
    for row, number in enumerate(chosen):
        assert taken.response_ids[row].tolist() == rows[number]["response_ids"]
    sliced = from_record_batch(batch.slice(1))
    assert [sliced.prompt_ids[row].tolist() for row in range(len(sliced))] == [row["prompt_ids"] for row in rows[1:]]


@given(rollouts())
def test_rollouts_one_by_one_make_the_same_table(rows: list[dict[str, Any]]) -> None:
    table = read(rows)
    again = read_rollouts(table.to_rollouts(), missing_rewards="keep", all_masked="keep")
    assert_same(again, table)


def test_a_file_of_record_batches_is_read_like_any_other(tmp_path: Any) -> None:
    rows = [
        {"prompt": "ab", "response": "cd", "reward": 1.0, "group": 7, "metadata": {"a": math.inf, "b": None}},
        {"prompt_ids": [1], "response_ids": [2], "reward": 0.5, "group": "7", "policy_version": 3},
    ]
    table = read_rollouts(rows, tokenizer="byte")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_batches([to_record_batch(table)]), path)
    assert_same(read_rollouts(path), table)


def test_a_rollout_of_a_table_has_none_where_nothing_is_known() -> None:
    table = read([{"prompt_ids": [1], "response_ids": [2, 3], "reward": None}])
    rollout = table.rollout(-1)
    assert (rollout.reward, rollout.policy_version, rollout.logprobs) == (None, None, None)
    assert np.asarray(rollout.response_ids).tolist() == [2, 3]
    with pytest.raises(IndexError):
        table.rollout(1)


def test_tables_are_joined_in_order_and_empty_ones_do_not_matter() -> None:
    first = read([{"prompt_ids": [1], "response_ids": [2**40], "reward": 1.0, "logprobs": [-0.5]}])
    second = read([{"prompt_ids": [], "response_ids": [3, 4], "reward": 2.0, "logprobs": [-1.0, -2.0]}])
    nothing = replace(read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0}]).take([]))
    joined = RolloutTable.joined([nothing, first, second])
    assert [joined.response_ids[row].tolist() for row in range(2)] == [[2**40], [3, 4]]
    assert joined.logprobs is not None
    assert joined.logprobs[1].tolist() == [-1.0, -2.0]
    assert_same(joined.take([1]), replace(second, response_ids=replace(second.response_ids, values=np.array([3, 4]))))


def test_tables_of_which_some_lack_a_column_are_not_joined() -> None:
    first = read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "logprobs": [-0.5]}])
    second = read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "id": "b"}])
    with pytest.raises(DataError, match=r"'b'.*logprobs"):
        RolloutTable.joined([first, second])
    with pytest.raises(ValueError, match=r"(?i)tables"):
        RolloutTable.joined([])


def test_metadata_that_json_cannot_hold_is_refused_with_the_rollout() -> None:
    table = read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "id": "x", "metadata": {"f": print}}])
    with pytest.raises(DataError, match="'x'"):
        to_record_batch(table)
    table = read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "id": "x", "metadata": {1: 2}}])
    with pytest.raises(DataError, match=r"'x'.*metadata"):
        to_record_batch(table)


def test_arrays_in_metadata_travel_as_lists() -> None:
    table = read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "entropies": np.array([0.5, 1.5])}])
    assert from_record_batch(to_record_batch(table)).metadata.tolist() == [{"entropies": [0.5, 1.5]}]


def test_a_batch_that_holds_no_rollouts_is_refused() -> None:
    with pytest.raises(SchemaError, match="'response_ids'"):
        from_record_batch(pa.record_batch({"prompt_ids": [[1]]}))
    batch = to_record_batch(read([{"prompt_ids": [1], "response_ids": [2], "reward": 1.0, "logprobs": [-0.5]}] * 2))
    column = batch.schema.get_field_index("logprobs")
    holed = batch.set_column(column, batch.schema.field(column), pa.array([[-0.5], None], pa.list_(pa.float32())))
    with pytest.raises(SchemaError, match="'logprobs'"):
        from_record_batch(holed)
