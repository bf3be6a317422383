"""Tables of a database as the end of a pipeline: each row once, also after kill -9 of either side."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.compute as pc

from penstock.connections.sql import POSTGRESQL, SQLITE, Database, SqlConnection, table_parts
from penstock.connections.sql_types import declared_types, read_type, server_type, written_table, written_type
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.memory.budget import parse_bytes
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.checkpoint import schema_from_text, schema_to_text
from penstock.pipeline.stages import Sink, State

Mode = Literal["append", "replace", "upsert"]
POSITIONS = "penstock_positions"
"""Table of the positions of unfinished runs, in the schema of the table that is written."""
_STAGED = "penstock_staged"
_MOST_NAME_BYTES = 63
_TAKEN_OVER = (-1, "")
"""Line of a sink whose run another one in this process has resumed: that of no run."""
_WRITERS: weakref.WeakValueDictionary[str, SqlSink] = weakref.WeakValueDictionary()
"""Open sinks of this process, by run: one that was abandoned must not keep its locks when its run is resumed."""


class SqlSink(Sink):
    """Writes rows into a table, which is made if it is not there.

        SqlSink("postgresql://localhost/corpus", "documents")
        SqlSink("sqlite:///corpus.db", "documents", mode="upsert", key="id")

    `append` adds rows, `upsert` replaces those with the same `key`, and `replace` makes a new table that takes the
    place of the old one at the end: until then readers see the old one. Of rows with one key, the last counts.

    A run without a checkpoint is one transaction. `run(checkpoint=...)` commits rows together with the position of the
    run, in the table `penstock_positions`, at each save; a run that is resumed goes on at the one that was committed.
    The line of a run is deleted at its end. Columns are matched by name, and cast to the types of an existing table.
    """

    checkpoint_text: Callable[[State], str] | None = None

    def __init__(
        self,
        url: str,
        table: str | Sequence[str] | None = None,
        *,
        mode: Mode | None = None,
        key: str | Sequence[str] | None = None,
        batch_bytes: int | str = "4 MiB",
        options: Mapping[str, str] | None = None,
    ) -> None:
        self._database = database = Database(url, options)
        given = table or database.own.get("table")
        if given is None:
            raise ConfigError(f"{database.shown}: expected the name of a table: table=, or ?table= in the URL")
        self._table = table_parts(given)
        if database.dialect is POSTGRESQL and len(self._table[-1].encode()) > _MOST_NAME_BYTES:
            raise ConfigError(f"table {self._table[-1]!r} has a name of more than {_MOST_NAME_BYTES} bytes")
        chosen = mode or database.own.get("mode", "append")
        if chosen not in get_args(Mode):
            raise ConfigError(f"mode must be one of {', '.join(get_args(Mode))}, got {chosen!r}")
        self._mode = chosen
        key = key or database.own.get("key", "").split(",")
        self._key = [key] if isinstance(key, str) else [name for name in key if name]
        if self._mode == "upsert" and not self._key:
            raise ConfigError("mode='upsert' needs key=, the columns that tell which rows are the same")
        self._batch_bytes = self._asked_bytes = parse_bytes(batch_bytes)
        self._connection: SqlConnection | None = None
        self._prepared = self._direct = False
        self._exact: dict[str, pa.DataType] = {}
        """Types of columns to which databases would round without a word: whole numbers, fewer digits, dates."""
        self._declared: dict[str, pa.DataType | None] = {}
        """Types of the columns of SQLite, which takes any value into any column."""
        self._move = ""
        """Statement that takes staged rows into the table."""
        self._schema: pa.Schema | None = None
        self._buffer: list[pa.RecordBatch] = []
        self._rows = self._skip = self._held = 0
        self._durable = self._published = False
        self._line: tuple[int, str] | None = None
        """Rows and position of the run, as this sink found or committed them last; None before the first."""
        self._run = secrets.token_hex(8)

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._published:
            raise ConfigError(f"{self!r} has published its output; call reset() before writing again")
        if self._schema is None:
            self._schema = batch.schema
            self._check_schema(batch.schema)
        elif not batch.schema.equals(self._schema):
            difference = describe_difference(self._schema, batch.schema)
            raise SchemaError(f"{self!r} got another schema than before: {difference}")
        passed = min(self._skip, batch.num_rows)
        self._skip -= passed
        self._rows += batch.num_rows
        if passed < batch.num_rows:
            self._buffer.append(batch.slice(passed))
            self._held += batch.nbytes
        if self._held >= self._batch_bytes or not self._prepared:
            self._write()

    def flush(self) -> None:
        """Publish. Doing it again, or after a crash in the middle of it, is safe."""
        if self._published:
            return
        connection = self._connect()
        if self._durable:
            self._check_alone(connection)
        self._write()
        if self._mode == "replace" and self._schema is not None:
            target = self._quoted(self._table)
            connection.execute(f"DROP TABLE IF EXISTS {target}")
            connection.execute(
                f"ALTER TABLE {self._quoted(self._written)} RENAME TO {self._database.quoted(self._table[-1])}"
            )
        if self._durable:
            connection.execute(
                f"DELETE FROM {self._positions} WHERE run = {self._database.placeholder(1)}", [self._run]
            )
        connection.commit()
        self._published = True
        self._close()

    def memory_usage(self) -> int:
        return self._held

    def fit_budget(self, nbytes: int) -> None:
        self._batch_bytes = max(1, min(self._asked_bytes, nbytes // 16))

    def abort(self) -> None:
        """Roll back what was not committed, by `flush` or with a checkpoint."""
        self._buffer, self._held = [], 0
        self._close()

    close = abort

    def reset(self) -> None:
        """Ready for another run."""
        self.abort()
        self._schema = None
        self._run = secrets.token_hex(8)
        self._rows = self._skip = self._held = 0
        self._durable = self._published = False
        self._line = None
        self.checkpoint_text = None

    def checkpoint(self) -> State:
        if not self._durable:
            raise ConfigError("checkpoint() without restore(): a plain run cannot be resumed; call restore({}) first")
        connection = self._connect()
        self._check_alone(connection)
        self._write()
        schema = schema_to_text(self._schema) if self._schema is not None else None
        token = {"run": self._run, "rows": self._rows, "schema": schema}
        # While rows of before come again, the position is behind what is written.
        text = self.checkpoint_text(token) if self.checkpoint_text is not None and not self._skip else ""
        line = (self._rows + self._skip, text)
        marks = [self._database.placeholder(number) for number in range(1, 5)]
        connection.execute(f"DELETE FROM {self._positions} WHERE run = {marks[0]}", [self._run])
        connection.execute(
            f"INSERT INTO {self._positions} (run, target, written, position) VALUES ({', '.join(marks)})",
            [self._run, ".".join(self._table), *line],
        )
        connection.commit()
        self._line = line
        return token

    def committed_text(self, token: State) -> str | None:
        run = token.get("run") or ""
        self._end_abandoned(run)
        with self._database.connect() as connection:
            self._make_positions(connection)
            line = self._committed(connection, run)
        return line[1] or None if line is not None and line[0] > int(token.get("rows", 0)) else None

    def restore(self, token: State) -> None:
        self.reset()
        self._durable = True
        self._run, self._rows = token.get("run") or self._run, int(token.get("rows", 0))
        self._end_abandoned(self._run)
        self._schema = schema_from_text(token["schema"]) if token.get("schema") else None
        connection = self._connect()
        self._make_positions(connection)
        connection.commit()
        self._line = self._committed(connection, self._run)
        connection.commit()
        if not token:
            return
        if self._line is None:
            if token.get("finishing"):
                self._published = True
                self._close()
                return
            raise ResumeError(
                f"{self._database.shown} has no position of the run {self._run} in {POSITIONS}; it was deleted, or "
                f"this is another database: {self._start_again}"
            )
        committed, text = self._line
        self._skip = committed - self._rows
        if self._skip < 0:
            raise ResumeError(
                f"{self._database.shown} has {committed} rows of this run, and the checkpoint was saved after "
                f"{self._rows}: the database is an older copy; {self._start_again}"
            )
        if self._skip and text:  # the run should begin at this position, and its source is at an older one
            self._close()
            raise ResumeError(
                f"{self._database.shown} has got rows of the run {self._run} just now, from a process that was taken "
                "for dead; run again to go on after them"
            )
        self._check_committed(connection, committed)

    def _check_committed(self, connection: SqlConnection, committed: int) -> None:
        """Refuse to go on after rows that are no longer there: the table would have the last ones only."""
        if not committed:
            return
        target = self._quoted(self._written)
        counted = target if self._mode == "replace" else f"(SELECT 1 FROM {target} LIMIT 1) AS penstock_first"
        try:
            ((there,),) = connection.rows(f"SELECT count(*) FROM {counted}")
            connection.commit()
        except ConfigError as error:
            self._close()
            raise ResumeError(
                f"{self!r}: {committed} rows of this run were committed, and their table {target} is gone ({error}); "
                f"{self._start_again}"
            ) from error
        if there != committed if self._mode == "replace" else not there:
            self._close()
            raise ResumeError(
                f"{self!r}: {committed} rows of this run were committed, and their table {target} has "
                f"{there or 'none'} now; {self._start_again}"
            )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _end_abandoned(self, run: str) -> None:
        before = _WRITERS.get(run)
        if before is not None and before is not self:
            before.abort()
            before._line = _TAKEN_OVER

    def _make_positions(self, connection: SqlConnection) -> None:
        """Make the table of positions, or give one of an older release the column that it lacks."""
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {self._positions} (run varchar(32) PRIMARY KEY, target varchar(500) NOT NULL, "
            "written bigint NOT NULL, position text, saved_at timestamp DEFAULT CURRENT_TIMESTAMP)"
        )
        if "position" not in connection.table(f"SELECT * FROM {self._positions} LIMIT 0").schema.names:
            unless = "" if self._database.dialect is SQLITE else "IF NOT EXISTS "
            connection.execute(f"ALTER TABLE {self._positions} ADD COLUMN {unless}position text")

    def _committed(self, connection: SqlConnection, run: str) -> tuple[int, str] | None:
        """Rows and position of a run that are committed."""
        sql = f"SELECT written, position FROM {self._positions} WHERE run = {self._database.placeholder(1)}"
        found = connection.rows(sql, [run])
        return (int(found[0][0]), found[0][1] or "") if found else None

    def _check_alone(self, connection: SqlConnection) -> None:
        """Refuse to commit after another process has committed rows of the run, or has finished it.

        The line is locked first, by a change that changes nothing, so that of two processes one waits for the other.
        """
        mark = self._database.placeholder(1)
        connection.execute(f"UPDATE {self._positions} SET target = target WHERE run = {mark}", [self._run])
        if self._committed(connection, self._run) == self._line:
            return
        self._buffer, self._held = [], 0
        self._close()
        raise ResumeError(f"{self!r}: another process goes on with the run {self._run}; nothing more is written here")

    @property
    def _start_again(self) -> str:
        """Advice for a run that cannot go on, after which no rows are there twice."""
        if self._mode == "append":
            return "to start again, delete the checkpoint, and the rows of this run in the table"
        if self._mode == "replace":
            return f"to start again, delete the checkpoint, and the table penstock_{self._run} if it is there"
        return "delete the checkpoint to start again"

    @property
    def _written(self) -> tuple[str, ...]:
        """Table that rows go into."""
        return (*self._table[:-1], f"penstock_{self._run}") if self._mode == "replace" else self._table

    @property
    def _positions(self) -> str:
        return self._quoted((*self._table[:-1], POSITIONS))

    def _quoted(self, parts: Sequence[str]) -> str:
        return self._database.quoted(*parts)

    def _connect(self) -> SqlConnection:
        if self._connection is None:
            self._connection = self._database.connect(autocommit=False)
            if self._database.dialect is POSTGRESQL:  # or times with and without a zone are cast by that of the server
                self._connection.execute("SET TIME ZONE 'UTC'")
                self._connection.commit()
            self._prepared = self._direct = False
            _WRITERS[self._run] = self
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        self._prepared = self._direct = False
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.rollback()
            connection.close()

    def _check_schema(self, schema: pa.Schema) -> None:
        for field in schema:
            self._database.quoted(field.name)
            written_type(field, self._database.dialect)
        folded = [name.lower() for name in schema.names] if self._database.dialect is not POSTGRESQL else schema.names
        if len(set(folded)) < len(folded):
            twice = next(name for name in folded if folded.count(name) > 1)
            raise SchemaError(f"{self!r}: two columns are called {twice!r}")
        for name in self._key:
            if name not in schema.names:
                raise ConfigError(f"{self!r}: key {name!r} is no column; the columns are {', '.join(schema.names)}")

    def _write(self) -> None:
        """Send the rows that wait, inside the open transaction."""
        if self._schema is None or (self._prepared and not self._buffer):
            return
        buffer, self._buffer, self._held = self._buffer, [], 0
        table = written_table(pa.Table.from_batches(buffer, self._schema), self._database.dialect)
        connection = self._connect()
        if not self._prepared:
            self._prepare(connection, table)
        if not table.num_rows:
            return
        for name, kind in self._exact.items():
            self._check_exact(name, table.column(name), kind)
        if self._database.dialect is SQLITE:
            self._check_stored(table)
        for name in self._key:
            if table.column(name).null_count:  # SQLite would make up a number in its place
                raise DataError(f"{self!r}: key {name!r} is null in some rows; leave them out before the sink")
        if self._direct:
            connection.ingest(self._written, table)
            return
        if self._mode == "upsert":
            table = _last_of_each(table, self._key)
        connection.ingest([_STAGED], table, temporary=True)
        connection.execute(self._move)
        connection.execute(f"DELETE FROM {self._quoted([_STAGED])}")

    def _prepare(self, connection: SqlConnection, table: pa.Table) -> None:
        """Make the table if it is not there, and find out whether rows must be cast on their way into it."""
        assert self._schema is not None
        target, names = self._quoted(self._written), [self._database.quoted(name) for name in table.column_names]
        if not self._exists(connection):
            kinds = [written_type(field, self._database.dialect) for field in self._schema]
            columns = [f"{name} {kind}" for name, kind in zip(names, kinds)]
            if self._key:
                columns.append(f"PRIMARY KEY ({', '.join(self._database.quoted(name) for name in self._key)})")
            connection.execute(f"CREATE TABLE IF NOT EXISTS {target} ({', '.join(columns)})")
        there = connection.table(f"SELECT * FROM {target} LIMIT 0").schema
        missing = [name for name in table.column_names if name not in there.names]
        if missing:
            raise SchemaError(
                f"{self!r}: the table has no column {missing[0]!r}, its columns are {', '.join(there.names)}; rename "
                "or drop the column before the sink, add it to the table, or use mode='replace'"
            )
        connection.ingest([_STAGED], table.slice(0, 0), temporary=True, create=True)
        staged = connection.table(f"SELECT * FROM {self._quoted([_STAGED])} LIMIT 0").schema
        same = all(_same_type(staged.field(name), there.field(name)) for name in table.column_names)
        same = same and there.names == table.column_names
        fractions = [name for name in table.column_names if _has_fractions(table.schema.field(name).type)]
        if self._database.dialect is SQLITE:
            self._declared = declared_types(connection, self._written[-1])
            self._exact = {name: pa.int64() for name in fractions if self._declared.get(name) == pa.int64()}
        else:
            pairs = [(field, there.field(field.name)) for field in table.schema]
            held = {field.name: _rounded_to(field.type, found) for field, found in pairs}
            self._exact = {name: kind for name, kind in held.items() if kind is not None}
        self._direct = self._mode != "upsert" and (same or self._database.dialect is SQLITE)
        self._move = self._insert(target, names, self._casts(connection, table.column_names))
        self._prepared = True

    def _check_exact(self, name: str, column: pa.ChunkedArray, kind: pa.DataType) -> None:
        try:
            fitted = column.cast(kind)
            if pa.types.is_date(kind):  # which Arrow cuts times down to
                times = column.cast(pa.timestamp("us"))
                if not pc.all(pc.equal(fitted.cast(times.type), times)).as_py():
                    raise pa.ArrowInvalid("there are times of day")
        except pa.ArrowInvalid as error:
            what = "has fractions, or numbers beyond 64 bits," if kind == pa.int64() else f"is {column.type},"
            held = "has whole numbers" if kind == pa.int64() else f"holds {kind}"
            raise SchemaError(
                f"{self!r}: column {name!r} {what} and that of the table {held} ({error}); round it before the "
                "sink, or change the table"
            ) from error

    def _check_stored(self, table: pa.Table) -> None:
        """Refuse values that SQLite would keep although they are not of the column's type, or make null."""
        for name, column in zip(table.column_names, table.columns):
            declared, given = self._declared.get(name), column.type
            if pa.types.is_floating(given) and pc.any(pc.is_nan(column)).as_py():
                raise DataError(
                    f"{self!r}: column {name!r} has NaN, which SQLite stores as null; put null or a number in its "
                    "place before the sink"
                )
            if declared is None or declared.equals(given):
                continue
            try:
                if pa.types.is_string(given) and not pa.types.is_binary(declared):
                    numbers = column.cast(pa.float64())
                    if pc.any(pc.invert(pc.is_finite(numbers))).as_py():
                        raise pa.ArrowInvalid("there is NaN or infinity")
                    if pa.types.is_integer(declared):
                        numbers.cast(pa.int64())
                elif pa.types.is_integer(given) and pa.types.is_floating(declared):
                    column.cast(declared)
                elif pa.types.is_binary(given) or (pa.types.is_binary(declared) and not pa.types.is_string(given)):
                    raise pa.ArrowInvalid(f"got {given}")
            except pa.ArrowInvalid as error:
                raise SchemaError(
                    f"{self!r}: column {name!r} has values that are not of the type of the table's column, which is "
                    f"read as {declared} ({error}); convert it before the sink, or change the table"
                ) from error

    def _exists(self, connection: SqlConnection) -> bool:
        """True if the table is there; PostgreSQL asks for more rights for CREATE TABLE IF NOT EXISTS than for rows."""
        if self._database.dialect is not POSTGRESQL:
            return False
        found = connection.rows("SELECT to_regclass($1)::text", [self._quoted(self._written)])
        return found[0][0] is not None

    def _casts(self, connection: SqlConnection, names: Sequence[str]) -> list[str]:
        """Columns of the staged rows, cast to the types of the table where PostgreSQL does not by itself.

        Without their lengths: a cast to varchar(3) cuts text off, and an INSERT refuses what is longer. To SQL,
        `character` and `bit` without a length have that of 1.
        """
        quoted = [self._database.quoted(name) for name in names]
        if self._database.dialect is not POSTGRESQL:
            return quoted
        kinds = dict(
            connection.rows(
                "SELECT attname::text, regexp_replace(regexp_replace(format_type(atttypid, NULL), "
                r"'^character(\[\])?$', 'bpchar\1'), '^bit(\[\])?$', 'varbit\1') FROM pg_attribute "
                "WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
                [self._quoted(self._written)],
            )
        )
        return [f"CAST({column} AS {kinds[name]})" for name, column in zip(names, quoted)]

    def _insert(self, target: str, names: Sequence[str], values: Sequence[str]) -> str:
        sql = f"INSERT INTO {target} ({', '.join(names)}) SELECT {', '.join(values)} FROM {self._quoted([_STAGED])}"
        if self._mode != "upsert":
            return sql
        keys = [self._database.quoted(name) for name in self._key]
        changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in keys)
        action = f"UPDATE SET {changes}" if changes else "NOTHING"
        return f"{sql} WHERE true ON CONFLICT ({', '.join(keys)}) DO {action}"

    def __repr__(self) -> str:
        facts: dict[str, Any] = {"mode": self._mode if self._mode != "append" else None, "key": self._key or None}
        shown = "".join(f", {name}={value!r}" for name, value in facts.items() if value is not None)
        return f"SqlSink({self._database.shown!r}, {'.'.join(self._table)!r}{shown})"


def _same_type(one: pa.Field, other: pa.Field) -> bool:
    """True if rows of one type can be sent to a column of the other as they are."""
    return server_type(one) == server_type(other) and one.type == other.type


def _rounded_to(given: pa.DataType, found: pa.Field) -> pa.DataType | None:
    """Type that values must fit without rounding, if the database would round them to that of its column."""
    kind = read_type(found)
    if _has_fractions(given) and pa.types.is_integer(kind) and server_type(found) != "money":
        return pa.int64()
    digits = pa.types.is_decimal(given) and pa.types.is_decimal(kind) and given.scale > kind.scale
    if digits or (pa.types.is_timestamp(given) and pa.types.is_date(kind)):
        return kind
    return kind if pa.types.is_integer(given) and pa.types.is_floating(kind) else None


def _has_fractions(kind: pa.DataType) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _storage(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """The column as Arrow can group it."""
    kind = column.type
    if not isinstance(kind, pa.BaseExtensionType):
        return column
    return pa.chunked_array([chunk.storage for chunk in column.chunks], kind.storage_type)


def _last_of_each(table: pa.Table, key: Sequence[str]) -> pa.Table:
    """The last row of each key, in their order."""
    numbers = [str(at) for at in range(len(key))]  # a name of a column could be that of the place
    numbered = pa.table([_storage(table.column(name)) for name in key], numbers).append_column(
        "place", pa.array(range(table.num_rows), pa.int64())
    )
    kept = numbered.group_by(numbers, use_threads=False).aggregate([("place", "max")])
    if kept.num_rows == table.num_rows:
        return table
    return table.take(kept.column("place_max").combine_chunks().sort())
