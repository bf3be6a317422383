"""Half of a surrogate pair in JSON is refused in words, with its file and row."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from penstock import Pipeline, PipelineConfig
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.errors import DataError, PenstockError
from penstock.sinks import MemorySink
from penstock.sources import JsonlSource, JsonSource
from penstock.sources.jsonl import _lone_surrogate

CHAT = r'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a \ud83d b"}]}'


def trained(folder: Path) -> Path:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the water"], trainer)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("bad", [r"a \ud800 b", r"\udc00", r"\ud83d\ud83c\udf89", r"\\\ud800", r"\ud83d \udf89"])
@pytest.mark.parametrize("source", [JsonlSource, JsonSource])
def test_half_a_pair_is_refused_with_its_row(tmp_path: Path, source: type[JsonlSource], bad: str) -> None:
    rows = ['{"text": "fine"}', f'{{"text": "{bad}"}}', r'{"text": "\ud83c\udf89 fine"}']
    file = tmp_path / ("rows.jsonl" if source is JsonlSource else "rows.json")
    file.write_text("\n".join(rows) if source is JsonlSource else f"[{','.join(rows)}]")
    with pytest.raises(DataError, match=r"row 1\b") as caught:
        Pipeline(source(file), [], MemorySink()).run()
    assert file.name in str(caught.value)
    report = Pipeline(source(file), [], sink := MemorySink(), config=PipelineConfig(on_error="skip")).run()
    assert [row["text"] for row in sink.rows()] == ["fine", "\U0001f389 fine"]
    assert report.rows_out == 2


@pytest.mark.parametrize("source", [JsonlSource, JsonSource])
def test_columns_are_known_though_every_row_has_half_a_pair(tmp_path: Path, source: type[JsonlSource]) -> None:
    file = tmp_path / ("rows.jsonl" if source is JsonlSource else "rows.json")
    file.write_text(CHAT)
    assert source(file).first_columns() == ["messages"]
    assert source(file).schema.names == ["messages"]
    assert source(file, mixed="json").schema.names == ["messages"]


def test_a_chat_with_half_a_pair_is_refused_with_its_row(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(CHAT)
    with pytest.raises(PenstockError, match=r"chats\.jsonl.*row 0\b"):
        prepare(file, tmp_path / "chats.store", Recipe(tokenizer=trained(tmp_path), template="chatml"))


@pytest.mark.parametrize(
    ("record", "half"),
    [
        (rb"plain", None),
        (rb"\u00e9 \ud83c\udf89", None),
        (rb"\\ud800", None),
        (rb"\uD800", "\\uD800"),
        (rb"\ud800\n\udc00", "\\ud800"),
        (rb"\ud83c\udf89\udf89", "\\udf89"),
        (rb"\ud83c\u0041", "\\ud83c"),
        (rb"\ud8", None),
    ],
)
def test_the_half_is_named(record: bytes, half: str | None) -> None:
    assert _lone_surrogate(record) == half
