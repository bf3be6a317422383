"""The budget is about memory: what the process occupies stays within it, however slow the sink is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.servers import PostgresServer

from penstock.connections.sql import Database
from penstock.files.objects import open_bucket

SCRIPT = """
import json, sys, time
from pathlib import Path
from penstock import MemoryBudget, Pipeline
from penstock.sinks import ParquetSink
from penstock.sources import JsonlSource
from penstock.transforms import CountWords, Filter, Lower

class SlowSink(ParquetSink):
    def consume(self, batch):
        super().consume(batch)
        time.sleep(batch.nbytes / 50e6)

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))

def run(path, out):
    stages = [Lower("text"), CountWords("text", into="words"), Filter("words > 3")]
    return Pipeline(JsonlSource(path), stages, SlowSink(out), budget=MemoryBudget(sys.argv[3])).run()

tiny, large, _ = sys.argv[1:]
run(tiny, tiny + ".parquet")
base = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
report = run(large, large + ".parquet")
print(json.dumps({"grown": (status("VmHWM:") - base) * 1024, "charged": report.peak_bytes, "rows": report.rows_out}))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_resident_memory_stays_within_base_and_budget_with_a_slow_sink(tmp_path: Path) -> None:
    line = json.dumps({"id": 1, "text": "Some Words That Are Repeated " * 80, "score": 0.5}) + "\n"
    (tmp_path / "tiny.jsonl").write_text(line * 20)
    with open(tmp_path / "large.jsonl", "w") as file:
        for _ in range(100):
            file.write(line * 700)
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    budget = 96 << 20
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "tiny.jsonl"), str(tmp_path / "large.jsonl"), str(budget)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["rows"] == 70_000
    assert seen["grown"] < budget, seen


MANY = """
import sys
from pathlib import Path
from penstock import Pipeline
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource
from penstock.transforms import FlatMap

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))

def many(row):
    return ({"id": row["id"], "k": k} for k in range(400))

def run(path):
    Pipeline(JsonlSource(path), [FlatMap(many)], JsonlSink(path + ".out"), budget="16 MiB").run()

run(sys.argv[1])
base = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
run(sys.argv[2])
print((status("VmHWM:") - base) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_resident_memory_stays_near_the_budget_where_a_row_becomes_many(tmp_path: Path) -> None:
    (tmp_path / "tiny.jsonl").write_text('{"id": 1}\n' * 5)
    (tmp_path / "large.jsonl").write_text('{"id": 1}\n' * 400)
    (tmp_path / "job.py").write_text(MANY)
    command = [sys.executable, *(str(tmp_path / name) for name in ("job.py", "tiny.jsonl", "large.jsonl"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    # Without parts it was over half a gigabyte.
    assert int(done.stdout) < 120 << 20


LONG = """
import sys
from pathlib import Path
from penstock import Pipeline
from penstock.sinks import JsonlSink
from penstock.sources import JsonlSource

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))

def run(path):
    Pipeline(JsonlSource(path), [], JsonlSink(path + ".out"), budget="64 MiB").run()

run(sys.argv[1])
base = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
run(sys.argv[2])
print((status("VmHWM:") - base) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_one_long_row_takes_three_times_its_size(tmp_path: Path) -> None:
    small, size = '{"id": 1, "text": "a"}\n' * 100, 60 << 20
    (tmp_path / "tiny.jsonl").write_text(small)
    (tmp_path / "large.jsonl").write_text(small + json.dumps({"id": 2, "text": "x" * size}) + "\n" + small)
    (tmp_path / "job.py").write_text(LONG)
    command = [sys.executable, *(str(tmp_path / name) for name in ("job.py", "tiny.jsonl", "large.jsonl"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 3.5 * size  # what was read, Arrow's copy while it parses, and the row; it was over 4


REMOTE = """
import sys, time
from pathlib import Path
from penstock import Pipeline
from penstock.sinks import MemorySink
from penstock.sources import SqlSource, open_source

class SlowSink(MemorySink):
    def consume(self, batch):
        time.sleep(batch.nbytes / 100e6)

def status(field):
    return next(int(l.split()[1]) for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field))

def run(name):
    url = sys.argv[1]
    database = url.startswith("postgresql")
    source = SqlSource(url, table=name, key="id") if database else open_source(f"{url}/{name}.jsonl")
    return Pipeline(source, [], SlowSink(), budget="48 MiB").run()

run("memory_tiny")
base = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
assert run("memory_large").rows_out == 45_000
print((status("VmHWM:") - base) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("place", ["bucket", "database"])
def test_resident_memory_stays_within_the_budget_where_a_slow_sink_reads_from_a_server(
    place: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    sizes = {"memory_tiny": 1000, "memory_large": 45_000}  # 90 MB
    if place == "bucket":
        url = request.getfixturevalue("s3_url")
        for name, rows in sizes.items():
            bucket, key = open_bucket(f"{url}/{name}.jsonl")
            with bucket.writer(key) as writer:
                for start in range(0, rows, 1000):
                    lines = [
                        f'{{"id": {row}, "text": "{row:08d}{"x" * 1960}"}}\n' for row in range(start, start + 1000)
                    ]
                    writer.write("".join(lines).encode())
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        url = server.url
        with Database(url).connect() as connection:
            for name, rows in sizes.items():
                connection.execute(f"DROP TABLE IF EXISTS {name}")
                connection.execute(
                    f"CREATE UNLOGGED TABLE {name} AS "
                    f"SELECT i AS id, repeat(md5(i::text), 62) AS text FROM generate_series(1, {rows}) i"
                )
                connection.execute(f"CREATE UNIQUE INDEX ON {name} (id)")
    (tmp_path / "job.py").write_text(REMOTE)
    command = [sys.executable, str(tmp_path / "job.py"), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 << 20
