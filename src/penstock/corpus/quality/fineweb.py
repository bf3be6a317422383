"""FineWeb's rules on lines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.corpus.kernels import PLAIN, kernel
from penstock.corpus.quality.base import Codes, TextFilter, as_limits
from penstock.corpus.quality.characters import (
    TERMINAL,
    Array,
    clear,
    code_before,
    count_characters,
    kinds,
    most_lines,
    skip_spaces,
)
from penstock.corpus.quality.gopher import is_new, slots_for, table_size
from penstock.corpus.quality.words import as_bytes, as_words, words_between


class FineWebQuality(TextFilter):
    """FineWeb's rules on lines (Penedo et al. 2024): unfinished, short or repeated ones, and too many of them."""

    name = "fineweb"
    reasons = ("empty", "too few finished lines", "too many short lines", "repeated lines", "too many lines for words")

    def __init__(
        self,
        column: str = "text",
        *,
        min_finished_lines: float | None = 0.12,
        accept_no_finished_line: bool = False,
        max_short_lines: float | None = 0.67,
        short_line_length: int = 30,
        max_repeated_line_characters: float | None = 0.01,
        max_newlines_per_word: float | None = 0.3,
        words: str = "english",
    ) -> None:
        limits = {
            "min_finished_lines": min_finished_lines,
            "max_short_lines": max_short_lines,
            "short_line_length": short_line_length,
            "max_repeated_line_characters": max_repeated_line_characters,
            "max_newlines_per_word": max_newlines_per_word,
        }
        self._limits = as_limits(limits)
        self._accept_none = accept_no_finished_line
        self._words = as_words(words)
        super().__init__(column, limits | {"accept_no_finished_line": accept_no_finished_line, "words": words})

    def codes(self, text: pa.Array) -> Codes:
        data, bounds = as_bytes(text)
        first_words = words_between(data, bounds, self._words == "english")[2]
        lines = most_lines(data, bounds)
        slots, spans = np.empty(table_size(lines), np.int32), np.empty((lines, 2), np.int64)
        codes = np.zeros(len(text), np.uint8)
        fineweb_quality(data, bounds, first_words, kinds(), self._limits, self._accept_none, slots, spans, codes)
        return codes


@kernel(plain=2 * PLAIN)
def fineweb_quality(
    data: Array,
    bounds: Array,
    firsts: Array,
    kinds: Array,
    limits: Array,
    accept_none: bool,
    slots: Array,
    spans: Array,
    codes: Array,
) -> None:
    """Codes of the rows. `slots` and `spans` have room for the lines of any row."""
    for row in range(len(codes)):
        begin, stop = bounds[row], bounds[row + 1]
        lines, newlines, finished, short, again = 0, 0, 0, 0, 0
        unique: Any = np.int64(0)
        for at in range(begin, stop):
            newlines += data[at] == 10
        size = slots_for(newlines + 1)
        clear(slots, size, -1)
        at = begin
        while at <= stop:
            last = at
            while last < stop and data[last] != 10:
                last += 1
            if skip_spaces(data, at, last, kinds) < last:
                lines += 1
                code, _ = code_before(data, at, last)
                finished += (kinds[code] & TERMINAL) != 0
                length = count_characters(data, at, last)
                short += length <= limits[2]
                if is_new(data, at, last, slots, size, spans, unique):
                    unique += 1
                else:
                    again += length
            at = last + 1
        if lines == 0:
            codes[row] = 1
        elif finished / lines < limits[0] and not (finished == 0 and accept_none):
            codes[row] = 2
        elif short / lines > limits[1]:
            codes[row] = 3
        elif again / (count_characters(data, begin, stop) - newlines) > limits[3]:
            codes[row] = 4
        elif newlines / (firsts[row + 1] - firsts[row]) > limits[4]:
            codes[row] = 5
