"""Prompts with the answers of others: what KTO estimates its KL term from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.loaders.collation import BatchForm, Tokens

__all__ = ["Mismatched", "collate_mismatched", "partners_of"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mismatched:
    """Rows of a table, by their numbers there: prompt `rows[i]` is followed by the answer of `others[i]`."""

    rows: Ints
    others: Ints
    prompts: Ints
    """Tokens of the prompts of `rows`."""
    begins: Ints
    """Where the answers of `others` begin."""
    answers: Ints
    """Tokens of these answers that there is room for."""
    row_of: Ints
    """The row of the batch that each goes to."""


def partners_of(rows: Ints, total: int) -> Ints:
    """Whose answer goes with each prompt of a global batch: that of the row before it, the last for the first.

    A row that is alone in its batch takes the answer of the next of all rows.
    """
    return np.roll(rows, 1) if len(rows) != 1 else (rows + 1) % total


def collate_mismatched(
    parts: Mismatched, table: Tokens, form: BatchForm, *, count: int, width: int
) -> dict[str, npt.NDArray[Any]]:
    """`KL_input_ids`, `KL_attention_mask` and `KL_completion_mask`, of `count` rows."""
    ids = np.full((count, width), form.pad_id, form.integer)
    attended = np.zeros((count, width), form.integer)
    learned = np.zeros(count * width, np.bool_)
    whole = parts.prompts + parts.answers
    at = parts.row_of * width
    if form.side == "left":
        at = at + width - whole
    table.copy(parts.rows, np.zeros_like(at), parts.prompts, ids.reshape(-1), at)
    table.copy(parts.others, parts.begins, parts.answers, ids.reshape(-1), at + parts.prompts)
    table.copy_mask(parts.others, parts.begins, parts.answers, learned, at + parts.prompts)
    for low, length in zip(at.tolist(), whole.tolist()):
        attended.reshape(-1)[low : low + length] = 1
    blank = np.setdiff1d(np.arange(count), parts.row_of)
    attended[blank, -1 if form.side == "left" else 0] = 1
    return {
        "KL_input_ids": ids,
        "KL_attention_mask": attended,
        "KL_completion_mask": learned.reshape(count, width).astype(form.integer),
    }
