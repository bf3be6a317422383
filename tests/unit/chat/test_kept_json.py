"""JSON inside of chats reaches the template as it stands in the file, whatever the other rows hold, by every way in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import ConversationDataLoader, Pipeline
from penstock.chat.format_chat import FormatChat, RowProblem
from penstock.errors import StageError
from penstock.files.json_values import dumps, loads
from penstock.loaders import Recipe, prepare
from penstock.pipeline import PipelineConfig
from penstock.sources import ArrowSource, IteratorSource, JsonlSource, JsonSource, MemorySource, ParquetSource
from penstock.store import open_store
from penstock.transforms import Filter, Rename
from penstock.transforms.tokenization import ByteTokenizer

BYTES = ByteTokenizer(("<bos>", "<eos>", "<|im_start|>", "<|im_end|>"))
ARGUMENTS = [
    '{"x": 1}',
    '{"x": 2.5}',
    '{"x": [1, 2]}',
    '{"x": [2.5]}',
    '{"b": 3, "a": 4}',
    '{"a": 1, "b": null}',
    '{"n": 9223372036854775808}',
    '{"n": 12345678901234567890123}',
    '{"price": 1.50, "e": 1e5, "minus": -0}',
    '{"deep": {"y": [{"z": null}, 1.0]}}',
    "{}",
]
TOOL = '{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"default": %s}}}'
LINE = (
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": null, "tool_calls": '
    '[{"type": "function", "function": {"name": "f", "arguments": %s}}]}], "tools": [%s]}'
)
LINES = [LINE % (text, TOOL % text) for text in ARGUMENTS]


def written(batches: Any) -> list[str]:
    """The arguments that are trained on, row by row."""
    made = []
    for batch in batches:
        for ids in batch["input_ids"]:
            made.append(arguments_of(BYTES.decode(ids.values.to_numpy())))
    return made


def arguments_of(text: str) -> str:
    called = text.rindex('"arguments": ') + len('"arguments": ')
    return text[called : text.index("}\n</tool_call>", called)]


def sources(folder: Path) -> Iterator[tuple[str, Any]]:
    """The same rows by every way in that keeps JSON."""
    (folder / "a.jsonl").write_text("\n".join(LINES) + "\n")
    (folder / "a.json").write_text("[" + ",\n".join(LINES) + "]")
    for number, line in enumerate(LINES):
        (folder / "cut").mkdir(exist_ok=True)
        (folder / "cut" / f"{number:02}.jsonl").write_text(line + "\n")
    rows = [loads(line) for line in LINES]
    texts = [{name: dumps(value) for name, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), folder / "a.parquet")
    with pa.ipc.new_file(folder / "a.arrow", pa.Table.from_pylist(texts).schema) as sink:
        sink.write_table(pa.Table.from_pylist(texts))
    yield "jsonl", JsonlSource(folder / "a.jsonl")
    yield "json", JsonSource(folder / "a.json")
    yield "cut", JsonlSource(folder / "cut")
    yield "parquet", ParquetSource(folder / "a.parquet")
    yield "arrow", ArrowSource(folder / "a.arrow")
    yield "iterator", IteratorSource(rows)
    yield "memory", MemorySource(texts)


def test_arguments_are_those_of_the_row_by_every_way_in(tmp_path: Path) -> None:
    for name, source in sources(tmp_path):
        for workers in (1, 2):
            pipeline = Pipeline(
                source, [FormatChat(BYTES, "qwen")], config=PipelineConfig(workers=workers, batch_rows=3)
            )
            assert written(pipeline) == ARGUMENTS, name


def test_the_schemas_of_tools_keep_their_spelling_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES) + "\n")
    for batch in Pipeline(JsonlSource(tmp_path / "a.jsonl"), [FormatChat(BYTES, "qwen")]):
        for ids, given_text in zip(batch["input_ids"], ARGUMENTS):
            assert f'"parameters": {{"default": {given_text}}}' in BYTES.decode(ids.values.to_numpy())


def test_stores_and_streams_hold_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES) + "\n")
    prepare(tmp_path / "a.jsonl", tmp_path / "whole.store", Recipe(tokenizer=BYTES, template="qwen"))
    with open_store(tmp_path / "whole.store") as store:
        assert [arguments_of(BYTES.decode(store[i]["input_ids"])) for i in range(len(store))] == ARGUMENTS
    for streaming in (False, True):
        loader = ConversationDataLoader(
            tmp_path / "a.jsonl",
            BYTES,
            4096,
            "qwen",
            streaming=streaming,
            backend="numpy",
            cache_dir=tmp_path / "cache",
        )
        with loader:
            texts = [
                BYTES.decode(ids[: ids.tolist().index(0)] if 0 in ids else ids) for b in loader for ids in b.input_ids
            ]
        assert sorted(map(arguments_of, texts)) == sorted(ARGUMENTS)


@given(
    st.lists(
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers()
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
            max_leaves=6,
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=60, deadline=None)
def test_json_comes_back_as_it_was(given_values: list[Any]) -> None:
    text = json.dumps(given_values, ensure_ascii=False)
    assert dumps(loads(text)) == text
    assert loads(text) == json.loads(text)


@pytest.mark.parametrize("text", ["1.50", "1e5", "-0", "-0.0", "1E+2", "123456789012345678901234567890", "0.1e-7"])
def test_numbers_keep_their_spelling(text: str) -> None:
    value = loads(f'{{"x": [{text}]}}')
    assert dumps(value) == f'{{"x": [{text}]}}'
    assert str(value["x"][0]) == text
    assert value["x"][0] == json.loads(text)


def test_arguments_given_as_text_stay_that_text(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
        '{"arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}{% else %}{{ m.content }}{% endif %}{{ eos_token }}{% endfor %}"
    )
    texts = ['{"price":1.50,"e":1e5}', '{ "a" :  12345678901234567890123 }', '{"b":{},"a":null}']
    lines = [(LINE % (json.dumps(text), "")).replace(', "tools": []', "") for text in texts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    made = Pipeline(JsonlSource(tmp_path / "a.jsonl"), [FormatChat(ByteTokenizer(), template)])
    found = [ByteTokenizer().decode(ids.values.to_numpy()) for batch in made for ids in batch["input_ids"]]
    assert [arguments_of(text) for text in found] == texts


def test_objects_that_a_function_has_given_one_type_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES[:2]) + "\n")
    pipeline = Pipeline(JsonlSource(tmp_path / "a.jsonl"), [lambda row: row, FormatChat(BYTES, "qwen")])
    with pytest.raises(StageError, match="FormatChat"):
        list(pipeline)


@pytest.mark.parametrize("key", ["loss_weight", "weight", "train"])
def test_a_message_with_weight_zero_is_not_trained_on(key: str) -> None:
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "BAD", key: 0.0}]
    more = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "good"}]
    made = FormatChat(BYTES, "chatml").transform(pa.RecordBatch.from_pydict({"messages": [json.dumps([*row, *more])]}))
    ids, mask = made["input_ids"].values.to_numpy(), made["loss_mask"].values.to_numpy(zero_copy_only=False)
    assert BYTES.decode(ids[mask]) == "good<|im_end|>"


@pytest.mark.parametrize("key", ["lossMask", "loss_scale", "trainable", "is_masked", "sample_weight", "supervised"])
def test_a_key_that_looks_like_a_flag_is_refused_by_name(key: str) -> None:
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: 0}]
    with pytest.raises(RowProblem, match=key):
        FormatChat(BYTES, "chatml").transform(pa.RecordBatch.from_pydict({"messages": [json.dumps(row)]}))


def test_a_weight_between_is_refused_by_name() -> None:
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0.5}]
    with pytest.raises(RowProblem, match=r"weight=0\.5"):
        FormatChat(BYTES, "chatml").transform(pa.RecordBatch.from_pydict({"messages": [json.dumps(row)]}))


def test_text_parts_may_have_their_text_by_other_names() -> None:
    row = [{"role": "user", "content": [{"type": "text", "value": "q"}]}, {"role": "assistant", "content": "a"}]
    made = FormatChat(BYTES, "chatml").transform(pa.RecordBatch.from_pydict({"messages": [json.dumps(row)]}))
    assert "user\nq<|im_end|>" in BYTES.decode(made["input_ids"].values.to_numpy())


def test_a_source_whose_types_are_known_already_is_asked_again_or_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES) + "\n")
    looked_at = JsonlSource(tmp_path / "a.jsonl", mixed="json")
    assert "messages" in looked_at.schema.names
    assert written(Pipeline(looked_at, [FormatChat(BYTES, "qwen")])) == ARGUMENTS
    (tmp_path / "b.jsonl").write_text("\n".join(LINES[:2]).replace('"messages"', '"dialog"') + "\n")
    renamed = Pipeline(JsonlSource(tmp_path / "b.jsonl"), [Rename({"dialog": "messages"}), FormatChat(BYTES, "qwen")])
    with pytest.raises(StageError, match="FormatChat"):
        list(renamed)


def test_a_filter_before_chats_sees_lists_and_not_text(tmp_path: Path) -> None:
    plain = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]})
    (tmp_path / "a.jsonl").write_text(plain + "\n" + plain + "\n")
    kept = Pipeline(
        JsonlSource(tmp_path / "a.jsonl"), [Filter(lambda row: len(row["messages"]) == 2), FormatChat(BYTES, "qwen")]
    )
    assert sum(batch.num_rows for batch in kept) == 2


@pytest.mark.parametrize("form", ["rows", "columns", "pandas"])
def test_python_values_in_memory_keep_their_spelling(form: str) -> None:
    rows = [json.loads(line) for line in LINES[:6]]
    data: Any = rows
    if form == "columns":
        data = {name: [row[name] for row in rows] for name in rows[0]}
    elif form == "pandas":
        data = pytest.importorskip("pandas").DataFrame(rows)
    assert written(Pipeline(MemorySource(data), [FormatChat(BYTES, "qwen")])) == ARGUMENTS[:6]
