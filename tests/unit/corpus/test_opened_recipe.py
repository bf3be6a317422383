"""`OpenedRecipe`: the input, the tokenizer and the steps are opened once on the way to the first batch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.chat_corpus import tokenizer_for

from penstock.chat.format_chat import FormatChat
from penstock.chat.templates import load_template
from penstock.loaders import ConversationDataLoader, Recipe
from penstock.sources import JsonlSource, blocks
from penstock.tokenizers.huggingface import HuggingFaceReference
from penstock.tokenizers.load import LoadedTokenizer


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each class was constructed, and how often a source opened a file."""
    counts: Counter[str] = Counter()

    def counted(cls: Any) -> None:
        original = cls.__init__

        def init(self: Any, *args: Any, **options: Any) -> None:
            counts[cls.__name__] += 1
            original(self, *args, **options)

        monkeypatch.setattr(cls, "__init__", init)

    for cls in (JsonlSource, FormatChat, HuggingFaceReference):
        counted(cls)
    original = blocks.open_input

    def open_input(*args: Any, **options: Any) -> Any:
        counts["file"] += 1
        return original(*args, **options)

    monkeypatch.setattr(blocks, "open_input", open_input)
    return counts


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    rows = [[("user", f"q{i}"), ("assistant", f"a{i}")] for i in range(16)]
    lines = [json.dumps({"messages": [{"role": r, "content": c} for r, c in row]}) for row in rows]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path / "chats.jsonl"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a tokenizer that has to be parsed."""
    template = load_template("chatml", None).source
    loaded = tokenizer_for(template)
    assert isinstance(loaded, LoadedTokenizer)
    home = tmp_path / "model"
    home.mkdir()
    (home / "tokenizer.json").write_bytes(loaded._reference._document)  # type: ignore[attr-defined]
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


@pytest.mark.parametrize("template", [None, "chatml"])
def test_a_raw_chat_file_is_opened_once_on_the_way_to_the_first_batch(
    opened: Counter[str], chats: Path, model: Path, tmp_path: Path, template: str | None
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "cache_dir": tmp_path / "cache", "backend": "numpy"}
    opened.clear()
    loader = ConversationDataLoader(chats, str(model), chat_template=template, streaming=False, **options)
    assert next(iter(loader))["input_ids"].shape[0] == 4
    # The columns, the types, the rows.
    assert opened == {"JsonlSource": 1, "FormatChat": 1, "HuggingFaceReference": 1, "file": 3}
    opened.clear()
    again = ConversationDataLoader(chats, str(model), chat_template=template, streaming=False, **options)
    next(iter(again))
    assert opened == {"JsonlSource": 1, "FormatChat": 1, "HuggingFaceReference": 1, "file": 2}, "the store is ready"


def test_a_streamed_chat_file_is_opened_once_before_its_rows_are_read(
    opened: Counter[str], chats: Path, model: Path
) -> None:
    opened.clear()
    loader = ConversationDataLoader(
        chats, str(model), batch_size=4, max_length=64, streaming=True, backend="numpy", prefetch=0
    )
    assert len(loader.state_dict()) > 0
    assert opened["file"] <= 1
    next(iter(loader))
    assert opened["HuggingFaceReference"] == opened["FormatChat"] == 1


def test_a_recipe_has_its_options_in_groups_and_takes_them_as_keywords() -> None:
    recipe = Recipe(tokenizer="byte", column="body", dedup=["exact"], max_length=8)
    assert (recipe.column, recipe.dedup, recipe.max_length, recipe.template) == ("body", ["exact"], 8, None)
    assert recipe.load_tokenizer() is recipe.load_tokenizer()
