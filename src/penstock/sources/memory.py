"""Data that is in memory already, and any Python iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Origin, Source, State
from penstock.types import Schema, from_numpy, from_rows

__all__ = ["IteratorSource", "MemorySource"]


class MemorySource(Source):
    """Rows that are in memory: a list of dicts, a dict of columns, an Arrow table or batch, a pandas DataFrame, a NumPy
    array (structured, or plain as one column `value`), or a dict of NumPy arrays. Arrow and NumPy data are not copied.
    """

    def __init__(self, data: Any, *, schema: pa.Schema | Any | None = None) -> None:
        self._table = _as_table(data, arrow_schema(schema))
        self._kind = type(data).__name__
        self._row = 0

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self._table.num_rows:
            return None
        part = self._table.slice(self._row, max_rows)
        batch = part.to_batches()[0]  # up to where a chunk ends: joining two would copy
        self._row += batch.num_rows
        return batch

    def size_hint(self) -> int | None:
        return int(self._table.num_rows)

    def origin(self) -> Origin | None:
        return Origin("<memory>", max(0, self._row - 1))

    def reset(self) -> None:
        self._row = 0

    def state_dict(self) -> State:
        return {"row": self._row, "rows": self._table.num_rows}

    def load_state_dict(self, state: State) -> None:
        if state["rows"] != self._table.num_rows:
            raise ResumeError(f"the state was saved over {state['rows']} rows, there are {self._table.num_rows} now")
        self._row = state["row"]

    def __repr__(self) -> str:
        return f"MemorySource({self._kind}, {self._table.num_rows} rows)"


class IteratorSource(Source):
    """Any iterable of rows (dicts), RecordBatches or Tables; or a function that makes one.

    Give a function, or something that can be iterated again, to be able to resume and to run twice: an iterator starts
    only once. Resuming passes over the rows before the saved one, so it costs as much as making them.
    Rows get the schema of the first batch of them, unless `schema` says more.
    """

    def __init__(
        self, items: Iterable[Any] | Callable[[], Iterable[Any]], *, schema: pa.Schema | Any | None = None
    ) -> None:
        if not callable(items) and not isinstance(items, Iterable):
            raise ConfigError(f"expected an iterable or a function that returns one, got {items!r}")
        self._items = items
        self._given = arrow_schema(schema)
        self._schema: pa.Schema | None = self._given
        self._iterator: Iterator[Any] | None = None
        self._pending: pa.RecordBatch | None = None
        self._row = 0
        self._first_row = 0
        self._started = False

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        batch = self._pending if self._pending is not None else self._make(max_rows)
        if batch is None:
            return None
        part, rest = batch.slice(0, max_rows), batch.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        self._first_row = self._row
        self._row += part.num_rows
        return part

    def origin(self) -> Origin | None:
        return Origin("<iterator>", self._first_row)

    def memory_usage(self) -> int:
        return self._pending.nbytes if self._pending is not None else 0

    def reset(self) -> None:
        if self._started and not self._repeatable():
            raise ConfigError("an iterator runs only once: give IteratorSource a function that makes it, or a list")
        self._iterator, self._pending, self._row, self._started = None, None, 0, False
        self._schema = self._given

    def state_dict(self) -> State:
        return {"row": self._row, "schema": self._schema.serialize().to_pybytes().hex() if self._schema else None}

    def load_state_dict(self, state: State) -> None:
        if self._started and not self._repeatable():
            raise ResumeError("an iterator cannot be resumed: give IteratorSource a function that makes it, or a list")
        self.reset()
        if self._given is None and state["schema"] is not None:
            self._schema = pa.ipc.read_schema(pa.py_buffer(bytes.fromhex(state["schema"])))
        left = state["row"]
        while left:
            batch = self._make(left)
            if batch is None:
                raise ResumeError(f"the state was saved at row {state['row']}, the iterator ended {left} rows before")
            drop = min(left, batch.num_rows)
            left -= drop
            rest = batch.slice(drop)
            self._pending = rest if rest.num_rows else None
        self._row = state["row"]

    def _repeatable(self) -> bool:
        return callable(self._items) or not isinstance(self._items, Iterator)

    def _make(self, max_rows: int) -> pa.RecordBatch | None:
        if self._iterator is None:
            self._iterator = iter(self._items() if callable(self._items) else self._items)
            self._started = True
        first = next(self._iterator, None)
        if first is None:
            return None
        if isinstance(first, pa.RecordBatch):
            return first if first.num_rows else self._make(max_rows)
        if isinstance(first, pa.Table):
            batches = first.combine_chunks().to_batches()
            return batches[0] if batches else self._make(max_rows)
        if not isinstance(first, Mapping):
            raise SchemaError(
                f"row {self._row} of the iterator is {type(first).__name__}; expected a dict, a RecordBatch or a Table"
            )
        rows = [first, *islice(self._iterator, max_rows - 1)]
        batch = from_rows(rows, Schema.from_arrow(self._schema) if self._schema is not None else None)
        if self._schema is None:
            self._schema = batch.schema
        return batch

    def __repr__(self) -> str:
        return f"IteratorSource({getattr(self._items, '__name__', type(self._items).__name__)})"


def _as_table(data: Any, schema: pa.Schema | None) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data.cast(schema) if schema is not None else data
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
    if type(data).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(data, schema=schema, preserve_index=False)
    raise ConfigError(
        f"MemorySource takes lists, dicts, Arrow tables, DataFrames and NumPy arrays, got {type(data).__name__}"
    )
