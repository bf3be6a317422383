"""Values that a source kept as JSON text are read back: those whose field says so, and no others."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from penstock.chat.format_chat import FormatChat, RowProblem, ToMessages
from penstock.transforms.tokenization import ByteTokenizer

QWEN = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>"))
JSON = {b"penstock.json": b"text"}


def json_field(name: str) -> pa.Field:
    return pa.field(name, pa.string(), metadata=JSON)


def batch_of(rows: list[list[dict[str, Any]]], *fields: pa.Field, **columns: pa.Array) -> pa.RecordBatch:
    """Messages of these fields; what a field keeps as JSON is made JSON."""
    kind = pa.list_(pa.struct(fields))
    marked = {field.name for field in fields if field.metadata}
    given = [[{k: json.dumps(v) if k in marked else v for k, v in message.items()} for message in row] for row in rows]
    return pa.RecordBatch.from_pydict({"messages": pa.array(given, kind), **columns})


def texts(batch: pa.RecordBatch, template: str = "chatml") -> list[str]:
    made = FormatChat(QWEN, template).transform(batch)
    return [QWEN.decode(ids.values.to_numpy()) for ids in made["input_ids"]]


ROLE = pa.field("role", pa.string())
QUESTION = {"role": "user", "content": 'Q "ü"'}
PARTS = {"role": "user", "content": [{"type": "text", "text": "Q "}, {"type": "text", "text": '"ü"'}]}
ANSWER = {"role": "assistant", "content": "A"}
EXPECTED = '<bos><|im_start|>user\nQ "ü"<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n'


def test_contents_that_are_text_here_and_parts_there_are_the_same_text() -> None:
    batch = batch_of([[QUESTION, ANSWER], [PARTS, ANSWER]], ROLE, json_field("content"))
    assert texts(batch) == [EXPECTED, EXPECTED]
    assert texts(batch[1:]) == [EXPECTED]
    made = ToMessages().transform(batch)["messages"].to_pylist()
    assert [message["content"] for row in made for message in row] == ['Q "ü"', "A"] * 2


def test_only_what_its_field_says_is_json_is_read_as_json() -> None:
    batch = batch_of([[{"role": "user", "content": '"Q"'}, ANSWER]], ROLE, pa.field("content", pa.string()))
    assert '"Q"' in texts(batch)[0]
    other = pa.field("content", pa.string(), metadata={b"penstock.json": b"other", b"comment": b"text"})
    given = batch["messages"].cast(pa.list_(pa.struct([ROLE, other])))
    assert '"Q"' in texts(pa.RecordBatch.from_arrays([given], ["messages"]))[0]


def test_arguments_of_calls_are_read_at_their_depth() -> None:
    function = pa.struct([pa.field("name", pa.string()), json_field("arguments")])
    calls = pa.field("tool_calls", pa.list_(pa.struct([pa.field("function", function)])))
    arguments = [{"a": 1}, '{"a": 1}', {"a": ["x", {"b": None}]}]
    rows: list[Any] = [
        [
            {"role": "user", "content": "Q", "tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": json.dumps(given)}}],
            },
        ]
        for given in arguments
    ]
    made = texts(batch_of(rows, ROLE, pa.field("content", pa.string()), calls), "qwen")
    assert [text.split('"arguments": ')[1].split("}\n</tool_call>")[0] for text in made] == [
        '{"a": 1}',
        '{"a": 1}',
        '{"a": ["x", {"b": null}]}',
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_tools_are_read_whether_the_column_is_json_or_something_in_it(whole: bool) -> None:
    tools: list[dict[str, Any]] = [
        {"name": "f", "parameters": {"type": "object", "default": None}},
        {"name": "g", "parameters": []},
    ]
    if whole:
        field = json_field("tools")
        column = pa.array([json.dumps(tools), json.dumps(json.dumps(tools)), "null", None])
    else:
        field = pa.field("tools", pa.list_(pa.struct([pa.field("name", pa.string()), json_field("parameters")])))
        rows = [[{**tool, "parameters": json.dumps(tool["parameters"])} for tool in tools]] * 2
        column = pa.array([*rows, [], None], field.type)
    plain = batch_of([[QUESTION, ANSWER]] * 4, ROLE, pa.field("content", pa.string()))
    schema = pa.schema([plain.schema.field(0), field])
    made = texts(pa.RecordBatch.from_arrays([plain["messages"], column], schema=schema), "qwen")
    listed = "<tools>" + "".join("\n" + json.dumps(tool) for tool in tools) + "\n</tools>"
    assert [listed in text for text in made] == [True, True, False, False]


def test_a_prompt_may_be_text_here_and_messages_there() -> None:
    fields = [json_field(name) for name in ("prompt", "chosen", "rejected")]
    cells = [["Q", [{"role": "user", "content": "Q"}]], ["A", [ANSWER]], [[ANSWER], "A"]]
    arrays = [pa.array([json.dumps(cell) for cell in column]) for column in cells]
    made = FormatChat(QWEN, "plain").transform(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
    for name in ("chosen_input_ids", "rejected_input_ids"):
        assert [QWEN.decode(ids.values.to_numpy()) for ids in made[name]] == ["<bos>Q\nA<eos>\n"] * 2


def test_a_value_that_should_be_json_and_is_not_names_its_row() -> None:
    kind = pa.list_(pa.struct([ROLE, json_field("content")]))
    good = [{"role": "user", "content": '"Q"'}, {"role": "assistant", "content": '"A"'}]
    bad = [good[0], {"role": "assistant", "content": "A"}]
    batch = pa.RecordBatch.from_arrays([pa.array([good, bad], kind)], ["messages"])
    with pytest.raises(RowProblem, match=r"row 1\b.*'content'") as caught:
        FormatChat(QWEN, "chatml").transform(batch)
    assert caught.value.kind == "malformed chat"
    assert [(v.row, v.kind) for v in FormatChat(QWEN, "chatml").check_rows(batch)] == [(1, "malformed chat")]


def test_json_in_large_lists_fixed_lists_and_maps_is_read() -> None:
    message = pa.struct([ROLE, json_field("content")])
    given = [[{"role": "user", "content": json.dumps(PARTS["content"])}, {"role": "assistant", "content": '"A"'}]]
    for kind in (pa.large_list(message), pa.list_(message, 2)):
        assert texts(pa.RecordBatch.from_arrays([pa.array(given, kind)], ["messages"])) == [EXPECTED]
    elements = pa.list_(json_field("element"))
    column = pa.array([[json.dumps(QUESTION), json.dumps(ANSWER)]], elements)
    assert texts(pa.RecordBatch.from_arrays([column], ["messages"])) == [EXPECTED]
