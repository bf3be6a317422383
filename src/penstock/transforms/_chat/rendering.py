"""From a conversation to its text, with marks around what is to be trained on.

Where the turns are is found out in this order: from the template's `{% generation %}` blocks; by rendering the
conversation up to each turn, with and without it, if these are true beginnings of the whole text; from turn markers.
Turns of other roles than the assistant's are found by marking their contents before they are rendered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import orjson

from penstock.transforms._chat.marked import Marked, merged_marks
from penstock.transforms._chat.marks import END, START, unmarked
from penstock.transforms._chat.messages import Conversation, Message
from penstock.transforms._chat.problems import (
    EmptyContentError,
    HeaderSupervisedError,
    NoAssistantTurnError,
    PromptDiffersError,
    RenderError,
    SpansNotFoundError,
    TerminatorInsideError,
    ThoughtsLeftOutError,
    ToolCallsError,
)
from penstock.transforms._chat.shapes import Shape
from penstock.transforms._chat.templates import Markers, Template, clock

if TYPE_CHECKING:
    from penstock.transforms._chat.sandbox import Program

__all__ = ["EVERYTHING", "Renderer", "TrainOn", "foreign_text"]

TrainOn = str | tuple[str, ...]
EVERYTHING = "all"
NO_ANSWER = [-1]


@dataclass(frozen=True)
class Renderer:
    """Renders conversations with one template. A pure function of the conversation."""

    template: Template
    variables: Mapping[str, Any]
    terminators: tuple[str, ...]
    """Texts of tokens that end a turn: what stands behind one belongs to the template, not to the model."""
    train_on: TrainOn = "assistant"
    shape: Shape | None = None
    markers: Markers | None = None
    now: datetime | None = None
    wants_parts: bool = False
    """Whether the template goes through the parts of a content, and cannot do with a text."""
    check_prompts: bool = True
    check_content: bool = True
    check_headers: bool = True
    specials: tuple[str, ...] = ()
    """Texts of special tokens, which no message may say; none, if that is not to be checked."""

    def render(self, conversation: Conversation) -> Marked:
        """Raises a `RowProblem` for a conversation that cannot be rendered as it should."""
        marked = self._rendered(conversation)
        if self.specials:
            marked.foreign = self._foreign(conversation)
        return marked

    def _rendered(self, conversation: Conversation) -> Marked:
        trained = self.trained(conversation)
        if self.check_content:
            self._check_content(conversation, trained)
        if self.shape is not None and conversation.simple:
            text = self._by_shape(conversation, trained)
            if text is not None:
                return Marked(text, NO_ANSWER if self.train_on == EVERYTHING else None)
        self._check_nothing_lost(conversation)
        messages = self.as_the_template_wants(conversation.messages)
        if self.train_on == EVERYTHING:
            return Marked(START + self.plain(messages, conversation) + END, NO_ANSWER)
        others = [i for i in trained if messages[i]["role"] != "assistant"]
        if not others:
            return self._answers(messages, trained, conversation)
        said = self._by_contents(messages, others, conversation)
        if len(others) == len(trained):
            return Marked(said, [-1] * len(others))
        answers = self._answers(messages, [i for i in trained if i not in others], conversation)
        return merged_marks(answers, said)

    def _answers(self, messages: list[Message], trained: Collection[int], conversation: Conversation) -> Marked:
        if self.template.program.has_generation:
            return self._by_generation(messages, trained, conversation)
        return self._by_prefixes(messages, trained, conversation)

    def text(self, conversation: Conversation) -> str:
        """The text of a whole conversation without marks."""
        return self.plain(self.as_the_template_wants(conversation.messages), conversation)

    def plain(self, messages: list[Message], conversation: Conversation, *, prompt: bool = False) -> str:
        """The text without marks; with `prompt` what a model gets to write the next turn."""
        return unmarked(self._run(self.template.unmarked, messages, conversation, prompt=prompt))

    def _prompt(self, messages: list[Message], i: int, conversation: Conversation) -> str:
        """What a model gets to write message i."""
        try:
            return self.plain(messages[:i], conversation, prompt=True)
        except RenderError as error:
            if i:
                raise
            raise PromptDiffersError(
                f"message 0 is an answer, but {self.template.name} has no prompt for it"
            ) from error

    def trained(self, conversation: Conversation) -> Collection[int]:
        """Which messages to train on: what their flags say, else what `train_on` says."""
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
            said = [message["role"] for message in messages]
            raise NoAssistantTurnError(f"no message to train on with train_on={self.train_on!r}; the roles are {said}")
        return trained

    def _check_content(self, conversation: Conversation, trained: Collection[int]) -> None:
        if self.train_on == EVERYTHING:
            return
        for i in trained:
            message = conversation.messages[i]
            if not (message["content"] or "").strip() and not message.get("tool_calls"):
                raise EmptyContentError(
                    f"message {i} ({message['role']}) is to be trained on, but is empty; drop the row, or switch the "
                    "check off with Gate(content=False)"
                )

    @cached_property
    def special_text(self) -> re.Pattern[str]:
        """Finds the text of a special token."""
        return re.compile("|".join(map(re.escape, self.specials)))

    def _foreign(self, conversation: Conversation) -> str | None:
        for i, message in enumerate(conversation.messages):
            found = self.special_text.search(_all_text(message))
            if found:
                return foreign_text(i, message["role"], found[0])
        found = self.special_text.search(_dumped(conversation.tools)) if conversation.tools else None
        return f"the tools have {found[0]!r} in them" if found else None

    def _check_nothing_lost(self, conversation: Conversation) -> None:
        for word, there in (
            ("tools", conversation.tools is not None),
            ("tool_calls", any("tool_calls" in message for message in conversation.messages)),
        ):
            if there and not self.template.mentions(word):
                raise ToolCallsError(
                    f"{self.template.name} does not write {word}: they would be left out; use a template that does, "
                    "such as 'qwen', or the tokenizer's own"
                )
        if not self.template.writes_thoughts:
            for i, message in enumerate(conversation.messages):
                if message.get("reasoning_content"):
                    raise ThoughtsLeftOutError(
                        f"message {i} ({message['role']}) has thoughts, which {self.template.name} does not write; use "
                        "a template that does, such as 'qwen', or take reasoning_content out of the messages before"
                    )

    def as_the_template_wants(self, messages: list[Message]) -> list[Message]:
        if not self.template.mentions("developer") and any(m["role"] == "developer" for m in messages):
            messages = [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]
        if self.wants_parts:
            messages = [{**m, "content": [{"type": "text", "text": m["content"] or ""}]} for m in messages]
        return messages

    def _by_shape(self, conversation: Conversation, trained: Collection[int]) -> str | None:
        assert self.shape is not None
        messages = conversation.messages
        if self.train_on == EVERYTHING:
            text = self.shape.render(messages, ())
            return None if text is None else START + text + END
        if any(messages[i]["role"] != "assistant" for i in trained):
            return None
        return self.shape.render(messages, trained)

    def _by_generation(self, messages: list[Message], trained: Collection[int], conversation: Conversation) -> Marked:
        text = self._run(self.template.program, messages, conversation)
        if self.template.program.captures and unmarked(text) != self.plain(messages, conversation):
            raise SpansNotFoundError(f"{self.template.name} changes its text where its generation blocks are marked")
        pieces = text.split(START)
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(pieces) - 1 != len(answers):
            raise SpansNotFoundError(
                f"{self.template.name} has {len(pieces) - 1} generation blocks for {len(answers)} assistant messages; "
                "it must write one for each"
            )
        prompts = None
        if self.check_prompts:
            prompts = self._prompts_of_blocks(pieces, answers, trained, messages, conversation)
        if len(trained) == len(answers):
            return Marked(text, prompts)
        chosen = set(trained)
        parts = [pieces[0]]
        for i, piece in zip(answers, pieces[1:]):
            parts.append(START + piece if i in chosen else piece.replace(END, "", 1))
        return Marked("".join(parts), prompts)

    def _prompts_of_blocks(
        self,
        pieces: list[str],
        answers: list[int],
        trained: Collection[int],
        messages: list[Message],
        conversation: Conversation,
    ) -> list[int] | None:
        """Where the prompts end, after checking that each is how the text begins; None if all end at their blocks."""
        ends, usual = [], True
        whole = None
        for at, i in enumerate(answers):
            if i not in trained:
                continue
            before = unmarked("".join(pieces[: at + 1]))
            prompt = self._prompt(messages, i, conversation)
            ends.append(len(before.encode()))
            if prompt == before:
                continue
            whole = unmarked("".join(pieces)) if whole is None else whole
            if not whole.startswith(prompt):
                raise _differing(i, prompt, whole)
            if len(prompt) > len(before) and self.check_headers:
                raise HeaderSupervisedError(
                    f"the generation block of message {i} begins before {prompt[len(before) :]!r}, which is part of "
                    "the prompt; move the block behind it"
                )
            ends[-1], usual = len(prompt.encode()), False
        return None if usual else ends

    def _by_prefixes(self, messages: list[Message], trained: Collection[int], conversation: Conversation) -> Marked:
        whole = self.plain(messages, conversation)
        parts, done = [], 0
        for i in trained:
            prompt = self._prompt(messages, i, conversation)
            grown = self.plain(messages[: i + 1], conversation) if i + 1 < len(messages) else whole
            stop = len(prompt) + self._length_written(grown[len(prompt) :])
            if not (grown.startswith(prompt) and whole.startswith(grown[:stop]) and len(prompt) >= done):
                return self._by_markers(whole, messages, trained, conversation)
            parts += [whole[done : len(prompt)], START, whole[len(prompt) : stop], END]
            done = stop
        return Marked("".join([*parts, whole[done:]]))

    def _length_written(self, turn: str) -> int:
        """How much of a turn the model writes: up to the token that ends it, not what the template has behind that."""
        ends = [at + len(text) for text in self.terminators if (at := turn.rfind(text)) >= 0]
        return max(ends, default=len(turn))

    def _by_markers(
        self, whole: str, messages: list[Message], trained: Collection[int], conversation: Conversation
    ) -> Marked:
        if self.markers is None:
            raise SpansNotFoundError(
                f"{self.template.name} has no generation blocks, and the text up to a turn does not begin the whole; "
                "pass markers=(what opens an assistant turn, what ends it)"
            )
        opening, closing = self.markers
        for i in trained:
            if closing in _all_text(conversation.messages[i]):
                raise TerminatorInsideError(
                    f"message {i} has {closing!r} in its content, so where its turn ends cannot be told from markers"
                )
        found = list(re.finditer(f"{re.escape(opening)}(.*?{re.escape(closing)})", whole, re.DOTALL))
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if len(found) != len(answers) or whole.count(opening) != len(answers):
            raise SpansNotFoundError(
                f"{len(found)} turns between the markers {opening!r} and {closing!r} for {len(answers)} assistant "
                "messages"
            )
        parts, done = [], 0
        for i, match in zip(answers, found):
            if i not in trained:
                continue
            if self.check_prompts:
                prompt = self._prompt(messages, i, conversation)
                if prompt != whole[: match.start(1)]:
                    raise _differing(i, prompt, whole)
            parts += [whole[done : match.start(1)], START, match[1], END]
            done = match.end()
        return Marked("".join([*parts, whole[done:]]))

    def _by_contents(self, messages: list[Message], chosen: Collection[int], conversation: Conversation) -> str:
        """The text with marks around the contents of these messages."""
        whole = self.plain(messages, conversation)
        for trim in (False, True):  # a template that trims would stop at the marks
            given = []
            for i, message in enumerate(messages):
                content = message["content"]
                if i in chosen and isinstance(content, str):
                    message = {**message, "content": START + (content.strip() if trim else content) + END}
                given.append(message)
            text = self._run(self.template.compiled(marks=False), given, conversation)
            if unmarked(text) == whole and text.count(START) == text.count(END) == len(chosen):
                return text
        raise SpansNotFoundError(
            f"{self.template.name} does not write the contents of the messages as they are, so where they stand cannot "
            f"be told for train_on={self.train_on!r}; train on assistant turns only"
        )

    def given(self, messages: list[Message], tools: list[Any] | None = None, *, prompt: bool = False) -> dict[str, Any]:
        """The variables of a template."""
        from_row = {"messages": messages, "tools": tools, "add_generation_prompt": prompt}
        return {**self.variables, **from_row, "strftime_now": clock(self.now)}

    def _run(
        self, program: Program, messages: list[Message], conversation: Conversation, *, prompt: bool = False
    ) -> str:
        try:
            return program.render(**self.given(messages, conversation.tools, prompt=prompt))
        except Exception as error:  # a template may fail in any way
            raise RenderError(f"{self.template.name}: {error}") from error


def foreign_text(message: int, role: str, text: str) -> str:
    """How a text of a special token in a message is told of."""
    return f"message {message} ({role}) has {text!r} in its content"


def _all_text(message: Message) -> str:
    """Everything a message says."""
    content = message["content"]
    if len(message) == 2 and isinstance(content, str):
        return content
    return f"{content or ''}\n{_dumped({key: value for key, value in message.items() if key != 'content'})}"


def _dumped(value: Any) -> str:
    return orjson.dumps(value, default=str).decode()


def _differing(i: int, prompt: str, whole: str) -> PromptDiffersError:
    same = next((n for n, (a, b) in enumerate(zip(prompt, whole)) if a != b), min(len(prompt), len(whole)))
    return PromptDiffersError(
        f"the prompt for message {i} is not how the training text begins: after {prompt[max(0, same - 40) : same]!r} "
        f"the prompt has {prompt[same : same + 40]!r}, the training text {whole[same : same + 40]!r}"
    )
