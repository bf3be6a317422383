"""Words, shingles, MinHash: the compiled loop, the NumPy path and a plain Python reference agree to the bit."""

from __future__ import annotations

import math
import unicodedata

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.transforms._dedup import shingles as definition
from penstock.transforms._dedup import signatures
from penstock.transforms._dedup.signatures import MinHash
from penstock.transforms.text import Utf8, utf8

WORD = (1 << 64) - 1
texts = st.lists(
    st.text(max_size=40)
    | st.text("ab c.,\n'-Ä ß\u3000日本のคน𠀀😀\u200b\0", max_size=40)
    | st.lists(st.sampled_from(["The", "cat", "sat,", "on", "mat.", "日本語", "...", "don't"])).map(" ".join),
    max_size=8,
)
ways = pytest.mark.parametrize("compiled", [True, False], ids=["numba", "numpy"], indirect=True)


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(signatures, "kernels", lambda: None)


def mixed(word: int) -> int:
    word = word + 0x9E3779B97F4A7C15 & WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31


def is_solo(char: str) -> bool:
    return any(first <= ord(char) <= last for first, last in (*definition.SOLO_RANGES, (0x20000, 0x3FFFF)))


def words_of(text: str) -> list[list[int]]:
    """Each word as the numbers that are hashed."""
    words: list[list[int]] = [[]]
    for char in text:
        if char.isspace():
            words.append([])
        elif unicodedata.category(char)[0] == "P" or unicodedata.category(char) in ("Cc", "Cf"):
            if ord(char) > 0xFFFF:
                words[-1].append(ord(char))  # the table ends there
        elif is_solo(char):
            words += [[ord(char) | 1 << 31], []]
        else:
            lower = char.lower()
            words[-1].append(ord(lower) if len(lower) == 1 and ord(char) < 1 << 16 else ord(char))
    return [word for word in words if word]


def keys_of(text: str, minhash: MinHash) -> list[int] | None:
    """The reference: the same definition with Python's integers."""
    hashes = []
    for word in words_of(text):
        total = 0
        for number in word:
            total = total * definition.CHAR_FACTOR + number & WORD
        hashes.append(mixed(total))
    if not hashes:
        return None
    grams = [hashes[i : i + minhash.ngram] for i in range(max(1, len(hashes) - minhash.ngram + 1))]
    sums = []
    for gram in grams:
        total = 0
        for number in gram:
            total = total * definition.WORD_FACTOR + number & WORD
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


@given(texts, st.integers(1, 4), st.booleans(), st.integers(0, 2))
@settings(max_examples=150, deadline=None)
def test_numpy_keys_are_those_of_the_reference(given_texts: list[str], ngram: int, large: bool, skip: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "kernels", lambda: None)
        assert_as_reference(given_texts, MinHash(ngram, 3, 5, seed=7), large, skip)


@given(st.lists(st.binary(max_size=30), max_size=6))
@settings(deadline=None)
def test_bytes_that_are_no_utf8_give_the_same_keys_on_both_paths(rows: list[bytes]) -> None:
    text = utf8(pa.array(rows, pa.binary()))
    minhash = MinHash(2, 4, 2, seed=0)
    keys, worded = minhash.keys(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signatures, "kernels", lambda: None)
        again, worded_again = minhash.keys(text)
    assert (keys == again).all()
    assert (worded == worded_again).all()


@ways
def test_a_text_with_more_shingles_than_are_gathered_at_once(compiled: None) -> None:
    rng = np.random.default_rng(1)
    long = " ".join(map(str, rng.integers(0, 1000, 5000)))
    assert_as_reference([long, "short text", long + " end", ""], MinHash(5, 2, 2, seed=3), False, 0)


@ways
def test_case_punctuation_and_spacing_make_no_difference(compiled: None) -> None:
    keys, _ = MinHash(5, 14, 8, seed=0).keys(utf8(pa.array(["The cat's on; the MAT.", "the  cats on\tthe mat"])))
    assert (keys[0] == keys[1]).all()


def test_a_word_of_ten_megabytes_and_nothing_but_punctuation() -> None:
    _, worded = MinHash(5, 14, 8, seed=0).keys(utf8(pa.array(["x" * 10_000_000, "... !!! \0\0", "", "\n\t "])))
    assert worded.tolist() == [True, False, False, False]


@ways
def test_bands_agree_as_often_as_theory_says(compiled: None) -> None:
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
