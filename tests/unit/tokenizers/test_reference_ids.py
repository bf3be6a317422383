"""Ids of every kind of tokenizer against the library that defines them."""

from __future__ import annotations

import functools
import unicodedata
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from hypothesis import example, given
from trained_tokenizers import FAST, HUGGING_FACE, columns, encoding, sentencepiece_model, some_examples

from penstock.tokenizers.load import LoadedTokenizer
from penstock.transforms.tokenization import load_tokenizer

SENTENCEPIECE = [
    "sentencepiece bpe bytes",
    "sentencepiece bpe bytes identity",
    "sentencepiece bpe bytes nfkc_cf kept",
    "sentencepiece bpe bytes nmt_nfkc kept",
    "sentencepiece unigram unknown",
    "sentencepiece unigram bytes",
]


@functools.cache
def loaded(name: str) -> LoadedTokenizer:
    if name in HUGGING_FACE:
        made = load_tokenizer(HUGGING_FACE[name]())
    elif name == "tiktoken":
        made = load_tokenizer(encoding())
    else:
        made = load_tokenizer(processor(name))
    assert isinstance(made, LoadedTokenizer)
    return made


def processor(name: str) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model(*name.split()[1:]))


@functools.cache
def plain(name: str) -> Any:
    made = type(HUGGING_FACE[name]()).from_str(HUGGING_FACE[name]().to_str())
    made.encode_special_tokens = True
    return made


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("parse_special", [False, True])
@some_examples
@given(values=columns)
@example(values=["", " ", "a<|im_end|>b", "\0", "a" * 300])
def test_ids_equal_those_of_tokenizers(name: str, parse_special: bool, values: list[str]) -> None:
    reference = HUGGING_FACE[name]() if parse_special else plain(name)
    ids = loaded(name).encode(pa.array(values, pa.string()), parse_special=parse_special)
    ids.validate(full=True)
    assert ids.to_pylist() == [one.ids for one in reference.encode_batch(values, add_special_tokens=False)]
    assert (loaded(name).slow_because(parse_special=parse_special) is None) == (name in FAST)


@pytest.mark.parametrize("parse_special", [False, True])
@some_examples
@given(values=columns)
def test_ids_equal_those_of_tiktoken(parse_special: bool, values: list[str]) -> None:
    ids = loaded("tiktoken").encode(pa.array(values, pa.string()), parse_special=parse_special)
    allowed: Any = "all" if parse_special else set()
    expected = [encoding().encode(text, allowed_special=allowed, disallowed_special=()) for text in values]
    assert ids.to_pylist() == expected
    assert loaded("tiktoken").slow_because(parse_special=parse_special) is None


@pytest.mark.parametrize("name", SENTENCEPIECE)
@some_examples
@given(values=columns)
def test_ids_equal_those_of_sentencepiece(name: str, values: list[str]) -> None:
    tokenizer = loaded(name)
    assert tokenizer.encode(pa.array(values, pa.string())).to_pylist() == processor(name).encode(values)
    assert (tokenizer.slow_because() is None) == ("bpe" in name)


@pytest.mark.parametrize(
    "text",
    ["ﾊﾟｿｺﾝ ｶﾞｲﾄﾞ", "ﬁ\u0301", "½\u0327", "①\u20dd", "x½\u200cy", "\uffa1\uffc2", "½\u0e33", "\U000113c2\U000113c2"],
)
@pytest.mark.parametrize("rule", ["nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf"])
def test_characters_that_sentencepiece_normalises_together_get_its_ids(rule: str, text: str) -> None:
    name = f"sentencepiece bpe bytes {rule}"
    values = [*["plain water"] * 100, *[f"{text} {number}" for number in range(20)]]
    assert loaded(name).encode(pa.array(values)).to_pylist() == processor(name).encode(values)
    assert loaded(name).slow_because() is None


def test_symbols_that_a_sentencepiece_model_defines_are_special_tokens() -> None:
    tokenizer = loaded("sentencepiece bpe bytes")
    known = processor("sentencepiece bpe bytes")
    for text in ("<sep>", "<|im_start|>", "<|im_end|>", "</s>"):
        assert tokenizer.special.named[text] == known.piece_to_id(text)
    assert not {"▁▁▁", "\n", "<unk>"} & tokenizer.special.named.keys(), "white space is no special token"
    values = ["<|im_start|>user\nthe water<sep>feeds<|im_end|>", "no symbol"]
    # SentencePiece reads them itself, with or without being asked, and puts no space before what follows.
    head = known.encode("<|im_start|>user\nthe water<sep>feeds")
    parsed = tokenizer.encode(pa.array(values), parse_special=True).to_pylist()
    assert parsed == [[*head, tokenizer.special.named["<|im_end|>"]], known.encode("no symbol")]
    assert tokenizer.encode(pa.array(values)).to_pylist() == known.encode(values)
    assert tokenizer.decode(np.array(parsed[0])).endswith("the water<sep>feeds<|im_end|>")


def test_sentencepiece_reads_control_tokens_from_text_only_when_asked() -> None:
    tokenizer = loaded("sentencepiece bpe bytes")
    texts = pa.array(["water<|im_end|>", "<|im_end|>", "no token"])
    end = tokenizer.special.named["<|im_end|>"]
    parsed = tokenizer.encode(texts, parse_special=True).to_pylist()
    assert parsed[0] == [*tokenizer.encode(pa.array(["water"])).to_pylist()[0], end]
    assert parsed[1] == [end]
    assert parsed[2] == tokenizer.encode(texts).to_pylist()[2]
    assert all(end not in row for row in tokenizer.encode(texts).to_pylist())


@pytest.mark.parametrize("layout", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("name", ["gpt2", "unigram"])
def test_slices_nulls_and_both_string_layouts_give_the_same_ids(name: str, layout: pa.DataType) -> None:
    values = ["left out", "the water", None, "", "日本語 🎉", None]
    ids = loaded(name).encode(pa.array(values, layout)[1:])
    expected = [None if text is None else HUGGING_FACE[name]().encode(text).ids for text in values[1:]]
    assert ids.to_pylist() == expected
    assert loaded(name).encode(pa.array([], layout)).to_pylist() == []
    assert loaded(name).encode(pa.array([None], layout)).to_pylist() == [None]


def test_many_pieces_give_the_same_ids_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [f"the water {number} feeds " * (number % 7) for number in range(60)]
    for name in ("gpt2", "unigram"):
        whole, spans = loaded(name).encode(pa.array(values)), loaded(name).encode_spans(pa.array(values))
        for limit in ("FAST_BYTES", "SPAN_BYTES", "REFERENCE_BYTES"):
            monkeypatch.setattr(f"penstock.tokenizers.load.{limit}", 100)
        parts = loaded(name).encode_spans(pa.array(values))
        assert loaded(name).encode(pa.array(values)).equals(whole)
        assert parts.ids.equals(spans.ids)
        assert (parts.starts.tolist(), parts.ends.tolist()) == (spans.starts.tolist(), spans.ends.tolist())
        monkeypatch.undo()


@pytest.mark.parametrize("name", ["gpt2", "llama2"])
def test_a_word_of_ten_million_bytes_is_encoded(name: str) -> None:
    encoded = loaded(name).encode_spans(pa.array(["ab" * 5_000_000, "the water"]))
    assert loaded(name).slow_because(parse_special=True) is None
    assert encoded.ids[1].as_py() == HUGGING_FACE[name]().encode("the water").ids
    last = encoded.ids.offsets[1].as_py() - 1
    assert (encoded.ends[last], encoded.starts[0]) == (10_000_000, 0)


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama3"])
@some_examples
@given(values=columns)
def test_decoding_gives_the_text_back(name: str, values: list[str]) -> None:
    tokenizer = loaded(name)
    for text, ids in zip(values, tokenizer.encode(pa.array(values, pa.string()), parse_special=True)):
        expected = unicodedata.normalize("NFC", text) if name == "qwen" else text
        assert tokenizer.decode(ids.values.to_numpy()) == expected


def test_decoding_part_of_a_character_gives_a_replacement_character() -> None:
    for name in ("gpt2", "tiktoken"):
        ids = loaded(name).encode(pa.array(["한"]))[0].values.to_numpy()
        assert len(ids) > 1
        assert "\ufffd" in loaded(name).decode(ids[:1])
        assert b"".join(loaded(name).token_bytes(int(token)) for token in ids) == "한".encode()


def test_ids_have_the_narrowest_type() -> None:
    assert loaded("gpt2").dtype == pa.uint16()
    assert loaded("gpt2").encode(pa.array(["a"])).type == pa.list_(pa.uint16())
    assert loaded("wordpiece").vocab_size < 256
    assert loaded("wordpiece").encode(pa.array(["a"])).type == pa.list_(pa.uint8())
