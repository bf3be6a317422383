"""Values that a source kept as JSON text, because no one type fits them all, read back.

Such a field, at any depth of a schema, says so in its metadata. Only there is text JSON: a plain string has its quotes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pyarrow as pa

from penstock.files.json_values import loads
from penstock.transforms._chat.problems import MalformedChatError

__all__ = ["KEY", "TEXT", "Reader", "is_json_text", "reader"]

KEY, TEXT = b"penstock.json", b"text"

Reader = Callable[[Any], Any]


def is_json_text(field: pa.Field) -> bool:
    """Whether the values of the field are JSON."""
    return isinstance(field.type, pa.JsonType) or bool((field.metadata or {}).get(KEY) == TEXT)


def reader(field: pa.Field) -> Reader | None:
    """What makes of a value of this field what it was; None if nothing in it is JSON text."""
    if is_json_text(field):
        return partial(_read, field.name)
    kind = field.type
    if pa.types.is_struct(kind):
        of_fields = {child.name: made for child in kind if (made := reader(child)) is not None}
        return partial(_read_struct, of_fields) if of_fields else None
    if pa.types.is_map(kind):
        of_items = reader(kind.item_field)
        return partial(_read_map, of_items) if of_items is not None else None
    if hasattr(kind, "value_field"):  # a list of any kind
        of_values = reader(kind.value_field)
        return partial(_read_list, of_values) if of_values is not None else None
    return None


def _read(name: str, text: Any) -> Any:
    if text is None:
        return None
    try:
        return loads(text)
    except ValueError as wrong:
        raise MalformedChatError(f"{name!r} should be JSON, as its schema says ({wrong}): {text!r:.80}") from None


def _read_struct(of_fields: Mapping[str, Reader], value: Any) -> Any:
    if value is None:
        return None
    return {key: of_fields[key](item) if key in of_fields else item for key, item in value.items()}


def _read_list(of_values: Reader, values: Any) -> Any:
    return None if values is None else [of_values(value) for value in values]


def _read_map(of_items: Reader, pairs: Any) -> Any:
    return None if pairs is None else [(key, of_items(item)) for key, item in pairs]
