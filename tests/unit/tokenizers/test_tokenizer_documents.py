"""A tokenizer whose facts are known parses its vocabulary late, and is the same tokenizer."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from trained_tokenizers import HUGGING_FACE, columns

from penstock.tokenizers.documents import TokenizerDocument, model_place
from penstock.tokenizers.huggingface import HuggingFaceReference
from penstock.tokenizers.load import LoadedTokenizer, load_tokenizer


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No facts are known from other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time the library parses a vocabulary from now on."""
    calls: list[str] = []
    load = HuggingFaceReference._load

    def counted(self: HuggingFaceReference) -> Any:
        calls.append(self.name)
        return load(self)

    monkeypatch.setattr(HuggingFaceReference, "_load", counted)
    return calls


def saved(folder: Path, name: str, indent: int | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(HUGGING_FACE[name]().to_str()), indent=indent), encoding="utf-8")
    return path


def loaded(path: Path, **options: Any) -> LoadedTokenizer:
    made = load_tokenizer(path, **options)
    assert isinstance(made, LoadedTokenizer)
    return made


def everything(tokenizer: LoadedTokenizer) -> dict[str, Any]:
    texts = pa.array(["", "the water feeds it's 12 <|im_end|> <think>", "Größe 日本語 🎉\n\n", "<s> spaces    "])
    spans = tokenizer.encode_spans(texts)
    return {
        "fingerprint": tokenizer.fingerprint,
        "size": tokenizer.vocab_size,
        "special": tokenizer.special,
        "ids": [tokenizer.encode(texts, parse_special=parse).to_pylist() for parse in (False, True)],
        "spans": (spans.ids.to_pylist(), spans.starts.tolist(), spans.ends.tolist()),
        "bytes": [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)],
        "texts": [tokenizer.decode(row.values.to_numpy()) for row in tokenizer.encode(texts)],
    }


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("fast", [True, False])
def test_a_known_tokenizer_is_the_same_one(tmp_path: Path, name: str, indent: int | None, fast: bool) -> None:
    path = saved(tmp_path / "model", name, indent)
    first, second = loaded(path, fast=fast), loaded(path, fast=fast)
    copies = [pickle.loads(pickle.dumps(each)) for each in (first, second)]  # noqa: S301 - made here
    expected = everything(first)
    for each in (second, *copies):
        assert everything(each) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_the_vocabulary_of_a_known_tokenizer_is_parsed_when_ids_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = saved(tmp_path / "model", name)
    loaded(path).encode(pa.array(["the water"]))
    calls = parses(monkeypatch)
    known = loaded(path)
    assert known.vocab_size
    known.fit_budget(1 << 30)
    assert not known.slow_because()
    assert calls.count(known.name) == 0
    known.encode(pa.array(["the water"]))
    assert calls.count(known.name) == 1, "the first rows are compared with the reference"


def test_added_tokens_with_other_ids_are_found_again_in_a_known_tokenizer(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", "gpt2")
    config = json.loads(path.read_text(encoding="utf-8"))
    config["added_tokens"][-1]["id"] = 5000
    path.write_text(json.dumps(config), encoding="utf-8")
    assert tokenizers.Tokenizer.from_file(str(path)).token_to_id("<think>") != 5000
    first, second = loaded(path), loaded(path)
    assert everything(second) == everything(first)
    assert second.vocab_size < 5000


LEAVES = st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(["", "model", '"model": ', "é\n🎉", "\\"])
NAMES = st.sampled_from(["model", "vocab", "merges", "type", "added_tokens", "normalizer", '"model": {', "é"])
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
MODELS = st.fixed_dictionaries(
    {"type": st.just("BPE"), "vocab": st.dictionaries(st.text(max_size=3), st.integers(0, 99), max_size=4)},
    optional={"merges": st.lists(st.lists(st.text(max_size=2), max_size=2), max_size=3), "more": VALUES},
)


@given(
    before=st.dictionaries(NAMES.filter(lambda name: name != "model"), VALUES, max_size=3),
    model=MODELS,
    after=st.dictionaries(st.sampled_from(["decoder ", "post_processor", "padding", "x"]), LEAVES, max_size=3),
    indent=st.sampled_from([None, 1]),
    plain=st.booleans(),
)
def test_a_document_without_its_model_is_parsed_to_the_same(
    before: dict[str, Any], model: dict[str, Any], after: dict[str, Any], indent: int | None, plain: bool
) -> None:
    document = json.dumps({**before, "model": model, **after}, indent=indent, ensure_ascii=plain)
    whole = TokenizerDocument.parsed(document, "it")
    place = model_place(document)
    if place is None:
        assert before, "only an earlier name of the same kind may hide the model"
        return
    assert json.loads(document[place.start : place.stop]) == model
    part = TokenizerDocument.parsed(document, "it", place)
    assert orjson.loads(orjson.dumps(part.config)) == orjson.loads(orjson.dumps(whole.config))
    assert (part.model, part.around) == (whole.model, whole.around)


@pytest.mark.parametrize(
    "document",
    [
        '{"model": {"type": "BPE", "vocab": {"a": 0, "a": 1}}}',
        '{"model": {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}}}',
        '{"model": {"vocab": {}}, "model": {"vocab": {"a": 0}}}',
        '{"other": {"model": {"vocab": {}}}, "model": {"vocab": {"a": 0}}}',
        '{"model": []}',
        "{}",
    ],
)
def test_a_model_that_is_not_to_be_taken_as_it_is_has_no_place(document: str) -> None:
    assert model_place(document) is None


@given(texts=columns)
def test_ids_of_a_known_tokenizer_are_those_of_the_library(
    texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "known-gpt2" / "tokenizer.json"
    if not path.exists():
        loaded(saved(path.parent, "gpt2"))
    theirs = tokenizers.Tokenizer.from_file(str(path))
    theirs.encode_special_tokens = True
    expected = [one.ids for one in theirs.encode_batch(texts, add_special_tokens=False)]
    assert loaded(path, fast=False).encode(pa.array(texts)).to_pylist() == expected


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("odd", [False, True])
def test_the_table_of_a_vocabulary_has_the_bytes_of_each_token(name: str, odd: bool) -> None:
    document = json.loads(HUGGING_FACE[name]().to_str())
    if odd and isinstance(
        document["model"]["vocab"], dict
    ):  # a letter that stands for no byte, and an id without token
        document["model"]["vocab"]["鑫x"] = max(document["model"]["vocab"].values()) + 9
    reference = HuggingFaceReference(json.dumps(document), name)
    table = reference.table()
    if table is None:
        return
    bounds = table.offsets.tolist()
    found = [table.data[start:stop].tobytes() for start, stop in itertools.pairwise(bounds)]
    assert found == [reference.token_bytes(token) for token in range(reference.vocab_size)]
