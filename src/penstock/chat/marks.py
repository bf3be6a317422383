"""Marks that are put into a text to find places in it again. No data can contain them: lone surrogates are not UTF-8.

Spans are marked by `START` and `END`, by the template's generation blocks. Parts of a conversation are marked by a pair
that has the part's number in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["END", "MAX_PARTS", "ROW", "START", "PartMark", "part_marks", "unmarked", "within_marks"]

START, END, ROW = "\ud800", "\ud801", "\ud802"
"""Where a span begins and ends, and what stands between rows."""
_OPEN, _CLOSE = "\ud840", "\ud841"
_DIGIT, _BASE = 0xDC00, 512
MAX_PARTS = _BASE * _BASE
_ANY_MARK = re.compile(f"[{_OPEN}{_CLOSE}][\udc00-\uddff]{{2}}|[{START}{END}]")


class MarkedText(str):
    """A text with marks, whose `repr` has them too: templates write objects as Python does."""

    __slots__ = ()

    def __repr__(self) -> str:
        plain, marks = part_marks(self)
        quoted = repr(plain)
        first = next(mark for mark in marks if mark.opens)
        opening, closing = _pair(first.part)
        return f"{quoted[0]}{opening}{quoted[1:-1]}{closing}{quoted[-1]}"


@dataclass(frozen=True, slots=True)
class PartMark:
    """A mark found in a text: of which part, whether it opens it, and where it stands in the text without marks."""

    part: int
    opens: bool
    at: int


def within_marks(text: str, number: int) -> str:
    """The text between the marks of part `number`, with its white space outside."""
    core = text.strip()
    if not core:
        return text
    before = text[: len(text) - len(text.lstrip())]
    opening, closing = _pair(number)
    return MarkedText(f"{before}{opening}{core}{closing}{text[len(before) + len(core) :]}")


def part_marks(text: str) -> tuple[str, list[PartMark]]:
    """The text without any marks, and the marks of parts in it."""
    pieces, marks, done, size = [], [], 0, 0
    for found in _ANY_MARK.finditer(text):
        piece = text[done : found.start()]
        pieces.append(piece)
        size += len(piece)
        done = found.end()
        if len(found[0]) == 3:
            number = (ord(found[0][1]) - _DIGIT) * _BASE + ord(found[0][2]) - _DIGIT
            marks.append(PartMark(number, found[0][0] == _OPEN, size))
    pieces.append(text[done:])
    return "".join(pieces), marks


def unmarked(text: str) -> str:
    """The text without the marks of spans."""
    return text.replace(START, "").replace(END, "")


def _pair(number: int) -> tuple[str, str]:
    digits = chr(_DIGIT + number // _BASE) + chr(_DIGIT + number % _BASE)
    return _OPEN + digits, _CLOSE + digits
