"""Any Python iterator as a source."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.files.states import StateFormat
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.functions import arrow_schema
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.file_list import is_schema, schema_mark, schema_of
from penstock.sources.json_types import marked_json, with_json
from penstock.types import Schema, from_rows

__all__ = ["IteratorSource"]

_STATE = StateFormat("rows of an iterator", "an IteratorSource")
_NAME = "<iterator>"
_LEARN_ROWS = 256
_END = object()


class IteratorSource(Source):
    """Any iterable of rows (dicts), RecordBatches or Tables; or a function that makes one.

    Give a function, or something that can be iterated again, to be able to resume and to run twice: an iterator starts
    only once. Resuming passes over the rows before the saved one, so it costs as much as making them.
    Without a `schema` rows get that of the first 256 of them, and batches have to have that of the first. A later row
    that does not fit is a bad row; among those 256 it is an error, since nobody can say which of them is right.
    """

    def __init__(
        self, items: Iterable[Any] | Callable[[], Iterable[Any]], *, schema: pa.Schema | Any | None = None
    ) -> None:
        if not callable(items) and not isinstance(items, Iterable):
            raise ConfigError(f"expected an iterable or a function that returns one, got {items!r}")
        self._items = items
        self._given: pa.Schema | None = arrow_schema(schema)
        self._schema = self._given
        self._mark: str | None = None
        """The learned schema, as the state keeps it."""
        self._iterator: Iterator[Any] | None = None
        self._waiting: deque[Any] = deque()
        """What was taken from the iterator and does not go into one batch with the rows before it."""
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
        if self._json or self._given is not None or self._iterator is not None:
            return bool(self._json >= columns.keys())
        self._json = frozenset(columns)
        return True

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
        return Origin(_NAME, self._first_row)

    def memory_usage(self) -> int:
        pending = self._pending
        return pending.nbytes if pending is not None else 0

    def skip_file(self) -> str:
        """After an error: go on behind the row, or the batch, that it was about; says which."""
        item = self._waiting.popleft()
        self._row += _rows_in(item)
        return "the row does not fit" if isinstance(item, Mapping) else "a batch does not fit"

    def reset(self) -> None:
        """Back to the first row."""
        if self._iterator is not None and not self._repeatable():
            raise ConfigError("an iterator runs only once: give IteratorSource a function that makes it, or a list")
        self._iterator = self._pending = self._mark = None
        self._waiting.clear()
        self._first_row = self._row = 0
        self._schema = self._given

    def state_dict(self) -> State:
        return _STATE.write({"row": self._row, "schema": self._mark})

    def load_state_dict(self, state: State) -> None:
        if self._iterator is not None and not self._repeatable():
            raise ResumeError("an iterator cannot be resumed: give IteratorSource a function that makes it, or a list")
        state = _STATE.read(state)
        self.reset()
        mark, rows = state["schema"], state["row"]
        if mark is not None and is_schema(mark):
            self._mark, self._schema = mark, schema_of(mark)
        self._pass_over(rows)
        if self._mark != mark:
            raise ResumeError("the iterator does not make the columns it made when the state was saved")

    def _pass_over(self, rows: int) -> None:
        """To where the state was saved, bad rows included."""
        if self._schema is None and rows:
            self._pending = self._make(_LEARN_ROWS)  # a schema too wide to be kept in the state is learned again
            taken = self._pending.num_rows if self._pending is not None else 0
            self._row = min(taken, rows)
            rest = self._pending.slice(self._row) if self._pending is not None else None
            self._pending = rest if rest is not None and rest.num_rows else None
        while self._row < rows:
            item = self._next_item()
            if item is _END:
                raise ResumeError(f"the state was saved at row {rows}, the iterator ended after {self._row} rows")
            wanted = rows - self._row
            self._row += min(wanted, _rows_in(item))
            if wanted < _rows_in(item):
                self._pending = self._whole(item.slice(wanted))

    def _repeatable(self) -> bool:
        return callable(self._items) or not isinstance(self._items, Iterator)

    def _make(self, max_rows: int) -> pa.RecordBatch | None:
        """The next rows as a batch; None at the end."""
        # How many rows the schema is learned from must not depend on how many are asked for.
        most = max_rows if self._schema is not None else _LEARN_ROWS
        rows: list[Mapping[str, Any]] = []
        while len(rows) < most:
            item = self._next_item()
            if isinstance(item, Mapping):
                rows.append(item)
            elif rows:
                self._waiting.appendleft(item)
                break
            elif item is _END:
                return None
            elif not isinstance(item, (pa.RecordBatch, pa.Table)):
                self._waiting.appendleft(item)
                raise DataError(
                    f"expected a dict, a RecordBatch or a Table, got {type(item).__name__}", file=_NAME, row=self._row
                )
            elif item.num_rows:
                return self._whole(item)
        return self._from_rows(rows)

    def _next_item(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._items() if callable(self._items) else self._items)
        return self._waiting.popleft() if self._waiting else next(self._iterator, _END)

    def _from_rows(self, rows: list[Mapping[str, Any]]) -> pa.RecordBatch:
        """A batch of rows; only those before the first bad one, which is an error when it is asked for next."""
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
            f"{_NAME}, row {self._row}: the first {len(rows)} rows do not go together: {error}"
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
        return f"IteratorSource({getattr(self._items, '__name__', type(self._items).__name__)})"


def _rows_in(item: Any) -> int:
    return item.num_rows if isinstance(item, (pa.RecordBatch, pa.Table)) else 1


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
