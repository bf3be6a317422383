"""Data that is in memory already."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.states import StateFormat
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.json_types import json_texts, marked_json, with_json
from penstock.types import Schema, from_numpy, from_rows

__all__ = ["MemorySource"]

_STATE = StateFormat("rows in memory", "a MemorySource")


class MemorySource(Source):
    """Rows that are in memory: a list of dicts or of plain values (one column `value`), a dict of columns, an Arrow
    table or batch, a pandas DataFrame, a NumPy array (structured, or plain as one column `value`), or a dict of NumPy
    arrays. Arrow data and NumPy numbers are not copied. A DataFrame's index is a column if it has a name.
    """

    def __init__(self, data: Any, *, schema: pa.Schema | Any | None = None) -> None:
        self._kind = type(data).__name__
        self._values = data if schema is None and _is_untyped(data) else None
        """What has no types of its own, as it was given."""
        self._kept = False
        self._made: pa.Table | None = None
        try:
            self._made = _as_table(data, arrow_schema(schema)).replace_schema_metadata(None)
        except (SchemaError, pa.ArrowInvalid, pa.ArrowTypeError):
            if self._values is None:
                raise
            # No one type fits: a stage may want the columns as JSON, and otherwise it is told at the first look.
        self._first_row = self._row = 0

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    @property
    def _table(self) -> pa.Table:
        if self._made is None:
            self._made = _as_table(self._values, None).replace_schema_metadata(None)
        return self._made

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> bool:
        """Values that are no Arrow data have these columns as JSON text, for a stage that wants it; whether they do."""
        if self._kept or self._values is None or self._row:
            return self._kept or self._values is None
        named = [name for name in columns if name in _names(self._values)]
        table = _as_table(_with_json(self._values, named), None).replace_schema_metadata(None)
        self._made, self._kept = table.cast(marked_json(table.schema, named)), True
        return True

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self._table.num_rows:
            return None
        batch = self._table.slice(self._row, max_rows).to_batches()[0]  # to where a chunk ends: joining two would copy
        self._first_row = self._row
        self._row += batch.num_rows
        return batch

    def size_hint(self) -> int | None:
        return int(self._table.num_rows)

    def origin(self) -> Origin | None:
        return Origin("<memory>", self._first_row)

    def reset(self) -> None:
        """Back to the first row."""
        self._first_row = self._row = 0

    def state_dict(self) -> State:
        return _STATE.write({"row": self._row, "rows": self._table.num_rows})

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        if state["rows"] != self._table.num_rows:
            raise ResumeError(f"the state was saved over {state['rows']} rows, there are {self._table.num_rows} now")
        self._row = state["row"]

    def __repr__(self) -> str:
        return f"MemorySource({self._kind}, {self._table.num_rows} rows)"


def _is_untyped(data: Any) -> bool:
    """Rows that are dicts, a dict of lists, or a DataFrame: Python values, which have no one type for all rows."""
    if isinstance(data, (list, tuple)):
        return bool(data) and isinstance(data[0], Mapping)
    if isinstance(data, Mapping):
        return any(isinstance(column, (list, tuple)) for column in data.values())
    return type(data).__module__.partition(".")[0] == "pandas"


def _names(data: Any) -> list[str]:
    rows = isinstance(data, (list, tuple))
    return list(dict.fromkeys(name for row in data for name in row) if rows else data)


def _with_json(data: Any, named: Sequence[str]) -> Any:
    """The values with some columns as JSON text."""
    if isinstance(data, (list, tuple)):
        return with_json(data, named)
    if isinstance(data, Mapping):
        return {name: json_texts(column) if name in named else column for name, column in data.items()}
    return data.assign(**{name: json_texts(data[name].tolist()) for name in named})


def _as_table(data: Any, schema: pa.Schema | None) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data.cast(schema) if schema is not None else data
    if type(data).__module__.partition(".")[0] == "pandas":
        named = any(name is not None for name in data.index.names)
        return pa.Table.from_pandas(data, schema=schema, preserve_index=named)
    if hasattr(data, "__arrow_c_stream__"):
        return _as_table(pa.table(data), schema)
    if isinstance(data, np.ndarray):
        data = {name: data[name] for name in data.dtype.names} if data.dtype.names else {"value": data}
    if isinstance(data, Mapping):
        if data and all(isinstance(column, np.ndarray) for column in data.values()):
            return _as_table(from_numpy(dict(data)), schema)
        return pa.table(dict(data), schema=schema)
    if isinstance(data, (list, tuple)):
        if data and isinstance(data[0], pa.RecordBatch):
            return _as_table(pa.Table.from_batches(data), schema)
        if data and not isinstance(data[0], Mapping):
            data = [{"value": item} for item in data]
        return pa.Table.from_batches([from_rows(data, Schema.from_arrow(schema) if schema is not None else None)])
    raise ConfigError(
        f"MemorySource takes lists, dicts, Arrow tables, DataFrames and NumPy arrays, got {type(data).__name__}"
    )
