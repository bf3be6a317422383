"""Where a template wrote each part of a conversation, and what is wrong if it did not write each once and in order."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from penstock.chat.marks import PartMark, part_marks
from penstock.chat.messages import Conversation
from penstock.chat.parts import KINDS, TOOLS, Part, Parts, parts_of
from penstock.chat.problems import (
    PartChangedError,
    PartLostError,
    PartMovedError,
    PartRepeatedError,
    RenderError,
    RowProblem,
    ThoughtsLeftOutError,
)

__all__ = ["Loss", "Place", "Placement", "place_parts"]

Place = tuple[int, int]
"""Where a part begins and ends, in characters of the text."""
_LITERALS = {"null": ("null", "None", "none"), "True": ("true", "True"), "False": ("false", "False")}
_LITERAL_REACH = 80
_CONTEXT = 400
Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A part that is not in the text as it should be."""

    part: Part
    problem: RowProblem


@dataclass(frozen=True, slots=True)
class Placement:
    """The parts of a conversation, and for each where it stands in the text: mostly one place."""

    parts: Sequence[Part]
    groups: Sequence[Sequence[Sequence[int]]]
    places: Sequence[Sequence[Place]]
    changed: Collection[int]
    """Parts that are written, but not as they are."""

    def of_message(self, i: int) -> list[Place]:
        """Everywhere that something of message i stands, in order."""
        return sorted(places[0] for part, places in zip(self.parts, self.places) if part.message == i and places)

    def losses(self, whole: str) -> list[Loss]:
        """What is lost, repeated, changed or out of order."""
        found: list[Loss] = []
        for number, (part, places) in enumerate(zip(self.parts, self.places)):
            if not places:
                found.append(Loss(part, _lost(part)))
            elif number in self.changed:
                found.append(Loss(part, PartChangedError(f"{_named(part)} is not written as it is: {_quoted(part)}")))
            elif self.is_repeated(part, places, whole):
                times = f"{_named(part)} is written {len(places)} times: {_quoted(part)}"
                found.append(Loss(part, PartRepeatedError(times)))
        return found + self._moved()

    def is_repeated(self, part: Part, places: Sequence[Place], whole: str) -> bool:
        """Whether it matters that a part is written more than once.

        What a tool is may be said more than once. The name of a called tool may stand again before its result, and a
        name or a key may stand on both sides of what it names; never twice in a row.
        """
        if len(places) < 2 or part.kind == "tools" or part.literal:
            return False
        if not part.names:
            return True
        reach = max(stop for _, stop in self.of_message(part.message))
        inside = [place for place in places if place[0] <= reach]
        apart = all(whole[one[1] : other[0]].strip() for one, other in pairwise(inside))
        return len(inside) > 2 or not apart

    def shown(self, part: Part, whole: str) -> str:
        """The text around the place where a part that is not in it belongs, with its words there."""
        number = self.parts.index(part)
        behind = [places[0][0] for places in self.places[number + 1 :] if places]
        before = [places[0][1] for places in self.places[:number] if places]
        at = behind[0] if behind and part.message != TOOLS else max(before, default=0)
        lead, rest = whole[max(0, at - _CONTEXT) : at], whole[at : at + _CONTEXT]
        return f"{lead}⟪{_quoted(part)[1:-1]}⟫{rest}"

    def _moved(self) -> list[Loss]:
        done = 0
        for group in self.groups:
            reach = done
            for chain in group:
                at = done
                for number in chain:
                    if not self.places[number]:
                        continue
                    start, stop = self.places[number][0]
                    if start < at:
                        part = self.parts[number]
                        moved = f"{_named(part)} is missing where it belongs, and stands earlier: {_quoted(part)}"
                        return [Loss(part, PartMovedError(moved))]
                    at = stop
                reach = max(reach, at)
            done = reach
        return []


def place_parts(conversation: Conversation, whole: str, render: Render) -> Placement:
    """Find every part of a conversation in its text.

    The conversation is rendered once more, with marks around its parts. If that is the same text but for the marks,
    they say where each part is. If a template looks at what it writes, so that marks change the text, each part is
    marked alone; one whose marks still change the text is looked for behind the part before it.
    """
    parts = parts_of(conversation)
    marks = _marks(parts, whole, render)
    if marks is not None:
        pairs = _pairs(marks, len(parts.all))
        uncertain: list[int] = []
    else:
        pairs = [[] for _ in parts.all]
        uncertain = []
        for number, part in enumerate(parts.all):
            alone = None if part.literal or part.searched else _marks(parts_of(conversation, number), whole, render)
            if alone is None:
                uncertain.append(number)
            else:
                pairs[number] = _pairs(alone, len(parts.all))[number]
    changed = _resolve(parts, pairs, uncertain, whole)
    return Placement(parts.all, parts.groups, pairs, changed)


def _marks(parts: Parts, whole: str, render: Render) -> list[PartMark] | None:
    try:
        text, marks = part_marks(render(parts.conversation))
    except RenderError:
        return None
    return marks if text == whole else None


def _pairs(marks: Sequence[PartMark], count: int) -> list[list[Place]]:
    """For each part where it begins and ends; an opening without an end is none."""
    places: list[list[Place]] = [[] for _ in range(count)]
    opened: dict[int, int] = {}
    for mark in marks:
        if mark.opens:
            opened[mark.part] = mark.at
        elif mark.part in opened:
            places[mark.part].append((opened.pop(mark.part), mark.at))
    return places


def _resolve(parts: Parts, pairs: list[list[Place]], uncertain: Collection[int], whole: str) -> set[int]:
    """Fill in what marks could not tell; returns which parts are written otherwise than they are."""
    changed: set[int] = set()
    unknown = set(uncertain)
    done = 0
    for number, part in enumerate(parts.all):
        if part.literal:
            window = whole[done : done + _LITERAL_REACH]
            found = [(window.find(text), text) for text in _LITERALS.get(part.text, (part.text,)) if text in window]
            if found:
                at, text = min(found)
                pairs[number] = [(done + at, done + at + len(text))]
        elif number in unknown or part.searched:
            begin = 0 if part.message == TOOLS else done
            for form in _forms(part):
                at = whole.find(form, begin)
                if at >= 0:
                    pairs[number] = [(at, at + len(form))]
                    break
        elif pairs[number]:
            forms = _forms(part)
            faithful = [place for place in pairs[number] if whole[place[0] : place[1]] in forms]
            if not faithful:
                changed.add(number)
        if pairs[number] and part.message != TOOLS:
            done = pairs[number][0][1]
    return changed


def _forms(part: Part) -> list[str]:
    """How the part may be written."""
    core = part.text.strip()
    if not part.escaped:
        return [core]
    escaped = [json.dumps(core, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    as_python = [repr(text)[1:-1] for text in (core, part.text)]
    return list(dict.fromkeys([core, *escaped, *as_python]))


def _lost(part: Part) -> RowProblem:
    kind = ThoughtsLeftOutError if part.kind in ("thoughts", "earlier_thoughts") else PartLostError
    return kind(
        f"{_named(part)} is not in the text that the template writes: {_quoted(part)}; use a template that writes it, "
        f"take it out of the row, or pass allow_lost={[part.kind]} to train without {KINDS[part.kind]}"
    )


def _named(part: Part) -> str:
    return f"a tool's {part.name}" if part.message == TOOLS else f"message {part.message}: its {part.name}"


def _quoted(part: Part) -> str:
    text = part.text.strip()
    return repr(text if len(text) <= 160 else f"{text[:100]} ... {text[-50:]}")
