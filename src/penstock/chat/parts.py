"""Parts of a conversation, and their places in the rendered text.

A part is a text that the row says: content, thought, name or argument of a tool call, result, description of a tool.
`place_parts` finds each part in the text: the conversation is rendered once more with marks around its parts.
`Placement.losses` are the parts that are lost, repeated, changed or out of order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from penstock.chat.messages import THOUGHTS, Conversation, Message
from penstock.chat.problems import (
    PartChangedError,
    PartLostError,
    PartMovedError,
    PartRepeatedError,
    RenderError,
    RowProblem,
    ThoughtsLeftOutError,
)
from penstock.chat.templates import END, START
from penstock.files.json_values import FloatText, IntText

KINDS = {
    # Kinds of parts, as `allow_lost` names them.
    "system": "system messages",
    "requests": "user messages",
    "answers": "assistant messages",
    "text_beside_calls": "assistant text in a turn with tool calls",
    "thoughts": "thoughts of the assistant",
    "earlier_thoughts": "thoughts of the assistant before the last request",
    "calls": "names of called tools",
    "arguments": "arguments of tool calls",
    "tool_results": "results of tools",
    "tools": "names and descriptions of tools",
}
OF_TOOLS = -1
"""Message number of parts of the tools."""


@dataclass(frozen=True, slots=True)
class Part:
    """Text of a row: its message, its kind, and its name in the message."""

    message: int
    kind: str
    name: str
    text: str
    escaped: bool = True
    """It may be written with the escapes of a JSON string."""
    names: bool = False
    """A name or a key, which may be written before and after its value."""
    searched: bool = False
    """A name that the template may look up, so it is not marked but searched in the whole text."""
    literal: bool = False
    """A value that cannot be marked (true, false, null): it is searched after the previous part."""


Chain = list[int]
"""Numbers of parts that follow each other."""


@dataclass(slots=True)
class ConversationParts:
    """Parts of a conversation, and the conversation with marks around each."""

    all: list[Part]
    groups: list[list[Chain]]
    """Order of parts: groups follow each other; within a group, each chain has its own order."""
    conversation: Conversation
    """The conversation with marks around its parts."""


def parts_of(conversation: Conversation, only: int | None = None) -> ConversationParts:
    """All parts of a conversation; all are marked, or `only` one."""
    return _Collector(only).collect(conversation)


class _Collector:
    def __init__(self, only: int | None) -> None:
        self.only = only
        self.parts: list[Part] = []
        self.groups: list[list[Chain]] = []

    def collect(self, conversation: Conversation) -> ConversationParts:
        last_request = max((i for i, m in enumerate(conversation.messages) if m["role"] == "user"), default=-1)
        messages = [self._message(message, i, last_request) for i, message in enumerate(conversation.messages)]
        tools = None if conversation.tools is None else [self._tool(tool) for tool in conversation.tools]
        return ConversationParts(self.parts, self.groups, Conversation(messages, tools, conversation.flags))

    def _message(self, message: Message, i: int, last_request: int) -> Message:
        role = message["role"]
        calls = message.get("tool_calls")
        thoughts = "earlier_thoughts" if i < last_request else "thoughts"
        if role == "assistant":
            kind = "text_beside_calls" if calls else "answers"
        else:
            kind = {"user": "requests", "tool": "tool_results"}.get(role, "system")
        made = dict(message)
        said = [key for key in THOUGHTS if made.get(key)]
        if said:
            number = len(self.parts)
            marked = self._text(made[said[0]], Part(i, thoughts, said[0], made[said[0]]))
            for key in said:  # the same thought under several keys is one part
                made[key] = marked if made[key] == message[said[0]] else made[key]
            if isinstance(made["content"], list):
                made["content"] = [
                    {**part, "thinking": marked} if part.get("thinking") == message[said[0]] else part
                    for part in made["content"]
                ]
            self._group(number)
        content = made["content"]
        if isinstance(content, str):
            made["content"] = self._content(content, i, kind, thoughts if role == "assistant" else None)
        elif isinstance(content, list):
            made["content"] = [
                {**part, "text": self._content(part["text"], i, kind, None)} if part.get("text") else part
                for part in content
            ]
        if calls:
            made["tool_calls"] = [self._call(call, i, n) for n, call in enumerate(calls)]
        return made

    def _content(self, content: str, i: int, kind: str, thoughts: str | None) -> str:
        if thoughts is not None and "</think>" in content:
            before, tag, after = content.rpartition("</think>")
            lead, open_tag, thought = before.partition("<think>")
            if not open_tag:
                lead, thought = "", before
            pieces = [
                self._grouped(lead, Part(i, kind, "content", lead)),
                open_tag,
                self._grouped(thought, Part(i, thoughts, "content in <think>", thought)),
                tag,
                self._grouped(after, Part(i, kind, "content", after)),
            ]
            return "".join(pieces)
        return self._grouped(content, Part(i, kind, "content", content))

    def _grouped(self, text: str, part: Part) -> str:
        number = len(self.parts)
        marked = self._text(text, part)
        self._group(number)
        return marked

    def _group(self, first: int) -> None:
        if len(self.parts) > first:
            self.groups.append([list(range(first, len(self.parts)))])

    def _call(self, call: Any, i: int, n: int) -> Any:
        function = call["function"]
        chains: list[Chain] = []
        at = len(self.parts)
        name = self._text(
            function["name"], Part(i, "calls", f"tool_calls[{n}].name", function["name"], escaped=False, names=True)
        )
        chains.append(list(range(at, len(self.parts))))
        at = len(self.parts)
        arguments = function.get("arguments")
        label = f"tool_calls[{n}].arguments"
        if isinstance(arguments, str):
            arguments = self._text(arguments, Part(i, "arguments", label, arguments, escaped=False))
        else:
            arguments = self._value(arguments, i, label)
        chains.append(list(range(at, len(self.parts))))
        self.groups.append([chain for chain in chains if chain])
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _value(self, value: Any, i: int, label: str) -> Any:
        """A value of arguments: keys and values are parts."""
        if isinstance(value, dict):
            made = {}
            for key, item in value.items():
                marked = self._text(key, Part(i, "arguments", f"{label} key", key, names=True))
                made[marked] = self._value(item, i, f"{label}.{key}")
            return made
        if isinstance(value, list):
            return [self._value(item, i, f"{label}[]") for item in value]
        if isinstance(value, str):
            return self._text(value, Part(i, "arguments", label, value))
        if value is None or isinstance(value, bool):
            self.parts.append(Part(i, "arguments", label, "null" if value is None else str(value), literal=True))
            return value
        text = str(value)
        marked = self._text(text, Part(i, "arguments", label, text))
        if marked == text:
            return value
        return FloatText(value, marked) if isinstance(value, float) else IntText(value, marked)

    def _tool(self, tool: Any) -> Any:
        function = tool.get("function") if isinstance(tool.get("function"), dict) else tool
        made = dict(function)
        for name, text in self._of_tool(function):
            made[name] = text
        for name in ("parameters", "input_schema"):
            if isinstance(made.get(name), dict):
                made[name] = self._described(made[name])
        return {**tool, "function": made} if function is not tool else made

    def _of_tool(self, function: dict[str, Any]) -> Iterator[tuple[str, str]]:
        for name in ("name", "description"):
            text = function.get(name)
            if isinstance(text, str):
                yield name, self._text(text, Part(OF_TOOLS, "tools", name, text))

    def _described(self, value: Any) -> Any:
        """A schema with marked descriptions; names of parameters become parts."""
        if isinstance(value, list):
            return [self._described(item) for item in value]
        if not isinstance(value, dict):
            return value
        made = {}
        properties = value.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            if name.strip():
                self.parts.append(Part(OF_TOOLS, "tools", "parameter", name, searched=True))
        for key, item in value.items():
            if key == "description" and isinstance(item, str):
                item = self._text(item, Part(OF_TOOLS, "tools", "description", item))
            else:
                item = self._described(item)
            made[key] = item
        return made

    def _text(self, text: str, part: Part) -> str:
        """The text with marks, unless it is empty; it becomes a part."""
        if not text.strip() or len(self.parts) >= MAX_PARTS - 1:
            return text
        number = len(self.parts)
        self.parts.append(part)
        return within_marks(text, number) if self.only is None or self.only == number else text


Place = tuple[int, int]
"""Begin and end of a part, in characters of the text."""
_LITERALS = {"null": ("null", "None", "none"), "True": ("true", "True"), "False": ("false", "False")}
_LITERAL_REACH = 80
_CONTEXT = 400
Render = Callable[[Conversation], str]


@dataclass(frozen=True, slots=True)
class Loss:
    """A part that is lost, repeated, changed or moved."""

    part: Part
    problem: RowProblem


@dataclass(frozen=True, slots=True)
class Placement:
    """Parts of a conversation, and the places of each in the text: mostly one."""

    parts: Sequence[Part]
    groups: Sequence[Sequence[Sequence[int]]]
    places: Sequence[Sequence[Place]]
    changed: Collection[int]
    """Parts that are written differently."""

    def of_message(self, i: int) -> list[Place]:
        """Places of all parts of message i, in order."""
        return sorted(places[0] for part, places in zip(self.parts, self.places) if part.message == i and places)

    def losses(self, whole: str, allowed: Collection[str] = ()) -> list[Loss]:
        """Parts that are lost, repeated, changed or out of order. Advice keeps the kinds that are allowed already."""
        found: list[Loss] = []
        missing = [part.kind for part, places in zip(self.parts, self.places) if not places]
        kinds = list(dict.fromkeys([*sorted(allowed), *missing]))
        for number, (part, places) in enumerate(zip(self.parts, self.places)):
            if not places:
                found.append(Loss(part, _lost(part, kinds)))
            elif number in self.changed:
                found.append(
                    Loss(part, PartChangedError(f"{_named(part)} is changed by the template: {_quoted(part)}"))
                )
            elif self.is_repeated(part, places, whole):
                times = f"{_named(part)} is written {len(places)} times: {_quoted(part)}"
                found.append(Loss(part, PartRepeatedError(times)))
        return found + self._moved()

    def is_repeated(self, part: Part, places: Sequence[Place], whole: str) -> bool:
        """True if a part must not be written as often as it is.

        Descriptions of tools may be repeated. The name of a called tool may be repeated before its result, and a name
        or a key may be written before and after its value; never twice in a row.
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
        """The text around the place of a lost part, with the part inserted between ⟪ and ⟫."""
        number = self.parts.index(part)
        following = [places[0][0] for places in self.places[number + 1 :] if places]
        before = [places[0][1] for places in self.places[:number] if places]
        at = following[0] if following and part.message != OF_TOOLS else max(before, default=0)
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
                        moved = f"{_named(part)} is written earlier than it belongs: {_quoted(part)}"
                        return [Loss(part, PartMovedError(moved))]
                    at = stop
                reach = max(reach, at)
            done = reach
        return []


def place_parts(conversation: Conversation, whole: str, render: Render) -> Placement:
    """Find every part of a conversation in its text.

    The conversation is rendered once more, with marks around its parts. If the text is the same apart from the marks,
    they give the place of each part. If marks change the text, because the template inspects contents, each part is
    marked alone; a part whose marks still change the text is searched after the previous part.
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


def _marks(parts: ConversationParts, whole: str, render: Render) -> list[PartMark] | None:
    try:
        text, marks = part_marks(render(parts.conversation))
    except RenderError:
        return None
    return marks if text == whole else None


def _pairs(marks: Sequence[PartMark], count: int) -> list[list[Place]]:
    """Places of each part; an opening mark without a closing one is ignored."""
    places: list[list[Place]] = [[] for _ in range(count)]
    opened: dict[int, int] = {}
    for mark in marks:
        if mark.opens:
            opened[mark.part] = mark.at
        elif mark.part in opened:
            places[mark.part].append((opened.pop(mark.part), mark.at))
    return places


def _resolve(parts: ConversationParts, pairs: list[list[Place]], uncertain: Collection[int], whole: str) -> set[int]:
    """Search the parts that marks did not locate; returns the parts that are written differently."""
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
            begin = 0 if part.message == OF_TOOLS else done
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
        if pairs[number] and part.message != OF_TOOLS:
            done = pairs[number][0][1]
    return changed


def _forms(part: Part) -> list[str]:
    """Texts by which a part may be written."""
    core = part.text.strip()
    if not part.escaped:
        return [core]
    escaped = [json.dumps(core, ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    as_python = [repr(text)[1:-1] for text in (core, part.text)]
    return list(dict.fromkeys([core, *escaped, *as_python]))


def _lost(part: Part, kinds: list[str]) -> RowProblem:
    kind = ThoughtsLeftOutError if part.kind in ("thoughts", "earlier_thoughts") else PartLostError
    without = ", ".join(KINDS[each] for each in kinds)
    return kind(
        f"{_named(part)} is not in the text that the template writes: {_quoted(part)}; use a template that writes it, "
        f"remove it from the row, or pass allow_lost={kinds} to train without {without}"
    )


def _named(part: Part) -> str:
    return f"a tool's {part.name}" if part.message == OF_TOOLS else f"message {part.message}: its {part.name}"


def _quoted(part: Part) -> str:
    text = part.text.strip()
    return repr(text if len(text) <= 160 else f"{text[:100]} ... {text[-50:]}")


_OPEN, _CLOSE = "\ud840", "\ud841"
_DIGIT, _BASE = 0xDC00, 512
MAX_PARTS = _BASE * _BASE
_ANY_MARK = re.compile(f"[{_OPEN}{_CLOSE}][\udc00-\uddff]{{2}}|[{START}{END}]")


class MarkedText(str):
    """Text with marks of a part, whose `repr` has them too: templates write objects as Python does."""

    __slots__ = ()

    def __repr__(self) -> str:
        plain, marks = part_marks(self)
        quoted = repr(plain)
        first = next(mark for mark in marks if mark.opens)
        opening, closing = _pair(first.part)
        return f"{quoted[0]}{opening}{quoted[1:-1]}{closing}{quoted[-1]}"


@dataclass(frozen=True, slots=True)
class PartMark:
    """Mark found in a text: the number of its part, whether it opens the part, its position without marks."""

    part: int
    opens: bool
    at: int


def within_marks(text: str, number: int) -> str:
    """The text between the marks of part `number`, with white space outside of them."""
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


def _pair(number: int) -> tuple[str, str]:
    digits = chr(_DIGIT + number // _BASE) + chr(_DIGIT + number % _BASE)
    return _OPEN + digits, _CLOSE + digits
