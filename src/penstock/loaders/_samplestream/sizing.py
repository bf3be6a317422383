"""About how many bytes a sample takes, without packing it; and rows of a chunk that were left for later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

__all__ = ["rest_of", "rough_bytes", "with_rest"]

_REST = b"penstock.rest"
_SMALL = 8
_NUMBERS = frozenset((int, float, bool, type(None)))
_LOOKED_AT = 4
"""Items of a long list, at either end, that stand for the others."""
_DEEPEST = 4
"""Below that nothing is looked at: a value may contain itself."""


def rough_bytes(value: Any, depth: int = 0) -> int:
    """Right for arrays, texts and bytes; long lists are taken to have items like the first and the last ones."""
    kind = type(value)
    if kind in _NUMBERS or depth > _DEEPEST:
        return _SMALL
    if kind is str or kind is bytes:
        return len(value)
    if kind is dict:
        depth += 1
        nbytes = 0
        for each in value.values():
            nbytes += rough_bytes(each, depth)
        return nbytes
    if kind is list or kind is tuple:
        return _of_items(value, depth + 1)
    known = getattr(value, "nbytes", None)
    if known is not None:
        return int(known)
    return rough_bytes(dict(value), depth) if isinstance(value, Mapping) else _SMALL


def with_rest(batch: pa.RecordBatch, rows: range) -> pa.RecordBatch:
    """The batch, with a note that `rows` of the dataset belong behind it and are still to be fetched."""
    note = f"{rows.start} {rows.stop}".encode()
    return batch.replace_schema_metadata({**(batch.schema.metadata or {}), _REST: note})


def rest_of(batch: pa.RecordBatch) -> range:
    """The rows of the dataset that belong behind the batch; mostly none."""
    note = (batch.schema.metadata or {}).get(_REST)
    return range(*map(int, note.split())) if note is not None else range(0)


def _of_items(items: Sequence[Any], depth: int) -> int:
    if len(items) > 2 * _LOOKED_AT:
        if type(items[0]) in _NUMBERS and type(items[-1]) in _NUMBERS:
            return _SMALL * len(items)
        looked_at = [*items[:_LOOKED_AT], *items[-_LOOKED_AT:]]
        return sum(rough_bytes(each, depth) for each in looked_at) * len(items) // len(looked_at)
    return sum(rough_bytes(each, depth) for each in items)
