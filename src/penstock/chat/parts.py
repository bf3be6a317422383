"""What a conversation says, part by part: every text that must be found in what a template writes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.chat.marks import MAX_PARTS, within_marks
from penstock.chat.messages import THOUGHTS, Conversation, Message
from penstock.files.json_values import FloatText, IntText

__all__ = ["KINDS", "Chain", "Part", "Parts", "parts_of"]

KINDS = {
    # What may be allowed to be lost, by name.
    "system": "system messages",
    "requests": "what users say",
    "answers": "what the assistant says",
    "text_beside_calls": "what the assistant says beside a tool call",
    "thoughts": "what the assistant thought",
    "earlier_thoughts": "what the assistant thought before the last request",
    "calls": "names of called tools",
    "arguments": "arguments of tool calls",
    "tool_results": "answers of tools",
    "tools": "names and descriptions of tools",
}
THOUGHT_TAGS = re.compile(r"(<think>)(.*?)(</think>)", re.DOTALL)
TOOLS = -1
"""In place of the number of a message, for parts that are in the tools."""


@dataclass(frozen=True, slots=True)
class Part:
    """A text that a row says: of which message, of what kind, and what it is called there."""

    message: int
    kind: str
    name: str
    text: str
    escaped: bool = True
    """Whether it may be written as a JSON string writes it."""
    names: bool = False
    """A name or a key, which may stand on both sides of what it names."""
    searched: bool = False
    """A name that the template may look up, so that marks would be in its way: it is looked for in the whole text."""
    literal: bool = False
    """A value that cannot be marked (true, false, null): it is looked for behind the part before it."""


Chain = list[int]
"""Numbers of parts that follow each other."""


@dataclass(slots=True)
class Parts:
    """The parts of a conversation, and the conversation with marks around each."""

    all: list[Part]
    groups: list[list[Chain]]
    """What must follow each other: groups in their order, in a group each chain in its own."""
    conversation: Conversation
    """As it was given, with marks around its parts."""


def parts_of(conversation: Conversation, only: int | None = None) -> Parts:
    """All parts of a conversation; marked are all of them, or `only` one."""
    return _Collector(only).collect(conversation)


class _Collector:
    def __init__(self, only: int | None) -> None:
        self.only = only
        self.parts: list[Part] = []
        self.groups: list[list[Chain]] = []

    def collect(self, conversation: Conversation) -> Parts:
        last_request = max((i for i, m in enumerate(conversation.messages) if m["role"] == "user"), default=-1)
        messages = [self._message(message, i, last_request) for i, message in enumerate(conversation.messages)]
        tools = None if conversation.tools is None else [self._tool(tool) for tool in conversation.tools]
        return Parts(self.parts, self.groups, Conversation(messages, tools, conversation.flags))

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
            for key in said:  # the same thought by several names is one part
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
            before, tag, behind = content.rpartition("</think>")
            lead, open_tag, thought = before.partition("<think>")
            if not open_tag:
                lead, thought = "", before
            pieces = [
                self._grouped(lead, Part(i, kind, "content", lead)),
                open_tag,
                self._grouped(thought, Part(i, thoughts, "content in <think>", thought)),
                tag,
                self._grouped(behind, Part(i, kind, "content", behind)),
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
        """A value inside of arguments: keys and values are parts."""
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
                yield name, self._text(text, Part(TOOLS, "tools", name, text))

    def _described(self, value: Any) -> Any:
        """A schema with the descriptions in it marked, and the names of its parameters noted."""
        if isinstance(value, list):
            return [self._described(item) for item in value]
        if not isinstance(value, dict):
            return value
        made = {}
        properties = value.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            if name.strip():
                self.parts.append(Part(TOOLS, "tools", "parameter", name, searched=True))
        for key, item in value.items():
            if key == "description" and isinstance(item, str):
                item = self._text(item, Part(TOOLS, "tools", "description", item))
            else:
                item = self._described(item)
            made[key] = item
        return made

    def _text(self, text: str, part: Part) -> str:
        """The text with marks, if it says anything; its part is noted."""
        if not text.strip() or len(self.parts) >= MAX_PARTS - 1:
            return text
        number = len(self.parts)
        self.parts.append(part)
        return within_marks(text, number) if self.only is None or self.only == number else text
