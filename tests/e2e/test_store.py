"""Preparing a store: killed at any moment, by two processes at once, with more data than memory."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from _scripts.processes import DEADLINE_SECONDS, killed_after_change
from tests.forked_programs import ForkedProgram

from penstock.store import StoreWriter, open_store, versions

ROWS = 1500
KILLS = 3

JOB = """
import sys, time
import pyarrow as pa
import penstock.store.writer
from penstock import MemoryBudget, Pipeline, PipelineConfig
from penstock.sinks import StoreSink
from penstock.sources import JsonlSource
from penstock.transforms import Map

def tokens(row):
    time.sleep(0.0003)
    return {"n": row["n"], "input_ids": [row["n"] % 251] * (row["n"] % 40)}

penstock.store.writer._PIECE_BYTES = 1024  # several pieces a shard, with little data
source, out, mode, kept = sys.argv[1:]
schema = pa.schema({"n": pa.int64(), "input_ids": pa.list_(pa.uint8())})
sink = StoreSink(out, mode=mode, shard_bytes="5 KiB", wait_seconds=60 if mode == "append" else 0)
report = Pipeline(
    JsonlSource(source), [Map(tokens, schema=schema)], sink,
    PipelineConfig(checkpoint_seconds=0.01), MemoryBudget("64 KiB"),
).run(checkpoint=kept or None)
print(report.rows_out)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"n": i}) + "\n" for i in range(ROWS)))
    return path


def start(source: Path, out: Path, mode: str = "create", kept: Path | str = "") -> ForkedProgram:
    said = Path(tempfile.mkdtemp(dir=source.parent), "said")
    return ForkedProgram(source.with_name("job.py"), str(source), str(out), mode, str(kept), said=said)


def finish(process: ForkedProgram) -> str:
    assert process.wait(DEADLINE_SECONDS) == 0, process.said.read_text()
    return process.said.read_text()


def numbers(path: Path) -> list[int]:
    store = open_store(path, verify="full")
    got = []
    for row in store:
        assert row["input_ids"].tolist() == [row["n"] % 251] * (row["n"] % 40)
        got.append(row["n"])
    return got


def shards(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (path / "shards").iterdir()}


@pytest.mark.parametrize("mode", ["create", "append"])
def test_killed_again_and_again_a_store_has_every_row_once(source: Path, mode: str) -> None:
    out, whole, kept = source.with_name("a.store"), source.with_name("whole.store"), source.with_name("kept")
    for path in (out, whole) if mode == "append" else ():
        with StoreWriter(path) as writer:
            writer.publish()
    finish(start(source, whole, mode))
    rng, kills = random.Random(mode), 0
    while True:
        process = start(source, out, mode, kept)
        if kills < KILLS and killed_after_change(process, kept / "checkpoint.json", rng.random() * 0.15):
            kills += 1
            assert mode == "append" or not out.exists(), "half a store was visible"
            assert mode == "create" or len(open_store(out)) == 0
            continue
        stdout = finish(process)
        break
    assert kills >= 2, "the job was hardly ever killed: make it slower"
    assert stdout.split() == [str(ROWS)]
    assert numbers(out) == list(range(ROWS))
    assert shards(out) == shards(whole), "restarts left a trace in the shards"
    assert len(shards(out)) > 20
    assert not [path.name for path in source.parent.iterdir() if path.name.startswith(".")]
    assert not (out / ".build").exists()


def test_a_run_without_a_checkpoint_that_is_killed_leaves_nothing_that_is_in_the_way(source: Path) -> None:
    out = source.with_name("a.store")
    assert killed_after_change(start(source, out), source.with_name(".a.store.penstock-store"), 0.05)
    assert not out.exists()
    finish(start(source, out))
    assert numbers(out) == list(range(ROWS))
    assert not [path.name for path in source.parent.iterdir() if path.name.startswith(".")]


def test_of_two_processes_that_make_a_store_at_once_one_does_and_the_other_says_why_not(source: Path) -> None:
    out = source.with_name("a.store")
    both = [start(source, out), start(source, out)]
    assert sorted(process.wait(DEADLINE_SECONDS) for process in both) == [0, 1]
    refused = next(process.said.read_text() for process in both if process.returncode)
    assert "is being written by process" in refused or "holds a store already" in refused
    assert numbers(out) == list(range(ROWS))
    assert not [path.name for path in source.parent.iterdir() if path.name.startswith(".")]


def test_of_two_processes_that_append_at_once_one_waits_for_the_other(source: Path) -> None:
    out = source.with_name("a.store")
    both = [start(source, out, "append"), start(source, out, "append")]
    for process in both:
        finish(process)
    assert [version.rows for version in versions(out)] == [ROWS, 2 * ROWS]
    assert numbers(out) == list(range(ROWS)) * 2


MEMORY = """
import json, sys
from pathlib import Path
import numpy as np, pyarrow as pa
from penstock import MemoryBudget, Pipeline, Source
from penstock.sinks import StoreSink
from penstock.sources import StoreSource
from penstock.testing import SlowSink

class RepeatLoader(Source):
    def __init__(self, batches):
        self._left = batches
    def next_batch(self, max_rows):
        if not self._left:
            return None
        self._left -= 1
        values = pa.array(np.arange(500_000, dtype=np.uint16))
        ids = pa.ListArray.from_arrays(np.arange(0, 500_001, 500, dtype=np.int32), values)
        return pa.record_batch({"input_ids": ids})

class Counting(SlowSink):
    def consume(self, batch):
        self.batches = [np.asarray(batch["input_ids"].values).sum()]

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))

def grown(work):
    base = status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    report = work()
    return {"grown": (status("VmHWM:") - base) * 1024, "rows": report.rows_out}

out, budget = sys.argv[1], int(sys.argv[2])
Pipeline(RepeatLoader(2), [], StoreSink(out + ".tiny"), budget=budget).run()
Pipeline(StoreSource(out + ".tiny"), [], Counting(0), budget=budget).run()
written = grown(lambda: Pipeline(RepeatLoader(480), [], StoreSink(out), budget=budget).run())
read = grown(lambda: Pipeline(StoreSource(out), [], Counting(0), budget=budget).run())
print(json.dumps([written, read]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_store_five_times_the_budget_is_written_and_read_within_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(MEMORY)
    budget = 96 << 20
    command = [sys.executable, str(tmp_path / "job.py"), str(tmp_path / "a.store"), str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    written, read = json.loads(done.stdout)
    assert written["rows"] == read["rows"] == 480_000
    assert open_store(tmp_path / "a.store").manifest.bytes > 4.5 * budget
    assert written["grown"] < budget, written
    assert read["grown"] < budget, read
