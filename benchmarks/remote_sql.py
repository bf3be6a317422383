"""PostgreSQL to batches and to a token store, beside connectorx: seconds, ratios, and memory.

    python benchmarks/remote_sql.py                     # 500,000 documents of about 500 bytes, five rounds
    python benchmarks/remote_sql.py --rows 2000000 --rounds 3 --json sql.json

`scan` reads all columns of a table, penstock in the order of its key: with one connection and with one a core, and
connectorx with its documented partitions (`partition_on`, one a core) and without; the faster of each counts. `store`
makes a token store of the text: penstock streams it (`prepare(url, ...)`), connectorx reads it whole and the table is
prepared. All take turns in each round, in processes of their own, and a ratio above 1 says that penstock is faster.
The server is the one of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WORDS = ("water", "flows", "down", "the", "hill", "into", "a", "mill", "where", "grain", "is", "ground", "for", "bread")


def rss_peak() -> int:
    """Largest memory of this process so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def scan_penstock(url: str) -> int:
    from penstock.sources import SqlSource

    source = SqlSource(url, table="docs", key="id")
    rows = sum(batch.num_rows for batch in iter(lambda: source.next_batch(1 << 16), None))
    source.close()
    return rows


def scan_ranges(url: str) -> int:
    from penstock.sources import SqlSource

    source = SqlSource(url, table="docs", key="id", connections=max(2, len(os.sched_getaffinity(0))))
    rows = sum(batch.num_rows for batch in iter(lambda: source.next_batch(1 << 16), None))
    source.close()
    return rows


def scan_connectorx(url: str, partitions: int = 1) -> int:
    import connectorx  # type: ignore[import-not-found]

    split = {"partition_on": "id", "partition_num": partitions} if partitions > 1 else {}
    query = "SELECT * FROM docs" if split else "SELECT * FROM docs ORDER BY id"
    return int(connectorx.read_sql(url, query, return_type="arrow", **split).num_rows)


def scan_connectorx_partitioned(url: str) -> int:
    return scan_connectorx(url, max(2, len(os.sched_getaffinity(0))))


def store_penstock(url: str) -> int:
    from penstock import prepare
    from penstock.corpus.recipe import Recipe

    with tempfile.TemporaryDirectory() as home:
        made = prepare(f"{url}?table=docs&key=id", Path(home, "a.store"), Recipe(tokenizer="byte"))
        return made.manifest.rows


def store_connectorx(url: str) -> int:
    import connectorx

    from penstock import prepare
    from penstock.corpus.recipe import Recipe

    table = connectorx.read_sql(url, "SELECT text FROM docs ORDER BY id", return_type="arrow")
    with tempfile.TemporaryDirectory() as home:
        made = prepare(table, Path(home, "a.store"), Recipe(tokenizer="byte"))
        return made.manifest.rows


CASES = {
    "scan": {
        "penstock": scan_penstock,
        "penstock ranges": scan_ranges,
        "connectorx": scan_connectorx,
        "connectorx partitions": scan_connectorx_partitioned,
    },
    "store": {"penstock": store_penstock, "connectorx": store_connectorx},
}


def run_case(part: str, who: str, url: str) -> dict[str, Any]:
    """One run in this process, after a small one that imports and compiles everything."""
    work = CASES[part][who]
    work(url.replace("/pen", "/warm").replace("//warm", "//pen"))
    before, started = rss_peak(), time.perf_counter()
    rows = work(url)
    return {"rows": rows, "seconds": time.perf_counter() - started, "peak_mib": (rss_peak() - before) >> 20}


def fill(url: str, rows: int) -> None:
    from penstock.connections.sql import Database

    with Database(url).connect() as connection:
        connection.execute("CREATE DATABASE warm")
    words = f"('{{{','.join(WORDS)}}}'::text[])"
    text = " || ' ' || ".join(f"{words}[1 + (i * {n} + i / {n}) % {len(WORDS)}]" for n in (3, 5, 7))
    for name, count in ((url, rows), (url.replace("/pen", "/warm").replace("//warm", "//pen"), 1000)):
        with Database(name).connect() as connection:
            connection.execute(
                "CREATE TABLE docs AS SELECT i AS id, i % 100 AS source, i * 0.5 AS score, "
                f"repeat(({text}) || ' ', 30) AS text FROM generate_series(1, {count}) i"
            )
            connection.execute("ALTER TABLE docs ADD PRIMARY KEY (id)")
            connection.execute("ANALYZE docs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(*options.case)))
        return
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from tests.servers import PostgresServer

    figures: dict[str, Any] = {"rows": options.rows, "rounds": options.rounds}
    with PostgresServer() as server:
        fill(server.url, options.rows)
        for part, cases in CASES.items():
            runs: dict[str, list[dict[str, Any]]] = {who: [] for who in cases}
            for _ in range(options.rounds):
                for who, found in runs.items():
                    command = [sys.executable, __file__, "--case", part, who, server.url]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    found.append(json.loads(done.stdout.splitlines()[-1]))
            seconds = {who: statistics.median(run["seconds"] for run in found) for who, found in runs.items()}
            own, peer = (
                min(value for who, value in seconds.items() if who.startswith("penstock") == ours)
                for ours in (True, False)
            )
            figures[part] = {
                "seconds": seconds,
                "peak_mib": {who: max(run["peak_mib"] for run in found) for who, found in runs.items()},
                "ratio": peer / own,
            }
            shown = ", ".join(f"{who} {value:.2f} s" for who, value in seconds.items())
            print(f"{part:6} {shown}; {figures[part]['ratio']:.2f}x; peak MiB {figures[part]['peak_mib']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
