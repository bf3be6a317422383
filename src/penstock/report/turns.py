"""Turns of a stored conversation: which tokens are template, content, thought, tool call, and whose.

A store has tokens, not messages. The texts that a template writes before and after a message of each role are learned
from sample conversations, and found again among the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np

from penstock.chat.bound_template import ChatOptions, bind_template
from penstock.chat.gate import Gate
from penstock.chat.masks import common_length
from penstock.chat.messages import Conversation
from penstock.chat.parts import place_parts
from penstock.chat.problems import RowProblem
from penstock.chat.render import Renderer
from penstock.chat.templates import ChatTemplate, TemplateSource, built_in_name, call_sample, load_template, sample
from penstock.errors import PenstockError
from penstock.tokenizers.base import Tokenizer

_INSIDE = (
    ("thought", rb"<think>.*?(?:</think>|$)|\[THINK\].*?(?:\[/THINK\]|$)|<\|channel\|>analysis.*?(?:<\|end\|>|$)"),
    (
        "tool call",
        rb"<tool_call>.*?(?:</tool_call>|$)|\[TOOL_CALLS\].*|<\|python_tag\|>.*|<function=.*?(?:</function>|$)",
    ),
    ("tool result", rb"<tool_response>.*?(?:</tool_response>|$)|\[TOOL_RESULTS\].*?(?:\[/TOOL_RESULTS\]|$)"),
)
"""Marks of parts inside of a message, as the templates of the field write them."""
_PATTERNS = tuple((name, re.compile(pattern, re.DOTALL)) for name, pattern in _INSIDE)


@dataclass(frozen=True, slots=True)
class TokenTurn:
    """Message among the tokens of a row: its role, its number from 0, and the tokens of its content."""

    role: str
    number: int
    start: int
    stop: int


@dataclass(frozen=True)
class TurnLayout:
    """Texts around the messages of a template; none of them if the template is not known."""

    tokenizer: Tokenizer
    headers: Mapping[str, bytes]
    """Text before a message, by role."""
    ends: Mapping[str, bytes]
    """Text after a message, by role."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, fingerprint: str | None) -> TurnLayout:
        """The layout of the template with this fingerprint: a built-in one, or the tokenizer's own."""
        source = _template(tokenizer, fingerprint)
        try:
            headers, ends = _learned(tokenizer, source) if source is not None else ({}, {})
        except PenstockError:
            headers, ends = {}, {}
        return cls(tokenizer, headers, ends)

    @property
    def known(self) -> bool:
        """True if turns can be found."""
        return bool(self.headers)

    def data(self, tokens: np.ndarray[Any, Any]) -> tuple[bytes, np.ndarray[Any, Any]]:
        """Bytes of the tokens, and where each of them begins, with the end of the last."""
        pieces = [self._bytes(token) for token in tokens.tolist()]
        starts = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
        return b"".join(pieces), starts

    def parts(self, tokens: np.ndarray[Any, Any]) -> tuple[list[str], list[TokenTurn]]:
        """Name of the part of each token, and the turns."""
        data, starts = self.data(tokens)
        special = self._special
        if not self.known:
            return ["template" if token in special else "content" for token in tokens.tolist()], []
        parts = np.full(len(tokens), "template", object)
        turns = []
        for number, (role, low, high) in enumerate(self._contents(data)):
            first, last = (int(np.searchsorted(starts[:-1], at)) for at in (low, high))
            turns.append(TokenTurn(role, number, first, last))
            parts[first:last] = "tool result" if role == "tool" else "content"
            for name, pattern in _PATTERNS:
                for found in pattern.finditer(data, low, high):
                    begin, end = (int(np.searchsorted(starts[:-1], at)) for at in found.span())
                    parts[begin:end] = name
        return parts.tolist(), turns

    def _contents(self, data: bytes) -> Iterator[tuple[str, int, int]]:
        found = list(self._pattern.finditer(data))
        for number, match in enumerate(found):
            role = self._roles[str(match.lastgroup)]
            low, high = match.end(), found[number + 1].start() if number + 1 < len(found) else len(data)
            end = self.ends.get(role, b"")
            # The header of the next turn has taken a part of the end; a row that was cut has none.
            cut = next((size for size in range(len(end), 0, -1) if data.endswith(end[:size], low, high)), 0)
            high -= cut
            yield role, low, high

    @cached_property
    def _roles(self) -> dict[str, str]:
        return {f"g{number}": role for number, role in enumerate(self.headers)}

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        longest = sorted(self._roles.items(), key=lambda item: -len(self.headers[item[1]]))
        choices = [f"(?P<{group}>".encode() + re.escape(self.headers[role]) + b")" for group, role in longest]
        return re.compile(b"|".join(choices))

    @cached_property
    def _special(self) -> set[int]:
        return set(self.tokenizer.special.named.values())

    @cached_property
    def _known_bytes(self) -> dict[int, bytes]:
        return {}

    def _bytes(self, token: int) -> bytes:
        found = self._known_bytes.get(token)
        if found is None:
            found = self._known_bytes[token] = self.tokenizer.token_bytes(token)
        return found


def _template(tokenizer: Tokenizer, fingerprint: str | None) -> TemplateSource | None:
    if fingerprint is None:
        return None
    name = built_in_name(fingerprint)
    if name is not None:
        return load_template(name, None)
    own = tokenizer.chat_template
    if own is None or TemplateSource("", own).fingerprint != fingerprint:
        return None
    return load_template(None, own)


def _learned(tokenizer: Tokenizer, source: TemplateSource) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Texts before and after messages, by role: what all samples have in common next to the message."""
    loose = Gate(prompt=False, content=False, parts=False, terminator=False, bos=False, headers=False)
    options = ChatOptions("assistant", False, loose, ChatTemplate.of(None, {}))
    renderer, _ = bind_template(tokenizer, source, options)
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    for conversation in _samples():
        for role, lead, tail in _around(renderer, conversation):
            before.setdefault(role, []).append(lead)
            after.setdefault(role, []).append(tail)
    headers = {role: _common_end([text for text in texts if text.strip()]) for role, texts in before.items()}
    ends = {role: _common_start(texts) for role, texts in after.items()}
    closing = ends.get("assistant", "").strip()
    if closing and closing in headers.get("tool", ""):  # before it is the end of a call
        headers["tool"] = headers["tool"].rpartition(closing)[2]
    asked = headers.get("user", "").strip()
    if asked and headers.get("system", "").strip().endswith(asked):
        del headers["system"]  # the template writes it into the turn of the user
    found = {role: text.encode() for role, text in headers.items() if text.strip()}
    if not {"user", "assistant"} <= found.keys():
        return {}, {}
    return found, {role: text.encode() for role, text in ends.items()}


def _samples() -> list[Conversation]:
    system = {"role": "system", "content": "Antworte bitte knapp."}
    return [
        sample(1),
        sample(2),
        Conversation([dict(system), *sample(2).messages]),
        Conversation([dict(system), *sample(1).messages]),
        call_sample(),
    ]


def _around(renderer: Renderer, conversation: Conversation) -> Iterator[tuple[str, str, str]]:
    """Role of each message with the text between it and its neighbours; nothing if it cannot be rendered."""
    given = renderer.traits.present(conversation)
    try:
        whole = renderer.text_of(given)
        placement = place_parts(given, whole, renderer.text_of)
    except RowProblem:
        return
    places: list[tuple[str, int, int]] = []
    for number, message in enumerate(given.messages):
        own = placement.of_message(number)
        if not own or message.get("tool_calls"):
            places.append(("", own[0][0] if own else -1, own[-1][1] if own else -1))
        else:
            places.append((str(message["role"]), own[0][0], own[-1][1]))
    done = 0
    for number, (role, start, stop) in enumerate(places):
        following = next((place[1] for place in places[number + 1 :] if place[1] >= 0), len(whole))
        if role and done <= start:
            yield role, whole[done:start], whole[stop:following]
        done = max(done, stop)


def _common_start(texts: Sequence[str]) -> str:
    return reduce(lambda one, other: one[: common_length(one, other)], texts) if texts else ""


def _common_end(texts: Sequence[str]) -> str:
    return _common_start([text[::-1] for text in texts])[::-1]
