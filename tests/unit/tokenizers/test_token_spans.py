"""The bytes each token covers."""

from __future__ import annotations

import unicodedata
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import sentencepiece
from hypothesis import example, given
from trained_tokenizers import HUGGING_FACE, columns, encoding, sentencepiece_model, some_examples

from penstock.tokenizers.huggingface import _BYTE_OF, _bytes_of
from penstock.transforms.tokenization import ByteTokenizer, CharTokenizer, Encoded, Tokenizer, load_tokenizer

LOADED: dict[str, Tokenizer] = {}


def tokenizer_of(name: str) -> Tokenizer:
    if name not in LOADED:
        made = {
            "tiktoken": encoding,
            "byte": ByteTokenizer,
            "sentencepiece": lambda: sentencepiece.SentencePieceProcessor(model_proto=sentencepiece_model()),
        }
        LOADED[name] = load_tokenizer((made | HUGGING_FACE)[name]())
    return LOADED[name]


def covered(encoded: Encoded, values: list[str]) -> list[list[tuple[int, int, int]]]:
    """Id, start and end of every token, row by row; the arrays must fit the lists."""
    encoded.ids.validate(full=True)
    ids = encoded.ids.values.to_numpy()
    assert len(ids) == len(encoded.starts) == len(encoded.ends)
    assert encoded.starts.dtype == encoded.ends.dtype == np.int32
    triples = list(zip(ids.tolist(), encoded.starts.tolist(), encoded.ends.tolist()))
    rows = [triples[start:stop] for start, stop in pairwise(encoded.ids.offsets.to_pylist())]
    assert len(rows) == len(values)
    return rows


@pytest.mark.parametrize("name", ["gpt2", "llama3", "tiktoken", "byte"])
@pytest.mark.parametrize("parse_special", [False, True])
@some_examples
@given(values=columns)
def test_tokens_of_byte_level_models_cover_exactly_their_own_bytes(
    name: str, parse_special: bool, values: list[str]
) -> None:
    tokenizer = tokenizer_of(name)
    encoded = tokenizer.encode_spans(pa.array(values, pa.string()), parse_special=parse_special)
    assert encoded.ids.equals(tokenizer.encode(pa.array(values, pa.string()), parse_special=parse_special))
    for text, row in zip(values, covered(encoded, values)):
        data = text.encode()
        assert [data[start:end] for _, start, end in row] == [tokenizer.token_bytes(token) for token, _, _ in row]
        assert [start for _, start, _ in row] == [0, *(end for _, _, end in row)][: len(row)]
        assert not data or row[-1][2] == len(data)


@pytest.mark.parametrize("name", [*HUGGING_FACE, "sentencepiece"])
@some_examples
@given(values=columns)
@example(values=["e\u0301 x", "plain", "日本 e\u0301e\u0301"])
@example(values=["  <s> a</s>b", "▁ ▁", " ", "a  b"])
def test_spans_of_every_model_are_in_order_and_inside_the_text(name: str, values: list[str]) -> None:
    tokenizer = tokenizer_of(name)
    encoded = tokenizer.encode_spans(pa.array(values, pa.string()))
    assert encoded.ids.equals(tokenizer.encode(pa.array(values, pa.string()), parse_special=True))
    special = tokenizer.special.named
    for text, row in zip(values, covered(encoded, values)):
        data = text.encode()
        assert all(0 <= start <= end <= len(data) for _, start, end in row)
        assert [start for _, start, _ in row] == sorted(start for _, start, _ in row)
        for token, start, end in row:
            if token in special.values() and token != tokenizer.special.unk:
                text_of_token = next(text for text, number in special.items() if number == token)
                if name == "sentencepiece":  # finds symbols in what normalisation made of the text, and left out of it
                    assert text_of_token in unicodedata.normalize("NFKC", data[start:end].decode())
                else:
                    assert text_of_token == data[start:end].decode()


@pytest.mark.parametrize("name", ["llama2", "gemma", "qwen"])
@some_examples
@given(values=columns)
def test_spans_from_token_lengths_equal_the_offsets_of_the_library(name: str, values: list[str]) -> None:
    reference = HUGGING_FACE[name]()
    reference.post_processor = None
    for text, row in zip(values, covered(tokenizer_of(name).encode_spans(pa.array(values, pa.string())), values)):
        begins = [len(text[:at].encode()) for at in range(len(text) + 1)]
        for (_, start, end), (first, last) in zip(row, reference.encode(text, add_special_tokens=False).offsets):
            # The library gives the whole character to each token that has a part of it.
            assert begins[first] <= start <= end <= begins[last]


def test_a_space_that_the_model_puts_before_the_text_covers_nothing() -> None:
    tokenizer = tokenizer_of("llama2")
    ((first, *_),) = covered(tokenizer.encode_spans(pa.array(["the water"])), ["the water"])
    assert tokenizer.token_bytes(first[0]).startswith(b" ")
    assert b"the water"[first[1] : first[2]] == tokenizer.token_bytes(first[0])[1:]


def test_text_that_normalisation_changes_gets_the_offsets_of_the_library() -> None:
    """Decomposed accents are composed before they are tokenized, so that token lengths do not add up to the text."""
    values = ["plain text", "cafe\u0301 noir", "日本"]
    rows = covered(tokenizer_of("qwen").encode_spans(pa.array(values)), values)
    assert [row[-1][2] for row in rows] == [len(text.encode()) for text in values]
    # As the library has it: the bytes of the composed character count as those of its base, the accent is in no token.
    assert [(start, end) for _, start, end in rows[1]][:4] == [(0, 2), (2, 4), (3, 4), (6, 7)]


def test_normalisation_that_keeps_the_length_of_a_text_is_noticed() -> None:
    """Three letters lose a byte each, and one gains three: only the bytes themselves tell."""
    text = "e\u0301e\u0301e\u0301 \u0958"
    normal = unicodedata.normalize("NFC", text)
    assert (len(normal.encode()), normal == text) == (len(text.encode()), False)
    (row,) = covered(tokenizer_of("qwen").encode_spans(pa.array([text])), [text])
    reference = HUGGING_FACE["qwen"]()
    reference.post_processor = None
    begins = [len(text[:at].encode()) for at in range(len(text) + 1)]
    offsets = reference.encode(text, add_special_tokens=False).offsets
    assert [(start, end) for _, start, end in row] == [(begins[first], begins[last]) for first, last in offsets]


def test_null_texts_have_no_tokens_and_slices_count_from_their_own_rows() -> None:
    for name in ("gpt2", "unigram", "byte"):
        texts = pa.array(["left out", None, "the water", None], pa.large_string())[1:]
        encoded = tokenizer_of(name).encode_spans(texts)
        assert encoded.ids.is_null().to_pylist() == [True, False, True]
        assert len(encoded.starts) == len(encoded.ids[1])
        assert encoded.ends[-1] == len("the water")
        empty = tokenizer_of(name).encode_spans(texts[:0])
        assert (len(empty.ids), len(empty.starts), len(empty.ends)) == (0, 0, 0)


@some_examples
@given(values=columns)
def test_characters_cover_their_own_bytes(values: list[str]) -> None:
    tokenizer = CharTokenizer("thewar 日é🎉")
    for text, row in zip(
        values, covered(tokenizer.encode_spans(pa.array(values, pa.string()), parse_special=False), values)
    ):
        data = text.encode()
        assert [data[start:end].decode() for _, start, end in row] == list(text)


def test_letters_of_the_byte_alphabet_become_bytes_and_others_stand_for_themselves() -> None:
    alphabet = {letter: byte[0] for letter, byte in _BYTE_OF.items()}
    assert _bytes_of("".join(alphabet)) == bytes(alphabet.values())
    for other in (" ", "\n", "\x7f", "\xa0", "\xad", "日", "\uffff", "😀"):
        assert other not in alphabet
        assert _bytes_of(f"Ġa{other}é") == b" a" + other.encode() + b"\xe9"
