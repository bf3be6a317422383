"""Prompts with the answers of others: what KTO estimates its KL term from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.collate import BatchForm, Tokens
from penstock.errors import ConfigError
from penstock.store import Store
from penstock.store.manifest import Manifest
from penstock.store.preferences import label_column

__all__ = ["Mismatched", "check_plain", "check_preferences", "collate_mismatched", "partners_of", "stored_kind"]


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


_CHOSEN, _PROMPT_LENGTH = "chosen_input_ids", "prompt_length"


def stored_kind(manifest: Manifest) -> str | None:
    """`pairs`, `labels`, or None for a store of plain text or chats."""
    if manifest.tokens_column == _CHOSEN:
        return "pairs"
    return "labels" if manifest.mask_column is not None and label_column(manifest.schema) is not None else None


def check_plain(manifest: Manifest, shown: object, preference: bool | None = None) -> None:
    """Refuse a store of preferences where plain text or chats are read, unless `preference=False` says they are."""
    kind = stored_kind(manifest)
    if kind is None or preference is False:
        return
    what, loss = "pairs of chosen and rejected answers", "'rejected' would be left out"
    if kind == "labels":
        what, loss = "answers with labels (KTO)", "bad answers would be trained on as good ones are"
    raise ConfigError(
        f"{shown} holds {what}, and read as plain chats {loss}; use PreferenceDataLoader, or "
        "ConversationDataLoader(..., preference=False) to train on them all the same"
    )


def check_preferences(stores: Sequence[Store]) -> str:
    """`pairs` or `labels`: what these stores hold, which were prepared as preferences or are refused."""
    for store in stores:
        if stored_kind(store.manifest) is None or _PROMPT_LENGTH not in store.schema.names:
            raise ConfigError(
                f"{store.shown} was not prepared as preferences: it has the columns {store.schema.names}, and pairs "
                "have chosen_input_ids, rejected_input_ids and prompt_length, labelled answers input_ids, label and "
                "prompt_length; prepare the raw files with preference=True (--preference)"
            )
    return str(stored_kind(stores[0].manifest))  # columns that differ are refused wherever stores are read as one
