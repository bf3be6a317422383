"""Words and shingles of a column of text as 64-bit hashes: the definition, in NumPy.

`compiled.py` has the same in one pass over the bytes; the tests hold the two together.

A word is a run of letters, marks and digits, in lower case. What stands between words is no part of them: white space,
punctuation, signs. So code and markup have as many words as they have names and numbers, however they are spaced. But:

- Apostrophes, and characters that cannot be seen, are left out: "don't" is one word.
- A sign between two digits belongs to the number: 3.14, 12:30, 2024-01-31, 5+3. A comma does not: lists have it.
- `+`, `<`, `=` and `>` between white space are words of their own: "5 + 3" is not "5 = 3".
- Symbols outside ASCII, emoji among them, are words of their own.
- Chinese, Japanese, Thai, Lao, Khmer, Burmese and their like put no space between words: every character is a word.

A shingle is `ngram` words in a row; a text of fewer words has one shingle, which is all of it.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.arrays.hashes import Words, mix64
from penstock.arrays.text import Utf8
from penstock.transforms.text import Integers

__all__ = [
    "ALONE",
    "BREAK",
    "CHAR_FACTOR",
    "JOINT",
    "SKIP",
    "SOLO",
    "SPACE",
    "WORD_FACTOR",
    "Shingles",
    "characters",
    "shingles",
]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

SKIP, SPACE, BREAK = 0, 1, 2
"""No character at all; white space; anything else that is no part of a word."""
JOINT = 1 << 29
"""Marks a sign that belongs to a number if digits are on both sides."""
ALONE = 1 << 30
"""Marks a sign that is a word if white space is on both sides."""
SOLO = 1 << 31
"""Marks a character that is a word of its own."""
CHAR_FACTOR = 0x9E3779B97F4A7C15
WORD_FACTOR = 0xD6E8FEB86659FD93

_JOINTS, _ALONE = "._:/+-*^%=<>", "+<=>"
_APOSTROPHES = "'\u2018\u2019"
_SOLO_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x1950, 0x19FF),  # Tai Le, New Tai Lue, Khmer
    (0x1A20, 0x1AAF),  # Tai Tham
    (0x1B00, 0x1B7F),  # Balinese
    (0x3005, 0x312F),  # Japanese kana, bopomofo
    (0x31A0, 0x31FF),
    (0x3400, 0x9FFF),  # Chinese characters
    (0xA000, 0xA4CF),  # Yi
    (0xA980, 0xA9FF),  # Javanese, Burmese
    (0xAA60, 0xAADF),  # Burmese, Tai Viet
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
)


class Shingles(NamedTuple):
    """Hashes of the shingles of all rows, one row after the other, and how many each row has."""

    hashes: Words
    counts: np.ndarray[Any, np.dtype[np.int64]]


@cache
def characters() -> Codes:
    """What becomes of each character up to U+FFFF: SKIP, SPACE, BREAK, or its lower case, perhaps marked."""
    codes = np.array([_character(chr(code)) for code in range(1 << 16)], np.uint32)
    for first, last in _SOLO_RANGES:
        codes[first : last + 1][codes[first : last + 1] > BREAK] |= np.uint32(SOLO)
    codes.flags.writeable = False
    return codes


def _character(char: str) -> int:
    category = unicodedata.category(char)
    if char.isspace():
        return SPACE
    if category in ("Cc", "Cf") or char in _APOSTROPHES or "\ufe00" <= char <= "\ufe0f":  # variation selectors
        return SKIP
    if char in _JOINTS:
        return ord(char) | JOINT | (ALONE if char in _ALONE else 0)
    if category[0] == "S" and not char.isascii():
        return ord(char) | SOLO
    if category[0] in "PS":
        return BREAK
    lower = char.lower()
    return ord(lower if len(lower) == 1 else char)


def shingles(text: Utf8, ngram: int) -> Shingles:
    """The shingles of every row."""
    hashes, rows = _words(text)
    per_row = np.bincount(rows, minlength=len(text.offsets) - 1)
    rank = np.arange(len(hashes)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    sums = np.zeros(len(hashes), np.uint64)
    factor = 1
    for back in range(ngram):
        reached = rank[back:] >= back
        sums[back:][reached] += hashes[: len(hashes) - back][reached] * np.uint64(factor)
        factor = factor * WORD_FACTOR % (1 << 64)
    last = rank == np.repeat(per_row, per_row) - 1
    chosen = (rank >= ngram - 1) | last  # the last word ends a shingle even in a text that is too short
    return Shingles(mix64(sums[chosen]), np.bincount(rows[chosen], minlength=len(per_row)))


def _words(text: Utf8) -> tuple[Words, Integers]:
    """The hash of every word, and the row it is in."""
    codes, rows = _codes(text)
    kept = codes != SKIP
    codes, rows = codes[kept], rows[kept]
    word = codes > BREAK
    solo = codes >= SOLO
    start = word.copy()
    start[1:] &= ~word[:-1] | solo[1:] | solo[:-1] | (rows[1:] != rows[:-1])
    codes, rows, start = codes[word], rows[word], start[word]
    firsts = np.flatnonzero(start)
    if not firsts.size:
        return np.zeros(0, np.uint64), rows
    # Horner's rule over every word at once: divide by rising powers, add up, multiply by the power at the word's end.
    inverse = pow(CHAR_FACTOR, -1, 1 << 64)
    sums = np.cumsum(codes.astype(np.uint64) * _powers(inverse, len(codes)), dtype=np.uint64)
    ends = np.append(firsts[1:], len(codes)) - 1
    parts = sums[ends]
    parts[1:] -= sums[ends[:-1]]
    return mix64(parts * _powers(CHAR_FACTOR, len(codes))[ends]), rows[firsts]


def _codes(text: Utf8) -> tuple[Codes, Integers]:
    """Every character as in `characters`, and its row. Bytes that are no UTF-8 give some character, and no error."""
    data, bounds = text
    at = np.flatnonzero(data & 0xC0 != 0x80)
    rows = np.searchsorted(bounds, at, side="right") - 1
    lead = data[at].astype(np.uint32)
    left = bounds[1:][rows] - at  # bytes of the row from here on
    padded = np.concatenate((data, np.zeros(3, np.uint8)))
    tail = [np.where(left > i, padded[at + i] & 0x3F, 0).astype(np.uint32) for i in (1, 2, 3)]
    two = (lead & 0x1F) << 6 | tail[0]
    three = (lead & 0x0F) << 12 | tail[0] << 6 | tail[1]
    four = (lead & 0x07) << 18 | tail[0] << 12 | tail[1] << 6 | tail[2]
    code = np.where(lead < 0x80, lead, np.where(lead < 0xE0, two, np.where(lead < 0xF0, three, four)))
    wide = code >= 1 << 16
    # Ideographs from U+20000 to U+3FFFF, kana from U+1B000, emoji from U+1F000
    solo = (code >> 17 == 1) | (code >> 12 == 0x1B) | (code >> 12 == 0x1F)
    known = _in_place(characters()[np.where(wide, 0, code)], text, at, rows)
    return np.where(wide, np.where(solo, code | np.uint32(SOLO), code), known), rows


def _in_place(codes: Codes, text: Utf8, at: Integers, rows: Integers) -> Codes:
    """Signs as what they are where they stand: part of a number, a word, or neither. The ends of a row are spaces."""
    signs = np.flatnonzero((codes >= JOINT) & (codes < SOLO))
    data, bounds = text
    here, row, sign = at[signs], rows[signs], codes[signs]
    space = np.uint8(0x20)
    before = np.where(here > bounds[row], data[here - 1], space)
    after = np.where(here + 1 < bounds[row + 1], data[np.minimum(here + 1, len(data) - 1)], space)
    joined = _is_digit(before) & _is_digit(after)
    spaces = characters()[:128] == SPACE
    alone = (sign & ALONE > 0) & (before < 0x80) & (after < 0x80) & spaces[before & 0x7F] & spaces[after & 0x7F]
    char = sign & 0x7F
    plain = data[here] < 0x80  # a sign in more bytes than it needs is no sign
    codes[signs] = np.where(plain & joined, char, np.where(plain & alone, char | np.uint32(SOLO), np.uint32(BREAK)))
    return codes


def _is_digit(data: Bytes) -> Any:
    return (data >= 0x30) & (data <= 0x39)


def _powers(base: int, count: int) -> Words:
    """1, base, base**2, ... modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)
