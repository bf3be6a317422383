"""Chat rows become tokens and masks: every built-in template by hand, the choices, truncation, the pipeline around."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from datetime import datetime
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock import Pipeline, PipelineConfig
from penstock.chat.format_chat import FormatChat, Gate, RowProblem
from penstock.errors import ConfigError, SchemaError, StageError
from penstock.sinks import MemorySink
from penstock.sources import JsonlSource, MemorySource
from penstock.transforms.tokenization import ByteTokenizer, load_tokenizer

SPECIAL = (
    "<bos>",
    "<eos>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
)
BYTES = ByteTokenizer(SPECIAL)

SYSTEM = {"role": "system", "content": "Be kind."}
HI = {"role": "user", "content": "Hi ü"}
HELLO = {"role": "assistant", "content": "Hello 😀"}
MORE = {"role": "user", "content": "More?"}
YES = {"role": "assistant", "content": "Yes"}
CHAT = [SYSTEM, HI, HELLO, MORE, YES]

GATE = ("supervised", "terminator", "bos", "prompt", "headers", "content")

# What is trained on stands between ⟦ and ⟧.
EXPECTED = {
    "chatml": (
        "<bos><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi ü<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello 😀<|im_end|>⟧\n<|im_start|>user\nMore?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n"
    ),
    "qwen": (
        "<bos><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi ü<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hello 😀<|im_end|>⟧\n<|im_start|>user\nMore?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Yes<|im_end|>⟧\n"
    ),
    "llama3": (
        "<bos><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi ü<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello 😀<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nMore?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Yes<|eot_id|>⟧"
    ),
    "mistral": "<bos>[INST] Be kind.\n\nHi ü[/INST]⟦ Hello 😀<eos>⟧[INST] More?[/INST]⟦ Yes<eos>⟧",
    "gemma": (
        "<bos><start_of_turn>user\nBe kind.\n\nHi ü<end_of_turn>\n<start_of_turn>model\n⟦Hello 😀<end_of_turn>⟧\n"
        "<start_of_turn>user\nMore?<end_of_turn>\n<start_of_turn>model\n⟦Yes<end_of_turn>⟧\n"
    ),
    "zephyr": (
        "<bos><|system|>\nBe kind.<eos>\n<|user|>\nHi ü<eos>\n<|assistant|>\n⟦Hello 😀<eos>⟧\n"
        "<|user|>\nMore?<eos>\n<|assistant|>\n⟦Yes<eos>⟧\n"
    ),
    "alpaca": (
        "<bos>Be kind.\n\n### Instruction:\nHi ü\n\n### Response:\n⟦Hello 😀<eos>⟧\n\n"
        "### Instruction:\nMore?\n\n### Response:\n⟦Yes<eos>⟧\n\n"
    ),
    "vicuna": "<bos>Be kind. USER: Hi ü ASSISTANT:⟦ Hello 😀<eos>⟧USER: More? ASSISTANT:⟦ Yes<eos>⟧",
    "plain": "<bos>Be kind.\nHi ü\n⟦Hello 😀<eos>⟧\nMore?\n⟦Yes<eos>⟧\n",
}


def batch_of(*conversations: Any, **columns: Any) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"messages": list(conversations), **columns})


def marked(batch: pa.RecordBatch, tokenizer: Any = BYTES, row: int = 0, prefix: str = "") -> str:
    """A row decoded, with ⟦ and ⟧ around the runs of tokens that are trained on."""
    ids = np.array(batch[f"{prefix}input_ids"][row].as_py())
    mask = batch[f"{prefix}loss_mask"][row].as_py()
    parts = []
    for trained, run in groupby(range(len(ids)), key=lambda i: mask[i]):
        text = tokenizer.decode(ids[list(run)])
        parts.append(f"⟦{text}⟧" if trained else text)
    return "".join(parts)


def bpe(texts: Iterable[str], special: Iterable[str] = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")) -> Tokenizer:
    """A small byte-level BPE tokenizer, in the manner of GPT-2."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    made.train_from_iterator(texts, trainer)
    return made


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return bpe(["Hello there, assistant and user.\n\n  Yes and no, more answers\n\n"] * 40)


@pytest.fixture(scope="module")
def theirs(small: Tokenizer) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=small, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("name", EXPECTED)
def test_each_built_in_template_gives_the_text_and_mask_written_here(name: str) -> None:
    assert marked(FormatChat(BYTES, name).transform(batch_of(CHAT))) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_each_built_in_template_starts_without_a_system_message(name: str) -> None:
    intro = {
        "alpaca": "Below is an instruction that describes a task. "
        "Write a response that appropriately completes the request.\n\n",
        "vicuna": "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. ",
    }.get(name, "")
    system = {
        "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n",
        "qwen": "<|im_start|>system\nBe kind.<|im_end|>\n",
        "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>",
        "mistral": "Be kind.\n\n",
        "gemma": "Be kind.\n\n",
        "zephyr": "<|system|>\nBe kind.<eos>\n",
        "alpaca": "Be kind.\n\n",
        "vicuna": "Be kind. ",
        "plain": "Be kind.\n",
    }[name]
    expected = EXPECTED[name].replace(system, intro, 1)
    assert marked(FormatChat(BYTES, name).transform(batch_of(CHAT[1:]))) == expected


@pytest.mark.parametrize("name", EXPECTED)
def test_the_end_of_a_turn_can_be_left_out_of_the_training(name: str) -> None:
    end = EXPECTED[name].split("Yes")[1].split("⟧")[0]
    expected = EXPECTED[name].replace(f"{end}⟧", f"⟧{end}")
    assert marked(FormatChat(BYTES, name, include_eot=False).transform(batch_of(CHAT))) == expected


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [
        ("last", "<bos>Be kind.\nHi ü\nHello 😀<eos>\nMore?\n⟦Yes<eos>⟧\n"),
        ("all", "⟦<bos>Be kind.\nHi ü\nHello 😀<eos>\nMore?\nYes<eos>\n⟧"),
        (["user"], "<bos>Be kind.\n⟦Hi ü⟧\nHello 😀<eos>\n⟦More?⟧\nYes<eos>\n"),
        (["system", "assistant"], "<bos>⟦Be kind.⟧\nHi ü\n⟦Hello 😀<eos>⟧\nMore?\n⟦Yes<eos>⟧\n"),
    ],
)
def test_what_to_train_on_can_be_chosen(train_on: Any, expected: str) -> None:
    assert marked(FormatChat(BYTES, "plain", train_on=train_on).transform(batch_of(CHAT))) == expected


def test_chosen_roles_are_trained_on_with_the_token_that_ends_them_but_without_their_headers() -> None:
    made = FormatChat(BYTES, "llama3", train_on=["user", "assistant"]).transform(batch_of([HI, HELLO]))
    assert marked(made) == (
        "<bos><|start_header_id|>user<|end_header_id|>\n\n⟦Hi ü<|eot_id|>⟧"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hello 😀<|eot_id|>⟧"
    )


@pytest.mark.parametrize("key", ["train", "training", "weight", "step_loss_mask"])
def test_a_message_says_itself_whether_to_train_on_it(key: str) -> None:
    off, on = (0, 1) if key in ("weight", "step_loss_mask") else (False, True)
    chat = [{**HI, key: None}, {**HELLO, key: off}, {**MORE, key: on}, {**YES, key: None}]
    made = FormatChat(BYTES, "plain").transform(batch_of(chat))
    assert marked(made) == "<bos>Hi ü\nHello 😀<eos>\n⟦More?⟧\n⟦Yes<eos>⟧\n"
    made = FormatChat(BYTES, "plain", train_on="flags").transform(batch_of(chat))
    assert marked(made) == "<bos>Hi ü\nHello 😀<eos>\n⟦More?⟧\nYes<eos>\n"


def test_a_weight_between_none_and_full_is_an_error_not_a_guess() -> None:
    with pytest.raises(RowProblem, match=r"message 1 has weight=0.5"):
        FormatChat(BYTES, "plain").transform(batch_of([{**HI, "weight": None}, {**HELLO, "weight": 0.5}]))


def test_ids_are_narrow_and_the_mask_is_bits() -> None:
    schema = FormatChat(BYTES, "chatml").transform(batch_of(CHAT)).schema
    assert schema == pa.schema([("input_ids", pa.list_(pa.uint16())), ("loss_mask", pa.list_(pa.bool_()))])


def test_a_batch_without_rows_has_the_same_columns() -> None:
    transform = FormatChat(BYTES, "chatml", keep="id", max_length=9, truncation="split")
    full = transform.transform(batch_of(CHAT, id=["a"]))
    assert transform.transform(batch_of(CHAT, id=["a"])[:0]).schema == full.schema


def test_slices_large_types_and_json_text_give_the_same_rows() -> None:
    transform = FormatChat(BYTES, "chatml", keep="id")
    chats = [CHAT, [HI, HELLO], [MORE, YES]]
    plain = batch_of(*chats, id=[0, 1, 2])
    expected = transform.transform(plain)
    message = pa.struct([("role", pa.large_string()), ("content", pa.large_string())])
    wide = plain.set_column(0, "messages", plain["messages"].cast(pa.large_list(message)))
    as_json = plain.set_column(0, "messages", pa.array([json.dumps(chat) for chat in chats]))
    for given_batch in (plain, wide, as_json):
        assert transform.transform(given_batch).equals(expected)
        assert transform.transform(given_batch[1:]).equals(expected[1:])


def test_preferences_give_two_sequences_with_only_the_answers_trained_on() -> None:
    rows = {"prompt": [[HI, HELLO, MORE]], "chosen": [[YES]], "rejected": [[{**YES, "content": "No"}]]}
    made = FormatChat(BYTES, "plain").transform(pa.RecordBatch.from_pydict(rows))
    assert made.schema.names == ["chosen_input_ids", "chosen_loss_mask", "rejected_input_ids", "rejected_loss_mask"]
    assert marked(made, prefix="chosen_") == "<bos>Hi ü\nHello 😀<eos>\nMore?\n⟦Yes<eos>⟧\n"
    assert marked(made, prefix="rejected_") == "<bos>Hi ü\nHello 😀<eos>\nMore?\n⟦No<eos>⟧\n"


def test_a_pair_of_which_one_side_is_too_long_goes_as_a_whole() -> None:
    rows = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f" * 50]}
    transform = FormatChat(BYTES, "plain", max_length=20, truncation="drop")
    made = transform.transform(pa.RecordBatch.from_pydict(rows))
    assert [marked(made, prefix=p) for p in ("chosen_", "rejected_")] == ["<bos>a\n⟦c<eos>⟧\n", "<bos>a\n⟦e<eos>⟧\n"]
    assert made.num_rows == 1
    # BOS, the prompt and a newline, the answer, EOS and a newline: for both sides.
    assert transform.dropped_tokens == {"longer than max_length": (1 + 2 + 1 + 2) + (1 + 2 + 50 + 2)}
    assert transform.counts["longer than max_length"] == 1


@pytest.mark.parametrize("truncation", ["left", "right", "split", "drop"])
@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=6), most=st.integers(1, 20)
)
@settings(max_examples=40, deadline=None)
def test_truncation_keeps_what_the_policy_says_and_counts_the_rest(
    truncation: str, lengths: list[tuple[int, int]], most: int
) -> None:
    chats = [[{"role": "user", "content": "u" * u}, {"role": "assistant", "content": "a" * a}] for u, a in lengths]
    batch = batch_of(*chats, id=list(range(len(chats))))
    whole = FormatChat(BYTES, "plain").transform(batch).to_pylist()
    transform = FormatChat(BYTES, "plain", max_length=most, truncation=truncation, keep="id")
    made = transform.transform(batch).to_pylist()

    expected = []
    for i, row in enumerate(whole):
        ids, mask = row["input_ids"], row["loss_mask"]
        n = len(ids)
        if n <= most:
            pieces = [slice(0, n)]
        elif truncation == "drop":
            pieces = []
        elif truncation == "split":
            pieces = [slice(at, at + most) for at in range(0, n, most)]
        else:
            pieces = [slice(0, most) if truncation == "right" else slice(n - most, n)]
        expected += [{"id": i, "input_ids": ids[p], "loss_mask": mask[p]} for p in pieces if any(mask[p])]
    assert made == expected
    kept = {row["id"] for row in made}
    total = sum(len(row["input_ids"]) for row in whole)
    assert sum(transform.dropped_tokens.values()) == total - sum(len(row["input_ids"]) for row in made)
    counts = transform.counts
    left_out = counts.get("longer than max_length", 0) + counts.get("nothing supervised after truncation", 0)
    assert left_out == len(whole) - len(kept)
    cut = sum(len(row["input_ids"]) > most for i, row in enumerate(whole) if i in kept)
    assert counts.get("split", 0) + counts.get(f"truncated on the {truncation}", 0) == cut


def test_a_row_that_is_too_long_is_an_error_by_default() -> None:
    with pytest.raises(RowProblem, match=r"row 1\b.*max_length=20"):
        FormatChat(BYTES, "plain", max_length=20).transform(batch_of([HI, YES], [{**HI, "content": "x" * 20}, YES]))


def test_preferences_cannot_be_split() -> None:
    rows = pa.RecordBatch.from_pydict({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
    with pytest.raises(SchemaError, match=r"\bsplit\b"):
        FormatChat(BYTES, "plain", max_length=2, truncation="split").transform(rows)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), max_size=12) | st.sampled_from(
    ["", " a", "a\n", "\n\n", "한국"]
)
chats = st.lists(st.tuples(texts, texts), min_size=1, max_size=3).map(
    lambda turns: [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair)]
)


@given(conversations=st.lists(chats, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_ids_and_masks_are_those_of_transformers_where_tokens_do_not_straddle(
    theirs: Any, conversations: list[Any]
) -> None:
    theirs.chat_template = None
    tokenizer = load_tokenizer(theirs)
    transform = FormatChat(tokenizer, "chatml", gate=Gate(content=False, prompt=False))
    theirs.chat_template = transform.template.source
    batch = batch_of(*conversations)
    made = transform.transform(batch).to_pylist()
    straddling = {v.row for v in FormatChat(tokenizer, "chatml", gate=Gate(content=False)).check_rows(batch)}
    for i, chat in enumerate(conversations):
        asked = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        assert made[i]["input_ids"] == asked["input_ids"]
        if i not in straddling:
            assert [int(flag) for flag in made[i]["loss_mask"]] == asked["assistant_masks"]


def test_the_tokenizers_own_template_is_the_default(theirs: Any) -> None:
    theirs.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    transform = FormatChat(theirs)
    expected = EXPECTED["chatml"].replace("<bos>", "<s>")
    assert marked(transform.transform(batch_of(CHAT)), transform.tokenizer) == expected


def test_a_tokenizer_without_a_template_needs_one() -> None:
    with pytest.raises(ConfigError, match="template="):
        FormatChat(BYTES)


def test_a_vocabulary_without_the_templates_tokens_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"'<\|im_start\|>'.*'<\|im_end\|>'"):
        FormatChat(ByteTokenizer(), "chatml")
    jinja = "{% for m in messages %}<|turn|>{{ m.content }}<eos>{% endfor %}"
    with pytest.raises(ConfigError, match=r"'<\|turn\|>'"):
        FormatChat(BYTES, jinja)


def test_a_template_that_ends_turns_with_nothing_is_refused_unless_asked_for() -> None:
    jinja = "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    with pytest.raises(ConfigError, match="include_eot=False"):
        FormatChat(BYTES, jinja)
    assert marked(FormatChat(BYTES, jinja, include_eot=False).transform(batch_of([HI, YES]))) == "<bos>Hi ü\n⟦Yes\n⟧"


def test_a_template_with_an_empty_mask_is_refused_at_once() -> None:
    jinja = (
        "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}"
        "{% if m.role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    )
    with pytest.raises(ConfigError):
        FormatChat(BYTES, jinja)


def test_a_generation_block_without_the_end_of_the_turn_is_extended_over_it() -> None:
    jinja = (
        "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert marked(FormatChat(BYTES, jinja).transform(batch_of(CHAT))) == EXPECTED["chatml"]


def test_a_template_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    assert marked(FormatChat(BYTES, file).transform(batch_of([HI, YES]))) == "<bos>Hi ü<eos>⟦Yes<eos>⟧"
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        FormatChat(BYTES, tmp_path / "missing.jinja")
    with pytest.raises(ConfigError, match="'chatlm'"):
        FormatChat(BYTES, "chatlm")


def test_time_comes_as_an_argument() -> None:
    jinja = "{{ bos_token + strftime_now('%Y') }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    with pytest.raises(ConfigError, match="now="):
        FormatChat(BYTES, jinja)
    made = FormatChat(BYTES, jinja, now=datetime(1999, 5, 1)).transform(batch_of([HI, YES]))
    assert marked(made) == "<bos>1999Hi ü<eos>⟦Yes<eos>⟧"


def test_variables_reach_the_template() -> None:
    jinja = "{{ bos_token + mood }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    assert marked(FormatChat(BYTES, jinja, variables={"mood": "!"}).transform(batch_of([HI, YES]))).startswith("<bos>!")
    with pytest.raises(ConfigError, match="'messages'"):
        FormatChat(BYTES, jinja, variables={"messages": []})


@pytest.mark.parametrize(
    "options",
    [
        {"train_on": "user"},
        {"train_on": ["robot"]},
        {"train_on": []},
        {"truncation": "middle"},
        {"max_length": 0},
        {"format": "sharepoint"},
        {"format": "columns"},
        {"columns": {"asker": "q"}},
        {"end_of_turn": "<|nothing|>"},
        {"keep": "input_ids"},
        {"variables": {"x": object()}},
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FormatChat(BYTES, "plain", **options)


def test_the_fingerprint_changes_with_everything_that_changes_the_result() -> None:
    variants = [
        FormatChat(BYTES, "plain"),
        FormatChat(ByteTokenizer(), "plain"),
        FormatChat(BYTES, "chatml"),
        FormatChat(BYTES, "plain", train_on="last"),
        FormatChat(BYTES, "plain", include_eot=False),
        FormatChat(BYTES, "plain", max_length=8),
        FormatChat(BYTES, "plain", max_length=8, truncation="left"),
        FormatChat(BYTES, "plain", variables={"x": 1}),
        FormatChat(BYTES, "plain", now=datetime(1999, 5, 1)),
        *(FormatChat(BYTES, "plain", gate={name: False}) for name in GATE),
    ]
    prints = [variant.fingerprint for variant in variants]
    assert len(set(prints)) == len(prints)
    assert FormatChat(BYTES, "plain").fingerprint == prints[0]


def test_a_copy_sent_to_another_process_works() -> None:
    transform = FormatChat(BYTES, "chatml")
    copy = cloudpickle.loads(cloudpickle.dumps(transform))
    assert copy.transform(batch_of(CHAT)).equals(transform.transform(batch_of(CHAT)))
    assert copy.fingerprint == transform.fingerprint


def test_in_a_pipeline_bad_rows_are_counted_by_kind(tmp_path: Path) -> None:
    rows = [
        {"messages": CHAT},
        {"messages": [HI]},
        {"messages": [HI, {"role": "assistant", "content": ""}]},
        {"messages": [HI, {"role": "assistant", "content": "a<|im_start|>b"}]},
        {"messages": [{"role": "wizard", "content": "x"}, YES]},
        {"messages": [HI, YES]},
    ]
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sink = MemorySink()
    report = Pipeline(
        JsonlSource(file), [FormatChat(BYTES, "chatml")], sink, config=PipelineConfig(on_error="skip")
    ).run()
    assert len(sink.rows()) == 2
    kinds = {reason.rsplit(": ", 1)[1]: n for reason, n in report.skipped.items()}
    assert kinds == {
        "NoAssistantTurnError": 1,
        "EmptyContentError": 1,
        "SpecialTokenInContentError": 1,
        "UnknownRoleError": 1,
    }


def test_in_a_pipeline_an_error_counts_rows_in_the_file_only(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in (CHAT, CHAT, [HI])))
    with pytest.raises(StageError) as caught:
        Pipeline(JsonlSource(file), [FormatChat(BYTES, "chatml")], MemorySink()).run()
    assert "row 2" in str(caught.value)
    assert "of the batch" not in str(caught.value)


def test_in_a_pipeline_the_result_does_not_depend_on_threads_and_batches() -> None:
    rows = [{"messages": [{**HI, "content": f"number {i}"}, YES]} for i in range(200)]
    results = []
    for workers, batch_rows in ((1, 200), (3, 7)):
        sink = MemorySink()
        config = PipelineConfig(workers=workers, batch_rows=batch_rows)
        Pipeline(MemorySource(rows), [FormatChat(BYTES, "chatml")], sink, config=config).run()
        results.append(sink.rows())
    assert results[0] == results[1]
    assert len(results[0]) == 200


def test_processes_give_the_same_rows_and_counts_as_threads() -> None:
    rows = [{"messages": [{**HI, "content": "x" * i}, YES]} for i in range(40)]
    results = []
    for workers in (2, "process"):
        sink, transform = MemorySink(), FormatChat(BYTES, "plain", max_length=20, truncation="left")
        Pipeline(MemorySource(rows), [transform], sink, config=PipelineConfig(workers=workers, max_workers=1)).run()
        results.append((sink.rows(), transform.counts, transform.dropped_tokens))
    assert results[0] == results[1]
    assert results[0][2]["truncated on the left"] > 0


def test_the_way_turns_are_found_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.chat.format_chat"):
        FormatChat(BYTES, "chatml")
    assert "generation" in caplog.text


def test_a_row_of_ten_megabytes_is_a_row_like_any_other() -> None:
    word = "x" * 10_000_000
    made = FormatChat(BYTES, "chatml").transform(batch_of([HI, {"role": "assistant", "content": word}]))
    mask = made["loss_mask"].values.to_numpy(zero_copy_only=False)
    assert np.count_nonzero(mask) == len(word) + 1
    edges = np.flatnonzero(np.diff(mask))
    assert len(list(pairwise(edges))) == 1


def test_nul_characters_and_control_characters_pass_through() -> None:
    text = "a\x00b\x1b\u200b\ufeffc"
    made = FormatChat(BYTES, "plain").transform(batch_of([HI, {"role": "assistant", "content": text}]))
    assert marked(made) == f"<bos>Hi ü\n⟦{text}<eos>⟧\n"
