"""Scan of a bucket: Parquet (two of four columns) and JSON Lines, with penstock, Polars, Ray Data and Hugging Face.

    python benchmarks/remote_scan.py                                          # peers of this environment
    python benchmarks/remote_scan.py --repeat 5 --python /venvs/peers/bin/python --megabytes 400

The bucket is on the local S3 server of the tests, once as it is and once with 20 ms before each answer. Each scan runs
in a fresh process with a fresh cache directory, engines take turns, and the clock runs from the first request to the
last row; imports and the start of Ray are not counted. Every engine delivers each row as Arrow, or aggregates it itself
(Polars), and the number of rows and of bytes of text must be right. `bytes` is what the server sent, beside the size of
what is stored.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))
COLUMNS = ["text", "score"]
ENGINES = ("penstock", "polars", "datasets", "ray")
FORMATS = ("parquet", "jsonl")
FILES = 8
LATENCY_SECONDS = 0.02


# -- engines, each in a process of its own ----------------------------------------------------------------------------


def scan_penstock(urls: Sequence[str], kind: str) -> Callable[[], tuple[int, int]]:
    import pyarrow.compute as pc

    from penstock import Pipeline
    from penstock.pipeline import Sink
    from penstock.sources import JsonlSource, ParquetSource

    class Counted(Sink):
        rows = size = 0

        def consume(self, batch: Any) -> None:
            self.rows += batch.num_rows
            self.size += pc.sum(pc.binary_length(batch["text"])).as_py()

        def flush(self) -> None:
            return

    def scan() -> tuple[int, int]:
        sink = Counted()
        source = ParquetSource(urls, columns=COLUMNS) if kind == "parquet" else JsonlSource(urls, columns=COLUMNS)
        Pipeline(source, [], sink).run()
        return sink.rows, sink.size

    return scan


def scan_polars(urls: Sequence[str], kind: str) -> Callable[[], tuple[int, int]]:
    import polars as pl

    def scan() -> tuple[int, int]:
        frame = pl.scan_parquet(list(urls)) if kind == "parquet" else pl.scan_ndjson(list(urls))
        wanted = [pl.len().alias("rows"), pl.col("text").str.len_bytes().sum(), pl.col("score").sum()]
        found = frame.select(wanted).collect(engine="streaming")
        return int(found["rows"][0]), int(found["text"][0])

    return scan


def counted(tables: Iterable[Any]) -> tuple[int, int]:
    import pyarrow.compute as pc

    rows = size = 0
    for table in tables:
        rows += table.num_rows
        size += pc.sum(pc.binary_length(table["text"])).as_py()
    return rows, size


def scan_datasets(urls: Sequence[str], kind: str) -> Callable[[], tuple[int, int]]:
    from datasets import load_dataset

    def scan() -> tuple[int, int]:
        options: dict[str, Any] = {"columns": COLUMNS} if kind == "parquet" else {}
        builder = "parquet" if kind == "parquet" else "json"
        stream = load_dataset(builder, data_files=list(urls), split="train", streaming=True, **options)
        return counted(stream.with_format("arrow").iter(1000))

    return scan


def scan_ray(urls: Sequence[str], kind: str) -> Callable[[], tuple[int, int]]:
    import ray

    ray.init(include_dashboard=False, logging_level="error", log_to_driver=False, num_cpus=os.cpu_count())
    ray.data.DataContext.get_current().enable_progress_bars = False

    def scan() -> tuple[int, int]:
        found = (
            ray.data.read_parquet(list(urls), columns=COLUMNS) if kind == "parquet" else ray.data.read_json(list(urls))
        )
        return counted(found.iter_batches(batch_format="pyarrow", batch_size=1000))

    return scan


def run_one(engine: str, kind: str, urls: Sequence[str]) -> None:
    """One scan; its facts are printed."""
    scan = globals()[f"scan_{engine}"](urls, kind)
    began = time.perf_counter()
    rows, size = scan()
    print(json.dumps({"seconds": time.perf_counter() - began, "rows": rows, "size": size}))


# -- the comparison ----------------------------------------------------------------------------------------------------


def fill(bucket: Any, megabytes: int) -> tuple[dict[str, list[str]], dict[str, int], int, int]:
    """Files of both formats in the bucket: keys, bytes, rows and bytes of text."""
    import obstore

    keys: dict[str, list[str]] = {kind: [] for kind in FORMATS}
    stored = dict.fromkeys(FORMATS, 0)
    rows = size = 0
    for number, (table, held) in enumerate(tables(megabytes)):
        rows, size = rows + table.num_rows, size + held
        for kind, data in (("parquet", as_parquet(table)), ("jsonl", as_lines(table))):
            keys[kind].append(f"scan/part-{number}.{kind}")
            stored[kind] += len(data)
            obstore.put(bucket, keys[kind][-1], data)
    return keys, stored, rows, size


def tables(megabytes: int) -> Iterator[tuple[Any, int]]:
    """Tables with text, made of words from one seed, and the bytes of text in each."""
    import numpy as np
    import pyarrow as pa

    draw = np.random.default_rng(7)
    words = np.array([draw.bytes(int(length)).hex() for length in draw.integers(1, 6, 20_000)], object)
    for number in range(FILES):
        texts: list[str] = []
        held = 0
        while held < megabytes * 1_000_000 // FILES:
            texts.append(" ".join(words[draw.integers(0, len(words), int(draw.integers(20, 300)))]))
            held += len(texts[-1])
        columns = {
            "id": [f"{number}-{row}" for row in range(len(texts))],
            "text": texts,
            "score": draw.random(len(texts)),
            "other": [text[::-1] for text in texts],
        }
        yield pa.table(columns), held


def as_parquet(table: Any) -> bytes:
    import io

    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(table, out, compression="zstd", row_group_size=20_000)
    return out.getvalue()


def as_lines(table: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in table.drop_columns(["other"]).to_pylist()).encode()


def measure(python: str, engine: str, kind: str, urls: list[str], environment: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, **environment, "XDG_CACHE_HOME": cache, "HF_HOME": cache, "HF_HUB_OFFLINE": "1"}
        if engine == "penstock":
            env["PYTHONPATH"] = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), str(HERE.parents[1] / "src")]))
        command = [python, str(HERE), "--one", engine, kind, *urls]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(given: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.servers import BUCKET, Proxy, S3Server, environment_of

    results: list[dict[str, Any]] = []
    with S3Server() as server:
        keys, stored, rows, size = fill(server.client(), given.megabytes)
        for latency in (0.0, LATENCY_SECONDS):
            with Proxy(server.port, latency_seconds=latency) as proxy:
                for kind in FORMATS:
                    urls = [f"s3://{BUCKET}/{key}" for key in keys[kind]]
                    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in given.only}
                    for _ in range(given.repeat):
                        for engine in given.only:
                            python = sys.executable if engine == "penstock" else given.python
                            proxy.bytes_down = 0
                            found = measure(python, engine, kind, urls, environment_of(proxy.endpoint))
                            found["bytes"] = proxy.bytes_down
                            if "error" not in found and (found["rows"], found["size"]) != (rows, size):
                                found["error"] = f"{found['rows']} rows, {found['size']} bytes; expected {rows}, {size}"
                            runs[engine].append(found)
                    results += report(kind, latency, runs, stored[kind])
    return results


def report(kind: str, latency: float, runs: dict[str, list[dict[str, Any]]], stored: int) -> list[dict[str, Any]]:
    """Print the medians of a case, and their ratio to penstock's."""
    medians: dict[str, float] = {}
    lines = []
    for engine, found in runs.items():
        good = [run for run in found if "error" not in run]
        line: dict[str, Any] = {"format": kind, "latency_ms": round(1000 * latency), "engine": engine}
        if good:
            medians[engine] = statistics.median(run["seconds"] for run in good)
            sent = statistics.median(run["bytes"] for run in good)
            line |= {"seconds": round(medians[engine], 3), "MB_sent": round(sent / 1e6, 1)}
        if len(good) < len(found):
            line["error"] = next(run["error"] for run in found if "error" in run)
        lines.append(line)
    print(f"\n{kind}, {1000 * latency:.0f} ms, {stored / 1e6:.0f} MB stored")
    for line in lines:
        engine = line["engine"]
        if engine in medians and "penstock" in medians:
            line["penstock_speed"] = round(medians[engine] / medians["penstock"], 2)
        shown = line.get("error") or f"{line['seconds']:>8.3f} s  {line['MB_sent']:>7.1f} MB sent"
        print(f"  {engine:<10}{shown}  penstock {line.get('penstock_speed', '-')}x", flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Scan of a bucket, compared with peers.")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=160, help="text in each format")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(ENGINES))
    parser.add_argument("--python", default=sys.executable, metavar="PATH", help="interpreter of the peers")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        run_one(given.one[0], given.one[1], given.one[2:])
        return 0
    results = compare(given)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
