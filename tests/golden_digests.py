"""Digests of batches: type, shape and bytes of every field, and all metadata."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

_FIELDS = (
    "input_ids",
    "attention_mask",
    "labels",
    "loss_mask",
    "position_ids",
    "document_ids",
    "cu_seqlens",
    "max_seqlen",
    "num_items_in_batch",
    "num_tokens",
)
_INTERNAL = ("layout",)
"""Objects in the metadata whose content is told by arrays beside them."""


def written(value: Any) -> bytes:
    """A value as bytes that differ whenever its type, shape or content does."""
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return b"objects" + written(value.tolist())
        return f"array {value.dtype.str} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes()
    if isinstance(value, np.generic):
        return f"number {value.dtype.str} ".encode() + value.tobytes()
    if isinstance(value, Mapping):
        parts = [written(str(name)) + written(value[name]) for name in sorted(value, key=str)]
        return b"mapping" + b"".join(f"{len(part)} ".encode() + part for part in parts)
    if isinstance(value, (list, tuple)):
        parts = [written(item) for item in value]
        return b"list" + b"".join(f"{len(part)} ".encode() + part for part in parts)
    if value is None or isinstance(value, (bool, int, float, str, bytes)):
        return f"{type(value).__name__} {value!r}".encode()
    raise TypeError(f"a batch holds a {type(value).__name__}, which has no digest yet: {value!r:.80}")


def digest(value: Any) -> str:
    return hashlib.blake2b(written(value), digest_size=8).hexdigest()


def fields_of(batch: Any) -> dict[str, Any]:
    """Every field of a batch, what a model is given, and its metadata, by name."""
    if not hasattr(batch, "metadata"):
        return dict(batch) if isinstance(batch, Mapping) else {"value": batch}
    found = {name: getattr(batch, name, None) for name in _FIELDS if getattr(batch, name, None) is not None}
    found |= {f"model {name}": value for name, value in dict(batch).items()}
    metadata = {name: value for name, value in batch.metadata.items() if name not in _INTERNAL}
    return found | {f"metadata {name}": value for name, value in metadata.items()}


def digests(batches: Iterable[Any]) -> dict[str, Any]:
    """One digest for each batch, and one for each field over all batches."""
    each, by_field = [], {}
    for batch in batches:
        fields = fields_of(batch)
        each.append(digest(fields))
        for name, value in fields.items():
            by_field.setdefault(name, []).append(digest(value))
    return {"batches": each, "fields": {name: digest(found) for name, found in sorted(by_field.items())}}


def difference(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Where two digests differ: the first batch, and the fields. Empty if they are the same."""
    if found == wanted:
        return ""
    names = sorted(found["fields"].keys() | wanted["fields"].keys())
    fields = [name for name in names if found["fields"].get(name) != wanted["fields"].get(name)]
    return f"{first_difference(found['batches'], wanted['batches'])}; fields that differ: {', '.join(fields)}"


def first_difference(found: Sequence[str], wanted: Sequence[str]) -> str:
    if len(found) != len(wanted):
        return f"{len(found)} batches, expected {len(wanted)}"
    for number, (one, other) in enumerate(zip(found, wanted)):
        if one != other:
            return f"batch {number} of {len(wanted)} differs"
    return ""
