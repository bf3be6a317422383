"""Files of web servers: read by ranges where the server has them, copied where it has none, never of two states."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ChangedFileError, ResumeError
from penstock.files import objects
from penstock.files.listing import list_files
from penstock.files.ranges.remote_file import RemoteFile
from penstock.sources import open_source

ROWS = [{"n": number, "text": f"row {number} " * 30} for number in range(6000)]


class Server:
    """One file, `/a.jsonl`, and how it is served."""

    def __init__(self) -> None:
        self.data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
        self.headers = {"ETag": '"1"'}
        self.ranges = True
        self.refusals: list[int] = []
        self.sent = 0
        self.url = ""


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server = Server()

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            body, status = server.data, 200
            headers = dict(server.headers)
            asked = self.headers.get("Range")
            if asked and server.ranges:
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                headers["Content-Range"] = f"bytes {first}-{min(last, len(body) - 1)}/{len(body)}"
                body, status = body[first : last + 1], 206
                if server.refusals and last:
                    body, status = b"", server.refusals.pop()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                server.sent += len(body)
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{running.server_port}/a.jsonl"
        yield server
        running.shutdown()
        thread.join()


def rows_of(source: Any) -> list[Any]:
    return [row for batch in iter(lambda: source.next_batch(500), None) for row in batch.to_pylist()]


def test_a_file_is_read_by_ranges_and_resumes(web: Server, tmp_path: Path) -> None:
    (file,) = list_files(web.url)
    assert isinstance(file, RemoteFile)
    assert (file.size, file.etag) == (len(web.data), '"1"')
    source: Any = open_source(web.url)
    first = source.next_batch(100).to_pylist()
    state = source.state_dict()
    source.close()
    resumed: Any = open_source(web.url)
    resumed.load_state_dict(state)
    assert first + rows_of(resumed) == ROWS
    assert not list(tmp_path.rglob("*.jsonl"))
    web.headers = {"ETag": '"2"'}
    with pytest.raises(ResumeError, match=r"a\.jsonl is not the file"):
        open_source(web.url).load_state_dict(state)  # type: ignore[attr-defined]


@pytest.mark.parametrize("headers", [{"ETag": '"2"'}, {"Last-Modified": "Wed, 21 Oct 2026 07:28:00 GMT"}])
def test_a_file_that_changes_under_its_reader_is_refused(web: Server, headers: dict[str, str]) -> None:
    if "ETag" not in headers:
        web.headers = {"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    source: Any = open_source(web.url)
    web.headers = headers
    with pytest.raises(ChangedFileError, match=r"a\.jsonl changed while it was read: another file"):
        source.next_batch(1)
    source = open_source(web.url)
    web.data = web.data[:-10]
    with pytest.raises(ChangedFileError, match="bytes and has"):
        source.next_batch(1)


def test_a_server_that_is_busy_is_asked_again(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    web.refusals = [503, 429, 500]
    source: Any = open_source(web.url)
    assert rows_of(source) == ROWS
    web.refusals = [503] * 1000
    monkeypatch.setattr(objects, "RETRY_SECONDS", 0.3)
    source = open_source(web.url)
    with pytest.raises(ConnectionError, match=r"a\.jsonl.* within 0\.3 s: the server answered 503"):
        source.next_batch(1)


def test_a_server_without_ranges_is_copied_and_that_is_logged(
    web: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    web.ranges = False
    with caplog.at_level(logging.INFO):
        source: Any = open_source(web.url)
    assert rows_of(source) == ROWS
    assert len(list((tmp_path / "cache").rglob("a.jsonl"))) == 1
    assert "does not send ranges of files, so it is copied whole" in caplog.text
