"""Oracle of MinHash: shingles and minima in NumPy, as the definition of `penstock.corpus.dedup.minhash`."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from penstock.arrays.hashes import Words, mix64
from penstock.arrays.text import Utf8
from penstock.corpus.dedup.minhash import (
    ALONE,
    BREAK,
    CHAR_FACTOR,
    JOINT,
    SKIP,
    SOLO,
    SPACE,
    WORD_FACTOR,
    MinHash,
    characters,
)
from penstock.transforms.text import Integers

__all__ = ["Shingles", "minima", "shingles"]

Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Codes: TypeAlias = np.ndarray[Any, np.dtype[np.uint32]]


class Shingles(NamedTuple):
    """Hashes of the shingles of all rows, one row after the other, and how many each row has."""

    hashes: Words
    counts: np.ndarray[Any, np.dtype[np.int64]]


def minima(minhash: MinHash, text: Utf8) -> Codes:
    """The MinHash signature of every row."""
    first = text.offsets[0]
    found = shingles(Utf8(text.data[first : text.offsets[-1]], text.offsets - first), minhash.ngram)
    low, high = found.hashes.astype(np.uint32), (found.hashes >> np.uint64(32)).astype(np.uint32)
    signatures = np.full((len(found.counts), minhash.bands * minhash.rows), 0xFFFFFFFF, np.uint32)
    filled = np.flatnonzero(found.counts)
    starts = np.cumsum(found.counts[filled]) - found.counts[filled]
    if len(filled):
        for j, (factor, term) in enumerate(zip(*minhash._permutations)):
            words = low if j < minhash._half else high
            signatures[filled, j] = np.minimum.reduceat(words * factor + term, starts)
    return signatures


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
