"""Texts with marks in them, and where their prompts end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.transforms._chat.marks import END, START, unmarked
from penstock.transforms._chat.spans import Ints, Spans

__all__ = ["Marked", "merged_marks", "prompt_ends"]


@dataclass(slots=True)
class Marked:
    """The text of a conversation with its marks, and where the prompt of each marked turn ends."""

    text: str
    prompts: list[int] | None = None
    """In bytes of the text without marks, -1 for what answers no prompt; None if all end where their turns begin."""
    foreign: str | None = None
    """What a message says that would be read as a special token, and where."""


def prompt_ends(marked: Sequence[Marked], spans: Spans) -> Ints:
    """For each span where its prompt ends, in bytes of the column; -1 where there is none."""
    ends = spans.starts.copy()
    if all(row.prompts is None for row in marked):
        return ends
    at = np.searchsorted(spans.rows, np.arange(len(marked) + 1))
    for i, row in enumerate(marked):
        if row.prompts is not None:
            given = np.array(row.prompts)
            ends[at[i] : at[i + 1]] = np.where(given < 0, -1, given + spans.bounds[i])
    return ends


def merged_marks(answers: Marked, said: str) -> Marked:
    """Both kinds of marks in one text."""
    text = unmarked(said)
    spans = [(*span, True) for span in _spans(answers.text)] + [(*span, False) for span in _spans(said)]
    prompts = iter(answers.prompts or ())
    ends, parts, done = [], [], 0
    for start, stop, answer in sorted(spans):
        parts += [text[done:start], START, text[start:stop], END]
        done = stop
        at = next(prompts, None) if answer else -1
        ends.append(len(text[:start].encode()) if at is None else at)
    return Marked("".join([*parts, text[done:]]), ends)


def _spans(text: str) -> list[tuple[int, int]]:
    """Where the marks are, in characters of the text without them."""
    spans, at = [], 0
    first, *pieces = text.split(START)
    at = len(first)
    for piece in pieces:
        inside, _, rest = piece.partition(END)
        spans.append((at, at + len(inside)))
        at += len(inside) + len(rest)
    return spans
