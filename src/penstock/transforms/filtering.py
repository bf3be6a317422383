"""Quality filters and deduplication, under the name design document 000 gives them: see `penstock.corpus`."""

from penstock.corpus.decontamination import Decontaminate
from penstock.corpus.dedup.stages import ExactDedup, MinHashDedup, dedup_stages
from penstock.corpus.pii import ScrubPII
from penstock.corpus.quality.filters import (
    C4Quality,
    FineWebQuality,
    GopherQuality,
    GopherRepetition,
    LanguageCharacters,
    LengthFilter,
    RegexFilter,
    WordListFilter,
    quality_filters,
)

__all__ = [
    "C4Quality",
    "Decontaminate",
    "ExactDedup",
    "FineWebQuality",
    "GopherQuality",
    "GopherRepetition",
    "LanguageCharacters",
    "LengthFilter",
    "MinHashDedup",
    "RegexFilter",
    "ScrubPII",
    "WordListFilter",
    "dedup_stages",
    "quality_filters",
]
