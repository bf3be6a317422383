"""Rows of a table as the arrays of a batch: every token and every number where it belongs, and none changed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError
from penstock.rl.collate import RolloutForm, assemble, truncate
from penstock.rl.rollout import RolloutTable
from rollout_tables import TOKENWISE, make_table, objects, tables

NAMES = TOKENWISE | {"token_rewards": "token_scores"}


def forms() -> st.SearchStrategy[RolloutForm]:
    return st.builds(
        RolloutForm,
        padding=st.sampled_from(["sides", "free"]),
        pad_id=st.sampled_from([0, 7]),
        pad_to_multiple_of=st.sampled_from([1, 2, 8]),
        integer=st.sampled_from([np.int64, np.int32]),
    )


def pieces(arrays: dict[str, Any], metadata: dict[str, Any]) -> list[dict[str, Any]]:
    """Each rollout taken out of a batch again, by its lengths alone."""
    found, at = [], 0
    free = metadata["layout"].form.padding == "free"
    for row, (prompt, response) in enumerate(zip(metadata["prompt_length"], metadata["response_length"])):
        start = at if free else int(metadata["layout"].prompt_width - prompt)
        line = 0 if free else row
        whole = slice(start, start + prompt + response)
        own = slice(start + prompt, start + prompt + response) if free else slice(0, response)
        tokenwise = ("input_ids", "labels", "loss_mask", "position_ids")
        taken = {name: arrays[name][line, whole] for name in tokenwise}
        found.append(taken | {name: metadata[name][line, own] for name in metadata["layout"].per_token})
        at += prompt + response
    return found


@given(table=tables(), form=forms(), data=st.data())
def test_unpadding_gives_back_every_rollout_bit_for_bit(
    table: RolloutTable, form: RolloutForm, data: st.DataObject
) -> None:
    rows = data.draw(st.permutations(range(len(table))).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n])))
    advantages = Ragged(
        np.random.default_rng(1).normal(size=len(table.response_ids.values)), table.response_ids.offsets
    )
    arrays, metadata = assemble(table, form, rows=rows, per_token={"advantages": advantages})
    assert [metadata["ids"][at] for at in range(len(rows))] == [f"r{row}" for row in rows]
    assert metadata["rewards"].tolist() == table.rewards[rows].tolist()
    for row, piece in zip(rows, pieces(arrays, metadata), strict=True):
        prompt, response, mask = table.prompt_ids[row], table.response_ids[row], table.loss_mask[row]
        assert piece["input_ids"].tolist() == [*prompt, *response]
        assert piece["position_ids"].tolist() == list(range(len(prompt) + len(response)))
        labels = [-100] * len(prompt) + [int(token) if on else -100 for token, on in zip(response, mask)]
        assert piece["labels"].tolist() == labels
        assert piece["loss_mask"].tolist() == [label != -100 for label in labels]
        assert piece["response_mask"].tolist() == mask.tolist()
        assert piece["advantages"].tobytes() == advantages[row].astype(np.float32).tobytes()
        for name, facts in NAMES.items():
            column = getattr(table, name)
            assert (column is None) == (facts not in metadata)
            if column is not None:
                assert piece[facts].tobytes() == column[row].tobytes()


@given(table=tables(), form=forms())
def test_what_is_not_a_token_says_so(table: RolloutTable, form: RolloutForm) -> None:
    arrays, metadata = assemble(table, form)
    tokens = int(table.lengths.sum())
    used = np.zeros(arrays["input_ids"].size, bool)
    for row in range(len(table)):
        prompt, length = len(table.prompt_ids[row]), int(table.lengths[row])
        at = int(table.lengths[:row].sum())
        if form.padding == "sides":
            at = row * arrays["input_ids"].shape[1] + metadata["layout"].prompt_width - prompt
        used[at : at + length] = True
    used = used.reshape(arrays["input_ids"].shape)
    assert used.sum() == tokens
    assert (arrays["input_ids"][~used] == form.pad_id).all()
    assert (arrays["labels"][~used] == -100).all()
    assert not arrays["loss_mask"][~used].any()
    for name in metadata["layout"].per_token:
        learnable = sum(len(table.response_ids[row]) for row in range(len(table)))
        assert np.count_nonzero(metadata[name]) <= learnable
        assert metadata[name].shape[0] == len(arrays["input_ids"])
    assert {arrays[name].dtype for name in ("input_ids", "labels", "position_ids")} == {np.dtype(form.integer)}
    assert arrays["num_items_in_batch"] == int(table.loss_mask.values.sum())
    if form.padding == "sides":
        assert (arrays["attention_mask"] == used).all()
        assert (arrays["position_ids"][~used] == 0).all()
        assert all(width % form.pad_to_multiple_of == 0 for width in (metadata["layout"].prompt_width, used.shape[1]))
        assert metadata["response_mask"].shape[1] == used.shape[1] - metadata["layout"].prompt_width
    else:
        assert "attention_mask" not in arrays
        ends = np.cumsum(table.lengths).tolist()
        rest = [] if ends[-1] == used.shape[1] else [used.shape[1]]
        assert arrays["cu_seqlens"].tolist() == [0, *ends, *rest]
        assert arrays["cu_seqlens"].dtype == np.int32
        assert arrays["max_seqlen"] == np.diff(arrays["cu_seqlens"]).max()
        assert (arrays["document_ids"] > 0).tolist() == used.tolist()
        assert arrays["position_ids"][0, ends[-1] :].tolist() == list(range(used.shape[1] - ends[-1]))


@given(table=tables())
def test_padding_free_holds_the_same_numbers_as_padded(table: RolloutTable) -> None:
    padded, free = (pieces(*assemble(table, RolloutForm(padding=padding))) for padding in ("sides", "free"))
    for one, other in zip(padded, free, strict=True):
        assert one.keys() == other.keys()
        assert all(one[name].tobytes() == other[name].tobytes() for name in one)


@given(table=tables(), limits=st.tuples(st.integers(1, 6), st.integers(1, 6)), side=st.sampled_from(["left", "right"]))
def test_truncation_cuts_where_it_was_told_to_and_counts(
    table: RolloutTable, limits: tuple[int, int], side: Any
) -> None:
    form = RolloutForm(
        max_prompt_length=limits[0],
        max_response_length=limits[1],
        prompt_truncation=side,
        response_truncation="right",
    )
    arrays, metadata = assemble(table, form)
    for row, piece in enumerate(pieces(arrays, metadata)):
        prompt, response = table.prompt_ids[row], table.response_ids[row]
        kept = prompt[: limits[0]] if side == "right" else prompt[-limits[0] :]
        assert piece["input_ids"].tolist() == [*kept, *response[: limits[1]]]
        assert piece["response_mask"].tolist() == table.loss_mask[row][: limits[1]].tolist()
        lost = max(0, len(prompt) - limits[0]) + max(0, len(response) - limits[1])
        assert metadata["truncated_tokens"][row] == lost
    before, counted = truncate(table, form)
    assert counted.tolist() == metadata["truncated_tokens"].tolist()
    again = assemble(before, form)
    assert not again[1].pop("truncated_tokens").any()
    assert (again[0]["input_ids"] == arrays["input_ids"]).all()
    for name in set(metadata["layout"].per_token) - {"token_scores"}:
        assert again[1][name].tobytes() == metadata[name].tobytes()
    if table.token_rewards is not None:
        wanted = [table.token_rewards[row].sum() for row in range(len(table))]
        assert again[1]["token_scores"].sum(1) == pytest.approx(wanted, abs=1e-5)
        changed = (again[1]["token_scores"] != metadata["token_scores"]).sum(1)
        assert (changed <= (table.response_ids.lengths > limits[1])).all()


def test_fixed_widths_are_the_same_in_every_batch() -> None:
    form = RolloutForm(max_prompt_length=5, max_response_length=9, fixed=True, pad_to_multiple_of=4)
    for lengths in ([(1, 1)], [(5, 9), (2, 3)]):
        arrays, metadata = assemble(make_table(lengths), form)
        assert arrays["input_ids"].shape == (len(lengths), 8 + 12)
        assert metadata["response_mask"].shape == (len(lengths), 12)


def test_only_the_fields_that_were_asked_for_are_made() -> None:
    for padding in ("sides", "free"):
        arrays, _ = assemble(make_table([(2, 3)]), RolloutForm(padding=padding, fields=frozenset({"input_ids"})))
        assert list(arrays) == ["input_ids"]


def test_the_tokens_to_learn_may_be_those_of_the_whole_step() -> None:
    arrays, _ = assemble(make_table([(2, 3)]), RolloutForm(), num_items_in_batch=99)
    assert arrays["num_items_in_batch"] == 99


def test_without_padding_denominators_are_where_the_loss_is() -> None:
    form = RolloutForm(padding="free", pad_to_multiple_of=4)
    table, divisors = make_table([(1, 2), (2, 0), (2, 3)]), {"denominators": np.array([5.0, 6.0, 7.0])}
    _, metadata = assemble(table, form, rows=[2, 1, 0], per_row=divisors)
    assert metadata["denominators"].tolist() == [[1, 1, 7, 7, 7, 1, 1, 1, 5, 5, 1, 1]]
    assert "denominators" in metadata["layout"].per_token
    assert "denominators" not in metadata["layout"].per_row


def test_columns_per_rollout_come_along_in_the_order_of_the_rows() -> None:
    table = make_table([(1, 1), (1, 2), (1, 3)])
    table = replace(table, metadata=objects([{"task": "a"}, {}, {"task": "c"}]))
    given: dict[str, Any] = {
        "denominators": np.array([1.5, 2.5, 3.5]),
        "stale": [True, False, True],
        "sources": ["x", "y", "z"],
    }
    _, metadata = assemble(table, RolloutForm(), rows=[2, 0], per_row=given)
    assert metadata["denominators"].tolist() == [3.5, 1.5]
    assert metadata["denominators"].dtype == np.float32
    assert metadata["stale"].tolist() == [True, True]
    assert metadata["sources"] == ["z", "x"]
    assert metadata["rollout_metadata"] == [{"task": "c"}, {"task": "a"}]
    assert metadata["response_length"].tolist() == [3, 1]
    assert set(given) < set(metadata["layout"].per_row)


def test_computed_token_rewards_do_not_hide_those_that_were_given() -> None:
    table = make_table([(1, 2)], columns=["token_rewards"])
    computed = Ragged.of([[0.25, 0.5]], np.float32)
    _, metadata = assemble(table, RolloutForm(), per_token={"token_rewards": computed})
    assert metadata["token_rewards"].tolist() == [[0.25, 0.5]]
    assert table.token_rewards is not None
    assert metadata["token_scores"][0].tolist() == table.token_rewards[0].tolist()


@pytest.mark.parametrize(("part", "lengths"), [("prompt", (9, 2)), ("response", (2, 9))])
def test_a_rollout_that_is_too_long_is_an_error_that_names_it(part: str, lengths: tuple[int, int]) -> None:
    form = RolloutForm(max_prompt_length=8, max_response_length=8)
    with pytest.raises(DataError, match=rf"{part}.*{part}") as caught:
        assemble(make_table([(2, 2), lengths]), form)
    assert caught.value.row == 1
    assemble(make_table([(2, 2), lengths]), form, rows=[0])


def test_a_batch_without_rollouts_is_an_error() -> None:
    with pytest.raises(DataError):
        assemble(make_table([(1, 1)]), RolloutForm(), rows=[])


def test_a_first_token_that_nothing_predicts_is_not_learned() -> None:
    table = make_table([(1, 1), (0, 3)], all_learned=True)
    with pytest.raises(DataError, match="'r1'"):
        assemble(table, RolloutForm())
    mask = Ragged.of([[True], [False, True, True]], np.bool_)
    arrays, _ = assemble(replace(table, loss_mask=mask), RolloutForm())
    assert arrays["num_items_in_batch"] == 3
    with pytest.raises(DataError, match="'r0'"):
        assemble(make_table([(0, 0)]), RolloutForm())


def test_an_empty_response_at_the_end_of_a_row_without_padding_is_fine() -> None:
    arrays, metadata = assemble(make_table([(2, 2), (3, 0)]), RolloutForm(padding="free"))
    assert arrays["cu_seqlens"].tolist() == [0, 4, 7]
    assert metadata["response_length"].tolist() == [2, 0]


def test_numbers_that_do_not_match_the_tokens_name_the_rollout() -> None:
    table = make_table([(1, 2), (1, 3)])
    with pytest.raises(DataError, match=r"advantages.*'r1'"):
        assemble(table, RolloutForm(), per_token={"advantages": Ragged.of([[1.0, 2.0], [1.0, 2.0]], np.float32)})
    with pytest.raises(DataError, match="advantages"):
        assemble(table, RolloutForm(), per_token={"advantages": Ragged.of([[1.0, 2.0]], np.float32)})
    with pytest.raises(DataError, match="weights"):
        assemble(table, RolloutForm(), per_row={"weights": np.ones(3)})


def test_an_id_that_narrow_integers_cannot_hold_is_refused_and_not_cut_off() -> None:
    table = make_table([(1, 1), (1, 2)])
    wide = replace(table, response_ids=Ragged.of([[1], [2, 2**31]], np.int64))
    with pytest.raises(DataError, match=r"response_ids.*'r1'"):
        assemble(wide, RolloutForm(integer=np.int32))
    assert assemble(wide, RolloutForm())[0]["input_ids"].max() == 2**31


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": "right"}, r"padding.*'sides'"),
        ({"response_truncation": "left"}, "response_truncation"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"max_prompt_length": 0}, "max_prompt_length"),
        ({"fixed": True}, r"\bfixed\b.*max_prompt_length"),
        ({"fixed": True, "max_prompt_length": 1, "max_response_length": 1, "padding": "free"}, "padding='sides'"),
        ({"pad_id": -1}, "pad_id"),
        ({"pad_id": 2**31, "integer": np.int32}, r"pad_id.*\bint32\b"),
        ({"fields": frozenset({"label"})}, "'label'"),
    ],
)
def test_forms_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RolloutForm(**options)
