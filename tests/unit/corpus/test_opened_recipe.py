"""`OpenedRecipe`: the input, the tokenizer and the steps are opened once on the way to the first batch."""

from __future__ import annotations

import gc
import json
import os
import pickle
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.chat_corpus import tokenizer_for

import penstock
from penstock.batching.masked_lm import WordBorders
from penstock.chat.format_chat import FormatChat
from penstock.chat.templates import load_template
from penstock.loaders import ConversationDataLoader, PretrainDataLoader, Recipe
from penstock.sources import JsonlSource, blocks
from penstock.tokenizers.huggingface import HuggingFaceReference
from penstock.tokenizers.load import LoadedTokenizer, load_tokenizer
from penstock.transforms.tokenization import ByteTokenizer


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


@pytest.fixture
def documents(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the documents that `tokenizers` has parsed."""
    sizes: list[int] = []

    original = HuggingFaceReference._load

    def load(self: HuggingFaceReference) -> Any:
        sizes.append(len(self._document))
        return original(self)

    monkeypatch.setattr(HuggingFaceReference, "_load", load)
    return sizes


@pytest.mark.parametrize("template", [None, "chatml"])
def test_a_raw_chat_file_is_read_once_for_its_types_and_once_for_its_rows(
    opened: Counter[str], documents: list[int], chats: Path, model: Path, tmp_path: Path, template: str | None
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "cache_dir": tmp_path / "cache", "backend": "numpy"}
    _make_unknown(model)
    opened.clear()
    documents.clear()
    loader = ConversationDataLoader(chats, str(model), chat_template=template, streaming=False, **options)
    first = next(iter(loader))["input_ids"]
    assert first.shape[0] == 4
    assert (opened["JsonlSource"], opened["FormatChat"], opened["file"]) == (1, 1, 2)
    size = (model / "tokenizer.json").stat().st_size
    assert len([one for one in documents if one > size // 2]) == 1, "the two modes share one vocabulary"
    opened.clear()
    documents.clear()
    again = ConversationDataLoader(chats, str(model), chat_template=template, streaming=False, **options)
    assert (next(iter(again))["input_ids"] == first).all()
    assert not opened, "the store is ready: neither rows nor template nor tokenizer are looked at"
    assert not documents


def _make_unknown(model: Path) -> None:
    """Give the tokenizer a vocabulary that no earlier test has loaded."""
    document = json.loads((model / "tokenizer.json").read_text())
    document["added_tokens"].append(document["added_tokens"][-1] | {"content": f"<|{model}|>", "id": 1 << 20})
    (model / "tokenizer.json").write_text(json.dumps(document))


def _row_ids(loader: ConversationDataLoader) -> list[Any]:
    return [batch["input_ids"].tolist() for batch in loader]


def test_a_changed_input_template_or_tokenizer_is_another_store(chats: Path, model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "cache_dir": tmp_path / "cache", "backend": "numpy"}

    def rows(**more: Any) -> list[Any]:
        with ConversationDataLoader(chats, str(model), **options, shuffle=False, **more) as loader:
            return _row_ids(loader)

    first = rows()
    assert rows() == first
    assert rows(chat={"train_on": "all"}) == first
    assert len(list((tmp_path / "cache" / "stores").glob("[!.]*"))) == 2, "other masks, other store"
    text = chats.read_text()
    chats.write_text(text.replace('"q3"', '"q3 and more"'))
    changed = rows()
    assert changed != first
    chats.write_text(text)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
    config["chat_template"] += "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert rows() != first


def test_a_store_that_vanished_is_made_again(chats: Path, model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "cache_dir": tmp_path / "cache", "backend": "numpy"}
    with ConversationDataLoader(chats, str(model), **options) as loader:
        first = _row_ids(loader)
    (store,) = (tmp_path / "cache" / "stores").glob("[!.]*")
    shutil.rmtree(store)
    with ConversationDataLoader(chats, str(model), **options) as loader:
        assert _row_ids(loader) == first
    assert store.exists()


def test_a_known_tokenizer_is_parsed_when_it_encodes_and_pickles_as_itself(documents: list[int], model: Path) -> None:
    _make_unknown(model)
    first = load_tokenizer(model)
    texts = pa.array(["hello <|im_end|>", "q1"])
    expected = first.encode(texts, parse_special=True)
    documents.clear()
    known = load_tokenizer(model)
    assert isinstance(known, LoadedTokenizer)
    assert (known.fingerprint, known.special, known.vocab_size) == (first.fingerprint, first.special, first.vocab_size)
    assert not documents
    assert WordBorders.of(known).fingerprint() == WordBorders.of(first).fingerprint()
    copy = pickle.loads(pickle.dumps(known))  # noqa: S301 - made here
    assert copy.encode(texts, parse_special=True) == expected
    assert known.encode(texts, parse_special=True) == expected
    assert known.encode(texts) == first.encode(texts) != expected


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
    assert opened["FormatChat"] == 1
    assert opened["HuggingFaceReference"] <= 1


def test_a_recipe_has_its_options_in_groups_and_takes_them_as_keywords() -> None:
    recipe = Recipe(tokenizer="byte", column="body", dedup=["exact"], max_length=8)
    assert (recipe.column, recipe.dedup, recipe.max_length, recipe.template) == ("body", ["exact"], 8, None)
    assert recipe.load_tokenizer() is recipe.load_tokenizer()


def test_fewer_than_forty_modules_run_from_a_chat_file_to_the_first_batch_once_its_store_exists(
    chats: Path, model: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 4, "max_length": 64, "cache_dir": tmp_path / "cache", "backend": "numpy"}
    hour_ago = time.time() - 3600
    for file in (chats, *model.iterdir()):
        os.utime(file, (hour_ago, hour_ago))  # hashes of files that have just been written are not kept

    def first_batch() -> None:
        with ConversationDataLoader(chats, str(model), chat_template="chatml", **options) as loader:
            next(iter(loader))

    first_batch()
    home = str(Path(str(penstock.__file__)).parent)
    ran: set[str] = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            ran.add(frame.f_code.co_filename)

    before = sys.getprofile()
    gc.collect()  # so that what other tests left behind is not closed meanwhile
    gc.disable()
    sys.setprofile(note)
    try:
        first_batch()
    finally:
        sys.setprofile(before)
        gc.enable()
    accounting = {str(file) for file in (Path(home) / "memory").glob("*.py")}
    ran -= {str(Path(home) / name) for name in ("_suggest.py", "errors.py")} | accounting
    walk = sorted(str(Path(file).relative_to(home)) for file in ran)
    assert 20 < len(walk) < 40, " ".join(walk)


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"a" * 5000, b"", b"../..", None])
def test_a_damaged_note_is_made_again(damage: bytes | None, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a b c"}\n' * 20)
    cache = tmp_path / "cache"

    def ids() -> list[list[int]]:
        tokenizer = ByteTokenizer()
        with PretrainDataLoader(source, tokenizer, 8, cache_dir=cache, shuffle=False, backend="numpy") as loader:
            return [row.tolist() for batch in loader for row in batch.input_ids]

    before = ids()
    for note in (cache / "requests").iterdir() if (cache / "requests").exists() else ():
        note.unlink()
        if damage is None:
            note.mkdir()
        else:
            note.write_bytes(damage)
    assert ids() == before
