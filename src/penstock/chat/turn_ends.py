"""Which tokens end a turn, seen from samples: what a template writes behind an answer, wherever the answer stands."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.chat.messages import Conversation
from penstock.chat.placement import place_parts
from penstock.chat.problems import RowProblem
from penstock.chat.render import Renderer, Rendering, common_length
from penstock.chat.template_traits import TOOL, call_sample, thought_sample

__all__ = ["Ends", "ends_of", "special_tokens_in_turns"]


@dataclass(frozen=True, slots=True)
class Ends:
    """The texts of tokens that end turns."""

    texts: tuple[str, ...]
    at_the_end: bool = True
    """Whether the last answer of a conversation has one."""
    of_calls: str = ""
    """What ends a turn that calls tools, where the template writes nothing behind the last turn."""


def ends_of(renderer: Renderer, known: Iterable[str], eos: str) -> Ends:
    """The tokens that end an answer, and a turn that calls a tool.

    The text behind the answer of a short conversation, and the text between that answer and the next message of a
    longer one, begin with the same special tokens. The tokenizer's EOS among them is the end, otherwise the last that
    does not open turns. If there is none in common, the first special token of each is an end: that of the last turn,
    and that of the others.
    """
    specials = _pattern({*known, eos} - {""})
    openers = set(specials.findall(_opening(renderer))) - {eos}
    texts: dict[str, None] = {}
    at_the_end, of_calls = True, ""
    for called in (False, True):
        shorter = call_sample(stop=2) if called else renderer.sample(1)
        longer = call_sample(stop=4) if called else renderer.sample(2)
        behind, between = _behind(renderer, shorter, 1), _behind(renderer, longer, 1)
        if behind is None:
            continue
        between = behind if between is None else between
        # What stands between two calls ends a call, not the turn.
        inside = set(specials.findall(_between_calls(renderer))) - {eos} if called else set()
        found = _in_common(behind, between, specials, openers | inside, eos)
        if found is not None:
            texts[found] = None
            continue
        firsts = [_first(text, specials, inside) for text in (behind, between)]
        if called and at_the_end:  # answers have an end of their own, so what opens the answer of a tool is none
            firsts[1] = ""
        texts.update(dict.fromkeys(text for text in firsts if text))
        if called and not firsts[0]:
            of_calls = firsts[1]
        elif not firsts[0]:
            at_the_end = False
    return Ends(tuple(texts), at_the_end, of_calls)


def _first(text: str, specials: re.Pattern[str], inside: set[str]) -> str:
    return next((match[0] for match in specials.finditer(text) if match[0] not in inside), "")


def _between_calls(renderer: Renderer) -> str:
    """What the template writes between two calls of one turn; nothing if it cannot write two."""
    given = renderer.traits.present(call_sample(stop=2, calls=2))
    try:
        whole = renderer.text_of(given)
        placement = place_parts(given, whole, renderer.text_of)
    except RowProblem:
        return ""
    names = sorted(places[0] for part, places in zip(placement.parts, placement.places) if part.names and places)
    called = [place for place in names if whole[slice(*place)] == TOOL]
    if len(called) != 2:
        return ""
    last = max(place[1] for place in placement.of_message(1) if place[0] < called[1][0])
    return whole[last : called[1][0]]


def special_tokens_in_turns(renderer: Renderer, known: Mapping[str, int]) -> tuple[set[str], set[str]]:
    """Special tokens that stand in turns of samples, and those of them that end a turn but stand inside of one."""
    specials = _pattern(known)
    inside: set[str] = set()
    ends: set[str] = set()
    strict = replace(renderer, check_parts=False, train_on="assistant")
    for conversation in _samples(renderer):
        made = _rendering(strict, conversation)
        if made is None:
            continue
        for turn in made.turns:
            found = list(specials.finditer(made.text, turn.start, turn.stop))
            inside.update(match[0] for match in found)
            closers = [match[0] for match in found if match[0] in renderer.terminators]
            ends.update(closers[:-1])
    return inside, ends


def _rendering(renderer: Renderer, conversation: Conversation) -> Rendering | None:
    """A sample as it is rendered, with a look at its prompts if they fit."""
    for check_prompts in (True, False):
        with contextlib.suppress(RowProblem):
            return replace(renderer, check_prompts=check_prompts).rendering(conversation)
    return None


def _samples(renderer: Renderer) -> list[Conversation]:
    keys = renderer.traits.thought_keys or ("reasoning_content",)
    return [renderer.sample(1), renderer.sample(2), call_sample(), *(thought_sample(key) for key in keys)]


def _opening(renderer: Renderer) -> str:
    """What the template writes to have the next turn of the assistant begin."""
    asked = renderer.sample(1)
    asked.messages = asked.messages[:1]
    given = renderer.traits.present(asked)
    try:
        prompt = next(iter(renderer.prompts(given, 1)))
        text = renderer.text_of(given)
    except RowProblem:
        return ""
    return prompt[len(text) :] if prompt.startswith(text) else ""


def _behind(renderer: Renderer, conversation: Conversation, i: int) -> str | None:
    """What stands behind message i, up to what the next one says; None if the conversation cannot be rendered."""
    given = renderer.traits.present(conversation)
    try:
        whole = renderer.text_of(given)
        placement = place_parts(given, whole, renderer.text_of)
    except RowProblem:
        return None
    places = placement.of_message(i)
    if not places:
        return None
    following = [place[0] for n in range(i + 1, len(given.messages)) for place in placement.of_message(n)]
    if len(given.messages) > i + 1 and not following:
        return None
    return whole[places[-1][1] : min(following, default=len(whole))]


def _in_common(behind: str, between: str, specials: re.Pattern[str], openers: set[str], eos: str) -> str | None:
    """The special token that ends both texts' turn."""
    shared = common_length(behind, between)
    found = [match[0] for match in specials.finditer(behind) if match.end() <= shared]
    if eos in found:
        return eos
    if not openers:  # what opens a turn cannot be told from what ends one
        return found[0] if found else None
    closers = [text for text in found if text not in openers]
    return closers[-1] if closers else None


def _pattern(texts: Iterable[str]) -> re.Pattern[str]:
    listed: Sequence[str] = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, listed)) if listed else r"(?!)")
