"""Servers of remote files that are killed, throttled and slow while their files are read: every row comes once."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.servers import KILLS, S3Server, environment_of, missing
from typer.testing import CliRunner

from penstock import Pipeline, PipelineConfig
from penstock.cli.main import app
from penstock.errors import ChangedFileError
from penstock.files.listing import list_files
from penstock.files.objects import open_bucket
from penstock.sinks import MemorySink
from penstock.sources import open_source

ROWS = [{"n": number, "text": f"{number} " * 60} for number in range(30_000)]


def put(url: str, data: Any) -> None:
    bucket, key = open_bucket(url)
    bucket.write(key, bytes(data))


@pytest.mark.skipif(bool(missing(*S3Server.packages)), reason=str(missing(*S3Server.packages)))
def test_a_server_that_is_killed_while_its_files_are_read_costs_no_row_and_repeats_none() -> None:
    with S3Server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        table = pa.Table.from_pylist(ROWS)
        file = pa.BufferOutputStream()
        pq.write_table(table, file, row_group_size=1000)
        put(f"{server.url}/p/a.parquet", file.getvalue())
        put(f"{server.url}/j/a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS).encode())
        for kind, options in (("p", {}), ("j", {"schema": table.schema})):
            source: Any = open_source(f"{server.url}/{kind}", **options)
            source.fit_budget(2 << 20)  # little is read ahead, so that every kill is in the middle
            found: list[int] = []
            kills, restart = 0, threading.Timer(0, server.answers)
            restart.start()
            while (batch := source.next_batch(100)) is not None:
                found += batch.column("n").to_pylist()
                if kills < KILLS and len(found) > (kills + 1) * len(ROWS) // (KILLS + 1):
                    kills += 1
                    restart.join()
                    server.kill()
                    restart = threading.Timer(0.2, server.start)
                    restart.start()
            restart.join()
            assert found == list(range(len(ROWS)))
            assert kills == KILLS


class _Throttle(BaseHTTPRequestHandler):
    """Passes requests on to a server, but answers every second one with 503 or 429."""

    protocol_version = "HTTP/1.1"
    target = 0
    refused = asked = 0

    def log_message(self, *_: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind = type(self)
        kind.asked += 1
        if kind.asked % 2:
            kind.refused += 1
            body = b"<Error><Code>SlowDown</Code></Error>"
            self.send_response(503 if kind.asked % 4 == 1 else 429)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)
            return
        connection = HTTPConnection("127.0.0.1", self.target)
        connection.request(self.command, self.path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)
        connection.close()


@pytest.fixture
def throttled(s3: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[_Throttle]]:
    _Throttle.target, _Throttle.refused = s3.port, 0
    with ThreadingHTTPServer(("127.0.0.1", 0), _Throttle) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        put(f"{s3_url}/a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[:5000]).encode())
        for name, value in environment_of(f"http://127.0.0.1:{server.server_port}").items():
            monkeypatch.setenv(name, value)
        yield _Throttle
        server.shutdown()
        thread.join()


def test_a_server_that_throttles_is_asked_again(throttled: type[_Throttle], s3_url: str) -> None:
    sink = MemorySink()
    Pipeline(open_source(f"{s3_url}/*.jsonl"), [], sink).run()
    assert pa.Table.from_batches(sink.batches).to_pylist() == ROWS[:5000]
    assert throttled.refused


def test_an_object_that_vanishes_in_the_middle_is_named_with_any_policy(s3_url: str) -> None:
    for name in ("a", "b"):
        put(f"{s3_url}/{name}.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[:100]).encode())
    source: Any = open_source(s3_url, schema=pa.schema({"n": pa.int64(), "text": pa.string()}))
    bucket, key = open_bucket(f"{s3_url}/b.jsonl")
    bucket.delete(key)
    with pytest.raises(ChangedFileError, match=r"b\.jsonl changed while it was read: it was deleted"):
        Pipeline(source, [], MemorySink(), config=PipelineConfig(on_error="skip")).run()


def test_a_long_listing_is_whole(s3: S3Server, s3_url: str) -> None:
    bucket, prefix = open_bucket(s3_url)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda number: bucket.write(f"{prefix}/{number:05}.txt", b"x\n"), range(1500)))
    found = list_files(s3_url)
    assert [file.name for file in found] == [f"{number:05}.txt" for number in range(1500)]
    started = time.monotonic()
    source: Any = open_source(s3_url)
    assert sum(batch.num_rows for batch in iter(lambda: source.next_batch(100), None)) == 1500
    assert time.monotonic() - started < 60


def test_commands_read_urls(s3_url: str, tmp_path: Any) -> None:
    put(f"{s3_url}/a.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS[:20]).encode())
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    put(f"{s3_url}/chat/c.jsonl", json.dumps(chat).encode() + b"\n")
    file = tmp_path / "run.yaml"
    file.write_text(f"source: {s3_url}/a.jsonl\nsink: {tmp_path}/out.jsonl\n")
    ran = CliRunner().invoke(app, ["run", str(file)])
    assert not ran.exit_code, ran.output
    assert [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()] == ROWS[:20]
    for command in (
        ["show", f"{s3_url}/a.jsonl", "--tokenizer", "byte"],
        ["lint", f"{s3_url}/chat", "--tokenizer", "byte", "--template", "plain"],
    ):
        done = CliRunner().invoke(app, command)
        assert not isinstance(done.exception, OSError)
        assert "Traceback" not in done.output
        assert done.exit_code == 0, done.output
