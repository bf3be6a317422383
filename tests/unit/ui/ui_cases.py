"""Targets of the web page for tests, and a client that has been let in."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.servers import missing

from penstock.corpus.prepare import prepare
from penstock.corpus.recipe import Recipe
from penstock.ui.app import make_app
from penstock.ui.guard import Access
from penstock.ui.site import Site
from penstock.ui.targets import find_targets

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202eevil\x00\"'&"
if reason := missing("starlette", "httpx", "uvicorn"):
    pytest.skip(reason, allow_module_level=True)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def make_store(path: Path, texts: Sequence[str], **more: Any) -> Path:
    """A store of documents, in bytes."""
    source = write_lines(path.with_suffix(".jsonl"), [{"text": text} for text in texts])
    prepare(source, path, Recipe(tokenizer="byte", **more))
    return path


def make_chat_store(path: Path, turns: Sequence[tuple[str, str]]) -> Path:
    """A store of chats, in bytes, with a loss mask."""
    rows = [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in turns
    ]
    prepare(write_lines(path.with_suffix(".jsonl"), rows), path, Recipe(tokenizer="byte", template="alpaca"))
    return path


def write_run(
    path: Path,
    kind: str,
    readings: Sequence[dict[str, float]],
    *,
    end: dict[str, Any] | None = None,
    pid: int | None = None,
    **header: Any,
) -> Path:
    """A metrics file as a run writes it."""
    began = time.time() - len(readings)
    facts = {"penstock_metrics": 1, "kind": kind, "name": f"the {kind}", "pid": pid or os.getpid()}
    facts |= {"host": socket.gethostname(), "started": began, "labels": {"rank": "0"}, "description": "", **header}
    lines = [
        {"seconds": float(number), "time": began + number, "metrics": metrics, "note": "the source is the bottleneck"}
        for number, metrics in enumerate(readings, 1)
    ]
    return write_lines(path, [facts, *lines, *([end] if end is not None else [])])


def client(*places: Path | str, let_in: bool = True, **options: Any) -> Any:
    """A client of the application; without `let_in` it has no cookie."""
    from starlette.testclient import TestClient

    access = Access("127.0.0.1", 8710)
    app = make_app(Site(find_targets(map(str, places)), **options), access)
    made = TestClient(app, base_url="http://127.0.0.1:8710", follow_redirects=False)
    made.access = access
    if let_in:
        assert made.get("/", params={"token": access.token}).status_code == 200
    return made


def shown(made: Any, path: str, status: int = 200) -> str:
    """Text of a page."""
    answer = made.get(path)
    assert answer.status_code == status, answer.text
    text: str = answer.text
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(ids) == len(set(ids)), f"ids that are there twice: {sorted(ids)}"  # the script finds parts by them
    return text


def states(root: Path) -> dict[str, Any]:
    """Bytes and times of everything below a directory, the directory included."""
    return {
        str(path): (path.stat().st_mtime_ns, path.stat().st_size, path.read_bytes() if path.is_file() else None)
        for path in [root, *sorted(root.rglob("*"))]
    }
