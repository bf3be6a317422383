"""Measurement of one case in a fresh process: time, CPU and memory of the whole process tree."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

_POLL_SECONDS = 0.02
_TREE_SECONDS = (
    0.5  # Seconds between walks of /proc for children and PSS: often enough to see workers; more would be expensive.
)


class CaseError(Exception):
    """Case that did not finish; the message ends with its last output."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """Cost of one run, in bytes and seconds."""

    process_seconds: float
    """From start to exit, imports included."""
    cpu_seconds: float
    """User and system time of all processes of the tree."""
    peak_bytes: int
    """Resident memory of one process. For several, the PSS, where shared pages count once; or the sum of their private
    memory where that is more, since the PSS is sampled only twice a second."""
    private_bytes: int
    """Part of it that is neither file mapping nor shared memory, summed over the tree."""
    processes: int
    others_cores: float
    """Cores used by other processes meanwhile; with a busy core the figures are unreliable."""
    facts: dict[str, Any]
    """Facts that the case reported."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout: float = 900,
) -> Measurement:
    """Run `command` with one more argument, the file for its facts (see `facts.py`)."""
    with tempfile.TemporaryDirectory() as folder:
        facts, log = Path(folder, "facts.json"), Path(folder, "log.txt")
        start = time.perf_counter()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*map(str, command), str(facts)],
                env={**os.environ, **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            watch = _Watch(child.pid)
            try:
                while child.poll() is None:
                    watch.look()
                    if time.perf_counter() - start > timeout:
                        raise CaseError(f"no end after {timeout:g} s; {_last_line(log)}")
                    time.sleep(_POLL_SECONDS)
            finally:
                if child.poll() is None:
                    watch.kill()
                    child.wait()
        seconds = time.perf_counter() - start
        if child.returncode or not facts.exists():
            raise CaseError(f"exit status {child.returncode}; {_last_line(log)}")
        return watch.measurement(seconds, json.loads(facts.read_text()))


def _machine_cpu() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


@dataclass(slots=True)
class _Watch:
    """Process tree of `pid` and its peaks so far."""

    pid: int
    tree: list[psutil.Process] = field(default_factory=list)
    tree_seen_at: float = 0.0
    rss: int = 0
    pss: int = 0
    private: int = 0
    processes: int = 0
    cpu: dict[int, float] = field(default_factory=dict)
    machine_cpu_at_start: float = field(default_factory=_machine_cpu)

    def look(self) -> None:
        if time.monotonic() - self.tree_seen_at > _TREE_SECONDS:
            self._look_at_tree()
        rss = private = 0
        for process in self.tree:
            try:
                memory = process.memory_info()
                times = process.cpu_times()
            except psutil.Error:
                continue  # exited since the last walk
            rss += memory.rss
            private += memory.rss - getattr(memory, "shared", 0)
            self.cpu[process.pid] = times.user + times.system
        self.rss, self.private = max(self.rss, rss), max(self.private, private)

    def _look_at_tree(self) -> None:
        try:
            driver = psutil.Process(self.pid)
            self.tree = [driver, *driver.children(recursive=True)]
        except psutil.Error:
            return
        self.tree_seen_at = time.monotonic()
        self.processes = max(self.processes, len(self.tree))
        if len(self.tree) > 1:
            self.pss = max(self.pss, sum(map(_pss, self.tree)))

    def kill(self) -> None:
        for process in reversed(self.tree):
            try:
                process.kill()
            except psutil.Error:
                continue

    def measurement(self, seconds: float, facts: dict[str, Any]) -> Measurement:
        seen = max(self.pss, self.private) if self.processes > 1 else self.rss
        own_cpu = sum(self.cpu.values())
        return Measurement(
            process_seconds=seconds,
            cpu_seconds=own_cpu,
            peak_bytes=max(seen, facts["own_peak_bytes"]),
            private_bytes=self.private,
            processes=self.processes,
            others_cores=max(0.0, _machine_cpu() - self.machine_cpu_at_start - own_cpu) / seconds,
            facts=facts,
        )


def _pss(process: psutil.Process) -> int:
    try:
        memory = process.memory_full_info()
    except psutil.Error:
        return 0
    return getattr(memory, "pss", memory.rss)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"it wrote last: {lines[-1][:300]}" if lines else "it wrote nothing"
