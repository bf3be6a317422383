"""Chats with labels are no plain chats: refused until somebody says what the labels are for."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.store.labels import label_column, rejected_column

__all__ = ["refuse_labels"]


def refuse_labels(schema: pa.Schema, kept: Collection[str]) -> None:
    """Refuse rows with labels, or rejected answers, that nobody asked to keep.

    A bad answer would be trained on as a good one is, and a rejected one lost.
    """
    rejected = rejected_column(schema)
    if rejected is not None and rejected not in kept:
        raise SchemaError(
            f"the column {rejected!r} holds rejected answers, and as plain chats the rows would lose them; name the "
            "columns of both answers 'chosen' and 'rejected', with the prompt in front in a column of its own, and use "
            "PreferenceDataLoader (FormatPreference in a pipeline); or pass preference=False to a loader, or "
            f"keep={rejected!r} to FormatChat, or drop or rename the column"
        )
    name = label_column(schema)
    if name is not None and name not in kept:
        raise SchemaError(
            f"the column {name!r} says which answers are good and which are bad (KTO), and as plain chats both would "
            "be trained on alike; use PreferenceDataLoader, or FormatPreference in a pipeline; pass preference=False "
            f"to a loader, or keep={name!r} to FormatChat, to train on all of them; or drop or rename the column"
        )
