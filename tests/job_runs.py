"""Runs of one pipeline by both engines, and everything that must be the same in the end."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock import Pipeline, PipelineConfig
from penstock.corpus.prepare import EXAMPLES_NAME
from penstock.engines.driver import JobOptions
from penstock.engines.executor import Executor, InProcess
from penstock.engines.run import JobEngine

Made = tuple[Any, list[Any], Any]
"""Source, transforms and sink of a pipeline."""


@dataclass
class Ended:
    """End of a run: files by name, counts of the report, or the error."""

    files: dict[str, bytes]
    counts: dict[str, Any]
    error: tuple[Any, ...] | None = None


def run(
    make: Callable[[Path], Made],
    folder: Path,
    *,
    engine: JobEngine | None = None,
    prepare: Callable[[Path], None] | None = None,
    checkpoint: Path | str | None = None,
    config: Mapping[str, Any] | None = None,
) -> Ended:
    """One run whose output is in `out` of a folder made anew; it may hold things before."""
    out = folder / "out"
    if not isinstance(checkpoint, Path) or not checkpoint.exists():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        if prepare is not None:
            prepare(out)
    source, transforms, sink = make(out)
    options = dict(config or {})
    if options.get("on_error") == "quarantine":
        options["quarantine"] = out / "bad.jsonl"
    pipeline = Pipeline(source, transforms, sink, PipelineConfig(workers=1, **options), "256 MiB")
    try:
        report = pipeline.run(checkpoint, engine=engine)
    except Exception as error:
        where = [getattr(error, name, None) for name in ("file", "row", "offset")]
        return Ended(files_in(out), {}, (type(error).__name__, str(error), *where))
    counts = {
        name: getattr(report, name) for name in ("rows_in", "rows_out", "dropped", "changed", "quarantined", "skipped")
    }
    return Ended(files_in(out), counts)


def files_in(folder: Path) -> dict[str, bytes]:
    """Bytes of all files, without locks; manifests without the random name of their run.

    Examples of dropped rows are left out: a process keeps some of those that it drops itself.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_file() and path.name != EXAMPLES_NAME and "lock" not in path.name and ".job/" not in name:
            data = path.read_bytes()
            if path.parent.name == "versions" or path.name == "manifest.json":
                data = json.dumps({k: v for k, v in json.loads(data).items() if k not in _RANDOM}).encode()
            found[re.sub(r"-[0-9a-f]{16}\b", "", name)] = data
    return found


_RANDOM = {"run", "checksum", "created"}


def job(split_bytes: int, executor: Callable[[], Executor] = InProcess, **options: Any) -> JobEngine:
    """An engine of jobs with small splits."""
    return JobEngine(executor=executor, options=JobOptions(split_bytes=split_bytes, **options))


def differences(local: Ended, other: Ended) -> list[str]:
    """What is not the same, in words."""
    notes = []
    if local.error != other.error:
        notes.append(f"error: {local.error} != {other.error}")
    if local.counts != other.counts:
        notes.append(f"counts: {local.counts} != {other.counts}")
    for name in sorted(local.files.keys() | other.files.keys()):
        one, two = local.files.get(name), other.files.get(name)
        if one != two:
            notes.append(f"{name}: {_shown(one)} != {_shown(two)}")
    return notes


def _shown(data: bytes | None) -> str:
    if data is None:
        return "no file"
    return (
        f"{len(data)} bytes {data[:600]!r}" if data[:1].isascii() and b"\0" not in data[:99] else f"{len(data)} bytes"
    )
