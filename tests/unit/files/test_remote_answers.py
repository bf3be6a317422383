"""Answers of servers: errors that say what was answered, deadlines for those that answer nothing, and no secrets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileSelector, LocalFileSystem

from penstock import Pipeline
from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.files import filesystems, objects
from penstock.files.remote import RemotePath, fetch
from penstock.sources import open_source

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def web() -> Iterator[str]:
    """URL of a server: `/200.jsonl` is answered with 200 and rows, any other number with that status, `/never.jsonl`
    not at all. `/private.jsonl` needs a token."""
    over = threading.Event()

    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None: ...

        def do_GET(self) -> None:
            name = self.path.lstrip("/").partition(".")[0]
            if name == "never":
                over.wait(30)
                self.close_connection = True
                return
            if name == "private":
                name = "200" if f"token={SECRET}" in self.path else "403"
            body = b'{"text": "one"}\n{"text": "two"}\n' if name == "200" else b""
            self.send_response(int(name))
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"1"')
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            self.do_GET()

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("404", FileNotFoundError, "no such file"),
        ("403", PermissionError, "403"),
        ("500", OSError, "answered 500"),
        ("503", OSError, "answered 503"),
    ],
)
def test_what_a_web_server_answers_is_said(name: str, kind: type[OSError], said: str, web: str) -> None:
    with pytest.raises(OSError, match=said) as caught:
        open_source(f"{web}/{name}.jsonl")
    assert type(caught.value) is kind
    assert f"{web}/{name}.jsonl" in str(caught.value)


def test_a_port_that_nobody_listens_at_is_not_a_missing_file() -> None:
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9/a\.jsonl.*cannot be reached"):
        open_source("http://127.0.0.1:9/a.jsonl")
    with pytest.raises(ConnectionError, match=r"ftp://127\.0\.0\.1:9/a\.jsonl"):
        open_source("ftp://127.0.0.1:9/a.jsonl")


def test_a_server_that_does_not_answer_is_not_waited_for_without_end(web: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystems, "ANSWER_SECONDS", 0.5)
    with pytest.raises(TimeoutError, match=r"never\.jsonl.* within 0\.5 s"):
        open_source(f"{web}/never.jsonl")


def test_a_bucket_whose_server_does_not_answer_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(filesystems, "ANSWER_SECONDS", 0.2)
        monkeypatch.setattr(objects, "RETRY_SECONDS", 0.5)
        with pytest.raises(ConnectionError, match=r"gs://bucket/a\.jsonl.* within 0\.5 s"):
            open_source("gs://anonymous@bucket/a.jsonl")


def test_a_list_may_take_longer_than_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    listed = LocalFileSystem()

    class LargeBucket:
        """Answers at once, but a list is many answers."""

        def get_file_info(self, asked: Any) -> Any:
            if isinstance(asked, FileSelector):
                threading.Event().wait(0.3)
            return listed.get_file_info(asked)

    monkeypatch.setattr(filesystems, "ANSWER_SECONDS", 0.1)
    found = filesystems.select(LargeBucket(), str(tmp_path), "s3://bucket", recursive=True)  # type: ignore[arg-type]
    assert [info.base_name for info in found] == ["a.jsonl"]


def test_a_bucket_that_cannot_be_reached_is_an_error_after_a_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr(objects, "RETRY_SECONDS", 0.5)
    with pytest.raises(ConnectionError, match=r"gs://bucket/a\.jsonl"):
        open_source("gs://anonymous@bucket/a.jsonl")


def test_a_url_with_a_token_is_read_and_the_token_is_written_nowhere(web: str, tmp_path: Path) -> None:
    url = f"{web}/private.jsonl?token={SECRET}"
    pipeline = Pipeline(open_source(url))
    rows = [row for batch in pipeline for row in batch.to_pylist()]
    assert rows == [{"text": "one"}, {"text": "two"}]
    assert SECRET not in f"{pipeline.state_dict()}{pipeline!r}"
    assert fetch(url).name == "private.jsonl"
    prepare(url, tmp_path / "store", Recipe(tokenizer="byte"))
    for path in tmp_path.rglob("*"):
        assert SECRET not in str(path)
        assert path.is_dir() or SECRET.encode() not in path.read_bytes()


def test_no_error_has_the_token_of_a_url(web: str) -> None:
    for name in ("private.jsonl?access_token=wrong", "500.jsonl?token=wrong", "404.jsonl?X-Amz-Credential=wrong"):
        with pytest.raises(OSError, match=r"\*\*\*") as caught:
            open_source(f"{web}/{name}")
        error: BaseException | None = caught.value
        assert "wrong" not in str(error)
        assert not RemotePath(f"{web}/404.jsonl").exists()
