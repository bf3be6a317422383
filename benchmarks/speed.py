"""Suite `speed`: penstock and its peers on the same file, interleaved, each run in a fresh process and checked."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from engines import ENGINES, Engine
from job import COLUMNS
from measure import CaseError, Measurement, measure
from table import table

from corpus import DATA, Answer, Corpus, checksum, read_through

VERSIONS = {"vector": "vectorised", "row": "Python function per row"}

TARGETS = [
    # version, peer, figure, minimum (speed) or maximum (memory) of penstock's ratio to the peer
    ("vector", "polars", "speed", 1.0),
    ("vector", "polars", "memory", 1 / 3),
    ("row", "polars", "speed", 1.2),
    ("row", "datasets", "speed", 5.0),
    ("row", "ray", "speed", 5.0),
]

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HOME": str(DATA / "huggingface"),
    "DO_NOT_TRACK": "1",
    "DAFT_PROGRESS_BAR": "0",
    "PYTHONWARNINGS": "ignore",
}
"""Environment without telemetry, hub requests and progress bars."""


@dataclass(slots=True)
class Case:
    """One engine and one version of the job: its runs so far, or the problem that prevents them."""

    engine: Engine
    version: str
    runs: list[Measurement] = field(default_factory=list)
    problem: str = ""
    differences: str = ""
    output_bytes: int = 0

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def seconds(self) -> list[float]:
        return [run.facts["seconds"] for run in self.runs]

    @property
    def peak_bytes(self) -> float:
        return median(run.peak_bytes for run in self.runs)


def run_speed(corpus: Corpus, repeats: int, only: Collection[str]) -> dict[str, Any]:
    """Run every selected case `repeats` times, print the tables, return the figures."""
    engines = [engine for engine in ENGINES if not only or engine.name in only]
    cases = [Case(engine, version) for version in VERSIONS for engine in engines if getattr(engine, version)]
    for case in cases:
        if importlib.util.find_spec(case.engine.package) is None:
            case.problem = "not installed"
    read_through(corpus.path)
    # A B C A B C rather than A A B B: a busy minute then affects all cases alike.
    for repeat in range(repeats):
        for case in cases:
            if not case.problem:
                _run_once(case, corpus)
                print(f"  {repeat + 1}/{repeats} {case.version:6} {case.name:16} {_short(case)}", flush=True)
    return _report(cases, corpus)


def _run_once(case: Case, corpus: Corpus) -> None:
    output = DATA / "out" / f"{case.name}-{case.version}.parquet"
    _remove(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("run_case.py")
    command = [sys.executable, script, case.name, case.version, corpus.path, output]
    if case.engine.listens:
        command = [*_without_network(), *command]
    if hasattr(os, "sync"):
        os.sync()  # do not time the write-back of the previous engine's output
    try:
        case.runs.append(measure(command, env=QUIET))
        case.output_bytes, case.differences = _check(output, corpus.answer)
    except CaseError as error:
        case.problem = f"failed: {error}"
    finally:
        _remove(output)


def _check(output: Path, expected: Answer) -> tuple[int, str]:
    """Size of the output and its differences from the answer: white space rules cause small ones."""
    data = ds.dataset(output, format="parquet")
    if sorted(data.schema.names) != sorted(COLUMNS):
        raise CaseError(f"the output has columns {data.schema.names}, expected {COLUMNS}")
    codecs = {pq.read_metadata(file).row_group(0).column(1).compression for file in data.files}
    if codecs != {"ZSTD"}:
        raise CaseError(f"the output is compressed with {sorted(codecs)}, expected ZSTD")
    rows = words = texts = 0
    for batch in data.to_batches(columns=["text", "words"]):
        rows += batch.num_rows
        words += sum(batch["words"].to_pylist())
        texts += sum(map(checksum, batch["text"].cast(pa.large_binary()).to_pylist()))
    parts = [
        f"rows {rows - expected.rows:+d}" if rows != expected.rows else "",
        f"words {words - expected.words:+d}" if words != expected.words else "",
        "text differs" if rows == expected.rows and texts != expected.text_checksum else "",
    ]
    return sum(Path(file).stat().st_size for file in data.files), ", ".join(filter(None, parts))


@cache
def _without_network() -> list[str]:
    """Command prefix that allows only the loopback interface; empty where that is not permitted."""
    prefix = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    try:
        allowed = subprocess.run([*prefix, "true"], capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        allowed = False
    return prefix if allowed else []


def _report(cases: list[Case], corpus: Corpus) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for version, title in VERSIONS.items():
        chosen = [case for case in cases if case.version == version]
        reference = next((case for case in chosen if case.name == "penstock" and case.runs), None)
        results[version] = {case.name: _figures(case, corpus, reference) for case in chosen}
        print(f"\n### {title}, {corpus.megabytes:.0f} MB\n")
        print(_table(results[version]))
    for case in {case.name: case for case in cases if case.engine.note}.values():
        print(f"\n{case.name}: {case.engine.note}", end="")
    print()
    results["targets"] = _targets(results)
    return results


def _figures(case: Case, corpus: Corpus, reference: Case | None) -> dict[str, Any]:
    if case.problem or not case.runs:
        return {"problem": case.problem or "not run"}
    middle = median(case.seconds)
    return {
        "package": _version(case.engine.package),
        "note": case.engine.note,
        "median_seconds": middle,
        "min_seconds": min(case.seconds),
        "mb_per_second": corpus.megabytes / middle,
        "best_mb_per_second": corpus.megabytes / min(case.seconds),
        "cpu_seconds": median(run.cpu_seconds for run in case.runs),
        "others_cores": median(run.others_cores for run in case.runs),
        "peak_bytes": case.peak_bytes,
        "private_bytes": median(run.private_bytes for run in case.runs),
        "output_bytes": case.output_bytes,
        "differences": case.differences,
        "speed_ratio": middle / median(reference.seconds) if reference else None,
        "best_speed_ratio": min(case.seconds) / min(reference.seconds) if reference else None,
        "memory_ratio": reference.peak_bytes / case.peak_bytes if reference else None,
        "runs": [run.as_dict() for run in case.runs],
    }


def _table(figures: dict[str, dict[str, Any]]) -> str:
    headers = ["engine", "package", "median s", "min s", "MB/s", "best", "CPU s", "others' cores"]
    headers += ["peak MB", "private MB", "out MB", "penstock speed", "(best)", "penstock memory", "differences"]
    rows = []
    for name, f in figures.items():
        if "problem" in f:
            rows.append([name, *["-"] * (len(headers) - 2), f["problem"]])
            continue
        numbers = [f["median_seconds"], f["min_seconds"], f["mb_per_second"], f["best_mb_per_second"], f["cpu_seconds"]]
        numbers.append(f["others_cores"])
        sizes = [f["peak_bytes"], f["private_bytes"], f["output_bytes"]]
        ratios = [f["speed_ratio"], f["best_speed_ratio"], f["memory_ratio"]]
        cells = [f"{number:.2f}" if i < 2 else f"{number:.1f}" for i, number in enumerate(numbers)]
        cells += [f"{size / 1e6:.0f}" for size in sizes]
        cells += [f"{ratio:.2f}x" if ratio else "-" for ratio in ratios]
        rows.append([name, f["package"], *cells, f["differences"] or "none"])
    return table(headers, rows)


def _targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    judged = []
    for version, peer, what, limit in TARGETS:
        value = results[version].get(peer, {}).get(f"{what}_ratio")
        if value is None:
            continue
        met = value >= limit if what == "speed" else value <= limit
        judged.append({"version": version, "peer": peer, "what": what, "limit": limit, "value": value, "met": met})
        wanted = f"at {'least' if what == 'speed' else 'most'} {limit:.2f}x"
        print(f"{'met   ' if met else 'MISSED'} {version}: {what} {value:.2f}x {peer}, wanted {wanted}")
    return judged


def _short(case: Case) -> str:
    if case.problem:
        return case.problem
    run = case.runs[-1]
    differences = f"  ({case.differences})" if case.differences else ""
    return f"{run.facts['seconds']:7.2f} s {run.peak_bytes / 1e6:6.0f} MB{differences}"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} (source tree)"


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
