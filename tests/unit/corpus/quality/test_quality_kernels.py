"""The compiled rules against the plain ones of `oracles.quality_rules`, on text made to be difficult."""

# ruff: noqa: RUF001
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles import quality_rules as plain
from penstock.corpus.quality.c4 import C4Quality
from penstock.corpus.quality.content import LengthFilter
from penstock.corpus.quality.fineweb import FineWebQuality
from penstock.corpus.quality.gopher import GopherQuality, GopherRepetition
from penstock.corpus.quality.words import exceptions, word_spans
from penstock.errors import DataError

PIECES = [
    "the", "and", "with", "word", "don't", "Mr.", "U.S.", "5km", "US$3", "$5", "10%", "a.m.", "x-y", "well-known",
    "a/b",
    "http://a.example.com/x-y", "me@site.org", "1.2.3.4:80", "...", "…", "……", "#", "•", "-", "--", "—",
    "–", "~", "!", "?", ".", ",", '"', "'", "’s", "(", ")", "{", "[1]", "[edit]",
    "[citation needed]", "[",
    "lorem ipsum",
    "JavaScript", "cooKies", "use", "privacy policy", "é", "²", "°C.", "İ", "漢字", "。", "😀", "\x00", "\u0301", "١",
    "[१]",
    "end.Begin", "+1", "C++", "x" * 40, "AB.", "B.", "..a", "a..B", "3-4", "3-a", "z:", "_", "*", "&",
]  # fmt: skip
GAPS = [" ", "  ", "\n", "\n\n", "\r\n", "\r", "\t", "\u2028", "\u3000", "\x85", "\x0b", "\x1c", "", "\n\n\n"]

pieces = st.sampled_from(PIECES) | st.text(max_size=6) | st.text("ab.-'", min_size=1, max_size=8)
parts = st.lists(st.tuples(pieces, st.sampled_from(GAPS)), max_size=24).map(
    lambda pairs: "".join(piece + gap for piece, gap in pairs)
)
repetitive = st.tuples(parts, st.integers(1, 4), st.sampled_from(GAPS)).map(lambda t: t[2].join([t[0]] * t[1]))
texts = (parts | repetitive).map(lambda text: text.encode("utf-8", "ignore").decode())
columns = st.lists(texts | st.none(), min_size=1, max_size=6)
rules = st.sampled_from(["english", "whitespace"])
limits = st.sampled_from([0.0, 0.05, 0.2, 0.5, 1.0, 3.0, math.nan])


def sliced(values: list[str | None], dtype: pa.DataType) -> pa.Array:
    """A column that begins in the middle of its buffers."""
    return pa.array(["überhang. ", None, *values], dtype)[2:]


def words_of(text: pa.Array, rule: Any) -> list[list[str]]:
    """The words of every row, cut out by the spans."""
    starts, ends, firsts = word_spans(text, rule)
    rows = [(row or "").encode() for row in text.to_pylist()]
    return [
        [rows[row][starts[i] : ends[i]].decode() for i in range(firsts[row], firsts[row + 1])]
        for row in range(len(rows))
    ]


@settings(max_examples=400, deadline=None)
@given(values=columns, rule=rules, dtype=st.sampled_from([pa.string(), pa.large_string()]))
@example(values=["don't (can't) U.S. Mr. e.g., 'tis"], rule="english", dtype=pa.string())
@example(values=["", None, " ", "\x00"], rule="english", dtype=pa.string())
def test_the_kernel_finds_the_words_that_plain_python_finds(values: Any, rule: Any, dtype: pa.DataType) -> None:
    text = sliced(values, dtype)
    assert words_of(text, rule) == [plain.split(value or "", rule) for value in values]


def test_every_exception_is_split_by_both_as_the_table_says() -> None:
    every = sorted(exceptions())
    expected = []
    for word in every:
        stops = np.cumsum(exceptions()[word]).tolist()
        assert stops[-1] == len(word)
        expected.append([word[start:stop] for start, stop in zip([0, *stops], stops)])
    assert [plain.split_english(word) for word in every] == expected
    assert words_of(pa.array(every), "english") == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world!", ["Hello", ",", "world", "!"]),
        ("I don't know.", ["I", "do", "n't", "know", "."]),
        ("It's (really) well-known...", ["It", "'s", "(", "really", ")", "well", "-", "known", "..."]),
        ("The U.S. and Mr. Smith's dog", ["The", "U.S.", "and", "Mr.", "Smith", "'s", "dog"]),
        ("See http://a.org/x-y?z=1, or me@site.com.", ["See", "http://a.org/x-y?z=1", ",", "or", "me@site.com", "."]),
        ("5km for $10 at 3pm, 20%", ["5", "km", "for", "$", "10", "at", "3", "pm", ",", "20", "%"]),
        ("one,two end.Begin and/or he/she a--b", ["one", ",", "two", "end", ".", "Begin", "and/or", "he", "/", "she",
                                                  "a", "--", "b"]),
    ],
)  # fmt: skip
def test_english_words_are_what_a_reader_expects(text: str, words: list[str]) -> None:
    assert plain.split_english(text) == words
    assert words_of(pa.array([text]), "english") == [words]


def options(names: str, values: Any) -> dict[str, float | None]:
    """Options of a filter by name; NaN, a rule that is off, becomes None."""
    return {name: None if math.isnan(value) else value for name, value in zip(names.split(), values)}


def strings(text: pa.Array) -> list[str]:
    return [row or "" for row in text.to_pylist()]


GOPHER = (
    "min_words max_words min_mean_word_length max_mean_word_length max_symbol_ratio max_bullet_lines "
    "max_ellipsis_lines min_words_with_letters min_stop_words"
)
STOP_WORDS = ("the", "and", "é")


@settings(max_examples=300, deadline=None)
@given(values=columns, rule=rules, chosen=st.lists(limits, min_size=9, max_size=9))
def test_gopher_quality_is_that_of_the_plain_rules(values: Any, rule: Any, chosen: list[float]) -> None:
    text = sliced(values, pa.string())
    codes = GopherQuality(words=rule, stop_words=STOP_WORDS, **options(GOPHER, chosen)).codes(text)  # type: ignore[arg-type]
    stops = frozenset(STOP_WORDS)
    assert codes.tolist() == [plain.gopher_quality(t, plain.split(t, rule), stops, chosen) for t in strings(text)]


@settings(max_examples=300, deadline=None)
@given(
    values=columns,
    rule=rules,
    chosen=st.lists(limits, min_size=4, max_size=4),
    top=st.lists(st.tuples(st.integers(1, 4), limits), max_size=2),
    repeated=st.lists(st.tuples(st.integers(1, 5), limits), max_size=3),
)
@example(values=["a b ab a b"], rule="whitespace", chosen=[math.nan] * 4, top=[], repeated=[(2, 0.05)])
def test_gopher_repetition_is_that_of_the_plain_rules(
    values: Any, rule: Any, chosen: list[float], top: Any, repeated: Any
) -> None:
    text = sliced(values, pa.string())
    names = "max_repeated_paragraphs max_repeated_paragraph_characters max_repeated_lines max_repeated_line_characters"
    grams = {
        name: [(n, None if math.isnan(limit) else limit) for n, limit in pairs]
        for name, pairs in (("top_grams", top), ("repeated_grams", repeated))
    }
    codes = GopherRepetition(words=rule, **options(names, chosen), **grams).codes(text)  # type: ignore[arg-type]
    assert codes.tolist() == [
        plain.gopher_repetition(t, plain.split(t, rule), chosen, top, repeated) for t in strings(text)
    ]


@settings(max_examples=300, deadline=None)
@given(values=columns, rule=rules, chosen=st.lists(limits, min_size=5, max_size=5), accept=st.booleans())
def test_fineweb_is_that_of_the_plain_rules(values: Any, rule: Any, chosen: list[float], accept: bool) -> None:
    text = sliced(values, pa.large_string())
    names = "min_finished_lines max_short_lines short_line_length max_repeated_line_characters max_newlines_per_word"
    chosen_options: Any = options(names, chosen)
    codes = FineWebQuality(words=rule, accept_no_finished_line=accept, **chosen_options).codes(text)
    assert codes.tolist() == [plain.fineweb_quality(t, plain.split(t, rule), chosen, accept) for t in strings(text)]


@settings(max_examples=300, deadline=None)
@given(
    values=columns,
    chosen=st.tuples(st.sampled_from([0, 1, 2, math.nan]), st.sampled_from([0, 2]), st.sampled_from([3, 30, math.nan])),
    switches=st.lists(st.booleans(), min_size=6, max_size=6),
    dtype=st.sampled_from([pa.string(), pa.large_string()]),
)
def test_c4_leaves_the_text_that_the_plain_rules_leave(
    values: Any, chosen: Any, switches: list[bool], dtype: Any
) -> None:
    text = sliced(values, dtype)
    names = ["drop_citations", "terminal_mark", "lorem_ipsum", "javascript", "curly_bracket", "policies"]
    chosen_options: Any = options("min_sentences min_words_per_line max_word_length", chosen)
    left, codes, lines = C4Quality(**chosen_options, **dict(zip(names, switches))).clean(text)
    wanted = [plain.c4_lines(t, chosen, switches) for t in strings(text)]
    left.validate(full=True)
    assert left.type == dtype
    assert codes.tolist() == [code for _, code, _ in wanted]
    assert lines == [sum(counts) for counts in zip(*(counts for _, _, counts in wanted))]
    for row, value, (kept, code, _) in zip(left.to_pylist(), values, wanted):
        assert code or row == (None if value is None else kept)


def test_a_word_of_ten_megabytes_is_one_word_and_takes_little_memory() -> None:
    text = pa.array(["a" * 10_000_000, "é" * 5_000_000, "b"])
    starts, ends, firsts = word_spans(text, "english")
    assert firsts.tolist() == [0, 1, 2, 3]
    assert (ends - starts).tolist() == [10_000_000, 10_000_000, 1]
    chosen: Any = options(GOPHER, [1, 10, 1, 100, *[math.nan] * 5])
    assert GopherQuality(words="whitespace", **chosen).codes(text).tolist() == [4, 4, 0]


@pytest.mark.parametrize(
    "row",
    [
        b"\xf0!!!" * 3000,  # a character of four bytes from the front, four characters from the end
        b"These are words.\xc2E" * 3000,  # U+0085 but for its last byte
        b"These are words.\xe0\x80\x8a" * 3000,  # a newline in more bytes than it needs
    ],
)
def test_bytes_that_are_no_utf8_are_refused_before_a_kernel_writes_beyond_its_arrays(row: bytes) -> None:
    bounds = np.cumsum([0, 5, len(row)], dtype=np.int32)
    broken = pa.Array.from_buffers(pa.string(), 2, [None, pa.py_buffer(bounds), pa.py_buffer(b"fine." + row)])
    batch = pa.record_batch({"text": broken})
    stages = [C4Quality(), GopherQuality(), GopherRepetition(), FineWebQuality()]
    for stage in [*stages, LengthFilter(min_words=1, words="english")]:
        with pytest.raises(DataError, match="row 1 of the batch is not UTF-8"):
            stage.transform(batch)
