"""Rollouts out of everything they come in: the same ids in every form, and every mistake facts with its row."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.rl.read.rollouts import TextRule, read_rollouts
from penstock.rl.rollout import Rollout, RolloutTable
from penstock.transforms.tokenization import ByteTokenizer

TOKENIZER = ByteTokenizer(special=("<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>"))
IM_END = TOKENIZER.special.named["<|im_end|>"]


def one(**changes: Any) -> dict[str, Any]:
    """A good rollout, as a dict."""
    return {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "reward": 1.0} | changes


def lists(ragged: Ragged | None) -> list[list[Any]]:
    assert ragged is not None
    return [ragged[row].tolist() for row in range(len(ragged))]


def refused(data: Any, *, error: type[Exception] = DataError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        read_rollouts(data, **options)
    return str(caught.value)


def same(first: RolloutTable, second: RolloutTable) -> None:
    for name in RolloutTable.__slots__:
        ours, theirs = getattr(first, name), getattr(second, name)
        if isinstance(ours, Ragged):
            assert lists(ours) == lists(theirs), name
            assert ours.values.dtype == theirs.values.dtype, name
        elif name == "rewards":
            np.testing.assert_array_equal(ours, theirs)
        else:
            assert (None if ours is None else ours.tolist()) == (None if theirs is None else theirs.tolist()), name


ROWS = [
    one(logprobs=[-0.5, -1.5, 0.0], loss_mask=[1, 0, 1], group="a", policy_version=3, finish_reason="stop", id="x"),
    one(
        response_ids=[7],
        logprobs=[-2.0],
        loss_mask=[1],
        group="a",
        policy_version=3,
        finish_reason="length",
        id="y",
        reward=0.25,
    ),
    one(prompt_ids=[], logprobs=[-0.5] * 3, loss_mask=[1] * 3, group="b", policy_version=4, finish_reason=None, id="z"),
]


# -- the forms ---------------------------------------------------------------------------------------------------------


def test_a_rollout_becomes_a_row_with_everything_it_says() -> None:
    table = read_rollouts(ROWS)
    assert lists(table.prompt_ids) == [[1, 2], [1, 2], []]
    assert lists(table.response_ids) == [[3, 4, 5], [7], [3, 4, 5]]
    assert lists(table.loss_mask) == [[True, False, True], [True], [True, True, True]]
    assert lists(table.logprobs) == [[-0.5, -1.5, 0.0], [-2.0], [-0.5, -0.5, -0.5]]
    assert table.rewards.tolist() == [1.0, 0.25, 1.0]
    assert table.groups.tolist() == ["a", "a", "b"]
    assert table.versions.tolist() == [3, 3, 4]
    assert table.finish_reasons.tolist() == ["stop", "length", None]
    assert table.ids.tolist() == ["x", "y", "z"]
    assert not table.tokenized.any()
    assert (table.values, table.ref_logprobs, table.token_rewards) == (None, None, None)
    assert table.metadata.tolist() == [{}, {}, {}]


@dataclass
class Sample:
    prompt_ids: list[int]
    response_ids: Any
    reward: float
    logprobs: Any = None
    loss_mask: Any = None
    group: str | None = None
    policy_version: int | None = None
    finish_reason: str | None = None
    id: str | None = None


def written(rows: list[dict[str, Any]], kind: str, folder: Path) -> Any:
    """The rows in one of the forms that are read."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    if kind == "rollouts":
        return [Rollout(**row) for row in rows]
    if kind == "dataclasses":
        return [Sample(**row) for row in rows]
    if kind == "generator":
        return (row for row in rows)
    if kind == "arrays":
        return [{k: np.array(v) if isinstance(v, list) and v else v for k, v in row.items()} for row in rows]
    if kind == "columns":
        return {name: [row[name] for row in rows] for name in rows[0]}
    if kind == "table":
        return table
    if kind == "chunks":
        return pa.concat_tables([table.slice(0, 1), table.slice(1)])
    if kind == "batches":
        return table.to_batches(max_chunksize=2)
    if kind == "large lists":
        return table.cast(pa.schema([field.with_type(_large(field.type)) for field in table.schema]))
    path = folder / f"rollouts{kind}"
    if kind.startswith(".jsonl"):
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
    elif kind == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


def _large(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(kind.value_type) if pa.types.is_list(kind) else kind


FORMS = (
    *("rollouts", "dataclasses", "generator", "arrays", "columns", "table", "chunks", "batches", "large lists"),
    *(".jsonl", ".jsonl.gz", ".parquet", ".arrow"),
)


@pytest.mark.parametrize("kind", FORMS)
def test_every_form_gives_the_same_table(kind: str, tmp_path: Path) -> None:
    same(read_rollouts(written(ROWS, kind, tmp_path)), read_rollouts(ROWS))


def test_globs_and_lists_of_paths_are_read_in_order(tmp_path: Path) -> None:
    for number, row in enumerate(ROWS):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(row) + "\n")
    assert read_rollouts(str(tmp_path / "*.jsonl")).ids.tolist() == ["x", "y", "z"]
    assert read_rollouts([tmp_path / "2.jsonl", tmp_path / "0.jsonl"]).ids.tolist() == ["z", "x"]


def test_a_table_of_rollouts_is_returned_as_it_is() -> None:
    table = read_rollouts(ROWS)
    assert read_rollouts(table) is table


ids = st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**63 - 1)), max_size=5)


@given(st.lists(st.tuples(ids, ids), min_size=1, max_size=6), st.sampled_from(["lists", "arrays", "table", "uint64"]))
def test_token_ids_in_are_token_ids_out(rows: list[tuple[list[int], list[int]]], form: str) -> None:
    data: Any = [one(prompt_ids=prompt, response_ids=response) for prompt, response in rows]
    if form in ("arrays", "uint64"):
        dtype = np.int64 if form == "arrays" else np.uint64
        data = [row | {name: np.array(row[name], dtype) for name in ("prompt_ids", "response_ids")} for row in data]
    elif form == "table":
        data = pa.Table.from_pylist(data)
    table = read_rollouts(data, empty_responses="keep")
    assert list(zip(lists(table.prompt_ids), lists(table.response_ids))) == rows
    for column in (table.prompt_ids, table.response_ids):
        fits = not len(column.values) or column.values.max() < 2**31
        assert column.values.dtype == (np.int32 if fits else np.int64)


def test_half_and_single_precision_numbers_keep_their_values() -> None:
    numbers = np.array([-0.1, -2.5, -3.25], np.float16)
    for dtype in (np.float16, np.float32):
        table = read_rollouts([one(logprobs=numbers.astype(dtype), values=numbers.astype(dtype))])
        assert lists(table.logprobs) == [numbers.astype(np.float64).tolist()]
        assert table.values is not None
        assert table.values.values.dtype == np.float32


def test_rollouts_without_a_group_have_one_of_their_own_also_across_calls() -> None:
    first = read_rollouts([one(), one()])
    second = read_rollouts([one(), one()], first_row=2)
    assert len({*first.groups.tolist(), *second.groups.tolist()}) == 4
    assert second.ids.tolist() == ["2", "3"]


def test_columns_that_nobody_knows_are_metadata(tmp_path: Path) -> None:
    rows = [one(metadata={"a": 1}, task="sort", weights=[0.5, 1.5]), one(task="add", answer={"n": 3})]
    table = read_rollouts(rows)
    assert table.metadata.tolist() == [
        {"a": 1, "task": "sort", "weights": [0.5, 1.5]},
        {"task": "add", "answer": {"n": 3}},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_rollouts(path).metadata.tolist()
    assert found[0].pop("weights").tolist() == [0.5, 1.5]
    assert found == [{"a": 1, "task": "sort"}, {"task": "add", "answer": {"n": 3}}]


def test_metadata_of_any_type_in_any_row_is_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [one(answer=3), one(answer="three"), one(answer=[3]), one(metadata={"k": 1}), one(metadata={"k": "v"})]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_rollouts(path).metadata.tolist()
    assert found == [{"answer": 3}, {"answer": "three"}, {"answer": [3]}, {"k": 1}, {"k": "v"}]


def test_columns_says_which_column_is_which_field() -> None:
    rows = [{"q": [1], "a": [2, 3], "score": 0.5, "task": 7}]
    columns = {"prompt_ids": "q", "response_ids": "a", "reward": "score", "group": "task"}
    table = read_rollouts(rows, columns=columns)
    assert (lists(table.prompt_ids), lists(table.response_ids)) == ([[1]], [[2, 3]])
    assert (table.rewards.tolist(), table.groups.tolist()) == ([0.5], [7])


# -- the dialects ------------------------------------------------------------------------------------------------------


def test_trl_rows_and_padded_arrays_give_the_same_tokens() -> None:
    rows = [
        {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "rewards": 1.0, "old_per_token_logps": [-1.0, -2.0, -3.0]},
        {"prompt_ids": [6], "completion_ids": [7], "rewards": 0.0, "old_per_token_logps": [-4.0]},
    ]
    padded = {
        "prompt_ids": np.array([[1, 2], [9, 6]]),
        "prompt_mask": np.array([[1, 1], [0, 1]]),
        "completion_ids": np.array([[3, 4, 5], [7, 9, 9]]),
        "completion_mask": np.array([[1, 1, 1], [1, 0, 0]]),
        "old_per_token_logps": np.array([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]], np.float32),
        "rewards": np.array([1.0, 0.0]),
        "advantages": np.array([0.5, -0.5]),
    }
    table = read_rollouts(padded)
    assert [data["advantages"] for data in table.metadata] == [0.5, -0.5]
    for data in table.metadata:
        data.clear()
    same(table, read_rollouts(rows))


def test_what_trl_counts_of_a_whole_batch_is_no_column() -> None:
    torch = pytest.importorskip("torch")
    batch = {
        "prompt_ids": torch.tensor([[1, 2]]),
        "prompt_mask": torch.tensor([[1, 1]]),
        "completion_ids": torch.tensor([[3, 4]]),
        "completion_mask": torch.tensor([[1, 1]]),
        "rewards": torch.tensor([1.0]),
        "num_items_in_batch": torch.tensor(2),
    }
    assert lists(read_rollouts(batch).response_ids) == [[3, 4]]
    for number in (torch.tensor(2), np.array(2), np.float32(2)):
        with pytest.raises(ConfigError, match="'temperature'"):
            read_rollouts({**batch, "temperature": number})


def test_tool_tokens_of_trl_are_masked() -> None:
    table = read_rollouts(
        {
            "prompt_ids": np.array([[1, 2]]),
            "prompt_mask": np.array([[1, 1]]),
            "completion_ids": np.array([[3, 4, 5, 0]]),
            "completion_mask": np.array([[1, 1, 1, 0]]),
            "tool_mask": np.array([[1, 0, 1, 1]]),
            "rewards": [1.0],
        }
    )
    assert lists(table.loss_mask) == [[True, False, True]]


def verl_batch() -> dict[str, Any]:
    return {
        "prompts": np.array([[0, 1, 2], [0, 0, 3]]),
        "responses": np.array([[4, 5, 6, 0], [7, 0, 0, 0]]),
        "input_ids": np.zeros((2, 7), int),
        "position_ids": np.zeros((2, 7), int),
        "attention_mask": np.array([[0, 1, 1, 1, 1, 1, 0], [0, 0, 1, 1, 0, 0, 0]]),
        "response_mask": np.array([[1, 0, 1, 0], [1, 0, 0, 0]]),
        "old_log_probs": np.array([[-1, -2, -3, 9], [-4, 9, 9, 9]], np.float32),
        "ref_log_prob": np.array([[-5, -6, -7, 9], [-8, 9, 9, 9]], np.float32),
        "values": np.array([[0.5, 0.25, 0.0, 9], [1.0, 9, 9, 9]], np.float32),
        "token_level_rewards": np.array([[0, 0, 1, 0], [2, 0, 0, 0]], np.float32),
        "uid": np.array(["p", "q"], object),
        "data_source": np.array(["gsm8k", "gsm8k"], object),
    }


def test_verls_padded_batch_is_cut_by_its_attention_mask() -> None:
    table = read_rollouts(verl_batch())
    assert lists(table.prompt_ids) == [[1, 2], [3]]
    assert lists(table.response_ids) == [[4, 5, 6], [7]]
    assert lists(table.loss_mask) == [[True, False, True], [True]]
    assert lists(table.logprobs) == [[-1, -2, -3], [-4]]
    assert lists(table.ref_logprobs) == [[-5, -6, -7], [-8]]
    assert lists(table.values) == [[0.5, 0.25, 0.0], [1.0]]
    assert lists(table.token_rewards) == [[0, 0, 1], [2]]
    assert table.groups.tolist() == ["p", "q"]
    assert table.metadata.tolist() == [{"data_source": "gsm8k"}] * 2


def test_a_data_proto_is_read_by_its_two_parts() -> None:
    @dataclass
    class Proto:
        batch: dict[str, Any]
        non_tensor_batch: dict[str, Any]

    whole = verl_batch()
    named = {name: whole.pop(name) for name in ("uid", "data_source")}
    same(read_rollouts(Proto(whole, named)), read_rollouts(verl_batch()))


def test_a_padded_batch_that_does_not_say_what_is_padding_is_refused() -> None:
    batch = verl_batch()
    del batch["attention_mask"]
    assert "padding" in refused(batch)


@pytest.mark.parametrize("covered", [6, 5, 3])
def test_openrlhf_sequences_are_cut_where_the_actions_begin(covered: int) -> None:
    # Two sequences of 6: the mask covers all of it, all but the first token, or the last three.
    actions = np.array([[0, 0, 0, 1, 0, 1], [0, 0, 0, 1, 1, 0]])[:, -covered:]
    logprobs = -np.arange(12, dtype=np.float32).reshape(2, 6)[:, -covered:]
    table = read_rollouts(
        {
            "sequences": np.array([[0, 1, 2, 3, 4, 5], [0, 0, 6, 7, 8, 0]]),
            "attention_mask": np.array([[0, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 0]]),
            "action_mask": actions,
            "action_log_probs": logprobs,
            "base_action_log_probs": logprobs,
            "rewards": np.array([1.0, 2.0]),
        }
    )
    assert lists(table.prompt_ids) == [[1, 2], [6]]
    assert lists(table.response_ids) == [[3, 4, 5], [7, 8]]
    assert lists(table.loss_mask) == [[True, False, True], [True, True]]
    assert lists(table.logprobs) == lists(table.ref_logprobs) == [[-3, -4, -5], [-9, -10]]
    assert table.rewards.tolist() == [1.0, 2.0]


def test_openrlhf_rewards_of_tokens_are_token_rewards() -> None:
    row = {"sequences": [1, 2, 3], "action_mask": [1, 1], "rewards": [0.0, 0.5]}
    table = read_rollouts([row])
    assert lists(table.token_rewards) == [[0.0, 0.5]]
    assert np.isnan(table.rewards).all()


def test_slime_samples_are_cut_by_their_response_length() -> None:
    class Status(Enum):
        COMPLETED = "completed"

    @dataclass
    class SlimeSample:
        tokens: list[int]
        response_length: int
        reward: float
        loss_mask: list[int]
        rollout_log_probs: list[float]
        group_index: int
        index: int
        prompt: str
        response: str
        status: Status

    sample = SlimeSample([1, 2, 3, 4, 5], 3, 1.0, [1, 0, 1], [-1.0, 0.0, -2.0], 4, 17, "ab", "cde", Status.COMPLETED)
    table = read_rollouts([sample])
    assert (lists(table.prompt_ids), lists(table.response_ids)) == ([[1, 2]], [[3, 4, 5]])
    assert lists(table.loss_mask) == [[True, False, True]]
    assert lists(table.logprobs) == [[-1.0, 0.0, -2.0]]
    assert (table.groups.tolist(), table.ids.tolist()) == ([4], ["17"])
    assert table.finish_reasons.tolist() == ["completed"]
    assert not table.tokenized.any()


def test_what_inference_engines_write_is_read() -> None:
    row = {
        "prompt_token_ids": [1],
        "output_ids": [2, 3],
        "output_token_logprobs": [-0.5, -1.0],
        "finish_reason": {"type": "stop", "matched": 3},
        "text": "hi",
        "reward": True,
    }
    table = read_rollouts([row])
    assert (lists(table.prompt_ids), lists(table.response_ids), lists(table.logprobs)) == (
        [[1]],
        [[2, 3]],
        [[-0.5, -1]],
    )
    assert (table.finish_reasons.tolist(), table.rewards.tolist()) == (["stop"], [1.0])


def test_two_dialects_at_once_are_told_apart_by_columns() -> None:
    row = {"prompt_ids": [1], "response_ids": [2], "completion_ids": [3], "reward": 1.0}
    facts = refused([row], error=SchemaError)
    assert "'response_ids'" in facts
    assert "'completion_ids'" in facts
    assert "columns=" in facts
    assert lists(read_rollouts([row], columns={"response_ids": "completion_ids"}).response_ids) == [[3]]


@pytest.mark.parametrize(
    ("extra", "meant"),
    [
        ({"log_probs": [0.0] * 3}, "ref_logprobs|logprobs"),
        ({"logprob": [0.0] * 3}, "logprobs"),
        ({"Values": [0.0] * 3}, "values"),
        ({"old_log_probs": [0.0] * 3}, "logprobs"),
        ({"response_mask": [1] * 3}, "loss_mask"),
        ({"action_mask": [1] * 3}, "loss_mask"),
        ({"uid": "a"}, "group"),
        ({"policy_versions": 3}, "policy_version"),
    ],
)
def test_a_name_that_is_nearly_known_is_refused_until_somebody_says_what_it_is(extra: Any, meant: str) -> None:
    name = next(iter(extra))
    facts = refused([one(**extra)], error=SchemaError)
    assert repr(name) in facts
    assert any(f"columns={{{field!r}" in facts for field in meant.split("|"))
    assert read_rollouts([one(**extra)], columns={"metadata": [name]}).metadata.tolist() == [extra]
    read_rollouts([one(**extra)], columns={meant.split("|")[-1]: name})


def test_a_field_or_a_column_that_is_not_there_is_refused() -> None:
    assert "'reward'" in refused([one()], columns={"rewrd": "reward"}, error=ConfigError)
    assert "'reward'" in refused([one()], columns={"reward": "rewad"}, error=SchemaError)
    assert "'response_ids'" in refused([{"prompt_ids": [1], "respons_ids": [2]}], error=SchemaError)


# -- turns -------------------------------------------------------------------------------------------------------------

TURNS = [
    {"role": "user", "ids": [1, 2]},
    {"role": "assistant", "ids": [3, 4], "logprobs": [-1.0, -2.0]},
    {"role": "tool", "ids": [5, 6, 7]},
    {"role": "assistant", "ids": [8], "logprobs": [-3.0]},
]


@pytest.mark.parametrize("form", ["rows", "table", "jsonl"])
def test_turns_become_a_response_with_the_tools_tokens_masked(form: str, tmp_path: Path) -> None:
    rows: Any = [{"turns": TURNS, "reward": 1.0}, {"turns": TURNS[:2], "reward": 0.0}]
    if form == "table":
        rows = pa.Table.from_pylist(rows)
    elif form == "jsonl":
        path = tmp_path / "a.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = path
    table = read_rollouts(rows)
    assert lists(table.prompt_ids) == [[1, 2], [1, 2]]
    assert lists(table.response_ids) == [[3, 4, 5, 6, 7, 8], [3, 4]]
    assert lists(table.loss_mask) == [[True, True, False, False, False, True], [True, True]]
    assert lists(table.logprobs) == [[-1, -2, 0, 0, 0, -3], [-1, -2]]


def test_with_prompt_ids_all_turns_are_the_response() -> None:
    table = read_rollouts([{"prompt_ids": [9], "turns": TURNS[1:3], "reward": 1.0}])
    assert (lists(table.prompt_ids), lists(table.response_ids)) == ([[9]], [[3, 4, 5, 6, 7]])


def test_a_turns_own_mask_has_the_last_word() -> None:
    turns = [{"role": "user", "ids": [1]}, {"role": "assistant", "ids": [2, 3], "loss_mask": [0, 1]}]
    assert lists(read_rollouts([{"turns": turns, "reward": 1.0}]).loss_mask) == [[False, True]]


@pytest.mark.parametrize(
    ("turn", "facts"),
    [
        ({"role": "assistant", "ids": [3], "logprobs": [0.0, 0.0]}, "logprobs"),
        ({"role": "assistant", "content": "text"}, "'assistant'"),
        ({"role": "assistant", "ids": [1.5]}, "ids"),
        ({"ids": [1]}, "role"),
    ],
)
def test_a_bad_turn_is_told_with_its_number(turn: dict[str, Any], facts: str) -> None:
    good = {"turns": TURNS, "reward": 1.0}
    message = refused([good, {"turns": [TURNS[0], turn], "reward": 1.0, "id": "r"}])
    assert facts in message
    assert re.search(r"row 1\b.*'r'", message)


@pytest.mark.parametrize("form", ["rows", "arrow"])
@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("log_probs", [-0.1, -0.2], "logprobs"),
        ("old_log_probs", [-0.1, -0.2], "logprobs"),
        ("mask", [1, 0], "loss_mask"),
        ("response_mask", [1, 0], "loss_mask"),
        ("reward", 1.0, "token_rewards"),
        ("Role", "assistant", None),
    ],
)
def test_a_key_of_a_turn_that_is_nearly_known_is_refused(key: str, value: Any, meant: str | None, form: str) -> None:
    turns = [{"role": "user", "ids": [1]}, {"role": "assistant", "ids": [2, 3], "content": "x", key: value}]
    rows = [{"turns": turns, "reward": 1.0}]
    data = rows if form == "rows" else pa.Table.from_pylist(rows)
    if meant is None:  # there is a role beside it
        assert lists(read_rollouts(data).response_ids) == [[2, 3]]
    else:
        assert f"{key!r}" in refused(data)


@pytest.mark.parametrize("role", ["Assistant", "solver"])
def test_turns_in_which_nobody_is_the_policy_say_who_was_seen_and_who_is_known(role: str) -> None:
    turns = [{"role": "user", "ids": [1]}, {"role": role, "ids": [2]}]
    message = refused([{"turns": turns, "reward": 1.0}])
    assert f"'user', {role!r}" in message
    beside = [*turns, {"role": "assistant", "ids": [3]}]
    if role == "solver":  # somebody else
        assert lists(read_rollouts([{"turns": beside, "reward": 1.0}]).prompt_ids) == [[1, 2]]
    else:
        assert "rename the role" in refused([{"turns": beside, "reward": 1.0}])
    assert "response"


def test_a_turn_of_the_policy_without_logprobs_is_refused() -> None:
    turns = [*TURNS, {"role": "assistant", "ids": [1]}]
    assert "logprobs" in refused([{"turns": turns, "reward": 1.0}])


# -- text --------------------------------------------------------------------------------------------------------------


def test_text_is_tokenised_where_there_are_no_ids_and_the_table_says_so() -> None:
    rows = [
        {"prompt": "ab", "response": "cd<eos>", "reward": 1.0},
        {"prompt_ids": [1], "response_ids": [2], "reward": 0.0, "prompt": "unused", "response": "unused"},
        {"prompt": "ef", "response_ids": [9], "reward": 0.0},
    ]
    table = read_rollouts(rows, tokenizer=TOKENIZER)
    eos = TOKENIZER.special.eos
    assert lists(table.prompt_ids) == [list(b"ab"), [1], list(b"ef")]
    assert lists(table.response_ids) == [[*b"cd", eos], [2], [9]]
    assert table.tokenized.tolist() == [True, False, True]


def test_bos_and_eos_are_added_when_asked_for_and_not_twice() -> None:
    rows = [
        {"prompt": "a", "response": "b", "reward": 1.0, "finish_reason": "stop"},
        {"prompt": "<bos>a", "response": "b<eos>", "reward": 1.0, "finish_reason": "stop"},
        {"prompt": "", "response": "b", "reward": 1.0, "finish_reason": "length"},
    ]
    table = read_rollouts(rows, tokenizer=TOKENIZER, text=TextRule(add_bos=True, add_eos=True))
    bos, eos = TOKENIZER.special.bos, TOKENIZER.special.eos
    assert lists(table.prompt_ids) == [[bos, *b"a"], [bos, *b"a"], [bos]]
    assert lists(table.response_ids) == [[*b"b", eos], [*b"b", eos], list(b"b")]


CHAT = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "tool", "content": "three"},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize("form", ["rows", "table"])
def test_messages_are_written_by_the_template_and_masked_by_who_spoke(form: str) -> None:
    rows: Any = [{"messages": CHAT, "reward": 1.0}, {"messages": CHAT[:2], "reward": 0.0}]
    data = pa.Table.from_pylist(rows) if form == "table" else rows
    table = read_rollouts(data, tokenizer=TOKENIZER, text=TextRule(chat_template="chatml"))
    prompt = TOKENIZER.decode(table.prompt_ids[0])
    assert prompt == "<bos><|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    response, mask = table.response_ids[0], table.loss_mask[0]
    assert TOKENIZER.decode(response[mask]) == "two<|im_end|>four<|im_end|>"
    assert "three" in TOKENIZER.decode(response[~mask])
    assert response[-1] == IM_END
    assert TOKENIZER.decode(table.response_ids[1]) == "two<|im_end|>"
    assert table.tokenized.all()


def test_a_prompt_of_messages_is_context_and_the_response_is_what_is_learned() -> None:
    rows = [
        {"prompt": CHAT[:3], "response": "four", "reward": 1.0},
        {"prompt": CHAT[:3], "response_ids": [5, 6], "reward": 1.0},
    ]
    table = read_rollouts(rows, tokenizer=TOKENIZER, text=TextRule(chat_template="chatml"))
    assert lists(table.prompt_ids)[0] == lists(table.prompt_ids)[1]
    assert TOKENIZER.decode(table.prompt_ids[0]).endswith("three<|im_end|>\n<|im_start|>assistant\n")
    assert TOKENIZER.decode(table.response_ids[0]) == "four<|im_end|>"
    assert lists(table.response_ids)[1] == [5, 6]
    assert table.loss_mask.values.all()


def test_a_bad_conversation_is_told_with_its_row() -> None:
    rows = [{"messages": CHAT, "reward": 1.0}, {"messages": [{"role": "nobody", "content": "x"}], "reward": 1.0}]
    facts = refused(rows, tokenizer=TOKENIZER, text=TextRule(chat_template="chatml"))
    assert facts.startswith("row 1: messages: ")
    assert "nobody" in facts


# -- rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reward", [None, float("nan")])
def test_missing_rewards_go_by_the_rule(reward: float | None) -> None:
    rows = [one(id="a"), one(reward=reward, id="b")]
    facts = refused(rows)
    assert re.search(r"row 1\b.*'b'", facts)
    assert "missing_rewards=" in facts
    counts: Counter[str] = Counter()
    zero = read_rollouts(rows, missing_rewards="zero", counts=counts)
    assert zero.rewards.tolist() == [1.0, 0.0]
    assert counts == {"reward missing, set to 0": 1}
    counts.clear()
    assert read_rollouts(rows, missing_rewards="drop", counts=counts).ids.tolist() == ["a"]
    assert counts == {"missing reward": 1}
    counts.clear()
    kept = read_rollouts(rows, missing_rewards="keep", counts=counts)
    assert np.isnan(kept.rewards).tolist() == [False, True]
    assert not counts


def test_rewards_of_tokens_are_a_reward() -> None:
    table = read_rollouts([{"prompt_ids": [1], "response_ids": [2, 3], "token_rewards": [0.0, 1.0]}])
    assert np.isnan(table.rewards).all()
    assert lists(table.token_rewards) == [[0.0, 1.0]]


def test_no_reward_at_all_is_an_error_that_says_how_to_go_on() -> None:
    rows = [{"prompt_ids": [1], "response_ids": [2]}]
    assert "missing_rewards=" in refused(rows)
    assert np.isnan(read_rollouts(rows, missing_rewards="keep").rewards).all()


@pytest.mark.parametrize(
    ("option", "bad", "reason"),
    [
        ("empty_responses", {"response_ids": []}, "empty response"),
        ("all_masked", {"loss_mask": [0, 0, 0]}, "all masked"),
    ],
)
def test_rows_with_nothing_to_learn_go_by_the_rule(option: str, bad: dict[str, Any], reason: str) -> None:
    full = {"loss_mask": [1, 1, 1]} if "loss_mask" in bad else {}
    rows = [one(id="a", **full), one(id="b", **bad), one(id="c", **full)]
    facts = refused(rows)
    assert re.search(r"row 1\b.*'b'", facts)
    assert f"{option}=" in facts
    counts: Counter[str] = Counter()
    assert read_rollouts(rows, counts=counts, **{option: "drop"}).ids.tolist() == ["a", "c"]
    assert counts == {reason: 1}
    assert read_rollouts(rows, **{option: "keep"}).ids.tolist() == ["a", "b", "c"]


def test_dropped_rows_that_nobody_counts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    read_rollouts([one(), one(reward=None)], missing_rewards="drop")
    assert re.search(r"2 rollouts.*\b1\b", caplog.text)


def test_an_unknown_rule_is_refused() -> None:
    assert "'error'" in refused([one()], missing_rewards="eror", error=ConfigError)
    assert "all_masked" in refused([one()], all_masked="zero", error=ConfigError)


@pytest.mark.parametrize("nothing", [float("nan"), None, float("inf")])
def test_masked_tokens_need_no_numbers_and_others_do(nothing: Any) -> None:
    counts: Counter[str] = Counter()
    table = read_rollouts([one(logprobs=[-1.0, nothing, -2.0], loss_mask=[1, 0, 1])], counts=counts)
    assert lists(table.logprobs) == [[-1.0, 0.0, -2.0]]
    assert counts == {"logprobs of masked tokens set to 0": 1}
    assert "logprobs has" in refused([one(logprobs=[-1.0, nothing, -2.0])])


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"logprobs": [0.0] * 2}, "logprobs"),
        ({"ref_logprobs": [0.0] * 4}, "ref_logprobs"),
        ({"values": [0.0]}, "values"),
        ({"token_rewards": [0.0]}, "token_rewards"),
        ({"loss_mask": [1]}, "loss_mask"),
        ({"loss_mask": [1, 2, 1]}, "loss_mask"),
        ({"response_ids": [1, -2, 3]}, "response_ids"),
        ({"response_ids": [1.0, 2.0, 3.0]}, "response_ids"),
        ({"response_ids": [1, None, 3]}, "response_ids"),
        ({"response_ids": [[1, 2, 3]]}, "response_ids"),
        ({"response_ids": ["a"]}, "response_ids"),
        ({"response_ids": np.zeros((1, 3), int)}, "response_ids"),
        ({"prompt_ids": 7}, "prompt_ids"),
        ({"prompt_ids": None}, "no prompt"),
        ({"response_ids": None}, "response"),
        ({"reward": [1.0, 2.0]}, "reward"),
        ({"reward": np.array([1.0])}, "reward"),
        ({"reward": "high"}, "reward"),
        ({"reward": float("inf")}, "reward"),
        ({"policy_version": -1}, "policy_version"),
        ({"policy_version": 1.5}, "policy_version"),
        ({"policy_version": "new"}, "policy_version"),
        ({"group": 1.5}, "group"),
        ({"metadata": "not json"}, "metadata"),
    ],
)
def test_a_bad_rollout_is_told_with_its_row_and_its_id(changes: dict[str, Any], facts: str) -> None:
    name = next(iter(changes))
    good = {"loss_mask": [1, 1, 1]} if name == "loss_mask" else {}
    good |= {name: [0.0] * 3} if name in ("logprobs", "ref_logprobs", "values", "token_rewards") else {}
    message = refused([one(id="a", **good), one(id="b", **changes), one(id="c", **good)])
    assert message.startswith("row 1 (id 'b'): ")
    assert facts in message


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"logprobs": [0.0] * 2}, "logprobs"),
        ({"response_ids": [1, -2, 3]}, "response_ids"),
        ({"response_ids": [1, None, 3]}, "response_ids"),
        ({"policy_version": -1}, "policy_version"),
        ({"response_ids": []}, "response"),
        ({"reward": None}, "reward"),
    ],
)
@pytest.mark.parametrize("kind", [".jsonl", ".parquet"])
def test_a_bad_row_of_a_file_is_told_with_the_file(
    changes: dict[str, Any], facts: str, kind: str, tmp_path: Path
) -> None:
    good = {"logprobs": [0.0] * 3} if "logprobs" in changes else {}
    path = written([one(id="a", **good), one(id="b", **good), one(id="c", **changes)], kind, tmp_path)
    with pytest.raises(DataError) as caught:
        read_rollouts(path)
    assert str(path) in str(caught.value)
    assert (caught.value.file, caught.value.row) == (str(path), 2)


def test_floats_where_ids_should_be_are_refused_in_files_too(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(one()) + "\n" + json.dumps(one(response_ids=[1.5])) + "\n")
    assert "response_ids" in refused(path)


def test_a_reward_of_another_shape_in_json_lines_is_told_with_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(one()) + "\n" + json.dumps(one(reward=[1.0])) + "\n")
    assert f"{path}, row 1" in refused(path)


def test_a_column_that_some_rollouts_lack_is_refused() -> None:
    facts = refused([one(logprobs=[0.0] * 3), one(), one(logprobs=[0.0] * 3)])
    assert "row 1" in facts


def test_ids_beyond_the_vocabulary_are_refused_where_there_is_a_tokenizer() -> None:
    rows = [one(response_ids=[3, TOKENIZER.vocab_size])]
    assert read_rollouts(rows).response_ids.values.tolist() == [3, TOKENIZER.vocab_size]
    assert str(TOKENIZER.vocab_size) in refused(rows, tokenizer=TOKENIZER)


def test_ids_of_more_than_63_bits_are_refused() -> None:
    assert re.search(r"2\*\*63", refused([one(response_ids=np.array([2**63 + 1], np.uint64))]))


def test_rollouts_without_a_loss_mask_are_the_policys_own_among_others_with_one() -> None:
    table = read_rollouts([one(loss_mask=[0, 1, 0]), one(), one(loss_mask=[1, 1, 0])])
    assert lists(table.loss_mask) == [[False, True, False], [True] * 3, [True, True, False]]


def test_text_without_a_tokenizer_is_refused() -> None:
    assert "pass tokenizer=" in refused([{"prompt": "a", "response": "b", "reward": 1.0}])


def test_no_rows_at_all_are_refused() -> None:
    assert "no rollouts" in refused([])
    assert "no rollouts" in refused(pa.table({"response_ids": pa.array([], pa.list_(pa.int64()))}))


@pytest.mark.parametrize("data", [7, None, Rollout(response_ids=[1]), one()])
def test_what_is_no_collection_of_rollouts_is_refused(data: Any) -> None:
    with pytest.raises((ConfigError, SchemaError), match="rollout"):
        read_rollouts(data)


def test_a_row_that_is_no_rollout_is_refused() -> None:
    assert "row 1" in refused([one(), 7])


def test_a_response_length_beyond_the_tokens_is_refused() -> None:
    rows = [{"tokens": [1, 2], "response_length": 3, "reward": 1.0}]
    assert "response_length" in refused(rows)


def test_problems_are_told_together_and_the_rest_counted() -> None:
    rows = [one(response_ids=[-1]) for _ in range(5)]
    rows += [one(reward=None), one(policy_version=-3), one(response_ids=[]), one(reward="x")]
    facts = refused(rows)
    assert "problems" in facts
    for part in ("row 0:", "and 2 more rows like it", "row 5:", "row 6:", "row 7:", "row 8:"):
        assert part in facts
    assert "row 3" not in facts
    many = [one(**{name: [0.0]}) for name in ("logprobs", "ref_logprobs", "values", "token_rewards") for _ in range(4)]
    many += [one(response_ids=[-1]), one(reward="x")]
    assert "more" in refused(many)
    assert refused(many).count("\n") <= 11


masks = st.lists(st.booleans(), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.integers(0, 4), masks, st.integers(0, 3)), min_size=1, max_size=5))
def test_padding_never_changes_a_rollout(rows: list[tuple[int, list[bool], int]]) -> None:
    ragged = [
        one(
            prompt_ids=list(range(10, 10 + prompt)),
            response_ids=list(range(20, 20 + len(mask))),
            logprobs=[-float(place) for place in range(len(mask))],
            loss_mask=mask,
        )
        for prompt, mask, _ in rows
    ]
    left = max(prompt for prompt, _, _ in rows) + 2
    right = max(len(mask) for _, mask, _ in rows) + rows[0][2]

    def before(cells: list[Any]) -> list[Any]:
        return [0] * (left - len(cells)) + cells

    def behind(cells: list[Any]) -> list[Any]:
        return cells + [0] * (right - len(cells))

    padded = {
        "prompts": np.array([before(row["prompt_ids"]) for row in ragged]),
        "responses": np.array([behind(row["response_ids"]) for row in ragged]),
        "attention_mask": np.array(
            [before([1] * len(row["prompt_ids"])) + behind([1] * len(row["response_ids"])) for row in ragged]
        ),
        "response_mask": np.array([behind(row["loss_mask"]) for row in ragged], int),
        "old_log_probs": np.array([behind(row["logprobs"]) for row in ragged]),
        "reward": np.ones(len(rows)),
    }
    same(read_rollouts(padded, all_masked="keep"), read_rollouts(ragged, all_masked="keep"))


@pytest.mark.parametrize("largest", [5, 2**31 - 1, 2**31, 2**40])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint32])
def test_ids_of_arrays_are_as_narrow_as_all_of_them_allow(largest: int, dtype: Any) -> None:
    if largest > np.iinfo(dtype).max:
        pytest.skip("not an id of this type")
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 9, size).astype(dtype) for size in (1, 3, 40_000, 2, 70_000, 1)]
    rows[3][1] = largest
    table = read_rollouts([{"prompt_ids": [1], "response_ids": row, "reward": 0.0} for row in rows])
    assert table.response_ids.values.dtype == (np.int32 if largest < 2**31 else np.int64)
    assert table.response_ids.lengths.tolist() == [*map(len, rows)]
    assert all(np.array_equal(found, row) for found, row in zip(table.response_ids, rows))
    rows[4] = rows[4].astype(np.int64)
    rows[4][60_000] = -1
    with pytest.raises(DataError, match="-1 at token 60000"):
        read_rollouts([{"prompt_ids": [1], "response_ids": row, "reward": 0.0} for row in rows])
