"""Runs into a bucket from end to end: killed writers and servers, stale holders, slow networks, secrets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tokenizers
from tests.buckets import download, names_in, upload
from tests.servers import ACCESS_KEY, KILLS, SECRET_KEY, Proxy, S3Server, environment_of
from typer.testing import CliRunner

import penstock.files.object_lock as object_lock
from penstock import Pipeline, PipelineConfig, PretrainDataLoader
from penstock.chat.templates import load_template
from penstock.cli.main import app
from penstock.connections.sql import Database
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.datasets import TitanicDataset, make_titanic
from penstock.datasets.titanic import titanic_spec
from penstock.errors import ConfigError, ResumeError, StageError
from penstock.files import objects
from penstock.files.objects import open_bucket
from penstock.pipeline.checkpoint import load_checkpoint
from penstock.sinks import JsonlSink, ParquetSink, SqlSink, StoreSink
from penstock.sources import JsonlSource, MemorySource, StoreSource, open_source
from penstock.store import open_store
from penstock.templates import SentenceTemplate, TextTemplateEngine
from penstock.testing import RowsSource
from penstock.tokenizers.load import load_tokenizer
from penstock.transforms.tokenization import CharTokenizer

ROWS = [{"n": number, "text": f"row {number} " * (number % 9)} for number in range(600)]
EVERY = PipelineConfig(checkpoint_seconds=0, batch_rows=50, workers=1)

KILLED = """
import json, os, signal, sys
from penstock import Pipeline, PipelineConfig
from penstock.sinks import {sink}
from penstock.testing import RowsSource

class Dying({sink}):
    calls = 0

    def consume(self, batch):
        super().consume(batch)
        Dying.calls += 1
        if Dying.calls == int(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)

source, target, kept = sys.argv[1:4]
rows = [json.loads(line) for line in open(source)]
config = PipelineConfig(checkpoint_seconds=0, batch_rows=50, workers=1)
Pipeline(RowsSource(rows, batch_rows=50), [], Dying(target{options}), config).run(kept)
"""


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    source, rows = open_source(path), []
    while (batch := source.next_batch(1000)) is not None:
        rows += batch.to_pylist()
    return rows


@pytest.mark.parametrize(
    ("sink", "name", "options"),
    [("JsonlSink", "out.jsonl", ""), ("StoreSink", "out.store", ", tokens=None, shard_bytes=5000")],
)
def test_a_writer_that_is_killed_again_and_again_writes_every_row_once(
    s3_url: str, rows_file: Path, tmp_path: Path, sink: str, name: str, options: str
) -> None:
    """With another number of batches each time; the locks of the killed process are taken over at once."""
    program = KILLED.format(sink=sink, options=options)
    words = [str(rows_file), f"{s3_url}/{name}", f"{s3_url}/kept"]
    for calls in (2, 4):
        done = subprocess.run([sys.executable, "-c", program, *words, str(calls)], capture_output=True, check=False)
        assert done.returncode == -9, done.stderr.decode()
        visible = [name for name in names_in(s3_url) if not name.startswith((".", "kept")) and "/" not in name]
        assert visible == []
    done = subprocess.run([sys.executable, "-c", program, *words, "0"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    copy = download(s3_url, tmp_path / "copy")
    if sink == "StoreSink":
        with open_store(copy / name, verify="full") as store:
            assert store.take(range(len(store))).to_pylist() == ROWS
    else:
        assert read(copy / name) == ROWS
    assert [name for name in names_in(s3_url) if name.startswith(".")] == []


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        (ParquetSink, "out.parquet", {}),
        (StoreSink, "out.store", {"tokens": None, "shard_bytes": 5000}),
        *([(JsonlSink, "out.jsonl", {})] if KILLS > 2 else []),
    ],
)
def test_a_server_that_is_killed_while_it_is_written_to_loses_nothing(
    kind: Any, name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_LONGEST_PAUSE", 0.2)
    with S3Server() as server:
        for variable, value in server.environment.items():
            monkeypatch.setenv(variable, value)
        kills = []

        class Killing(RowsSource):
            """Kills the server between two batches, while the sink writes those before."""

            def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
                if len(kills) < KILLS and self.state_dict()["row"] > len(kills) * len(ROWS) // (KILLS + 1):
                    kills.append(server.process)
                    server.kill()
                    server.start()
                return super().next_batch(max_rows)

        url = f"{server.url}/test"
        Pipeline(Killing(ROWS, batch_rows=50), [], kind(f"{url}/{name}", **options), EVERY).run(f"{url}/kept")
        assert len(kills) == KILLS
        copy = download(url, tmp_path / "copy") / name
        if kind is StoreSink:
            with open_store(copy, verify="full") as store:
                assert store.take(range(len(store))).to_pylist() == ROWS
        else:
            assert read(copy) == ROWS


class SlowRows(RowsSource):
    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        time.sleep(0.02)
        return super().next_batch(max_rows)


def test_a_slow_network_with_resets_changes_no_byte(
    s3: S3Server, s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = pa.table({"n": range(300_000), "x": [str(number) * 4 for number in range(300_000)]})
    sink = {"compression": "none", "row_group_bytes": "1 MiB"}
    Pipeline(MemorySource(table), [], ParquetSink(tmp_path / "out.parquet", **sink)).run()
    with Proxy(s3.port, latency_seconds=0.01, reset_after=900) as proxy:
        proxy.resets = 5
        for name, value in environment_of(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        Pipeline(MemorySource(table), [], ParquetSink(f"{s3_url}/out.parquet", **sink)).run(f"{s3_url}/kept")
        assert proxy.resets_done >= 3
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    copy = download(s3_url, tmp_path / "copy")
    assert (copy / "out.parquet").read_bytes() == (tmp_path / "out.parquet").read_bytes()


def test_one_run_at_a_time_uses_a_checkpoint_in_a_bucket(s3_url: str, rows_file: Path, tmp_path: Path) -> None:
    first = Pipeline(SlowRows(ROWS, batch_rows=50), [], JsonlSink(f"{s3_url}/a.jsonl"), EVERY).start(f"{s3_url}/kept")
    with pytest.raises(ConfigError, match=r"the checkpoint in .*kept is in use by process"):
        Pipeline(RowsSource(ROWS), [], JsonlSink(f"{s3_url}/b.jsonl"), EVERY).run(f"{s3_url}/kept")
    with pytest.raises(ConfigError, match=r"a\.jsonl is in use by process"):
        Pipeline(RowsSource(ROWS), [], JsonlSink(f"{s3_url}/a.jsonl"), EVERY).run(tmp_path / "kept")
    first.stop()
    assert load_checkpoint(f"{s3_url}/kept") is not None
    report = Pipeline(RowsSource(ROWS), [], JsonlSink(f"{s3_url}/a.jsonl"), EVERY).run(f"{s3_url}/kept")
    assert report.resumed
    assert Pipeline(RowsSource(ROWS), [], JsonlSink(f"{s3_url}/a.jsonl"), EVERY).run(f"{s3_url}/kept") == report
    assert read(download(s3_url, tmp_path / "copy") / "a.jsonl") == ROWS
    bucket, key = open_bucket(f"{s3_url}/a.jsonl")
    bucket.delete(key)
    with pytest.raises(ResumeError, match=r"a\.jsonl is gone"):
        Pipeline(RowsSource(ROWS), [], JsonlSink(f"{s3_url}/a.jsonl"), EVERY).run(f"{s3_url}/kept")


@pytest.mark.parametrize("saved", [False, True], ids=["before the first save", "after it"])
def test_a_run_that_was_taken_for_dead_cannot_go_on_over_its_successor(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    """Its machine slept: no lock is renewed, and it does not know yet that the leases are over."""
    monkeypatch.setattr(object_lock, "_lives_here", lambda token: None)
    monkeypatch.setattr(object_lock, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(object_lock, "_PAUSE", 0.05)
    monkeypatch.setattr(object_lock.ObjectLock, "_keep", lambda self, stop: None)
    asleep, awake = threading.Event(), threading.Event()

    class Sleeping(RowsSource):
        def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
            if self.state_dict()["row"] >= (300 if saved else 0):
                asleep.set()
                awake.wait(60)
            return super().next_batch(max_rows)

    sink = JsonlSink(f"{s3_url}/a.jsonl")
    stale = Pipeline(Sleeping(ROWS, batch_rows=50), [], sink, EVERY).start(f"{s3_url}/kept")
    assert asleep.wait(60)
    while saved and ((kept := load_checkpoint(f"{s3_url}/kept")) is None or kept["rows_out"] < 300):
        time.sleep(0.01)
    report = Pipeline(RowsSource(ROWS), [], JsonlSink(f"{s3_url}/a.jsonl"), EVERY).run(f"{s3_url}/kept")
    awake.set()
    with pytest.raises((ResumeError, ConfigError), match=r"written by another run|in use by|has taken its place"):
        stale.wait(60)
    stale.stop()
    assert (report.rows_out, report.resumed) == (600, saved)
    assert read(download(s3_url, tmp_path / "copy") / "a.jsonl") == ROWS


def test_a_paused_run_into_a_database_adds_no_rows_to_those_of_its_successor(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are committed before the checkpoint is written, so the place of the checkpoint alone refuses too late."""
    monkeypatch.setattr(object_lock, "_lives_here", lambda token: None)
    monkeypatch.setattr(object_lock, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(object_lock, "_PAUSE", 0.05)
    monkeypatch.setattr(object_lock.ObjectLock, "_keep", lambda self, stop: None)
    monkeypatch.setattr(SqlSink, "_end_abandoned", lambda sink, run: None)  # as that of another process
    url, asleep, awake = f"sqlite:///{tmp_path}/a.db", threading.Event(), threading.Event()

    class Sleeping(RowsSource):
        def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
            if self.state_dict()["row"] >= 300:
                asleep.set()
                awake.wait(60)
            return super().next_batch(max_rows)

    stale = Pipeline(Sleeping(ROWS, batch_rows=50), [], SqlSink(url, "t"), EVERY).start(f"{s3_url}/kept")
    assert asleep.wait(60)
    while (kept := load_checkpoint(f"{s3_url}/kept")) is None or kept["rows_out"] < 300:
        time.sleep(0.01)
    report = Pipeline(RowsSource(ROWS), [], SqlSink(url, "t"), EVERY).run(f"{s3_url}/kept")
    awake.set()
    with pytest.raises(ResumeError, match="another process goes on with the run"):
        stale.wait(60)
    stale.stop()
    assert (report.rows_out, report.resumed) == (600, True)
    with Database(url).connect() as connection:
        assert connection.rows("SELECT n, text FROM t ORDER BY n") == [(row["n"], row["text"]) for row in ROWS]


def test_quarantined_rows_go_to_the_bucket_once_each(s3_url: str, tmp_path: Path) -> None:
    lines = [json.dumps(row) if row["n"] % 10 else "{broken" for row in ROWS]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    config = PipelineConfig(checkpoint_seconds=0, batch_rows=50, on_error="quarantine", workers=1)

    def pipeline() -> Pipeline:
        return Pipeline(JsonlSource(tmp_path / "in.jsonl"), [], JsonlSink(f"{s3_url}/out.jsonl"), config)

    first = pipeline().start(f"{s3_url}/kept")
    deadline = time.monotonic() + 30
    while "out.jsonl.quarantine.jsonl" not in names_in(s3_url) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.stop()
    report = pipeline().run(f"{s3_url}/kept")
    assert sum(report.quarantined.values()) == 60
    copy = download(s3_url, tmp_path / "copy")
    bad = [json.loads(line) for line in (copy / "out.jsonl.quarantine.jsonl").read_text().splitlines()]
    assert [row["row"] for row in bad] == list(range(0, 600, 10))
    assert read(copy / "out.jsonl") == [row for row in ROWS if row["n"] % 10]
    assert not [name for name in names_in(s3_url) if name.startswith(".")]


def test_a_store_is_prepared_in_a_bucket_and_found_there(s3_url: str, tmp_path: Path, rows_file: Path) -> None:
    url, recipe = f"{s3_url}/x.store", Recipe(tokenizer="byte", dedup=["exact"])
    made = prepare(rows_file, url, recipe)
    local = prepare(rows_file, tmp_path / "x.store", recipe)
    assert made.manifest.shards == local.manifest.shards
    assert made.manifest.key == local.manifest.key
    assert prepare(rows_file, url, recipe).report is None
    assert "losses.json" in names_in(url)
    assert [name for name in names_in(s3_url) if name.startswith(".")] == []
    with pytest.raises(ConfigError, match="another input or recipe"):
        prepare(rows_file, url, Recipe(tokenizer="byte"))
    words = ["prepare", str(rows_file), "--tokenizer", "byte", "--out", url, "--mode", "overwrite", "--json"]
    for command in (words, ["versions", url, "--json"], ["versions", url, "--checkout", "1"], ["info", url, "--json"]):
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert (facts["version"], facts["rows"], len(facts["versions"])) == (1, made.manifest.rows, 2)
    with pytest.raises(ConfigError, match="omit cache"):
        prepare(rows_file, url, recipe, cache=f"{s3_url}/cache")


def test_no_secret_is_written_anywhere(
    s3: S3Server, s3_url: str, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = s3.environment
    for name in settings:
        monkeypatch.delenv(name)
    key = settings["AWS_ACCESS_KEY_ID"]
    host, path = s3_url.removeprefix("s3://").split("/", 1)
    query = f"?endpoint={settings.get('AWS_ENDPOINT_URL') or settings['AWS_ENDPOINT_URL_S3']}&region=us-east-1"

    def at(name: str) -> str:
        return f"s3://{key}:{SECRET_KEY}@{host}/{path}/{name}{query}"

    config = PipelineConfig(checkpoint_seconds=0, on_error="quarantine", quarantine=at("bad.jsonl"))
    with rows_file.open("a") as file:
        file.write("{broken\n")
    pipeline = Pipeline(JsonlSource(rows_file), [], JsonlSink(at("out.jsonl")), config)
    report = pipeline.run(at("kept"))
    Pipeline(JsonlSource(rows_file), [], StoreSink(at("y.store"), tokens=None), config).run(at("kept2"))
    open_bucket(at("in.jsonl"))[0].write(f"{path}/in.jsonl", b'{"text": "a"}\n')
    prepared = prepare(rows_file, at("x.store"), Recipe(tokenizer="byte"), config=PipelineConfig(on_error="skip"))
    shown = [str(pipeline), repr(pipeline.sink), str(report), json.dumps(report.to_dict()), repr(prepared.path)]
    Path(tmp_path / "run.yaml").write_text(
        f"source: {rows_file}\nsink: '{at('z.jsonl')}'\n"
        f"config: {{on_error: quarantine, quarantine: '{at('b.jsonl')}'}}\n"
    )
    for more in (["--dry-run"], ["--dry-run", "--json"], [], ["--checkpoint", at("kept3")]):
        result = CliRunner().invoke(app, ["run", str(tmp_path / "run.yaml"), *more])
        assert result.exit_code == 0, result.output
        shown.append(result.output)
    (tmp_path / "loader.yaml").write_text(
        "loader: mixed\nchunk_size: 8\nbatch_size: 2\n"
        f"sources:\n  a: {{path: '{at('x.store')}'}}\n  b: ['{at('x.store')}']\n"
    )
    page, url = at("page.html"), f"s3://{host}/{path}/x.store{query}&access_key_id={key}&secret_access_key={SECRET_KEY}"
    for words in (
        ["plan", str(tmp_path / "loader.yaml"), "--json"],
        ["plan", url, "--json"],
        ["report", str(tmp_path / "loader.yaml"), "-o", page.replace("page", "page1")],
        ["report", url, at("x.store"), "-o", page.replace("page", "page2")],
        ["report", url, "-o", page.replace("page", "page3")],
        ["report", at("x.txt"), "-o", page],
        ["show", url.replace("x.store", "in.jsonl"), "--tokenizer", "byte"],
        ["run", url.replace("x.store", "no.yaml")],
        ["run", str(tmp_path / "run.yaml"), "--metrics", url],
        ["run", str(tmp_path / "run.yaml"), "--metrics", f"nowhere://{key}:{SECRET_KEY}@host"],
    ):
        shown.append(CliRunner().invoke(app, words).output)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    for file in download(s3_url, tmp_path / "copy").rglob("*"):
        if file.is_file():
            shown.append(file.read_bytes().decode(errors="replace"))
    assert {"page1.html", "page2.html", "page3.html"} <= {*names_in(s3_url)}
    assert len(shown) > 30
    assert [text for text in shown if SECRET_KEY in text] == []


def test_buckets_and_keys_that_do_not_work_are_named_before_any_work(
    s3_url: str, rows_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs(target: str, kept: str | None) -> Any:
        return Pipeline(RowsSource(ROWS), [], JsonlSink(target), EVERY).run(kept)

    for target, kept in (
        ("s3://absent/o.jsonl", None),
        ("s3://absent/o", None),
        (f"{s3_url}/o.jsonl", "s3://absent/k"),
    ):
        with pytest.raises(FileNotFoundError, match="no such bucket: 's3://absent'"):
            runs(target, kept)
    with pytest.raises(FileNotFoundError, match="no such bucket: 's3://absent'"):
        prepare(rows_file, "s3://absent/x.store", Recipe(tokenizer="byte"))
    bucket, key = open_bucket(f"{s3_url}/kept")
    bucket.write(key, b"an object")
    with pytest.raises(ConfigError, match="takes a folder of a bucket"):
        runs(f"{s3_url}/o.jsonl", f"{s3_url}/kept")
    bucket.write(f"{key}2/mine.txt", b"an object")
    with pytest.raises(ConfigError, match=r"there are objects below .*kept2/ already, such as 'mine.txt'"):
        runs(f"{s3_url}/kept2", None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET_KEY}-wrong")
    with pytest.raises(PermissionError, match="may not be used with these credentials"):
        runs(f"{s3_url}/o.jsonl", None)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "RETRY_SECONDS", 0.3)
    with pytest.raises(StageError, match=r"'s3://pen/.*no whole answer within 0.3 s"):
        runs(f"{s3_url}/o.jsonl", None)


def test_a_preparation_that_has_seen_keys_is_resumed_where_it_began(
    s3_url: str, rows_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, recipe = f"{s3_url}/x.store", Recipe(tokenizer="byte", dedup=["exact"])
    whole = prepare(rows_file, tmp_path / "x.store", recipe)

    def dies(sink: Any) -> None:
        raise RuntimeError("the machine is gone")

    with monkeypatch.context() as patch:
        patch.setattr("penstock.sinks.StoreSink.flush", dies)
        with pytest.raises(StageError, match="the machine is gone"):
            prepare(rows_file, url, recipe, config=EVERY)
    assert [name for name in names_in(s3_url) if name.startswith(".x.store.preparing/")]
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
        with pytest.raises(ResumeError, match=r"\.x\.store\.preparing"):
            prepare(rows_file, url, recipe, config=EVERY)
    made = prepare(rows_file, url, recipe, config=EVERY)
    assert made.report is not None
    assert made.report.resumed
    assert made.manifest.shards == whole.manifest.shards


class TwoUsers(S3Server):
    """A server with a second user, who may only read."""

    def command(self) -> list[str]:
        users = {
            "admin": (ACCESS_KEY, SECRET_KEY, ["Admin", "Read", "Write", "List", "Tagging"]),
            "reader": ("reader", "reader-secret", ["Read", "List"]),
        }
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, (key, secret, actions) in users.items()
        ]
        (self.directory / "users.json").write_text(json.dumps({"identities": identities}))
        return [*super().command(), f"-s3.config={self.directory / 'users.json'}"]

    def uploads(self) -> list[str]:
        """Uploads in parts that are neither completed nor aborted."""
        address = f"http://127.0.0.1:{self.ports[6]}/buckets/pen/.uploads/"
        request = urllib.request.Request(address, headers={"Accept": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return [entry["FullPath"] for entry in json.load(answer)["Entries"] or []]


def test_failed_runs_abort_their_uploads_and_readers_cannot_begin_any(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(RowsSource):
        def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
            if self.state_dict()["row"]:
                raise RuntimeError("the source is gone")
            return super().next_batch(max_rows)

    rows = [{"text": os.urandom(500_000).hex()} for _ in range(12)]
    with TwoUsers() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        sink = JsonlSink(f"{server.url}/a/o.jsonl")
        writer = open_bucket(f"{server.url}/a")[0].writer("a/x")
        writer.write(bytes(12 << 20))
        assert len(server.uploads()) == 1
        writer.abort()
        with pytest.raises(StageError, match="the source is gone"):
            Pipeline(Failing(rows, batch_rows=12), [], sink, EVERY).run()
        assert server.uploads() == []
        assert names_in(f"{server.url}/a") == []
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "reader")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "reader-secret")
        for kept in (None, f"{server.url}/kept"):
            with pytest.raises(PermissionError, match="may not be used with these credentials: AccessDenied"):
                Pipeline(RowsSource(ROWS), [], JsonlSink(f"{server.url}/a/o.jsonl"), EVERY).run(kept)
        with pytest.raises(PermissionError, match="may not be used with these credentials: AccessDenied"):
            Pipeline(RowsSource(ROWS), [], StoreSink(f"{server.url}/a/o.store", tokens=None), EVERY).run()


def test_a_store_in_a_bucket_is_shown_planned_and_read_as_a_source(s3_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "row {n}"}}\n' for n in range(40)))
    local, url = tmp_path / "x.store", f"{s3_url}/x.store"
    for place in (local, url):
        prepare(tmp_path / "a.jsonl", place, Recipe(tokenizer="byte"))
    for source in (StoreSource(url), open_source(url)):
        assert isinstance(source, StoreSource)
        batch = source.next_batch(100)
        assert batch is not None
        assert batch.equals(StoreSource(local).next_batch(100))
        origin = source.origin()
        assert origin is not None
        assert origin.file.startswith(url)
    for command in (["show", "--row", "2", "--tokenizer", "byte"], ["plan"], ["trace", "--step", "1"]):
        lines = []
        for place in (local, url):
            done = CliRunner().invoke(app, [command[0], str(place), *command[1:], "--json"])
            assert done.exit_code == 0, done.output
            lines.append(done.output.replace(str(place), "STORE"))
        assert lines[0] == lines[1]
    for given in (url, f"{s3_url}/*.store", open_store(url)):
        with pytest.raises(ConfigError, match=r"store in a bucket.*leave out streaming=True"):
            PretrainDataLoader(given, streaming=True, batch_size=2)


def test_a_tokenizer_and_a_template_are_read_from_a_bucket(s3_url: str, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    bucket, prefix = open_bucket(s3_url)
    bucket.write(f"{prefix}/tok/tokenizer.json", made.to_str().encode())
    bucket.write(f"{prefix}/tok/chat_template.jinja", b"{{ messages }}")
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    local = load_tokenizer(tmp_path)
    for url in (f"{s3_url}/tok/tokenizer.json", f"{s3_url}/tok", f"{s3_url}/tok/"):
        loaded = load_tokenizer(url)
        assert loaded.fingerprint == local.fingerprint
        assert getattr(loaded, "chat_template", None) == "{{ messages }}"
    assert load_template(f"{s3_url}/tok/chat_template.jinja", None).source == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"is not a tokenizer: there is no tokenizer.json"):
        load_tokenizer(f"{s3_url}/nothing")
    with pytest.raises(ConfigError, match=f"the template '{s3_url}/no.jinja' cannot be read"):
        load_template(f"{s3_url}/no.jinja", None)


def test_files_that_describe_a_run_are_read_from_a_bucket(s3_url: str, tmp_path: Path) -> None:
    bucket, prefix = open_bucket(s3_url)
    bucket.write(f"{prefix}/in.jsonl", b'{"text": "a"}\n{"text": "b"}\n')
    bucket.write(f"{prefix}/run.yaml", f"source: {s3_url}/in.jsonl\nsink: {tmp_path}/out.jsonl\n".encode())
    prepare(f"{s3_url}/in.jsonl", f"{s3_url}/x.store", Recipe(tokenizer="byte"))
    loader = f"loader: pretrain\npath: {s3_url}/x.store\nchunk_size: 2\nbatch_size: 1\n"
    bucket.write(f"{prefix}/loader.yaml", loader.encode())
    for words in (["run", f"{s3_url}/run.yaml"], ["report", f"{s3_url}/loader.yaml", "-o", f"{s3_url}/plan.html"]):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "out.jsonl").read_text().count("text") == 2
    assert b"<title>loader.yaml" in bytes(bucket.read(f"{prefix}/plan.html"))
    templates = TextTemplateEngine()
    templates.register_template(SentenceTemplate("two", "{a}"))
    templates.save_templates(tmp_path / "t.yaml")
    bucket.write(f"{prefix}/t.yaml", (tmp_path / "t.yaml").read_bytes())
    assert TextTemplateEngine().load_templates(f"{s3_url}/t.yaml") == ["two"]
    CharTokenizer("abc").save(tmp_path / "char.json")
    bucket.write(f"{prefix}/char.json", (tmp_path / "char.json").read_bytes())
    assert CharTokenizer.load(f"{s3_url}/char.json").alphabet == CharTokenizer("abc").alphabet
    make_titanic(tmp_path / "titanic")
    upload(tmp_path / "titanic", f"{s3_url}/titanic")
    one, other = (TitanicDataset(titanic_spec(place)) for place in (tmp_path / "titanic", f"{s3_url}/titanic"))
    assert one.texts() == other.texts()


def test_a_bucket_is_no_name_of_a_store_and_raw_files_are_not_nothing(s3_url: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    with pytest.raises(ConfigError, match="is a whole bucket; name a store in it"):
        prepare(tmp_path / "a.jsonl", "s3://pen/", Recipe(tokenizer="byte"))
    bucket, prefix = open_bucket(s3_url)
    bucket.write(f"{prefix}/raw/a.jsonl", b"{}")
    with pytest.raises(FileNotFoundError, match=r"is not a store: there is no manifest.json below it"):
        open_store(f"{s3_url}/raw/")
