"""Turns of a stored conversation: which tokens are template, content, thought, tool call, and whose.

A store has tokens, not messages. The texts that a template writes before and after a message of each role are learned
from sample conversations, and found again among the tokens.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import product
from typing import Any

import numpy as np

from penstock.chat.bound_template import ChatOptions, bind_template
from penstock.chat.gate import Gate
from penstock.chat.masks import common_length
from penstock.chat.messages import Conversation
from penstock.chat.parts import place_parts
from penstock.chat.problems import RowProblem
from penstock.chat.render import Renderer
from penstock.chat.templates import (
    CALL_ID,
    TOOL,
    ChatTemplate,
    TemplateSource,
    built_in_name,
    call_sample,
    load_template,
    sample,
)
from penstock.errors import PenstockError
from penstock.tokenizers.base import Tokenizer

_INSIDE = (
    (
        "thought",
        rb"<think>.*?(?:</think>|$)|\[THINK\].*?(?:\[/THINK\]|$)|<\|channel\|>analysis.*?(?:<\|end\|>|$)",
        True,
    ),
    (
        "tool call",
        rb"<tool_call>.*?(?:</tool_call>|$)|\[TOOL_CALLS\].*|<\|python_tag\|>.*|<function=.*?(?:</function>|$)"
        rb"|%(bar)stool%(gap)scalls?(?:%(gap)ssection)?%(gap)s(?:begin|start)%(end)s"
        rb"(?:.*%(bar)stool%(gap)scalls?(?:%(gap)ssection)?%(gap)send%(end)s|.*)"
        % {b"bar": "<(?:\\||\uff5c)".encode(), b"gap": "(?:_|\u2581)".encode(), b"end": "(?:\\||\uff5c)>".encode()},
        True,
    ),
    ("tool result", rb"<tool_response>.*?(?:</tool_response>|$)|\[TOOL_RESULTS\].*?(?:\[/TOOL_RESULTS\]|$)", False),
)
"""Marks of parts inside of a message, as the templates of the field write them, and if the assistant writes them."""
_PATTERNS = tuple((name, re.compile(pattern, re.DOTALL), own) for name, pattern, own in _INSIDE)
_BARE_CALL = re.compile(rb'\s*\{"(?:type|name|function)": ?".*"(?:parameters|arguments)": ?.*\}\s*', re.DOTALL)
"""Call that is the whole content of a message without any mark, as those of Llama 3."""
_THINK = re.compile("</?think>")
_MARK = re.compile(r"<[|\uff5c][^<>]*?[|\uff5c]>|</?[a-zA-Z_]+>|\[/?[A-Z_]+\]")
"""Mark that a header does not begin inside of."""
_SHORTEST_MARK = 3
_OF_SAMPLE = (TOOL, CALL_ID)
"""Words of the samples that a template may write before the result of a tool."""


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
    headers: Mapping[str, Sequence[bytes]]
    """Texts that a message begins after, by role."""
    ends: Mapping[str, Sequence[bytes]]
    """Texts after a message, by role: in front of another one, and at the end."""
    closed_by: Mapping[str, Collection[bytes]] = field(default_factory=dict)
    """Marks that end a message, by role: inside of one, the message after it was not found."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, fingerprint: str | None) -> TurnLayout:
        """The layout of the template with this fingerprint: a built-in one, or the tokenizer's own."""
        source = _template(tokenizer, fingerprint)
        try:
            found = _learned(tokenizer, source) if source is not None else None
        except PenstockError:
            found = None
        return found or cls(tokenizer, {}, {})

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
        """Name of the part of each token, and the turns; no turns where they are not found for certain."""
        data, starts = self.data(tokens)
        special = self._special
        contents = list(self.contents(data)) if self.known else []
        if not contents or any(
            mark in data[low:high] for role, low, high in contents for mark in self.closed_by.get(role, ())
        ):
            return ["template" if token in special else "content" for token in tokens.tolist()], []
        parts = np.full(len(tokens), "template", object)
        turns = []
        for number, (role, low, high) in enumerate(contents):
            first, last = (int(np.searchsorted(starts[:-1], at)) for at in (low, high))
            turns.append(TokenTurn(role, number, first, last))
            parts[first:last] = "tool result" if role == "tool" else "content"
            for name, begin, end in _inside(data, role, low, high):
                first, last = (int(np.searchsorted(starts[:-1], at)) for at in (begin, end))
                parts[first:last] = name
        return parts.tolist(), turns

    def contents(self, data: bytes) -> Iterator[tuple[str, int, int]]:
        """Role of each message in a rendered text, and where its content is."""
        found = list(self._pattern.finditer(data))
        for number, match in enumerate(found):
            role = self._roles[str(match.lastgroup)]
            low, high = match.end(), found[number + 1].start() if number + 1 < len(found) else len(data)
            # The header of the next turn has taken a part of the end; a row that was cut has none.
            ends = (end[:size] for end in self.ends.get(role, ()) for size in range(len(end), 0, -1))
            cut = max((len(end) for end in ends if data.endswith(end, low, high)), default=0)
            if role == "system" and not data[low : high - cut].strip() and number + 1 < len(found):
                continue  # the header of a system message is the beginning of every text
            yield role, low, high - cut

    def closings(self, samples: Sequence[bytes]) -> dict[str, set[bytes]]:
        """Marks that the end of a message begins with, by role, without those that are inside of some message too."""
        found = {role: {mark for end in self.ends.get(role, ()) if (mark := _mark_of(end))} for role in self.headers}
        for data in samples:
            for role, low, high in self.contents(data):
                found[role] -= {mark for mark in found[role] if mark in data[low:high]}
        return found

    @cached_property
    def _roles(self) -> dict[str, str]:
        return {f"g{number}": role for number, (role, _) in enumerate(self._texts)}

    @cached_property
    def _texts(self) -> list[tuple[str, bytes]]:
        """Role and text of each header, the longest first."""
        texts = [(role, text) for role, several in self.headers.items() for text in several]
        return sorted(texts, key=lambda item: -len(item[1]))

    @cached_property
    def _pattern(self) -> re.Pattern[bytes]:
        choices = []
        for number, (_, text) in enumerate(self._texts):
            pattern = re.escape(text)
            for word in _OF_SAMPLE:
                pattern = pattern.replace(re.escape(word.encode()), rb"[^\s{}()<>]{1,128}")
            choices.append(b"(?P<g%d>%s)" % (number, pattern))
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
            try:
                found = self.tokenizer.token_bytes(token)
            except (PenstockError, LookupError, ValueError, TypeError, OverflowError):
                found = b"\xef\xbf\xbd"  # a hole in the vocabulary
            self._known_bytes[token] = found
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


def _mark_of(end: bytes) -> bytes:
    """First mark of the text behind a message, or its first line with text."""
    text = end.decode()
    mark = _MARK.search(text)
    line = mark[0] if mark else text.strip().partition("\n")[0].strip()
    return line.encode() if len(line) >= _SHORTEST_MARK else b""


def _inside(data: bytes, role: str, low: int, high: int) -> Iterator[tuple[str, int, int]]:
    """Parts inside of the content of a message: thoughts and calls are the assistant's, results are others'."""
    if role == "assistant" and _BARE_CALL.fullmatch(data, low, high):
        yield "tool call", low, high
    for name, pattern, own in _PATTERNS:
        if own == (role == "assistant"):
            for found in pattern.finditer(data, low, high):
                yield name, *found.span()


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rendered sample: for each message its role, where it is (-1: it has no text of its own), True if it has calls."""

    text: str
    places: list[tuple[str, int, int, bool]]
    has_tools: bool

    def around(self) -> Iterator[tuple[str, str, str]]:
        """Role of each message without calls, with the text between it and its neighbours."""
        done = 0
        for number, (role, start, stop, calls) in enumerate(self.places):
            following = next((place[1] for place in self.places[number + 1 :] if place[1] >= 0), len(self.text))
            if not calls and done <= start:
                yield role, self.text[done:start], self.text[stop:following]
            done = max(done, stop)

    def is_found_by(self, layout: TurnLayout) -> bool:
        """True if the layout finds every message where it is.

        The template may write a system message of its own, tools into the one of the row, and that into the first turn.
        """
        data = self.text.encode()
        found = list(layout.contents(data))
        places = [each for each in self.places if each[0] != "system" or "system" in layout.headers]
        if len(found) == len(places) + 1 and found[0][0] == "system":
            found = found[1:]
        if len(found) != len(places):
            return False
        for number, ((role, low, high), (wanted, start, stop, calls)) in enumerate(zip(found, places)):
            first, last = (len(self.text[:at].encode()) for at in (start, stop))
            if role != wanted or (start >= 0 and not low <= first <= last <= high):
                return False
            loose = role == "system" or (number == 0 and len(places) < len(self.places))
            if not calls and not loose and start >= 0 and (data[low:first].strip() or data[last:high].strip()):
                return False
        return True


def _learned(tokenizer: Tokenizer, source: TemplateSource) -> TurnLayout | None:
    """Layout with the first choice of headers that finds every message of the samples.

    A header is what all samples have in common before messages of a role; where that does not tell roles apart, such as
    in a template that writes empty thoughts into some turns only, each text that occurs is a header.
    """
    loose = Gate(prompt=False, content=False, parts=False, terminator=False, bos=False, headers=False)
    options = ChatOptions("assistant", False, loose, ChatTemplate.of(None, {}))
    renderer, _ = bind_template(tokenizer, source, options)
    samples = [made for each in _samples() if (made := _rendered(renderer, each)) is not None]
    before: dict[str, list[str]] = {}
    after: dict[str, list[str]] = {}
    last: list[bytes] = []
    for made in samples:
        known = set(after) if made.has_tools else set[str]()  # tools may be written behind a system message
        for role, lead, tail in made.around():
            before.setdefault(role, []).append(lead)
            if role not in known:
                after.setdefault(role, []).append(tail)
        last.append(made.text[made.places[-1][2] :].encode())
    if not {"user", "assistant"} <= before.keys():
        return None
    ends = {role: [_common_start(texts).encode()] for role, texts in after.items()}
    ends["assistant"] += dict.fromkeys(last)
    closing = _MARK.search(_common_start(after["assistant"]))
    choices = [_header_choices(texts, closing[0] if closing else "") for texts in before.values()]
    for chosen in sorted(product(*(range(len(each)) for each in choices)), key=sum):
        headers = {role: [text.encode() for text in several[at]] for role, several, at in zip(before, choices, chosen)}
        headers = {role: texts for role, texts in headers.items() if texts}
        if not {"user", "assistant"} <= headers.keys():
            continue
        layout = TurnLayout(tokenizer, headers, ends)
        if all(made.is_found_by(layout) for made in samples):
            return replace(layout, closed_by=layout.closings([made.text.encode() for made in samples]))
    return None


def _header_choices(leads: Sequence[str], closing: str) -> list[list[str]]:
    """Headers of a role: what its leads have in common; each of them; none, where the turn is another role's."""
    leads = list(dict.fromkeys(lead for lead in leads if lead.strip()))
    if not leads:
        return [[]]
    shared = _from_mark(_common_end(leads), leads[0])
    each = list(dict.fromkeys(_from_end(lead, closing) for lead in leads))
    choices = [*([[_from_end(shared, closing)]] if shared.strip() else []), each]
    # An empty thought that the template writes is its own; another thought is the message's.
    bare = [[_THINK.split(text)[0] for text in texts if _THINK.search(text)] for texts in choices]
    return [[*texts, *(text for text in more if text.strip())] for texts, more in zip(choices, bare)] + [[]]


def _from_end(lead: str, closing: str) -> str:
    """A lead from the end of the turn before, in front of which the end of a call may stand."""
    return closing + lead.rpartition(closing)[2] if closing and closing in lead else lead


def _from_mark(text: str, lead: str) -> str:
    """The end of a lead without a mark that it begins inside of."""
    start = len(lead) - len(text)
    inside = next((found.end() for found in _MARK.finditer(lead) if found.start() < start < found.end()), start)
    return lead[inside:]


def _samples() -> list[Conversation]:
    system = {"role": "system", "content": "Antworte bitte knapp."}
    called = call_sample()
    return [
        sample(1),
        sample(2),
        Conversation([dict(system), *sample(2).messages]),
        Conversation([dict(system), *sample(1).messages]),
        called,
        Conversation([dict(system), *called.messages], called.tools),
        Conversation([*called.messages, *sample(1).messages], called.tools),
    ]


def _rendered(renderer: Renderer, conversation: Conversation) -> _Sample | None:
    """A sample with the places of its messages; None if the template cannot write it."""
    given = renderer.traits.present(conversation)
    try:
        whole = renderer.text_of(given)
        placement = place_parts(given, whole, renderer.text_of)
    except RowProblem:
        return None
    places: list[tuple[str, int, int, bool]] = []
    for number, message in enumerate(given.messages):
        own = placement.of_message(number)
        start, stop = (own[0][0], own[-1][1]) if own else (-1, -1)
        places.append((str(message["role"]), start, stop, bool(message.get("tool_calls"))))
    return _Sample(whole, places, given.tools is not None)


def _common_start(texts: Sequence[str]) -> str:
    return reduce(lambda one, other: one[: common_length(one, other)], texts) if texts else ""


def _common_end(texts: Sequence[str]) -> str:
    return _common_start([text[::-1] for text in texts])[::-1]
