"""Databases by URL, over ADBC: Arrow goes in and out, and no row becomes a Python object.

    database = Database("postgresql://pen@localhost/corpus")
    with database.connect() as connection:
        for batch in connection.batches(f"SELECT * FROM {database.quoted('documents')}"):
            ...

PostgreSQL sends results as a binary COPY, row after row, so that a result of any size takes the memory of one batch.
Errors name the database without its password, and what the driver says has the password taken out of it.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, ClassVar, Self
from urllib.parse import parse_qsl, quote, unquote

import pyarrow as pa

from penstock._optional import require
from penstock.errors import ConfigError, DataError, PenstockError
from penstock.files.filesystems import scheme_of

_OWN_OPTIONS = ("table", "query", "key", "columns", "mode")
"""Options of a URL that are penstock's, not the driver's."""
_CONNECT_SECONDS = 30
"""Longest wait for a server that does not answer; libpq waits for ever."""
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""A server that vanishes while it is read is noticed after a minute; systems wait for hours."""
_LOGIN = re.compile(
    r"password authentication failed|no password supplied|role .* does not exist|pg_hba|authentication|permission"
)
_LOST = re.compile(
    r"server closed the connection|connection (to server|refused|reset|timed out)|could not (connect|receive|send)|"
    r"no connection to the server|starting up|shutting down|in recovery mode|terminating connection|SSL error|"
    r"Broken pipe|broken pipe|not accepting connections|crash of another server process|unexpected EOF|"
    r"lost synchronization|Failed to connect|connection pointer is NULL|connection not open",
    re.IGNORECASE,
)
_LOST_STATES = ("08", "57P01", "57P02", "57P03", "57P05")
_MISSING_STATES = ("42P01", "42703", "3F000")
_NOISE = re.compile(r"\s*(\n\s*)?Query was: .*|\.? ?SQLSTATE: \w{5}\s*$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class SqlDialect:
    """Product behind a URL, and how its SQL differs from that of others."""

    name: str
    package: str
    """Package of its ADBC driver."""
    quote: str = '"'
    numbered: bool = False
    """True if parameters are `$1`, `$2`; otherwise each is `?`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _dialect, (self.name,)  # there is one of each, also in other processes


POSTGRESQL = SqlDialect("PostgreSQL", "adbc_driver_postgresql", numbered=True)
SQLITE = SqlDialect("SQLite", "adbc_driver_sqlite")
DUCKDB = SqlDialect("DuckDB", "adbc_driver_duckdb")
DIALECTS = {
    "postgresql": POSTGRESQL,
    "postgres": POSTGRESQL,
    "sqlite": SQLITE,
    "duckdb": DUCKDB,
    "snowflake": SqlDialect("Snowflake", "adbc_driver_snowflake"),
    "bigquery": SqlDialect("BigQuery", "adbc_driver_bigquery", quote="`"),
    **dict.fromkeys(("grpc", "grpc+tls", "grpc+tcp"), SqlDialect("Flight SQL", "adbc_driver_flightsql")),
}
"""Dialects by the scheme of a URL."""


def _dialect(name: str) -> SqlDialect:
    return next(dialect for dialect in DIALECTS.values() if dialect.name == name)


class Database:
    """Address of a database; nothing is opened before `connect`.

    `postgresql://user:password@host:port/name`, `sqlite:///relative.db`, `sqlite:////absolute.db`, the same with
    `duckdb`, or a URL of another ADBC driver. `options` are passed to the driver, and are never shown.
    """

    def __init__(self, url: str, options: Mapping[str, str] | None = None) -> None:
        if not isinstance(url, str) or scheme_of(url) not in DIALECTS:
            known = ", ".join(f"{scheme}://" for scheme in DIALECTS)
            raise ConfigError(f"{shown_database(str(url))!r} is no URL of a database; known are {known}")
        self.dialect = DIALECTS[scheme_of(url)]
        base, query = _cut(url)
        pairs = parse_qsl(query, keep_blank_values=True)
        self.own = {name: value for name, value in pairs if name in _OWN_OPTIONS}
        """Options of the URL that name what is read or written."""
        kept = "&".join(f"{name}={quote(value, safe='/:')}" for name, value in pairs if name not in _OWN_OPTIONS)
        self._url = f"{base}?{kept}" if kept else base
        self.shown = shown_database(self._url)
        """The URL without the password."""
        self._options = dict(options or {})
        self._secrets = sorted({*_secrets(self._url), *filter(None, self._options.values())}, key=len, reverse=True)
        self._parts = _parts(self._url)

    @property
    def file(self) -> str | None:
        """File of an embedded database; None for a server."""
        if self.dialect not in (SQLITE, DUCKDB):
            return None
        return unquote(self._url.partition("?")[0].partition("://")[2].removeprefix("/"))

    def quoted(self, *names: str) -> str:
        """Identifier in SQL, whatever characters are in it; several are schema and table."""
        mark = self.dialect.quote
        for name in names:
            if not name or "\0" in name:
                raise ConfigError(f"{name!r} cannot be a name in a database; expected text without NUL characters")
        return ".".join(f"{mark}{name.replace(mark, mark * 2)}{mark}" for name in names)

    def placeholder(self, number: int) -> str:
        """The parameter with this number, counted from 1."""
        return f"${number}" if self.dialect.numbered else "?"

    def connect(self, *, autocommit: bool = True, must_exist: bool = False) -> SqlConnection:
        """An open connection, for one thread at a time; `must_exist` refuses to make the file of a new database."""
        file = self.file
        if must_exist and file and not Path(file).exists():
            raise FileNotFoundError(f"no such database: {file!r} ({self.shown})")
        dbapi = _driver(self.dialect)
        with self.naming():
            return SqlConnection(self, self._open(dbapi, autocommit))

    def _open(self, dbapi: Any, autocommit: bool) -> Any:
        if self.dialect is DUCKDB and (file := self.file):
            path = str(Path(file).resolve())
            return _Instance.of(path).open(lambda: dbapi.connect(path, autocommit=autocommit), autocommit=autocommit)
        if self.dialect is SQLITE:
            return dbapi.connect(self.file or ":memory:", autocommit=autocommit)
        uri = self._url
        if self.dialect.name == "Snowflake":
            uri = uri.partition("://")[2]
        if self.dialect.name == "BigQuery":
            return dbapi.connect(db_kwargs=self._options, autocommit=autocommit)
        if self.dialect is POSTGRESQL:
            base, query = _cut(uri)
            given = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
            added = {"connect_timeout": _CONNECT_SECONDS, **_KEEPALIVE}
            options = [query] if query else []
            options += [f"{name}={value}" for name, value in added.items() if name not in given]
            uri = f"{base}?{'&'.join(options)}"
        instance = _Instance.of(repr((uri, sorted(self._options.items()))))
        return instance.open(
            lambda: dbapi.connect(uri, db_kwargs=self._options or None, autocommit=autocommit), autocommit=autocommit
        )

    @contextlib.contextmanager
    def naming(self, row: int | None = None) -> Iterator[None]:
        """Turn what a driver raises into an error that names the database and keeps its secrets."""
        try:
            yield
        except (PenstockError, FileNotFoundError):
            raise
        except Exception as error:
            if isinstance(error, (TypeError, KeyError, AttributeError, ModuleNotFoundError)):
                raise
            raise self._named(error, row) from None  # the driver's own text may hold the password

    def _named(self, error: Exception, row: int | None) -> Exception:
        if isinstance(error, OverflowError):
            said = "a date or a time of the key is infinite, before the year 1 or after 9999, which a state does not "
            said += "hold; choose another key, or leave these rows out with query="
            return DataError(said, file=self.shown, row=row)
        state = str(getattr(error, "sqlstate", None) or "")
        said = self.without_secrets(_NOISE.sub("", str(error)).strip())
        said = " ".join(re.sub(r"^[A-Z_]+: (\[libpq\] )?", "", said).split()).rstrip(" ^.")
        if any(part in said for part in self._parts):
            hint = "its message is not shown, because parts of the password are in it; in a URL, write / in a password "
            hint += "as %2F, and @ as %40"
            lost = state.startswith(_LOST_STATES) or (not state and _LOST.search(said))
            return (ConnectionError if lost else ConfigError)(f"{self.shown}: the driver failed, and {hint}")
        if re.search(r'database "?.*"? does not exist', said):
            return ConfigError(f"{self.shown}: {said}; create it, or correct the name in the URL")
        if state.startswith("28") or (not state and _LOGIN.search(said)):
            return PermissionError(f"{self.shown} refused the login: {said}; check the user and the password")
        if state.startswith(_LOST_STATES) or (not state and _LOST.search(said)):
            return ConnectionError(f"{self.shown}: the connection failed: {said}")
        if state == "42501":
            return PermissionError(f"{self.shown}: {said}; grant it to the user of the URL")
        if state in _MISSING_STATES or re.search(r"no such (table|column)|Catalog Error|Binder Error", said):
            return ConfigError(f"{self.shown}: {said}; check the names, which are case-sensitive here")
        if state.startswith("42"):
            return ConfigError(f"{self.shown} does not understand the query: {said}")
        return DataError(said, file=self.shown, row=row)

    def without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def __repr__(self) -> str:
        return f"Database({self.shown!r})"


class SqlConnection:
    """Open connection, for one thread at a time."""

    def __init__(self, database: Database, raw: Any) -> None:
        self.database, self._raw = database, raw
        self._open: list[Any] = []
        """Cursor whose result is being read, if any."""
        self._end = weakref.finalize(self, _close, raw, self._open)

    def batches(
        self, sql: str, parameters: Sequence[Any] = (), *, batch_bytes: int = 1 << 20
    ) -> pa.RecordBatchReader | Any:
        """Reader of the result, which arrives while it is read; one at a time."""
        self.end_result()
        with self.database.naming():
            cursor = self._raw.cursor()
            self._open.append(cursor)
            if self.database.dialect is POSTGRESQL:
                cursor.adbc_statement.set_options(**{"adbc.postgresql.batch_size_hint_bytes": str(batch_bytes)})
            cursor.execute(sql, list(parameters) or None)
            return cursor.fetch_record_batch()

    def rows(self, sql: str, parameters: Sequence[Any] = (), *, copy: bool = True) -> list[tuple[Any, ...]]:
        """All rows of a small result."""
        table = self.table(sql, parameters, copy=copy)
        with self.database.naming():
            return list(zip(*(column.to_pylist() for column in table.columns))) if table.num_rows else []

    def table(self, sql: str, parameters: Sequence[Any] = (), *, copy: bool = True) -> pa.Table:
        """A small result. PostgreSQL has no COPY of what is not a query, such as FETCH."""
        with self._cursor() as cursor:
            if not copy and self.database.dialect is POSTGRESQL:
                cursor.adbc_statement.set_options(**{"adbc.postgresql.use_copy": "false"})
            cursor.execute(sql, list(parameters) or None)
            return cursor.fetch_arrow_table()

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> None:
        with self._cursor() as cursor:
            cursor.execute(sql, list(parameters) or None)

    def ingest(self, table: Sequence[str], data: pa.Table, *, temporary: bool = False, create: bool = False) -> None:
        """Add rows to a table in bulk; their types must be those of its columns."""
        options: dict[str, Any] = {"temporary": True} if temporary else {}
        if len(table) > 1:
            options["db_schema_name"] = table[-2]
        with self._cursor() as cursor:
            cursor.adbc_ingest(table[-1], data, mode="create" if create else "append", **options)

    def commit(self) -> None:
        with self.database.naming():
            self._raw.commit()

    def rollback(self) -> None:
        with self.database.naming():
            self._raw.rollback()

    def end_result(self) -> None:
        """Let go of the result that is being read."""
        _end_result(self._open)

    def close(self) -> None:
        """Close it; an open transaction is rolled back. Idempotent, and silent if the server has gone."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _cursor(self) -> Iterator[Any]:
        with self.database.naming():
            cursor = self._raw.cursor()
            try:
                yield cursor
            finally:
                with contextlib.suppress(Exception):
                    cursor.close()


def _driver(dialect: SqlDialect) -> ModuleType:
    """Module of a driver. Those of warehouses are not part of an extra."""
    if dialect in (POSTGRESQL, SQLITE, DUCKDB):
        require("adbc_driver_manager", "sql")
        return require(f"{dialect.package}.dbapi", "sql")
    try:
        return importlib.import_module(f"{dialect.package}.dbapi")
    except ModuleNotFoundError as error:
        name = dialect.package.replace("_", "-")
        raise ModuleNotFoundError(
            f"{dialect.name} needs its ADBC driver, which is not installed; install it with: pip install {name}",
            name=error.name,
        ) from None


class _Instance:
    """Open connections to one database, of which others are made.

    Two instances of a DuckDB file in one process would destroy it, and a new one of PostgreSQL's driver asks the server
    for all of its types.
    """

    _all: ClassVar[dict[str, _Instance]] = {}

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._raws: list[Any] = []

    @classmethod
    def of(cls, name: str) -> _Instance:
        return cls._all.setdefault(name, cls())

    def open(self, connect: Callable[[], Any], *, autocommit: bool) -> Any:
        with self._lock:
            if self._raws:
                raw = self._raws[0].adbc_clone()
                if autocommit:
                    raw.adbc_connection.set_autocommit(True)
            else:
                raw = connect()
            self._raws.append(raw)
            return raw

    @classmethod
    def forget(cls, raw: Any) -> None:
        for instance in [*cls._all.values()]:
            with instance._lock:
                if raw in instance._raws:
                    instance._raws.remove(raw)


def _end_result(cursors: list[Any]) -> None:
    while cursors:
        cursor = cursors.pop()
        with contextlib.suppress(Exception):
            cursor.adbc_cancel()
        with contextlib.suppress(Exception):
            cursor.close()


def _close(raw: Any, cursors: list[Any]) -> None:
    _end_result(cursors)
    _Instance.forget(raw)
    with contextlib.suppress(Exception):
        raw.close()


def _cut(url: str) -> tuple[str, str]:
    """The URL before its options, and these. A password may have a question mark in it: libpq takes it as it is."""
    before = re.match(r"[^:]*://[^/]*@", url)
    place = url.find("?", before.end() if before is not None else 0)
    while place >= 0 and "@" in url[place:].partition("=")[0]:  # no name of an option: the password goes on
        place = url.find("?", place + 1)
    return (url, "") if place < 0 else (url[:place], url[place + 1 :])


def shown_database(url: str) -> str:
    """The URL of a database for messages: without a password, wherever it stands in it."""
    base, query = _cut(url)
    mark = url[len(base) : len(url) - len(query)]
    scheme, there, rest = base.partition("://")
    user, at, host = rest.rpartition("@")
    if at:
        name, colon, _ = user.partition(":")
        rest = f"{name}{':***' if colon else ''}@{host}"
    hidden = re.sub(r"(?i)([\w-]*(?:pass|pwd|secret|token|key|credential|auth)[\w-]*=)[^&]*", r"\1***", query)
    return f"{scheme}{there}{rest}{mark}{hidden}"


def _secrets(url: str) -> Iterator[str]:
    """The password of a URL, as it is written and as it is meant."""
    base, query = _cut(url)
    user, at, _ = base.partition("://")[2].rpartition("@")
    found = [user.partition(":")[2]] if at else []
    found += re.findall(r"(?i)(?:pass|pwd|secret|token|key|credential|auth)[\w-]*=([^&]*)", query)
    for secret in filter(None, found):
        yield from {secret, unquote(secret)}


def _parts(url: str) -> set[str]:
    """Pieces of a password with / or @ in it, which a driver takes for a port, a host or a name, and shows."""
    password = _cut(url)[0].partition("://")[2].rpartition("@")[0].partition(":")[2]
    if not re.search("[/@]", password):
        return set()
    return {text for part in re.split(r"[/@:?#&=,\[\]]", password) if part for text in (part, unquote(part))}


def table_parts(table: str | Sequence[str]) -> tuple[str, ...]:
    """`schema.table`, or a sequence of the parts, for names with dots in them."""
    parts = tuple(table.split(".")) if isinstance(table, str) else tuple(table)
    if not parts or not all(isinstance(part, str) and part for part in parts):
        raise ConfigError(f"table must be a name such as 'documents' or 'public.documents', got {table!r}")
    return parts
