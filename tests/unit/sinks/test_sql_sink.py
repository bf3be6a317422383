"""Tables of databases: modes, rows that are written once, tables that do not fit."""

from __future__ import annotations

import datetime
import decimal
import pickle
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers import PostgresServer

from penstock.connections.sql import Database
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.pipeline import Map, Pipeline, PipelineConfig
from penstock.sinks import SqlSink, open_sink
from penstock.sources import SqlSource
from penstock.testing import RowsSource

ROWS = [{"id": i, "text": f"x{i}"} for i in range(20)]


def batch(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows)


@pytest.fixture(params=["postgresql", "sqlite", "duckdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return str(request.getfixturevalue("postgres").url)
    return f"{request.param}:///{tmp_path}/a.db"


@pytest.fixture
def table() -> str:
    return f"t_{secrets.token_hex(6)}"


def seen(url: str, table: str, columns: str = "id, text") -> list[tuple[Any, ...]]:
    with Database(url).connect() as connection:
        return connection.rows(f"SELECT {columns} FROM {Database(url).quoted(table)} ORDER BY 1, 2")


def pairs(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in rows]


def write(sink: SqlSink, *parts: list[dict[str, Any]]) -> None:
    for part in parts:
        sink.consume(batch(part))
    sink.flush()


def test_append_adds_to_what_is_there(url: str, table: str) -> None:
    write(SqlSink(url, table), ROWS[:5])
    write(SqlSink(url, table, batch_bytes=1), ROWS[5:10], ROWS[10:])
    assert seen(url, table) == pairs(ROWS)


def test_replace_shows_the_old_table_until_the_end(url: str, table: str) -> None:
    write(SqlSink(url, table), ROWS[:3])
    sink = SqlSink(url, table, mode="replace", batch_bytes=1)
    sink.restore({})
    sink.consume(batch([{"id": 1, "text": "new", "more": 1.5}]))
    sink.checkpoint()
    assert seen(url, table) == pairs(ROWS[:3])
    sink.consume(batch([{"id": 2, "text": "new", "more": 2.5}]))
    sink.flush()
    assert seen(url, table, "id, text, more") == [(1, "new", 1.5), (2, "new", 2.5)]
    again = SqlSink(url, table, mode="replace")
    again.consume(batch(ROWS[:2]))
    again.abort()
    assert seen(url, table) == [(1, "new"), (2, "new")]


def test_upsert_keeps_the_last_row_of_each_key(url: str, table: str) -> None:
    def make() -> SqlSink:
        return SqlSink(url, table, mode="upsert", key="id")

    write(make(), ROWS[:4], [{"id": 1, "text": "a"}, {"id": 9, "text": "b"}, {"id": 1, "text": "c"}])
    write(make(), [{"id": 9, "text": "d"}])
    assert seen(url, table) == [(0, "x0"), (1, "c"), (2, "x2"), (3, "x3"), (9, "d")]


def test_rows_committed_after_the_last_saved_checkpoint_are_not_written_again(url: str, table: str) -> None:
    sink = SqlSink(url, table)
    sink.restore({})
    sink.checkpoint()
    sink.consume(batch(ROWS[:6]))
    saved = sink.checkpoint()
    sink.consume(batch(ROWS[6:13]))
    sink.checkpoint()  # committed, and the process dies before the checkpoint is saved
    sink.consume(batch(ROWS[13:15]))  # not committed
    resumed = SqlSink(url, table)
    resumed.restore(saved)
    write(resumed, ROWS[6:10], ROWS[10:14], ROWS[14:])
    assert seen(url, table) == pairs(ROWS)


def test_a_checkpoint_among_rows_that_come_again_still_knows_the_rest_of_them(url: str, table: str) -> None:
    sink = SqlSink(url, table)
    sink.restore({})
    saved = sink.checkpoint()
    sink.consume(batch(ROWS[:13]))
    sink.checkpoint()  # committed, and the process dies before the checkpoint is saved
    again = SqlSink(url, table)
    again.restore(saved)
    again.consume(batch(ROWS[:6]))
    saved = again.checkpoint()  # and the process dies again
    last = SqlSink(url, table)
    last.restore(saved)
    write(last, ROWS[6:])
    assert seen(url, table) == pairs(ROWS)


@pytest.mark.parametrize("mode", ["append", "replace", "upsert"])
@pytest.mark.parametrize("late", ["checkpoint", "flush"])
def test_a_run_that_another_process_goes_on_with_commits_nothing_more(
    url: str, table: str, mode: Any, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a long pause, in which the lock of the checkpoint went to a successor."""
    monkeypatch.setattr(SqlSink, "_end_abandoned", lambda sink, run: None)  # those of other processes stay
    key = "id" if mode == "upsert" else None
    paused, successor = (SqlSink(url, table, mode=mode, key=key) for _ in range(2))
    paused.restore({})
    token = paused.checkpoint()
    successor.restore(token)
    successor.consume(batch(ROWS[:3]))
    token = successor.checkpoint()
    if late == "flush":
        successor.flush()
        assert seen(url, table) == pairs(ROWS[:3])
    paused.consume(batch(ROWS[:3]))
    with pytest.raises(ResumeError, match="another process goes on with the run"):
        getattr(paused, late)()
    if late == "checkpoint":
        again = SqlSink(url, table, mode=mode, key=key)
        again.restore(token)
        write(again, ROWS[3:])
    assert seen(url, table) == pairs(ROWS if late == "checkpoint" else ROWS[:3])


def test_a_sink_whose_run_was_resumed_here_commits_no_rows_after_those_it_lost(url: str, table: str) -> None:
    abandoned = SqlSink(url, table)
    abandoned.restore({})
    token = abandoned.checkpoint()
    abandoned.consume(batch(ROWS[:3]))
    successor = SqlSink(url, table)
    successor.restore(token)
    abandoned.consume(batch(ROWS[3:6]))
    with pytest.raises(ResumeError, match="another process goes on with the run"):
        abandoned.checkpoint()
    write(successor, ROWS)
    assert seen(url, table) == pairs(ROWS)


def test_two_processes_cannot_both_commit_the_next_rows(postgres: PostgresServer, table: str) -> None:
    """The one that comes second waits for the transaction of the first, and then sees its line."""
    sink = SqlSink(postgres.url, table)
    sink.restore({})
    token = sink.checkpoint()
    answers: list[str] = []

    def commit() -> None:
        try:
            sink.consume(batch(ROWS[:3]))
            sink.checkpoint()
            answers.append("committed")
        except ResumeError as error:
            answers.append(str(error))

    with Database(postgres.url).connect(autocommit=False) as other, Database(postgres.url).connect() as watch:
        other.execute(f"UPDATE penstock_positions SET written = 3, position = '{{}}' WHERE run = '{token['run']}'")
        thread = threading.Thread(target=commit)
        thread.start()
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%penstock_positions%'"
        while thread.is_alive() and not watch.rows(waiting):
            time.sleep(0.01)
        other.commit()
        thread.join()
        assert "another process goes on" in answers[0]
        assert watch.rows("SELECT to_regclass($1)::text", [table]) == [(None,)]


def test_positions_of_an_older_release_get_the_column_they_lack(url: str, table: str) -> None:
    database = Database(url)
    schema = [f"s_{table}"] if database.dialect.name == "PostgreSQL" else []
    name = database.quoted(*schema, "penstock_positions")
    old = "run varchar(32) PRIMARY KEY, target varchar(500) NOT NULL, written bigint NOT NULL, saved_at timestamp"
    with database.connect() as connection:
        if schema:
            connection.execute(f"CREATE SCHEMA {schema[0]}")
        connection.execute(f"CREATE TABLE {name} ({old})")
        connection.execute(f"INSERT INTO {name} (run, target, written) VALUES ('older', '{table}', 0)")
    sink = SqlSink(url, [*schema, table])
    assert sink.committed_text({"run": "older", "rows": 0}) is None
    sink.restore({"run": "older", "rows": 0, "schema": None})
    sink.consume(batch(ROWS[:3]))
    token = sink.checkpoint()
    sink.abort()
    assert SqlSink(url, [*schema, table]).committed_text(token | {"rows": 1}) is None
    again = SqlSink(url, [*schema, table])
    again.restore(token)
    write(again, ROWS[3:])
    with database.connect() as connection:
        rows = connection.rows(f"SELECT id, text FROM {database.quoted(*schema, table)} ORDER BY 1")
    assert rows == pairs(ROWS)


def test_a_question_for_the_last_commit_that_fails_is_an_error(postgres: PostgresServer, table: str) -> None:
    with Database(postgres.url).connect() as connection:
        connection.execute(f"CREATE SCHEMA s_{table}")
        connection.execute(f"CREATE TABLE s_{table}.penstock_positions (run varchar(32), position text)")
    with pytest.raises(ConfigError, match="written"):
        SqlSink(postgres.url, f"s_{table}.{table}").committed_text({"run": "a", "rows": 0})


def test_a_column_of_postgresql_that_is_too_short_refuses_rows(postgres: PostgresServer, table: str) -> None:
    with Database(postgres.url).connect() as connection:
        connection.execute(f"CREATE TABLE {table} (text varchar(3), id smallint)")
    with pytest.raises(DataError, match="too long"):
        write(SqlSink(postgres.url, table), [{"text": "abcd", "id": 1}])
    write(SqlSink(postgres.url, table), [{"text": "abc", "id": 1}])
    assert seen(postgres.url, table) == [(1, "abc")]


def test_a_key_that_is_null_is_refused_and_one_of_uuids_is_not(url: str, table: str) -> None:
    sink = SqlSink(url, table, mode="upsert", key="id")
    with pytest.raises(DataError, match="key 'id' is null"):
        write(sink, [{"id": None, "text": "a"}, {"id": 1, "text": "b"}])
    sink.abort()
    ids = pa.array([b"a" * 16, b"b" * 16, b"a" * 16], pa.binary(16)).cast(pa.uuid())
    sink = SqlSink(url, f"{table}_u", mode="upsert", key="id")
    sink.consume(pa.record_batch({"id": ids, "text": ["x", "y", "z"]}))
    sink.flush()
    assert [text for text, _ in seen(url, f"{table}_u", "text, id")] == ["y", "z"]


def test_fractions_are_not_rounded_to_whole_numbers(url: str, table: str) -> None:
    write(SqlSink(url, table), [{"id": 1, "text": "a"}])
    write(SqlSink(url, table), [{"id": 2.0, "text": "b"}])
    with pytest.raises(SchemaError, match="'id' has fractions"):
        write(SqlSink(url, table), [{"id": 3.5, "text": "c"}])
    assert seen(url, table) == [(1, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("declared", "kind", "good", "bad"),
    [
        ("numeric(10, 2)", pa.decimal128(12, 4), decimal.Decimal("1.2300"), decimal.Decimal("1.2345")),
        ("date", pa.timestamp("us"), datetime.datetime(2024, 1, 1), datetime.datetime(2024, 1, 1, 23, 59)),
        ("double precision", pa.int64(), 1 << 53, (1 << 53) + 1),
    ],
)
@pytest.mark.parametrize("product", ["postgres", "duckdb"])
def test_values_are_not_rounded_to_what_a_column_holds(
    product: str, declared: str, kind: Any, good: Any, bad: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url = request.getfixturevalue("postgres").url if product == "postgres" else f"duckdb:///{tmp_path}/a.db"
    name = f"t{secrets.token_hex(6)}"
    with Database(url).connect() as connection:
        connection.execute(f"CREATE TABLE {name} (v {declared})")
        sink = SqlSink(url, name)
        sink.consume(pa.record_batch({"v": pa.array([good, None], kind)}))
        sink.flush()
        sink = SqlSink(url, name)
        with pytest.raises(SchemaError, match=r"'v' is .* and that of the table holds"):
            sink.consume(pa.record_batch({"v": pa.array([bad], kind)}))
        sink.abort()
        assert connection.rows(f"SELECT count(*) FROM {name}") == [(2,)]


@pytest.mark.parametrize(
    ("declared", "good", "bad"),
    [
        ("INTEGER", ["12", "-3", None], ["12x"]),
        ("BIGINT", [decimal.Decimal("2.00")], [decimal.Decimal("2.50")]),
        ("INTEGER", [None, None], ["99999999999999999999"]),
        ("REAL", ["1.5", "2"], ["n/a"]),
        ("REAL", [1], ["nan"]),
        ("REAL", [1 << 53], [(1 << 53) + 1]),
        ("TEXT", [1.5], [b"a"]),
        ("BLOB", ["a"], [1]),
        ("NUMERIC", ["n/a"], None),
    ],
)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_sqlite_takes_no_values_of_another_type(
    tmp_path: Path, declared: str, good: list[Any], bad: list[Any] | None, mode: Any
) -> None:
    url = f"sqlite:///{tmp_path}/a.db"
    with Database(url).connect() as connection:
        connection.execute(f"CREATE TABLE t (id INTEGER PRIMARY KEY, v {declared})")

    def rows(values: list[Any]) -> list[dict[str, Any]]:
        return [{"id": at, "v": value} for at, value in enumerate(values)]

    write(SqlSink(url, "t", mode=mode, key="id"), rows(good))
    before = seen(url, "t", "id, v")
    assert len(before) == len(good)
    if bad is not None:
        with pytest.raises(SchemaError, match="column 'v' has values that are not of the type"):
            write(SqlSink(url, "t", mode="upsert", key="id"), rows(bad))
    assert seen(url, "t", "id, v") == before


def test_nan_is_not_made_null_by_sqlite(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'v' has NaN"):
        write(SqlSink(f"sqlite:///{tmp_path}/a.db", "t"), [{"v": 1.0}, {"v": float("nan")}, {"v": None}])


def test_times_do_not_depend_on_the_time_zone_of_the_server(postgres: PostgresServer, table: str) -> None:
    url = f"{postgres.url}?options=-c%20TimeZone%3DAmerica/New_York"
    with Database(url).connect() as connection:
        assert connection.rows("SELECT current_setting('TimeZone')") == [("America/New_York",)]
        connection.execute(f"CREATE TABLE {table} (plain timestamp, zoned timestamptz)")
    noon = datetime.datetime(2024, 1, 1, 12)
    zoned = pa.array([noon.replace(tzinfo=datetime.UTC)], pa.timestamp("us", "UTC"))
    sink = SqlSink(url, table)
    sink.consume(pa.record_batch({"plain": zoned, "zoned": pa.array([noon], pa.timestamp("us"))}))
    sink.flush()
    utc = "plain::text, (zoned AT TIME ZONE 'UTC')::text"
    assert seen(url, table, utc) == [("2024-01-01 12:00:00", "2024-01-01 12:00:00")]


def test_a_run_killed_before_its_first_rows_are_saved_repeats_nothing(url: str, table: str, tmp_path: Path) -> None:
    from penstock.pipeline.checkpoint import load_checkpoint

    class Killed(SqlSink):
        """Dies right after a commit with rows, before anybody hears of it."""

        def checkpoint(self) -> dict[str, Any]:
            token = super().checkpoint()
            if token["rows"]:
                raise KeyboardInterrupt
            return token

        def __repr__(self) -> str:
            return super().__repr__()

    source = RowsSource(ROWS)
    with pytest.raises(KeyboardInterrupt):
        Pipeline(source, [], Killed(url, table)).run(tmp_path / "checkpoint")
    kept = load_checkpoint(tmp_path / "checkpoint")
    assert kept is not None
    assert kept["sink"]["rows"] == 0
    assert seen(url, table) == pairs(ROWS)
    Pipeline(RowsSource(ROWS), [], SqlSink(url, table)).run(tmp_path / "checkpoint")
    assert seen(url, table) == pairs(ROWS)


class Dying(SqlSink):
    """Dies right after a commit with rows, before anybody hears of it."""

    def checkpoint(self) -> dict[str, Any]:
        token = super().checkpoint()
        if token["rows"] >= 8:
            raise KeyboardInterrupt
        return token

    def __repr__(self) -> str:
        return super().__repr__().replace("Dying", "SqlSink")


@pytest.mark.parametrize("mode", ["append", "replace", "upsert"])
def test_rows_that_come_in_another_order_after_a_crash_are_there_once(
    url: str, table: str, mode: Any, tmp_path: Path
) -> None:
    """The position that was committed with the rows counts: which rows come again cannot be told by their number."""
    rows: list[dict[str, Any]] = [{"id": 10 * i, "text": f"x{i}" if i != 3 else None} for i in range(20)]
    given = f"duckdb:///{tmp_path}/given.db"
    write(SqlSink(given, "given"), rows)

    def run(kind: type[SqlSink]) -> Any:
        source = SqlSource(given, table="given", key="id")
        bad = tmp_path / "bad.jsonl"
        config = PipelineConfig(
            batch_rows=4, workers=1, checkpoint_seconds=0, on_error="quarantine", quarantine=bad, max_failure_ratio=0.9
        )
        sink = kind(url, table, mode=mode, key="id" if mode == "upsert" else None)
        return Pipeline(source, [Map(_longer)], sink, config).run(tmp_path / "checkpoint")

    with pytest.raises(KeyboardInterrupt):
        run(Dying)
    with Database(given).connect() as connection:
        for place in (-5, 95, 145):  # before, among and after what was committed and not saved
            connection.execute(f"INSERT INTO given VALUES ({place}, 'new')")
    report = run(SqlSink)
    expected = [
        {"id": row["id"], "text": row["text"] + "!"} for row in [*rows, {"id": 145, "text": "new"}] if row["text"]
    ]
    assert seen(url, table) == sorted(pairs(expected))
    assert (report.rows_in, report.rows_out, sum(report.quarantined.values())) == (21, 20, 1)
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 1


def test_rows_committed_while_a_run_is_resumed_are_not_skipped_by_their_number(
    url: str, table: str, tmp_path: Path
) -> None:
    """The COMMIT of a client that was killed may end on the server after its position was looked up."""

    class Early(SqlSink):
        def committed_text(self, token: dict[str, Any]) -> str | None:
            return None

        def __repr__(self) -> str:
            return super().__repr__().replace("Early", "SqlSink")

    def run(kind: type[SqlSink]) -> None:
        config = PipelineConfig(batch_rows=4, workers=1, checkpoint_seconds=0)
        sink = kind(url, table)
        Pipeline(RowsSource(ROWS), [], sink, config).run(tmp_path / "checkpoint")
        assert pickle.dumps(sink)  # it keeps nothing of the run

    with pytest.raises(KeyboardInterrupt):
        run(Dying)
    with pytest.raises(ResumeError, match="run again"):
        run(Early)
    run(SqlSink)
    assert seen(url, table) == pairs(ROWS)


def _longer(row: dict[str, Any]) -> dict[str, Any]:
    return {"id": row["id"], "text": row["text"] + "!"}


def test_positions_that_are_gone_or_older_are_refused(url: str, table: str) -> None:
    sink = SqlSink(url, table)
    sink.restore({})
    sink.consume(batch(ROWS[:6]))
    saved = sink.checkpoint()
    sink.abort()
    with Database(url).connect() as connection:
        connection.execute(f"UPDATE penstock_positions SET written = 2 WHERE run = '{saved['run']}'")
    with pytest.raises(ResumeError, match=r"has 2 rows of this run.*after 6.*older copy"):
        SqlSink(url, table).restore(saved)
    with Database(url).connect() as connection:
        connection.execute(f"DELETE FROM penstock_positions WHERE run = '{saved['run']}'")
    with pytest.raises(ResumeError, match="no position of the run"):
        SqlSink(url, table).restore(saved)


@pytest.mark.parametrize("mode", ["append", "upsert", "replace"])
@pytest.mark.parametrize("statement", ["DROP TABLE", "DELETE FROM"])
def test_a_run_whose_committed_rows_are_gone_is_not_resumed(url: str, table: str, mode: Any, statement: str) -> None:
    key = "id" if mode == "upsert" else None
    if mode == "replace":
        write(SqlSink(url, table), ROWS[:3])
    sink = SqlSink(url, table, mode=mode, key=key)
    sink.restore({})
    sink.consume(batch(ROWS[:6]))
    saved = sink.checkpoint()
    sink.abort()
    again = SqlSink(url, table, mode=mode, key=key)
    again.restore(saved)  # nothing is missing yet
    again.abort()
    held = f"penstock_{saved['run']}" if mode == "replace" else table
    with Database(url).connect() as connection:
        connection.execute(f"{statement} {held}")
    left = {"append": ", and the rows of this run in the table", "upsert": "", "replace": f", and the table {held}"}
    with pytest.raises(ResumeError, match=rf"6 rows of this run were committed.*delete the checkpoint{left[mode]}"):
        SqlSink(url, table, mode=mode, key=key).restore(saved)
    fresh = SqlSink(url, table, mode=mode, key=key)
    fresh.restore({})
    write(fresh, ROWS)
    assert seen(url, table) == pairs(ROWS)


def test_a_finished_run_leaves_no_position(url: str, table: str, tmp_path: Path) -> None:
    Pipeline(RowsSource(ROWS), [], SqlSink(url, table)).run(tmp_path / "checkpoint")
    with Database(url).connect() as connection:
        assert connection.rows(f"SELECT count(*) FROM penstock_positions WHERE target = '{table}'") == [(0,)]


def test_hostile_names_are_only_names(url: str) -> None:
    evil = f"a\"; DROP TABLE x; --'é{secrets.token_hex(3)}"
    rows = [{"id": 1, evil: "'; DROP TABLE x; --", "select": "\\"}]
    write(SqlSink(url, [evil], mode="upsert", key=["id", evil]), rows)
    write(SqlSink(url, [evil], mode="replace"), rows)
    with Database(url).connect() as connection:
        assert connection.table(f"SELECT * FROM {Database(url).quoted(evil)}").to_pylist() == rows


def test_a_table_that_does_not_fit_is_named(url: str, table: str) -> None:
    write(SqlSink(url, table), ROWS[:1])
    sink = SqlSink(url, table)
    with pytest.raises(SchemaError, match="no column 'other', its columns are id, text"):
        sink.consume(batch([{"id": 1, "other": 2}]))
    sink.abort()
    with Database(url).connect() as connection:
        connection.execute(f"CREATE TABLE {table}_strict (id bigint NOT NULL, text varchar(10))")
    sink = SqlSink(url, f"{table}_strict")
    with pytest.raises(DataError, match=r"(?i)null"):
        write(sink, [{"id": None, "text": "x"}, {"id": 2, "text": "y"}])
    sink.abort()
    assert seen(url, f"{table}_strict") == []


def test_another_schema_in_the_middle_is_refused(url: str, table: str) -> None:
    sink = SqlSink(url, table)
    sink.consume(batch(ROWS[:2]))
    with pytest.raises(SchemaError, match="another schema"):
        sink.consume(batch([{"id": "1", "text": "x"}]))
    sink.abort()


def test_options_that_cannot_work_are_refused() -> None:
    for options, said in (
        ({}, "name of a table"),
        ({"table": "t", "mode": "merge"}, "append, replace, upsert, got 'merge'"),
        ({"table": "t", "mode": "upsert"}, "needs key="),
    ):
        with pytest.raises(ConfigError, match=said):
            SqlSink("sqlite:///a.db", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="63 bytes"):
        SqlSink("postgresql://h/db", "t" * 64)
    sink = SqlSink("sqlite:///a.db", "t", mode="upsert", key="nope")
    with pytest.raises(ConfigError, match="key 'nope' is no column; the columns are id, text"):
        sink.consume(batch(ROWS[:1]))


def test_a_sink_is_opened_by_its_url(url: str, table: str) -> None:
    sink = open_sink(f"{url}?table={table}&mode=upsert&key=id")
    sink.consume(batch(ROWS))
    sink.flush()
    assert seen(url, table) == pairs(ROWS)


def test_a_table_in_another_schema_has_its_positions_there(postgres: PostgresServer, table: str) -> None:
    with Database(postgres.url).connect() as connection:
        connection.execute(f"CREATE SCHEMA s_{table}")
    sink = SqlSink(postgres.url, f"s_{table}.{table}", mode="replace")
    sink.restore({})
    sink.consume(batch(ROWS))
    sink.checkpoint()
    with Database(postgres.url).connect() as connection:
        assert connection.rows(f"SELECT written FROM s_{table}.penstock_positions") == [(20,)]
    sink.flush()
    with Database(postgres.url).connect() as connection:
        assert connection.rows(f"SELECT count(*) FROM s_{table}.{table}") == [(20,)]


def test_a_password_is_in_no_state_and_no_message(tmp_path: Path, postgres: PostgresServer) -> None:
    url = postgres.url.replace("pen@", "pen:s3cret-pw@")
    sink = SqlSink(url, "t_secret")
    Pipeline(RowsSource(ROWS), [], sink).run(tmp_path / "checkpoint")
    text = "".join(path.read_text() for path in (tmp_path / "checkpoint").iterdir() if path.suffix == ".json")
    assert "SqlSink" in text
    assert "s3cret" not in text + repr(sink)
