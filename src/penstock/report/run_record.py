"""Record of a run: its metrics file, read with bounded memory, whatever state its writer left it in."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import psutil

from penstock.errors import DataError
from penstock.metrics.readings import labels_of

MOST_READINGS: Final = 600
"""Readings of a part that are kept: of a longer one every second, every fourth, and so on, and the last."""
_MOST_LINE: Final = 1 << 24
Numbers = npt.NDArray[np.float64]


@dataclass(slots=True)
class RunReading:
    """Readings of a moment."""

    seconds: float
    metrics: dict[str, float]
    note: str | None


@dataclass(slots=True)
class RunPart:
    """Part of a run from a header to its end, the next header, or where the writer was killed."""

    header: dict[str, Any]
    readings: list[RunReading] = field(default_factory=list)
    count: int = 0
    """Readings in the file, of which some are kept."""
    end: str | None = None
    error: str | None = None
    report: dict[str, Any] | None = None
    seconds: float = 0.0
    _stride: int = 1
    _last: RunReading | None = None

    @property
    def kind(self) -> str:
        return str(self.header.get("kind") or "run")

    @property
    def is_alive(self) -> bool:
        """True if the process that wrote the part still runs on this machine, so that the part may go on."""
        pid, host = self.header.get("pid"), self.header.get("host")
        if self.end is not None or not isinstance(pid, int) or pid < 1 or host != socket.gethostname():
            return False
        try:
            created = psutil.Process(pid).create_time()
        except psutil.Error:
            return False
        started = self.header.get("started")
        return not isinstance(started, (int, float)) or created <= started + 60  # else another process has its number

    def add(self, reading: RunReading) -> None:
        """Keep a reading, or every so many of a long run."""
        if self.count % self._stride == 0:
            self.readings.append(reading)
            if len(self.readings) > MOST_READINGS:
                self._stride *= 2
                self.readings = self.readings[::2]
        self.count += 1
        self._last, self.seconds = reading, max(self.seconds, reading.seconds)

    def finish(self) -> None:
        """Keep the last reading too, which has the totals."""
        if self._last is not None and (not self.readings or self.readings[-1] is not self._last):
            self.readings.append(self._last)

    def last(self, name: str) -> dict[str, float]:
        """Last values of a metric by the value of its labels (`""` without labels)."""
        return dict(_values(self.readings[-1].metrics, name)) if self.readings else {}

    def series(self, name: str) -> dict[str, tuple[Numbers, Numbers]]:
        """Seconds and values of a metric, by the value of its labels."""
        found: dict[str, tuple[list[float], list[float]]] = {}
        for reading in self.readings:
            for label, value in _values(reading.metrics, name):
                xs, ys = found.setdefault(label, ([], []))
                xs.append(reading.seconds)
                ys.append(value)
        return {label: (np.array(xs), np.array(ys)) for label, (xs, ys) in found.items()}


@dataclass(slots=True)
class RecordedRun:
    """Parts of a run, in the order of the file."""

    path: Path
    parts: list[RunPart] = field(default_factory=list)
    unreadable: int = 0
    """Lines that are no JSON object, the last one of a killed writer included."""


def read_run(path: Path) -> RecordedRun:
    """Record of a metrics file. Torn lines are counted and left out; a second header begins another part."""
    record = RecordedRun(path)
    with path.open("rb") as file:
        for line in _lines(file):
            facts = parsed_line(line)
            if facts is None:
                record.unreadable += 1
            elif "penstock_metrics" in facts:
                _check_version(path, facts)
                record.parts.append(RunPart(facts))
            elif not record.parts:
                record.unreadable += 1
            else:
                _add(record.parts[-1], facts)
    if not record.parts:
        raise DataError(f"{path} has no header line of a metrics file; expected a file that metrics='PATH' wrote")
    for part in record.parts:
        part.finish()
    return record


def rates(xs: Numbers, ys: Numbers) -> tuple[Numbers, Numbers]:
    """Growth by second of a counter between readings, at the later of them; a counter that falls began anew."""
    if len(xs) < 2:
        return np.zeros(0), np.zeros(0)
    seconds, growth = np.diff(xs), np.diff(ys)
    kept = (seconds > 0) & (growth >= 0)
    return xs[1:][kept], growth[kept] / seconds[kept]


def _values(metrics: Mapping[str, float], name: str) -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        if key == name:
            yield "", value
        elif key.startswith(name) and key[len(name)] == "{":
            labels = labels_of(key)
            yield labels.get("stage") or ", ".join(labels.values()), value


def _add(part: RunPart, facts: dict[str, Any]) -> None:
    seconds = _number(facts.get("seconds"))
    if "end" in facts:
        part.end, part.seconds = str(facts["end"]), max(part.seconds, seconds)
        part.error = None if facts.get("error") is None else str(facts["error"])
        part.report = facts["report"] if isinstance(facts.get("report"), dict) else None
        return
    metrics = facts.get("metrics")
    if isinstance(metrics, dict):
        numbers = {key: float(value) for key, value in metrics.items() if isinstance(value, (int, float))}
        part.add(RunReading(seconds, numbers, None if facts.get("note") is None else str(facts["note"])))


def _lines(file: Any) -> Iterator[bytes]:
    """Lines of a file; one that is longer than any reading is passed over, and counts as unreadable."""
    while line := file.readline(_MOST_LINE):
        if line.endswith(b"\n") or len(line) < _MOST_LINE:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(_MOST_LINE)
        yield b"?"


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """Facts of a line of JSON; None for anything else, such as a line that was cut off."""
    try:
        facts = orjson.loads(line)
    except ValueError:
        return None
    return facts if isinstance(facts, dict) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _check_version(path: Path, facts: Mapping[str, Any]) -> None:
    if facts["penstock_metrics"] != 1:
        raise DataError(
            f"{path} is a metrics file of version {facts['penstock_metrics']!r}, and this release reads version 1; "
            "install a newer release"
        )
