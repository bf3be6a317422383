"""Filters of text by quality: the published rules of Gopher, C4 and FineWeb, and plain ones of length and content.

Each leaves rows out and counts them by reason. Thresholds are keyword-only and default to the published ones; None
switches a rule off. The rules run on UTF-8 bytes, compiled by numba where it is installed, else in plain Python with
the same result.

    quality_filters("gopher,c4")     # the same by name, in the order given
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.arrays.text import flags
from penstock.corpus.quality import measures
from penstock.corpus.quality.base import TextFilter, as_limits, as_words, grams
from penstock.corpus.quality.content import LanguageCharacters, LengthFilter, RegexFilter, WordListFilter
from penstock.errors import ConfigError
from penstock.transforms.columns import column, like, replace
from penstock.transforms.text import as_text

__all__ = [
    "C4Quality",
    "FineWebQuality",
    "GopherQuality",
    "GopherRepetition",
    "LanguageCharacters",
    "LengthFilter",
    "RegexFilter",
    "WordListFilter",
    "quality_filters",
]

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
        self._limits = as_limits(options, options)
        self._words = as_words(words)
        self._stop_words = tuple(dict.fromkeys(stop_words))
        super().__init__(column, options | {"stop_words": self._stop_words, "words": words})

    def codes(self, text: pa.Array) -> measures.Codes:
        return measures.gopher_quality(text, self._words, self._stop_words, self._limits, fast=measures.can_compile())


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
        self._limits = as_limits(limits, limits)
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

    def codes(self, text: pa.Array) -> measures.Codes:
        return measures.gopher_repetition(
            text, self._words, self._limits, self._top, self._repeated, fast=measures.can_compile()
        )


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
        self._limits = as_limits(limits, limits)
        self._accept_none = accept_no_finished_line
        self._words = as_words(words)
        super().__init__(column, limits | {"accept_no_finished_line": accept_no_finished_line, "words": words})

    def codes(self, text: pa.Array) -> measures.Codes:
        return measures.fineweb_quality(text, self._words, self._limits, self._accept_none, fast=measures.can_compile())


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
        self._limits = as_limits(limits, limits)
        self._rules = tuple(rules.values())
        self._lines = measures.LineCounts(len(self.line_reasons))
        super().__init__(column, limits | rules)

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        given = column(batch, self.column)
        text = as_text(given, self.column)
        if not len(text):
            return batch
        left, codes, lines = measures.c4_lines(text, self._limits, self._rules, fast=measures.can_compile())
        self._lines.add(lines)
        codes[(codes == 0) & flags(pc.equal(left, ""))] = len(self.reasons)
        changed = flags(pc.not_equal(text, left)) & (codes == 0)
        self.count_kept({f"{self.name}: text changed": int(np.count_nonzero(changed))})
        if changed.any():
            batch = replace(batch, self.column, like(left, given.type))
        return self.leave_out(batch, text, codes)

    @property
    def lines_left_out(self) -> dict[str, int]:
        """Lines left out by reason, of all rows seen in this process since the start or the last `reset`."""
        return {reason: n for reason, n in zip(self.line_reasons, self._lines.totals()) if n}

    def reset(self) -> None:
        super().reset()
        self._lines.clear()


Filters = dict[str, Callable[[str], list[TextFilter]]]

NAMED: Filters = {
    "gopher": lambda column: [GopherQuality(column), GopherRepetition(column)],
    "gopher-quality": lambda column: [GopherQuality(column)],
    "gopher-repetition": lambda column: [GopherRepetition(column)],
    "c4": lambda column: [C4Quality(column)],
    "fineweb": lambda column: [FineWebQuality(column)],
    "length": lambda column: [LengthFilter(column, min_characters=200, max_characters=1_000_000)],
    "latin": lambda column: [LanguageCharacters(column, scripts=["latin"])],
}


def quality_filters(names: str | Iterable[str], *, column: str = "text") -> list[TextFilter]:
    """Filters by name, with their published thresholds, in the order given: `quality_filters("gopher,c4")`.

    Names: gopher (quality, then repetition), gopher-quality, gopher-repetition, c4, fineweb, length (200 to a million
    characters), latin (half of the letters at least).
    """
    given = names.split(",") if isinstance(names, str) else list(names)
    filters: list[TextFilter] = []
    for name in (name.strip() for name in given):
        if name not in NAMED:
            hint = did_you_mean(name, NAMED)
            raise ConfigError(f"no filter is called {name!r}{hint}; there are {', '.join(NAMED)}")
        filters += NAMED[name](column)
    return filters
