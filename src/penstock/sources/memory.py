"""Data that is in memory already."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import AsyncIterable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError, StoppedError
from penstock.files.checksums import FileFingerprint, remembered_hash
from penstock.files.listing import PathLike
from penstock.files.states import StateFormat, check_fields
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.config import check_max_wait
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.prefetch import IteratorThread
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.content import content_hash, sample_hash
from penstock.sources.file_source import is_schema, schema_mark, schema_of
from penstock.sources.json_types import json_texts, marked_json, with_json
from penstock.sources.tables import Rows, dataset_rows, kind_of, readable, refuse_splits
from penstock.types import Schema, from_numpy, from_rows

_MEMORY_STATE = StateFormat("rows in memory", "a MemorySource", fields={"row": (int,), "rows": (int,)})


class MemorySource(Source):
    """Rows that are in memory: a list of dicts or of plain values (one column `value`), a dict of columns, an Arrow
    table or batch, a pandas or Polars DataFrame, a Hugging Face dataset, a NumPy array (structured, or plain as one
    column `value`), or a dict of NumPy arrays. Arrow data and NumPy numbers are not copied. The index of a pandas
    DataFrame is a column if it has a name.
    """

    def __init__(self, data: Any, *, schema: pa.Schema | Any | None = None) -> None:
        self._kind = type(data).__name__
        self._values = data if schema is None and _is_untyped(data) else None
        """Rows without types of their own, as given."""
        self._dataset = data if schema is None and kind_of(data) == "Dataset" else None
        """A dataset that may be on disk, for a copy of this source in another process."""
        self._kept = False
        self._made: Rows | None = None
        try:
            self._made = _as_rows(data, arrow_schema(schema))
        except (SchemaError, pa.ArrowInvalid, pa.ArrowTypeError):
            if self._values is None:
                raise
            # No one type fits: a stage may want the columns as JSON; otherwise the first look at the schema raises.
        self._first_row = self._row = 0

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    @property
    def _table(self) -> Rows:
        if self._made is None:
            self._made = _as_rows(self._values if self._dataset is None else self._dataset, None)
        return self._made

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ if self._dataset is None else self.__dict__ | {"_made": None}

    @property
    def bytes_to_send(self) -> int:
        """Bytes of a copy of this source in another process: none to speak of for a dataset on disk."""
        on_disk = self._dataset is not None and self._dataset.cache_files
        return 0 if on_disk else self.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._table.nbytes

    def column_names(self) -> list[str]:
        """Names of the columns, which need not have types yet."""
        return self.schema.names if self._values is None else [str(name) for name in _names(self._values)]

    def rows_from(self, row: int, max_rows: int) -> pa.RecordBatch | None:
        """At most `max_rows` rows from a row on, to where a chunk ends: joining two would copy; None at the end."""
        if row >= self._table.num_rows:
            return None
        return self._table.slice(row, max_rows).to_batches()[0]

    def fingerprints(self, memo: PathLike | None = None) -> list[FileFingerprint]:
        """The content of all rows; all of them are read for it, unless the memo knows those of a dataset on disk."""
        return [FileFingerprint("<rows>", self._table.num_rows, self._content(memo))]

    def _content(self, memo: PathLike | None) -> str:
        dataset: Any = self._dataset
        files = [] if dataset is None else [Path(file["filename"]) for file in dataset.cache_files]
        if memo is None or not files:
            return content_hash(self._table)
        name = f"dataset {dataset._fingerprint} {files[0]}"
        return remembered_hash(name, files, memo, lambda: content_hash(self._table))

    def sampled_identity(self) -> list[Any]:
        """Identity by some of the rows, which costs the same for any number of them."""
        return [self._table.num_rows, self.nbytes, sample_hash(self._table)]

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> bool:
        """Values that are no Arrow data have these columns as JSON text, for a stage that wants it; whether they do."""
        if self._kept or self._values is None or self._row:
            return self._kept or self._values is None
        named = [name for name in columns if name in _names(self._values)]
        table = _as_table(_with_json(self._values, named), None).replace_schema_metadata(None)
        self._made, self._kept = table.cast(marked_json(table.schema, named)), True
        return True

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        batch = self.rows_from(self._row, max_rows)
        if batch is None:
            return None
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
        return _MEMORY_STATE.write({"row": self._row, "rows": self._table.num_rows})

    def load_state_dict(self, state: State) -> None:
        state = _MEMORY_STATE.read(state)
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
    return data.assign(**{name: json_texts([_as_lists(value) for value in data[name]]) for name in named})


def _as_lists(value: Any) -> Any:
    """Values of a DataFrame, in which lists may be arrays, as JSON has them."""
    if isinstance(value, (np.ndarray, list, tuple)):
        return [_as_lists(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _as_lists(item) for name, item in value.items()}
    if isinstance(value, np.generic):
        return value.item()
    return None if isinstance(value, float) and value != value else value  # a missing value


def _as_rows(data: Any, schema: pa.Schema | None) -> Rows:
    if schema is None and kind_of(data) == "Dataset":
        return dataset_rows(data)
    refuse_splits(data)
    return readable(_as_table(data, schema))


def _as_table(data: Any, schema: pa.Schema | None) -> pa.Table:
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    if isinstance(data, pa.Table):
        return data.cast(schema) if schema is not None else data
    if kind_of(data) == "Dataset":
        return data.with_format("arrow")[:].cast(schema)
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


_ITERATOR_STATE = StateFormat("rows of an iterator", "an IteratorSource", fields={"row": (int,), "schema": (str, None)})
_NAME = "<iterator>"
_LEARN_ROWS = 256
_SKIP_ROWS = 1024
MAX_WAIT_SECONDS = 1.0
_END, _LATE = object(), object()


class IteratorSource(Source):
    """Any iterable of rows (dicts), RecordBatches or Tables; or a function that makes one.

    Give a function, or something that can be iterated again, to be able to resume and to run twice: an iterator starts
    only once. Resuming passes over the rows before the saved one, so it costs as much as making them.
    One thread makes, reads and closes the iterator, so a function may open a database: its cursor stays in its thread.

    A batch leaves `max_wait_seconds` after its first row, with the rows that have come by then; None waits until it is
    full. Only the cuts between batches depend on it, never the rows or their order.

    Without a `schema` rows get that of the first 256 of them, or of those that have come in time (as soon as every
    column has a type), and batches have to have that of the first. A later row that does not fit is a bad row; among
    the first ones it is an error, since either may be right.
    """

    def __init__(
        self,
        items: Iterable[Any] | Callable[[], Iterable[Any]],
        *,
        schema: pa.Schema | Any | None = None,
        max_wait_seconds: float | None = MAX_WAIT_SECONDS,
    ) -> None:
        self._check_items(items)
        self.max_wait_seconds = check_max_wait(max_wait_seconds)
        """Longest wait of a row for the others of its batch; `PipelineConfig(max_wait_seconds=...)` sets it too."""
        self._items = items
        self._given: pa.Schema | None = arrow_schema(schema)
        self._schema = self._given
        self._mark: str | None = None
        """The learned schema, as the state keeps it."""
        self._learn_rows = _LEARN_ROWS
        """Rows that the schema is learned from; fewer if a batch had to leave before."""
        self._reader: IteratorThread[Any] | None = None
        self._begun = self._closed = False
        self._late = False
        """True if the last rows that were taken are all that came in time."""
        self._waiting: deque[Any] = deque()
        """Rows taken from the iterator that do not fit into one batch with the rows before them."""
        self._pending: pa.RecordBatch | None = None
        self._first_row = self._row = 0
        self._json: frozenset[str] = frozenset()
        """Columns that are kept as JSON text."""
        self._has_types = hasattr(items, "features") and hasattr(items, "column_names")
        """A Hugging Face dataset: its rows have the keys that any of them has."""

    def keep_json(self, columns: Mapping[str, Collection[str]]) -> bool:
        """Rows that are dicts have these columns as JSON text, for a stage that wants it; whether they are kept so.

        Tables have the types that they have.
        """
        if self._json or self._schema is not None:
            return bool(self._json >= columns.keys())
        self._json = frozenset(columns)
        return True

    def column_names(self) -> list[str]:
        """Names of the columns, as the first row or table has them."""
        if self._schema is not None:
            return list(self._schema.names)
        first = self._next_item(1)
        if first is _END:
            return []
        self._waiting.appendleft(first)
        return [str(name) for name in first] if isinstance(first, Mapping) else list(first.schema.names)

    def learned_schema(self) -> pa.Schema:
        """The columns and their types, for which the first rows are taken from the iterator; no row is lost."""
        if self._schema is None and self._pending is None:
            self._pending = self._make(_LEARN_ROWS, self.max_wait_seconds)
        return pa.schema([]) if self._schema is None else self._schema

    def first_rows(self) -> pa.RecordBatch | None:
        """The first rows, which are delivered in their place too."""
        if self._pending is None:
            self._pending = self._make(_LEARN_ROWS, self.max_wait_seconds)
        return self._pending

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        batch = self._pending if self._pending is not None else self._make(max_rows, self.max_wait_seconds)
        if batch is None:
            return None
        part, rest = batch.slice(0, max_rows), batch.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        self._first_row = self._row
        self._row += part.num_rows
        return part

    def origin(self) -> Origin | None:
        return Origin(_NAME, self._first_row)

    def memory_usage(self) -> int:
        pending = self._pending
        return pending.nbytes if pending is not None else 0

    def skip_file(self) -> str:
        """After an error: skip the bad row or batch; returns its description."""
        item = self._waiting.popleft()
        self._row += _rows_in(item)
        return "the row does not fit" if isinstance(item, Mapping) else "a batch does not fit"

    def reset(self) -> None:
        """Back to the first row."""
        if self._row == 0 and not self._closed and (self._pending is not None or self._waiting):
            return  # rows were taken to learn their columns, and none was delivered
        if self._begun and not self._repeatable():
            raise ConfigError(f"an iterator runs only once: {self._advice}")
        self.close()
        self._begun = self._closed = self._late = False
        self._pending = self._mark = None
        self._waiting.clear()
        self._first_row = self._row = 0
        self._schema, self._learn_rows = self._given, _LEARN_ROWS

    def interrupt(self) -> None:
        """Make a `next_batch` that waits for rows return; called from another thread when a run is stopped."""
        reader = self._reader
        if reader is not None:
            reader.stop()

    def close(self) -> None:
        """End the thread of the iterator; `reset` begins again. An iterator that was given as such stays open.

        If no row was delivered yet, reading may begin afterwards: somebody has only looked at the columns.
        """
        if not self._row and not self._repeatable():
            return
        reader, self._reader = self._reader, None
        self._closed = self._row > 0
        if not self._closed:
            self._begun, self._pending = False, None
            self._waiting.clear()
        if reader is not None:
            reader.close()

    @property
    def reading_thread(self) -> int | None:
        """Number of the thread in which the iterator runs."""
        return None if self._reader is None else self._reader.ident

    def state_dict(self) -> State:
        early = {"learned": self._learn_rows} if self._learn_rows != _LEARN_ROWS else {}
        return _ITERATOR_STATE.write({"row": self._row, "schema": self._mark, **early})

    def load_state_dict(self, state: State) -> None:
        if self._row and not self._repeatable():
            raise ResumeError(f"an iterator cannot be resumed: {self._advice}")
        state = _ITERATOR_STATE.read(state)
        self.reset()
        mark, rows = state["schema"], state["row"]
        learned = {"learned": _LEARN_ROWS} | state
        check_fields(learned, {"learned": (int,)})
        self._learn_rows = learned["learned"]
        if mark is not None and is_schema(mark):
            self._mark, self._schema = mark, schema_of(mark)
        self.pass_over(rows)
        if self._mark != mark:
            raise ResumeError("the columns of the iterator are not those it had when the state was saved")

    @property
    def row(self) -> int:
        """Number of the next row, bad rows included."""
        return self._row

    def pass_over(self, rows: int) -> None:
        """From the beginning to a row, bad rows included."""
        if rows and (self._schema is None or self._pending is not None):
            if self._pending is None:
                self._pending = self._make(self._learn_rows, None)  # too wide for the state: it is learned again
            taken = self._pending.num_rows if self._pending is not None else 0
            self._row = min(taken, rows)
            rest = self._pending.slice(self._row) if self._pending is not None else None
            self._pending = rest if rest is not None and rest.num_rows else None
        while self._row < rows:
            item = self._next_item(min(rows - self._row, _SKIP_ROWS))
            if item is _END:
                raise ResumeError(f"the state was saved at row {rows}, the iterator ended after {self._row} rows")
            wanted = rows - self._row
            self._row += min(wanted, _rows_in(item))
            if wanted < _rows_in(item):
                self._pending = self._whole(item.slice(wanted))

    _advice = "give IteratorSource a function that makes it, or a list"

    def _check_items(self, items: Any) -> None:
        if isinstance(items, AsyncIterable) or inspect.isasyncgenfunction(items):
            raise ConfigError(f"{items!r} has to be awaited; give it to AsyncIteratorSource")
        if not callable(items) and not isinstance(items, Iterable):
            raise ConfigError(f"expected an iterable or a function that returns one, got {items!r}")

    def _repeatable(self) -> bool:
        return callable(self._items) or not isinstance(self._items, Iterator)

    def _make(self, max_rows: int, max_wait_seconds: float | None) -> pa.RecordBatch | None:
        """The next rows as a batch; None at the end."""
        # The number of rows the schema is learned from must not depend on the number requested.
        most = max_rows if self._schema is not None else self._learn_rows
        rows: list[Mapping[str, Any]] = []
        while len(rows) < most:
            item = self._next_item(most - len(rows), max_wait_seconds, first=not rows)
            if type(item) is dict or isinstance(item, Mapping):
                rows.append(item)
            elif item is _LATE:
                if self._schema is not None or self._have_types(rows):
                    self._learn_rows = len(rows) if self._schema is None else self._learn_rows
                    break
            elif item is _END:
                if rows:
                    break  # an error after them comes next
                return None
            elif rows:
                self._waiting.appendleft(item)
                break
            elif not isinstance(item, (pa.RecordBatch, pa.Table)):
                self._waiting.appendleft(item)
                raise DataError(
                    f"expected a dict, a RecordBatch or a Table, got {type(item).__name__}", file=_NAME, row=self._row
                )
            elif item.num_rows:
                return self._whole(item)
        return self._from_rows(rows)

    def _have_types(self, rows: list[Mapping[str, Any]]) -> bool:
        """True if every column of the first rows has a type, so that later ones can be expected to fit."""
        try:
            schema = self._batch_of(rows, None).schema
        except SchemaError:
            return True  # more rows do not change that
        return not any(_is_untyped_column(column.type) for column in schema)

    def _next_item(self, most: int, max_wait_seconds: float | None = None, *, first: bool = True) -> Any:
        """The next item of up to `most`; `_END` after the last, `_LATE` if none has come in time."""
        if self._waiting:
            return self._waiting.popleft()
        if self._late and not first:
            self._late = False
            return _LATE
        return self._take(most, max_wait_seconds, first=first)

    def _take(self, most: int, max_wait_seconds: float | None, *, first: bool) -> Any:
        if self._closed:
            raise ValueError("the source is closed; reset() begins again")
        if self._reader is None:
            self._begun, self._reader = True, self._open_reader()
        reader = self._reader
        try:
            taken = reader.take(most, max_wait_seconds, first=first)
        except Exception as error:
            _check_thread(error, self._items)
            raise
        if not taken:
            if reader.stopped:
                raise StoppedError("reading was interrupted before the end of the rows")
            return _END if first or reader.over else _LATE
        self._waiting.extend(taken)
        self._late = len(taken) < most and not reader.over and isinstance(taken[-1], Mapping)
        return self._waiting.popleft()

    def _open_reader(self) -> IteratorThread[Any]:
        items = self._items
        return IteratorThread(
            lambda: iter(items() if callable(items) else items),
            owned=not isinstance(items, Iterator),
            is_whole=is_whole,
        )

    def _from_rows(self, rows: list[Mapping[str, Any]]) -> pa.RecordBatch:
        """A batch of rows; only those before the first bad one, which raises on the next call."""
        schema = Schema.from_arrow(self._schema) if self._schema is not None else None
        try:
            batch = self._batch_of(rows, schema)
        except SchemaError as error:
            bad, reason = self._blame(rows, schema, error)
            self._waiting.extendleft(reversed(rows[bad:]))
            if bad == 0:
                raise DataError(reason, file=_NAME, row=self._row, data=rows[0]) from error
            return self._from_rows(rows[:bad])
        self._learn(batch.schema)
        return batch

    def _batch_of(self, rows: list[Mapping[str, Any]], schema: Schema | None) -> pa.RecordBatch:
        if not self._json:
            return from_rows(rows, schema)
        given = [_without_nulls(row) for row in rows] if self._has_types else rows
        batch = from_rows(with_json(given, self._json), schema)
        return batch.cast(marked_json(batch.schema, self._json))

    def _blame(self, rows: list[Mapping[str, Any]], schema: Schema | None, error: SchemaError) -> tuple[int, str]:
        """The first row that does not fit by itself, and why."""
        for number, row in enumerate(rows):
            try:
                self._batch_of([row], schema)
            except SchemaError as alone:
                return number, str(alone)
        # No single row is to blame, so leaving one out, where that is allowed, would be arbitrary.
        raise SchemaError(
            f"{_NAME}, row {self._row}: the first {len(rows)} rows do not fit one schema: {error}"
        ) from error

    def _whole(self, item: pa.RecordBatch | pa.Table) -> pa.RecordBatch:
        table = pa.Table.from_batches([item]) if isinstance(item, pa.RecordBatch) else item
        self._learn(table.schema)
        if not table.schema.equals(self._schema):
            try:
                table = self._fitted(table)
            except DataError:
                self._waiting.appendleft(item)
                raise
        return table.combine_chunks().to_batches()[0]

    def _fitted(self, table: pa.Table) -> pa.Table:
        assert self._schema is not None
        difference = describe_difference(self._schema, table.schema)
        if self._given is not None:
            try:
                return table.select(self._given.names).cast(self._given)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError, KeyError) as error:
                difference += f" ({error})"
        raise DataError(f"a batch has another schema than expected: {difference}", file=_NAME, row=self._row)

    def _learn(self, schema: pa.Schema) -> None:
        if self._schema is None:
            self._schema, self._mark = schema.remove_metadata(), schema_mark(schema.remove_metadata())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._items, '__name__', type(self._items).__name__)})"


def is_whole(item: Any) -> bool:
    """True for an item that is a batch by itself."""
    return not isinstance(item, Mapping)


def _is_untyped_column(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_is_untyped_column(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_null(kind))


def _check_thread(error: Exception, items: Any) -> None:
    """Say how a cursor is read that was opened in another thread than the one that reads it."""
    if not callable(items) and type(error).__name__ == "ProgrammingError" and "thread" in str(error):
        raise ConfigError(
            "the rows come from a connection that works only in the thread that opened it; give IteratorSource a "
            f"function that opens it and yields the rows, which runs in one thread: {error}"
        ) from error


def _rows_in(item: Any) -> int:
    return item.num_rows if isinstance(item, (pa.RecordBatch, pa.Table)) else 1


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
