"""Gopher's rules on documents and on repetition."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.corpus.kernels import PLAIN, kernel
from penstock.corpus.quality.base import Codes, TextFilter, as_limits, grams
from penstock.corpus.quality.characters import (
    LETTER,
    SYMBOL,
    Array,
    clear,
    code_at,
    code_before,
    count_characters,
    kinds,
    line_stop,
    most_lines,
    same,
    skip_spaces,
    skip_spaces_back,
)
from penstock.corpus.quality.words import as_bytes, as_words, packed, words_between

STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")


class GopherQuality(TextFilter):
    """Gopher's document rules (Rae et al. 2021, A1.1), in this order; a row is counted under the first it breaks.

    Words of nothing but symbols do not count for number and mean length. `words="english"` splits punctuation and
    contractions off, as the tokenizers of published pipelines do; `"whitespace"` is `str.split`, twice as fast.
    """

    name = "gopher-quality"
    reasons = (
        "too few words",
        "too many words",
        "words too short",
        "words too long",
        "too many hashes",
        "too many ellipses",
        "too many bullet lines",
        "too many lines end in an ellipsis",
        "too few words with letters",
        "too few stop words",
    )

    def __init__(
        self,
        column: str = "text",
        *,
        min_words: int | None = 50,
        max_words: int | None = 100_000,
        min_mean_word_length: float | None = 3,
        max_mean_word_length: float | None = 10,
        max_symbol_ratio: float | None = 0.1,
        max_bullet_lines: float | None = 0.9,
        max_ellipsis_lines: float | None = 0.3,
        min_words_with_letters: float | None = 0.8,
        min_stop_words: int | None = 2,
        stop_words: Sequence[str] = STOP_WORDS,
        words: str = "english",
    ) -> None:
        options = {
            "min_words": min_words,
            "max_words": max_words,
            "min_mean_word_length": min_mean_word_length,
            "max_mean_word_length": max_mean_word_length,
            "max_symbol_ratio": max_symbol_ratio,
            "max_bullet_lines": max_bullet_lines,
            "max_ellipsis_lines": max_ellipsis_lines,
            "min_words_with_letters": min_words_with_letters,
            "min_stop_words": min_stop_words,
        }
        self._limits = as_limits(options)
        self._words = as_words(words)
        self._stop_words = tuple(dict.fromkeys(stop_words))
        super().__init__(column, options | {"stop_words": self._stop_words, "words": words})

    def codes(self, text: pa.Array) -> Codes:
        stops = packed(self._stop_words)
        codes, seen = np.zeros(len(text), np.uint8), np.zeros(len(self._stop_words), np.bool_)
        given = as_bytes(text)
        words = words_between(*given, self._words == "english")
        gopher_quality(*given, *words, kinds(), *stops, self._limits, seen, codes)
        return codes


class GopherRepetition(TextFilter):
    """Gopher's repetition rules (Rae et al. 2021, table A1): repeated paragraphs, lines and n-grams of words.

    Shares are of paragraphs, lines or characters. `top_grams` limits the characters of the most frequent n-gram,
    `repeated_grams` those of all n-grams that came before in the text, each word counted once.
    """

    name = "gopher-repetition"

    def __init__(
        self,
        column: str = "text",
        *,
        max_repeated_paragraphs: float | None = 0.3,
        max_repeated_paragraph_characters: float | None = 0.2,
        max_repeated_lines: float | None = 0.3,
        max_repeated_line_characters: float | None = 0.2,
        top_grams: Iterable[tuple[int, float]] = ((2, 0.2), (3, 0.18), (4, 0.16)),
        repeated_grams: Iterable[tuple[int, float]] = (
            (5, 0.15), (6, 0.14), (7, 0.13), (8, 0.12), (9, 0.11), (10, 0.1),
        ),
        words: str = "english",
    ) -> None:  # fmt: skip
        limits = {
            "max_repeated_paragraphs": max_repeated_paragraphs,
            "max_repeated_paragraph_characters": max_repeated_paragraph_characters,
            "max_repeated_lines": max_repeated_lines,
            "max_repeated_line_characters": max_repeated_line_characters,
        }
        self._limits = as_limits(limits)
        self._top, self._repeated = grams(top_grams, "top_grams"), grams(repeated_grams, "repeated_grams")
        self._words = as_words(words)
        self.reasons = (
            "empty",
            "repeated paragraphs",
            "characters in repeated paragraphs",
            "repeated lines",
            "characters in repeated lines",
            *(f"most frequent {n}-gram" for n, _ in self._top),
            *(f"repeated {n}-grams" for n, _ in self._repeated),
        )
        super().__init__(column, limits | {"top_grams": self._top, "repeated_grams": self._repeated, "words": words})

    def codes(self, text: pa.Array) -> Codes:
        pairs = [*self._top, *self._repeated]
        grams = np.array([n for n, _ in pairs], np.int64)
        limits = np.concatenate([self._limits, np.array([most for _, most in pairs], np.float64)])
        data, bounds = as_bytes(text)
        words = words_between(data, bounds, self._words == "english")
        codes = np.zeros(len(text), np.uint8)
        room = (most_lines(data, bounds), int(np.diff(words[2]).max(initial=0)), int(np.diff(bounds).max(initial=0)))
        gopher_repetition(data, bounds, *words, kinds(), limits, grams, len(self._top), _workspace(*room), codes)
        return codes


def _workspace(lines: int, words: int, size: int) -> tuple[Array, ...]:
    """Arrays that the kernel of repetition writes on: room for the row with most lines, most words and most bytes."""
    slots, spans = np.empty(table_size(max(lines, words)), np.int32), np.empty((lines + 1, 2), np.int64)
    hashes, sums, scales = (np.empty(words + 1, np.uint64) for _ in range(3))
    tally, places, lengths = (np.empty(words + 1, np.int32) for _ in range(3))
    return slots, spans, hashes, sums, scales, tally, places, lengths, np.empty(size, np.uint8)


@kernel(plain=4 * PLAIN)
def gopher_quality(
    data: Array,
    bounds: Array,
    starts: Array,
    ends: Array,
    firsts: Array,
    kinds: Array,
    stops: Array,
    stop_bounds: Array,
    limits: Array,
    seen: Array,
    codes: Array,
) -> None:
    """Codes of the rows. `seen` has room for a flag of each stop word."""
    for row in range(len(codes)):
        begin = bounds[row]
        real: Any = np.int64(0)  # not a literal, for whose type numba would compile `quality_code` once more
        letters = with_letter = real
        clear(seen, len(seen), 0)
        for word in range(firsts[row], firsts[row + 1]):
            start, stop = begin + starts[word], begin + ends[word]
            length, symbols, alphabetic = 0, 0, False
            at = start
            while at < stop:
                code, width = code_at(data, at, stop)
                kind = kinds[code]
                length += 1
                symbols += (kind & SYMBOL) != 0
                alphabetic |= (kind & LETTER) != 0
                at += width
            with_letter += alphabetic
            if symbols < length:
                real += 1
                letters += length
            mark_stop_word(data, start, stop, stops, stop_bounds, seen)
        stop_words: Any = np.int64(0)
        for number in range(len(seen)):
            stop_words += seen[number]
        codes[row] = quality_code(
            data, begin, bounds[row + 1], kinds, limits, firsts[row + 1] - firsts[row], real, letters, with_letter,
            stop_words,
        )  # fmt: skip


@kernel()
def mark_stop_word(data: Array, start: int, stop: int, stops: Array, stop_bounds: Array, seen: Array) -> None:
    for number in range(len(seen)):
        first = stop_bounds[number]
        if stop_bounds[number + 1] - first == stop - start and same(data, start, stops, first, stop - start):
            seen[number] = True
            return


@kernel()
def quality_code(
    data: Array,
    begin: int,
    stop: int,
    kinds: Array,
    limits: Array,
    words: int,
    real: int,
    letters: int,
    with_letter: int,
    stop_words: int,
) -> int:
    if real < limits[0]:
        return 1
    if real > limits[1]:
        return 2
    mean = letters / real if real else 0.0
    if mean < limits[2]:
        return 3
    if mean > limits[3]:
        return 4
    hashes, ellipses = count_symbols(data, begin, stop)
    if hashes > 0 and hashes / max(words, 1) > limits[4]:
        return 5
    if ellipses > 0 and ellipses / max(words, 1) > limits[4]:
        return 6
    lines, bullets, trailing = count_lines(data, begin, stop, kinds)
    if bullets > 0 and bullets / lines > limits[5]:
        return 7
    if trailing > 0 and trailing / lines > limits[6]:
        return 8
    if with_letter / max(words, 1) < limits[7]:
        return 9
    if stop_words < limits[8]:
        return 10
    return 0


@kernel()
def count_symbols(data: Array, begin: int, stop: int) -> tuple[int, int]:
    hashes, ellipses, dots = 0, 0, 0
    for at in range(begin, stop):
        byte = data[at]
        if byte == 46:
            dots += 1
            if dots == 3:
                ellipses += 1
                dots = 0
            continue
        dots = 0
        if byte == 35:
            hashes += 1
        elif byte == 0xE2 and at + 2 < stop and data[at + 1] == 0x80 and data[at + 2] == 0xA6:
            ellipses += 1
    return hashes, ellipses


@kernel()
def count_lines(data: Array, begin: int, stop: int, kinds: Array) -> tuple[int, int, int]:
    """Lines, those that begin with a bullet, and those that end in an ellipsis."""
    lines, bullets, trailing = 0, 0, 0
    at = begin
    while at < stop:
        end, following = line_stop(data, at, stop, kinds)
        first = skip_spaces(data, at, end, kinds)
        lines += 1
        if first < end:
            code, _ = code_at(data, first, end)
            bullets += code == 45 or code == 0x2022
            last = skip_spaces_back(data, first, end, kinds)
            if data[last - 1] == 46:
                trailing += last - first > 2 and data[last - 2] == 46 and data[last - 3] == 46
            else:
                code, _ = code_before(data, first, last)
                trailing += code == 0x2026
        at = following
    return lines, bullets, trailing


@kernel()
def hash_bytes(data: Array, start: int, stop: int) -> Any:
    """Eight bytes at a time; the length is part of it."""
    h = np.uint64(stop - start) * np.uint64(0x9E3779B97F4A7C15)
    at = start
    while at < stop:
        word = np.uint64(0)
        for i in range(min(8, stop - at)):
            word |= np.uint64(data[at + i]) << np.uint64(8 * i)
        h = (h ^ word) * np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(32)
        at += 8
    return h


@kernel()
def is_new(data: Array, start: int, stop: int, slots: Array, size: int, spans: Array, n: int) -> bool:
    """True if these bytes are not among the first `n` spans; they become span `n` then."""
    slot = np.int64(hash_bytes(data, start, stop) & np.uint64(size - 1))
    while slots[slot] >= 0:
        first, last = spans[slots[slot], 0], spans[slots[slot], 1]
        if last - first == stop - start and same(data, start, data, first, stop - start):
            return False
        slot = (slot + 1) & (size - 1)
    slots[slot] = n
    spans[n, 0], spans[n, 1] = start, stop
    return True


@kernel()
def slots_for(n: int) -> int:
    size = 16
    while size < 2 * n + 2:
        size *= 2
    return size


def table_size(n: int) -> int:
    """Slots of a table for `n` pieces; kernels ask `slots_for`."""
    return max(16, 1 << (2 * n + 1).bit_length())


@kernel()
def repeated_pieces(
    data: Array, begin: int, stop: int, breaks: int, slots: Array, spans: Array
) -> tuple[int, int, int]:
    """Pieces between runs of at least `breaks` newlines; how many of them came before, and their characters."""
    unique: Any = np.int64(0)
    pieces, repeated, characters, newlines = 0, 0, 0, 0
    for at in range(begin, stop):
        newlines += data[at] == 10
    size = slots_for(newlines + 1)
    clear(slots, size, -1)
    at = first = begin
    while True:
        last = at
        while at < stop and data[at] == 10:
            at += 1
        if at < stop and at - last < breaks:
            at += 1
            continue
        if at == stop and at - last < breaks:
            last = stop
        pieces += 1
        if is_new(data, first, last, slots, size, spans, unique):
            unique += 1
        else:
            repeated += 1
            characters += count_characters(data, first, last)
        if last == stop:
            return pieces, repeated, characters
        first = at


BASE = np.uint64(0x9E3779B97F4A7C15)
INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))


@kernel(plain=PLAIN)
def gopher_repetition(
    data: Array,
    bounds: Array,
    starts: Array,
    ends: Array,
    firsts: Array,
    kinds: Array,
    limits: Array,
    grams: Array,
    top: int,
    workspace: tuple[Array, ...],
    codes: Array,
) -> None:
    """Codes of the rows. The first `top` n-grams are counted, the others looked for; four limits are not of n-grams."""
    slots, spans, hashes, sums, scales, tally, places, lengths, joined = workspace
    one: Any = np.int64(1)  # not literals, for each of which numba would compile `repeated_pieces`
    two: Any = np.int64(2)
    for row in range(len(codes)):
        begin, stop = bounds[row], bounds[row + 1]
        if begin == stop:
            codes[row] = 1
            continue
        characters = count_characters(data, begin, stop)
        first = skip_spaces(data, begin, stop, kinds)
        last = skip_spaces_back(data, first, stop, kinds)
        pieces, again, again_characters = repeated_pieces(data, first, last, two, slots, spans)
        if again / pieces > limits[0]:
            codes[row] = 2
            continue
        if again_characters / characters > limits[1]:
            codes[row] = 3
            continue
        pieces, again, again_characters = repeated_pieces(data, begin, stop, one, slots, spans)
        if again / pieces > limits[2]:
            codes[row] = 4
            continue
        if again_characters / characters > limits[3]:
            codes[row] = 5
            continue
        words = firsts[row + 1] - firsts[row]
        join_words(data, begin, starts, ends, firsts[row], words, places, lengths, sums, scales, joined)
        for i in range(len(grams)):
            n, count = grams[i], words - grams[i] + 1
            if count > 0:
                hash_grams(n, count, places, sums, scales, hashes)
                if i < top:
                    found = top_gram(joined, n, count, hashes, places, lengths, slots, tally)
                else:
                    found = repeated_grams(joined, n, count, hashes, places, lengths, slots)
                if found / characters > limits[4 + i]:
                    codes[row] = 6 + i
                    break


@kernel()
def join_words(
    data: Array, begin: int, starts: Array, ends: Array, first: int, words: int, places: Array, lengths: Array,
    sums: Array, scales: Array, joined: Array,
) -> None:  # fmt: skip
    """The words of a row without what is between them, and where each begins, in bytes and in characters.

    `sums` are of byte times BASE ** place, `scales` are BASE ** -place, so that a difference of sums, scaled, hashes
    any stretch of words in one step.
    """
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


@kernel()
def hash_grams(n: int, grams: int, places: Array, sums: Array, scales: Array, hashes: Array) -> None:
    """The hash of every n-gram, as a stretch of bytes; the low bits are as good as the high ones."""
    for i in range(grams):
        h = (sums[i + n] - sums[i]) * scales[i] + np.uint64(places[i + n] - places[i])
        h = (h ^ (h >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes[i] = h ^ (h >> np.uint64(31))


@kernel()
def top_gram(
    joined: Array, n: int, grams: int, hashes: Array, places: Array, lengths: Array, slots: Array, tally: Array
) -> int:
    """Characters in all occurrences of the most frequent n-gram (the first of them), spaces between words included."""
    size = slots_for(grams)
    clear(slots, size, -1)
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


@kernel()
def same_words(joined: Array, places: Array, left: int, right: int, n: int) -> bool:
    for i in range(1, n + 1):
        if places[left + i] - places[left] != places[right + i] - places[right]:
            return False
    return same(joined, places[left], joined, places[right], places[left + n] - places[left])


@kernel()
def repeated_grams(
    joined: Array, n: int, grams: int, hashes: Array, places: Array, lengths: Array, slots: Array
) -> int:
    """Characters in n-grams that came before, not counting any word twice. Grams are compared without their gaps."""
    size = slots_for(grams)
    clear(slots, size, -1)
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
