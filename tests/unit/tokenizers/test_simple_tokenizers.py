"""Bytes and characters as tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataError
from penstock.transforms.tokenization import ByteTokenizer, CharTokenizer, load_tokenizer

texts = st.lists(st.sampled_from(["<bos>", "<eos>", "<b", "os>", "a", " ", "é", "日", "🎉", "\0"]), max_size=6).map(
    "".join
)
columns = st.lists(texts, max_size=5)


def in_python(text: str, tokens: dict[str, int], encode: dict[str, int] | None) -> list[int]:
    ids: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, tokens)) + ")", text):
        if part in tokens:
            ids.append(tokens[part])
        else:
            ids.extend(part.encode() if encode is None else [encode[c] for c in part])
    return ids


@pytest.mark.parametrize("layout", [pa.string(), pa.large_string()])
@given(values=columns)
@example(values=["a<b", "os>", "", "<bos>"])
def test_bytes_are_the_ids_and_special_tokens_follow(layout: pa.DataType, values: list[str]) -> None:
    tokenizer = ByteTokenizer()
    column = pa.array(["<bos>left out", *values], layout)[1:]
    assert tokenizer.encode(column).to_pylist() == [list(text.encode()) for text in values]
    named = dict(tokenizer.special.named)
    assert named == {"<bos>": 256, "<eos>": 257, "<pad>": 258}
    parsed = tokenizer.encode(column, parse_special=True)
    assert parsed.to_pylist() == [in_python(text, named, None) for text in values]
    assert [tokenizer.decode(row.values.to_numpy()) for row in parsed] == values


@given(values=columns)
def test_characters_are_numbered_as_in_the_alphabet(values: list[str]) -> None:
    alphabet = "<>bose 🎉日éa\0"
    tokenizer = CharTokenizer(alphabet)
    numbers = {character: number for number, character in enumerate(alphabet)}
    column = pa.array(values, pa.string())
    assert tokenizer.encode(column).to_pylist() == [[numbers[c] for c in text] for text in values]
    parsed = tokenizer.encode(column, parse_special=True)
    assert parsed.to_pylist() == [in_python(text, dict(tokenizer.special.named), numbers) for text in values]
    assert [tokenizer.decode(row.values.to_numpy()) for row in parsed] == values


def test_bytes_without_special_tokens_fit_in_eight_bits() -> None:
    assert ByteTokenizer(special=()).dtype == pa.uint8()
    assert ByteTokenizer().dtype == pa.uint16()
    assert load_tokenizer("byte").special.eos == 257


def test_a_character_outside_the_alphabet_is_unknown_or_an_error() -> None:
    column = pa.array(["ab", "añb"])
    assert CharTokenizer("ab").encode(column).to_pylist() == [[0, 1], [0, 5, 1]]
    with pytest.raises(DataError, match=r"row 1\b.*'ñ'"):
        CharTokenizer("ab", special=()).encode(column)


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("values", [["ab", "", "", "<eos>a<eos>b<eos>ñ", "ñ"], ["", "<eos>", "ñ<eos>"], ["ñ"]])
def test_the_row_with_a_character_outside_the_alphabet_is_named(values: list[str], parse_special: bool) -> None:
    tokenizer = CharTokenizer("ab<eos>", special=("<eos>",))
    column = pa.array(["ñ", *values], pa.large_string())[1:]
    for encode in (tokenizer.encode, tokenizer.encode_spans):
        with pytest.raises(DataError, match="'ñ'") as caught:
            encode(column, parse_special=parse_special)
        assert caught.value.row == next(row for row, text in enumerate(values) if "ñ" in text)


def test_an_alphabet_is_fitted_saved_and_loaded(tmp_path: Path) -> None:
    tokenizer = CharTokenizer.fit(["banana", "日本"], special=("<eos>",))
    assert tokenizer.alphabet == "abn日本"
    tokenizer.save(tmp_path / "chars.json")
    for loaded in (CharTokenizer.load(tmp_path / "chars.json"), load_tokenizer(tmp_path / "chars.json")):
        assert loaded.fingerprint == tokenizer.fingerprint
        assert loaded.special == tokenizer.special
    assert tokenizer.fingerprint != CharTokenizer("abn", special=("<eos>",)).fingerprint
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ConfigError, match="CharTokenizer"):
        CharTokenizer.load(tmp_path / "other.json")


@pytest.mark.parametrize("alphabet", ["", "aa", ["ab", "c"]])
def test_an_alphabet_that_is_none_is_refused(alphabet: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="alphabet"):
        CharTokenizer(alphabet)


@pytest.mark.parametrize("special", [("<a>", "<a>"), ("",)])
def test_special_tokens_must_differ_and_have_a_text(special: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"special.*tokens"):
        ByteTokenizer(special)
