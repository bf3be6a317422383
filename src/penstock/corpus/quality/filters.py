"""Quality filters by name. A filter is one file in this directory (its class and its kernels) and one entry here.

Each leaves rows out and counts them by reason. Thresholds are keyword-only and default to the published ones; None
switches a rule off. The rules of Gopher, C4 and FineWeb run on UTF-8 bytes, compiled by numba, which they need:
`pip install 'penstock[fast]'`.

    quality_filters("gopher,c4")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from penstock._suggest import did_you_mean
from penstock.corpus.quality.base import TextFilter
from penstock.corpus.quality.c4 import C4Quality
from penstock.corpus.quality.content import LanguageCharacters, LengthFilter, RegexFilter, WordListFilter
from penstock.corpus.quality.fineweb import FineWebQuality
from penstock.corpus.quality.gopher import GopherQuality, GopherRepetition
from penstock.errors import ConfigError

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

FILTERS: dict[str, Callable[[str], list[TextFilter]]] = {
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
        if name not in FILTERS:
            raise ConfigError(
                f"unknown filter {name!r}{did_you_mean(name, FILTERS)}; valid filters: {', '.join(FILTERS)}"
            )
        filters += FILTERS[name](column)
    return filters
