"""Tokenizers in Python: functions, objects with `encode`, and the slow ones of transformers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
import transformers

from penstock import ConversationDataLoader, PretrainDataLoader
from penstock.errors import ConfigError, DataError
from penstock.loaders import StreamOptions
from penstock.transforms.tokenization import load_tokenizer

TEXTS = ["the water", "", "naïve 🎉 </s>"]


def by_bytes(text: str) -> list[int]:
    return list(text.encode())


class Characters:
    """Code points, and three special tokens behind them."""

    special_tokens = {"<|im_start|>": 0x110000, "<|im_end|>": 0x110001, "<eos>": 0x110002}  # noqa: RUF012
    eos_token = "<eos>"
    vocab_size = 0x110003

    def encode(self, text: str, bos: bool, eos: bool) -> list[int]:
        return [0x110002] * bos + [ord(character) for character in text] + [0x110002] * eos

    def decode(self, ids: list[int]) -> str:
        names = {number: text for text, number in self.special_tokens.items()}
        return "".join(names.get(number) or chr(number) for number in ids)


def ids(spec: Any, texts: list[str] = TEXTS, **options: Any) -> list[list[int]]:
    found: list[list[int]] = load_tokenizer(spec).encode(pa.array(texts), **options).to_pylist()
    return found


@pytest.mark.parametrize(
    "spec",
    [
        by_bytes,
        lambda text: np.frombuffer(text.encode(), np.uint8),
        lambda text: {"input_ids": [by_bytes(text)]},
        lambda text: tuple(text.encode()),
    ],
    ids=["list", "array", "batch of one", "tuple"],
)
def test_any_function_from_text_to_ids_is_a_tokenizer(spec: Any, tmp_path: Path) -> None:
    assert ids(spec) == [by_bytes(text) for text in TEXTS]
    with PretrainDataLoader([{"text": "abc"}], spec, 4, cache_dir=tmp_path, backend="numpy") as loader:
        assert loader.get_batch(1).input_ids[0, :3].tolist() == [97, 98, 99]


def test_an_object_with_encode_has_special_tokens_and_chats(tmp_path: Path) -> None:
    found = load_tokenizer(Characters())
    assert found.special.eos == 0x110002
    assert ids(Characters(), ["a<eos>"], parse_special=True) == [[97, 0x110002]]
    assert ids(Characters(), ["a<eos>"]) == [[97, *map(ord, "<eos>")]]
    assert found.decode(np.array([97, 0x110002])) == "a<eos>"
    chat = [{"messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": "yo🎉"}]}]
    options: dict[str, Any] = {"cache_dir": tmp_path, "backend": "numpy"}
    with ConversationDataLoader(chat, Characters(), 128, "chatml", **options) as loader:
        batch = loader.get_batch(1)
    assert Characters().decode(batch.input_ids[batch.loss_mask].tolist()) == "yo🎉<|im_end|>"


def test_a_slow_tokenizer_of_transformers_gives_its_own_ids(tmp_path: Path) -> None:
    slow = transformers.ByT5Tokenizer()
    assert not slow.is_fast
    found = load_tokenizer(slow)
    assert ids(slow, parse_special=True) == [slow.encode(text, add_special_tokens=False) for text in TEXTS]
    assert slow.eos_token_id not in ids(slow)[2], "the text of a special token is text"
    assert (found.special.eos, found.special.pad, found.vocab_size) == (1, 0, len(slow))
    spans = found.encode_spans(pa.array(["é</s>a"]))
    assert [spans.starts.tolist(), spans.ends.tolist()] == [[0, 0, 2, 6], [2, 2, 6, 7]]
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    slow.chat_template = template
    assert load_tokenizer(slow).chat_template == template


def test_copies_in_other_processes_give_the_same(tmp_path: Path) -> None:
    for spec in (by_bytes, Characters(), lambda text: by_bytes(text), transformers.ByT5Tokenizer()):
        found = load_tokenizer(spec)
        again = pickle.loads(pickle.dumps(found))  # noqa: S301
        assert again.fingerprint == found.fingerprint == load_tokenizer(spec).fingerprint
        assert again.encode(pa.array(TEXTS)) == found.encode(pa.array(TEXTS))
    streaming = StreamOptions(workers=1, worker_type="process")
    rows = [{"text": "abc"}] * 4
    with PretrainDataLoader(rows, lambda text: by_bytes(text), 4, streaming=streaming, backend="numpy") as loader:
        assert sum(batch.num_tokens for batch in loader) == 12


def test_other_ids_have_another_fingerprint() -> None:
    def with_vocabulary(vocabulary: dict[str, int]) -> Any:
        return lambda text: [vocabulary[word] for word in text.split()]

    first, second = with_vocabulary({"penstocks": 1}), with_vocabulary({"penstocks": 2})
    assert load_tokenizer(first).fingerprint != load_tokenizer(second).fingerprint
    first.fingerprint = second.fingerprint = "mine"
    assert load_tokenizer(first).fingerprint == load_tokenizer(second).fingerprint


def test_wrong_answers_and_missing_abilities_are_named() -> None:
    texts = pa.array(["ab"])
    for wrong in ("text", [1.5], [[1], [2]], None, ["a"]):
        with pytest.raises(ConfigError, match="list or an array of integers"):
            load_tokenizer(lambda text, wrong=wrong: wrong).encode(texts)
    with pytest.raises(DataError, match="the id -1"):
        load_tokenizer(lambda text: [-1]).encode(texts)
    with pytest.raises(ConfigError, match=r"no decode.*encode\(text\) and decode\(ids\)"):
        load_tokenizer(by_bytes).encode_spans(texts)
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_tokenizer(object())

    class Upper(Characters):
        def decode(self, ids: list[int]) -> str:
            return super().decode(ids).upper()

    with pytest.raises(DataError, match=r"do not decode to the text.*fast tokenizer"):
        load_tokenizer(Upper()).encode_spans(texts)


def test_an_implementation_of_the_tokenizers_package_is_taken_whole() -> None:
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(["the water"], show_progress=False)
    assert ids(made, ["the water"]) == [made.encode("the water").ids]


def test_a_vocabulary_with_surrogates_has_a_fingerprint() -> None:
    class Codepoints(transformers.ByT5Tokenizer):  # CANINE's vocabulary has every code point
        def get_vocab(self) -> dict[str, int]:
            return {**super().get_vocab(), "\ud800": 4000}

    given = Codepoints()
    tokenizer = load_tokenizer(given)
    assert tokenizer.fingerprint != load_tokenizer(transformers.ByT5Tokenizer()).fingerprint
    assert tokenizer.encode(pa.array(["water"])).to_pylist() == [given.encode("water", add_special_tokens=False)]
