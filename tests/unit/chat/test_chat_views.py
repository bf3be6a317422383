"""Chats whose texts are string views give what usual strings give, whichever rows share a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from corpus_files import tokenizer_dir
from penstock.chat.chosen_rows import chosen_rows
from penstock.chat.format_chat import FormatChat
from penstock.transforms import FormatPreference
from penstock.transforms.tokenization import ByteTokenizer

BYTES = ByteTokenizer(("<eos>", "<|im_start|>", "<|im_end|>"))
VIEW = pa.string_view()


def said(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(("user", "assistant"), contents)]


def viewed(kind: pa.DataType) -> pa.DataType:
    """The type with views for texts, inside of lists and structs too."""
    if pa.types.is_string(kind):
        return VIEW
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(viewed(field.type)) for field in kind])
    return pa.list_(viewed(kind.value_type)) if pa.types.is_list(kind) else kind


def both(*rows: dict[str, Any]) -> tuple[pa.RecordBatch, pa.RecordBatch]:
    """The rows with strings, and with views."""
    batch = pa.RecordBatch.from_pylist(list(rows))
    schema = pa.schema([field.with_type(viewed(field.type)) for field in batch.schema])
    return batch, batch.cast(schema)


def test_rows_for_the_layout_and_rows_for_the_template_share_a_batch() -> None:
    chat = FormatChat(tokenizer_dir("qwen3"))
    strings, views = both(
        {"messages": said("hi", "ok")}, {"messages": said("hi", "<think>a</think>b ok")}, {"messages": said("hi", "no")}
    )
    assert chat.transform(views) == chat.transform(strings)
    assert chat.check_rows(views) == []


def test_a_row_with_a_system_column_beside_one_without() -> None:
    chat = FormatChat(BYTES, "chatml")
    for name, messages in (
        ("messages", said("Hi", "Yes")),
        ("conversations", [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]),
    ):
        strings, views = both({name: messages, "system": None}, {name: messages, "system": "Be kind."})
        assert chat.transform(views) == chat.transform(strings)


def test_nested_texts_beside_a_chat_are_kept_as_views() -> None:
    rows = [{"messages": said("Hi", answer), "notes": [{"by": answer}]} for answer in ("Yes", "No " * 99, "Perhaps")]
    chat = FormatChat(BYTES, "chatml", keep="notes", max_length=100, truncation="drop")
    strings, views = both(*rows)
    made = chat.transform(views)
    assert made.to_pylist() == chat.transform(strings).to_pylist()
    assert made.column("notes").to_pylist() == [rows[0]["notes"], rows[2]["notes"]]
    assert made.schema.field("notes").type == views.schema.field("notes").type


def test_preferences_with_views() -> None:
    rows = [
        {"prompt": said("Hi"), "chosen": [said("", "Yes")[1]], "rejected": [said("", no)[1]], "notes": [no]}
        for no in ("No", "", "Perhaps")
    ]
    shape = FormatPreference(BYTES, "chatml", keep="notes")
    strings, views = both(*rows)
    assert [found.row for found in shape.check_rows(views)] == [1]
    assert shape.check_rows(views) == shape.check_rows(strings)
    good = [batch.slice(2) for batch in (strings, views)]
    assert shape.transform(good[1]).to_pylist() == shape.transform(good[0]).to_pylist()


NAMED = pa.field("name", VIEW, metadata={"origin": "tags"})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (VIEW, ["a", None, "b"]),
        (pa.binary_view(), [b"a", None, b"b"]),
        (pa.list_(VIEW), [["a", None], None, []]),
        (pa.large_list(pa.struct([NAMED])), [[{"name": "a"}], None, []]),
        (pa.list_(VIEW, 2), [["a", "b"], None, [None, "c"]]),
        (pa.list_view(pa.struct([NAMED])), [[{"name": "a"}], None, []]),
        (pa.struct([NAMED, ("n", pa.list_(VIEW))]), [{"name": "a", "n": ["b"]}, None, {"name": None, "n": None}]),
        (pa.map_(VIEW, VIEW), [[("a", "b")], None, []]),
        (pa.list_(pa.dictionary(pa.int8(), pa.string())), [["a", "a"], None, []]),
        (pa.json_(), ["1", None, "[]"]),
    ],
)
def test_chosen_rows_have_the_type_of_the_column(kind: pa.DataType, values: list[Any]) -> None:
    schema = pa.schema([pa.field("it", kind, metadata={"field": "1"})], metadata={"schema": "2"})
    batch = pa.RecordBatch.from_arrays([pa.array(values, kind)], schema=schema)
    made = chosen_rows(batch, np.array([2, 1, 0, 2]))
    assert made.to_pylist() == [batch.to_pylist()[row] for row in (2, 1, 0, 2)]
    assert made.schema.equals(schema, check_metadata=True)
    assert chosen_rows(batch, np.array([], np.int64)).num_rows == 0
