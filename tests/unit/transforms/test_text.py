"""Text transforms against Python's own string methods."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import SchemaError
from penstock.pipeline.stages import Transform
from penstock.transforms.text import (
    CountChars,
    CountWords,
    Lower,
    NormalizeUnicode,
    NormalizeWhitespace,
    Strip,
    rewrite,
    word_bytes,
)

SPACES = [chr(c) for c in range(0x3001) if chr(c).isspace()]  # beyond there is no whitespace


@cache
def every_character() -> list[str]:
    return [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


# Letters, every whitespace, controls that are none, neighbours of whitespace in UTF-8, and whatever else there is.
characters = (
    st.sampled_from("aZé\u2019\u200b\u2027\u202a\u1681\u3001\u0084\x00\x08\x0e\x1b\x7fİẞΣß😀")
    | st.sampled_from(SPACES)
    | st.characters(exclude_categories=["Cs"])
)
texts = st.text(characters, max_size=30) | st.text("aB \n", max_size=30)
columns = st.lists(texts | st.none(), max_size=12)
layouts = st.sampled_from([pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])


def column_of(values: list[str | None], layout: pa.DataType, skip: int) -> pa.RecordBatch:
    """A batch whose text column is a slice: it begins `skip` rows into its buffers."""
    whole = pa.array(["Überhang ", None, "\u3000"][:skip] + values, pa.string()).cast(layout)
    return pa.record_batch({"text": whole})[skip:]


def outcome(transform: Transform, batch: pa.RecordBatch, name: str = "text") -> pa.Array:
    out = transform.transform(batch)
    out.validate(full=True)
    assert out.num_rows == batch.num_rows
    return out.column(name)


@pytest.mark.parametrize(
    ("transform", "reference"),
    [
        (Strip("text"), str.strip),
        (NormalizeWhitespace("text"), lambda s: " ".join(s.split())),
        (Lower("text"), lambda s: pc.utf8_lower(pa.scalar(s)).as_py()),
    ],
    ids=lambda stage: repr(stage).split(" at 0x")[0],
)
def test_rewriting_agrees_with_the_reference_on_any_column(
    transform: Transform, reference: Callable[[str], str]
) -> None:
    @given(values=columns, layout=layouts, skip=st.integers(0, 3))
    @example(values=["", "", "a"], layout=pa.string(), skip=0)
    @example(values=["a", "", ""], layout=pa.string(), skip=2)
    def check(values: list[str | None], layout: pa.DataType, skip: int) -> None:
        out = outcome(transform, column_of(values, layout, skip))
        assert out.type == layout
        assert out.to_pylist() == [None if v is None else reference(v) for v in values]

    check()


@pytest.mark.parametrize(
    ("transform", "into", "reference"),
    [(CountWords("text"), "words", lambda s: len(s.split())), (CountChars("text"), "chars", len)],
    ids=lambda stage: repr(stage).split(" at 0x")[0],
)
def test_counting_agrees_with_python_on_any_column(
    transform: Transform, into: str, reference: Callable[[str], int]
) -> None:
    @given(values=columns, layout=layouts, skip=st.integers(0, 3))
    @example(values=["", "", "a"], layout=pa.string(), skip=0)
    @example(values=["a", "b", ""], layout=pa.string(), skip=1)
    @example(values=[None, None], layout=pa.string(), skip=0)
    @example(values=["\x1f\x00"], layout=pa.string(), skip=0)
    def check(values: list[str | None], layout: pa.DataType, skip: int) -> None:
        out = outcome(transform, column_of(values, layout, skip), into)
        assert out.type == pa.int64()
        assert out.to_pylist() == [None if v is None else reference(v) for v in values]

    check()


def test_every_character_there_is_counts_as_python_counts_it() -> None:
    batch = pa.record_batch({"text": [f"a{c}b" for c in every_character()]})
    expected = np.array([len(f"a{c}b".split()) for c in every_character()])
    np.testing.assert_array_equal(outcome(CountWords("text"), batch, "words").to_numpy(), expected)
    alone = pa.record_batch({"text": every_character()})
    expected = np.array([len(c.split()) for c in every_character()])
    np.testing.assert_array_equal(outcome(CountWords("text"), alone, "words").to_numpy(), expected)


def test_every_character_there_is_lowers_as_arrow_lowers_it() -> None:
    batch = pa.record_batch({"text": [f"A{c}B" for c in every_character()]})
    assert outcome(Lower("text"), batch).equals(pc.utf8_lower(batch.column(0)))


def test_every_character_there_is_strips_as_python_strips_it() -> None:
    batch = pa.record_batch({"text": [f"{c}a{c}" for c in every_character()]})
    assert outcome(Strip("text"), batch).to_pylist() == [f"{c}a{c}".strip() for c in every_character()]


@pytest.mark.parametrize("wide_rows", [0, 1, 30, 70, 100])
def test_lower_stitches_ascii_rows_and_others_back_in_order(wide_rows: int) -> None:
    values = [("ÀÉ" if i * 37 % 100 < wide_rows else "AE") + f" Row {i}" if i % 7 else None for i in range(100)]
    for layout in (pa.string(), pa.large_string()):
        batch = pa.record_batch({"text": pa.array(values, layout)})[3:]
        assert outcome(Lower("text"), batch).to_pylist() == [v and v.lower() for v in values[3:]]


@given(
    values=st.lists(st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=20) | st.none(), max_size=10),
    form=st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]),
    skip=st.integers(0, 3),
)
def test_normalize_unicode_agrees_with_unicodedata(values: list[str | None], form: str, skip: int) -> None:
    out = outcome(NormalizeUnicode("text", form=form), column_of(values, pa.string(), skip))
    assert out.to_pylist() == [v and unicodedata.normalize(form, v) for v in values]  # type: ignore[arg-type]


def test_bytes_that_lie_behind_a_null_do_no_harm() -> None:
    validity, bounds = pa.py_buffer(bytes([0b0101])), pa.py_buffer(np.array([0, 4, 7, 11, 13], np.int32))
    text = pa.Array.from_buffers(pa.string(), 4, [validity, bounds, pa.py_buffer(b"A  b\xff\xc2 \xc2\xa0Cd\xe3\x80")])
    batch = pa.record_batch({"text": text})
    assert outcome(Lower("text"), batch).to_pylist() == ["a  b", None, "\u00a0cd", None]
    assert outcome(NormalizeWhitespace("text"), batch).to_pylist() == ["A b", None, "Cd", None]
    assert CountWords("text").transform(batch).column("words").to_pylist() == [2, None, 1, None]


def test_a_column_of_nothing_but_nulls_needs_no_type() -> None:
    batch = pa.record_batch({"text": pa.nulls(2)})
    assert outcome(Lower("text"), batch).equals(pa.nulls(2))
    assert outcome(CountWords("text"), batch, "words").equals(pa.nulls(2, pa.int64()))


def test_several_columns_are_rewritten_and_the_others_left_alone() -> None:
    batch = pa.record_batch({"a": ["X"], "b": ["Y"], "c": ["Z"]})
    assert Lower(["a", "c"]).transform(batch).to_pydict() == {"a": ["x"], "b": ["Y"], "c": ["z"]}


def test_text_that_is_already_single_spaced_is_not_copied() -> None:
    text = pa.array(["one two", "", "three"])
    out = outcome(NormalizeWhitespace("text"), pa.record_batch({"text": text}))
    assert out.buffers()[2].address == text.buffers()[2].address


def test_counts_refuse_to_overwrite_a_column() -> None:
    batch = pa.record_batch({"text": ["a b"], "words": [9]})
    with pytest.raises(SchemaError, match=r"'words'.*into=\.\.\."):
        CountWords("text").transform(batch)
    assert CountWords("text", into="n").transform(batch).column("n").to_pylist() == [2]


@pytest.mark.parametrize("make", [Lower, Strip, NormalizeWhitespace, NormalizeUnicode, CountWords, CountChars])
def test_a_column_that_is_missing_or_no_text_is_named(make: Callable[[str], Transform]) -> None:
    batch = pa.record_batch({"n": [1]})
    with pytest.raises(SchemaError, match=r"'n'.*Cast\(\{'n': 'string'\}\)"):
        make("n").transform(batch)
    with pytest.raises(SchemaError, match=r"'text'.*'n'"):
        make("text").transform(batch)


def test_an_unknown_unicode_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\bform\b.*'nfc'"):
        NormalizeUnicode("text", form="nfc")


def test_word_bytes_of_nothing_is_nothing() -> None:
    assert word_bytes(np.zeros(0, np.uint8)).size == 0


def test_rewriting_keeps_the_metadata_of_the_field() -> None:
    schema = pa.schema([pa.field("text", pa.string(), nullable=False, metadata={"role": "input"})])
    batch = pa.record_batch([pa.array(["A"])], schema=schema)
    assert rewrite(batch, ["text"], pc.utf8_lower).schema.equals(schema, check_metadata=True)


def test_transforms_print_as_they_are_written() -> None:
    assert repr(Lower("text")) == "Lower('text')"
    assert repr(Strip(["a", "b"])) == "Strip(['a', 'b'])"
    assert repr(NormalizeWhitespace("text")) == "NormalizeWhitespace('text')"
    assert repr(NormalizeUnicode("text")) == "NormalizeUnicode('text', form='NFC')"
    assert repr(CountWords("text")) == "CountWords('text', into='words')"
    assert repr(CountChars("text", into="n")) == "CountChars('text', into='n')"
