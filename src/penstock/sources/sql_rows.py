"""Rows of a table or a query in the order of a key, by ranges of it.

A range is read by one query, `WHERE low <= key AND key < high ORDER BY key`, so an index of the key serves it. The ends
are bound as parameters, unless they are whole numbers. In PostgreSQL they are settings of the session, bound by
`set_config`: a COPY, which is what streams, takes no parameters.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from penstock.connections.sql import DUCKDB, POSTGRESQL, SQLITE, Database, SqlConnection
from penstock.connections.sql_types import (
    cast_for_reading,
    check_key,
    check_times,
    declared_types,
    key_text,
    key_value,
    read_batch,
    read_schema,
    selected,
    server_type,
    with_server_type,
)
from penstock.errors import ConfigError, DataError

_log = logging.getLogger(__name__)

Key = tuple[str, ...]
"""Values of the key's columns, as text."""
Answer = TypeVar("Answer")
_LOOK_ROWS = 1024
_SAMPLE_ROWS = 256
_PAGE_ROWS = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_ROOM_FOR_THREADS = 128 << 20
_NUMBER = "penstock_row"
_OWN_TYPES = ("text", "varchar", "bpchar", "name", "date", "timestamp", "timestamptz", "uuid", "numeric", "bytea")
"""Types of keys that PostgreSQL finds under the name that its driver tells."""
_STORED = {"integer": pa.int64(), "real": pa.float64(), "text": pa.string(), "blob": pa.binary()}
_OTHERS = {
    pa.int64(): "{0} >= ''",
    pa.float64(): f"{{0}} >= '' OR (typeof({{0}}) = 'integer' AND ({{0}} > {1 << 53} OR {{0}} < {-1 << 53}))",
    pa.string(): "{0} < '' OR {0} >= x''",
    pa.binary(): "{0} < x''",
}
"""Conditions for values of SQLite that are not of a type: numbers come before text, and text before bytes."""
_LITERALS = {pa.int64(): "0", pa.float64(): "0.0", pa.string(): "''", pa.binary(): "x'00'"}


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Rows from one key on, up to another; None: from the first, to the last."""

    low: Key | None = None
    high: Key | None = None
    last: bool = False
    """True if the row of `high` belongs to it."""


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """First key of every `rows_each` rows, the last key, and the number of rows."""

    starts: list[Key]
    last: Key | None
    rows: int
    rows_each: int

    def range(self, number: int) -> KeyRange:
        if number == len(self.starts) - 1:
            return KeyRange(self.starts[number], self.last, last=True)
        return KeyRange(self.starts[number], self.starts[number + 1])


class SqlRows:
    """Rows that a source reads: it may be used by several threads, each of which has a connection of its own."""

    def __init__(
        self,
        database: Database,
        relation: str,
        *,
        columns: Sequence[str] | None,
        key: Sequence[str],
        parameters: Sequence[Any] = (),
        table: Sequence[str] | None = None,
    ) -> None:
        self.database, self.key, self._parameters, self._table = database, tuple(key), tuple(parameters), table
        self._relation, self._columns = relation, columns
        self.memory_bytes = 256 << 20
        """Memory that an embedded database may use."""
        self.retry_seconds = 0.0
        self._reached = False
        self._idle: deque[SqlConnection] = deque()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_idle": deque()}  # connections stay here

    # -- columns -----------------------------------------------------------------------------------------------------

    @cached_property
    def schema(self) -> pa.Schema:
        """Columns that are read: those requested, and those of the key."""
        self._check_names()
        return read_schema(self._sent)

    @cached_property
    def _sent(self) -> pa.Schema:
        """Columns as the driver delivers them."""
        self._check_names()
        if self.database.dialect is SQLITE:
            return self._sqlite_schema()
        if self._selected == ", ".join(self.database.quoted(field.name) for field in self._given):
            return pa.schema(self._given)
        return self._look(f"SELECT {self._selected} FROM {self._relation} LIMIT 0").schema

    @cached_property
    def _selected(self) -> str:
        """Select list: names, and casts of what Arrow has no type for."""
        quoted, dialect = self.database.quoted, self.database.dialect
        return ", ".join(selected(field, quoted(field.name), dialect) for field in self._given)

    @cached_property
    def _given(self) -> list[pa.Field]:
        """Columns as they are in the database."""
        found = self._look(f"SELECT * FROM {self._relation} LIMIT {0 if self.database.dialect is not SQLITE else 1}")
        there = {field.name: field for field in found.schema}
        wanted = list(self._columns or there)
        for name in (*wanted, *self.key):
            if name not in there:
                what = "key" if name in self.key else "column"
                raise ConfigError(f"{self.database.shown}: no {what} {name!r}; the columns are {', '.join(there)}")
        read_schema(found.schema)  # refuses a name that is there twice
        if self.database.dialect is DUCKDB:
            described = self._look(f"DESCRIBE SELECT * FROM {self._relation}")
            names, kinds = (described.column(at).to_pylist() for at in (0, 1))
            there = {name: with_server_type(there[name], kind) for name, kind in zip(names, kinds)}
        return [there[name] for name in dict.fromkeys([*wanted, *self.key])]

    def _check_names(self) -> None:
        for field in self._given:
            if field.name in self.key:
                if cast_for_reading(field) is not None and server_type(field) != "oid":
                    raise ConfigError(f"key {field.name!r} has the type {server_type(field)}, which has no order here")
                if self.database.dialect is not SQLITE:
                    check_key(read_schema(pa.schema([field])).field(0))

    def _sqlite_schema(self) -> pa.Schema:
        """SQLite has types of values, not of columns: the declared ones count, then those of the first rows."""
        look = self._look(f"SELECT {self._selected} FROM {self._relation} LIMIT {_LOOK_ROWS}")
        table = self._table
        declared = self._ask(lambda it: declared_types(it, table[-1])) if table is not None else {}
        fields = []
        for field in look.schema:
            kind = declared.get(field.name) or field.type
            if declared.get(field.name) is None and look.column(field.name).null_count == look.num_rows:
                name = self.database.quoted(field.name)
                sql = f"SELECT typeof({name}) FROM {self._relation} WHERE {name} IS NOT NULL LIMIT 1"
                first = self._ask(lambda it, sql=sql: it.rows(sql, self._parameters))  # type: ignore[misc]
                kind = _STORED[first[0][0]] if first else pa.string()
            fields.append(pa.field(field.name, kind))
        return pa.schema(fields)

    def _look(self, sql: str) -> pa.Table:
        return self._ask(lambda connection: connection.table(sql, self._parameters))

    # -- ranges ------------------------------------------------------------------------------------------------------

    def read(self, part: KeyRange, batch_bytes: int, row: int = 0) -> Iterator[pa.RecordBatch]:
        """Rows of a range in the order of the key, in batches of about `batch_bytes`; without a key, of everything.

        `row` is the number of the first, for errors.
        """
        schema, before = self.schema, None
        with self.connection() as connection:
            sql, parameters = self._query(part, connection)
            for batch in self._batches(connection, sql, parameters, batch_bytes, row):
                if self.database.dialect in (POSTGRESQL, DUCKDB):
                    check_times(batch, self.database.dialect, self.database.shown, row)
                made = read_batch(batch, schema, self.database.shown, row)
                before = self._check_keys(made, before, row)
                row += made.num_rows
                yield made

    def key_at(self, batch: pa.RecordBatch, at: int) -> Key:
        """Key of one row of a batch."""
        return tuple(key_text(batch.column(name)[at].as_py()) for name in self.key)

    def bounds(self, bytes_each: int, low: Key | None = None) -> KeyBounds:
        """Ranges of about `bytes_each`, from a key on. It takes a pass over the index of the key, and no rows."""
        self.check_nulls()
        each = max(1, bytes_each // self.row_bytes)
        return self._ask(lambda connection: self._find_bounds(connection, each, low))

    def check_nulls(self) -> None:
        """Refuse a key that is null somewhere: such a row has no place in the order."""
        for name in self.key:
            column = self.database.quoted(name)
            sql = f"SELECT 1 FROM {self._relation} WHERE {column} IS NULL LIMIT 1"
            if self._ask(lambda it, sql=sql: it.rows(sql, self._parameters)):  # type: ignore[misc]
                raise DataError(
                    f"key {name!r} is null in some rows, which therefore have no place in the order; choose another "
                    f"key, or leave them out: query='SELECT ... WHERE {column} IS NOT NULL'",
                    file=self.database.shown,
                )
            if self.database.dialect is SQLITE:
                self._check_stored(name, column)

    def _check_stored(self, name: str, column: str) -> None:
        """Refuse a key of SQLite with values of several types: as values of one they have another order."""
        kind = self.schema.field(name).type
        sql = f"SELECT typeof({column}) FROM {self._relation} WHERE {_OTHERS[kind].format(column)} LIMIT 1"
        found = self._ask(lambda it: it.rows(sql, self._parameters))
        if found:
            raise DataError(
                f"key {name!r} is read as {kind}, and some of its values are of SQLite's type {found[0][0]!r}, which "
                "has another order or other digits; choose another key, such as the number of the row: "
                "query='SELECT rowid AS number, * FROM ...', key='number'",
                file=self.database.shown,
            )

    def check_alone(self, key: Key, row: int) -> None:
        """Refuse to resume after a key that several rows have for the database, if not for this process.

        A collation may take 'a' and 'A' for one: such rows come in any order.
        """
        if self._ask(lambda connection: self._count(connection, KeyRange(key, key, last=True))) > 1:
            raise DataError(
                f"two rows have the key {', '.join(self.key)} = {', '.join(key)} for the database, whose collation may "
                "ignore case or accents, so a run cannot be resumed between them; add a column that tells them apart: "
                "key=[..., 'id']",
                file=self.database.shown,
                row=row,
            )

    @cached_property
    def extent(self) -> tuple[int, Key | None]:
        """Number of rows, and the last key."""
        return self._ask(lambda connection: (self._count(connection, KeyRange()), self._last_key(connection)))

    def _count(self, connection: SqlConnection, part: KeyRange) -> int:
        where, parameters = self._where(part, connection)
        ((rows,),) = connection.rows(f"SELECT count(*) FROM {self._relation}{where}", parameters)
        return int(rows)

    def _last_key(self, connection: SqlConnection) -> Key | None:
        backwards = ", ".join(f"{self.database.quoted(name)} DESC" for name in self.key)
        sql = f"SELECT {self._keys()} FROM {self._relation} ORDER BY {backwards} LIMIT 1"
        found = connection.rows(sql, self._parameters)
        return tuple(map(key_text, found[0])) if found else None

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, as the first ones have them."""
        order = self._keys()
        sql = f"SELECT {self._selected} FROM {self._relation} ORDER BY {order} LIMIT {_SAMPLE_ROWS}"
        sample = self._look(sql)
        return int(max(1, sample.nbytes // max(1, sample.num_rows)))

    def _find_bounds(self, connection: SqlConnection, each: int, low: Key | None) -> KeyBounds:
        order = self._keys()
        where, parameters = self._where(KeyRange(low), connection)
        inner = f"SELECT {order}, row_number() OVER (ORDER BY {order}) AS {_NUMBER} FROM {self._relation}{where}"
        sql = f"SELECT {order} FROM ({inner}\n) AS s WHERE ({_NUMBER} - 1) % {each} = 0 ORDER BY {order}"
        starts = [tuple(map(key_text, row)) for row in connection.rows(sql, parameters)]
        if not starts:
            return KeyBounds([], None, 0, each)
        last = self._last_key(connection)
        rest = self._count(connection, KeyRange(starts[-1], last, last=True))
        return KeyBounds(starts, last, (len(starts) - 1) * each + rest, each)

    def _query(self, part: KeyRange, connection: SqlConnection) -> tuple[str, list[Any]]:
        where, parameters = self._where(part, connection)
        order = f" ORDER BY {self._keys()}" if self.key else ""
        sql = f"SELECT {self._selected} FROM {self._relation}{where}{order}"
        if self.database.dialect is SQLITE:
            # The driver takes the types of a result from its first rows, in which a column may be all null.
            typed = (f"{_LITERALS[field.type]} AS {self.database.quoted(field.name)}" for field in self._sent)
            values = ", ".join(self._whole_digits(field) for field in self._sent)
            sql = f"SELECT {', '.join(typed)} UNION ALL SELECT {values} FROM ({sql}\n)"
        return sql, parameters

    def _whole_digits(self, field: pa.Field) -> str:
        """Column of a result of SQLite; of fractions among text the driver would print seven digits."""
        name = self.database.quoted(field.name)
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            return name
        text = f"CAST({name} AS TEXT)"
        exact = f"CASE WHEN CAST({text} AS REAL) = {name} THEN {text} ELSE printf('%!.17g', {name}) END"
        return f"CASE WHEN typeof({name}) = 'real' THEN {exact} ELSE {name} END"

    def _where(self, part: KeyRange, connection: SqlConnection) -> tuple[str, list[Any]]:
        """Condition of a range, and all parameters of the query."""
        conditions, parameters, settings = [], list(self._parameters), []
        for name, sign, key in (("low", ">=", part.low), ("high", "<=" if part.last else "<", part.high)):
            if key is None:
                continue

            def value(at: int, name: str = name, key: Key = key) -> str:
                column, text = self.key[at], key[at]
                kind = self.schema.field(column).type
                if pa.types.is_integer(kind):
                    return str(int(text))
                if self.database.dialect is POSTGRESQL:
                    settings.append((f"penstock.{name}_{at}", text))
                    return f"current_setting('penstock.{name}_{at}')::{self._server_types[column]}"
                parameters.append(key_value(text, kind))
                mark = self.database.placeholder(len(parameters))
                return f"CAST({mark} AS uuid)" if isinstance(kind, pa.UuidType) else mark

            conditions.append(self._compared(sign, value))
        if settings:
            calls = ", ".join(f"set_config(${2 * at + 1}, ${2 * at + 2}, false)" for at in range(len(settings)))
            connection.table(f"SELECT {calls}", [text for setting in settings for text in setting])
        return (f" WHERE {' AND '.join(conditions)}" if conditions else ""), parameters

    def _compared(self, sign: str, value: Callable[[int], str]) -> str:
        """The key beside a value; DuckDB has no ranges of rows, so columns are compared one after the other there."""
        names = [self.database.quoted(name) for name in self.key]
        if self.database.dialect is not DUCKDB:
            return f"{_joined(names)} {sign} {_joined([value(at) for at in range(len(names))])}"
        cases = []
        for last in range(len(names)):
            same = [f"{names[at]} = {value(at)}" for at in range(last)]
            strict = sign if last == len(names) - 1 else sign[0]
            cases.append(" AND ".join([*same, f"{names[last]} {strict} {value(last)}"]))
        return f"({' OR '.join(cases)})" if len(cases) > 1 else cases[0]

    @cached_property
    def _server_types(self) -> dict[str, str]:
        """Types of the key's columns, as PostgreSQL spells them; those of users with their schema."""
        kinds = {field.name: server_type(field) for field in self._given if field.name in self.key}
        for name, kind in kinds.items():
            if kind in _OWN_TYPES or pa.types.is_integer(self.schema.field(name).type):
                continue  # whole numbers are written into the query
            found = self._look(f"SELECT pg_typeof({self.database.quoted(name)})::text FROM {self._relation} LIMIT 1")
            kinds[name] = found.column(0)[0].as_py() if found.num_rows else "text"
        return kinds

    def _keys(self) -> str:
        return ", ".join(self.database.quoted(name) for name in self.key)

    def _check_keys(self, batch: pa.RecordBatch, before: Any, row: int) -> Any:
        """Refuse two rows with one key, which follow one another; returns the last key."""
        if not self.key or not batch.num_rows:
            return before
        columns = [_comparable(batch.column(name)) for name in self.key]
        same = None
        for column in columns:
            equal = pc.equal(column.slice(1), column.slice(0, len(column) - 1))
            same = equal if same is None else pc.and_(same, equal)
        with self.database.naming(row):
            first, last = (tuple(column[place].as_py() for column in columns) for place in (0, -1))
        at = -1 if before is None or before != first else 0
        if at < 0 and pc.any(same).as_py():
            at = int(pc.index(same, True).as_py()) + 1
        if at >= 0:
            value = ", ".join(self.key_at(batch, at))
            raise DataError(
                f"two rows have the key {', '.join(self.key)} = {value}, so a run cannot be "
                "resumed between them; add a column that tells them apart: key=[..., 'id']",
                file=self.database.shown,
                row=row + at,
            )
        return last

    # -- connections -------------------------------------------------------------------------------------------------

    def retried(self, action: Callable[[], Answer]) -> Answer:
        """The answer, asked for again while the server cannot be reached, up to `retry_seconds` after it was."""
        deadline, pause = 0.0, _FIRST_PAUSE
        while True:
            try:
                return action()
            except ConnectionError as error:
                self.close()
                deadline = deadline or time.monotonic() + self.retry_seconds  # an answer may take longer than that
                if not self._reached or time.monotonic() + pause > deadline:
                    raise
                _log.warning("%s; trying again", error)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.contextmanager
    def connection(self) -> Iterator[SqlConnection]:
        """An open connection, used again afterwards unless something went wrong."""
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self.database.connect(must_exist=True)
            self._reached = True
            if self.database.dialect is DUCKDB:
                connection.execute("SET TimeZone = 'UTC'")
                self._fit_duckdb(connection)
        done = False
        try:
            yield connection
            done = True
        finally:
            connection.end_result()
            if done:
                self._idle.append(connection)
            else:
                connection.close()

    def _fit_duckdb(self, connection: SqlConnection) -> None:
        """Limit what it keeps in memory; a sort of more goes to disk, which needs room for each thread."""
        connection.execute("SET preserve_insertion_order = false")  # ORDER BY decides
        if self.memory_bytes < _ROOM_FOR_THREADS:
            connection.execute("SET threads = 1")
        connection.execute(f"SET memory_limit = '{max(32, self.memory_bytes >> 20)}MB'")

    def close(self) -> None:
        """Close all connections that are not in use."""
        with contextlib.suppress(IndexError):
            while True:
                self._idle.pop().close()

    def _ask(self, question: Callable[[SqlConnection], Answer]) -> Answer:
        def ask() -> Answer:
            with self.connection() as connection:
                return question(connection)

        return self.retried(ask)

    def _batches(
        self, connection: SqlConnection, sql: str, parameters: Sequence[Any], batch_bytes: int, row: int
    ) -> Iterator[pa.RecordBatch]:
        if parameters and self.database.dialect is POSTGRESQL:
            yield from self._pages(connection, sql, parameters, batch_bytes)
            return
        reader = connection.batches(sql, parameters, batch_bytes=batch_bytes)
        first = self.database.dialect is SQLITE
        while True:
            with self.database.naming(row):
                batch = next(reader, None)
            if batch is None:
                return
            if first:
                batch, first = batch.slice(1), False
            row += batch.num_rows
            if batch.num_rows:
                yield batch

    def _pages(
        self, connection: SqlConnection, sql: str, parameters: Sequence[Any], batch_bytes: int
    ) -> Iterator[pa.RecordBatch]:
        """Rows of a query with parameters, which PostgreSQL sends whole unless a cursor is asked page by page."""
        connection.execute("BEGIN")
        connection.execute(f"DECLARE penstock_cursor NO SCROLL CURSOR FOR {sql}", parameters)
        rows = _PAGE_ROWS
        while True:
            page = connection.table(f"FETCH {rows} FROM penstock_cursor", copy=False)
            if not page.num_rows:
                break
            yield from page.combine_chunks().to_batches()
            rows = max(1, batch_bytes * page.num_rows // max(1, page.nbytes))
        connection.execute("COMMIT")


def _joined(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


def _comparable(column: Any) -> Any:
    return column.storage if isinstance(column.type, pa.BaseExtensionType) else column
