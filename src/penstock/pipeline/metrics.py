"""Metrics of each stage, and a sentence that names the bottleneck and its reason."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from penstock._amounts import counted
from penstock.metrics.readings import Readings, key_of
from penstock.metrics.spans import SpanBuffer
from penstock.pipeline.stages import Origin
from penstock.pipeline.watchdog import Watchdog

TOKENS = "tokens left out: "
"""Prefix of reasons that count tokens and not rows."""

_TOTALS = {
    "rows_in": "penstock_pipeline_rows_in_total",
    "rows_out": "penstock_pipeline_rows_out_total",
    "rows_done": "penstock_pipeline_rows_done_total",
    "bytes_in": "penstock_pipeline_bytes_in_total",
    "file_bytes_done": "penstock_pipeline_file_bytes_done_total",
    "seconds": "penstock_pipeline_seconds",
    "workers": "penstock_pipeline_workers",
    "batch_bytes": "penstock_pipeline_batch_bytes",
}
_STAGE = {
    "batches": "penstock_stage_batches_total",
    "rows_in": "penstock_stage_rows_in_total",
    "rows_out": "penstock_stage_rows_out_total",
    "bytes_in": "penstock_stage_bytes_in_total",
    "bytes_out": "penstock_stage_bytes_out_total",
    "busy_seconds": "penstock_stage_busy_seconds_total",
    "cpu_seconds": "penstock_stage_cpu_seconds_total",
    "wait_input_seconds": "penstock_stage_wait_input_seconds_total",
    "wait_room_seconds": "penstock_stage_wait_room_seconds_total",
    "utilisation": "penstock_stage_utilisation_ratio",
    "threads": "penstock_stage_threads",
    "memory_bytes": "penstock_stage_memory_bytes",
}
_QUANTILES = {"p50": "0.5", "p95": "0.95", "p99": "0.99"}
_BAD = {"quarantine": "penstock_pipeline_rows_quarantined_total", "skip": "penstock_pipeline_rows_skipped_total"}
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
        self.spans: SpanBuffer | None = None
        """Buffer for spans of sampled batches; None: nobody wants them."""
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

    def done(
        self, since: float, *, rows: tuple[int, int], nbytes: tuple[int, int], origin: Origin | None = None
    ) -> None:
        """One batch went through: rows and bytes, in and out."""
        self.leave()
        cpu, seconds = time.thread_time() - self._thread.cpu, time.monotonic() - since
        self.add(seconds, rows[0], rows[1], nbytes[0], nbytes[1], cpu)
        if self.spans is not None:
            self.span(origin, seconds, *rows)

    def span(self, origin: Origin | None, seconds: float, rows_in: int, rows_out: int) -> None:
        """Put the span of a batch into the buffer, if the batch is in the sample."""
        if self.spans is not None:
            trace = f"{origin.file}:{origin.row}" if origin is not None else f"{self.name}:{self.batches}"
            facts = {"kind": self.kind, "rows_in": rows_in, "rows_out": rows_out, "batch": trace}
            self.spans.add(self.name, trace, seconds, **facts)

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


def pipeline_readings(snapshot: Mapping[str, Any]) -> Readings:
    """Metrics of a snapshot, of a run in this process or of a job."""
    found: Readings = {name: snapshot[key] for key, name in _TOTALS.items() if snapshot.get(key) is not None}
    memory = snapshot.get("memory", {})
    for key in ("used", "limit", "peak"):
        if key in memory:
            found[f"penstock_pipeline_budget_{key}_bytes"] = memory[key]
    for buffer, depth in snapshot.get("buffers", {}).items():
        found[key_of("penstock_pipeline_buffer_batches", buffer=buffer)] = depth["batches"]
        found[key_of("penstock_pipeline_buffer_bytes", buffer=buffer)] = depth["bytes"]
    for quantile, milliseconds in snapshot.get("latency_ms", {}).items():
        key = key_of("penstock_pipeline_latency_seconds", quantile=_QUANTILES[quantile])
        found[key] = milliseconds / 1e3
    seen: Counter[tuple[str, str]] = Counter()
    for stage in snapshot.get("stages", ()):
        seen[stage["name"], stage["kind"]] += 1
        number = seen[stage["name"], stage["kind"]]
        labels = {"stage": stage["name"] + (f" #{number}" if number > 1 else ""), "kind": stage["kind"]}
        for key, name in _STAGE.items():
            if stage.get(key) is not None:
                found[key_of(name, **labels)] = stage[key]
        for quantile, milliseconds in stage.get("latency_ms", {}).items():
            key = key_of("penstock_stage_latency_seconds", **labels, quantile=_QUANTILES[quantile])
            found[key] = milliseconds / 1e3
    return found


def reason_readings(
    dropped: Mapping[str, int], changed: Mapping[str, int], bad: Mapping[str, int], on_error: str
) -> Readings:
    """Rows and tokens that were dropped, changed, quarantined or skipped, by reason."""
    found: Readings = {}
    for reason, rows in dropped.items():
        found[key_of("penstock_pipeline_rows_dropped_total", reason=reason)] = rows
    for reason, number in changed.items():
        name = "tokens_dropped" if reason.startswith(TOKENS) else "rows_changed"
        found[key_of(f"penstock_pipeline_{name}_total", reason=reason.removeprefix(TOKENS))] = number
    for reason, rows in bad.items():
        found[key_of(_BAD.get(on_error, _BAD["skip"]), reason=reason)] = rows
    return found


def job_readings(snapshot: Mapping[str, Any], *, on_error: str) -> Readings:
    """Metrics of the snapshot of a job, whose `report` is there at the end. What tasks use now is not known."""
    report: Mapping[str, Any] = snapshot.get("report", {})
    rows = {name: report[name] for name in ("rows_in", "rows_out") if name in report}
    found = pipeline_readings({**snapshot, **rows})
    found.pop("penstock_pipeline_budget_used_bytes", None)
    if report:
        found["penstock_pipeline_rows_done_total"] = report["rows_in"]
        found |= reason_readings(report["dropped"], report["changed"], report["quarantined"], "quarantine")
        return found | reason_readings({}, {}, report["skipped"], "skip")
    why = snapshot.get("reasons")
    return found if why is None else found | reason_readings(why["dropped"], why["changed"], why["bad"], on_error)


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
        f"{name} is the bottleneck: {counted(threads, 'worker')} busy {load:.0%} of the time, {share:.0%} of it there"
    )


def _bucket(seconds: float) -> int:
    return min(_BUCKETS - 1, int(8 * math.log10(seconds * 1e6))) if seconds > 1e-6 else 0
