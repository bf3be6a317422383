"""Columns that make more of a chat than a chat: labels as KTO's data has them, and rejected answers."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["LABELS", "label_column", "rejected_column"]

LABELS = ("label", "kto_tag")
"""Names of columns that say whether an answer is a good one."""
REJECTED = ("rejected", "rejected_response", "rejected_messages")
"""Names of columns with answers that are not to be learned."""


def label_column(schema: pa.Schema) -> str | None:
    """The column with the labels: a boolean `label`, or `kto_tag` of any type; None if the rows have none."""
    for name in LABELS:
        at = schema.get_field_index(name)
        if at >= 0 and (name == "kto_tag" or pa.types.is_boolean(schema.field(at).type)):
            return name
    return None


def rejected_column(schema: pa.Schema) -> str | None:
    """A column of rejected answers without one of chosen answers beside it; None if there is none."""
    return None if "chosen" in schema.names else next((name for name in REJECTED if name in schema.names), None)
