"""Metrics file: the record of a run as JSON Lines. `penstock report` and `penstock ui` read it.

    {"penstock_metrics": 1, "kind": "pipeline", "name": ..., "pid": ..., "host": ..., "started": ..., "labels": {...}}
    {"seconds": 1.0, "time": 1700000000.0, "metrics": {"penstock_pipeline_rows_in_total": 4096}, "note": "..."}
    {"seconds": 9.5, "end": "finished", "report": {...}}

Every line is flushed. A file without the last line belongs to a run that goes on or was killed; a second header is a
further part of the same run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.metrics.watch import Reading, RunEnd, RunFacts

VERSION = 1


class MetricsFile:
    """Exporter that appends to a metrics file.

    `{rank}` and `{pid}` in the path are replaced; without `{rank}`, every rank but 0 gets a file of its own, with
    `.rank3` before the suffix.
    """

    def __init__(self, path: PathLike) -> None:
        self._path = os.fspath(require_local(path, "a metrics file"))
        self._file: BinaryIO | None = None

    def begin(self, run: RunFacts) -> None:
        path = self.path_of(run)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - it stays open during the run
        header = {
            "penstock_metrics": VERSION,
            "kind": run.kind,
            "name": run.name,
            "pid": run.pid,
            "host": run.host,
            "started": run.started,
            "labels": dict(run.labels),
            "description": run.description,
        }
        try:
            self._write(header, before=b"\n" if _ends_within_a_line(path) else b"")
        except BaseException:
            self._file.close()  # it is opened again when the watch tries again
            raise

    def write(self, reading: Reading) -> None:
        line: dict[str, Any] = {
            "seconds": round(reading.seconds, 6),
            "time": reading.time,
            "metrics": dict(reading.metrics),
        }
        self._write(line if reading.note is None else line | {"note": reading.note})

    def end(self, end: RunEnd) -> None:
        line: dict[str, Any] = {"seconds": round(end.seconds, 6), "end": end.end}
        line |= {"error": end.error} if end.error is not None else {}
        line |= {"report": end.report} if end.report is not None else {}
        try:
            self._write(line)
        finally:
            if self._file is not None:
                self._file.close()

    def path_of(self, run: RunFacts) -> Path:
        """Path of the file of one process."""
        rank, pid = run.labels.get("rank", "0"), str(run.pid)
        path = Path(self._path.replace("{rank}", rank).replace("{pid}", pid))
        if rank != "0" and "{rank}" not in self._path:
            path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
        return path

    def _write(self, line: dict[str, Any], before: bytes = b"") -> None:
        assert self._file is not None
        content = orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        # In one call: other processes that append to the file do not tear the line.
        written = self._file.write(before + content + b"\n")
        if written != len(before) + len(content) + 1:
            self._file.write(b"\n")
            raise OSError(f"only {written} bytes of a line could be written to {self._file.name}")

    def __str__(self) -> str:
        return self._path


def _ends_within_a_line(path: Path) -> bool:
    """True after a process was killed while it wrote."""
    with open(path, "rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
