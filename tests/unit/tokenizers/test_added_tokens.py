"""Added tokens are found where `tokenizers` finds them: in normalised text, and not inside of special ones."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tests.corpus_files import TOKENIZERS, tokenizer_dir
from tokenizers import AddedToken, normalizers
from trained_tokenizers import HUGGING_FACE, some_examples

from penstock.tokenizers.load import LoadedTokenizer
from penstock.transforms.tokenization import load_tokenizer

PLAIN_ROWS = [f"nothing here {number}" for number in range(99)]
"""Rows before those of a test, so that these are not among the first, which are compared."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "added tokens"))


def with_tokens(name: str, *added: AddedToken, normalizer: Any = None) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer.from_str(HUGGING_FACE[name]().to_str())
    if normalizer is not None:
        made.normalizer = normalizer
    for token in added:
        (made.add_special_tokens if token.special else made.add_tokens)([token])
    return made


def token(content: str, **options: bool) -> AddedToken:
    return AddedToken(content, **options)


def loaded(given: tokenizers.Tokenizer) -> LoadedTokenizer:
    made = load_tokenizer(given)
    assert isinstance(made, LoadedTokenizer)
    return made


def assert_same(theirs: tokenizers.Tokenizer, texts: list[str], *, parse_special: bool = False) -> LoadedTokenizer:
    """The tokenizer of penstock, which gives the same ids."""
    tokenizer = loaded(theirs)
    expected = tokenizers.Tokenizer.from_str(theirs.to_str())
    expected.encode_special_tokens = not parse_special
    made = tokenizer.encode(pa.array(PLAIN_ROWS + texts), parse_special=parse_special).to_pylist()[len(PLAIN_ROWS) :]
    assert made == [one.ids for one in expected.encode_batch(texts, add_special_tokens=False)]
    return tokenizer


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["café", "Zürich"], "a cafe\u0301 in Zu\u0308rich"),
        (["abc"], "abc\u0301"),
        (["K"], "\u212a K"),
        (["abc", "\u0301x"], "abc\u0301x"),
    ],
)
def test_tokens_are_looked_for_in_normalised_text(words: list[str], text: str) -> None:
    theirs = with_tokens("qwen", *map(token, words))
    tokenizer = assert_same(theirs, [text, "a café in Zürich", "abc", "日本語 한국어 Привет"])
    assert tokenizer.slow_because() is None


def test_tokens_are_looked_for_in_the_normalised_text_of_a_published_tokenizer() -> None:
    theirs = tokenizers.Tokenizer.from_file(str(tokenizer_dir("qwen3") / "tokenizer.json"))
    theirs.add_tokens(["café", "Zürich"])
    assert assert_same(theirs, ["a cafe\u0301 in Zu\u0308rich"]).slow_because() is None


def test_only_rows_that_normalisation_may_change_take_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = loaded(with_tokens("qwen", token("café")))
    tokenizer.encode(pa.array(PLAIN_ROWS))
    asked: list[str] = []
    ids = type(tokenizer._reference).ids

    def noted(self: Any, texts: list[str], *, parse_special: bool) -> Any:
        asked.extend(texts)
        return ids(self, texts, parse_special=parse_special)

    monkeypatch.setattr(type(tokenizer._reference), "ids", noted)
    rows = ["a café", "cafe\u0301", "Größe", "日本語", "\u212b", "Привет", "क्षेत्र"]
    tokenizer.encode(pa.array(rows))
    assert [row for row in rows if row in asked] == ["cafe\u0301", "\u212b", "क्षेत्र"]


@pytest.mark.parametrize(
    ("normalizer", "word", "text", "reason"),
    [
        (normalizers.NFC(), "cafe\u0301", "a café", "added tokens that normalisation changes"),
        (normalizers.NFC(), "\u212a", "OK", "added tokens that normalisation changes"),
        (normalizers.NFKC(), "ﬁx", "a fix", r"matched after normalisation \(NFKC\)"),
        (normalizers.Lowercase(), "abc", "ABC", r"matched after normalisation \(Lowercase\)"),
        (normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]), "a", " a ", r"\(NFC, Strip\)"),
    ],
)
def test_other_normalisations_are_left_to_the_reference(normalizer: Any, word: str, text: str, reason: str) -> None:
    tokenizer = assert_same(with_tokens("gpt2", token(word), normalizer=normalizer), [text])
    assert re.search(reason, tokenizer.slow_because() or "")


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("c\u00e9", ["ce\u0301", "c\u00e9", "a ce\u0301"]),
        ("Kb", ["\u212ab", "Kb"]),
        ("\u093cx", ["\u017f\u093c\u0307x", "\u093cx"]),
        ("각", ["\u1100\u1161\u11a8", "각"]),
    ],
)
@pytest.mark.parametrize("name", ["qwen", "gpt2"])
def test_a_normalised_word_is_no_token_of_the_text_as_it_is(
    name: str, word: str, texts: list[str], special: bool
) -> None:
    theirs = with_tokens(name, token(word, normalized=False, special=special), normalizer=normalizers.NFC())
    for text in texts:  # a word is a row of its own
        assert_same(theirs, [text], parse_special=special)
    assert assert_same(theirs, ["日本語 한국어 Привет"]).slow_because() is None


@pytest.mark.parametrize("normalizer", [normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase()])
def test_words_of_other_normalisations_are_no_tokens_of_the_text_as_it_is(normalizer: Any) -> None:
    theirs = with_tokens("gpt2", *(token(word, normalized=False) for word in ("fi", "e\u0301", "abc")))
    theirs.normalizer = normalizer
    for text in ("ﬁ", "\u00e9", "ABC"):
        assert_same(theirs, [text])


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.Sequence([])])
def test_tokens_that_are_matched_before_normalisation_stay_fast(normalizer: Any) -> None:
    tokenizer = assert_same(
        with_tokens("gpt2", token("cafe\u0301", normalized=False), normalizer=normalizer),
        ["cafe\u0301 café", "abc\u0301"],
    )
    assert tokenizer.slow_because() is None
    assert tokenizer._reference.fast(parse_special=False).traps is None


@pytest.mark.parametrize("name", ["gemma", "llama2"])
def test_where_spaces_are_written_as_letters_both_look_in_the_normalised_text(name: str) -> None:
    tokenizer = assert_same(with_tokens(name, token("foo bar")), ["a foo bar", "foo▁bar", "foo  bar", "foo bar"])
    assert tokenizer.slow_because() is None


def test_tokens_that_normalisation_makes_the_same_are_left_to_the_reference() -> None:
    tokenizer = loaded(with_tokens("gemma", token("a b"), token("a▁b")))  # the library gives the id of either
    tokenizer.encode(pa.array(PLAIN_ROWS))
    assert "makes the same" in (tokenizer.slow_because() or "")


INSIDE = [("xqab", "abzq", "xqabzq"), ("<|abzq|>", "abzq", "<|abzq|>"), ("abzq|>", "abzq", "abzq|>")]


@pytest.mark.parametrize(("special", "word", "text"), INSIDE)
@pytest.mark.parametrize("normalized", [False, True])
def test_a_token_that_begins_inside_a_special_one_is_not_found(
    special: str, word: str, text: str, normalized: bool
) -> None:
    added = token(special, special=True, normalized=normalized), token(word, normalized=normalized)
    theirs = with_tokens("gpt2", *added)
    tokenizer = assert_same(theirs, [text, word, special, text * 2])
    assert "inside of special tokens" in (tokenizer.slow_because() or "")
    assert tokenizer.slow_because(parse_special=True) is None
    ids = tokenizer.encode(pa.array([text]), parse_special=True)
    assert ids.to_pylist() == [theirs.encode(text, add_special_tokens=False).ids]


def test_a_token_that_begins_inside_a_special_one_once_both_are_normalised() -> None:
    special = token("x ", special=True, normalized=True)
    tokenizer = assert_same(with_tokens("llama2", special, token("b ", normalized=True)), ["x b xax"])
    assert "inside of special tokens" in (tokenizer.slow_because() or "")


@pytest.mark.parametrize(
    ("special", "word", "text"),
    [
        (token("abz", special=True, normalized=False), token("abzq", normalized=False), "abzq abz"),
        (token("zqx", special=True, normalized=False), token("abzq", normalized=False), "abzqx zqx"),
        (token("bz", special=True, normalized=False), token("abzq", normalized=False), "abzq bz"),
        (token("xqab", special=True, normalized=True), token("abzq", normalized=False), "xqabzq"),
        (token("<|im_end|>", special=True, normalized=False), token("<think>", normalized=False), "<|im_end|><think>"),
    ],
)
def test_a_token_that_begins_before_or_behind_a_special_one_stays_fast(
    special: AddedToken, word: AddedToken, text: str
) -> None:
    assert assert_same(with_tokens("gpt2", special, word), [text]).slow_because() is None


@pytest.mark.parametrize("name", TOKENIZERS)
def test_published_tokenizers_stay_fast(name: str) -> None:
    tokenizer = load_tokenizer(tokenizer_dir(name))
    assert isinstance(tokenizer, LoadedTokenizer)
    for parse_special in (False, True):
        model = tokenizer._reference.fast(parse_special=parse_special)
        assert not isinstance(model, str)
        assert model.traps is None


contents = st.text("ab ▁x", min_size=1, max_size=4) | st.text("aé\u0301e\u212a\u0327", min_size=1, max_size=3)
tokens = st.builds(token, contents, special=st.booleans(), normalized=st.booleans(), rstrip=st.booleans())


@pytest.mark.parametrize("name", ["gpt2", "qwen", "llama2", "gemma"])
@some_examples
@given(added=st.lists(tokens, min_size=1, max_size=3, unique_by=lambda one: one.content), texts=st.data())
def test_any_added_tokens_are_those_of_the_library(name: str, added: list[AddedToken], texts: Any) -> None:
    pieces = st.sampled_from([*(one.content for one in added), *"ab ▁xéeK\u0301\u0327"])
    rows = texts.draw(st.lists(st.lists(pieces, max_size=6).map("".join), max_size=20))
    assert_same(with_tokens(name, *added), rows)
