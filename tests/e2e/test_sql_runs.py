"""Runs from and into databases: servers and writers that are killed, `penstock run`, a store from a table."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.servers import KILLS, PostgresServer, missing
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.connections.sql import Database
from penstock.errors import StageError
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import MemorySink, SqlSink
from penstock.sources import SqlSource
from penstock.testing import RowsSource

ROWS = [{"id": i, "text": f"{i:06d}" * 20} for i in range(400)]


@pytest.fixture(scope="module")
def victim() -> Iterator[PostgresServer]:
    """A server that may be killed."""
    if reason := missing(*PostgresServer.packages):
        pytest.skip(reason)
    with PostgresServer() as server:
        yield server


def test_a_server_killed_while_it_is_read_loses_no_row_and_repeats_none(
    victim: PostgresServer, caplog: pytest.LogCaptureFixture
) -> None:
    with Database(victim.url).connect() as connection:
        connection.execute(
            "CREATE TABLE long AS SELECT i AS id, repeat(md5(i::text), 64) AS text FROM generate_series(1, 16000) i"
        )
        connection.execute("CREATE UNIQUE INDEX ON long (id)")
    source, found, kills = SqlSource(victim.url, table="long", key="id", batch_bytes=1 << 16), [], 0
    while (batch := source.next_batch(500)) is not None:
        found += batch.column("id").to_pylist()
        if kills < KILLS and len(found) > 16000 * kills // KILLS:
            victim.restart()
            kills += 1
    assert found == [*range(1, 16001)]
    assert kills == KILLS
    assert "trying again" in caplog.text


class Killing(RowsSource):
    """Kills a server before some of its rows, once for each."""

    def __init__(self, server: PostgresServer, at: list[int]) -> None:
        super().__init__(ROWS, batch_rows=20)
        self._server, self._at = server, at

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._at and self._row >= self._at[0]:
            self._at.pop(0)
            self._server.restart()
        return super().next_batch(max_rows)


def test_a_server_killed_while_it_is_written_has_every_row_once(victim: PostgresServer, tmp_path: Path) -> None:
    at = [len(ROWS) * (kill + 1) // (KILLS + 1) for kill in range(KILLS)]
    config = PipelineConfig(checkpoint_seconds=0, batch_rows=20, workers=1)
    failures = 0
    while True:
        sink = SqlSink(victim.url, "out")
        try:
            report = Pipeline(Killing(victim, at), [], sink, config, budget="64 KiB").run(tmp_path / "checkpoint")
            break
        except StageError as error:
            assert "SqlSink" in str(error)  # noqa: PT017 - what ends a run says which stage
            failures += 1
    assert (report.rows_out, at) == (400, [])
    assert 1 <= failures <= KILLS  # the source reads ahead: it may kill twice before the sink notices
    back = MemorySink()
    Pipeline(SqlSource(victim.url, table="out", key="id"), [], back).run()
    assert back.rows() == ROWS


WRITER = """
import sys, time
from penstock.pipeline import Map, Pipeline, PipelineConfig
from penstock.sinks import SqlSink
from penstock.testing import RowsSource

def pause(batch):
    time.sleep(float(sys.argv[3]))
    return batch

rows = [{"id": i, "text": f"{i:06d}" * 20} for i in range(400)]
config = PipelineConfig(checkpoint_seconds=0, batch_rows=20, workers=1)
Pipeline(RowsSource(rows), [Map(pause, batch=True)], SqlSink(sys.argv[1], "out_child"), config).run(sys.argv[2])
"""


def test_a_writer_that_is_killed_goes_on_and_repeats_nothing(
    victim: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", WRITER, victim.url, str(tmp_path / "checkpoint")]
    with subprocess.Popen([*command, "0.05"]) as child, Database(victim.url).connect() as connection:
        while child.poll() is None:
            if connection.rows("SELECT to_regclass('out_child')::text") != [(None,)] and connection.rows(
                "SELECT 1 FROM penstock_positions WHERE target = 'out_child' AND written > 50"
            ):
                child.kill()
                break
    with Database(victim.url).connect() as connection:
        ((written,),) = connection.rows("SELECT count(*) FROM out_child")
    assert 0 < written < 400
    monkeypatch.setattr(sys, "argv", ["-c", *command[3:], "0"])
    exec(WRITER, {"__name__": "__main__"})
    with Database(victim.url).connect() as connection:
        assert connection.rows("SELECT count(*), count(DISTINCT id), max(id) FROM out_child") == [(400, 400, 399)]


def test_penstock_run_reads_and_writes_databases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink = SqlSink("sqlite:///in.db", "docs")
    sink.consume(pa.RecordBatch.from_pylist(ROWS))
    sink.flush()
    Path("short.yaml").write_text(
        "source: sqlite:///in.db?table=docs&key=id\nsink: duckdb:///out.db?table=a\ncheckpoint: run\n"
    )
    Path("long.yaml").write_text(
        "source: {type: sql, url: 'sqlite:///in.db', table: docs, key: id, columns: [id, text]}\n"
        "transforms: [{filter: id < 10}]\n"
        "sink: {path: 'duckdb:///out.db', table: b, mode: upsert, key: id}\n"
    )
    for name in ("short.yaml", "long.yaml", "long.yaml"):
        done = CliRunner().invoke(app, ["run", name, "--json"])
        assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["rows_out"] == 10
    with Database("duckdb:///out.db").connect() as connection:
        assert connection.rows("SELECT count(*) FROM a") == [(400,)]
        assert connection.rows("SELECT count(*) FROM b") == [(10,)]
    dry = CliRunner().invoke(app, ["run", "short.yaml", "--dry-run"])
    assert dry.exit_code == 0, dry.output
    assert "id, text" in dry.output
    nowhere = "source=postgresql://pen:s3cret@127.0.0.1:1/x?table=t"
    wrong = CliRunner().invoke(app, ["run", "short.yaml", "--set", nowhere])
    assert wrong.exit_code == 1
    assert "s3cret" not in wrong.output
