"""Scan of local files: JSON Lines, with and without a schema and compressed, and Parquet (two of four columns).

    python benchmarks/scan.py
    python benchmarks/scan.py --megabytes 800 --repeat 5 --only penstock,polars

Each scan runs in a fresh process with the files in the page cache, engines take turns, and the clock runs from the call
to the last row; imports do not count. Every engine delivers each row as Arrow, or aggregates it itself (Polars), and
the number of rows and of bytes of text must be right. The fastest of the rounds counts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from facts import own_peak_bytes
from remote_scan import COLUMNS, as_lines, as_parquet, counted, tables
from table import table

Scan = Callable[[], tuple[int, int]]
SOURCE = Path(__file__).resolve().parents[1] / "src"
CASES = {
    "jsonl": "JSON Lines",
    "schema": "JSON Lines with a schema",
    "zst": "JSON Lines, zstd",
    "parquet": "Parquet, two of four columns",
}
ENGINES = ("penstock", "polars", "arrow")
SUFFIXES = {"jsonl": ".jsonl", "schema": ".jsonl", "zst": ".jsonl.zst", "parquet": ".parquet"}


# -- engines, each in a process of its own ----------------------------------------------------------------------------


def scan_penstock(paths: Sequence[str], case: str) -> Scan:
    import pyarrow as pa
    import pyarrow.compute as pc

    from penstock import Pipeline
    from penstock.pipeline import Sink
    from penstock.sources import JsonlSource, ParquetSource

    schema = pa.schema({"id": pa.string(), "text": pa.string(), "score": pa.float64()})

    class Counted(Sink):
        rows = size = 0

        def consume(self, batch: Any) -> None:
            self.rows += batch.num_rows
            self.size += pc.sum(pc.binary_length(batch["text"])).as_py()

        def flush(self) -> None:
            return

    def scan() -> tuple[int, int]:
        sink = Counted()
        source: Any
        if case == "parquet":
            source = ParquetSource(paths, columns=COLUMNS)
        else:
            source = JsonlSource(paths, columns=COLUMNS, schema=schema if case == "schema" else None)
        Pipeline(source, [], sink).run()
        return sink.rows, sink.size

    return scan


def scan_polars(paths: Sequence[str], case: str) -> Scan:
    import polars as pl

    schema = {"id": pl.String, "text": pl.String, "score": pl.Float64} if case == "schema" else None

    def scan() -> tuple[int, int]:
        if case == "parquet":
            frame = pl.scan_parquet(list(paths))
        else:
            frame = pl.scan_ndjson(list(paths), schema=schema)
        wanted = [pl.len().alias("rows"), pl.col("text").str.len_bytes().sum(), pl.col("score").sum()]
        found = frame.select(wanted).collect(engine="streaming")
        return int(found["rows"][0]), int(found["text"][0])

    return scan


def scan_arrow(paths: Sequence[str], case: str) -> Scan:
    import pyarrow as pa
    import pyarrow.dataset as ds
    import pyarrow.json as pj

    def batches() -> Iterator[Any]:
        if case == "parquet":
            yield from ds.dataset(list(paths), format="parquet").to_batches(columns=COLUMNS)
            return
        schema = pa.schema({"id": pa.string(), "text": pa.string(), "score": pa.float64()})
        options = pj.ParseOptions(explicit_schema=schema if case == "schema" else None)
        for path in paths:
            with pa.input_stream(path) as stream:
                yield pj.read_json(stream, parse_options=options, read_options=pj.ReadOptions(block_size=4 << 20))

    return lambda: counted(batches())


def run_one(engine: str, case: str, paths: Sequence[str]) -> None:
    """One scan; its facts are printed."""
    scan = globals()[f"scan_{engine}"](paths, case)
    for path in paths:
        Path(path).read_bytes()
    before, began = _cpu_seconds(), time.perf_counter()
    rows, size = scan()
    seconds = time.perf_counter() - began
    facts = {"seconds": seconds, "cpu": _cpu_seconds() - before, "peak_mb": own_peak_bytes() / 1e6}
    facts |= {"rows": rows, "size": size}
    print(json.dumps(facts))


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# -- the comparison ----------------------------------------------------------------------------------------------------


def write_files(folder: Path, megabytes: int) -> tuple[dict[str, list[str]], int, int]:
    """Files by suffix, rows, and bytes of text."""
    import pyarrow as pa

    paths: dict[str, list[str]] = {suffix: [] for suffix in SUFFIXES.values()}
    rows = size = 0
    for number, (made, held) in enumerate(tables(megabytes)):
        rows, size = rows + made.num_rows, size + held
        lines = as_lines(made)
        packed = pa.Codec("zstd", compression_level=3).compress(lines, asbytes=True)
        for suffix, data in ((".jsonl", lines), (".jsonl.zst", packed), (".parquet", as_parquet(made))):
            path = folder / f"part-{number}{suffix}"
            path.write_bytes(data)
            paths[suffix].append(str(path))
    return paths, rows, size


def measure(engine: str, case: str, paths: Sequence[str], expected: tuple[int, int]) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, __file__, "--one", engine, case, *paths]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if (found["rows"], found["size"]) != expected:
        return {"error": f"{found['rows']} rows, {found['size']} bytes; expected {expected}"}
    return found


def compare(given: argparse.Namespace) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory() as folder:
        paths, rows, size = write_files(Path(folder), given.megabytes)
        for case in given.cases:
            files = paths[SUFFIXES[case]]
            runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in given.only}
            for _ in range(given.repeat):
                for engine in given.only:
                    runs[engine].append(measure(engine, case, files, (rows, size)))
            stored, text = megabytes_of(files), megabytes_of(paths[".jsonl"] if case == "zst" else files)
            print(f"\n{CASES[case]}, {stored:.0f} MB stored, {size / 1e6:.0f} MB of text\n")
            lines = []
            best = {
                e: min((r for r in found if "error" not in r), key=lambda r: r["seconds"], default=None)
                for e, found in runs.items()
            }
            for engine, found in runs.items():
                fast = best[engine]
                if fast is None:
                    lines.append([engine, found[-1]["error"], "", "", "", ""])
                    continue
                ours = best.get("penstock")
                ratio = f"{fast['seconds'] / ours['seconds']:.2f}x" if ours else "-"
                cpu, peak = f"{fast['cpu']:.2f}", f"{fast['peak_mb']:.0f}"
                lines.append([engine, f"{fast['seconds']:.3f}", f"{text / fast['seconds']:.0f}", cpu, peak, ratio])
                results.append({"case": case, "engine": engine, **fast})
            print(table(["", "s", "MB/s", "CPU s", "peak MB", "penstock's speed"], lines), flush=True)
    return results


def megabytes_of(paths: Sequence[str]) -> float:
    return sum(Path(path).stat().st_size for path in paths) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="rounds (5)")
    parser.add_argument("--megabytes", type=int, default=240, help="text in each format (240)")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(ENGINES), help="engines")
    parser.add_argument("--cases", type=lambda text: text.split(","), default=list(CASES), help=", ".join(CASES))
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
