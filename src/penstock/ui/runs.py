"""Metrics file of a run, followed while it grows: header, readings over time, and how the run ended."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson
import psutil

from penstock.errors import DataError
from penstock.metrics.readings import labels_of
from penstock.ui.targets import METRICS_MARK

State = Literal["waiting", "running", "silent", "finished", "failed", "stopped", "killed"]
STATE_TEXTS: dict[State, str] = {
    "waiting": "has not begun: the file is empty or missing",
    "running": "is running",
    "silent": "is running or was killed: it is on another machine, and its file does not grow",
    "finished": "has finished",
    "failed": "has failed",
    "stopped": "was stopped",
    "killed": "was killed: its process is gone, and it did not end in order",
}
_MOST_READINGS = 600
"""Readings that are kept; beyond it, every second of the older ones is left out."""
_MOST_BYTES, _TAIL_BYTES, _PROBES = 8 << 20, 1 << 20, 300
_SILENT_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """Metrics at one time, by flat key."""

    seconds: float
    time: float
    metrics: Mapping[str, float]
    note: str = ""

    def get(self, name: str, default: float | None = None) -> float | None:
        return self.metrics.get(name, default)

    def labelled(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of every key with this name."""
        for key, value in self.metrics.items():
            if key == name or key.startswith(f"{name}{{"):
                yield labels_of(key), value


@dataclass(slots=True)
class FollowedRun:
    """Record of a run, as far as it was read."""

    header: Mapping[str, Any] = field(default_factory=dict)
    parts: int = 0
    """Headers: more than one if the run was resumed."""
    readings: list[MetricsReading] = field(default_factory=list)
    end: Mapping[str, Any] | None = None
    skipped_lines: int = 0
    """Lines that were not read: damaged ones, and those left out of a long file."""

    @property
    def kind(self) -> str:
        return str(self.header.get("kind", "run"))

    @property
    def latest(self) -> MetricsReading | None:
        return self.readings[-1] if self.readings else None

    def state(self) -> State:
        if not self.header:
            return "waiting"
        if self.end is not None:
            end = self.end.get("end")
            return end if end in ("finished", "failed", "stopped") else "finished"
        if self.header.get("host") != socket.gethostname():
            return "running" if self.silent_seconds() < _SILENT_SECONDS else "silent"
        return "running" if _is_alive(self.header.get("pid"), self.header.get("started")) else "killed"

    def silent_seconds(self) -> float:
        """Seconds since the last line, by the clock of this machine."""
        last = self.latest.time if self.latest is not None else float(self.header.get("started") or 0.0)
        return max(0.0, time.time() - last)

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Times and values of one key."""
        points = [(each.seconds, each.metrics[name]) for each in self.readings if name in each.metrics]
        return [at for at, _ in points], [value for _, value in points]

    def rate(self, name: str, window_seconds: float = 5.0) -> float | None:
        """Growth of a counter per second, over the last readings; None with fewer than two."""
        times, values = self.series(name)
        if len(times) < 2:
            return None
        first = len(times) - 2
        while first and times[-1] - times[first] < window_seconds:
            first -= 1
        passed = times[-1] - times[first]
        return max(0.0, values[-1] - values[first]) / passed if passed > 0 else None

    def rates(self, name: str) -> tuple[list[float], list[float]]:
        """Times, and growth of a counter per second since the reading before."""
        times, values = self.series(name)
        pairs = [
            (now, max(0.0, high - low) / (now - before))
            for before, now, low, high in zip(times, times[1:], values, values[1:])
            if now > before
        ]
        return [at for at, _ in pairs], [value for _, value in pairs]


class RunFile:
    """Metrics file that is followed: each look reads what was added since the last one.

    Of a file over 8 MiB the first look reads some hundred lines from all over it, and the end.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._record = FollowedRun()
        self._at, self._inode = 0, -1

    def look(self) -> FollowedRun:
        """The record as it is now. A file that was removed after it was seen is an error."""
        with self._lock:
            try:
                with self._path.open("rb") as file:
                    self._read(file)
            except FileNotFoundError:
                if self._inode >= 0:
                    raise DataError("the metrics file was removed while it was shown", file=str(self._path)) from None
            record = self._record
            return replace(record, readings=list(record.readings))  # readers see no line that comes later

    def _read(self, file: BinaryIO) -> None:
        stat = os.fstat(file.fileno())
        if stat.st_ino != self._inode or stat.st_size < self._at:
            self._record, self._at, self._inode = FollowedRun(), 0, stat.st_ino  # another file, or one begun anew
        if stat.st_size - self._at > _MOST_BYTES:
            self._probe(file, stat.st_size)
        file.seek(self._at)
        data = file.read(_MOST_BYTES + _TAIL_BYTES)
        whole = data.rfind(b"\n") + 1  # a torn last line is read when it is whole
        for line in data[:whole].splitlines():
            self._add(line)
        self._at += whole

    def _probe(self, file: BinaryIO, size: int) -> None:
        """Read single lines from all over a long file, and go to the last megabyte of it."""
        last = size - _TAIL_BYTES
        for number in range(_PROBES):
            file.seek(self._at + (last - self._at) * number // _PROBES)
            if number or self._at:
                file.readline(_TAIL_BYTES)
            self._add(file.readline(_TAIL_BYTES).rstrip(b"\n"))
        file.seek(last)
        self._at = last + len(file.readline(_TAIL_BYTES))
        self._record.skipped_lines += 1

    def _add(self, line: bytes) -> None:
        if not line.strip(b"\0 \r"):
            return
        record = self._record
        try:
            facts = orjson.loads(line)
        except ValueError:
            facts = None
        if not isinstance(facts, dict):
            record.skipped_lines += 1
        elif METRICS_MARK in facts:
            record.header, record.end = facts, None
            record.parts += 1
        elif "end" in facts:
            record.end = facts
        elif isinstance(facts.get("metrics"), dict):
            record.readings.append(_reading(facts))
            if len(record.readings) > _MOST_READINGS:
                half = _MOST_READINGS // 2
                record.readings[:half] = record.readings[:half:2]
        else:
            record.skipped_lines += 1


def _reading(facts: Mapping[str, Any]) -> MetricsReading:
    metrics = {
        str(key): float(value)
        for key, value in facts["metrics"].items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return MetricsReading(
        _number(facts.get("seconds")), _number(facts.get("time")), metrics, str(facts.get("note") or "")
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _is_alive(pid: Any, started: Any) -> bool:
    """True if the process of a run still runs: systems reuse process ids, so its start time is compared."""
    try:
        process = psutil.Process(int(pid))
        young = process.create_time() > _number(started) + 60.0
        return not young and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.Error, TypeError, ValueError, OverflowError):
        return False
