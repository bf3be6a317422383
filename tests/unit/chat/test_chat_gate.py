"""The supervision gate: nothing wrong gets through, nothing right is held up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.chat.compile.prover import Layouts
from penstock.chat.format_chat import FormatChat, Gate, RowProblem, Violation
from penstock.errors import ConfigError, DataError
from penstock.transforms.tokenization import ByteTokenizer, CharTokenizer, load_tokenizer

BYTES = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>"))
HI = {"role": "user", "content": "Hi"}
YES = {"role": "assistant", "content": "Yes"}
TURN = "{{ '<|im_start|>' + m.role + '\n' }}"
HEAD, TAIL = "{{ bos_token }}{% for m in messages %}", "{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


class Unproven(Layouts):
    """Everything by the template."""

    @property
    def possible(self) -> bool:
        return False


def batch_of(*conversations: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"messages": list(conversations)})


def only_violation(transform: FormatChat, chat: list[dict[str, Any]]) -> Violation:
    """The one thing found in the middle row of three, which `transform` raises too."""
    batch = batch_of([HI, YES], chat, [HI, YES])
    (found,) = transform.check_rows(batch)
    assert found.row == 1
    with pytest.raises(RowProblem, match=r"row 1\b") as caught:
        transform.transform(batch)
    assert isinstance(caught.value, DataError)
    assert (caught.value.row, caught.value.kind) == (1, found.kind)
    assert found.shown in str(caught.value)
    return found


@pytest.fixture(scope="module")
def gpt2_like() -> Any:
    """Byte-level BPE whose words begin with a space and whose runs of newlines are one token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    made.train_from_iterator(["\n\n\n", "user assistant\n\n", "a b  c   d\n\n"] * 20, trainer)
    return load_tokenizer(made)


def test_good_rows_have_no_violations() -> None:
    assert FormatChat(BYTES, "chatml").check_rows(batch_of([HI, YES], [HI, YES, HI, YES])) == []


def test_a_row_with_nothing_supervised_is_shown() -> None:
    transform = FormatChat(BYTES, "chatml", include_eot=False, gate=Gate(content=False))
    found = only_violation(transform, [HI, {"role": "assistant", "content": ""}])
    assert found.kind == "nothing supervised"
    assert found.shown == "<bos><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    off = FormatChat(BYTES, "chatml", include_eot=False, gate=Gate(content=False, supervised=False))
    assert off.transform(batch_of([HI, {"role": "assistant", "content": ""}])).num_rows == 1


@pytest.mark.parametrize(
    ("chat", "kind"),
    [
        ([HI], "no assistant turn"),
        ([HI, {"role": "assistant", "content": ""}], "empty content"),
        ([HI, {"role": "assistant", "content": " \n\u3000"}], "empty content"),
        ([{"role": "user", "content": "a<|im_end|>\n<|im_start|>assistant\nHa"}, YES], "special token in content"),
        ([HI, {"role": "assistant", "content": "a<eos>b"}], "special token in content"),
        ([{"role": "system", "content": "<bos>"}, HI, YES], "special token in content"),
        ([HI, {"role": "assistant", "content": "x<|im_start|>user\nHa"}], "special token in content"),
    ],
)
def test_each_trouble_has_its_kind(chat: list[dict[str, Any]], kind: str) -> None:
    assert only_violation(FormatChat(BYTES, "chatml"), chat).kind == kind
    slow = FormatChat(BYTES, "chatml", special_tokens=(), variables={"unused": 1})
    slow._layouts = Unproven(slow._renderer)
    assert only_violation(slow, chat).kind == kind


@pytest.mark.parametrize(
    ("chat", "kind"),
    [
        ([HI, {"role": "assistant", "content": "a<bos>b"}], "bos count"),
        ([{"role": "user", "content": "<bos>"}, YES], "bos count"),
        ([HI, {"role": "assistant", "content": "x<|im_start|>user\nHa"}], "header supervised"),
        ([HI, {"role": "assistant", "content": "x<|im_end|>y"}], "terminator inside"),
    ],
)
def test_tokens_in_contents_that_are_let_in_are_seen_where_they_do_harm(chat: Any, kind: str) -> None:
    assert only_violation(FormatChat(BYTES, "chatml", gate=Gate(content=False)), chat).kind == kind


def test_the_message_with_the_text_of_a_special_token_is_named_and_shown() -> None:
    chats = [[HI, YES], [HI, YES, {"role": "user", "content": "ü<|im_end|>"}, YES], [HI, YES]]
    (found,) = FormatChat(BYTES, "chatml").check_rows(batch_of(*chats))
    assert (found.row, found.message.split(",")[0]) == (1, "message 2 (user) has '<|im_end|>' in its content")
    assert "⟦Yes<|im_end|>⟧\n<|im_start|>user\nü<|im_end|><|im_end|>" in found.shown
    assert FormatChat(BYTES, "chatml", gate=Gate(content=False)).check_rows(batch_of(*chats)) == []


@pytest.mark.parametrize("hidden", ["thoughts", "calls", "tools"])
def test_special_tokens_are_looked_for_in_all_that_is_written(hidden: str) -> None:
    calls = [{"function": {"name": "f", "arguments": json.dumps({"a": "<|im_end|>" if hidden == "calls" else "b"})}}]
    thought = "<|im_end|>" if hidden == "thoughts" else "hm"
    tools = json.dumps([{"name": "<|im_end|>" if hidden == "tools" else "f"}])
    row = {"messages": [HI, {**YES, "tool_calls": calls, "reasoning_content": thought}], "tools": tools}
    (found,) = FormatChat(BYTES, "qwen").check_rows(pa.RecordBatch.from_pylist([row]))
    assert found.kind == "special token in content"


def test_symbols_that_are_text_wherever_they_stand_may_be_said() -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|unused|>"],
        show_progress=False,
    )
    made.train_from_iterator(["a b"], trainer)
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    transform = FormatChat(load_tokenizer(made), "chatml")
    chats = [[HI, {"role": "assistant", "content": text}] for text in ("<think>a", "<|unused|>", "</s>", "<table>")]
    found = transform.check_rows(batch_of(*chats))
    assert [(v.row, v.kind) for v in found] == [(1, "special token in content"), (2, "special token in content")]


@given(
    contents=st.lists(
        st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "<eos>", "ü", "<", "\\E", ""]), max_size=3).map(
            "".join
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_special_tokens_are_found_alike_with_layouts_and_without(contents: list[str]) -> None:
    special = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "\\E(.*")
    chats = [[{"role": "user", "content": text}, YES] for text in contents]
    transform = FormatChat(ByteTokenizer(special), "chatml")
    found = {v.row for v in transform.check_rows(batch_of(*chats))}
    assert found == {i for i, text in enumerate(contents) if any(token in text for token in special)}
    transform._layouts = Unproven(transform._renderer)
    assert {v.row for v in transform.check_rows(batch_of(*chats))} == found


def test_supervised_parts_are_marked_in_what_is_shown() -> None:
    transform = FormatChat(BYTES, "chatml", gate=Gate(content=False))
    found = only_violation(transform, [{"role": "user", "content": "<bos>"}, YES])
    assert found.shown.endswith("<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n")
    assert "beginning-of-sequence" in found.message


def test_a_template_without_a_bos_is_refused_if_the_tokenizer_has_one() -> None:
    source = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"gate=\{'bos': False\}"):
        FormatChat(BYTES, source)
    assert FormatChat(BYTES, source, gate=Gate(bos=False)).transform(batch_of([HI, YES])).num_rows == 1
    assert FormatChat(ByteTokenizer(("<eos>",)), source).transform(batch_of([HI, YES])).num_rows == 1


def test_a_template_that_writes_two_bos_is_refused() -> None:
    with pytest.raises(ConfigError, match="bos_token"):
        FormatChat(BYTES, "{{ bos_token }}" + HEAD + "{{ m.content + eos_token }}" + TAIL)


def test_a_header_inside_of_a_block_is_not_trained_on() -> None:
    source = (
        HEAD + "{% if m.role == 'assistant' %}{% generation %}" + TURN + "{{ m.content + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}" + TURN + "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}" + TAIL + PROMPT
    )
    made = FormatChat(BYTES, source).transform(batch_of([HI, YES, HI, YES]))
    ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
    assert BYTES.decode(ids[mask]) == "Yes<|im_end|>" * 2
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>'"):
        FormatChat(BYTES, source, gate=Gate(prompt=False))


def test_a_block_that_ends_long_before_the_end_of_the_turn_is_refused() -> None:
    source = (
        HEAD + TURN + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{{ ' - ' }}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}" + TAIL + PROMPT
    )
    with pytest.raises(ConfigError, match="include_eot=False"):
        FormatChat(BYTES, source)
    assert FormatChat(BYTES, source, include_eot=False).transform(batch_of([HI, YES])).num_rows == 1


def test_a_prompt_that_is_not_how_the_training_text_begins_is_refused() -> None:
    source = HEAD + TURN + "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}" + TAIL
    source = source.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}").replace(
        "{% endgeneration %}", "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}"
    )
    thinking = PROMPT.replace("assistant\n", "assistant\n<think>\n")
    assert FormatChat(BYTES, source + PROMPT).transform(batch_of([HI, YES])).num_rows == 1
    with pytest.raises(ConfigError, match=r"prompt.*'<think>\\n'"):
        FormatChat(BYTES, source + thinking)
    assert FormatChat(BYTES, source + thinking, gate=Gate(prompt=False)).transform(batch_of([HI, YES])).num_rows == 1


def test_a_token_that_reaches_from_the_prompt_into_the_answer_is_found(gpt2_like: Any) -> None:
    found = only_violation(FormatChat(gpt2_like, "chatml"), [HI, {"role": "assistant", "content": "\n\na"}])
    assert found.kind == "prompt differs"
    assert "prompt" in found.message
    made = FormatChat(gpt2_like, "chatml", gate=Gate(prompt=False)).transform(
        batch_of([HI, {"role": "assistant", "content": "\n\na"}])
    )
    ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
    # The token of the header's newline and the first of the answer begins in the header: it is not supervised.
    assert gpt2_like.decode(ids[mask]) == "\na<|im_end|>"


def test_a_prompt_whose_tokens_change_when_it_stands_alone_is_found(gpt2_like: Any) -> None:
    # In the row the two newlines of the header are two tokens; at the end of a prompt they are one.
    with pytest.raises(ConfigError):
        FormatChat(gpt2_like, "llama3")


pieces = st.text("ab \n", max_size=5)


# No special token before the first answer of a row, and text behind the last special token of the row before.
BARE = "{% for m in messages %}{{ m.content }}{{ eos_token + '\\n' if m.role == 'assistant' else '' }}{% endfor %}"


@pytest.mark.parametrize("name", ["chatml", "plain", "vicuna", "alpaca", BARE])
@given(chats=st.lists(st.lists(st.tuples(pieces, pieces), min_size=1, max_size=3), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_the_check_of_prompts_finds_what_tokenising_every_prompt_finds(name: str, chats: Any, gpt2_like: Any) -> None:
    transform = FormatChat(gpt2_like, name, gate=Gate(content=False, bos=False))
    conversations = [
        [{"role": r, "content": c} for pair in pairs for r, c in zip(("user", "assistant"), pair)] for pairs in chats
    ]

    def ids(messages: list[dict[str, Any]], prompt: bool) -> list[int]:
        variables = transform._renderer.variables
        text = transform.template.unmarked.render(messages=messages, add_generation_prompt=prompt, **variables)
        plain = text.replace("\ud800", "").replace("\ud801", "")
        return gpt2_like.encode(pa.array([plain]), parse_special=True)[0].as_py()  # type: ignore[no-any-return]

    expected = set()
    for row, messages in enumerate(conversations):
        whole = ids(messages, False)
        for turn in range(1, len(messages), 2):
            alone = ids(messages[:turn], True)
            if whole[: len(alone)] != alone:
                expected.add(row)
    found = transform.check_rows(batch_of(*conversations))
    assert {violation.row for violation in found} == expected
    assert {violation.kind for violation in found} <= {"prompt differs"}


def test_the_row_before_has_no_part_in_the_check_of_prompts(gpt2_like: Any) -> None:
    transform = FormatChat(gpt2_like, BARE, gate=Gate(bos=False))
    chats = [[{"role": "user", "content": "\n\na"}, {"role": "assistant", "content": " b"}]] * 3
    assert transform.check_rows(batch_of(*chats)) == []


def test_everything_is_checked_in_pairs_too() -> None:
    rows = {"prompt": ["a", "b"], "chosen": ["c", "<bos>"], "rejected": ["<bos>", ""]}
    found = FormatChat(BYTES, "plain").check_rows(pa.RecordBatch.from_pydict(rows))
    assert [(v.row, v.kind, v.message.split(":")[0]) for v in found] == [
        (0, "special token in content", "rejected"),
        (1, "special token in content", "chosen"),
        (1, "empty content", "rejected"),
    ]
    rows = {"prompt": ["a", "b"], "chosen": ["c", "d" * 30], "rejected": ["e" * 40, "f"]}
    found = FormatChat(BYTES, "plain", max_length=20).check_rows(pa.RecordBatch.from_pydict(rows))
    assert [(v.row, v.kind, v.message) for v in found] == [
        (0, "too long", "rejected: 45 tokens, more than max_length=20"),
        (1, "too long", "chosen: 35 tokens, more than max_length=20"),
    ]


def test_rows_that_are_too_long_are_violations_only_if_that_is_an_error() -> None:
    batch = batch_of([HI, YES], [HI, {"role": "assistant", "content": "x" * 99}])
    found = FormatChat(BYTES, "plain", max_length=30).check_rows(batch)
    assert [(v.row, v.kind) for v in found] == [(1, "too long")]
    assert not FormatChat(BYTES, "plain", max_length=30, truncation="drop").check_rows(batch)


BLOCK = "{% generation %}{{ m.content + '<|im_end|>' + TAIL }}{% endgeneration %}"


@pytest.mark.parametrize("tail", ["\\n", " \\n\\t", ""])
def test_white_space_behind_the_end_of_the_turn_may_be_in_the_block(tail: str) -> None:
    block = BLOCK.replace("TAIL", f"'{tail}'")
    source = (
        HEAD + TURN + "{% if m.role == 'assistant' %}" + block + "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
        "" + TAIL + PROMPT
    )
    white = tail.encode().decode("unicode_escape")
    batch = batch_of([HI, YES], [HI, YES, HI, YES])
    for include_eot, expected in ((True, f"Yes<|im_end|>{white}"), (False, "Yes")):
        transform = FormatChat(BYTES, source, include_eot=include_eot)
        assert transform.check_rows(batch) == []
        made = transform.transform(batch)
        for row, turns in ((0, 1), (1, 2)):
            ids, mask = made["input_ids"][row].values.to_numpy(), made["loss_mask"][row].as_py()
            assert BYTES.decode(ids[mask]) == expected * turns
    bad = batch_of([HI, {"role": "assistant", "content": "a<|im_end|>b"}])
    (found,) = FormatChat(BYTES, source, gate=Gate(content=False)).check_rows(bad)
    assert found.kind == "terminator inside"


@pytest.mark.parametrize("tail", ["x", "\\n.", "\\n" * 70])
def test_anything_else_behind_the_end_of_the_turn_is_refused(tail: str) -> None:
    block = BLOCK.replace("TAIL", f"'{tail}'")
    source = (
        HEAD + TURN + "{% if m.role == 'assistant' %}" + block + "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}"
        "" + TAIL + PROMPT
    )
    with pytest.raises(ConfigError):
        FormatChat(BYTES, source)


def test_an_end_of_turn_inside_an_answer_is_seen_where_turns_are_found_by_markers() -> None:
    source = (
        HEAD
        + TURN
        + "{{ m.content.split('</think>') | last if m.role == 'assistant' and not loop.last else m.content }}"
        "{{ '<|im_end|>\n' }}" + TAIL + PROMPT
    )
    bad = [HI, {"role": "assistant", "content": "<think>t</think>A<|im_end|>more"}, HI, YES]
    good = [HI, {"role": "assistant", "content": "<think>t</think>A"}, HI, YES]
    for gate in (Gate(prompt=False), Gate(prompt=False, content=False)):
        transform = FormatChat(BYTES, source, gate=gate, allow_lost=["earlier_thoughts"])
        (found,) = transform.check_rows(batch_of(good, bad, good))
        expected = "special token in content" if gate.content else "terminator inside"
        assert (found.row, found.kind) == (1, expected)
        made = transform.transform(batch_of(good))
        ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
        assert BYTES.decode(ids[mask]) == "A<|im_end|>Yes<|im_end|>"


def test_a_row_that_the_tokenizer_refuses_is_a_violation_like_others() -> None:
    tokenizer = CharTokenizer("HiYes\n", ("<bos>", "<eos>"))
    transform = FormatChat(tokenizer, "plain")
    chats = [[HI, YES] for _ in range(9)]
    chats[3] = [HI, {"role": "assistant", "content": "é"}]
    chats[4] = [HI]
    chats[8] = [HI, {"role": "assistant", "content": "ß"}]
    found = transform.check_rows(batch_of(*chats))
    assert [(v.row, v.kind) for v in found] == [
        (3, "cannot be encoded"),
        (4, "no assistant turn"),
        (8, "cannot be encoded"),
    ]
    assert "'ß'" in found[2].message


def test_marks_that_cannot_be_read_are_a_violation_of_their_row() -> None:
    source = HEAD + "{{ '\\udfff' if m.content == '!' else '' }}{{ m.content + eos_token }}" + TAIL
    found = FormatChat(BYTES, source).check_rows(batch_of([HI, YES], [{**HI, "content": "!"}, YES], [HI, YES]))
    assert [(v.row, v.kind) for v in found] == [(1, "render")]


def test_a_gate_may_be_a_mapping_of_switches() -> None:
    transform = FormatChat(BYTES, "chatml", gate={"bos": False, "content": True})
    assert transform.gate == Gate(bos=False)
    for wrong in ({"boss": False}, {"bos": "no"}, "bos", ["bos"]):
        with pytest.raises(ConfigError, match=r"\bgate\b.*\bbos\b"):
            FormatChat(BYTES, "chatml", gate=wrong)  # type: ignore[arg-type]


def test_a_long_row_is_shown_short() -> None:
    found = only_violation(FormatChat(BYTES, "chatml"), [{"role": "user", "content": "<bos>" + "x" * 99999}, YES])
    assert len(found.shown) < 4000
    assert "⟦Yes<|im_end|>⟧" in found.shown


def test_tokens_of_no_width_at_the_end_of_a_row_stay_in_their_row() -> None:
    from penstock.chat.masks import Spans, SpanTokens, Turn
    from penstock.tokenizers.base import Encoded

    spans = Spans.of(["a", "b"], [[], [Turn(0, 1)]])
    ids = pa.ListArray.from_arrays([0, 2, 3], pa.array([1, 2, 3], pa.uint8()))
    encoded = Encoded(ids, np.array([0, 1, 0], np.int32), np.array([1, 1, 1], np.int32))
    assert SpanTokens.of(encoded, spans).mask().tolist() == [False, False, True]
