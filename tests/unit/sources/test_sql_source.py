"""Rows of databases: keys, pushdown, hostile names, resuming, connections that break."""

from __future__ import annotations

import datetime
import importlib.abc
import itertools
import json
import pickle
import secrets
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from tests.servers import PostgresServer, Proxy

from penstock.connections.sql import DIALECTS, Database
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.listing import DATABASE_SCHEMES
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import MemorySink, ParquetSink
from penstock.sources import SqlSource, open_source
from penstock.sources.splits import open_split, split_input
from penstock.sources.sql_rows import SqlRows
from penstock.testing import assert_resumes_exactly

EVIL = "a\"b; DROP TABLE x; --'é\\ $1 %s"


def read(source: Any, max_rows: int = 1000) -> list[dict[str, Any]]:
    rows = [row for batch in iter(lambda: source.next_batch(max_rows), None) for row in batch.to_pylist()]
    source.close()
    return rows


@pytest.fixture
def numbers(postgres: PostgresServer) -> str:
    """Table of 2,000 rows with a key."""
    name = f"numbers_{secrets.token_hex(6)}"
    with Database(postgres.url).connect() as connection:
        connection.execute(
            f"CREATE TABLE {name} AS SELECT i AS id, md5(i::text) AS text, repeat(md5(i::text), 16) AS wide "
            "FROM generate_series(1, 2000) i"
        )
        connection.execute(f"CREATE UNIQUE INDEX ON {name} (id)")
    return name


@pytest.fixture(params=["postgresql", "sqlite", "duckdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").url)
    return f"{request.param}:///{tmp_path}/a.db"


def make_table(url: str, rows: list[dict[str, Any]], name: str | None = None) -> str:
    name = name or f"t_{secrets.token_hex(6)}"
    with Database(url).connect() as connection:
        connection.execute(f"DROP TABLE IF EXISTS {Database(url).quoted(name)}")
        connection.ingest([name], pa.Table.from_pylist(rows), create=True)
    return name


# -- names and values ------------------------------------------------------------------------------------------------


def test_names_and_keys_may_have_any_characters(url: str) -> None:
    rows = [{EVIL: f"{EVIL}{i:03d}", "select": i, "Upper": -i} for i in range(30)]
    table = make_table(url, rows, f"{EVIL}{secrets.token_hex(4)}")

    def make(**options: Any) -> SqlSource:
        return SqlSource(url, table=[table], key=EVIL, **options)

    assert read(make()) == rows
    assert read(make(columns=["Upper"])) == [{"Upper": row["Upper"]} for row in rows]
    assert read(make(connections=2)) == rows
    assert_resumes_exactly(lambda: Pipeline(make(), [], None, PipelineConfig(batch_rows=11)))


KEYS: dict[str, list[Any]] = {
    "int": [-5, 0, 3, 1 << 40],
    "text": ["", "Z", "a", "ä", EVIL],
    "date": [datetime.date(1969, 1, 1), datetime.date(2024, 2, 29)],
    "moment": [datetime.datetime(2024, 2, 29, 1, 2, 3, n) for n in range(4)],
    "bytes": [b"", b"\x00", b"a'\\", b"\xff"],
    "uuid": sorted(uuid.uuid5(uuid.NAMESPACE_DNS, str(i)).bytes for i in range(5)),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_run_resumes_after_the_last_key_whatever_its_type(url: str, kind: str) -> None:
    values = KEYS[kind] if kind not in ("date", "moment") or not url.startswith("sqlite") else ["2020", "2024-02"]
    column = pa.array(values, pa.uuid() if kind == "uuid" and not url.startswith("sqlite") else None)
    table = f"t_{secrets.token_hex(6)}"
    with Database(url).connect() as connection:
        connection.ingest([table], pa.table({"k": column, "n": range(len(values))}), create=True)
    source = SqlSource(url, table=table, key="k")
    order = [row["n"] for row in read(source)]
    assert sorted(order) == [*range(len(values))]
    for count in {1, len(values) - 1, len(values)}:
        first = SqlSource(url, table=table, key="k")
        for _ in range(count):
            first.next_batch(1)
        state = json.loads(json.dumps(first.state_dict()))
        first.close()
        fresh = SqlSource(url, table=table, key="k")
        fresh.load_state_dict(state)
        assert [row["n"] for row in read(fresh)] == order[count:]


def test_a_key_of_several_columns_is_compared_as_a_whole(url: str) -> None:
    rows = [{"a": a, "b": f"b{b}", "n": 3 * a + b} for a in range(2) for b in range(3)]
    table = make_table(url, [*reversed(rows)])
    assert read(SqlSource(url, table=table, key=["a", "b"]), 5) == rows
    assert_resumes_exactly(lambda: Pipeline(SqlSource(url, table=table, key=["a", "b"], batch_bytes=50)))
    with pytest.raises(DataError, match=r"key a = 0.*add a column"):
        read(SqlSource(url, table=table, key="a"))


def test_a_type_is_asked_for_only_where_the_driver_does_not_tell_it(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, asked = f"t_{secrets.token_hex(6)}", []
    with Database(postgres.url).connect() as connection:
        connection.execute(f"CREATE DOMAIN d_{table} AS text")
        connection.execute(
            f"CREATE TABLE {table} AS SELECT i AS n, i::smallint AS s, i::oid AS o, 'x' AS t, ('y')::d_{table} AS d "
            "FROM generate_series(1, 9) i"
        )
    source = SqlSource(postgres.url, table=table, key=["n", "s", "o", "t", "d"])
    source.next_batch(4)
    state = source.state_dict()
    source.close()
    look = SqlRows._look

    def noted(rows: SqlRows, sql: str) -> pa.Table:
        asked.append(sql)
        return look(rows, sql)

    monkeypatch.setattr(SqlRows, "_look", noted)
    source = SqlSource(postgres.url, table=table, key=["n", "s", "o", "t", "d"])
    source.load_state_dict(state)
    assert [row["n"] for row in read(source)] == [5, 6, 7, 8, 9]
    assert len([sql for sql in asked if "pg_typeof" in sql]) <= 1


def test_parameters_are_bound_and_their_results_come_in_pages(url: str) -> None:
    rows = [{"id": i, "text": EVIL if i % 2 else "x", "wide": "y" * 100} for i in range(3000)]
    table = make_table(url, rows)
    mark = "$1" if url.startswith("postgresql") else "?"
    query = f"SELECT * FROM {table} WHERE text = {mark} -- and a comment"
    source = SqlSource(url, query=query, parameters=[EVIL], key="id", batch_bytes=10_000)
    assert read(source) == rows[1::2]
    resumed = SqlSource(url, query=query, parameters=[EVIL], key="id")
    source.reset()
    source.next_batch(7)
    resumed.load_state_dict(source.state_dict())
    source.close()
    assert read(resumed) == rows[15::2]


# -- pushdown --------------------------------------------------------------------------------------------------------


def test_the_server_sends_the_requested_columns_and_rows_only(postgres: PostgresServer, numbers: str) -> None:
    with Proxy(postgres.port) as proxy:
        url = postgres.url.replace(str(postgres.port), str(proxy.port))
        sent = []
        for options in (
            {"table": numbers},
            {"table": numbers, "columns": ["id"]},
            {"query": f"SELECT * FROM {numbers} WHERE id <= 20"},
        ):
            before = proxy.bytes_down
            source = SqlSource(url, key="id", **options)
            read(source)
            sent.append(proxy.bytes_down - before)
        login = SqlSource(url, query="SELECT 1 AS id", key="id")
        before = proxy.bytes_down
        read(login)
        least = proxy.bytes_down - before
    assert sent[0] - least > 2000 * 512
    assert sent[1] - least < 2000 * 24
    assert sent[2] - least < 20 * 700


def test_preparing_documents_asks_for_their_text_alone(postgres: PostgresServer, numbers: str, tmp_path: Path) -> None:
    from penstock import prepare
    from penstock.corpus.recipe import Recipe

    with Proxy(postgres.port) as proxy:
        url = postgres.url.replace(str(postgres.port), str(proxy.port))
        prepared = prepare(f"{url}?table={numbers}&key=id", tmp_path / "a.store", Recipe(tokenizer="byte"))
        assert prepared.manifest.rows == 2000
        assert proxy.bytes_down < 1_000_000  # `wide` alone is more, and each login is 70 KB


# -- keys that do not work, and none ---------------------------------------------------------------------------------


@pytest.mark.parametrize("delivered", [0, 1, 2, 3])
def test_two_rows_with_one_key_are_refused_and_never_lost(url: str, delivered: int) -> None:
    table = make_table(url, [{"k": k, "n": n} for n, k in enumerate([1, 2, 2, 3])])
    source = SqlSource(url, table=table, key="k", batch_bytes=1)
    with pytest.raises(DataError, match=r"two rows have the key k = 2"):  # noqa: PT012
        for _ in range(delivered):
            source.next_batch(1)
        fresh = SqlSource(url, table=table, key="k")
        fresh.load_state_dict(source.state_dict())
        read(fresh)
    source.close()


@pytest.mark.parametrize("delivered", [1, 2, 3])
def test_rows_that_a_collation_takes_for_one_are_neither_lost_nor_repeated(tmp_path: Path, delivered: int) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with Database(url).connect() as connection:
        connection.execute("CREATE TABLE t (k text COLLATE NOCASE)")
        connection.execute("INSERT INTO t VALUES ('a'), ('A'), ('b')")
    source = SqlSource(url, table="t", key="k", batch_bytes=1)
    rows = [row for _ in range(delivered) for row in source.next_batch(1).to_pylist()]
    fresh = SqlSource(url, table="t", key="k")
    fresh.load_state_dict(source.state_dict())
    source.close()
    if delivered < 3:
        with pytest.raises(DataError, match=r"two rows have the key k = [aA].*collation"):
            read(fresh)
    else:
        assert [row["k"] for row in rows + read(fresh)] == ["a", "A", "b"]
    fresh.close()


@pytest.mark.parametrize("connections", [1, 2])
def test_a_key_that_sqlite_computes_may_have_fractions(tmp_path: Path, connections: int) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    table = make_table(url, [{"k": n / 3, "n": n} for n in range(-4, 5)], "t")

    def make() -> SqlSource:
        query = f"SELECT k * 1.0 AS k, n FROM {table}"  # a computed column compares text as text
        return SqlSource(url, query=query, key="k", connections=connections, batch_bytes=1)

    source, fresh = make(), make()
    rows = source.next_batch(2).to_pylist() + source.next_batch(2).to_pylist()
    fresh.load_state_dict(source.state_dict())
    source.close()
    assert [row["n"] for row in rows + read(fresh)] == list(range(-4, 5))
    fresh.close()


@pytest.mark.parametrize(
    ("declared", "values"),
    [
        ("", "(1), ('a'), (x'00'), (2.5), ('b')"),
        ("", "(1), (2), ('x')"),
        ("TEXT", "('a'), (x'01'), ('b')"),
        ("BLOB", "('a'), ('b')"),
        ("", "(0.5), (9007199254740995), (9007199254740996)"),
    ],
)
def test_a_key_of_sqlite_with_values_of_several_types_is_refused(tmp_path: Path, declared: str, values: str) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with Database(url).connect() as connection:
        connection.execute(f"CREATE TABLE t (k {declared})")
        connection.execute(f"INSERT INTO t VALUES {values}")
    for options in ({"table": "t"}, {"query": "SELECT k FROM t"}, {"table": "t", "connections": 2}):
        if "query" in options and declared == "BLOB":
            continue  # all are text, and are read as text
        source = SqlSource(url, key="k", **options)  # type: ignore[arg-type]
        with pytest.raises(DataError, match=r"key 'k' is read as .*SQLite's type.*rowid"):
            source.next_batch(1)
        source.close()
    # What the message says works.
    rows = read(SqlSource(url, query="SELECT rowid AS number, * FROM t", key="number"))
    assert [row["number"] for row in rows] == list(range(1, values.count("(") + 1))


def test_a_row_without_a_key_is_refused_and_never_lost(url: str) -> None:
    table = make_table(url, [{"k": k} for k in (1, None, 3)])
    source = SqlSource(url, table=table, key="k")
    with pytest.raises(DataError, match=r"'k' is null.*IS NOT NULL"):
        source.next_batch(10)
    source.close()
    query = f'SELECT * FROM {table} WHERE "k" IS NOT NULL'
    assert read(SqlSource(url, query=query, key="k")) == [{"k": 1}, {"k": 3}]


def test_without_a_key_rows_are_read_and_a_run_that_should_resume_is_refused(url: str, tmp_path: Path) -> None:
    table = make_table(url, [{"n": n} for n in range(50)])
    source = SqlSource(url, table=table)
    assert len(read(source)) == 50
    with pytest.raises(ConfigError, match="no key to resume by; pass key="):
        Pipeline(source, [], ParquetSink(tmp_path / "a.parquet")).run(tmp_path / "checkpoint")
    source.reset()
    source.next_batch(3)
    state = source.state_dict()
    source.close()
    with pytest.raises(ResumeError, match=r"row 3.*no key to resume by"):
        SqlSource(url, table=table).load_state_dict(state)
    sink = MemorySink()
    Pipeline(SqlSource(url, table=table), [], sink).run()
    assert len(sink.rows()) == 50


@pytest.mark.parametrize("connections", [1, 2])
def test_a_key_of_years_that_states_do_not_hold_is_refused_by_name(
    postgres: PostgresServer, tmp_path: Path, connections: int
) -> None:
    duckdb = f"duckdb:///{tmp_path}/a.db"
    Database(duckdb).connect().close()
    for url, text, rows in ((postgres.url, "0044-03-15 BC", "i"), (duckdb, "12044-03-15", "s(i)")):
        query = f"SELECT date '{text}' + i AS day FROM generate_series(1, 3) {rows}"
        if url == duckdb:
            query = f"SELECT CAST(date '{text}' + i::int AS date) AS day FROM generate_series(1, 3) {rows}"
        source = SqlSource(url, query=query, key="day", connections=connections)
        with pytest.raises(DataError, match=r"of the key is infinite, before the year 1 or after 9999"):
            source.next_batch(10)
        source.close()


def test_a_table_whose_types_changed_is_not_resumed(url: str) -> None:
    table = make_table(url, [{"k": n, "v": n} for n in range(9)])
    source = SqlSource(url, table=table, key="k")
    source.next_batch(4)
    state = source.state_dict()
    source.close()
    make_table(url, [{"k": n, "v": str(n)} for n in range(9)], table)
    fresh = SqlSource(url, table=table, key="k")
    with pytest.raises(ResumeError, match=r"'v'.*int64.*string"):
        fresh.load_state_dict(state)
    fresh.close()


def test_a_query_that_fails_in_the_middle_is_named_after_the_rows_before(postgres: PostgresServer) -> None:
    query = "SELECT i AS id, 100 / (i - 5000) AS n FROM generate_series(0, 9000) i"
    source, count = SqlSource(postgres.url, query=query, key="id", batch_bytes=1000), 0
    with pytest.raises(DataError, match="division by zero"):  # noqa: PT012
        while (batch := source.next_batch(100)) is not None:
            count += batch.num_rows
    source.close()
    assert 0 <= count <= 5000


# -- what cannot be opened -------------------------------------------------------------------------------------------


def test_errors_of_names_say_what_is_there(url: str) -> None:
    table = make_table(url, [{"id": 1, "text": "x"}])
    for options, said in (
        ({"table": "nope"}, "nope"),
        ({"table": table, "key": "nope"}, "no key 'nope'; the columns are id, text"),
        ({"table": table, "columns": ["nope"]}, "no column 'nope'; the columns are id, text"),
        *([({"query": f"SELECT id, id FROM {table}"}, "called 'id'")] if url.startswith("postgresql") else []),
    ):
        source = SqlSource(url, **options)
        with pytest.raises((ConfigError, DataError), match=said):
            _ = source.schema
        source.close()


def test_a_missing_server_database_or_file_is_named(postgres: PostgresServer, tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="connection"):
        _ = SqlSource("postgresql://pen:s3cret-pw@127.0.0.1:1/pen", table="t").schema
    with pytest.raises(ConfigError, match='database "nope" does not exist'):
        _ = SqlSource(postgres.url.replace("/pen", "/nope").replace("//nope", "//pen"), table="t").schema
    with pytest.raises(FileNotFoundError, match=r"no\.db"):
        _ = SqlSource(f"sqlite:///{tmp_path}/no.db", table="t").schema
    assert not (tmp_path / "no.db").exists()


@pytest.fixture
def locked(postgres: PostgresServer) -> Iterator[str]:
    """URL of a user who needs a password, with a wrong one."""
    hba = postgres.directory / "data" / "pg_hba.conf"
    before = hba.read_text()
    with Database(postgres.url).connect() as connection:
        connection.execute("DROP ROLE IF EXISTS locked")
        connection.execute("CREATE ROLE locked LOGIN PASSWORD 'right'")
        hba.write_text(f"host all locked 127.0.0.1/32 scram-sha-256\n{before}")
        connection.rows("SELECT pg_reload_conf()")
        yield postgres.url.replace("pen@", "locked:s3cret-pw%40x@")
        hba.write_text(before)
        connection.rows("SELECT pg_reload_conf()")


def test_a_wrong_password_is_an_error_that_does_not_show_it(
    locked: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    import traceback

    source = SqlSource(locked, table="t", key="id", options={"adbc.postgresql.quirk": "s3cret-option"})
    shown = [repr(source), source.name]
    for attempt in (SqlSource(locked, table="t"), SqlSource(locked.replace("%40", "%zz"), table="t"), source):
        with pytest.raises((PermissionError, ConnectionError, DataError, ConfigError)) as caught:
            _ = attempt.schema
        shown.append("".join(traceback.format_exception(caught.value)))
    assert "refused the login" in shown[2]
    shown += [caplog.text, *capsys.readouterr()]
    assert not any("s3cret" in text or "@x" in text for text in shown), shown


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://pen:s3cret@h/db",
        "postgresql://pen:s3c@ret/s3cret@h/db",
        "postgresql://pen:s3cr?s3cret@h/db?sslmode=prefer",
        "postgresql://pen:s3cret?s3/s3cret@h/db?sslmode=prefer",
        "postgresql://h/db?user=pen&password=s3cret",
        "snowflake://pen:s3cret@account/db?token=s3cret",
    ],
)
def test_a_url_is_shown_without_its_password(given: str) -> None:
    shown = repr(SqlSource(given, table="t"))
    assert "s3c" not in shown
    assert "***" in shown


class NotInstalled(importlib.abc.MetaPathFinder):
    """Finds no driver of PostgreSQL."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.startswith("adbc_driver_postgresql"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname.partition(".")[0])


@pytest.mark.parametrize("password", ["sEc/R@et", "sEc@R/et", "sEc@R@et", "sEc%zz/R@et"])
def test_a_password_that_is_not_escaped_is_not_shown_in_part(password: str) -> None:
    import traceback

    source = SqlSource(f"postgresql://u:{password}@127.0.0.1:1/x", table="t", retry_seconds=0)
    with pytest.raises((ConfigError, ConnectionError), match="%2F") as caught:
        _ = source.schema
    shown = "".join(traceback.format_exception(caught.value))
    assert not any(part in shown for part in ("sEc", "R@", "@et")), shown
    # What the message says works: the server is reached for, and named.
    escaped = password.replace("%zz", "").replace("/", "%2F").replace("@", "%40")
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1.*port 1 "):
        _ = SqlSource(f"postgresql://u:{escaped}@127.0.0.1:1/x", table="t", retry_seconds=0).schema


def test_a_server_that_vanishes_is_asked_for_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def connect(uri: str, **_: Any) -> Any:
        asked.append(uri)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("penstock.connections.sql._driver", lambda dialect: SimpleNamespace(connect=connect))
    for query in ("", "?keepalives_idle=7&sslmode=prefer"):
        Database(f"postgresql://nowhere.invalid/x{query}").connect().close()
    assert asked == [
        "postgresql://nowhere.invalid/x?connect_timeout=30&keepalives_idle=30&keepalives_interval=10&keepalives_count=3",
        "postgresql://nowhere.invalid/x?keepalives_idle=7&sslmode=prefer&connect_timeout=30&keepalives_interval=10"
        "&keepalives_count=3",
    ]


def test_a_driver_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("adbc_driver_postgresql", "adbc_driver_postgresql.dbapi"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match=r"penstock\[sql\]"):
        _ = SqlSource("postgresql://h/db", table="t").schema
    with pytest.raises(ModuleNotFoundError, match="pip install adbc-driver-snowflake"):
        _ = SqlSource("snowflake://h/db", table="t").schema


def test_options_that_cannot_work_are_refused() -> None:
    for options, said in (
        ({}, "either table= or query="),
        ({"table": "t", "query": "SELECT 1"}, "either table= or query="),
        ({"table": "t", "connections": 2}, "needs key="),
        ({"table": "t", "connections": 0}, "at least 1"),
        ({"table": "a..b"}, "must be a name"),
    ):
        with pytest.raises(ConfigError, match=said):
            SqlSource("sqlite:///a.db", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no URL of a database"):
        SqlSource("s3://bucket", table="t")
    assert set(DIALECTS) == DATABASE_SCHEMES


# -- connections that break ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("connections", [1, 2])
def test_a_slow_connection_that_is_reset_changes_no_row(
    postgres: PostgresServer, numbers: str, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(10**9, -100_000)
    monkeypatch.setattr(time, "time", lambda: next(clock))  # a clock that jumps decides nothing
    with Proxy(postgres.port, latency_seconds=0.001, reset_after=250_000) as proxy:
        proxy.resets = 6
        url = postgres.url.replace(str(postgres.port), str(proxy.port))
        source = SqlSource(url, table=numbers, key="id", connections=connections, batch_bytes=20_000)
        source.fit_budget(1 << 20)
        assert [row["id"] for row in read(source, 50)] == [*range(1, 2001)]
        assert proxy.resets_done > 2 or connections > 1


def test_a_connection_that_is_lost_after_a_long_wait_is_made_again(
    postgres: PostgresServer, numbers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = SqlSource(postgres.url, table=numbers, key="id", retry_seconds=30)
    wanted = source.schema.names
    clock, answers = [0.0], [ConnectionError("lost"), ConnectionError("not there yet"), "rows"]
    monkeypatch.setattr(
        "penstock.sources.sql_rows.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda _: 0)
    )

    def answer() -> Any:
        clock[0] += 3600.0 if len(answers) == 3 else 1.0  # the server sorts for an hour, and is killed
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    assert (source._rows.retried(answer), source.schema.names) == ("rows", wanted)
    source.close()


def test_a_lost_connection_without_a_key_ends_the_run_with_the_reason(postgres: PostgresServer, numbers: str) -> None:
    with Proxy(postgres.port, reset_after=250_000) as proxy:
        url = postgres.url.replace(str(postgres.port), str(proxy.port))
        source = SqlSource(url, table=numbers, batch_bytes=20_000)
        with pytest.raises(ConnectionError, match="no key to resume by"):
            read(source)
        source.close()


# -- places that take a database -------------------------------------------------------------------------------------


def test_a_database_is_opened_by_its_url(url: str) -> None:
    rows = [{"id": i, "text": f"x{i}"} for i in range(20)]
    table = make_table(url, rows)
    assert read(open_source(f"{url}?table={table}&key=id")) == rows
    assert read(open_source(url, table=table, key="id", columns=["text"])) == [{"text": row["text"]} for row in rows]
    assert read(open_source(f"{url}?query=SELECT+id+FROM+{table}+WHERE+id+%3C+3&key=id")) == [
        {"id": i} for i in range(3)
    ]
    sink = MemorySink()
    Pipeline(f"{url}?table={table}&key=id", [], sink).run()
    assert sink.rows() == rows
    with pytest.raises(ConfigError, match="opened alone"):
        open_source([f"{url}?table={table}", "b.jsonl"])


def test_ranges_of_the_key_are_splits_with_the_same_rows(url: str) -> None:
    rows = [{"id": 7 * i, "text": "x" * 100} for i in range(900)]
    source = SqlSource(url, table=make_table(url, rows), key="id")
    splits = split_input(pickle.loads(pickle.dumps(source)), 20_000)  # noqa: S301
    assert len(splits) > 3
    assert [split.start for split in splits[1:]] == [split.stop for split in splits[:-1]]
    found = []
    for split in splits:
        reader = open_split(source, split, at=3)
        while (run := reader.cut(max_records=50, max_bytes=1 << 20)) is not None:
            found += reader.decode(run).batch.column("id").to_pylist()
        reader.close()
    source.close()
    starts = {split.start + n for split in splits for n in range(3)}
    assert found == [row["id"] for number, row in enumerate(rows) if number not in starts]
    assert "memory" not in json.dumps(source.sampled_identity())


def test_rows_that_come_between_are_noticed_by_splits(url: str) -> None:
    table = make_table(url, [{"id": 2 * i, "text": "x" * 100} for i in range(900)])
    source = SqlSource(url, table=table, key="id")
    (first, *_) = split_input(source, 20_000)
    with Database(url).connect() as connection:
        connection.execute(f"INSERT INTO {table} VALUES (1, 'new')")
    with pytest.raises(DataError, match="rows must not change"):
        open_split(source, first).cut(10, 1 << 20)
    source.close()


def test_a_streaming_loader_trains_from_a_table_and_resumes(postgres: PostgresServer, numbers: str) -> None:
    from penstock import PretrainDataLoader

    def make() -> Any:
        url = f"{postgres.url}?table={numbers}&key=id"
        options = {"streaming": True, "backend": "numpy", "batch_size": 4, "text_column": "text"}
        return PretrainDataLoader(url, tokenizer="byte", chunk_size=64, **options)

    with make() as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        wanted = [next(batches).input_ids.tolist() for _ in range(5)]
    with make() as loader:
        loader.load_state_dict(state)
        again = iter(loader)
        assert [next(again).input_ids.tolist() for _ in range(5)] == wanted
