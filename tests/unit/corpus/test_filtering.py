"""Quality filters: each rule by a text that breaks it alone, and what is counted."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import Pipeline, PipelineConfig
from penstock.corpus.quality.base import TextFilter
from penstock.corpus.quality.filters import (
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    LanguageCharacters,
    LengthFilter,
    RegexFilter,
    WordListFilter,
    quality_filters,
)
from penstock.errors import ConfigError, SchemaError
from penstock.sinks import MemorySink
from penstock.sources import MemorySource

SENTENCE = "The quick brown fox jumped over that lazy dog and ran to the end of the old forest with great joy."
OTHERS = [
    "A river of words flows through every library, and readers have to swim with care.",
    "Nobody knows where the lighthouse keeper went after the storm had passed.",
    "Seventeen musicians played beneath a copper roof until morning came.",
]
PROSE = " ".join([SENTENCE, *OTHERS])


def batch_of(*texts: str | None, dtype: pa.DataType | None = None) -> pa.RecordBatch:
    """The texts with a number each, as a slice of a longer batch."""
    values = ["before", *texts]
    return pa.record_batch({"text": pa.array(values, dtype or pa.string()), "n": list(range(-1, len(texts)))})[1:]


def kept(stage: TextFilter, *texts: str | None) -> list[int]:
    out = stage.transform(batch_of(*texts))
    out.validate(full=True)
    return out["n"].to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Too short to be of any use.", "too few words"),
        (PROSE * 300, "too many words"),
        ("a be to of " * 40, "words too short"),
        ("incomprehensibilities counterrevolutionaries of " * 40, "words too long"),
        (PROSE + "#" * 20, "too many hashes"),
        (PROSE + " ..." * 20, "too many ellipses"),
        (PROSE + "…" * 20, "too many ellipses"),
        ("\n".join("- " + line for line in OTHERS * 2), "too many bullet lines"),
        ("\r\n".join([PROSE + "...", PROSE]), "too many lines end in an ellipsis"),
        (PROSE + " 12345" * 40, "too few words with letters"),
        (("swiftly moving clouds drifted above quiet mountains; " * 10), "too few stop words"),
    ],
)
def test_gopher_quality_names_the_rule_a_text_breaks(text: str, reason: str) -> None:
    stage = GopherQuality(max_words=10_000)
    assert kept(stage, text, PROSE) == [1]
    assert stage.counts == {f"gopher-quality: {reason}": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        ("\n\n".join([SENTENCE, "a", "b", "b", "b"]), "repeated paragraphs"),
        ("\n\n".join([SENTENCE, *OTHERS, SENTENCE]), "characters in repeated paragraphs"),
        ("\n".join([PROSE, "x", "x", "x"]), "repeated lines"),
        ("\n".join([SENTENCE, *OTHERS, SENTENCE]), "characters in repeated lines"),
        ("Round and round " * 2 + "the wheel, round and round goes it", "most frequent 2-gram"),
        (PROSE + " " + PROSE[:200], "repeated 5-grams"),
    ],
)
def test_gopher_repetition_names_the_rule_a_text_breaks(text: str, reason: str) -> None:
    stage = GopherRepetition()
    assert kept(stage, text, PROSE) == [1]
    assert stage.counts == {f"gopher-repetition: {reason}": 1}


def test_each_gopher_repetition_rule_can_be_the_only_one() -> None:
    off: dict[str, Any] = {
        "max_repeated_paragraphs": None,
        "max_repeated_paragraph_characters": None,
        "max_repeated_lines": None,
        "max_repeated_line_characters": None,
        "top_grams": (),
        "repeated_grams": (),
    }
    text = "\n\n".join([SENTENCE] * 5)
    assert kept(GopherRepetition(**off), text) == [0]
    for name, value in {**dict.fromkeys(off, 0.3), "top_grams": [(3, 0.1)], "repeated_grams": [(7, 0.1)]}.items():
        assert kept(GopherRepetition(**off | {name: value}), text) == [], name


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (" \n\t\n", "empty"),
        ("\n".join(line.rstrip(".") + " and so on without end" for line in OTHERS), "too few finished lines"),
        ("\n".join(["Short line."] + [f"Line {i}." for i in range(20)]), "too many short lines"),
        ("\n".join([SENTENCE, *OTHERS, OTHERS[0]]), "repeated lines"),
        ("\n\n\n\n\n\n".join(f"{number} incomprehensibilities overwhelmed." for number in "abcdef"), None),
        ("\n" * 40 + SENTENCE, "too many lines for words"),
    ],
)
def test_fineweb_names_the_rule_a_text_breaks(text: str, reason: str | None) -> None:
    stage = FineWebQuality(max_newlines_per_word=1.5 if reason is None else 0.3)
    assert kept(stage, text, PROSE) == ([0, 1] if reason is None else [1])
    assert stage.counts == ({} if reason is None else {f"fineweb: {reason}": 1})


def test_c4_leaves_lines_out_and_counts_what_it_did() -> None:
    text = "\r\n".join(
        [
            "  Home | About | Contact  ",
            "Prose ends in a mark [12] of its own.",
            "Please enable Javascript to read this page.",
            "This site uses cookies to please you.",
            "Too short.",
            "Read on...",
            "y" * 1001 + " is a long word.",
            'He said "stop this now!" Then he left. "Why?"',
        ]
    )
    stage = C4Quality(min_sentences=3)
    out = stage.transform(batch_of(text, "One sentence here only."))
    assert out["text"].to_pylist() == [
        'Prose ends in a mark  of its own.\nHe said "stop this now!" Then he left. "Why?"',
    ]
    assert stage.counts == {"c4: too few sentences": 1, "c4: text changed": 1}
    assert stage.lines_left_out == {
        "word too long": 1, "no terminal mark": 2, "too few words": 1, "javascript": 1, "policy": 1,
    }  # fmt: skip
    stage.reset()
    assert stage.counts == stage.lines_left_out == {}


def test_c4_drops_the_page_for_lorem_ipsum_or_a_bracket_in_a_line_that_would_stay() -> None:
    stage = C4Quality()
    page = PROSE + "\n" + PROSE
    texts = [page + "\nLorem Ipsum dolor sit amet.", page + "\nvoid main() { return 0; }.", page + "\nint x{}", page]
    assert kept(stage, *texts) == [2, 3]
    assert stage.counts == {"c4: lorem ipsum": 1, "c4: curly bracket": 1, "c4: text changed": 1}


@pytest.mark.parametrize("min_sentences", [None, 0])
def test_c4_drops_the_page_of_which_no_line_is_left_and_says_so(min_sentences: int | None) -> None:
    stage = C4Quality(min_sentences=min_sentences)
    texts = ["Home | About\nContact", PROSE, "no mark\n" + PROSE, "", "[12]", " \n "]
    assert kept(stage, *texts) == [1, 2]
    assert stage.counts == {"c4: no line left": 4, "c4: text changed": 1}
    strict = C4Quality()
    assert kept(strict, "Home") == []
    assert strict.counts == {"c4: too few sentences": 1}


def test_c4_does_not_touch_a_column_that_needs_no_change() -> None:
    batch = batch_of(PROSE + "\n" + PROSE)
    assert C4Quality().transform(batch).column(0).equals(batch.column(0))


@pytest.mark.parametrize("dtype", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_c4_keeps_the_type_of_the_column(dtype: pa.DataType) -> None:
    batch = pa.record_batch({"text": pa.array([PROSE + "\nno mark\n" + PROSE, None]).cast(dtype)})
    out = C4Quality().transform(batch)
    assert out.schema == batch.schema
    assert out["text"].to_pylist() == [PROSE + "\n" + PROSE]


@pytest.mark.parametrize("name", ["gopher", "c4", "fineweb", "length", "latin"])
def test_null_empty_and_strange_rows_are_counted_and_never_an_error(name: str) -> None:
    texts = [
        None,
        "",
        "\x00\x00",
        "\r\n\r\n",
        "\u2028",
        "x" * 100_000,
        "漢" * 300,
        PROSE + "\r\nA fifth one came along.",
    ]
    batch = batch_of(*texts)
    for stage in quality_filters(name):
        out = stage.transform(batch)
        left_out = [reason for reason in stage.counts if not reason.endswith("changed")]
        assert sum(stage.counts[reason] for reason in left_out) == batch.num_rows - out.num_rows
        assert stage.counts[f"{stage.name}: null"] == 1
        assert len(texts) - 1 in out["n"].to_pylist()
        assert stage.transform(batch[:0]).num_rows == 0


def test_a_column_that_is_not_text_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(SchemaError, match=r"'n'.*\bint64\b"):
        GopherQuality("n").transform(batch_of("a"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab é\n", max_size=12), max_size=5), st.integers(0, 8), st.integers(0, 8))
def test_lengths_are_counted_as_python_counts_them(texts: list[str], low: int, high: int) -> None:
    by_characters = kept(LengthFilter(min_characters=low, max_characters=high), *texts)
    assert by_characters == [i for i, text in enumerate(texts) if low <= len(text) <= high]
    by_words = kept(LengthFilter(min_words=low, max_words=high), *texts)
    assert by_words == [i for i, text in enumerate(texts) if low <= len(text.split()) <= high]


def test_length_in_english_words_counts_punctuation_apart() -> None:
    stage = LengthFilter(min_words=4, words="english")
    assert kept(stage, "Don't go.", "Go on") == [0]
    assert stage.counts == {"length: too few words": 1}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("abß漢字かナжЖ"), max_size=9), max_size=5
    )
)
def test_the_share_of_an_alphabet_is_counted_letter_by_letter(texts: list[str]) -> None:
    stage = LanguageCharacters(alphabet="abcß漢ж", min_share=0.5)
    expected = []
    for i, text in enumerate(texts):
        letters = [c for c in text if c.isalpha()]
        chosen = [c for c in letters if c in "abcß漢жABCSЖ" or c in "abcß漢ж".upper()]
        if letters and len(chosen) >= 0.5 * len(letters):
            expected.append(i)
    assert kept(stage, *texts) == expected


def test_scripts_tell_languages_apart() -> None:
    texts = ["Plain English, 100%.", "Обычный русский текст.", "これは日本語です。", "12 34", "Ελληνικά και English"]
    assert kept(LanguageCharacters(scripts="latin"), *texts) == [0]
    assert kept(LanguageCharacters(scripts=["cyrillic"]), *texts) == [1]
    assert kept(LanguageCharacters(scripts=["japanese", "han"], min_share=1.0), *texts) == [2]
    assert kept(LanguageCharacters(scripts=["greek", "latin"], min_share=1.0), *texts) == [0, 4]


def test_regex_leaves_out_what_matches_or_keeps_it() -> None:
    texts = ["cat\nsat", "dog", None]
    drop, keep = RegexFilter(r"c.t\ns"), RegexFilter(r"c.t", keep=True)
    assert (kept(drop, *texts), kept(keep, *texts)) == ([1], [0])
    assert drop.counts == {r"regex: matches 'c.t\\ns'": 1, "regex: null": 1}
    assert keep.counts == {"regex: does not match 'c.t'": 1, "regex: null": 1}


@pytest.mark.parametrize(
    ("text", "hit"),
    [
        ("a bad one", True), ("BAD", True), ("(bad)", True), ("badly", False), ("notbad", False), ("bad_", False),
        ("ébad", False), ("bad\u0301", False), ("very  \n nasty words", True), ("nasty", False), ("c++", True),
        ("c+", False), ("naïveté", True), ("bad.bad", True),
    ],
)  # fmt: skip
def test_listed_words_are_found_whole_whatever_their_case(text: str, hit: bool) -> None:
    stage = WordListFilter(["bad", "nasty words", "C++", "NAÏVETÉ"])
    assert (kept(stage, text) == []) is hit


def test_lines_with_listed_words_are_left_out_of_the_text() -> None:
    stage = WordListFilter(["bad", "nasty word"], lines=True)
    out = stage.transform(batch_of("good\nso bad\nfine", "bad\nBad!", "bad apple\nA nasty\nword", "nothing", None))
    assert out["text"].to_pylist() == ["good\nfine", "A nasty\nword", "nothing"]
    assert stage.counts == {"word-list: lines left out": 2, "word-list: no line left": 1, "word-list: null": 1}


SPACES = [chr(i) for i in range(0x3001) if chr(i).isspace()]  # beyond there is no whitespace


@pytest.mark.parametrize("lines", [False, True])
def test_any_whitespace_of_a_phrase_is_any_whitespace_of_the_text(lines: bool) -> None:
    texts = [f"a nasty{space}{space}word here" for space in SPACES]
    expected = [SPACES.index("\n")] if lines else []
    for phrase in ("nasty word", "nasty\u00a0\u2003word"):
        assert kept(WordListFilter([phrase], lines=lines), *texts) == expected
    assert kept(WordListFilter(["nasty word"]), "nasty\u200bword", "nasty-word") == [0, 1]


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize("count", [3000, 150_000])
def test_a_list_of_thousands_of_words_works(count: int, lines: bool) -> None:
    stage = WordListFilter([f"word{i}x" for i in range(count)], lines=lines)
    assert kept(stage, "word0x", f"word{count - 1}x here", f"word{count}x here") == [2]
    out = stage.transform(batch_of(f"one\nword{count - 1}x\nWORD1X\ntwo"))["text"].to_pylist()
    assert out == (["one\ntwo"] if lines else [])


def test_a_phrase_that_is_too_long_is_refused_when_given() -> None:
    with pytest.raises(ValueError, match="'xyxy"):
        WordListFilter(["fine", "xy" * 400_000])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GopherQuality(min_words=-1), "min_words"),
        (lambda: GopherQuality(words="spaces"), r"\bwords\b.*'spaces'"),
        (lambda: GopherRepetition(top_grams=[(0, 0.5)]), "top_grams"),
        (lambda: LengthFilter(), "min_characters"),
        (lambda: LanguageCharacters(), "scripts="),
        (lambda: LanguageCharacters(scripts=["klingon"]), "'klingon'"),
        (lambda: LanguageCharacters(scripts="latin", min_share=2), "min_share"),
        (lambda: RegexFilter("("), r"'\('"),
        (lambda: WordListFilter([" "]), r"\bwords\b"),
    ],
)
def test_options_that_cannot_work_are_refused_when_given(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_filters_come_by_name_in_order_and_a_misspelt_name_gets_a_suggestion() -> None:
    assert [stage.name for stage in quality_filters("c4, gopher")] == ["c4", "gopher-quality", "gopher-repetition"]
    assert [stage.column for stage in quality_filters(["fineweb"], column="body")] == ["body"]
    with pytest.raises(ConfigError, match=r"'goper'.*'gopher'"):
        quality_filters("goper")


def test_descriptions_change_with_every_option_and_with_nothing_else() -> None:
    assert GopherQuality().describe() == GopherQuality(min_words=50).describe()
    made = [
        GopherQuality(), GopherQuality("body"), GopherQuality(min_words=49), GopherQuality(words="whitespace"),
        GopherQuality(stop_words=["the"]), GopherRepetition(), GopherRepetition(top_grams=[(2, 0.3)]), C4Quality(),
        C4Quality(policies=False), FineWebQuality(), LengthFilter(min_words=1), LengthFilter(min_words=2),
        RegexFilter("a"), RegexFilter("b"), WordListFilter(["a"]), WordListFilter(["a"], lines=True),
        LanguageCharacters(scripts="latin"),
    ]  # fmt: skip
    assert len({stage.fingerprint for stage in made}) == len(made)
    assert WordListFilter(["b", "a"]).fingerprint == WordListFilter(["a", "b", "a"]).fingerprint
    assert repr(GopherQuality("body", min_words=10)) == "GopherQuality(min_words=10, column='body')"
    assert repr(C4Quality()) == "C4Quality()"


@pytest.mark.parametrize("workers", [2, "process"])
def test_filters_run_in_a_pipeline_and_their_counts_reach_the_report(workers: Any) -> None:
    texts = [PROSE if i % 3 else "short" for i in range(300)]
    sink = MemorySink()
    config = PipelineConfig(workers=workers, max_workers=2, batch_rows=70)
    pipeline = Pipeline(MemorySource(pa.table({"text": texts})), quality_filters("gopher"), sink, config=config)
    report = pipeline.run()
    assert report.dropped == {"gopher-quality: too few words": 100}
    assert sink.table().num_rows == 200


def test_a_pickled_filter_keeps_its_options_and_counts_from_zero() -> None:
    stage = C4Quality(min_sentences=1)
    stage.transform(batch_of("No mark", None))
    copy = pickle.loads(pickle.dumps(stage))  # noqa: S301
    assert copy.describe() == stage.describe()
    assert copy.counts == copy.lines_left_out == {}
