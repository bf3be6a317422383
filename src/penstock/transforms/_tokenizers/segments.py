"""Special tokens in text, for tokenizers that know none: the text is cut where one stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from penstock.transforms._tokenizers.ragged import Ints
from penstock.transforms._tokenizers.reference import Offsets

__all__ = ["encode_segments"]


def encode_segments(
    texts: Sequence[str], special: Mapping[str, int], encode: Callable[[list[str]], Sequence[Offsets]]
) -> list[Offsets]:
    """Each text with its special tokens as single ids, and what lies between them as `encode` has it.

    Every stretch is encoded as a text of its own. Of two special tokens at the same place, the longer wins.
    """
    pattern = re.compile("(" + "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)) + ")")
    cut = [pattern.split(text) if special else [text] for text in texts]
    plain = iter(encode([part for parts in cut for part in parts[::2] if part]))
    whole = []
    for parts in cut:
        ids: list[Ints] = []
        starts: list[Ints] = []
        ends: list[Ints] = []
        at = 0
        for number, part in enumerate(parts):
            if part:
                found = _token(special[part], len(part)) if number % 2 else next(plain)
                ids.append(found.ids)
                starts.append(found.starts + at)
                ends.append(found.ends + at)
            at += len(part)
        none = np.zeros(0, np.int64)
        whole.append(Offsets(*(np.concatenate([none, *given]) for given in (ids, starts, ends))))
    return whole


def _token(token: int, length: int) -> Offsets:
    return Offsets(np.array([token]), np.array([0]), np.array([length]))
