"""The compiled rules against the plain ones, on text made to be difficult."""

# ruff: noqa: RUF001
from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.corpus.quality import measures, plain
from penstock.corpus.quality.english import exceptions, split_english

pytest.importorskip("numba")

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
    starts, ends, firsts = measures.word_spans(text, rule)
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
    assert [split_english(word) for word in every] == expected
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
    assert split_english(text) == words
    assert words_of(pa.array([text]), "english") == [words]


def both(measure: Callable[..., Any], *arguments: Any) -> list[int]:
    fast, slow = measure(*arguments, fast=True), measure(*arguments, fast=False)
    assert fast.tolist() == slow.tolist()
    return [int(code) for code in fast]


@settings(max_examples=300, deadline=None)
@given(values=columns, rule=rules, chosen=st.lists(limits, min_size=9, max_size=9))
def test_gopher_quality_is_the_same_by_both_paths(values: Any, rule: Any, chosen: list[float]) -> None:
    both(measures.gopher_quality, sliced(values, pa.string()), rule, ["the", "and", "é"], chosen)


@settings(max_examples=300, deadline=None)
@given(
    values=columns,
    rule=rules,
    chosen=st.lists(limits, min_size=4, max_size=4),
    top=st.lists(st.tuples(st.integers(1, 4), limits), max_size=2),
    repeated=st.lists(st.tuples(st.integers(1, 5), limits), max_size=3),
)
@example(values=["a b ab a b"], rule="whitespace", chosen=[math.nan] * 4, top=[], repeated=[(2, 0.05)])
def test_gopher_repetition_is_the_same_by_both_paths(
    values: Any, rule: Any, chosen: list[float], top: Any, repeated: Any
) -> None:
    both(measures.gopher_repetition, sliced(values, pa.string()), rule, chosen, top, repeated)


@settings(max_examples=300, deadline=None)
@given(values=columns, rule=rules, chosen=st.lists(limits, min_size=5, max_size=5), accept=st.booleans())
def test_fineweb_is_the_same_by_both_paths(values: Any, rule: Any, chosen: list[float], accept: bool) -> None:
    both(measures.fineweb_quality, sliced(values, pa.large_string()), rule, chosen, accept)


@settings(max_examples=300, deadline=None)
@given(
    values=columns,
    chosen=st.tuples(st.sampled_from([0, 1, 2, math.nan]), st.sampled_from([0, 2]), st.sampled_from([3, 30, math.nan])),
    options=st.lists(st.booleans(), min_size=6, max_size=6),
    dtype=st.sampled_from([pa.string(), pa.large_string()]),
)
def test_c4_leaves_the_same_text_by_both_paths(values: Any, chosen: Any, options: list[bool], dtype: Any) -> None:
    text = sliced(values, dtype)
    fast, codes, lines = measures.c4_lines(text, chosen, options, fast=True)
    slow, same_codes, same_lines = measures.c4_lines(text, chosen, options, fast=False)
    fast.validate(full=True)
    assert codes.tolist() == same_codes.tolist()
    assert lines == same_lines
    kept = pa.array(codes == 0)
    assert fast.filter(kept).equals(slow.filter(kept))
    assert fast.type == dtype


def test_a_word_of_ten_megabytes_is_one_word_and_takes_little_memory() -> None:
    text = pa.array(["a" * 10_000_000, "é" * 5_000_000, "b"])
    starts, ends, firsts = measures.word_spans(text, "english")
    assert firsts.tolist() == [0, 1, 2, 3]
    assert (ends - starts).tolist() == [10_000_000, 10_000_000, 1]
    assert both(measures.gopher_quality, text, "whitespace", ["the"], [1, 10, 1, 100, *[math.nan] * 5]) == [4, 4, 0]


def test_bytes_that_are_no_utf8_do_not_lead_beyond_the_row() -> None:
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 3, 6], np.int32)), pa.py_buffer(b"ab\xf0\xe2\x80c")]
    )
    starts, ends, firsts = measures.word_spans(broken, "english")
    assert firsts.tolist() == [0, 2, 3]
    assert (starts.tolist(), ends.tolist()) == ([0, 2, 0], [2, 3, 3])


def test_without_numba_it_is_said_once_and_plain_python_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(measures, "find_spec", lambda name: None)
    measures.can_compile.cache_clear()
    try:
        assert not measures.can_compile()
        assert not measures.can_compile()
    finally:
        measures.can_compile.cache_clear()
    assert [record.message.split(",")[0] for record in caplog.records] == ["numba is not installed"]
