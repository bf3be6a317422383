"""Data that is in memory already."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, ResumeError
from penstock.files.states import StateFormat
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources._json_types import marked_json, with_json
from penstock.types import Schema, from_numpy, from_rows

__all__ = ["MemorySource"]

_STATE = StateFormat("rows in memory", "a MemorySource")


class MemorySource(Source):
    """Rows that are in memory: a list of dicts or of plain values (one column `value`), a dict of columns, an Arrow
    table or batch, a pandas DataFrame, a NumPy array (structured, or plain as one column `value`), or a dict of NumPy
    arrays. Arrow data and NumPy numbers are not copied. A DataFrame's index is a column if it has a name.
    """

    def __init__(self, data: Any, *, schema: pa.Schema | Any | None = None) -> None:
        self._table = _as_table(data, arrow_schema(schema)).replace_schema_metadata(None)
        self._kind = type(data).__name__
        self._rows = data if _is_rows(data) and schema is None else None
        self._first_row = self._row = 0

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> None:
        """Rows given as dicts have these columns as JSON text, for a stage that wants it."""
        if self._rows is not None and self._row == 0:
            named = [name for name in columns if name in self._table.schema.names]
            table = pa.Table.from_batches([from_rows(with_json(self._rows, named), None)])
            self._table = table.cast(marked_json(table.schema, named))

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


def _is_rows(data: Any) -> bool:
    return isinstance(data, (list, tuple)) and bool(data) and isinstance(data[0], Mapping)


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
