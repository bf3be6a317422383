"""Metrics of each stage, and a sentence that names the bottleneck and its reason."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

from penstock.pipeline.stages import Origin
from penstock.pipeline.watchdog import Watchdog

TOKENS = "tokens left out: "
"""Prefix of reasons that count tokens and not rows."""

_BUCKETS = 96  # eight to a factor of ten, from one microsecond: the last begins at 10**6 seconds


class StageMetrics:
    """Counters of one stage, safe to add to from many threads."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.rows_in = self.rows_out = self.bytes_in = self.bytes_out = self.batches = 0
        self.busy = self.cpu = self.wait_input = self.wait_room = 0.0
        self.memory = 0
        self.threads = 1
        self.histogram = [0] * _BUCKETS
        self.working: dict[int, tuple[float, Origin | None]] = {}
        """Thread id -> since when, on what: the control thread reads it."""
        self._watchdog: Watchdog | None = None
        self._allowed = 0.0
        self._thread = threading.local()
        self._lock = threading.Lock()

    def watch(self, watchdog: Watchdog, allowed: float) -> None:
        """Tell a watchdog too which thread is in this stage, and for how many seconds it may be."""
        self._watchdog, self._allowed = watchdog, allowed

    def begin(self, origin: Origin | None = None) -> float:
        """This thread enters the stage's own code; give the result to `done`, or call `leave` if it raises."""
        now = time.monotonic()
        self.working[threading.get_ident()] = (now, origin)
        if self._watchdog is not None:
            self._watchdog.enter(self._allowed, now, f"{self.name} has been working{on_batch(origin)}")
        self._thread.cpu = time.thread_time()
        return now

    def leave(self, since: float | None = None) -> None:
        """This thread has left the stage's code without finishing a batch."""
        self.working.pop(threading.get_ident(), None)
        if self._watchdog is not None:
            self._watchdog.leave()
        if since is not None:
            cpu = time.thread_time() - self._thread.cpu
            with self._lock:
                self.busy += time.monotonic() - since
                self.cpu += cpu

    def done(self, since: float, *, rows: tuple[int, int], nbytes: tuple[int, int]) -> None:
        """One batch went through: rows and bytes, in and out."""
        self.leave()
        cpu = time.thread_time() - self._thread.cpu
        self.add(time.monotonic() - since, rows[0], rows[1], nbytes[0], nbytes[1], cpu)

    def add(self, seconds: float, rows_in: int, rows_out: int, bytes_in: int, bytes_out: int, cpu: float = 0.0) -> None:
        """The figures of one batch, measured here or in another process."""
        with self._lock:
            self.batches += 1
            self.busy += seconds
            self.cpu += cpu
            self.rows_in += rows_in
            self.rows_out += rows_out
            self.bytes_in += bytes_in
            self.bytes_out += bytes_out
            self.histogram[_bucket(seconds)] += 1

    def waited(self, *, for_input: float = 0.0, for_room: float = 0.0) -> None:
        with self._lock:
            self.wait_input += for_input
            self.wait_room += for_room

    def utilisation(self, seconds: float) -> float:
        """Share of its time the stage was busy, over all its threads."""
        return self.busy / (seconds * self.threads) if seconds > 0 else 0.0

    def snapshot(self, seconds: float) -> dict[str, Any]:
        """The figures as a plain dict; latencies are per batch, in milliseconds."""
        with self._lock:
            histogram = list(self.histogram)
            return {
                "name": self.name,
                "kind": self.kind,
                "batches": self.batches,
                "rows_in": self.rows_in,
                "rows_out": self.rows_out,
                "bytes_in": self.bytes_in,
                "bytes_out": self.bytes_out,
                "busy_seconds": round(self.busy, 6),
                "cpu_seconds": round(self.cpu, 6),
                "wait_input_seconds": round(self.wait_input, 6),
                "wait_room_seconds": round(self.wait_room, 6),
                "utilisation": round(self.utilisation(seconds), 4),
                "threads": self.threads,
                "memory_bytes": self.memory,
                "rows_per_second": round(self.rows_in / seconds, 1) if seconds > 0 else 0.0,
                "bytes_per_second": round(self.bytes_in / seconds, 1) if seconds > 0 else 0.0,
                "latency_ms": {f"p{p}": round(percentile(histogram, p / 100) * 1e3, 3) for p in (50, 95, 99)},
            }


def on_batch(origin: Origin | None) -> str:
    """Place of a batch in a sentence; empty if it is unknown."""
    return f" on the batch that begins at {origin.file}, row {origin.row}" if origin else ""


def tokens_in(changed: Mapping[str, int]) -> dict[str, int]:
    """Of what was counted as changed, the tokens left out, which are no rows."""
    return {reason.removeprefix(TOKENS): n for reason, n in changed.items() if reason.startswith(TOKENS)}


def percentile(histogram: list[int], share: float) -> float:
    """Seconds below which `share` of the batches stayed, to within a bucket (a factor of 1.33)."""
    total = sum(histogram)
    if not total:
        return 0.0
    seen = 0
    for bucket, count in enumerate(histogram):
        seen += count
        if seen >= share * total:
            return float(1e-6 * 10 ** ((bucket + 0.5) / 8))
    return float(1e-6 * 10 ** (_BUCKETS / 8))


def bottleneck(source: StageMetrics, transforms: list[StageMetrics], sink: StageMetrics, seconds: float) -> str:
    """One sentence: the busiest stage, how busy, and what the others were waiting for."""
    if seconds <= 0 or not source.batches:
        return "nothing has been read yet"
    work = sum(stage.busy for stage in transforms)
    threads = max((stage.threads for stage in transforms), default=1)
    loads = {source.name: source.utilisation(seconds), sink.name: sink.utilisation(seconds)}
    if transforms:
        slowest = max(transforms, key=lambda stage: stage.busy)
        loads[slowest.name] = work / (seconds * threads)
    name = max(loads, key=lambda key: loads[key])
    load = min(1.0, loads[name])
    if load < 0.3:
        return f"no stage is busy: the busiest, {name}, works {load:.0%} of the time; the consumer sets the pace"
    if name == source.name:
        return f"{name} is the bottleneck: reading takes {load:.0%} of the time and the rest waits for it"
    if name == sink.name:
        return f"{name} is the bottleneck: writing takes {load:.0%} of the time and holds the rest back"
    share = next(stage.busy for stage in transforms if stage.name == name) / work if work else 0.0
    return (
        f"{name} is the bottleneck: {threads} worker{'s' * (threads != 1)} busy {load:.0%} of the time, "
        f"{share:.0%} of it there"
    )


def _bucket(seconds: float) -> int:
    return min(_BUCKETS - 1, int(8 * math.log10(seconds * 1e6))) if seconds > 1e-6 else 0
