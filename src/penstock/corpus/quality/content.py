"""Filters by plain measures of content: length, script, patterns, word lists."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import Utf8, flags, utf8
from penstock.corpus.quality.base import Codes, TextFilter, as_limits
from penstock.corpus.quality.characters import LETTER, kinds
from penstock.corpus.quality.words import as_words, word_spans
from penstock.transforms.columns import brief, column, like, replace
from penstock.transforms.text import as_text, row_sums, word_bytes, word_starts

Integers: TypeAlias = np.ndarray[Any, np.dtype[Any]]

SCRIPTS = {
    "latin": ((0x41, 0x24F), (0x250, 0x2AF), (0x1D00, 0x1DBF), (0x1E00, 0x1EFF), (0x2C60, 0x2C7F), (0xA720, 0xA7FF),
              (0xAB30, 0xAB6F), (0xFB00, 0xFB06), (0xFF21, 0xFF5A)),
    "greek": ((0x370, 0x3FF), (0x1F00, 0x1FFF)),
    "cyrillic": ((0x400, 0x52F), (0x1C80, 0x1C8F), (0x2DE0, 0x2DFF), (0xA640, 0xA69F)),
    "armenian": ((0x530, 0x58F),),
    "hebrew": ((0x590, 0x5FF), (0xFB1D, 0xFB4F)),
    "arabic": ((0x600, 0x6FF), (0x750, 0x77F), (0x870, 0x8FF), (0xFB50, 0xFDFF), (0xFE70, 0xFEFF)),
    "devanagari": ((0x900, 0x97F), (0xA8E0, 0xA8FF)),
    "bengali": ((0x980, 0x9FF),),
    "tamil": ((0xB80, 0xBFF),),
    "telugu": ((0xC00, 0xC7F),),
    "thai": ((0xE00, 0xE7F),),
    "georgian": ((0x10A0, 0x10FF), (0x1C90, 0x1CBF), (0x2D00, 0x2D2F)),
    "hangul": ((0x1100, 0x11FF), (0x3130, 0x318F), (0xA960, 0xA97F), (0xAC00, 0xD7FF)),
    "japanese": ((0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F)),
    "han": ((0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF)),
}  # fmt: skip
"""Blocks of code points; of those only the letters count. Japanese is kana: add han for kanji."""
_SPACE = r"\t\v\f\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
"""Python's whitespace except the newline: RE2's own class holds ASCII whitespace only."""


class LengthFilter(TextFilter):
    """Keep text of a certain length, in characters or in words. Both ends are allowed."""

    name = "length"
    reasons = ("too few characters", "too many characters", "too few words", "too many words")

    def __init__(
        self,
        column: str = "text",
        *,
        min_characters: int | None = None,
        max_characters: int | None = None,
        min_words: int | None = None,
        max_words: int | None = None,
        words: str = "whitespace",
    ) -> None:
        options = {
            "min_characters": min_characters,
            "max_characters": max_characters,
            "min_words": min_words,
            "max_words": max_words,
        }
        if all(limit is None for limit in options.values()):
            raise ValueError("no limit is given; pass min_characters, max_characters, min_words or max_words")
        self._limits = as_limits(options)
        self._words = as_words(words)
        super().__init__(column, options | {"words": words})

    def codes(self, text: pa.Array) -> Codes:
        codes = np.zeros(len(text), np.uint8)
        for first, count in ((0, _count_characters), (2, self._count_words)):
            low, high = self._limits[first : first + 2]
            if np.isnan(low) and np.isnan(high):
                continue
            lengths = count(text)
            codes[(codes == 0) & (lengths < low)] = first + 1
            codes[(codes == 0) & (lengths > high)] = first + 2
        return codes

    def _count_words(self, text: pa.Array) -> Integers:
        if self._words == "whitespace":
            data, bounds = utf8(text)
            return row_sums(word_starts(word_bytes(data), bounds), bounds)
        return np.diff(word_spans(text, "english")[2])


class LanguageCharacters(TextFilter):
    """Keep text whose letters are, to a certain share, of these scripts or in this alphabet.

    LanguageCharacters(scripts=["japanese", "han"], min_share=0.8)
    LanguageCharacters(alphabet="abcdefghijklmnopqrstuvwxyzäöüß")      # upper case is added
    """

    name = "language-characters"
    reasons = ("no letters", "other letters")

    def __init__(
        self,
        column: str = "text",
        *,
        scripts: str | Iterable[str] = (),
        alphabet: str = "",
        min_share: float = 0.5,
    ) -> None:
        names = [scripts] if isinstance(scripts, str) else list(scripts)
        for name in names:
            if name not in SCRIPTS:
                raise ValueError(f"unknown script {name!r}; valid scripts: {', '.join(SCRIPTS)}")
        if not names and not alphabet:
            raise ValueError("nothing to look for; pass scripts=[...] or alphabet='...'")
        if not 0 <= min_share <= 1:
            raise ValueError(f"min_share must be from 0 to 1, got {min_share!r}")
        self._chosen = np.zeros(0x110000, np.bool_)
        for first, last in (block for name in names for block in SCRIPTS[name]):
            self._chosen[first : last + 1] = True
        for letter in alphabet + alphabet.upper() + alphabet.lower():
            self._chosen[ord(letter)] = True
        self._min_share = min_share
        super().__init__(column, {"scripts": tuple(names), "alphabet": alphabet, "min_share": min_share})

    def codes(self, text: pa.Array) -> Codes:
        points, bounds = code_points(utf8(text))
        letters = (kinds()[points] & LETTER) != 0
        every = row_sums(letters, bounds)
        chosen = row_sums(letters & self._chosen[points], bounds)
        codes = (chosen < self._min_share * every).astype(np.uint8) * np.uint8(2)
        codes[every == 0] = 1
        return codes


class RegexFilter(TextFilter):
    """Leave out text that matches a pattern (RE2, anywhere in the text), or, with `keep=True`, text that does not."""

    name = "regex"

    def __init__(self, pattern: str, column: str = "text", *, keep: bool = False) -> None:
        try:
            pc.match_substring_regex(pa.array([""]), pattern=pattern)
        except pa.ArrowInvalid as error:
            raise ValueError(f"the pattern {pattern!r} cannot be used: {error}") from None
        self._pattern, self._keep = pattern, keep
        self.reasons = (f"{'does not match' if keep else 'matches'} {brief(pattern)}",)
        super().__init__(column, {"pattern": pattern, "keep": keep})

    def codes(self, text: pa.Array) -> Codes:
        matches = flags(pc.match_substring_regex(text, pattern=self._pattern))
        codes: Codes = (matches != self._keep).astype(np.uint8)
        return codes


class WordListFilter(TextFilter):
    """Leave out text with a word or phrase of a list; with `lines=True`, leave the lines that have one out of the text.

    Words are whole words: no letter, digit or underscore before or after, in any script. Any whitespace in a
    phrase matches any whitespace of a line or text. Case does not matter unless `case_sensitive`. Rows that lost lines
    are counted as `"word-list: lines left out"`, rows that lost all as `"no line left"`.
    """

    name = "word-list"
    version = 2
    reasons = ("a word of the list", "no line left")

    def __init__(
        self, words: Iterable[str], column: str = "text", *, lines: bool = False, case_sensitive: bool = False
    ) -> None:
        listed = [words] if isinstance(words, str) else list(words)
        phrases = sorted({" ".join(word.split()) for word in listed} - {""})
        if not phrases:
            raise ValueError("words must hold at least one word or phrase, got none")
        self._lines, self._case_sensitive = lines, case_sensitive
        self._patterns = self._compiled(phrases)
        super().__init__(column, {"words": tuple(phrases), "lines": lines, "case_sensitive": case_sensitive})

    def codes(self, text: pa.Array) -> Codes:
        hit = np.zeros(len(text), np.bool_)
        for pattern in self._patterns:
            hit |= flags(pc.match_substring_regex(text, pattern=pattern))
        return hit.astype(np.uint8)

    def _compiled(self, phrases: list[str]) -> list[str]:
        """Patterns that together find the phrases: a long list is more than RE2 takes at once, and is halved."""
        pattern = self._pattern(phrases)
        try:
            pc.match_substring_regex(pa.array([""]), pattern=pattern)
        except pa.ArrowInvalid as error:
            if len(phrases) == 1:
                raise ValueError(
                    f"the phrase {brief(phrases[0])} is too long to be looked for: {brief(error)}"
                ) from None
            middle = len(phrases) // 2
            return self._compiled(phrases[:middle]) + self._compiled(phrases[middle:])
        return [pattern]

    def _pattern(self, phrases: list[str]) -> str:
        space = f"[{_SPACE}]+" if self._lines else rf"[{_SPACE}\n]+"
        any_of = "|".join(space.join(map(_escaped, phrase.split())) for phrase in phrases)
        case = "" if self._case_sensitive else "i"
        if self._lines:
            apart = r"[^\pL\pM\pN_\n]"
            return rf"(?m{case})^(?:.*{apart})?(?:{any_of})(?:{apart}.*)?(?:\n|\z)"
        apart = r"[^\pL\pM\pN_]"
        return rf"(?s{case})(?:\A|{apart})(?:{any_of})(?:{apart}|\z)"

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self._lines or not batch.num_rows:
            return super().transform(batch)
        given = column(batch, self.column)
        text = as_text(given, self.column)
        hit = self.codes(text) > 0
        if not hit.any():
            return self.leave_out(batch, text, np.zeros(len(text), np.uint8))
        left = text
        for pattern in self._patterns:
            left = pc.replace_substring_regex(left, pattern=pattern, replacement="")
        empty = hit & ~flags(pc.match_substring_regex(left, pattern=r"\S"))
        self.count_kept({f"{self.name}: lines left out": int(np.count_nonzero(hit & ~empty))})
        batch = replace(batch, self.column, like(left, given.type))
        return self.leave_out(batch, text, empty.astype(np.uint8) * np.uint8(2))


def _escaped(word: str) -> str:
    """The word as a pattern that matches only itself."""
    return re.sub(r"([^\w])", lambda found: rf"\x{{{ord(found[1]):x}}}", word)


def _count_characters(text: pa.Array) -> Integers:
    return pc.utf8_length(text).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)  # type: ignore[no-any-return]


def code_points(text: Utf8) -> tuple[Integers, Integers]:
    """All code points of a column, and the bounds of its rows among them."""
    data, bounds = text
    first = (data & 0xC0) != 0x80
    at = np.flatnonzero(first)
    lead = data[at]
    points = lead.astype(np.int32)
    for low, width, mask in ((0xC0, 2, 0x1F), (0xE0, 3, 0x0F), (0xF0, 4, 0x07)):
        wide = np.flatnonzero(lead >= low)
        code = (lead[wide] & mask).astype(np.int32)
        for i in range(1, width):
            code = code << 6 | data[np.minimum(at[wide] + i, data.size - 1)] & 0x3F
        points[wide] = code
    before = np.concatenate(([0], np.cumsum(first, dtype=np.int64)))
    return np.minimum(points, 0x10FFFF), before[bounds]
