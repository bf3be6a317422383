"""Rendering of one conversation: its text and its supervised turns.

Every part of the row is located in the text (`parts`): none is lost, repeated or out of order. The supervised turns
are found by `masks.supervised_turns`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from penstock.chat.masks import EVERYTHING, Turn, supervised_turns
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
    "explain",
    "foreign_text",
]


TrainOn = str | tuple[str, ...]
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
        turns = list(supervised_turns(self, given, trained, whole, placement, blocks))
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
        whole = unmarked(self.unmarked_text(given))
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
                    "check off with gate={'content': False}"
                )

    def _check_parts(self, placement: Placement, whole: str) -> list[str]:
        """Kinds of lost parts that `allow_lost` permits; every other loss or change is an error."""
        lost = []
        for loss in placement.losses(whole, self.allow_lost):
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

    def _blocks(self, given: Conversation) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the positions of its generation blocks."""
        text = self._run(self.template.program, given)
        whole = unmarked(text)
        if self.template.program.captures and whole != unmarked(self.unmarked_text(given)):
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

    def unmarked_text(self, given: Conversation) -> str:
        """The text without marks of generation blocks; marks of parts stay."""
        return unmarked(self._run(self.template.unmarked, given))

    def _marked_text(self, given: Conversation) -> str:
        """The text of a conversation with marks around its parts."""
        return self.unmarked_text(given) + self.closing_of(given.messages)

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
