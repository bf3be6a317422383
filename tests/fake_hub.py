"""A server with the endpoints of the Hugging Face Hub that downloads need, on this machine, for tests."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """Repositories by name: `models/owner/name` or `datasets/owner/name`, with the files of each."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.requests: list[str] = []
        self.url = ""

    def answer(self, path: str, *, head: bool) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(path)
        path = path.partition("?")[0].strip("/")
        if path.startswith("api/"):
            return self._api(path.removeprefix("api/"))
        return self._file(path, head)

    def _api(self, path: str) -> tuple[int, dict[str, str], bytes]:
        kind, name, rest = self._split(path)
        files = self.repositories.get(f"{kind}/{name}")
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if f"{kind}/{name}" in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "gated"}, b"{}"
        what, _, revision = rest.partition("/")
        if what in ("revision", "tree") and revision.partition("/")[0] not in ("main", "v1", SHA):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        listed: Any = [
            {"type": "file", "path": file, "size": len(data), "oid": _etag(data)} for file, data in files.items()
        ]
        if what != "tree":
            listed = {"id": name, "sha": SHA, "siblings": [{"rfilename": file} for file in files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(listed).encode()

    def _file(self, path: str, head: bool) -> tuple[int, dict[str, str], bytes]:
        kind = "datasets" if path.startswith("datasets/") else "models"
        _, name, rest = self._split(path if kind == "datasets" else f"models/{path}")
        file = "/".join(rest.split("/")[2:])
        data = self.repositories.get(f"{kind}/{name}", {}).get(file)
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": SHA, "X-Linked-Size": str(len(data))}
        return 200, headers, data

    def _split(self, path: str) -> tuple[str, str, str]:
        """Kind, name and rest; a name without an owner has one part."""
        kind, _, rest = path.partition("/")
        for parts in (2, 1):
            name = "/".join(rest.split("/")[:parts])
            if f"{kind}/{name}" in self.repositories:
                return kind, name, rest[len(name) + 1 :]
        return kind, rest, ""


def _etag(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def serving(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """The server, with the Hub's cache in `home`."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _send(self, head: bool) -> None:
            status, headers, body = hub.answer(self.path, head=head)
            if status == 200 and (asked := self.headers.get("Range")):
                first, _, last = asked.removeprefix("bytes=").partition("-")
                headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
                status, body = 206, body[int(first) : int(last) + 1]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if not head:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self._send(head=False)

        def do_HEAD(self) -> None:
            self._send(head=True)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    use_hub(monkeypatch, hub.url, home)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, home: Path, *, offline: bool = False) -> None:
    """What HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE would set in a new process."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
