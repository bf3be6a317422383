"""Symbols stand for contents that are not known while a template runs: see `tracing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from penstock.chat.compile.layouts import QUESTIONS, Hole, stripped

__all__ = ["MAX_PARTS", "LeakError", "Symbol", "SymbolWatch", "reject"]

MAX_PARTS = 4096


class LeakError(Exception):
    """A template wants to know something of a content that cannot be noted."""


class SymbolWatch:
    """The contents of one real conversation, and what a template asked about them."""

    def __init__(self, contents: Sequence[str]) -> None:
        self.contents = contents
        self.conditions: dict[tuple[Hole, str, str], bool] = {}

    def ask(self, hole: Hole, question: str, given: str = "") -> bool:
        answer = QUESTIONS[question](stripped(self.contents[hole.message], hole.strips), given)
        self.conditions[hole, question, given] = answer
        return answer


class Symbol:
    """A text made of fixed pieces and of contents that are not known."""

    __slots__ = ("parts", "watch")

    def __init__(self, watch: SymbolWatch, parts: Sequence[str | Hole]) -> None:
        if len(parts) > MAX_PARTS:
            raise LeakError(f"a text of more than {MAX_PARTS} pieces")
        self.watch, self.parts = watch, tuple(parts)

    def __bool__(self) -> bool:
        if any(part for part in self.parts if isinstance(part, str)):
            return True
        return any(self.watch.ask(part, "filled") for part in self.parts if isinstance(part, Hole))

    def __eq__(self, other: object) -> bool:
        if other is None:
            return False
        return self is other or self.watch.ask(self._only(), "is", _text(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, other: object) -> bool:
        return self.watch.ask(self._only(), "has", _text(other))

    def __hash__(self) -> int:
        reject()

    def __str__(self) -> str:
        reject()

    def __repr__(self) -> str:
        reject()

    def __format__(self, form: str) -> str:
        reject()

    def startswith(self, beginning: object) -> bool:
        return self.watch.ask(self._only(), "starts", _text(beginning))

    def endswith(self, end: object) -> bool:
        return self.watch.ask(self._only(), "ends", _text(end))

    def strip(self, characters: object = None) -> Symbol | str:
        stripped = self.lstrip(characters)
        return stripped.rstrip(characters) if isinstance(stripped, Symbol) else stripped.rstrip(_characters(characters))

    def lstrip(self, characters: object = None) -> Symbol | str:
        return self._stripped("left", _characters(characters))

    def rstrip(self, characters: object = None) -> Symbol | str:
        return self._stripped("right", _characters(characters))

    def _stripped(self, side: str, characters: str | None) -> Symbol | str:
        """The rest, once pieces of which nothing is left are gone from that side."""
        parts = list(self.parts)
        at = 0 if side == "left" else -1
        while parts:
            part = parts[at]
            left: str | Hole
            if isinstance(part, str):
                left = stripped(part, ((side, characters),))
                there = bool(left)
            else:
                left = Hole(part.message, (*part.strips, (side, characters)))
                there = len(parts) == 1 or self.watch.ask(left, "filled")
            if there:
                parts[at] = left
                return Symbol(self.watch, parts)
            parts.pop(at)
        return ""

    def _only(self) -> Hole:
        part = self.parts[0] if len(self.parts) == 1 else None
        if not isinstance(part, Hole):
            raise LeakError("a question about a text of several pieces")
        return part


def _text(value: object) -> str:
    """A text that a content can be compared with: any that could be one, but the empty one, which is in all."""
    if type(value) is not str or not value:
        reject()
    _encoded(value)
    return value


def _characters(value: object) -> str | None:
    return None if value is None else _text(value)


def _encoded(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        reject()


def reject() -> NoReturn:
    raise LeakError("the template looks at a content")
