"""Gopher's document rules."""

from __future__ import annotations

import numpy as np

from penstock.transforms._quality.characters import LETTER, SYMBOL
from penstock.transforms._quality.compiled.points import (
    Array,
    code_at,
    code_before,
    compiled,
    line_stop,
    same,
    skip_spaces,
    skip_spaces_back,
)

__all__ = ["gopher_quality"]


@compiled
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
) -> Array:
    codes = np.zeros(len(bounds) - 1, np.uint8)
    seen = np.zeros(len(stop_bounds) - 1, np.bool_)
    for row in range(len(codes)):
        begin = bounds[row]
        real, letters, with_letter = 0, 0, 0
        seen[:] = False
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
        codes[row] = quality_code(
            data, begin, bounds[row + 1], kinds, limits, firsts[row + 1] - firsts[row], real, letters, with_letter,
            int(np.sum(seen)),
        )  # fmt: skip
    return codes


@compiled
def mark_stop_word(data: Array, start: int, stop: int, stops: Array, stop_bounds: Array, seen: Array) -> None:
    for number in range(len(seen)):
        first = stop_bounds[number]
        if stop_bounds[number + 1] - first == stop - start and same(data, start, stops, first, stop - start):
            seen[number] = True
            return


@compiled
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


@compiled
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


@compiled
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
