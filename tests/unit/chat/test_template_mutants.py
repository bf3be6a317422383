"""Mutants: real templates that drop, repeat, reorder or cut off a part of a row are refused, every one."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import jinja2
import pytest

import chat_corpus
from corpus_files import templates
from penstock.chat.messages import Conversation
from penstock.chat.problems import RenderError, RowProblem
from penstock.chat.render import Renderer
from penstock.chat.templates import TemplateSource

PARTS = 3
ENOUGH, MOST = 170, 180
"""Mutants in each part: over 500 in all."""
OUTPUT = re.compile(r"\{\{-?(?:[^{}'\"]|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*?-?\}\}", re.DOTALL)
LITERAL = re.compile(r"""\{\{-?\s*('[^']*'|"[^"]*")\s*-?\}\}|'[^']*'|"[^"]*\"""")
LOOP = re.compile(r"(\{%-?\s*for\s+\w+\s+in\s+)(messages|loop_messages)(\s*-?%\})")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "quokkatool",
            "description": "quokkatooltext",
            "parameters": {"type": "object", "properties": {"isle": {"type": "string", "description": "quokkaparam"}}},
        },
    }
]
CALL = {"type": "function", "id": "a1b2c3d4e", "function": {"name": "quokkatool", "arguments": {"isle": "quokkavalue"}}}
CHAT = [
    {"role": "system", "content": "quokkasystem rules quokkasystemz"},
    {"role": "user", "content": "quokkaask first quokkaaskz"},
    {"role": "assistant", "content": "quokkasay first quokkasayz"},
    {"role": "user", "content": "quokkaaskmore then quokkaaskmorez"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "quokkaresult found quokkaresultz", "tool_call_id": "a1b2c3d4e", "name": "quokkatool"},
    {
        "role": "assistant",
        "content": "quokkasaymore last quokkasaymorez",
        "reasoning_content": "quokkathought deep quokkathoughtz",
    },
]
PROBES = [
    Conversation(CHAT[:3]),
    Conversation([*CHAT[1:4], {"role": "assistant", "content": "quokkalast done quokkalastz"}]),
    Conversation([CHAT[1], CHAT[6]]),
    Conversation([*CHAT[3:6], {"role": "assistant", "content": "quokkalast done quokkalastz"}], TOOLS),
]


KNOWN = sorted(set(re.findall(r"quokka[a-z]+", f"{TOOLS}{CHAT}{PROBES}")), key=len, reverse=True)
WORD = re.compile("|".join(KNOWN))


def outputs_written(source: str, renderer: Renderer, probes: list[Conversation], told: list[Any]) -> set[int]:
    """Numbers of the outputs that some probe gets to; all, if a number behind each output changes what is said."""
    numbers = count()
    numbered = OUTPUT.sub(lambda output: f"{output[0]}\u27e6{next(numbers)}\u27e7", source)
    try:
        texts = [replace(renderer, template=TemplateSource("numbered", numbered)).text(probe) for probe in probes]
    except (jinja2.TemplateError, RenderError):
        texts = []
    if [WORD.findall(text) for text in texts] != told:
        return set(range(next(numbers)))
    return {int(number) for text in texts for number in re.findall("\u27e6(\\d+)\u27e7", text)}


def mutants(source: str, written: set[int]) -> Iterator[tuple[str, str]]:
    """The template with one of its outputs changed, and what was done to it; others say what they said."""
    found = list(OUTPUT.finditer(source))
    for number, match in enumerate(found):
        if number not in written:
            continue
        expression = match[0].strip("{}").strip("-").strip()
        if LITERAL.fullmatch(expression):
            continue
        before, behind = source[: match.start()], source[match.end() :]
        yield "dropped", before + behind
        yield "repeated", before + match[0] + match[0] + behind
        yield "cut off", f"{before}{{{{- (({expression}) ~ '')[:-4] -}}}}{behind}"
        yield "begun late", f"{before}{{{{- (({expression}) ~ '')[4:] -}}}}{behind}"
    for number, (one, other) in enumerate(pairwise(found)):
        if not {number, number + 1} & written:
            continue
        between = source[one.end() : other.start()]
        if len(between) < 200 and not all(LITERAL.fullmatch(output[0]) for output in (one, other)):
            yield "reordered", source[: one.start()] + other[0] + between + one[0] + source[other.end() :]
    for match in LOOP.finditer(source):
        reverse = f"{match[1]}{match[2]} | reverse{match[3]}"
        yield "reordered", source[: match.start()] + reverse + source[match.end() :]


def words_of(renderer: Renderer, conversation: Conversation) -> list[str] | None:
    """Every word of the row in the text, in order, as a search finds them; None if it cannot be rendered."""
    try:
        text = renderer.text(conversation)
    except RenderError:
        return None
    return WORD.findall(text)


def spoils(before: list[str], after: list[str]) -> bool:
    """Whether a part is lost, repeated or out of order. What a tool is may be said anywhere, and more than once."""
    names = {"quokkatool", "quokkatooltext", "quokkaparam"}
    said = [[word for word in words if word not in names] for words in (before, after)]
    return said[0] != said[1] or any(word in before and word not in after for word in names)


def in_use(part: int) -> Iterator[tuple[str, str, Renderer, list[Conversation]]]:
    """Templates, each with the probes that it takes as it is; short ones first, which compile fast."""
    collected = [(len(source), name, source) for name, source in templates().items() if name.startswith("llama.cpp/")]
    for _, name, source in sorted(collected)[part::PARTS]:
        format_chat, _ = chat_corpus.in_use(source)
        if format_chat is None or format_chat.template.program.captures:
            continue
        renderer = format_chat._renderer
        taken = [probe for probe in PROBES if _taken(renderer, probe)]
        if taken:
            yield name, source, renderer, taken


def _taken(renderer: Renderer, conversation: Conversation) -> bool:
    try:
        renderer.render(conversation)
    except RowProblem:
        return False
    return True


@pytest.mark.parametrize("part", range(PARTS))
def test_every_mutant_that_spoils_a_row_is_refused(part: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    killed: Counter[str] = Counter()
    survivors = []
    for name, source, renderer, probes in in_use(part):
        if sum(killed.values()) > MOST:
            break
        told = [words_of(renderer, probe) for probe in probes]
        for kind, changed in mutants(source, outputs_written(source, renderer, probes, told)):
            try:
                mutant = replace(renderer, template=TemplateSource("a mutant", changed))
                assert mutant.template.program
            except jinja2.TemplateError:
                continue
            for probe, before in zip(probes, told, strict=True):
                after = words_of(mutant, probe)
                if before is None or after is None or not spoils(before, after):
                    continue
                if _taken(mutant, probe):
                    survivors.append((name, kind, after))
                else:
                    killed[kind] += 1
                break
    assert not survivors, survivors[:3]
    assert sum(killed.values()) >= ENOUGH, killed
    assert min(killed[kind] for kind in ("dropped", "repeated", "cut off", "begun late", "reordered")) >= 5, killed
