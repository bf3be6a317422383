"""Prompts and what answers them, put together so that nothing is said twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.chat.messages import Message, as_messages
from penstock.chat.problems import MalformedChatError

__all__ = ["Said", "answered", "in_common", "said"]

SYSTEM = ("system", "developer")
WAITING = ("user", "tool")
"""Roles behind which it is the assistant's turn."""


@dataclass(frozen=True, slots=True)
class Said:
    """Some messages, and what each says about training on it."""

    messages: list[Message]
    flags: Sequence[bool | None]

    def __getitem__(self, part: slice) -> Said:
        return Said(self.messages[part], self.flags[part])

    def __add__(self, other: Said) -> Said:
        return Said([*self.messages, *other.messages], [*self.flags, *other.flags])

    @property
    def unflagged(self) -> Said:
        """The same, not to be trained on."""
        return Said(self.messages, [False] * len(self.messages))


def said(given: Any, role: str, what: str) -> Said:
    """One side of a pair as messages: text is what that role said."""
    if isinstance(given, str):
        given = [{"role": role, "content": given}]
    if not isinstance(given, list | dict):
        raise MalformedChatError(f"{what}: expected text or messages, got {given!r:.80}")
    if not given:
        raise MalformedChatError(f"{what} is empty")
    messages, flags = as_messages(given)
    return Said(messages, flags or [None] * len(messages))


def answered(prompt: Said, answer: Said, what: str) -> Said:
    """The prompt with an answer behind it. Some data sets repeat the prompt in front of the answer: it counts once."""
    system, asked = _parted(prompt)
    own_system, rest = _parted(answer)
    n = len(asked.messages)
    if _alike(asked, rest[:n]) and len(rest.messages) > n:
        if system.messages and own_system.messages and not _alike(system, own_system):
            raise MalformedChatError(f"the prompt and {what} begin with different system messages; keep one of them")
        opening = system if system.messages else own_system
        return (opening + asked).unflagged + rest[n:]
    first, last = answer.messages[0]["role"], prompt.messages[-1]["role"]
    if first in SYSTEM or (first == "user" and last in WAITING):
        raise MalformedChatError(
            f"{what} begins with a message of role {first}, and not with the prompt, which ends with one of role "
            f"{last}: it neither answers the prompt nor repeats it; drop the column 'prompt', or mend the row"
        )
    return prompt.unflagged + answer


def in_common(one: Said, other: Said) -> int:
    """How many messages both begin with, when each has at least one more."""
    shared = 0
    while shared < min(len(one.messages), len(other.messages)) - 1 and _alike(
        one[shared : shared + 1], other[shared : shared + 1]
    ):
        shared += 1
    return shared


def _parted(given: Said) -> tuple[Said, Said]:
    """What the system says in front, and the rest."""
    roles = [message["role"] in SYSTEM for message in given.messages]
    n = roles.index(False) if False in roles else len(roles)
    return given[:n], given[n:]


def _alike(one: Said, other: Said) -> bool:
    """Whether the same is said by the same; ids and the like do not matter."""
    keys = ("role", "content", "tool_calls")
    parts = [[tuple(message.get(key) for key in keys) for message in side.messages] for side in (one, other)]
    return parts[0] == parts[1]
