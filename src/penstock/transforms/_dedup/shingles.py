"""Words and shingles of a column of text as 64-bit hashes: the definition, in NumPy.

`compiled.py` has the same in one pass over the bytes; the tests hold the two together.

A word is a run of characters between white space, in lower case and without punctuation. Chinese, Japanese, Thai, Lao,
Khmer and Burmese put no space between words: there every character is a word of its own. A shingle is `ngram` words in
a row; a text of fewer words has one shingle, which is all of it.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.transforms._hashing import Words, mix64
from penstock.transforms.text import Integers, Utf8

__all__ = ["CHAR_FACTOR", "SKIP", "SOLO", "SOLO_RANGES", "SPACE", "WORD_FACTOR", "Shingles", "characters", "shingles"]

Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]

SKIP, SPACE = 0, 1
SOLO = 1 << 31
"""Marks a character that is a word of its own."""
CHAR_FACTOR = 0x9E3779B97F4A7C15
WORD_FACTOR = 0xD6E8FEB86659FD93

SOLO_RANGES = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x30FF),  # Japanese kana
    (0x31F0, 0x31FF),
    (0x3400, 0x9FFF),  # Chinese characters
    (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F),
)


class Shingles(NamedTuple):
    """Hashes of the shingles of all rows, one row after the other, and how many each row has."""

    hashes: Words
    counts: np.ndarray[Any, np.dtype[np.int64]]


@cache
def characters() -> Codes:
    """What becomes of each character up to U+FFFF: SKIP, SPACE, or its lower case, perhaps marked SOLO."""
    codes = np.arange(1 << 16, dtype=np.uint32)
    for code in range(1 << 16):
        char = chr(code)
        if char.isspace():
            codes[code] = SPACE
        elif unicodedata.category(char) in ("Cc", "Cf", "Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"):
            codes[code] = SKIP
        elif len(lower := char.lower()) == 1:
            codes[code] = ord(lower)
    for first, last in SOLO_RANGES:
        codes[first : last + 1][codes[first : last + 1] > SPACE] |= np.uint32(SOLO)
    codes.flags.writeable = False
    return codes


def shingles(text: Utf8, ngram: int) -> Shingles:
    """The shingles of every row."""
    hashes, rows = _words(text)
    per_row = np.bincount(rows, minlength=len(text.bounds) - 1)
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
    word = codes != SPACE
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
    ideograph = code >> 17 == 1  # U+20000 to U+3FFFF
    known = characters()[np.where(wide, 0, code)]
    return np.where(wide, np.where(ideograph, code | np.uint32(SOLO), code), known), rows


def _powers(base: int, count: int) -> Words:
    """1, base, base**2, ... modulo 2**64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.multiply.accumulate(powers)
