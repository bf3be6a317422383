"""`penstock ui` as a process, for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

LONG = 120.0


class UiServer:
    """`penstock ui` on a free port; `get` asks it with the cookie."""

    def __init__(self, *places: Path | str, options: tuple[str, ...] = ("--port", "0")) -> None:
        command = [sys.executable, "-m", "penstock", "ui", *map(str, places), "--json", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(self.process.communicate()[1])
        self.facts: dict[str, Any] = json.loads(line)
        self.address: str = self.facts["address"]
        self.port: int = self.facts["port"]
        self.origin, _, self.token = self.address.partition("/?token=")
        self.cookie = ""

    def get(self, path: str) -> tuple[int, str]:
        """Status and text of a page."""
        if not self.cookie:
            self.cookie = self._ask(f"/?token={self.token}", {})[2].split(";")[0]
        return self._ask(path, {"Cookie": self.cookie})[:2]

    def _ask(self, path: str, headers: dict[str, str]) -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG)
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.getheader("set-cookie") or ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=LONG)
