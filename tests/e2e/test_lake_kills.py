"""An S3 server that is killed while a table is read from it and another one written to it."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.servers import KILLS, S3Server, missing

from penstock import Pipeline, PipelineConfig
from penstock.errors import PenstockError
from penstock.pipeline import Transform
from penstock.sinks import DeltaSink
from penstock.sources import DeltaSource

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="there is no SIGKILL"), pytest.mark.timeout(300)]
if reason := missing(*S3Server.packages):
    pytest.skip(reason, allow_module_level=True)

ROWS, FILES = 4000, 40


class Killing(Transform):
    """Passes rows on, and lets the server be killed at some of them."""

    def __init__(self, server: S3Server, at: list[int]) -> None:
        self._server, self.at, self.kills = server, at, 0
        self._lock = threading.Lock()

    def transform(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        with self._lock:
            due = [n for n in self.at if n in batch["n"].to_pylist()]
            if due:
                self.at.remove(due[0])
                self._server.restart()
                self.kills += 1
        return batch

    def __repr__(self) -> str:
        return "Killing()"


@pytest.mark.parametrize("commit", ["end", "checkpoint"] if KILLS > 2 else ["checkpoint"])
def test_a_killed_server_loses_no_row_and_repeats_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: Any
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        here, there = f"{server.url}/here", f"{server.url}/there"
        each = ROWS // FILES
        for start in range(0, ROWS, each):
            sink = DeltaSink(here)
            text = [f"row {n} " * 20 for n in range(start, start + each)]
            sink.consume(pa.RecordBatch.from_pydict({"n": range(start, start + each), "text": text}))
            sink.flush()
        draw = random.Random(commit)
        killing = Killing(server, [each * file + draw.randrange(each) for file in draw.sample(range(FILES), KILLS)])
        config = PipelineConfig(checkpoint_seconds=0, batch_rows=100)
        failures: list[Exception] = []
        while True:
            try:
                Pipeline(DeltaSource(here), [killing], DeltaSink(there, commit=commit), config).run(tmp_path / "kept")
                break
            except (PenstockError, ConnectionError) as error:
                failures.append(error)
                assert len(failures) <= KILLS, failures
        source, found = DeltaSource(there), []
        while (batch := source.next_batch(1000)) is not None:
            found += batch["n"].to_pylist()
        assert sorted(found) == list(range(ROWS))
        assert killing.kills == KILLS
