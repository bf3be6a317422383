"""Quality filters by name. A filter is one file in this directory (its class and its kernels) and one entry here.

Each leaves rows out and counts them by reason. Thresholds are keyword-only and default to the published ones; None
switches a rule off. The rules of Gopher, C4 and FineWeb run on UTF-8 bytes, compiled by numba, which they need:
`pip install 'penstock[fast]'`.

    quality_filters("gopher,c4")
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from penstock import plugins
from penstock._suggest import did_you_mean
from penstock.corpus.quality.base import TextFilter
from penstock.corpus.quality.c4 import C4Quality
from penstock.corpus.quality.content import LanguageCharacters, LengthFilter, RegexFilter, WordListFilter
from penstock.corpus.quality.fineweb import FineWebQuality
from penstock.corpus.quality.gopher import GopherQuality, GopherRepetition
from penstock.errors import ConfigError
from penstock.pipeline.functions import as_transform
from penstock.pipeline.stages import Transform

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


def quality_filters(names: str | Iterable[Any], *, column: str = "text") -> list[Transform]:
    """Filters by name, with their published thresholds, in the order given: `quality_filters("gopher,c4")`.

    Names: gopher (quality, then repetition), gopher-quality, gopher-repetition, c4, fineweb, length (200 to a million
    characters), latin (half of the letters at least), and those of plugins (`penstock.filters`, or a transform that
    takes the column). A transform among them is taken as it is.
    """
    given = names.split(",") if isinstance(names, str) else list(names)
    filters: list[Transform] = []
    for each in given:
        if not isinstance(each, str):
            filters.append(as_transform(each))
        elif (name := each.strip()) in FILTERS:
            filters += FILTERS[name](column)
        else:
            filters.append(_of_plugin(name, column))
    return filters


def _of_plugin(name: str, column: str) -> Transform:
    found = [each for each in plugins.installed() if each.group in ("filters", "transforms")]
    group = next((each.group for each in found if each.name == name), None)
    if group is None:
        known = [*FILTERS, *(each.name for each in found)]
        raise ConfigError(f"unknown filter {name!r}{did_you_mean(name, known)}; valid filters: {', '.join(known)}")
    try:
        return as_transform(plugins.find(group, name)(column))
    except TypeError as error:
        raise ConfigError(f"plugin {name!r} in penstock.{group} cannot be made with a column alone: {error}") from None
