"""C4's rules: lines left out of the text, pages left out."""

# ruff: noqa: SIM110, SIM300
from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import Utf8, flags, from_utf8
from penstock.corpus.kernels import PLAIN, kernel
from penstock.corpus.quality.base import Codes, TextFilter, as_limits
from penstock.corpus.quality.characters import (
    NUMERAL,
    SPACE,
    Array,
    code_at,
    kinds,
    line_stop,
    same,
    skip_spaces,
    skip_spaces_back,
)
from penstock.corpus.quality.words import as_bytes, count_sentences, packed, words_between
from penstock.transforms.columns import column, like, replace
from penstock.transforms.counts import Counts
from penstock.transforms.text import as_text

PHRASES = (
    "lorem ipsum",
    "javascript",
    "terms of use",
    "privacy policy",
    "cookie policy",
    "uses cookies",
    "use of cookies",
    "use cookies",
)
"""Phrases C4 looks for: the first drops the page, the others drop the line."""
EDIT, NEEDED = np.frombuffer(b"edit]", np.uint8), np.frombuffer(b"citation needed]", np.uint8)
LAST_OF_BREAKS = (0x85, 0xA8, 0xA9)
"""Last bytes of the line breaks that are not ASCII: no row has more lines than these and control characters."""


class C4Quality(TextFilter):
    """C4's rules (Raffel et al. 2020): lines that are no prose are left out of the text, pages with too little go.

    A line stays if it ends in `. ? ! " '` (no ellipsis), has enough words, none of them too long, and mentions neither
    javascript nor a cookie or privacy policy. A page goes if a line that would stay holds lorem ipsum or a curly
    bracket, if what is left has fewer than `min_sentences`, or if nothing is left at all. Citations such as `[12]` or
    `[edit]` are removed.
    Rows whose text changed are counted as `"c4: text changed"`; `lines_left_out` has the lines by reason.
    """

    name = "c4"
    version = 2
    reasons = ("lorem ipsum", "curly bracket", "too few sentences", "no line left")
    line_reasons = ("word too long", "no terminal mark", "too few words", "javascript", "policy")

    def __init__(
        self,
        column: str = "text",
        *,
        min_sentences: int | None = 5,
        min_words_per_line: int | None = 3,
        max_word_length: int | None = 1000,
        drop_citations: bool = True,
        terminal_mark: bool = True,
        lorem_ipsum: bool = True,
        javascript: bool = True,
        curly_bracket: bool = True,
        policies: bool = True,
    ) -> None:
        limits = {
            "min_sentences": min_sentences,
            "min_words_per_line": min_words_per_line,
            "max_word_length": max_word_length,
        }
        rules = {
            "drop_citations": drop_citations,
            "terminal_mark": terminal_mark,
            "lorem_ipsum": lorem_ipsum,
            "javascript": javascript,
            "curly_bracket": curly_bracket,
            "policies": policies,
        }
        self._limits = as_limits(limits)
        self._rules = np.array([*rules.values()], np.bool_)
        self._lines = Counts()
        super().__init__(column, limits | rules)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        given = column(batch, self.column)
        text = as_text(given, self.column)
        if not len(text):
            return batch
        left, codes, lines = self.clean(text)
        self._lines.add(dict(zip(self.line_reasons, lines)))
        codes[(codes == 0) & flags(pc.equal(left, ""))] = len(self.reasons)
        changed = flags(pc.not_equal(text, left)) & (codes == 0)
        self.count_kept({f"{self.name}: text changed": int(np.count_nonzero(changed))})
        if changed.any():
            batch = replace(batch, self.column, like(left, given.type))
        return self.leave_out(batch, text, codes)

    def clean(self, text: pa.Array) -> tuple[pa.Array, Codes, list[int]]:
        """The lines left of every row, reason codes, and the number of lines left out by `line_reasons`."""
        given = as_bytes(text)
        breaks = np.count_nonzero(given[0] < 32) + sum(np.count_nonzero(given[0] == byte) for byte in LAST_OF_BREAKS)
        data, lines = np.empty(len(given[0]), np.uint8), np.empty(breaks + len(text) + 1, np.int64)
        bounds, row_lines = left = np.zeros((2, len(text) + 1), np.int64)
        codes, left_out = np.zeros(len(text), np.uint8), np.zeros(5, np.int64)
        c4_lines(*given, kinds(), packed(PHRASES), self._limits, self._rules, data, lines, left, codes, left_out)
        data, lines = data[: bounds[-1]], lines[: row_lines[-1] + 1]
        data.flags.writeable = False
        words = words_between(data, lines, True)
        sentences = np.zeros(len(text), np.int64)
        row_sentences(data, lines, row_lines, *words, kinds(), sentences)
        codes[(codes == 0) & (sentences < self._limits[0])] = 3
        return pc.utf8_trim_whitespace(from_utf8(Utf8(data, bounds), text)), codes, left_out.tolist()

    @property
    def lines_left_out(self) -> dict[str, int]:
        """Lines left out by reason, of all rows seen in this process since the start or the last `reset`."""
        totals = self._lines.totals()
        return {reason: totals[reason] for reason in self.line_reasons if reason in totals}

    def reset(self) -> None:
        super().reset()
        self._lines.clear()


@kernel(plain=4 * PLAIN)
def c4_lines(
    data: Array,
    bounds: Array,
    kinds: Array,
    phrases: tuple[Array, Array],
    limits: Array,
    options: Array,
    out: Array,
    lines: Array,
    left: Array,
    codes: Array,
    left_out: Array,
) -> None:
    """Bytes and lines left, and the bounds of every row in both; reason codes; lines left out.

    `options`: drop citations, ask for terminal marks, lorem ipsum, javascript, brackets, policy phrases.
    Phrase 0 is lorem ipsum, phrase 1 javascript, the others are of policies. A newline belongs to the line after it.
    """
    n, k = 0, 0
    for row in range(len(codes)):
        at, stop = bounds[row], bounds[row + 1]
        begin, first_line = n, k
        while at < stop and codes[row] == 0:
            end, following = line_stop(data, at, stop, kinds)
            first = skip_spaces(data, at, end, kinds)
            last = skip_spaces_back(data, first, end, kinds)
            at = following
            words, longest = count_words(data, first, last, kinds)
            if longest > limits[2]:
                left_out[0] += 1
                continue
            line = n + (k > first_line)
            m = copy_line(data, first, last, out, line, options[0], kinds)
            if options[1] and not is_finished(out, line, m):
                left_out[1] += 1
                continue
            if words < limits[1]:
                left_out[2] += 1
                continue
            found = find_phrases(out, line, m, phrases[0], phrases[1])
            if options[2] and found & 1:
                codes[row] = 1
            elif options[3] and found & 2:
                left_out[3] += 1
            elif options[4] and has_bracket(out, line, m):
                codes[row] = 2
            elif options[5] and found > 3:
                left_out[4] += 1
            else:
                if line > n:
                    out[n] = 10
                lines[k] = n
                k += 1
                n = m
        if codes[row]:
            n, k = begin, first_line
        left[0, row + 1] = n
        left[1, row + 1] = k
    lines[k] = n


@kernel(plain=4 * PLAIN)
def row_sentences(
    data: Array,
    lines: Array,
    row_lines: Array,
    starts: Array,
    ends: Array,
    firsts: Array,
    kinds: Array,
    sentences: Array,
) -> None:
    """Sentences of every row; no sentence goes over the end of its line."""
    for row in range(len(sentences)):
        for line in range(row_lines[row], row_lines[row + 1]):
            sentences[row] += count_sentences(data, lines[line], starts, ends, firsts[line], firsts[line + 1], kinds)


@kernel()
def count_words(data: Array, at: int, stop: int, kinds: Array) -> tuple[int, int]:
    """Words between whitespace, and the characters of the longest."""
    words, longest, length = 0, 0, 0
    while at < stop:
        code, width = code_at(data, at, stop)
        if kinds[code] & SPACE:
            length = 0
        else:
            words += length == 0
            length += 1
            longest = max(longest, length)
        at += width
    return words, longest


@kernel()
def copy_line(data: Array, at: int, stop: int, out: Array, n: int, without_citations: bool, kinds: Array) -> int:
    while at < stop:
        if without_citations and data[at] == 91:
            length = citation_length(data, at, stop, kinds)
            if length:
                at += length
                continue
        out[n] = data[at]
        n += 1
        at += 1
    return n


@kernel()
def citation_length(data: Array, at: int, stop: int, kinds: Array) -> int:
    """[], [12], [edit], [citation needed]: how many bytes, 0 if it is none. Digits of any script."""
    i = at + 1
    while i < stop:
        code, width = code_at(data, i, stop)
        if not kinds[code] & NUMERAL:
            break
        i += width
    if i < stop and data[i] == 93:
        return i + 1 - at
    if stop - at > len(EDIT) and same(data, at + 1, EDIT, 0, len(EDIT)):
        return 1 + len(EDIT)
    if stop - at > len(NEEDED) and same(data, at + 1, NEEDED, 0, len(NEEDED)):
        return 1 + len(NEEDED)
    return 0


@kernel()
def is_finished(data: Array, start: int, stop: int) -> Any:
    """True if the line ends in . ? ! " or ', and not in an ellipsis."""
    if start == stop:
        return False
    last = data[stop - 1]
    if last == 46:
        return not (stop - start >= 3 and data[stop - 2] == 46 and data[stop - 3] == 46)
    return last == 63 or last == 33 or last == 34 or last == 39


@kernel()
def has_bracket(data: Array, start: int, stop: int) -> bool:
    for at in range(start, stop):
        if data[at] == 123:
            return True
    return False


@kernel()
def find_phrases(data: Array, start: int, stop: int, phrases: Array, bounds: Array) -> int:
    """A bit for every phrase that occurs, in any case."""
    found = 0
    for at in range(start, stop):
        byte = data[at] | 32
        if not (byte == 108 or byte == 106 or byte == 116 or byte == 112 or byte == 99 or byte == 117):
            continue
        for phrase in range(len(bounds) - 1):
            if phrases[bounds[phrase]] == byte and begins_with(data, at, stop, phrases, bounds, phrase):
                found |= 1 << phrase
    return found


@kernel()
def begins_with(data: Array, at: int, stop: int, phrases: Array, bounds: Array, phrase: int) -> bool:
    for i in range(bounds[phrase], bounds[phrase + 1]):
        if at >= stop:
            return False
        byte = data[at]
        width = 1
        if 65 <= byte and byte <= 90:
            byte |= 32
        elif byte == 0xE2 and at + 2 < stop and data[at + 1] == 0x84 and data[at + 2] == 0xAA:
            byte, width = np.uint8(107), 3  # the Kelvin sign, whose lower case is k
        if byte != phrases[i]:
            return False
        at += width
    return True
