"""Does a process stay under base + budget when it writes to a server and reads from one through a slow consumer?

    python benchmarks/remote_memory.py --megabytes 400
    python benchmarks/remote_memory.py --only postgres,s3-jsonl --megabytes 2000

For each place, a fresh process makes rows faster than the server takes them and writes them, and another one reads them
back into a sink that is slow. Base is the resident memory after the same pipeline ran on a few rows; the kernel's peak
of the run after it shows how far memory rose. Servers run on loopback, from the packages of the extra `servers`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
from facts import own_peak_bytes
from table import table

ROOT = Path(__file__).parents[1]
BUDGET = 64 << 20
SLOW_BYTES_PER_SECOND = 60e6
ROW_BYTES = 2000
TINY_ROWS = 100
_MOST_ROWS = 3000
BUCKETS = {
    "s3-jsonl": "jsonl",
    "s3-jsonl-zst": "jsonl.zst",
    "s3-jsonl-gz": "jsonl.gz",
    "s3-parquet": "parquet",
    "s3-arrow": "arrow",
    "s3-csv": "csv",
    "s3-store": "store",
    "s3-delta": "delta",
}
PLACES = (*BUCKETS, "https", "postgres", "nats", "redis")


class MadeRows:
    """Source of rows of about 2 kB that no compression makes small, as fast as they can be taken."""

    def __init__(self, rows: int) -> None:
        self._left, self._next = rows, 0

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if not self._left:
            return None
        rows = min(max_rows, self._left, _MOST_ROWS)
        ids = pa.array(range(self._next, self._next + rows), pa.int64())
        self._left -= rows
        self._next += rows
        ends = pa.array(range(0, (rows + 1) * ROW_BYTES, ROW_BYTES), pa.int32())
        data = pa.py_buffer(os.urandom(rows * ROW_BYTES // 2).hex().encode())
        return pa.RecordBatch.from_arrays(
            [ids, pa.StringArray.from_buffers(rows, ends.buffers()[1], data)], ["id", "text"]
        )

    def size_hint(self) -> int | None:
        return None

    def memory_usage(self) -> int:
        return 0


class SlowSink:
    """Sink that looks at rows and forgets them."""

    rows = 0

    def consume(self, batch: pa.RecordBatch) -> None:
        time.sleep(batch.nbytes / SLOW_BYTES_PER_SECOND)
        self.rows += batch.num_rows

    def flush(self) -> None: ...

    def memory_usage(self) -> int:
        return 0


def _sink(url: str) -> Any:
    from penstock.sinks import DeltaSink, StoreSink, open_sink

    if url.endswith(".store"):
        return StoreSink(url, tokens=None)
    return DeltaSink(url) if url.endswith(".delta") else open_sink(url)


def _source(url: str) -> Any:
    from penstock.sources import DeltaSource, SqlSource, StoreSource, open_source

    if url.endswith(".store"):
        return StoreSource(url)
    if url.startswith("postgresql"):
        place, _, name = url.partition("?table=")
        return SqlSource(place, table=name, key="id")
    return DeltaSource(url) if url.endswith(".delta") else open_source(url)


def measured(action: str, tiny: str, large: str, rows: str) -> None:
    """The measured process."""
    from penstock import MemoryBudget, Pipeline

    def run(url: str, count: int) -> int:
        budget = MemoryBudget(BUDGET)
        if action == "write":
            report = Pipeline(MadeRows(count), [], _sink(url), budget=budget).run()
        else:
            report = Pipeline(_source(url), [], SlowSink(), budget=budget).run()
        assert report.rows_out == count, (report.rows_out, count)
        return budget.peak

    run(tiny, TINY_ROWS)
    base = _status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    charged = run(large, int(rows))
    seconds = time.perf_counter() - start
    print(json.dumps({"base": base, "rise": own_peak_bytes() - base, "charged": charged, "seconds": seconds}))


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@contextlib.contextmanager
def _place(name: str) -> Iterator[tuple[str, str, dict[str, str]]]:
    """URLs of a small and a large output at a place, and the variables by which clients find it."""
    from tests.brokers import NatsBroker, RedisBroker
    from tests.servers import NatsServer, PostgresServer, RedisServer, S3Server

    with contextlib.ExitStack() as stack:
        if name in BUCKETS:
            s3 = stack.enter_context(S3Server())
            yield f"{s3.url}/tiny.{BUCKETS[name]}", f"{s3.url}/large.{BUCKETS[name]}", s3.environment
        elif name == "https":
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            url = stack.enter_context(_web(Path(folder)))
            yield f"{url}/tiny.jsonl", f"{url}/large.jsonl", {"FOLDER": folder}
        elif name == "postgres":
            url = stack.enter_context(PostgresServer()).url
            yield f"{url}?table=tiny", f"{url}?table=large", {}
        else:
            kind: Any = {"nats": (NatsServer, NatsBroker), "redis": (RedisServer, RedisBroker)}[name]
            broker = kind[1](stack.enter_context(kind[0]()).url)
            yield broker.new(), broker.new(), {}


@contextlib.contextmanager
def _web(folder: Path) -> Iterator[str]:
    """A server that answers ranges of the files of a folder."""

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            file = folder / Path(self.path).name
            if not file.exists():
                self.send_error(404)
                return
            size, asked = file.stat().st_size, self.headers.get("Range")
            first, last = map(int, asked.removeprefix("bytes=").split("-")) if asked else (0, size - 1)
            last = min(last, size - 1)
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            self.send_header("ETag", f'"{size}"')
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(last - first + 1))
            self.end_headers()
            if self.command == "GET":
                with file.open("rb") as opened:
                    opened.seek(first)
                    self.connection.sendfile(opened, first, last - first + 1)

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _run(action: str, tiny: str, large: str, rows: int, env: dict[str, str]) -> dict[str, Any]:
    if "FOLDER" in env and action == "write":
        tiny, large = (f"{env['FOLDER']}/{url.rpartition('/')[2]}" for url in (tiny, large))
    command = [sys.executable, __file__, "--measured", action, tiny, large, str(rows)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"problem": (done.stderr.strip().splitlines() or ["nothing"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _cells(one: dict[str, Any]) -> list[str]:
    if "problem" in one:
        return [*["-"] * 5, one["problem"]]
    return [
        *(f"{one[name] / (1 << 20):.0f}" for name in ("base", "rise")),
        f"{one['rise'] / BUDGET:.2f}",
        f"{one['charged'] / (1 << 20):.0f}",
        f"{one['seconds']:.0f}",
        "yes" if one["rise"] <= BUDGET else "NO",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PLACES))
    parser.add_argument("--megabytes", type=int, default=400)
    given = parser.parse_args()
    rows, lines = given.megabytes * 1_000_000 // ROW_BYTES, []
    for name in given.only.split(","):
        if name not in PLACES:
            parser.error(f"{name!r} is none of {', '.join(PLACES)}")
        with _place(name) as (tiny, large, env):
            for action in ("write", "read"):
                lines.append([f"{name} {action}", *_cells(_run(action, tiny, large, rows, env))])
                print("  ", *lines[-1], flush=True)
    print(f"\n### peak memory against a budget of {BUDGET >> 20} MiB, {given.megabytes} MB\n")
    print(table(["case", "base MiB", "rise MiB", "rise/budget", "charged MiB", "seconds", "held"], lines))
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    if sys.argv[1:2] == ["--measured"]:
        measured(*sys.argv[2:])
    else:
        sys.exit(main())
