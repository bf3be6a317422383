"""Preferences as tokens: one prompt on both sides, cut so that it stays one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.transforms import FormatPreference

TOKENIZER = Path(__file__).parents[3] / "examples" / "sample" / "tokenizer"
PAIR = {"prompt": "Which river runs past the mill?", "chosen": "The Oder.", "rejected": "The mill is closed today."}
LABELLED = {
    "messages": [
        {"role": "user", "content": "Is it open?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Until when?"},
        {"role": "assistant", "content": "No idea."},
    ],
    "label": False,
}
# Says what the next answer is before it begins, so that no two answers have the same prompt.
TELLTALE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'assistant' %}<{{ message.content | length }}>\n"
    "{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}\n{% endif %}{% endfor %}"
)


def batch(*rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows))


@cache
def shape(**options: Any) -> FormatPreference:
    return FormatPreference("byte", "plain", **options)


def text(ids: list[int]) -> str:
    return bytes(token for token in ids if token < 256).decode()


def test_pairs_have_one_prompt_and_only_answers_count() -> None:
    row = shape().transform(batch(PAIR)).to_pylist()[0]
    prompt = row["prompt_length"]
    assert row["chosen_input_ids"][:prompt] == row["rejected_input_ids"][:prompt]
    for side in ("chosen", "rejected"):
        ids, mask = row[f"{side}_input_ids"], row[f"{side}_loss_mask"]
        assert not any(mask[:prompt])
        assert mask[prompt]
        assert text(ids[prompt:]).startswith(PAIR[side])


def test_a_label_is_about_the_last_answer() -> None:
    row = shape().transform(batch(LABELLED)).to_pylist()[0]
    assert row["label"] is False
    learned = [token for token, counts in zip(row["input_ids"], row["loss_mask"]) if counts]
    assert text(learned).strip() == "No idea."
    assert "Until when?" in text(row["input_ids"][: row["prompt_length"]])
    whole = {"prompt": "Is it open?", "completion": "No.", "kto_tag": 1}
    assert shape().transform(batch(whole)).to_pylist()[0]["label"] is True


def test_a_template_that_writes_another_prompt_before_each_answer_is_refused() -> None:
    telling = FormatPreference("byte", TELLTALE, gate={"prompt": False})
    with pytest.raises(DataError, match=r"rejected.*prompt"):
        telling.transform(batch(PAIR))
    rows = batch(PAIR, PAIR | {"rejected": "The Rhine"}, PAIR)
    assert [(found.row, found.kind) for found in telling.check_rows(rows)] == [
        (0, "prompt not shared"),
        (2, "prompt not shared"),
    ]
    with pytest.raises(DataError, match=r"row 2\b"):
        telling.transform(batch(*rows.to_pylist()[1:2] * 2, PAIR))


def test_labels_are_true_or_false() -> None:
    good = {"prompt": "a", "completion": "b"}
    rows = batch(good | {"label": True}, good | {"label": None})
    assert [(found.row, found.kind) for found in shape().check_rows(rows)] == [(1, "label")]
    with pytest.raises(DataError, match=r"row 1\b.*\blabel\b"):
        shape().transform(rows)
    with pytest.raises(DataError, match="the label is 'good'"):
        shape().transform(batch(good | {"kto_tag": "good"}))


def test_the_gate_looks_at_both_sides() -> None:
    found = shape().check_rows(batch(PAIR, PAIR | {"rejected": ""}))
    assert [(violation.row, violation.kind) for violation in found] == [(1, "empty content")]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(*[st.text("abc ", min_size=1, max_size=30).map(lambda t: t.strip() or "x")] * 3),
        min_size=1,
        max_size=5,
    ),
    st.integers(20, 70),
    st.sampled_from(["left", "right", "drop"]),
    st.sampled_from([None, 6, 25]),
)
def test_truncation_keeps_one_prompt_and_an_answer_on_both_sides(
    texts: list[tuple[str, str, str]], most: int, policy: str, prompt_most: int | None
) -> None:
    rows = batch(*({"prompt": p, "chosen": c, "rejected": r, "n": n} for n, (p, c, r) in enumerate(texts)))
    whole = shape(keep="n").transform(rows).to_pylist()
    cutting = shape(max_length=most, truncation=policy, max_prompt_length=prompt_most, keep="n")
    cutting.begin_attempt()
    made = cutting.transform(rows).to_pylist()
    assert len(made) + sum(cutting.end_attempt()[0].values()) == len(whole)
    for row in made:
        before = whole[row["n"]]
        gone = before["prompt_length"] - row["prompt_length"]
        assert prompt_most is None or row["prompt_length"] <= prompt_most
        for side in ("chosen", "rejected"):
            ids, all_ids = row[f"{side}_input_ids"], before[f"{side}_input_ids"]
            assert len(ids) <= most
            assert ids == all_ids[gone:][: len(ids)]
            assert policy == "right" or len(ids) == len(all_ids) - gone
            assert any(row[f"{side}_loss_mask"][row["prompt_length"] :])
            assert not any(row[f"{side}_loss_mask"][: row["prompt_length"]])
        assert row["prompt_length"] > 0
        assert (
            policy != "left"
            or gone == 0
            or prompt_most
            or max(len(before[f"{s}_input_ids"]) for s in ("chosen", "rejected")) - gone == most
        )
    kept = {row["n"] for row in made}
    for row in whole:
        cut = max(row["prompt_length"] - (prompt_most or 1 << 20), 0)
        longest = max(len(row["chosen_input_ids"]), len(row["rejected_input_ids"])) - cut
        answer = longest - (row["prompt_length"] - cut)
        fits = {
            "drop": longest <= most,
            "left": longest <= most or answer < most,
            "right": row["prompt_length"] - cut < most,
        }
        assert (row["n"] in kept) == fits[policy]


def test_rows_that_are_too_long_are_an_error_that_names_the_side() -> None:
    short = len(shape().transform(batch(PAIR)).to_pylist()[0]["chosen_input_ids"])
    with pytest.raises(DataError, match=r"rejected: .*max_length="):
        shape(max_length=short).transform(batch(PAIR))
    assert shape(max_length=short).check_rows(batch(PAIR))[0].kind == "too long"


def test_what_cannot_be_done_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"\berror\b"):
        shape(truncation="split")
    with pytest.raises(ConfigError, match="train_on='all'"):
        shape(train_on="all")
    with pytest.raises(ConfigError, match="max_prompt_length"):
        shape(max_prompt_length=0)
    with pytest.raises(ConfigError, match="keep="):
        shape(keep="label")
    with pytest.raises(SchemaError, match="'prompt'"):
        shape().transform(batch({"prompt": "a", "completion": "b"}))


def test_what_it_says_about_itself_changes_with_what_it_does() -> None:
    prints = {
        shape(**options).fingerprint
        for options in ({}, {"max_length": 9}, {"max_prompt_length": 9}, {"train_on": "last"})
    }
    assert len(prints) == 4
    assert json.loads(shape().fingerprint)["transform"] == "FormatPreference"
    assert repr(shape()).startswith("FormatPreference(byte, plain")
