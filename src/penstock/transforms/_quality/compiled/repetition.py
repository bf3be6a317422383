"""Gopher's repetition rules."""

from __future__ import annotations

import numpy as np

from penstock.transforms._quality.compiled.pieces import repeated_pieces, table_size
from penstock.transforms._quality.compiled.points import (
    Array,
    compiled,
    count_characters,
    same,
    skip_spaces,
    skip_spaces_back,
)

__all__ = ["gopher_repetition"]

BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))


@compiled
def gopher_repetition(
    data: Array,
    bounds: Array,
    starts: Array,
    ends: Array,
    firsts: Array,
    kinds: Array,
    limits: Array,
    top: Array,
    top_limits: Array,
    repeated: Array,
    repeated_limits: Array,
) -> Array:
    rows = len(bounds) - 1
    codes = np.zeros(rows, np.uint8)
    longest, most = 0, 0
    for row in range(rows):
        begin, stop = bounds[row], bounds[row + 1]
        newlines = 0
        for at in range(begin, stop):
            newlines += data[at] == 10
        longest = max(longest, newlines + 1)
        most = max(most, firsts[row + 1] - firsts[row])
    slots = np.empty(table_size(max(longest, most)), np.int32)
    spans = np.empty((longest + 1, 2), np.int64)
    tally = np.empty(most + 1, np.int32)
    hashes = np.empty(most, np.uint64)
    sums, scales = np.empty(most + 1, np.uint64), np.empty(most + 1, np.uint64)
    places = np.empty(most + 1, np.int32)
    lengths = np.empty(most + 1, np.int32)
    for row in range(rows):
        begin, stop = bounds[row], bounds[row + 1]
        if begin == stop:
            codes[row] = 1
            continue
        characters = count_characters(data, begin, stop)
        first = skip_spaces(data, begin, stop, kinds)
        last = skip_spaces_back(data, first, stop, kinds)
        pieces, again, again_characters = repeated_pieces(data, first, last, 2, slots, spans)
        if again / pieces > limits[0]:
            codes[row] = 2
            continue
        if again_characters / characters > limits[1]:
            codes[row] = 3
            continue
        pieces, again, again_characters = repeated_pieces(data, begin, stop, 1, slots, spans)
        if again / pieces > limits[2]:
            codes[row] = 4
            continue
        if again_characters / characters > limits[3]:
            codes[row] = 5
            continue
        words = firsts[row + 1] - firsts[row]
        joined = join_words(data, begin, starts, ends, firsts[row], words, places, lengths, sums, scales)
        for i in range(len(top)):
            n, grams = top[i], words - top[i] + 1
            if grams > 0:
                hash_grams(n, grams, places, sums, scales, hashes)
                found = top_gram(joined, n, grams, hashes, places, lengths, slots, tally)
                if found / characters > top_limits[i]:
                    codes[row] = 6 + i
                    break
        if codes[row]:
            continue
        for i in range(len(repeated)):
            n, grams = repeated[i], words - repeated[i] + 1
            if grams > 0:
                hash_grams(n, grams, places, sums, scales, hashes)
                found = repeated_grams(joined, n, grams, hashes, places, lengths, slots)
                if found / characters > repeated_limits[i]:
                    codes[row] = 6 + len(top) + i
                    break
    return codes


@compiled
def join_words(
    data: Array, begin: int, starts: Array, ends: Array, first: int, words: int, places: Array, lengths: Array,
    sums: Array, scales: Array,
) -> Array:  # fmt: skip
    """The words of a row without what is between them, and where each begins, in bytes and in characters.

    `sums` are of byte times BASE ** place, `scales` are BASE ** -place, so that a difference of sums, scaled, hashes
    any stretch of words in one step.
    """
    total = 0
    for i in range(words):
        total += ends[first + i] - starts[first + i]
    joined = np.empty(total, np.uint8)
    at, characters = 0, 0
    power, scale, hashed = np.uint64(1), np.uint64(1), np.uint64(0)
    for i in range(words):
        places[i], lengths[i], sums[i], scales[i] = at, characters, hashed, scale
        for j in range(begin + starts[first + i], begin + ends[first + i]):
            byte = data[j]
            joined[at] = byte
            characters += (byte & 0xC0) != 0x80
            hashed += np.uint64(byte) * power
            power *= BASE
            scale *= INVERSE
            at += 1
    places[words], lengths[words], sums[words], scales[words] = at, characters, hashed, scale
    return joined


@compiled
def hash_grams(n: int, grams: int, places: Array, sums: Array, scales: Array, hashes: Array) -> None:
    """The hash of every n-gram, as a stretch of bytes; the low bits are as good as the high ones."""
    for i in range(grams):
        h = (sums[i + n] - sums[i]) * scales[i] + np.uint64(places[i + n] - places[i])
        h = (h ^ (h >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes[i] = h ^ (h >> np.uint64(31))


@compiled
def top_gram(
    joined: Array, n: int, grams: int, hashes: Array, places: Array, lengths: Array, slots: Array, tally: Array
) -> int:
    """Characters in all occurrences of the most frequent n-gram (the first of them), spaces between words included."""
    size = table_size(grams)
    slots[:size] = -1
    for i in range(grams):
        slot = np.int64(hashes[i] & np.uint64(size - 1))
        while slots[slot] >= 0:
            there = slots[slot]
            if hashes[there] == hashes[i] and same_words(joined, places, there, i, n):
                break
            slot = (slot + 1) & (size - 1)
        if slots[slot] < 0:
            slots[slot] = i
            tally[i] = 1
        else:
            tally[slots[slot]] += 1
            tally[i] = 0
    best = 0
    for i in range(1, grams):
        if tally[i] > tally[best]:
            best = i
    return int(tally[best]) * (int(lengths[best + n]) - int(lengths[best]) + n - 1)


@compiled
def same_words(joined: Array, places: Array, left: int, right: int, n: int) -> bool:
    for i in range(1, n + 1):
        if places[left + i] - places[left] != places[right + i] - places[right]:
            return False
    return same(joined, places[left], joined, places[right], places[left + n] - places[left])


@compiled
def repeated_grams(
    joined: Array, n: int, grams: int, hashes: Array, places: Array, lengths: Array, slots: Array
) -> int:
    """Characters in n-grams that came before, not counting any word twice. Grams are compared without their gaps."""
    size = table_size(grams)
    slots[:size] = -1
    characters = 0
    i = 0
    while i < grams:
        slot = np.int64(hashes[i] & np.uint64(size - 1))
        found = False
        while slots[slot] >= 0 and not found:
            there = slots[slot]
            length = places[there + n] - places[there]
            found = (
                hashes[there] == hashes[i]
                and length == places[i + n] - places[i]
                and same(joined, places[there], joined, places[i], length)
            )
            if not found:
                slot = (slot + 1) & (size - 1)
        if found:
            characters += lengths[i + n] - lengths[i]
            i += n
        else:
            slots[slot] = i
            i += 1
    return characters
