"""Texts that SentencePiece and gigatoken treat differently, as a pattern: such rows go to the reference."""

from __future__ import annotations

import itertools
import unicodedata
from collections.abc import Iterable, Sequence

from penstock.transforms._tokenizers.reference import literal

__all__ = ["trap_pattern"]

# Whitespace that is no space to SentencePiece.
SPACES = r"\t\n\v\f\r\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
# What may stand in one user-perceived character with what is before or behind it: marks, formatting characters and what
# is not assigned yet; Thai and Lao AM, the sound marks of narrow Kana, parts of Hangul syllables, flags, skin tones,
# and letters of Brahmic scripts that are written before the next.
CLUSTERS = (
    r"[^\p{L}\p{N}\p{P}\p{S}\p{Z}\p{Cc}\p{Co}]|[\x{e33}\x{eb3}\x{ff9e}\x{ff9f}"
    r"\x{1100}-\x{11ff}\x{a960}-\x{a97f}\x{d7b0}-\x{d7ff}\x{1f1e6}-\x{1f1ff}\x{1f3fb}-\x{1f3ff}"
    r"\x{d4e}\x{111c2}\x{111c3}\x{113d1}\x{1193f}\x{11941}\x{11a3a}\x{11a84}-\x{11a89}\x{11d46}\x{11f02}"
    r"\x{16d63}-\x{16d6a}\x{3131}-\x{318e}\x{ffa0}-\x{ffdc}]"
)
CONTROLS = r"\x{1}-\x{8}\x{b}\x{c}\x{e}-\x{1f}\x{7f}-\x{9f}"
CODE_POINTS = 0x32000
"""Behind them are no characters that normalise to others, except ideographs."""


def trap_pattern(symbols: Sequence[str], *, normalised: bool, folded: bool, squeezed: bool) -> str:
    """The pattern (RE2) for a model with these control tokens and user-defined symbols.

    gigatoken reads all of them from text as it is given, SentencePiece only the user-defined ones, and these from text
    as it is normalised too, with the space that it puts in front. Where a model normalises, SentencePiece applies the
    longest rule, and gigatoken goes by clusters. And it strips whitespace that SentencePiece does not.
    """
    patterns = [literal("\u0085"), literal("▁")]
    for symbol in symbols:
        spaced = literal(symbol).replace(literal("▁"), rf"[ \x{{2581}}{SPACES}]")
        patterns.append(f"(?i:{spaced})" if folded else spaced)
        if symbol.startswith("▁"):
            patterns.append(rf"\A(?:{patterns[-1].replace(spaced, spaced.partition(']')[2])})")
    if normalised:
        patterns.append(CLUSTERS)
        whole = "".join(symbols).replace("▁", " ")
        characters = set(whole.casefold() if folded else whole)
        patterns += _class(point for point in range(0x80, CODE_POINTS) if characters & _normal(chr(point), folded))
        if not squeezed:
            patterns.append(r"\r\n")
        if not squeezed or any("▁" in symbol for symbol in symbols):
            patterns.append(f"[{CONTROLS}]")
    if squeezed:
        patterns += [rf"\A *[{SPACES}]", rf"[{SPACES}] *\z"]
    return "|".join(patterns)


def _normal(character: str, folded: bool) -> set[str]:
    """The characters that one is changed to; none if it stays."""
    normal = unicodedata.normalize("NFKC", character)
    normal = normal.casefold() if folded else normal
    return set(normal) if normal != character else set()


def _class(points: Iterable[int]) -> list[str]:
    """A class of these characters; nothing if there are none."""
    runs = itertools.groupby(enumerate(points), key=lambda pair: pair[1] - pair[0])
    ranges = [[point for _, point in run] for _, run in runs]
    return ["[" + "".join(rf"\x{{{run[0]:x}}}-\x{{{run[-1]:x}}}" for run in ranges) + "]"] if ranges else []
