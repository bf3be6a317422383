"""Characters of texts that may not be in the Unicode form NFC.

A text without them is in NFC by the tables of every Unicode version, as the standard never changes the normalisation of
characters that exist: each stands for itself, combines with none before it, and has no place in an order of marks.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterator

ASSIGNED = 0x40000
"""Code points from here on are taken for unassigned, tags and variation selectors too."""
SURROGATES = range(0xD800, 0xE000)
SYLLABLES = range(0xAC00, 0xD7A4)
MADE_ASCII = frozenset("K;`")
"""Of the Kelvin sign, the Greek question mark and a Greek accent."""
VOWELS, FINALS = range(0x1161, 0x1176), range(0x11A8, 0x11C3)
"""Parts of Hangul syllables, which combine by rule."""


@functools.cache
def changed_by_nfc() -> str:
    """Pattern (RE2) of texts that NFC may change: marks, characters with another form, and unassigned ones."""
    unsure = [point for point in range(ASSIGNED) if point not in SURROGATES and _is_unsure(chr(point))]
    # Neighbours have the same distance to their place in the list.
    runs = ([point for _, point in run] for _, run in itertools.groupby(enumerate(unsure), lambda at: at[1] - at[0]))
    ranges = "".join(f"\\x{{{run[0]:x}}}-\\x{{{run[-1]:x}}}" for run in runs)
    return f"[{ranges}\\x{{{ASSIGNED:x}}}-\\x{{10ffff}}]"


def made_by_nfc(text: str) -> bool:
    """True if NFC may make this text of another one: of ASCII characters, it makes three of others."""
    return unicodedata.is_normalized("NFC", text) and not (text.isascii() and MADE_ASCII.isdisjoint(text))


def _is_unsure(character: str) -> bool:
    return (
        unicodedata.combining(character) != 0
        or unicodedata.category(character) == "Cn"
        or not unicodedata.is_normalized("NFC", character)
        or character in _seconds()
    )


@functools.cache
def _seconds() -> frozenset[str]:
    """Characters that combine with one before them."""
    return frozenset(itertools.chain(_seconds_of_pairs(), map(chr, VOWELS), map(chr, FINALS)))


def _seconds_of_pairs() -> Iterator[str]:
    for point in range(ASSIGNED):
        parts = () if point in SYLLABLES else unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            yield chr(int(parts[1], 16))
