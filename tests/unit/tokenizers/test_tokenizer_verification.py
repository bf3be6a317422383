"""Rows take the fast path only with characters that it was shown to treat as the reference does."""

from __future__ import annotations

import functools
import itertools
import logging
import random
import unicodedata
from pathlib import Path

import numpy as np
import orjson
import pyarrow as pa
import pytest
import tokenizers
from tokenizers import normalizers
from trained_tokenizers import HUGGING_FACE, QWEN2, encoding, sentencepiece_model

from penstock.arrays.text import utf8
from penstock.files.cache import DiskCache
from penstock.tokenizers.load import LoadedTokenizer
from penstock.tokenizers.verification import BLOCK, Characters, Contexts, ascii_pairs
from penstock.transforms.tokenization import Tokenize, load_tokenizer

DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
]
PLAIN = [f"plain row {number}" for number in range(100)]
# Assigned since Unicode 14: tables of different age disagree about them.
NEW_RANGES = [
    (0x870, 0x8E2),
    (0x1AB0, 0x1AF0),
    (0x1DF6, 0x1DFC),
    (0x20C0, 0x20C2),
    (0xA7C0, 0xA7DD),
    (0x10EC2, 0x10ED9),
]
NEW_RANGES += [(0x113C2, 0x113D6), (0x16121, 0x16129), (0x16D67, 0x16D6B), (0x1FAE8, 0x1FAE9), (0x1FADC, 0x1FAE0)]
CONTEXTS = [
    "{0}",
    " {0}",
    "a{0}",
    "{0}a",
    "a{0}{0}b",
    "\u0301{0}",
    "a{0}\u0316",
    "1{0}1",
    " {0} {0}a",
    "!{0}!",
    "\n{0}\n",
]


def every_pair(pattern: list[str], normalizer: dict[str, str] | None) -> tokenizers.Tokenizer:
    """A tokenizer with a token for every pair of bytes in which two characters can meet: each split shows."""
    letters = bytes_to_letters()
    vocab = {letters[byte]: byte for byte in range(256)}
    merges = []
    for first in [*range(0x80, 0xC0), *b" aAb1!\n"]:
        for second in [*range(0xC2, 0xF5), *b" aAb1!\n"]:
            merges.append((letters[first], letters[second]))
            vocab[letters[first] + letters[second]] = len(vocab)
    splits = [{"type": "Split", "pattern": {"Regex": one}, "behavior": "Isolated", "invert": False} for one in pattern]
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    document = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    return tokenizers.Tokenizer.from_str(orjson.dumps(document).decode())


def bytes_to_letters() -> dict[int, str]:
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {byte: chr(byte) for byte in printing}
    return letters | {byte: chr(0x100 + at) for at, byte in enumerate(sorted(set(range(256)) - set(printing)))}


@functools.cache
def family(name: str) -> tokenizers.Tokenizer:
    if name == "deepseek":
        return every_pair(DEEPSEEK, None)
    return every_pair([QWEN2], {"type": "NFC"}) if name == "qwen" else HUGGING_FACE[name]()


def ids_of(name: str, values: list[str]) -> list[list[int]]:
    return [one.ids for one in family(name).encode_batch(values, add_special_tokens=False)]


def loaded(name: str) -> LoadedTokenizer:
    made = load_tokenizer(family(name))
    assert isinstance(made, LoadedTokenizer)
    return made


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("deepseek", "The ticket costs \u20c1 150 in Riyadh."),
        ("deepseek", "a \U0001f6d8 b"),
        ("qwen", "x\u0301\u08cf y"),
        ("qwen", "x\u0301\u0c3c y"),
        ("qwen", "x\u0301\u1abf y"),
        ("qwen", "\U000113c2\U000113c2"),
    ],
)
def test_characters_that_are_newer_than_a_table_get_the_ids_of_the_reference(name: str, text: str) -> None:
    tokenizer = loaded(name)
    tokenizer.encode(pa.array(PLAIN))  # the first rows are compared anyway
    values = [*PLAIN, text]
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of(name, values)
    assert tokenizer.slow_because() is None
    assert tokenizer.reference_rows() == 1


@pytest.mark.parametrize("name", ["qwen", "deepseek", "gpt2"])
def test_every_kind_of_character_gets_the_ids_of_the_reference_in_every_context(name: str) -> None:
    chance = random.Random(5)
    points = [point for start, stop in NEW_RANGES for point in range(start, stop)]
    points += [point for point in chance.sample(range(0x80, 0x20000), 150) if not 0xD800 <= point < 0xE000]
    values = [context.format(chr(point)) for context in CONTEXTS for point in points]
    tokenizer = loaded(name)
    tokenizer.encode(pa.array(PLAIN))
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of(name, values)
    assert tokenizer.slow_because() is None


def test_marks_in_any_order_get_the_ids_of_the_reference() -> None:
    chance = random.Random(7)
    marks = [chr(point) for point in range(0x300, 0x1E00) if unicodedata.category(chr(point))[0] == "M"]
    values = ["a" + "".join(chance.choices([*marks, "e", "한", "\u1100", "\u1161"], k=4)) for _ in range(3000)]
    tokenizer = loaded("qwen")
    tokenizer.encode(pa.array(PLAIN))
    assert tokenizer.encode(pa.array(values)).to_pylist() == ids_of("qwen", values)
    assert 0 < tokenizer.reference_rows() < len(values)


def test_usual_characters_take_the_fast_path() -> None:
    texts = [
        "naïve café",
        "“quoted” — it\u2019s",
        "Привет, мир",
        "日本語のテキスト、漢字",
        "한국어",
        "🎉❤️👩‍👩‍👧",
        "नमस्ते",
        "สวัสดีครับ",
    ]
    for name in ("qwen", "deepseek", "gpt2", "llama2"):
        tokenizer = loaded(name)
        for text in texts:
            tokenizer.encode(pa.array([text]))
        assert (tokenizer.slow_because(), tokenizer.reference_rows()) == (None, 0), name
    for spec in (encoding(), sentencepiece_model):
        if callable(spec):
            import sentencepiece

            spec = sentencepiece.SentencePieceProcessor(model_proto=spec(rule="identity"))
        made = load_tokenizer(spec)
        assert isinstance(made, LoadedTokenizer)
        for text in texts[:4]:
            made.encode(pa.array([text]))
        assert (made.slow_because(), made.reference_rows()) == (None, 0)


def test_the_log_says_once_that_rows_take_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.transforms.tokenization")
    tokenize = Tokenize(family("deepseek"))
    for _ in range(3):
        tokenize.transform(pa.record_batch({"text": ["plain", "costs \u20c1 5"]}))
    assert sum("take the slower reference" in record.message for record in caplog.records) == 1
    assert "'costs" in caplog.text
    assert isinstance(tokenize.tokenizer, LoadedTokenizer)
    assert tokenize.tokenizer.reference_rows() == 3


def test_spans_of_rows_with_unproven_characters_are_those_of_the_reference() -> None:
    values = [*PLAIN, "x\u0301\u08cf y", "a \u20c1 b"]
    for name in ("qwen", "deepseek"):
        got = loaded(name).encode_spans(pa.array(values))
        expected = loaded(name).without_fast().encode_spans(pa.array(values))
        assert got.ids.to_pylist() == expected.ids.to_pylist()
        assert np.array_equal(got.starts, expected.starts)
        assert np.array_equal(got.ends, expected.ends)


KEYS = itertools.count()


class Compared:
    """Compares nothing: some characters are declared different, and the texts asked for are counted."""

    def __init__(self, wrong: str, contexts: Contexts | None = None, *, key: str = "") -> None:
        self.wrong, self.asked = wrong, 0
        key = key or f"key-{next(KEYS)}"
        self.characters = Characters(self.different, lambda: key, contexts or Contexts())

    def different(self, texts: list[str]) -> list[str]:
        self.asked += len(texts)
        return [text for text in texts if set(text) & set(self.wrong)]

    def outside(self, rows: list[str]) -> list[int]:
        found = self.characters.outside(utf8(pa.array(rows)))
        return [] if found is None else np.flatnonzero(found).tolist()


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_rows_with_unproven_characters_are_found_wherever_they_stand() -> None:
    wrong = "é⃁中\U00016d67"
    right = "aèмA 日\U0001f389"
    for text in ("{}", "x{}", "{}x", "日{}本", "мир{0}мир{0}"):
        for filler in ("", "plain text " * 20, "日本語" * 30, "мир" * 40):
            rows = [filler + text.format(character) for character in right + wrong]
            compared = Compared(wrong)
            compared.outside(rows)  # not all blocks are compared at once
            assert compared.outside(["", *rows, ""]) == [1 + rows.index(row) for row in rows[len(right) :]]
    assert Compared(wrong).outside(["only ascii", ""]) == []
    assert Compared(wrong).outside([]) == []


def test_all_widths_of_characters_are_read_right() -> None:
    chance = random.Random(3)
    points = [0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFD, 0x10000, 0x3FFFF]
    points += [point for point in chance.sample(range(0x80, 0x33000), 40) if not 0xD800 <= point < 0xE000]
    for point in points:
        compared = Compared(chr(point))
        assert compared.outside([chr(point)]) == [0]
        beside = [other for other in (point - 1, point + 1) if not 0xD800 <= other < 0xE000]
        assert compared.outside(["".join(chr(other) for other in beside if other < 0x40000)]) == []


def test_planes_without_characters_always_take_the_reference() -> None:
    compared = Compared("")
    assert compared.outside(["\U00050000", "\U000f0000", "\U0010ffff", "plain"]) == [0, 1, 2]
    assert compared.asked == 0


def test_unassigned_characters_are_not_trusted_where_text_is_normalised() -> None:
    unassigned = "\u0378"
    assert unicodedata.category(unassigned) == "Cn"
    assert Compared("").outside([unassigned]) == []
    assert Compared("", Contexts(normalised=True)).outside([unassigned, "\u0377"]) == [0]


def test_what_was_proven_is_kept_for_the_next_time() -> None:
    first = Compared("é", key="a-key")
    assert first.outside(["é è", "è"]) == [0]
    assert first.asked
    second = Compared("é", key="a-key")
    assert second.outside(["é è", "è"]) == [0]
    assert second.asked == 0
    second.outside(["ж"])
    assert second.asked, "another block"


def test_what_was_known_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Compared("é", key="a-key").outside(["é è"])
    writes: list[str] = []
    put = DiskCache.put

    def counted(self: DiskCache, key: str, data: bytes) -> None:
        writes.append(key)
        put(self, key, data)

    monkeypatch.setattr(DiskCache, "put", counted)
    second = Compared("é", key="a-key")
    assert second.outside(["é è"]) == [0]
    assert not writes
    second.outside(["ж"])
    assert writes == ["a-key"]


def test_few_new_proofs_are_kept_too() -> None:
    many = "".join(map(chr, range(0x100, 0x800, 0x100)))
    Compared("", key="a-key").outside([many])
    second = Compared("", key="a-key")
    second.outside([many, "\u13a0"])
    assert second.asked
    third = Compared("", key="a-key")
    third.outside([many, "\u13a0"])
    assert third.asked == 0


def test_a_cache_that_cannot_be_used_costs_nothing_but_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.transforms.tokenization")
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(in_the_way))
    assert Compared("é").outside(["é", "è"]) == [0]
    assert "cannot be written" in caplog.text


@pytest.mark.parametrize("data", [b"x" * 33, b"\xff" * 34])
def test_a_cache_with_other_content_is_made_anew(tmp_path: Path, data: bytes) -> None:
    from penstock.files.cache import DiskCache, default_cache_directory

    cache = DiskCache(default_cache_directory() / "characters")
    cache.put("a-key", data)
    assert Compared("é", key="a-key").outside(["é", "è"]) == [0]
    assert cache.get("a-key") != data


def test_the_rest_of_a_page_of_ideographs_is_compared_once_much_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared = Compared("")
    compared.outside(["日本語"])
    assert not compared.characters.is_proven(0x6000)
    monkeypatch.setattr("penstock.tokenizers.verification.ENOUGH", 100)
    for _ in range(3):
        assert compared.outside(["日本語" * 100]) == []
    assert all(compared.characters.is_proven(point) for point in range(0x6000, 0x7000))
    before = compared.asked
    compared.outside(["日本語" * 100])
    assert compared.asked == before


def test_a_text_of_many_blocks_is_not_held_up_by_comparing_them_all() -> None:
    compared = Compared("")
    row = "".join(chr(block * BLOCK + 0x41) for block in range(1, 0x30))
    assert compared.outside([row]) == [0], "takes the reference until all of its blocks were compared"
    for _ in range(6):
        compared.outside([row])
    assert compared.outside([row]) == []


def test_a_difference_that_only_shows_in_company_is_nobodys_alone() -> None:
    def different(texts: list[str]) -> list[str]:
        return [text for text in texts if "é" in text and "è" in text]

    characters = Characters(different, lambda: "other-key", Contexts())
    found = characters.outside(utf8(pa.array(["é", "è", "\u0180"])))
    assert found is not None
    assert found.tolist() == [True, True, False]


def test_ascii_pairs_are_all_there() -> None:
    pairs = {text[at : at + 2] for text in ascii_pairs() for at in range(len(text) - 1)}
    ascii_characters = [chr(byte) for byte in range(128)]
    assert pairs >= {first + second for first in ascii_characters for second in ascii_characters} - {"\x7f\0"}


def test_the_splitter_shows_splits_that_a_vocabulary_hides() -> None:
    """Two that differ in a class of characters alone: the ids of a small vocabulary do not show it."""
    tokenizer = load_tokenizer(HUGGING_FACE["gpt2"]())
    assert isinstance(tokenizer, LoadedTokenizer)
    small = tokenizer._reference.splitter()
    letter, symbol = small.ids(["aé", "a→"], parse_special=False)
    assert (len(letter), len(symbol)) == (2, 4), "the letter shares a token with the a before it"
    made = tokenizers.Tokenizer.from_str(HUGGING_FACE["gpt2"]().to_str())
    made.normalizer = normalizers.NFC()
    other = load_tokenizer(made)
    assert isinstance(other, LoadedTokenizer)
    assert other._reference.splitter().fingerprint() != small.fingerprint()
