"""Schemas of sources: choosing columns, and keeping a schema in a state that stays small however wide the data is."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Sequence

import pyarrow as pa

from penstock.errors import ConfigError, SchemaError

__all__ = ["check_columns", "is_schema", "project", "schema_mark", "schema_of"]

_MOST_CHARACTERS = 2048


def schema_mark(schema: pa.Schema) -> str:
    """The schema as text; a very wide one as a fingerprint, which costs a resumed source another look at its input."""
    text = base64.b85encode(zlib.compress(schema.serialize().to_pybytes(), 9)).decode()
    if len(text) <= _MOST_CHARACTERS:
        return text
    columns = "\n".join(f"{field.name!r} {field.type}" for field in schema)
    return f"blake2b {hashlib.blake2b(columns.encode(), digest_size=16).hexdigest()}"


def is_schema(mark: str) -> bool:
    """Whether a mark holds the schema itself."""
    return " " not in mark


def schema_of(mark: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(base64.b85decode(mark))))


def project(schema: pa.Schema, columns: Sequence[str] | None, where: str) -> pa.Schema:
    """Only the columns asked for, in that order; each of them must be there."""
    if columns is None:
        return schema
    for name in columns:
        if name not in schema.names:
            raise SchemaError(f"column {name!r} not in {where}; it has {schema.names}")
    return pa.schema([schema.field(name) for name in columns])


def check_columns(columns: Sequence[str] | None) -> list[str] | None:
    """The `columns` argument of a source, as a list."""
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ConfigError(f"columns must be a list of at least one name, got {columns!r}")
    return list(columns) if columns is not None else None
