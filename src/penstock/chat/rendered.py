"""A rendered conversation: its text, which spans of it are trained on, and where the prompt of each ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.chat.marks import END, START
from penstock.chat.spans import Ints, Spans

__all__ = ["NO_PROMPT", "Marked", "Turn", "prompt_ends"]

NO_PROMPT = -1


@dataclass(frozen=True, slots=True, order=True)
class Turn:
    """A stretch of a text to train on, in characters, and where the prompt that it answers ends."""

    start: int
    stop: int
    prompt: int = NO_PROMPT
    message: int = NO_PROMPT


@dataclass(slots=True)
class Marked:
    """The text of a conversation with its marks, and where the prompt of each marked turn ends."""

    text: str
    prompts: list[int] | None = None
    """In bytes of the text without marks, -1 for what answers no prompt; None if all end where their turns begin."""
    foreign: str | None = None
    """What a message says that would be read as a special token, and where."""
    lost: Sequence[str] = field(default=())
    """Kinds of parts that are not in the text, and were allowed to be lost."""

    @classmethod
    def of(cls, text: str, turns: Sequence[Turn], *, lost: Sequence[str] = ()) -> Marked:
        """The text with marks around some turns of it, which do not overlap."""
        parts, prompts, done = [], [], 0
        usual = True
        for turn in sorted(turns):
            parts += [text[done : turn.start], START, text[turn.start : turn.stop], END]
            done = turn.stop
            usual = usual and turn.prompt == turn.start
            prompts.append(NO_PROMPT if turn.prompt < 0 else len(text[: turn.prompt].encode()))
        return cls("".join([*parts, text[done:]]), None if usual else prompts, lost=lost)


def prompt_ends(marked: Sequence[Marked], spans: Spans) -> Ints:
    """For each span where its prompt ends, in bytes of the column; -1 where there is none."""
    ends = spans.starts.copy()
    if all(row.prompts is None for row in marked):
        return ends
    at = np.searchsorted(spans.rows, np.arange(len(marked) + 1))
    for i, row in enumerate(marked):
        if row.prompts is not None:
            given = np.array(row.prompts)
            ends[at[i] : at[i + 1]] = np.where(given < 0, -1, given + spans.offsets[i])
    return ends
