"""Chosen rows of a batch of chats, whose texts may be string views inside of messages.

Arrow takes no rows from arrays with views in them: neither from the views nor from lists and structs of them.
"""

from __future__ import annotations

import pyarrow as pa

from penstock.arrays.ragged import Ints
from penstock.arrays.text import VIEWS, arrow_of


def chosen_rows(batch: pa.RecordBatch, rows: Ints) -> pa.RecordBatch:
    """The rows at these places, in this order, with the schema of the batch."""
    places = arrow_of(rows)
    schema = pa.schema([_without_views(field) for field in batch.schema], metadata=batch.schema.metadata)
    if schema.equals(batch.schema):
        return batch.take(places)
    return batch.cast(schema).take(places).cast(batch.schema)


def _without_views(field: pa.Field) -> pa.Field:
    """The field with usual texts.

    List views stay: from them Arrow takes rows whatever they hold. JSON in string views stays too: Arrow 26 would cast
    it to wrong texts without an error, and taking rows of it is one.
    """
    kind = field.type
    if kind in VIEWS:
        return field.with_type(VIEWS[kind])
    if pa.types.is_struct(kind):
        return field.with_type(pa.struct([_without_views(child) for child in kind]))
    if pa.types.is_map(kind):
        key, item = _without_views(kind.key_field), _without_views(kind.item_field)
        return field.with_type(pa.map_(key, item, keys_sorted=kind.keys_sorted))
    if pa.types.is_fixed_size_list(kind):
        return field.with_type(pa.list_(_without_views(kind.value_field), kind.list_size))
    if pa.types.is_list(kind):
        return field.with_type(pa.list_(_without_views(kind.value_field)))
    if pa.types.is_large_list(kind):
        return field.with_type(pa.large_list(_without_views(kind.value_field)))
    return field
