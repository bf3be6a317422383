"""`penstock ui` as a process: ports, its end, browsers that leave, and runs that it does not disturb."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import missing
from tests.ui_server import LONG, UiServer

if reason := missing("starlette", "uvicorn"):
    pytest.skip(reason, allow_module_level=True)

PROVIDER = """
import sys, numpy as np
from penstock.fsqueue import DataProviderBase

class Numbered(DataProviderBase):
    def build_meta(self):
        return {"batch_schema": [{"name": "x", "dtype": "int64", "shape": [3], "role": "input"}]}

    def sample_batch(self, split, rng):
        return {"x": np.full((self.batch_size, 3), self.batch_index)}

facts = {"dataset": "n", "batch_size": 2, "block_size": 3, "batches_per_file": 4, "backlog_files": 3}
Numbered(facts | {"split_proportions": {"train": 1.0}}, queue_dir=sys.argv[1]).run(max_batches=int(sys.argv[2]))
"""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {number} " + "x" * 5000}) + "\n" for number in range(200)))
    return path


def test_it_serves_pages_to_those_with_the_token_until_it_is_ended(rows: Path) -> None:
    with UiServer(rows) as server:
        assert server._ask("/", {})[0] == 403
        status, text = server.get("/t/0")
        assert status == 200
        assert "row 49" in text
        server.process.send_signal(signal.SIGTERM)
        printed, warned = server.process.communicate(timeout=LONG)
        assert server.token not in printed + warned
        assert "Traceback" not in warned


def test_two_are_let_into_one_browser_by_cookies_of_their_own(rows: Path) -> None:
    with UiServer(rows, options=()) as first, UiServer(rows, options=()) as second:
        assert first.port != second.port
        assert (first.get("/")[0], second.get("/")[0]) == (200, 200)
        assert first.cookie.partition("=")[0] != second.cookie.partition("=")[0]
        both = {"Cookie": f"{first.cookie}; {second.cookie}"}
        assert (first._ask("/", both)[0], second._ask("/", both)[0]) == (200, 200)


def test_browsers_that_leave_in_the_middle_of_an_answer_do_no_harm(rows: Path) -> None:
    with UiServer(rows) as server:
        server.get("/")
        for number in range(20):
            with socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as left:
                left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset at once
                request = f"GET /t/0?q=row HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {server.cookie}\r\n\r\n"
                left.sendall(request.encode())
                if number % 2:
                    left.recv(10)
        with socket.create_connection(("127.0.0.1", server.port), timeout=LONG) as half:
            half.sendall(b"GET /t/0 HTTP/1.1\r\nHos")  # and never the rest
            assert server.get("/t/0")[0] == 200
            server.process.send_signal(signal.SIGINT)
            warned = server.process.communicate(timeout=LONG)[1]
        assert "Traceback" not in warned


def test_a_queue_loses_and_repeats_nothing_while_the_page_looks_and_is_killed(tmp_path: Path) -> None:
    from penstock.fsqueue import DatasetConsumer

    path, batches = tmp_path / "queue", 400
    with subprocess.Popen([sys.executable, "-c", PROVIDER, str(path), str(batches)]) as provider:
        found: list[int] = []
        while not (path / "queue.json").exists():
            assert provider.poll() is None
        with UiServer(path) as server:
            with DatasetConsumer(path, backend="numpy", timeout_seconds=LONG) as consumer:
                for number, batch in enumerate(consumer.batches("train")):
                    found.append(int(batch["x"][0, 0]))
                    if number % 40 == 10 and number < batches // 2:
                        status, text = server.get("/t/0/live")
                        assert status == 200
                        assert "consumer" in text
                    if number == batches // 2:
                        server.process.kill()
            assert provider.wait(LONG) == 0
    assert sorted(found) == list(range(batches))


def test_a_pipeline_makes_the_same_rows_while_the_page_looks_and_is_killed(rows: Path, tmp_path: Path) -> None:
    from penstock import Pipeline
    from penstock.sinks import JsonlSink
    from penstock.sources import JsonlSource
    from penstock.transforms import Map

    seen = 0
    with UiServer(rows) as server:

        def look(row: dict[str, str]) -> dict[str, str]:
            nonlocal seen
            seen += 1
            if seen in (20, 40):
                assert server.get("/t/0?q=row+199")[0] == 200
            elif seen == 60:
                server.process.kill()
            return row

        report = Pipeline(JsonlSource(rows), [Map(look)], JsonlSink(tmp_path / "out.jsonl")).run()
        assert server.process.wait(LONG) == -signal.SIGKILL
    assert report.rows_out == 200
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert made == [json.loads(line) for line in rows.read_text().splitlines()]
