"""Words, shingles, MinHash: the kernel, its definition in NumPy and a plain Python reference agree to the bit."""

from __future__ import annotations

import math
import re
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oracles import shingles as definition
from penstock.arrays.text import Utf8, utf8
from penstock.corpus.dedup.minhash import CHAR_FACTOR, WORD_FACTOR, MinHash
from penstock.errors import ConfigError

WORD = (1 << 64) - 1
texts = st.lists(
    st.text(max_size=40)
    | st.text("ab c.,\n'-Ä ß\u3000日本のคน𠀀😀\u200b\0", max_size=40)
    | st.text("a1 2.+-=<,;_\n'\u2019→é\ufe0f☀", max_size=40)
    | st.lists(st.sampled_from(["The", "cat", "sat,", "on", "mat.", "日本語", "...", "don't"])).map(" ".join),
    max_size=8,
)


def mixed(word: int) -> int:
    word = word + 0x9E3779B97F4A7C15 & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


NO_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\u3005-\u312f\u31a0-\u31ff\u3400-\ua4cf"
    "\ua980-\ua9ff\uaa60-\uaadf\uf900-\ufaff\uff66-\uff9f\U00020000-\U0003ffff\U0001b000-\U0001bfff\U0001f000-\U0001ffff"
)
SPACES = {chr(code) for code in range(128) if chr(code).isspace()}
SOLO_CHARACTER = re.compile(f"[{NO_SPACES}]")


def words_of(text: str) -> list[list[int]]:
    """Each word as the numbers that are hashed, by Python's own means."""
    words: list[list[int]] = [[]]
    for at, char in enumerate(text):
        around = text[at - 1 : at] + text[at + 1 : at + 2] if at else " " + text[1:2]
        before, after = (around + " ")[:2]
        category = unicodedata.category(char)
        wide = ord(char) > 0xFFFF  # letters, without case, unless they are words of their own
        if char.isspace():
            words.append([])
        elif SOLO_CHARACTER.match(char) and (wide or category[0] not in "PC"):
            words += [[ord(char) | 1 << 31], []]
        elif wide:
            words[-1].append(ord(char))
        elif category in ("Cc", "Cf") or char in "'\u2018\u2019" or "\ufe00" <= char <= "\ufe0f":
            continue
        elif char in "._:/+-*^%=<>" and before in "0123456789" and after in "0123456789":
            words[-1].append(ord(char))
        elif category[0] == "S" and (not char.isascii() or (char in "+<=>" and before in SPACES and after in SPACES)):
            words += [[ord(char) | 1 << 31], []]
        elif category[0] in "PS":
            words.append([])
        else:
            lower = char.lower()
            words[-1].append(ord(lower) if len(lower) == 1 else ord(char))
    return [word for word in words if word]


def keys_of(text: str, minhash: MinHash) -> list[int] | None:
    """The reference: the same definition with Python's integers."""
    hashes = []
    for word in words_of(text):
        total = 0
        for number in word:
            total = total * CHAR_FACTOR + number & WORD
        hashes.append(mixed(total))
    if not hashes:
        return None
    grams = [hashes[i : i + minhash.ngram] for i in range(max(1, len(hashes) - minhash.ngram + 1))]
    sums = []
    for gram in grams:
        total = 0
        for number in gram:
            total = total * WORD_FACTOR + number & WORD
        sums.append(mixed(total))
    minima = []
    for j in range(minhash.bands * minhash.rows):
        drawn = mixed(j + mixed(minhash.seed) & WORD)
        factor, term = drawn & 0xFFFFFFFF | 1, drawn >> 32
        shift = 0 if j < minhash.rows // 2 * minhash.bands else 32
        minima.append(min((s >> shift & 0xFFFFFFFF) * factor + term & 0xFFFFFFFF for s in sums))
    keys = []
    for band in range(minhash.bands):
        key = mixed(band)
        for row in range(minhash.rows):
            key = (key ^ minima[row * minhash.bands + band]) * 0xFF51AFD7ED558CCD & WORD
            key ^= key >> 32
        keys.append(max(key, 1))
    return keys


def assert_as_reference(given_texts: list[str], minhash: MinHash, large: bool, skip: int) -> None:
    array = pa.array(given_texts, pa.large_string() if large else pa.string())[skip:]
    keys, worded = minhash.keys(utf8(array))
    wanted = [keys_of(text, minhash) for text in given_texts[skip:]]
    assert worded.tolist() == [row is not None for row in wanted]
    assert [row for row, some in zip(keys.tolist(), worded) if some] == [row for row in wanted if row is not None]


@given(texts, st.integers(1, 4), st.booleans(), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_compiled_keys_are_those_of_the_reference(given_texts: list[str], ngram: int, large: bool, skip: int) -> None:
    assert_as_reference(given_texts, MinHash(ngram, 3, 5, seed=7), large, skip)


@given(st.lists(st.binary(max_size=30), max_size=6))
@example([b"5\xc0\xab3", b"5 \xc0\xab 3", b"\xe0\x80\xae"])  # signs in more bytes than they need
@settings(deadline=None)
def test_bytes_that_are_no_utf8_give_the_keys_of_the_definition(rows: list[bytes]) -> None:
    text = utf8(pa.array(rows, pa.binary()))
    minhash = MinHash(2, 4, 2, seed=0)
    keys, worded = minhash.keys(text)
    minima = definition.minima(minhash, text)
    assert (keys == minhash._fold(minima)).all()
    assert worded.tolist() == (minima != 0xFFFFFFFF).any(axis=1).tolist()


def test_a_text_with_more_shingles_than_are_gathered_at_once() -> None:
    rng = np.random.default_rng(1)
    long = " ".join(map(str, rng.integers(0, 1000, 5000)))
    assert_as_reference([long, "short text", long + " end", ""], MinHash(5, 2, 2, seed=3), False, 0)


def same_keys(one: str, two: str) -> bool:
    keys, _ = MinHash(5, 14, 8, seed=0).keys(utf8(pa.array([one, two])))
    return bool((keys[0] == keys[1]).all())


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("The cat's on; the MAT.", "the  cats on\tthe mat"),
        ("don\u2019t", "DON'T"),
        ("call(one,two)[three]", "call ( one, two ) [ three ]"),
        ("<p>one</p><p>two</p>", "<p> one </p>\n<p> two </p>"),
        ("snake_case-name", "snake case name"),
        ("co\u00adoperate", "cooperate"),  # a soft hyphen
        ("good ☀\ufe0f", "good ☀"),
    ],
)
def test_case_punctuation_and_spacing_make_no_difference(one: str, two: str) -> None:
    assert same_keys(one, two)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("callonetwo", "call(one, two)"),
        ("what is 5 + 3?", "what is 5 = 3?"),
        ("what is 5+3?", "what is 5-3?"),
        ("at 3.14", "at 3 14"),
        ("at 12:30", "at 1230"),
        ("good😀", "good😡"),
        ("5 → 6", "5 ≤ 6"),
    ],
)
def test_words_and_numbers_that_differ_are_told_apart(one: str, two: str) -> None:
    assert not same_keys(one, two)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("total=sum(price*count for price,count in items)", 9),
        ('<td class="name">Ada</td><td>36</td>', 8),
        ("今天天气很好。我们去公园", 11),
        ("ภาษาไทย", 7),
        ("1,2,3,4", 4),
        ("།བོད་སྐད་ཡིན།", 3),
    ],
)
def test_words_need_no_spaces_between_them(text: str, words: int) -> None:
    assert definition.shingles(utf8(pa.array([text])), 1).counts.tolist() == [words]


def test_a_changed_argument_leaves_most_shingles_of_a_line_of_code() -> None:
    """A band of two rows agrees as often as the share of common shingles, squared."""
    line = "model.fit(train[features],train[target],epochs=40,batch_size=64,callbacks=[stop,save],verbose=False)"
    keys, _ = MinHash(2, 1000, 2, seed=1).keys(utf8(pa.array([line, line.replace("target", "label")])))
    assert (keys[0] == keys[1]).mean() > 0.5


def test_a_word_of_ten_megabytes_and_nothing_but_punctuation() -> None:
    _, worded = MinHash(5, 14, 8, seed=0).keys(utf8(pa.array(["x" * 10_000_000, "... !!! \0\0", "", "\n\t "])))
    assert worded.tolist() == [True, False, False, False]


def test_bands_agree_as_often_as_theory_says() -> None:
    """Two texts of 100 shingles, 80 in common, one thousand bands of two rows: each agrees with p = (80/120)**2."""
    one, two = " ".join(f"w{i}" for i in range(100)), " ".join(f"w{i}" for i in range(20, 120))
    keys, _ = MinHash(1, 1000, 2, seed=5).keys(utf8(pa.array([one, two])))
    expected = (80 / 120) ** 2
    assert abs((keys[0] == keys[1]).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000)


def test_another_seed_gives_other_keys() -> None:
    text = utf8(pa.array(["some words of a text that is long enough"]))
    assert not (MinHash(5, 14, 8, seed=0).keys(text)[0] == MinHash(5, 14, 8, seed=1).keys(text)[0]).any()


def test_short_texts_that_differ_do_not_fall_together() -> None:
    """All of one shingle: with 32-bit hashes some dozens of 300,000 would collide."""
    count = 300_000
    numbers = np.char.zfill(np.arange(count).astype("S6"), 6)
    text = Utf8(np.frombuffer(numbers.tobytes(), np.uint8), np.arange(0, 6 * count + 1, 6))
    keys, worded = MinHash(5, 2, 2, seed=0).keys(text)
    assert worded.all()
    assert len(np.unique(keys)) == 2 * count


@pytest.mark.parametrize("wrong", [{"ngram": 0}, {"bands": 0}, {"rows": 1}, {"rows": 2.0}, {"seed": -1}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MinHash(**{"ngram": 5, "bands": 14, "rows": 8, "seed": 0} | wrong)
    assert issubclass(ConfigError, ValueError)
