"""Overlap with evaluation sets, against sets of tuples of words."""

from __future__ import annotations

import logging
import pickle
import re
import unicodedata
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.corpus import decontamination
from penstock.corpus.decontamination import Decontaminate
from penstock.errors import SchemaError

QUESTION = "How many apples does Anna have left if she gives three of her ten apples to Ben and eats one?"


def words_of(text: str) -> list[str]:
    """Runs of letters, digits and the marks on them, in lower case, character by character."""
    lower = "".join(c.lower() if len(c.lower()) == 1 else c for c in text)
    kept = [
        c if c.isalpha() or unicodedata.category(c) == "Nd" or unicodedata.category(c)[0] == "M" else " " for c in lower
    ]
    return re.findall(r"[^ ]+", "".join(kept))


def grams_of(text: str, n: int) -> list[tuple[str, ...]]:
    words = words_of(text)
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


texts = st.text(
    st.sampled_from("aBé1 .,\n-漢") | st.characters(max_codepoint=0x2FF, exclude_categories=["Cs"]), max_size=30
)
pieces = st.lists(st.sampled_from(["a", "b", "c d", "É", "1.", "x\n", ", "]), max_size=14).map(" ".join)


@settings(max_examples=250, deadline=None)
@given(
    evaluation=st.lists(pieces | texts, min_size=1, max_size=4),
    rows=st.lists(pieces | texts | st.none(), max_size=6),
    n=st.integers(1, 4),
    min_grams=st.integers(1, 3),
    min_share=st.sampled_from([0.0, 0.3, 1.0]),
)
@example(evaluation=["a b"], rows=["a", "b", "xa b", "A, b!"], n=2, min_grams=1, min_share=0.0)
def test_rows_go_exactly_if_enough_of_their_n_grams_are_known(
    evaluation: list[str], rows: Any, n: int, min_grams: int, min_share: float
) -> None:
    known = {gram for text in evaluation for gram in grams_of(text, n)}
    if not known:
        with pytest.raises(ValueError, match="evaluation"):
            Decontaminate(evaluation, n=n)
        return
    expected = []
    for i, row in enumerate(rows):
        grams = grams_of(row or "", n)
        hits = sum(gram in known for gram in grams)
        if not (hits >= min_grams and hits >= min_share * max(len(grams), 1)):
            expected.append(i)
    batch = pa.record_batch({"text": pa.array(["before", *rows], pa.string()), "n": list(range(-1, len(rows)))})[1:]
    stage = Decontaminate(evaluation, n=n, min_grams=min_grams, min_share=min_share)
    assert stage.transform(batch)["n"].to_pylist() == expected
    assert sum(stage.counts.values()) == len(rows) - len(expected)


def test_case_punctuation_and_spacing_make_no_difference() -> None:
    stage = Decontaminate({"apples": [QUESTION]})
    disguised = "Intro. " + QUESTION.upper().replace(" ", " - \r\n").replace("?", "!!") + " And so on."
    batch = pa.record_batch({"text": [disguised, QUESTION[:40], "", None]})
    assert stage.transform(batch)["text"].to_pylist() == [QUESTION[:40], "", None]
    assert stage.counts == {"contaminated: apples": 1}


def test_the_reason_names_the_set_with_most_in_common() -> None:
    stage = Decontaminate({"one": ["a b c d"], "two": ["x y z", "p q r", "a b c"]}, n=3)
    batch = pa.record_batch({"text": ["a b c d", "x y z p q r a b c", "a b x y", "a b c x y z"]})
    assert stage.transform(batch)["text"].to_pylist() == ["a b x y"]
    assert stage.counts == {"contaminated: one": 1, "contaminated: two": 2}


def test_an_n_gram_counts_for_every_set_that_has_it() -> None:
    first = "one two three four five six seven eight"
    both = first + " nine ten eleven twelve thirteen fourteen fifteen sixteen"
    batch = pa.record_batch({"text": [both, first, "nothing of it at all"]})
    for sets, counts in (({"A": [first], "B": [both]}, (1, 1)), ({"B": [both], "A": [first]}, (0, 2))):
        stage = Decontaminate(sets, n=3, min_share=0.8)
        assert stage.transform(batch).num_rows == 1
        assert (stage.counts.get("contaminated: A", 0), stage.counts["contaminated: B"]) == counts


@settings(max_examples=150, deadline=None)
@given(
    sets=st.lists(st.lists(pieces, min_size=1, max_size=3), min_size=1, max_size=4),
    rows=st.lists(pieces, min_size=1, max_size=5),
    min_share=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_rows_are_named_after_the_first_set_with_most_of_their_n_grams(
    sets: list[list[str]], rows: list[str], min_share: float
) -> None:
    known = [{gram for text in texts for gram in grams_of(text, 2)} for texts in sets]
    if not any(known):
        return
    expected = []
    for row in rows:
        grams = grams_of(row, 2)
        hits = [sum(gram in one for gram in grams) for one in known]
        most = max(hits)
        expected.append(str(hits.index(most)) if most and most >= min_share * len(grams) else None)
    stage = Decontaminate({str(i): texts for i, texts in enumerate(sets)}, n=2, min_share=min_share, action="mark")
    assert stage.transform(pa.record_batch({"text": rows}))["contaminated"].to_pylist() == expected


def test_it_takes_no_more_memory_than_it_says() -> None:
    texts = [" ".join(f"w{i * j}" for j in range(60)) for i in range(1, 400)]
    stage = Decontaminate({"one": texts[:200], "two": texts[100:]}, n=3)
    grams = sum(len({g for t in some for g in grams_of(t, 3)}) for some in (texts[:200], texts[100:]))
    assert 18 * grams <= stage.memory_usage() <= 26 * grams


def test_marking_keeps_every_row_and_names_the_set() -> None:
    stage = Decontaminate({"one": ["a b c"]}, n=2, action="mark", into="leak")
    out = stage.transform(pa.record_batch({"text": ["x a b", "b a", None]}))
    assert out["leak"].to_pylist() == ["one", None, None]
    assert stage.counts == {"contaminated: one": 1}
    with pytest.raises(SchemaError, match="'leak'"):
        stage.transform(out)


@pytest.mark.parametrize(
    "sets",
    [
        ["a b c", "d e f"],
        pa.array(["a b c", None, "d e f"], pa.large_string()),
        pa.chunked_array([["a b c"], ["d e f"]]),
        pa.record_batch({"q": ["a b c"], "n": [1], "a": ["d e f"]}),
        pa.table({"q": pa.chunked_array([["a b c"], ["d e f"]])}),
        pa.array(["a b c", "d e f"]).dictionary_encode(),
    ],
)
def test_evaluation_sets_come_in_many_forms(sets: Any) -> None:
    stage = Decontaminate(sets, n=3)
    assert stage.transform(pa.record_batch({"text": ["d e f", "c d e", "a b c"]}))["text"].to_pylist() == ["c d e"]


def test_texts_too_short_to_be_found_are_counted_and_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        stage = Decontaminate({"tiny": ["yes", "no way", "a b c d"]}, n=4)
    assert stage.short_texts == {"tiny": 2}
    assert "'tiny'" in caplog.text


def test_long_columns_are_done_in_stretches_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{i} a b c {i}" if i % 7 == 0 else f"{i} a b {i} c" for i in range(500)]
    batch = pa.record_batch({"text": rows})
    whole = Decontaminate(["a b c"], n=3).transform(batch)
    monkeypatch.setattr(decontamination, "_STRETCH", 64)
    assert Decontaminate(["a b c"], n=3).transform(batch).equals(whole)
    assert whole.num_rows == 500 - 72


def test_a_word_of_ten_megabytes_is_no_problem() -> None:
    stage = Decontaminate(["a b"], n=2)
    assert stage.transform(pa.record_batch({"text": ["x" * 10_000_000, "a b"]})).num_rows == 1


def test_it_travels_to_other_processes_and_says_what_it_holds() -> None:
    stage = Decontaminate({"one": ["a b c d"]}, n=2)
    copy = pickle.loads(pickle.dumps(stage))  # noqa: S301
    assert copy.transform(pa.record_batch({"text": ["b c"]})).num_rows == 0
    assert copy.fingerprint == stage.fingerprint
    assert repr(stage) == "Decontaminate(['one'], n=2, 3 n-grams)"
    assert stage.memory_usage() > 24
    assert stage.fingerprint != Decontaminate({"one": ["a b c e"]}, n=2).fingerprint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Decontaminate(["a"], n=0), "min_grams"),
        (lambda: Decontaminate(["a"], n=2), r"(?i)evaluation.*\b2\b"),
        (lambda: Decontaminate({}), "(?i)evaluation"),
        (lambda: Decontaminate(["a b"], n=1, min_share=3), "min_share"),
        (lambda: Decontaminate(["a b"], n=1, action="burn"), r"action.*'drop'"),  # type: ignore[arg-type]
        (lambda: Decontaminate("a b c"), "'evaluation'"),
        (lambda: Decontaminate(pa.table({"n": [1]})), "'n'"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_pickled_copy_is_small_and_finds_the_same_rows() -> None:
    words = [f"w{number}" for number in range(30_000)]
    clean = Decontaminate({"eval": [" ".join(words)]}, n=2)
    sent = pickle.dumps(clean)
    assert len(sent) < 12 * len(words)
    batch = pa.record_batch({"text": ["w5 w6", "w6 w5", None]})
    assert pickle.loads(sent).transform(batch).equals(clean.transform(batch))  # noqa: S301 - our own
