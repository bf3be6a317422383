"""Rendering of one conversation: its text and its supervised turns.

First, every part of the row is located in the text (`parts`): none is lost, repeated or out of order. A turn begins
where the prompt for it ends, and ends with the end-of-turn token; or it is a `{% generation %}` block of the template.
Either way, all parts of its message are inside, tool calls included, and no part of another message is.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.chat.masks import Turn
from penstock.chat.messages import Conversation, Message
from penstock.chat.parts import OF_TOOLS, Placement, place_parts
from penstock.chat.problems import (
    EmptyContentError,
    NoAssistantTurnError,
    PartLostError,
    PromptDiffersError,
    RenderError,
    RowProblem,
    SpansNotFoundError,
)
from penstock.chat.templates import END, START, TOOLS, Markers, TemplateSource, Traits, clock, sample, unmarked
from penstock.files.json_values import dumps

if TYPE_CHECKING:
    from penstock.chat.sandbox import Program

__all__ = [
    "EVERYTHING",
    "ExplainedPart",
    "Renderer",
    "Rendering",
    "TrainOn",
    "common_length",
    "explain",
    "foreign_text",
]


TrainOn = str | tuple[str, ...]
EVERYTHING = "all"
SWITCHES = ("enable_thinking", "thinking")
"""Variables that change the prompt: a model is used with either value."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """Rendered conversation: its text, the place of each part, and the supervised turns."""

    text: str
    placement: Placement
    turns: Sequence[Turn]
    lost: Sequence[str]
    """Kinds of parts that are not in the text, as `allow_lost` permits."""
    foreign: str | None = None
    """Text of a special token in a message, and the message; None if there is none."""


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """Ends of turns."""

    texts: tuple[str, ...] = ()
    """Texts of the tokens that end a turn: text after one belongs to the template, not to the model."""
    closing: str = ""
    """Text to add after the last answer, where the template writes no end of the turn."""
    call_closing: str = ""
    """Text to add after a last turn with tool calls."""


@dataclass(frozen=True)
class Renderer:
    """Renderer of conversations with one template: a pure function of the conversation."""

    template: TemplateSource
    variables: Mapping[str, Any]
    ends: TurnEnds = field(default_factory=lambda: TurnEnds())
    train_on: TrainOn = "assistant"
    markers: Markers | None = None
    now: datetime | None = None
    traits: Traits = field(default_factory=Traits)
    check_prompts: bool = True
    check_content: bool = True
    check_parts: bool = True
    allow_lost: frozenset[str] = frozenset()
    specials: tuple[str, ...] = ()
    """Texts of special tokens that no message may contain; none if that is not checked."""

    def render(self, conversation: Conversation) -> Rendering:
        """The text of a conversation, its parts in it, and its supervised turns. Raises a `RowProblem`."""
        trained = self.trained(conversation)
        if self.check_content:
            self._check_content(conversation, trained)
        given = self.traits.present(conversation)
        blocks: list[tuple[int, int]] | None = None
        if self.template.program.has_generation and self.train_on != EVERYTHING:
            whole, blocks = self._blocks(given)
        else:
            whole = self.text_of(given)
        if not whole.isascii():
            self._check_text(whole)
        placement = place_parts(given, whole, self._marked_text)
        lost = self._check_parts(placement, whole)
        turns = list(self._turns(given, trained, whole, placement, blocks))
        return Rendering(whole, placement, turns, lost, self._foreign(conversation) if self.specials else None)

    def _check_text(self, whole: str) -> None:
        try:
            whole.encode()
        except UnicodeEncodeError:
            raise RenderError(f"{self.template.name} wrote a lone surrogate, which is not text") from None

    def sample(self, turns: int) -> Conversation:
        """A sample conversation that the template can render."""
        made = sample(turns)
        made.tools = TOOLS if self.traits.needs_tools else None
        return made

    def text(self, conversation: Conversation) -> str:
        """The text of a conversation without marks."""
        return self.text_of(self.traits.present(conversation))

    def text_of(self, given: Conversation) -> str:
        """The text of a conversation in the form that the template takes."""
        whole = unmarked(self._unmarked_text(given))
        return whole + self.closing_of(given.messages)

    def closing_of(self, messages: Sequence[Message]) -> str:
        """Text to add after a conversation that ends with an answer."""
        last = messages[-1] if messages else {"role": None}
        if last["role"] != "assistant":
            return ""
        return self.ends.call_closing if last.get("tool_calls") else self.ends.closing

    def prompts(self, given: Conversation, i: int) -> Iterator[str]:
        """Prompts for message i: with the given variables, then with thinking switched on or off."""
        before = Conversation(given.messages[:i], given.tools)
        for variables in self.settings:
            try:
                yield unmarked(self._run(self.template.unmarked, before, prompt=True, variables=variables))
            except RenderError as error:
                if not i:
                    raise PromptDiffersError(
                        f"message 0 is an answer, but {self.template.name} has no prompt for it"
                    ) from error
                if variables is self.settings[0]:
                    raise

    @cached_property
    def settings(self) -> tuple[Mapping[str, Any], ...]:
        """Variables to add: none, then the other value of each switch that the template mentions."""
        named = [name for name in SWITCHES if self.template.mentions(name)]
        others = [{name: on} for name in named for on in (False, True) if self.variables.get(name) is not on]
        return ({}, *others)

    def trained(self, conversation: Conversation) -> Collection[int]:
        """Numbers of the supervised messages: by their flags, else by `train_on`."""
        messages, flags = conversation.messages, conversation.flags
        roles = ("assistant",) if isinstance(self.train_on, str) else self.train_on
        trained = [i for i, message in enumerate(messages) if message["role"] in roles]
        if self.train_on == EVERYTHING:
            return range(len(messages))
        if self.train_on == "last":
            trained = trained[-1:]
        elif self.train_on == "flags":
            trained = []
        if flags is not None:
            chosen = set(trained)
            trained = [i for i, flag in enumerate(flags) if flag or (flag is None and i in chosen)]
        if not trained:
            given_roles = [message["role"] for message in messages]
            raise NoAssistantTurnError(
                f"no supervised message with train_on={self.train_on!r}; the roles are {given_roles}"
            )
        return trained

    def _check_content(self, conversation: Conversation, trained: Collection[int]) -> None:
        if self.train_on == EVERYTHING:
            return
        for i in trained:
            message = conversation.messages[i]
            if not (message["content"] or "").strip() and not message.get("tool_calls"):
                raise EmptyContentError(
                    f"message {i} ({message['role']}) is supervised, but empty; drop the row, or switch the "
                    "check off with Gate(content=False)"
                )

    def _check_parts(self, placement: Placement, whole: str) -> list[str]:
        """Kinds of lost parts that `allow_lost` permits; every other loss or change is an error."""
        lost = []
        for loss in placement.losses(whole):
            kind = loss.part.kind
            allowed = kind in self.allow_lost or (kind == "earlier_thoughts" and "thoughts" in self.allow_lost)
            if allowed and isinstance(loss.problem, PartLostError):
                lost.append(kind)
            elif self.check_parts:
                problem = loss.problem
                lost_text = placement.shown(loss.part, whole) if isinstance(problem, PartLostError) else None
                raise type(problem)(problem.reason, shown=lost_text)
        return lost

    @cached_property
    def special_text(self) -> re.Pattern[str]:
        """Pattern of the texts of special tokens."""
        return re.compile("|".join(map(re.escape, self.specials)))

    def _foreign(self, conversation: Conversation) -> str | None:
        for i, message in enumerate(conversation.messages):
            found = self.special_text.search(_all_text(message))
            if found:
                return foreign_text(i, message["role"], found[0])
        found = self.special_text.search(dumps(conversation.tools)) if conversation.tools else None
        return f"the tools have {found[0]!r} in them" if found else None

    def _turns(
        self,
        given: Conversation,
        trained: Collection[int],
        whole: str,
        placement: Placement,
        blocks: list[tuple[int, int]] | None,
    ) -> Iterator[Turn]:
        if self.train_on == EVERYTHING:
            yield Turn(0, len(whole))
            return
        answers = [i for i in trained if given.messages[i]["role"] == "assistant"]
        by_message = self._blocks_by_message(blocks, given, placement) if blocks is not None else {}
        done = 0
        for i in trained:
            if i not in answers:
                yield from (Turn(start, stop, message=i) for start, stop in placement.of_message(i))
                continue
            found = self._by_block(by_message[i], given, i, whole) if blocks is not None else None
            made = found or [self._by_prompt(given, i, whole, placement, done)]
            if self.check_parts:
                self._check_turn(made, i, placement)
            done = made[-1].stop
            yield from made

    def _by_prompt(self, given: Conversation, i: int, whole: str, placement: Placement, done: int) -> Turn:
        """The turn from the end of the prompt for message i to the token that ends it."""
        places = placement.of_message(i)
        first = places[0][0] if places else None
        start = self._start(given, i, whole, first)
        last = places[-1][1] if places else start
        following = [place[0] for n in range(i + 1, len(given.messages)) for place in placement.of_message(n)]
        stop = self._end(given, i, whole, last, min(following, default=len(whole)))
        if start < done or (first is not None and start > first):
            raise SpansNotFoundError(
                f"the prompt for message {i} ends inside of a turn, so the beginning of that turn is unknown"
            )
        return Turn(start, stop, start, i)

    def _start(self, given: Conversation, i: int, whole: str, first: int | None) -> int:
        """End of the prompt for message i in the text."""
        nearest, fits = 0, None
        differing = ""
        for prompt in self.prompts(given, i):
            end = len(prompt)
            if not whole.startswith(prompt) or (first is not None and end > first):
                differing = differing or prompt
                nearest = max(nearest, common_length(prompt, whole))
                continue
            if fits is None:
                fits = end
            # White space on both sides of the end may be one token: the prompt of another setting may end elsewhere.
            if not (first is None or end < first) or not (prompt[-1:].isspace() and whole[end : end + 1].isspace()):
                return end
        if fits is not None:
            return fits
        if self.check_prompts:
            raise _differing(i, differing, whole)
        if self.markers is not None:
            opened = whole.rfind(self.markers[0], 0, first if first is not None else len(whole))
            if opened >= 0:
                return opened + len(self.markers[0])
        return nearest if first is None else min(nearest, first)

    def _end(self, given: Conversation, i: int, whole: str, last: int, following: int) -> int:
        """End of the turn of message i: after the first token that ends turns, before the next message."""
        ends = [at + len(text) for text in self.ends.texts if (at := whole.find(text, last, following)) >= 0]
        if ends:
            return min(ends)
        grown = unmarked(self._unmarked_text(Conversation(given.messages[: i + 1], given.tools)))
        return len(grown) if len(grown) >= last and whole.startswith(grown) else last

    def _check_turn(self, turns: Sequence[Turn], i: int, placement: Placement) -> None:
        """Raise unless all parts of a message, and no others, are inside of its turn."""
        for part, places in zip(placement.parts, placement.places):
            for start, stop in places[:1]:
                inside = any(turn.start <= start and stop <= turn.stop for turn in turns)
                if part.message == i and not inside and not part.literal:
                    raise SpansNotFoundError(f"message {i}: its {part.name} is outside of the supervised turn")
                if part.message not in (i, -1) and inside and not part.literal:
                    raise SpansNotFoundError(f"message {part.message} is inside of the turn of message {i}")

    def _blocks(self, given: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the positions of its generation blocks."""
        text = self._run(self.template.program, given)
        whole = unmarked(text)
        if self.template.program.captures and whole != unmarked(self._unmarked_text(given)):
            raise SpansNotFoundError(f"{self.template.name} changes its text where its generation blocks are marked")
        blocks, at, opened = [], 0, None
        for piece in re.split(f"([{START}{END}])", text):
            if piece == START:
                opened = at
            elif piece == END and opened is not None:
                blocks.append((opened, at))
                opened = None
            elif piece != END:
                at += len(piece)
        return whole + self.closing_of(given.messages), blocks

    def _blocks_by_message(
        self, blocks: list[tuple[int, int]], given: Conversation, placement: Placement
    ) -> dict[int, list[tuple[int, int]]]:
        """Generation blocks of each assistant message: those with its parts inside."""
        answers = [i for i, message in enumerate(given.messages) if message["role"] == "assistant"]
        if len(blocks) == len(answers):
            return {i: [block] for i, block in zip(answers, blocks)}
        found: dict[int, list[tuple[int, int]]] = {i: [] for i in answers}
        for start, stop in blocks:
            owners = {i for i in answers for place in placement.of_message(i) if start <= place[0] and place[1] <= stop}
            if len(owners) != 1:
                break
            found[owners.pop()].append((start, stop))
        else:
            if all(found.values()):
                return found
        raise SpansNotFoundError(
            f"{self.template.name} has {len(blocks)} generation blocks for {len(answers)} assistant messages; "
            "each message must have its own"
        )

    def _by_block(self, blocks: list[tuple[int, int]], given: Conversation, i: int, whole: str) -> list[Turn]:
        """The turns of message i by its blocks; the text must begin with the prompt for it."""
        start, stop = blocks[0]
        others = [Turn(*block, message=i) for block in blocks[1:]]
        if not self.check_prompts:
            return [Turn(start, stop, start, i), *others]
        differing = None
        for prompt in self.prompts(given, i):
            if whole.startswith(prompt) and len(prompt) < stop:
                # A block that begins before the end of the prompt contains a header, which the model does not write.
                return [Turn(max(start, len(prompt)), stop, len(prompt), i), *others]
            differing = differing if differing is not None else prompt
        assert differing is not None
        raise _differing(i, differing, whole)

    def _unmarked_text(self, given: Conversation) -> str:
        """The text without marks of generation blocks; marks of parts stay."""
        return unmarked(self._run(self.template.unmarked, given))

    def _marked_text(self, given: Conversation) -> str:
        """The text of a conversation with marks around its parts."""
        return self._unmarked_text(given) + self.closing_of(given.messages)

    def given(
        self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False, **variables: Any
    ) -> dict[str, Any]:
        """The variables of a template."""
        from_row = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        return {**self.variables, **variables, **from_row, "strftime_now": clock(self.now)}

    def _run(
        self,
        program: Program,
        given: Conversation,
        *,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        try:
            return program.render(**self.given(given.messages, given.tools, prompt=prompt, **(variables or {})))
        except Exception as error:  # a template can raise anything
            if self.traits.needs_tools and not given.tools:
                raise RenderError(f"{self.template.name} needs tools, and the row has none") from error
            raise RenderError(f"{self.template.name}: {error}") from error


def foreign_text(message: int, role: str, text: str) -> str:
    """Phrase for the text of a special token in a message."""
    return f"message {message} ({role}) has {text!r} in its content"


def _all_text(message: Message) -> str:
    """All texts of a message."""
    content = message["content"]
    if len(message) == 2 and isinstance(content, str):
        return content
    return f"{content or ''}\n{dumps({key: value for key, value in message.items() if key != 'content'})}"


def common_length(one: str, other: str) -> int:
    """Length of the common prefix."""
    most = min(len(one), len(other))
    return next((n for n in range(most) if one[n] != other[n]), most)


def _differing(i: int, prompt: str, whole: str) -> PromptDiffersError:
    same = common_length(prompt, whole)
    return PromptDiffersError(
        f"the prompt for message {i} is not how the training text begins: after {prompt[max(0, same - 40) : same]!r} "
        f"the prompt has {prompt[same : same + 40]!r}, the training text {whole[same : same + 40]!r}; pass the "
        "variables that the model is used with, train on other turns (train_on='last'), or switch the check off with "
        "Gate(prompt=False)"
    )


@dataclass(frozen=True, slots=True)
class ExplainedPart:
    """A part of a row, and its place in the rendered text."""

    message: int | None
    """None for a part of the tools."""
    role: str
    name: str
    where: str
    """prompt, supervised, lost, changed, or repeated."""
    text: str


def explain(renderer: Renderer, conversation: Conversation) -> tuple[list[ExplainedPart], str | None]:
    """The parts of a conversation, and the reason for a refusal, if there is one. Raises if it cannot be rendered."""
    problem = None
    try:
        renderer.render(conversation)
    except RowProblem as error:
        problem = error.reason
    made = _rendering(renderer, conversation)
    explained = []
    for number, (part, places) in enumerate(zip(made.placement.parts, made.placement.places)):
        inside = any(turn.start <= place[0] and place[1] <= turn.stop for turn in made.turns for place in places[:1])
        if not places:
            where = "lost"
        elif number in made.placement.changed:
            where = "changed"
        elif made.placement.is_repeated(part, places, made.text):
            where = "repeated"
        else:
            where = "supervised" if inside else "prompt"
        of_tools = part.message == OF_TOOLS
        role = "tools" if of_tools else conversation.messages[part.message]["role"]
        explained.append(ExplainedPart(None if of_tools else part.message, role, part.name, where, part.text))
    return explained, problem


def _rendering(renderer: Renderer, conversation: Conversation) -> Rendering:
    """The rendering, with turns if they can be found, else without."""
    lenient = replace(renderer, check_parts=False, check_content=False)
    for check_prompts in (True, False):
        try:
            return replace(lenient, check_prompts=check_prompts).render(conversation)
        except RowProblem:
            continue
    given = renderer.traits.present(conversation)
    whole = renderer.text_of(given)
    return Rendering(whole, place_parts(given, whole, renderer.text_of), (), ())
