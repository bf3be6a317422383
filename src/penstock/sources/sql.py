"""Rows of a database as the beginning of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
import xxhash

from penstock.connections.sql import DUCKDB, Database, table_parts
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.states import StateFormat
from penstock.memory.budget import parse_bytes
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.prefetch import WorkAhead
from penstock.pipeline.stages import Origin, Source, State
from penstock.sources.file_source import check_columns, is_schema, schema_mark, schema_of
from penstock.sources.sql_rows import Key, KeyBounds, KeyRange, SqlRows

_STATE = StateFormat("rows of a database", "a SqlSource", fields={"row": (int,), "key": (list, None), "schema": (str,)})
_PARTS_BYTES = 4 << 20
_LEAST_RANGE = 16 << 10


class SqlSource(Source):
    """Rows of a table or a query, streamed in the order of `key`, in batches of about `batch_bytes`.

        SqlSource("postgresql://localhost/corpus", table="documents", key="id", columns=["id", "text"])
        SqlSource("sqlite:///corpus.db", query="SELECT * FROM documents WHERE lang = ?", parameters=["de"], key="id")

    `key` is a column, or several, that tell every row from the others; an index of it makes reading cheap. With one, a
    run resumes after the last row that was delivered, and a lost connection is made again for `retry_seconds`. Without
    one the rows come in any order and cannot be resumed. Two rows with one key, and nulls in it, are refused.

    Only `columns` are sent. `parameters` are bound, never put into the text. With `connections` above 1, ranges of the
    key are read at once; finding them takes a pass over the index. `options` go to the ADBC driver.
    Table, query, key and columns may stand in the URL: `postgresql://localhost/corpus?table=documents&key=id`.
    """

    def __init__(
        self,
        url: str,
        *,
        table: str | Sequence[str] | None = None,
        query: str | None = None,
        key: str | Sequence[str] | None = None,
        columns: Sequence[str] | None = None,
        parameters: Sequence[Any] = (),
        connections: int = 1,
        batch_bytes: int | str = "1 MiB",
        retry_seconds: float = 30.0,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self._database = database = Database(url, options)
        table, query = table or database.own.get("table"), query or database.own.get("query")
        if (table is None) == (query is None):
            raise ConfigError(f"{database.shown}: expected either table= or query=, got {'both' if table else 'none'}")
        if connections < 1:
            raise ConfigError(f"connections must be at least 1, got {connections}")
        key = key or database.own.get("key", "").split(",")
        self._key = [key] if isinstance(key, str) else [name for name in key if name]
        if columns is None and "columns" in database.own:
            columns = database.own["columns"].split(",")
        self._columns = check_columns(columns)
        self._connections = connections
        # DuckDB sorts whole rows in this process, and has no index that saves it: small sorts take little memory.
        self._by_ranges = connections > 1 or (database.dialect is DUCKDB and bool(self._key))
        if connections > 1 and not self._key:
            raise ConfigError("connections= reads ranges of the key at once, so it needs key=")
        parts = table_parts(table) if table is not None else None
        text = (query or "").strip().rstrip(";").rstrip()
        relation = database.quoted(*parts) if parts is not None else f"({text}\n) AS penstock_rows"
        self._named = {"table": ".".join(parts)} if parts is not None else {"query": text}
        self._parameters = list(parameters)
        self._rows = SqlRows(
            database, relation, columns=self._columns, key=self._key, parameters=self._parameters, table=parts
        )
        self._rows.retry_seconds = retry_seconds
        self._batch_bytes = self._asked_bytes = parse_bytes(batch_bytes)
        self._parts_bytes = _PARTS_BYTES
        self._row = self._first_row = 0
        self._last: Key | None = None
        """Key of the last row that was delivered."""
        self._reader: Iterator[pa.RecordBatch] | None = None
        self._pending: pa.RecordBatch | None = None
        self._ended = False
        self._bounds: KeyBounds | None = None

    @property
    def name(self) -> str:
        """Database and table, for messages."""
        table = self._named.get("table")
        return f"{self._database.shown} ({f'table {table}' if table else 'query'})"

    @cached_property
    def schema(self) -> pa.Schema:
        """Columns of the batches; asks the database."""
        full = self._rows.schema
        return full if self._columns is None else pa.schema([full.field(name) for name in self._columns])

    @property
    def not_resumable(self) -> str | None:
        """Reason why a run cannot be resumed; None if it can."""
        if self._key:
            return None
        return f"{self!r} has no key to resume by; pass key=, the columns that tell rows apart"

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._pending is None:
            self._pending = None if self._ended else self._fetch()
            if self._pending is None:
                self._ended = True
                self.close()
                return None
        batch, rest = self._pending.slice(0, max_rows), self._pending.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        self._first_row = self._row
        self._row += batch.num_rows
        if self._key:
            self._last = self._rows.key_at(batch, batch.num_rows - 1)
        return batch if batch.schema.equals(self.schema) else batch.select(self.schema.names)

    def origin(self) -> Origin | None:
        return Origin(self.name, self._first_row)

    def memory_usage(self) -> int:
        held = self._pending.get_total_buffer_size() if self._pending is not None else 0
        ahead = (self._connections + 1) * self._parts_bytes if self._by_ranges and self._reader is not None else 0
        return held + ahead

    def fit_budget(self, nbytes: int) -> None:
        """Smaller batches, and less memory for a database in this process."""
        self._batch_bytes = max(1, min(self._asked_bytes, nbytes // 16))
        self._parts_bytes = max(1, min(_PARTS_BYTES, nbytes // (8 * (self._connections + 1))))
        self._rows.memory_bytes = min(self._rows.memory_bytes, nbytes // 2)

    def reset(self) -> None:
        """Back to the first row."""
        self.close()
        self._row = self._first_row = 0
        self._last, self._ended = None, False

    def close(self) -> None:
        """Close the connections. The next read continues at the same row; without a key there is none."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()  # type: ignore[attr-defined]
            if not self._key and self._row and not self._ended:
                self._ended = True
        self._pending = None
        self._rows.close()

    def state_dict(self) -> State:
        key = None if self._last is None else list(self._last)
        return _STATE.write({"row": self._row, "key": key, "schema": self._mark})

    @cached_property
    def _mark(self) -> str:
        """The columns, as states keep them."""
        return schema_mark(self._rows.schema)

    def load_state_dict(self, state: State) -> None:
        state = _STATE.read(state)
        if state["row"] and (self.not_resumable or state["key"] is None):
            raise ResumeError(f"the state was saved at row {state['row']}, and {self.not_resumable or 'it has no key'}")
        if self._mark != (mark := state["schema"]):
            before = describe_difference(schema_of(mark), self._rows.schema) if is_schema(mark) else "other columns"
            raise ResumeError(
                f"{self.name} has other columns than when the state was saved: {before}; cast them back with query=, "
                "or start without the state"
            )
        self.reset()
        self._row = self._first_row = state["row"]
        self._last = tuple(state["key"]) if state["key"] is not None else None

    # -- reading -----------------------------------------------------------------------------------------------------

    def _fetch(self) -> pa.RecordBatch | None:
        """The next batch that was read; a lost connection is made again after the last row."""
        return self._rows.retried(self._next) if self._key or self._reader is None else self._next()

    def _next(self) -> pa.RecordBatch | None:
        if self._reader is None:
            self._reader = self._begin()
        try:
            batch = next(self._reader, None)
        except ConnectionError as error:
            self._reader = None
            if not self._key and self._row:
                raise ConnectionError(f"{error}; {self.not_resumable}") from None
            raise
        except BaseException:
            self._reader = None
            raise
        return batch

    def _begin(self) -> Iterator[pa.RecordBatch]:
        """Batches after the last row that was delivered.

        The last row is read again: if another has its key, that would be lost otherwise.
        """
        if self._key:
            self._rows.check_nulls()
        if self._last is not None:
            self._rows.check_alone(self._last, self._row)
        parts = self._read_ahead() if self._by_ranges else self._read(KeyRange(self._last))
        last = self._last
        for batch in parts:
            if last is not None and self._rows.key_at(batch, 0) == last:
                batch = batch.slice(1)
            last = None
            if batch.num_rows:
                yield batch

    def _read(self, part: KeyRange) -> Iterator[pa.RecordBatch]:
        return self._rows.read(part, self._batch_bytes, self._row)

    def _read_ahead(self) -> Iterator[pa.RecordBatch]:
        bounds = self._rows.bounds(self._parts_bytes, self._last)
        ahead = WorkAhead(
            lambda number: self.read_range(bounds, number),
            iter(range(len(bounds.starts))),
            self._connections,
            self._connections + 1,
        )
        try:
            for part in ahead:
                yield from part
        finally:
            ahead.close()

    # -- ranges of the key ---------------------------------------------------------------------------------------------

    def read_range(self, bounds: KeyBounds, number: int) -> list[pa.RecordBatch]:
        """All rows of a range; called from several threads."""
        return self._rows.retried(lambda: list(self._rows.read(bounds.range(number), self._batch_bytes)))

    @property
    def has_key(self) -> bool:
        return bool(self._key)

    def split(self, bytes_each: int) -> KeyBounds:
        """Ranges of about `bytes_each`, and at least 16 KiB, since each is a query; the first call decides."""
        if self._bounds is None:
            self._bounds = self._rows.bounds(max(bytes_each, _LEAST_RANGE))
        return self._bounds

    @property
    def nbytes(self) -> int:
        """Bytes of all rows, about; they are counted for it."""
        return self._rows.extent[0] * self._rows.row_bytes

    def only(self, columns: Sequence[str]) -> SqlSource:
        """A source of these columns alone; the others are not sent."""
        found = [name for name in columns if name in self.schema.names]
        if not found or found == self.schema.names:
            return self
        return SqlSource(**{**self._arguments, "columns": found})

    def sampled_identity(self) -> list[Any]:
        """Text that changes with the rows that are read, as far as their number and their last key tell."""
        return [repr(self), xxhash.xxh3_64_hexdigest(repr(self._rows.extent if self._key else ()).encode())]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_reader": None, "_pending": None}

    def __repr__(self) -> str:
        key: Any = self._key[0] if len(self._key) == 1 else self._key
        facts = {**self._named, "key": key or None, "columns": self._columns, "parameters": self._parameters or None}
        shown = "".join(f", {name}={value!r}" for name, value in facts.items() if value is not None)
        return f"SqlSource({self._database.shown!r}{shown})"


class RangedRows:
    """Rows of a keyed source by their number, as splits read them: a range of the key at a time."""

    def __init__(self, source: SqlSource) -> None:
        self._source, self._row = source, 0
        self._bounds = source.split(_PARTS_BYTES)
        self._open: tuple[int, pa.RecordBatch] | None = None

    def skip(self, rows: int) -> int:
        self._row = min(rows, self._bounds.rows)
        return self._row

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self._bounds.rows:
            return None
        number, within = divmod(self._row, self._bounds.rows_each)
        if self._open is None or self._open[0] != number:
            self._open = number, self._load(number)
        batch = self._open[1].slice(within, max_rows)
        self._row += batch.num_rows
        return batch

    def _load(self, number: int) -> pa.RecordBatch:
        source, bounds = self._source, self._bounds
        batches = source.read_range(bounds, number)
        wanted = min(bounds.rows_each, bounds.rows - number * bounds.rows_each)
        found = sum(batch.num_rows for batch in batches)
        if found != wanted:
            raise DataError(
                f"there are {found} rows from key {', '.join(bounds.starts[number])} on, and there were {wanted} when "
                "the table was split; rows must not change meanwhile: read a copy, or a query that leaves new rows out",
                file=source.name,
                row=number * bounds.rows_each,
            )
        return pa.concat_batches(batches).select(source.schema.names)

    def held_bytes(self) -> int:
        return self._open[1].nbytes if self._open is not None else 0

    def close(self) -> None:
        self._open = None
