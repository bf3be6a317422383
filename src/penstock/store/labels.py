"""The column that says whether an answer is a good one, as KTO's data has it."""

from __future__ import annotations

import pyarrow as pa

__all__ = ["LABELS", "label_column"]

LABELS = ("label", "kto_tag")
"""The names such a column has."""


def label_column(schema: pa.Schema) -> str | None:
    """The column with the labels: a boolean `label`, or `kto_tag` of any type; None if the rows have none."""
    for name in LABELS:
        at = schema.get_field_index(name)
        if at >= 0 and (name == "kto_tag" or pa.types.is_boolean(schema.field(at).type)):
            return name
    return None
