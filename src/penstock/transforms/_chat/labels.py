"""Chats with labels are no plain chats: refused until somebody says what the labels are for."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

from penstock.errors import SchemaError
from penstock.store.labels import label_column

__all__ = ["refuse_labels"]


def refuse_labels(schema: pa.Schema, kept: Collection[str]) -> None:
    """Refuse rows with labels that nobody asked to keep: a bad answer would be trained on as a good one is."""
    name = label_column(schema)
    if name is not None and name not in kept:
        raise SchemaError(
            f"the column {name!r} says which answers are good and which are bad (KTO), and as plain chats both would "
            "be trained on alike; use PreferenceDataLoader, or FormatPreference in a pipeline; pass preference=False "
            f"to a loader, or keep={name!r} to FormatChat, to train on all of them; or drop or rename the column"
        )
