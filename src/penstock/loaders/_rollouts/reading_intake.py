"""Whatever rollouts were handed over in, as columns: nothing is copied that can be looked at where it is."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.listing import list_files, split_suffix
from penstock.loaders._rollouts.reading_columns import Column, as_objects, host
from penstock.loaders._rollouts.reading_problems import Places
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.opening import open_source
from penstock.transforms._chat.jsontext import reader

__all__ = ["JSON_ROLE", "Intake", "take_in"]

JSON_ROLE = b"rollout-json"
"""The role of columns that hold JSON text, in Arrow data of our own making."""
BATCH_ROWS = 1 << 16
OF_THE_BATCH = ("num_items_in_batch",)
"""What TRL has in a dict of columns and is none: it follows from the others."""
SEVERAL = "a list of Rollout, dicts or dataclasses, paths, an Arrow table, a dict of columns, or a RolloutTable"


@dataclass(frozen=True, slots=True)
class Intake:
    """Columns under the names they were given, and where each row came from."""

    columns: dict[str, Column]
    rows: int
    places: Places
    arrow: bool
    """Whether rows that lack a key of a struct have it all the same, as null."""


def take_in(data: Any, first_row: int = 0) -> Intake:
    """The columns of data in any of the forms that `read_rollouts` takes."""
    if isinstance(data, str | os.PathLike):
        return _from_files(data)
    if isinstance(data, pa.RecordBatch):
        return _from_table(pa.Table.from_batches([data]), Places(first_row=first_row))
    if isinstance(data, pa.Table):
        return _from_table(data, Places(first_row=first_row))
    if hasattr(data, "batch") and hasattr(data, "non_tensor_batch"):  # verl's DataProto
        tensors = data.batch if data.batch is not None else {}
        return _from_columns({**dict(tensors.items()), **dict(data.non_tensor_batch)}, Places(first_row=first_row))
    if isinstance(data, Mapping):
        return _from_columns(data, Places(first_row=first_row))
    if hasattr(data, "__arrow_c_stream__"):
        return _from_table(pa.table(data), Places(first_row=first_row))
    if is_dataclass(data) or not isinstance(data, Iterable):
        raise ConfigError(f"expected {SEVERAL}, got {type(data).__name__}; put a single rollout into a list")
    items = list(data)
    first = items[0] if items else None
    if isinstance(first, str | os.PathLike):
        return _from_files(items)
    if isinstance(first, pa.RecordBatch | pa.Table):
        tables = [pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item for item in items]
        return _from_table(pa.concat_tables(tables, promote_options="default"), Places(first_row=first_row))
    return _from_rows(items, Places(first_row=first_row))


# -- files and Arrow ---------------------------------------------------------------------------------------------------


def _from_files(paths: Any) -> Intake:
    files = list_files(paths)
    json = {*JsonlSource.suffixes, *JsonSource.suffixes}
    # Free metadata is of any type in any row. Fields whose types do not go together come as JSON text, marked as such.
    options = {"mixed": "json"} if all(split_suffix(file)[0] in json for file in files) else {}
    source: Any = open_source(files, **options)
    places = Places()
    batches: list[pa.RecordBatch] = []
    rows = 0
    try:
        while (batch := source.next_batch(BATCH_ROWS)) is not None:
            if not batch.num_rows:
                continue
            origin = source.origin()
            places.starts.append(rows)
            places.files.append((origin.file, origin.row) if origin is not None else (str(paths), rows))
            batches.append(batch)
            rows += batch.num_rows
    finally:
        if hasattr(source, "close"):
            source.close()
    return _from_table(pa.Table.from_batches(batches, batches[0].schema if batches else pa.schema([])), places)


def _from_table(table: pa.Table, places: Places) -> Intake:
    names = table.column_names
    if len(set(names)) < len(names):
        raise SchemaError(f"two columns have the same name; the columns are {names}")
    columns: dict[str, Column] = {}
    for field in table.schema:
        column = table.column(field.name)
        read = reader(field)
        if (field.metadata or {}).get(b"penstock.role") == JSON_ROLE:
            from penstock.loaders._rollouts.travelling import from_json

            columns[field.name] = from_json(column)
        else:
            columns[field.name] = column if read is None else [read(cell) for cell in as_objects(column)]
    return Intake(columns, table.num_rows, places, arrow=True)


# -- Python objects ----------------------------------------------------------------------------------------------------


def _from_columns(data: Mapping[Any, Any], places: Places) -> Intake:
    """A dict of columns: tensors, arrays and lists, all of as many rows."""
    columns: dict[str, Column] = {}
    for name, values in data.items():
        if values is None or name in OF_THE_BATCH:
            continue
        if (
            isinstance(values, str | bytes | Mapping)
            or getattr(values, "ndim", 1) == 0
            or not hasattr(values, "__len__")
        ):
            raise ConfigError(
                f"{name!r} of a dict is {values!r:.60}, and a dict holds columns: a list or an array with an entry per "
                "rollout; put a single rollout into a list"
            )
        if isinstance(values, pa.Array):
            columns[str(name)] = pa.chunked_array([values])
        elif isinstance(values, pa.ChunkedArray):
            columns[str(name)] = values
        elif hasattr(values, "__array__") or hasattr(values, "__dlpack__"):
            array = host(values)
            columns[str(name)] = list(array) if array.dtype.kind in "OUS" else array
        else:
            columns[str(name)] = list(values)
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise SchemaError(
            f"the columns of a dict have as many entries as there are rollouts, got {lengths}; put a single rollout "
            "into a list"
        )
    first = next(iter(columns.values()), None)
    if lengths and not any(_holds_rows(column) for column in columns.values()):
        raise ConfigError(
            f"a dict is columns, each with an entry per rollout, and none of {list(lengths)} holds lists or texts "
            f"({next(iter(lengths))!r} has {list(first or ())[:3]!r}...); put a single rollout into a list"
        )
    return Intake(columns, next(iter(lengths.values()), 0), places, arrow=False)


def _holds_rows(column: Column) -> bool:
    if isinstance(column, np.ndarray):
        return column.ndim > 1
    if isinstance(column, pa.ChunkedArray):
        return True
    return any(hasattr(cell, "__len__") for cell in column)


def _from_rows(items: Sequence[Any], places: Places) -> Intake:
    """Dicts, dataclasses and named tuples, of one kind or of several."""
    names: dict[str, None] = {}
    of_type: dict[type, tuple[str, ...]] = {}
    rows: list[Mapping[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, dict):
            row: Mapping[str, Any] = item
        elif is_dataclass(item) and not isinstance(item, type):
            kind = type(item)
            if kind not in of_type:
                of_type[kind] = tuple(field.name for field in fields(item))
            row = {name: value for name in of_type[kind] if (value := getattr(item, name, None)) is not None}
        elif isinstance(item, Mapping):
            row = item
        elif hasattr(item, "_asdict"):
            row = item._asdict()
        else:
            file, at = places.of(number)
            raise DataError(
                f"row {at} is {type(item).__name__} {item!r:.60}, expected a Rollout, a dict or a dataclass",
                file=file,
                row=at,
            )
        if names.keys() != row.keys():
            names.update(dict.fromkeys(row))
        rows.append(row)
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(f"the keys of a rollout are names, got {name!r}")
    columns: dict[str, Column] = {}
    for name in names:
        cells = [row.get(name) for row in rows]
        if any(cell is not None for cell in cells):
            columns[name] = cells
    return Intake(columns, len(rows), places, arrow=False)
