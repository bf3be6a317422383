"""Every form of chat data becomes the same messages, and what is no chat is named."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.chat.format_chat import FormatChat, Gate, RowProblem, ToMessages, detect_format
from penstock.chat.formats import conversations
from penstock.chat.messages import Conversation
from penstock.errors import ConfigError, SchemaError
from penstock.transforms.tokenization import ByteTokenizer

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Yes"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

FORMS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "messages": ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
    "messages as JSON": ({"messages": json.dumps([USER, ANSWER])}, [USER, ANSWER]),
    "messages and a system column": (
        {"messages": [USER, ANSWER], "system": "Be kind."},
        [{"role": "system", "content": "Be kind."}, USER, ANSWER],
    ),
    "content parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]},
        [USER],
    ),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
        [USER, ANSWER],
    ),
    "sharegpt with calls": (
        {
            "conversations": [
                {"from": "human", "value": "Hi"},
                {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                {"from": "observation", "value": "2"},
                {"from": "gpt", "value": "Yes"},
            ]
        },
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
            ANSWER,
        ],
    ),
    "alpaca": (
        {"instruction": "Add", "input": "1 and 1", "output": "2"},
        [{"role": "user", "content": "Add\n\n1 and 1"}, {"role": "assistant", "content": "2"}],
    ),
    "alpaca with the rest": (
        {"instruction": "Hi", "input": None, "output": "Yes", "system": "Be kind.", "history": [["a", "b"]]},
        [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            USER,
            ANSWER,
        ],
    ),
    "prompt and completion": (
        {"prompt": "Hi", "completion": "Yes"},
        [{**USER, "train": False}, ANSWER],
    ),
    "prompt and completion as messages": (
        {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
        [{**USER, "train": False}, {**ANSWER, "train": False}, {**USER, "train": False}, ANSWER],
    ),
    "flags": (
        {"messages": [{**USER, "weight": None}, {**ANSWER, "weight": 0}]},
        [USER, {**ANSWER, "train": False}],
    ),
    "other names for roles": (
        {"messages": [{"role": "human", "content": "Hi"}, {"role": "model", "content": "Yes"}]},
        [USER, ANSWER],
    ),
    "thoughts": (
        {"messages": [{**USER, "thinking": None}, {**ANSWER, "thinking": "hm"}]},
        [USER, {**ANSWER, "reasoning_content": "hm"}],
    ),
}


def one_row(row: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([row])


def messages(row: dict[str, Any], column: str = "messages", **options: Any) -> list[dict[str, Any]]:
    """What `ToMessages` makes of one row, without the fields that are null, tool calls read again."""
    made = ToMessages(**options).transform(one_row(row))[column][0].as_py()
    found = []
    for message in made:
        kept = {key: value for key, value in message.items() if value is not None or key == "content"}
        if "tool_calls" in kept:
            kept["tool_calls"] = json.loads(kept["tool_calls"])
        found.append(kept)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_each_form_becomes_messages(name: str) -> None:
    given, expected = FORMS[name]
    assert messages(given) == expected


@pytest.mark.parametrize("name", FORMS)
def test_messages_stay_messages(name: str) -> None:
    given, _ = FORMS[name]
    once = ToMessages().transform(one_row(given))
    assert ToMessages().transform(once).equals(once)


def test_columns_can_be_named_one_by_one() -> None:
    columns = {"assistant": "answer", "user": "question", "system": "rules"}
    row = {"question": "Hi", "answer": "Yes", "rules": None, "id": 7}
    assert messages(row, columns=columns) == [USER, ANSWER]
    assert ToMessages(columns=columns).transform(one_row(row)).schema.names == ["id", "messages"]
    with pytest.raises(SchemaError, match="'question' of columns="):
        messages({"answer": "Yes", "rules": "x"}, columns=columns)
    with pytest.raises(ConfigError, match="'judge'"):
        ToMessages(columns={"judge": "x"})


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Hi", "chosen": "Yes", "rejected": "No"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "No"}]},
        {"chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No"}]},
        {"prompt": [USER], "chosen": [USER, ANSWER], "rejected": [USER, {**ANSWER, "content": "No"}]},
        {
            "conversations": [{"from": "human", "value": "Hi"}],
            "chosen": {"from": "gpt", "value": "Yes"},
            "rejected": {"from": "gpt", "value": "No"},
        },
    ],
)
def test_preferences_of_all_kinds_are_two_conversations(row: dict[str, Any]) -> None:
    assert messages(row, "chosen") == [{**USER, "train": False}, ANSWER]
    assert messages(row, "rejected") == [{**USER, "train": False}, {**ANSWER, "content": "No"}]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["messages"], "messages"),
        (["conversations", "id"], "sharegpt"),
        (["conversations", "chosen", "rejected"], "preference"),
        (["prompt", "completion"], "prompt_completion"),
        (["prompt", "response"], "prompt_completion"),
        (["instruction", "input", "output"], "alpaca"),
    ],
)
def test_the_form_is_seen_from_the_columns(columns: list[str], expected: str) -> None:
    schema = pa.schema([(name, pa.string()) for name in columns])
    assert detect_format(schema) == expected
    assert detect_format([dict.fromkeys(columns)]) == expected
    assert detect_format(schema.empty_table()) == expected


def test_columns_of_no_known_form_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SchemaError, match=r"'a'.*columns="):
        detect_format(pa.schema([("q", pa.string()), ("a", pa.string())]))
    with pytest.raises(SchemaError, match="'alpaca'"):
        ToMessages("alpaca").transform(one_row({"messages": [USER]}))


BAD: dict[str, tuple[Any, str, str]] = {
    "no messages": ([], "malformed chat", "expected a list of messages"),
    "null": (None, "malformed chat", "expected a list of messages, got None"),
    "broken JSON": ("[{", "malformed chat", "not JSON"),
    "not a list": ('"x"', "malformed chat", "expected a list of messages"),
    "a list of numbers": ("[1]", "malformed chat", "message 0 is 1"),
    "no role": ([{"content": "x"}], "malformed chat", "message 0 has no role"),
    "unknown role": ([{"role": "wizard", "content": "x"}], "unknown role", "'wizard'"),
    "null content": ([USER, {"role": "assistant", "content": None}], "null content", "message 1 .assistant."),
    "content that is a number": ('[{"role": "user", "content": 1}]', "malformed chat", "type int"),
    "an image": (
        [{"role": "user", "content": [{"type": "image", "text": None}]}],
        "malformed chat",
        "content part that is not text",
    ),
    "arguments that are no JSON": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": "{"}]}],
        "tool calls",
        "the arguments of f: not JSON",
    ),
    "arguments with a lone surrogate": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]}],
        "tool calls",
        "not JSON",
    ),
    "a call without a name": (
        [USER, {"role": "assistant", "content": None, "tool_calls": [{"arguments": "{}"}]}],
        "tool calls",
        "needs a name",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_is_no_chat_names_itself_and_its_trouble(name: str) -> None:
    given, kind, told = BAD[name]
    batch = pa.RecordBatch.from_pylist([{"messages": given}] * 3)[1:]
    for transform in (ToMessages(), FormatChat(ByteTokenizer(), "plain")):
        with pytest.raises(RowProblem, match=rf"row 0\b.*{told}") as caught:
            transform.transform(batch)
        assert caught.value.kind == kind
    violations = FormatChat(ByteTokenizer(), "plain").check_rows(batch)
    assert [(violation.row, violation.kind) for violation in violations] == [(0, kind), (1, kind)]


def test_the_only_row_of_a_batch_is_not_counted() -> None:
    for transform in (ToMessages(), FormatChat(ByteTokenizer(), "plain")):
        with pytest.raises(RowProblem, match="messages") as caught:
            transform.transform(one_row({"messages": "[]"}))
        assert caught.value.row == 0


def test_the_columns_that_stay_keep_what_their_fields_say() -> None:
    source = pa.field("source", pa.string(), metadata={b"penstock.json": b"text"})
    batch = pa.RecordBatch.from_pylist([{"messages": [USER, ANSWER], "source": '"a"', "tools": "[]"}])
    batch = batch.set_column(batch.schema.names.index("source"), source, batch["source"])
    assert ToMessages().transform(batch).schema.field("source").equals(source, check_metadata=True)
    made = FormatChat(ByteTokenizer(), "plain", keep="source").transform(batch)
    assert made.schema.field("source").equals(source, check_metadata=True)


def test_a_column_of_tools_that_is_not_read_stays() -> None:
    row = {"question": "Hi", "answer": "Yes", "tools": "[1]"}
    made = ToMessages(columns={"user": "question", "assistant": "answer"}).transform(one_row(row))
    assert made["tools"].to_pylist() == ["[1]"]


SYSTEM = {"role": "system", "content": "Be kind."}
NO = {"role": "assistant", "content": "No"}


@pytest.mark.parametrize(
    ("row", "opening"),
    [
        ({"prompt": "Hi", "chosen": [SYSTEM, USER, ANSWER], "rejected": [SYSTEM, USER, NO]}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [USER, ANSWER], "rejected": [USER, NO]}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM, USER], "chosen": [SYSTEM, USER, ANSWER], "rejected": [NO]}, [SYSTEM, USER]),
        ({"prompt": [SYSTEM], "chosen": [USER, ANSWER], "rejected": [USER, NO]}, [SYSTEM]),
        (
            {
                "prompt": "Hi",
                "chosen": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}],
                "rejected": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "No"}],
            },
            [USER],
        ),
        (
            {
                "prompt": [USER],
                "chosen": [{"role": "human", "content": [{"type": "text", "text": "Hi"}], "id": 7}, ANSWER],
                "rejected": [NO],
            },
            [USER],
        ),
    ],
)
def test_a_prompt_that_both_answers_repeat_counts_once(row: dict[str, Any], opening: list[dict[str, Any]]) -> None:
    field = pa.field("x", pa.string(), metadata={b"penstock.json": b"text"})
    arrays = [pa.array([json.dumps(value)]) for value in row.values()]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema([field.with_name(name) for name in row]))
    made = ToMessages().transform(batch)
    for side, last in (("chosen", ANSWER), ("rejected", NO)):
        found = [(m["role"], m["content"], m["train"]) for m in made[side][0].as_py()]
        prompt = [*opening, *([] if USER in opening else [USER])]
        expected = [(m["role"], m["content"], False if m in opening else None) for m in prompt]
        assert found == [*expected, (last["role"], last["content"], None)]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "Hi", "chosen": [{**USER, "content": "Ho"}, ANSWER], "rejected": [USER, NO]}, "'prompt'"),
        ({"prompt": [USER, ANSWER, USER], "chosen": [USER, ANSWER], "rejected": [NO]}, "'prompt'"),
        ({"prompt": [USER], "chosen": [SYSTEM, ANSWER], "rejected": [NO]}, "'prompt'"),
        (
            {"prompt": [SYSTEM, USER], "chosen": [{**SYSTEM, "content": "!"}, USER, ANSWER], "rejected": [NO]},
            "prompt",
        ),
        ({"prompt": "Hi", "chosen": [], "rejected": [NO]}, "chosen"),
    ],
)
def test_a_prompt_that_is_repeated_otherwise_is_an_error(row: dict[str, Any], told: str) -> None:
    with pytest.raises(RowProblem, match=told):
        messages(row, "chosen")


def test_a_completion_may_repeat_its_prompt_too() -> None:
    expected = [{**USER, "train": False}, ANSWER]
    assert messages({"prompt": [USER], "completion": [USER, ANSWER]}) == expected
    assert messages({"prompt": "Hi", "completion": [USER, ANSWER]}) == expected
    longer = [{**USER, "train": False}, {**ANSWER, "train": False}, USER, ANSWER]
    again = {**USER, "content": "Again"}
    assert messages({"prompt": [USER, ANSWER], "completion": [again, ANSWER]}) == [*longer[:2], again, ANSWER]


def test_a_system_column_beside_a_system_message_must_say_the_same() -> None:
    row = {"messages": [SYSTEM, USER, ANSWER], "system": "Be kind."}
    assert messages(row) == [SYSTEM, USER, ANSWER]
    with pytest.raises(RowProblem, match=r"'system'.*system"):
        messages({**row, "system": "Be cruel."})
    with pytest.raises(RowProblem, match="'system'"):
        messages({**row, "system": 7})


def test_an_alpaca_row_of_other_types_names_its_trouble() -> None:
    row = {"instruction": "Hi", "output": "Yes"}
    for history in ([["x"]], [["x", "y", "z"]], "[1]", "{", 7, [{"a": "b"}]):
        with pytest.raises(RowProblem, match="history"):
            messages({**row, "history": history})
    with pytest.raises(RowProblem, match="'instruction'"):
        messages({**row, "instruction": 7})
    with pytest.raises(RowProblem, match="'input'"):
        messages({**row, "input": 7})
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert messages({**row, "history": '[["a", "b"]]'}) == [*turns, USER, ANSWER]


plain_values = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "Hi", "user", "[]", "{", "null"])
values = st.recursive(
    plain_values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "tool_calls", "function", "name", "arguments"]), inner
        )
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    "columns",
    [
        ("messages", "system", "tools"),
        ("conversations",),
        ("instruction", "input", "output", "history", "system"),
        ("prompt", "completion", "tools"),
        ("prompt", "chosen", "rejected"),
        ("chosen", "rejected"),
    ],
)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_a_row_holds_it_is_a_chat_or_a_problem_of_that_row(columns: tuple[str, ...], data: Any) -> None:
    cells = [data.draw(values) for _ in columns]
    fields = [pa.field(name, pa.string(), metadata={b"penstock.json": b"text"}) for name in columns]
    batch = pa.RecordBatch.from_arrays([pa.array([json.dumps(cell)]) for cell in cells], schema=pa.schema(fields))
    (row,) = conversations(batch, detect_format(batch))
    assert isinstance(row, RowProblem) or all(isinstance(side, Conversation) for side in row)


def test_empty_instructions_and_answers_without_prompts_are_named() -> None:
    with pytest.raises(RowProblem, match=r"instruction.*\binput\b"):
        messages({"instruction": "", "input": None, "output": "x"})
    with pytest.raises(RowProblem, match="'prompt'"):
        messages({"chosen": [USER, ANSWER], "rejected": [{**USER, "content": "?"}, ANSWER]}, "chosen")
    with pytest.raises(RowProblem, match="prompt"):
        messages({"prompt": None, "completion": "x"})


def test_keys_that_other_rows_have_are_not_seen_by_the_template() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m.content or '' }}{{ '!' if m.tool_calls is defined else '.' }}"
        "{{ '?' if m.name is defined else '' }}{{ eos_token }}{% endfor %}"
    )
    rows = [
        {"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]},
        {"messages": [{**USER, "name": "Ann"}, ANSWER]},
    ]
    lenient = FormatChat(ByteTokenizer(), template, gate=Gate(parts=False))
    made = lenient.transform(pa.RecordBatch.from_pylist(rows))
    texts = [ByteTokenizer().decode(ids.values.to_numpy()) for ids in made["input_ids"]]
    assert texts == ["<bos>Hi.<eos>Yes!<eos>", "<bos>Hi.?<eos>Yes.<eos>"]
    nulls = json.dumps([{**USER, "name": None, "tool_calls": None}, {**ANSWER, "name": None}])
    made = lenient.transform(one_row({"messages": nulls}))
    assert ByteTokenizer().decode(made["input_ids"].values.to_numpy()) == "<bos>Hi.<eos>Yes.<eos>"


def test_calls_tools_and_thoughts_are_written_by_the_qwen_template() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    rows = {
        "messages": [
            [
                {"role": "system", "content": "Be kind."},
                USER,
                {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": json.dumps([CALL])},
                {"role": "tool", "content": "2"},
                {"role": "tool", "content": "3"},
                ANSWER,
            ]
        ],
        "tools": [json.dumps(tools)],
    }
    tokenizer = ByteTokenizer(("<|im_start|>", "<|im_end|>"))
    made = FormatChat(tokenizer, "qwen").transform(pa.RecordBatch.from_pydict(rows))
    ids, mask = made["input_ids"][0].values.to_numpy(), made["loss_mask"][0].values.to_numpy(zero_copy_only=False)
    text = tokenizer.decode(ids)
    assert f"<tools>\n{json.dumps(tools[0])}\n</tools>" in text
    assert (
        "<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>" in text
    )
    assert tokenizer.decode(ids[mask]) == (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
        "Yes<|im_end|>"
    )


def test_a_template_that_would_leave_tools_out_is_not_used_for_them() -> None:
    transform = FormatChat(ByteTokenizer(), "plain")
    with pytest.raises(RowProblem, match="'tools'"):
        transform.transform(one_row({"messages": [USER, ANSWER], "tools": '[{"name": "f"}]'}))
    calling = {"role": "assistant", "content": "x", "tool_calls": [{"name": "f", "arguments": "{}"}]}
    with pytest.raises(RowProblem, match=r"tool_calls\[0\]\.name"):
        transform.transform(one_row({"messages": [USER, calling]}))
    assert transform.transform(one_row({"messages": [USER, ANSWER], "tools": "[]"})).num_rows == 1


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
def test_a_template_that_would_leave_thoughts_out_is_not_used_for_them(key: str) -> None:
    row = {"messages": [USER, {**ANSWER, key: "hm"}]}
    with pytest.raises(RowProblem, match=rf"message 1\b.*{key}") as caught:
        FormatChat(ByteTokenizer(), "plain").transform(one_row(row))
    assert caught.value.kind == "thoughts left out"
    assert FormatChat(ByteTokenizer(), "plain").transform(one_row({"messages": [USER, {**ANSWER, key: ""}]})).num_rows
    enabling = "{{ bos_token }}{{ enable_thinking }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    with pytest.raises(RowProblem, match="allow_lost="):
        FormatChat(ByteTokenizer(), enabling).transform(one_row(row))
    writing = enabling.replace("m.content", "(m.thinking or '') + m.content")
    made = FormatChat(ByteTokenizer(), writing).transform(one_row(row))
    assert ByteTokenizer().decode(made["input_ids"].values.to_numpy()) == "<bos>Hi<eos>hmYes<eos>"


def test_the_developer_is_the_system_where_a_template_knows_no_developer() -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    row = {"messages": [{"role": "developer", "content": "x"}, USER, ANSWER]}
    made = FormatChat(ByteTokenizer(), template).transform(one_row(row))
    assert ByteTokenizer().decode(made["input_ids"].values.to_numpy()).startswith("<bos>system:x")


def test_a_template_that_wants_parts_gets_them() -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{{ eos_token }}"
        "{% endfor %}"
    )
    made = FormatChat(ByteTokenizer(), template).transform(one_row({"messages": [USER, ANSWER]}))
    assert ByteTokenizer().decode(made["input_ids"].values.to_numpy()) == "<bos>Hi<eos>Yes<eos>"
