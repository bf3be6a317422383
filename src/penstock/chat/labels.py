"""Chats with labels are no plain chats: refused until somebody says what the labels are for."""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from penstock.chat.messages import FLAGS
from penstock.errors import SchemaError
from penstock.store.preferences import label_column, rejected_column

__all__ = ["refuse_flags", "refuse_label_values", "refuse_labels"]

_NUMBERS = ({"0", "1"}, {"0.0", "1.0"})
_WORDS = ({"true", "false"}, {"desirable", "undesirable"}, {"chosen", "rejected"}, {"good", "bad"})


def refuse_flags(schema: pa.Schema, kept: Collection[str]) -> None:
    """Refuse columns that say of whole rows what to train on: it is messages that say so here."""
    for name in FLAGS:
        if name in schema.names and name not in kept:
            raise SchemaError(
                f"the column {name!r} looks as if it said of whole rows whether to train on them, which is not obeyed; "
                f"leave such rows out before, put {name!r} into the messages, or drop, rename or keep= the column"
            )


def refuse_label_values(batch: pa.RecordBatch, kept: Collection[str]) -> None:
    """Refuse a `label` that is no boolean, and yet says good or bad in every row."""
    at = batch.schema.get_field_index("label")
    if at < 0 or "label" in kept or pa.types.is_nested(batch.schema.field(at).type):
        return
    values = {str(value).strip().lower() for value in pc.unique(batch.column(at)).to_pylist() if value is not None}
    if values in _NUMBERS or (values and any(values <= words for words in _WORDS)):
        raise SchemaError(
            f"the column 'label' says in every row whether an answer is good ({', '.join(sorted(values))}), and as "
            "plain chats all would be trained on alike; make it a boolean and use PreferenceDataLoader, or "
            "FormatPreference in a pipeline; or pass keep='label' to FormatChat, or drop or rename the column"
        )


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
