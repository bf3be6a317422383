"""Texts that show how a tokenizer treats a character: between letters, digits, marks, spaces, alone and in a run.

Every character is put into a few of them; characters of the classes that Unicode still adds to, and some of each block,
into all. Where text is brought to a Unicode form, the texts also show how marks are ordered and what they combine to.
"""

from __future__ import annotations

import functools
import itertools
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

__all__ = ["BYTE_PAIRS", "VERSION", "Contexts", "ascii_pairs"]

VERSION = 1
"""Raised when the texts change: what was proven with others is proven anew."""

FEW = "a{0}A '{0}e {0}!\n一{0}1\n"
ALL = "A{0}a 1{0}1!{0}!\t  {0}a\n{0}{0}{0}{0}\n{0}\r\n/{0}/\u0301{0}\u0301\n一{0}一 {0}"
SYLLABLES = "\u1100{0}\u11a8가{0}\n{0}\u1161\n"
PLAIN = "a{0}b {0} {0}1{0}{0}A{0}"
ONE_IN, TOGETHER = 16, 32
EAST_ASIAN = (range(0x3000, 0x3400), range(0xFE00, 0x10000))
ASCII = "aAbe1!/' \t\r\n"

_ENDS, _BEGINNINGS = range(0x80, 0xC0), range(0xC2, 0xF5)
BYTE_PAIRS = [
    bytes(pair)
    for pair in itertools.chain(
        itertools.product(_ENDS, _BEGINNINGS),
        itertools.product(ASCII.encode(), _BEGINNINGS),
        itertools.product(_ENDS, ASCII.encode()),
    )
]
"""The last byte of one character and the first of the next, as far as they meet in these texts.

In a vocabulary of single bytes and these pairs, two characters share a token exactly if they were not split apart."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """The texts for one kind of tokenizer."""

    normalised: bool = False
    """Whether it brings text to a Unicode form."""
    trapped: bool = False
    """Whether rows with some of the characters go to the reference in any case: then each has a text of its own."""

    @property
    def together(self) -> int:
        """How many characters may share a text."""
        return 1 if self.trapped else TOGETHER

    def text(self, point: int) -> str:
        """A character in its contexts; texts of several characters may be put end to end."""
        character = chr(point)
        if self.trapped:
            return PLAIN.format(character)
        text = FEW.format(character)
        if _is_unsure(point):
            text += ALL.format(character)
        if self.normalised:
            text += "".join(f"a{part}b" for part in _compositions(character))
            if unicodedata.category(character) in ("Mn", "Mc", "Me", "Cn"):
                text += "".join(f"a{other}{character}a{character}{other}" for other in _neighbours(character)) + "\n"
            if 0x1100 <= point < 0x1200:
                text += SYLLABLES.format(character)
        return text

    def bare(self, points: Iterable[int]) -> list[str]:
        """Texts of one character alone, for those that are put into all contexts."""
        return [chr(point) for point in points if self.trapped or _is_unsure(point)]

    def can_show(self, point: int) -> bool:
        """Whether these texts show all there is to a character.

        Of one that Python's tables do not have, nobody here knows what it combines with; between ideographs, Kana and
        forms of other width there is nothing to combine with.
        """
        kind = unicodedata.category(chr(point))
        if self.normalised and kind == "Cn" and not any(point in block for block in EAST_ASIAN):
            return False
        return kind != "Cs" and not _is_unused(point)


def ascii_pairs(length: int = 512) -> list[str]:
    """Every pair of ASCII characters, in texts of about this length."""
    whole = "".join(
        chr(first) + "".join(chr(first) + chr(second) for second in range(first + 1, 128)) for first in range(128)
    )
    return [whole[start : start + length + 1] for start in range(0, len(whole), length)]


def _is_unused(point: int) -> bool:
    """In the planes that have no characters, or only private ones: not worth the time."""
    return point >= 0x40000 and point >> 12 != 0xE0


def _is_unsure(point: int) -> bool:
    return point % ONE_IN == 0 or unicodedata.category(chr(point)) in ("Mn", "Mc", "Me", "Cn", "Cf")


def _compositions(character: str) -> Iterator[str]:
    """What a character decomposes to, and what it and its neighbours compose to."""
    apart = unicodedata.normalize("NFD", character)
    if apart != character:
        yield apart
    yield from _composed_of().get(character, ())


def _neighbours(mark: str) -> list[str]:
    """Marks of the combining classes next to that of a mark, and of the first and the last: with them it changes places
    or not. All are of Unicode 3.2, which every table has."""
    classes = _classes()
    own = unicodedata.combining(mark)
    if not own:
        return [classes[min(classes)], classes[max(classes)]]
    before = max((number for number in classes if number < own), default=min(classes))
    behind = min((number for number in classes if number > own), default=max(classes))
    chosen = {min(classes), before, behind, max(classes), own} & classes.keys()
    return [classes[number] for number in sorted(chosen)]


@functools.cache
def _classes() -> dict[int, str]:
    """The first mark of each combining class."""
    found: dict[int, str] = {}
    for point in itertools.chain(range(0x300, 0x3100), range(0x1D000, 0x1D200)):
        number = unicodedata.ucd_3_2_0.combining(chr(point))
        if number and number == unicodedata.combining(chr(point)):
            found.setdefault(number, chr(point))
    return found


@functools.cache
def _composed_of() -> dict[str, list[str]]:
    """The pairs that combine to one character, by each of the two."""
    found: dict[str, list[str]] = {}
    # Syllables of Hangul combine by rule; ideographs do not combine.
    for point in itertools.chain(range(0xC0, 0x3400), range(0xA000, 0xAC00), range(0xF900, 0x20000)):
        parts = unicodedata.decomposition(chr(point)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            pair = "".join(chr(int(part, 16)) for part in parts)
            for part in pair:
                found.setdefault(part, []).append(pair)
    return found
