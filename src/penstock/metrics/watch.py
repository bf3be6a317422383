"""Watch of a run: one background thread that reads its metrics and hands them to exporters.

The run is never waited for, and never waits: a reading is a look at counters, and an exporter that fails is named once
in the log and tried again later, while the run goes on.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from penstock.errors import PenstockError, StoppedError
from penstock.metrics.readings import Readings
from penstock.metrics.spans import SpanBuffer, StageSpan

log = logging.getLogger(__name__)
_LONGEST_PAUSE_SECONDS = 60.0
"""Longest time until an exporter that fails is tried again."""
_COST_SHARE = 0.01
"""A reading that is slow is taken so seldom that it takes no more than this share of the time."""
_GRACE_SECONDS = 30.0
"""Longest wait for the exporters when a run ends: some take seconds to start, and their last reading counts."""
_JOBS = ("PENSTOCK_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID", "RAY_JOB_ID")
"""Environment variables that name the job of a process."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts of a run: the first line of its metrics file."""

    kind: str
    """`pipeline`, `loader`, `queue`, `rollouts` or `feed`."""
    name: str
    description: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of all series of this process: rank, pid and job."""
    started: float = field(default_factory=time.time)
    pid: int = field(default_factory=os.getpid)
    host: str = field(default_factory=socket.gethostname)


@dataclass(frozen=True, slots=True)
class Reading:
    """Metrics of a run at a moment."""

    seconds: float
    """Since the run began."""
    time: float
    metrics: Mapping[str, float]
    note: str | None = None
    """A sentence, such as the one that names the bottleneck."""
    spans: Sequence[StageSpan] = ()
    """Spans of sampled batches since the last reading."""


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run: the last line of its metrics file."""

    seconds: float
    end: str
    """`finished`, `failed` or `stopped`."""
    error: str | None = None
    report: Mapping[str, Any] | None = None


class Exporter(Protocol):
    """Receiver of readings. All methods are called by one thread, the one of the watch; they may raise.

    A method that raises is said once in the log; the run goes on, and so does the watch.
    """

    def begin(self, run: RunFacts) -> None: ...
    def write(self, reading: Reading) -> None: ...
    def end(self, end: RunEnd) -> None: ...


@runtime_checkable
class Tracing(Protocol):
    """Exporter that takes spans of a share of the batches."""

    trace_share: float


def process_labels(rank: int | None = None, job: str | None = None) -> dict[str, str]:
    """Labels of this process: rank, pid, and the job if it has a name."""
    if rank is None:
        given = os.environ.get("RANK", os.environ.get("SLURM_PROCID", ""))
        rank = int(given) if given.isdecimal() else 0
    labels = {"rank": str(rank), "pid": str(os.getpid())}
    job = job or next((os.environ[name] for name in _JOBS if os.environ.get(name)), None)
    return labels | ({"job": job} if job else {})


class MetricsWatch:
    """Watch of one run, from `start` to `end`.

    `read` returns the metrics of the run, or None once there is nothing to watch any more; `note` a sentence.
    """

    def __init__(
        self,
        run: RunFacts,
        read: Callable[[], Readings | None],
        exporters: Sequence[Exporter],
        *,
        note: Callable[[], str | None] | None = None,
        interval_seconds: float = 1.0,
    ) -> None:
        self.run, self._read, self._note = run, read, note
        self._guards = [_Guard(exporter, run.name) for exporter in exporters]
        self._interval = interval_seconds
        self._began = time.monotonic()
        self._ending: RunEnd | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._read_failed = False
        self._process = os.getpid()
        share = max((each.trace_share for each in exporters if isinstance(each, Tracing)), default=0.0)
        self.spans: SpanBuffer | None = SpanBuffer(share) if share > 0 else None
        """Buffer that stages put their spans into; None if nobody wants them."""

    def start(self) -> MetricsWatch:
        """Begin to read, in a thread of its own."""
        self._thread = threading.Thread(target=self._work, name="penstock-metrics", daemon=True)
        _running.add(self)
        self._thread.start()
        return self

    def end(self, end: str | None = None, error: BaseException | None = None, report: Any = None) -> None:
        """Write the last reading and the end of the run, which depends on the error that ended it, if any.

        A second call does nothing; waits some seconds at most.
        """
        with self._lock:
            if self._ending is not None or self._process != os.getpid():
                return
            said = None if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
            self._ending = RunEnd(0.0, end or _end_of(error), said, report)
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GRACE_SECONDS)
            if self._thread.is_alive():
                log.warning("metrics of %s: an exporter is still busy after %g s", self.run.name, _GRACE_SECONDS)
        _running.discard(self)

    @property
    def ended(self) -> bool:
        return self._ending is not None

    def _work(self) -> None:
        for guard in self._guards:
            guard.call("begin", self.run, always=True)
        # Once more: what ends last was registered first, and packages such as wandb registered their ends just now.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        pause = 0.0  # the first reading at once: a short run has one too
        while not self._stop.wait(pause):
            began = time.thread_time()
            if not self._export():
                break
            pause = max(self._interval, (time.thread_time() - began) / _COST_SHARE)
        self._export(always=True)
        with self._lock:
            self._ending = self._ending or RunEnd(0.0, "stopped")
            end = replace(self._ending, seconds=time.monotonic() - self._began)
        for guard in self._guards:
            guard.call("end", end, always=True)

    def _export(self, *, always: bool = False) -> bool:
        """Hand one reading to the exporters; False if there is nothing to read any more."""
        try:
            metrics = self._read()
            note = None if self._note is None or metrics is None else self._note()
        except Exception as error:  # noqa: BLE001 - a figure that cannot be read is no reason to stop anything
            if not self._read_failed:
                log.warning("metrics of %s cannot be read: %s: %s", self.run.name, type(error).__name__, error)
            self._read_failed = True
            return True
        if metrics is None:
            return False
        spans = self.spans.take() if self.spans is not None else ()
        reading = Reading(time.monotonic() - self._began, time.time(), metrics, note, spans)
        for guard in self._guards:
            guard.call("write", reading, always=always)
        return True


@contextmanager
def ending(watch: MetricsWatch | None) -> Iterator[Callable[[Any], Any]]:
    """Context that ends a watch with the report that goes through its value, or with the error that leaves it.

    A wait that runs out of time ends nothing.
    """
    if watch is None:
        yield lambda report: report
        return
    reports: list[Any] = []

    def passed(report: Any) -> Any:
        reports.append(report)
        return report

    try:
        yield passed
    except BaseException as error:
        if isinstance(error, TimeoutError) and not isinstance(error, PenstockError):
            raise
        watch.end(error=error)
        raise
    else:
        to_dict = getattr(reports[0], "to_dict", None) if reports else None
        watch.end(report=to_dict() if callable(to_dict) else None)


def _end_of(error: BaseException | None) -> str:
    if error is None:
        return "finished"
    return "stopped" if isinstance(error, (KeyboardInterrupt, SystemExit, StoppedError)) else "failed"


class _Guard:
    """Exporter that cannot hurt the run: its first failure is logged, and it is tried less and less often."""

    def __init__(self, exporter: Exporter, name: str) -> None:
        self._exporter, self._name = exporter, name
        self._failures = 0
        self._begun = False
        self._run: RunFacts | None = None
        self._next_at = 0.0

    def call(self, method: str, value: Any, *, always: bool = False) -> None:
        if isinstance(value, RunFacts):
            self._run = value
        if not always and time.monotonic() < self._next_at:
            return
        try:
            if not self._begun and self._run is not None:
                self._exporter.begin(self._run)
                self._begun = True
            if method != "begin":
                getattr(self._exporter, method)(value)
        except Exception as error:  # noqa: BLE001 - an exporter never hurts the run
            self._failures += 1
            if self._failures == 1:
                log.warning(
                    "metrics of %s cannot be exported to %s: %s: %s; the run goes on, and it is tried again",
                    *(self._name, self._exporter, type(error).__name__, error),
                )
            self._next_at = time.monotonic() + min(2.0**self._failures, _LONGEST_PAUSE_SECONDS)
        else:
            if self._failures and method == "write":
                log.info("metrics of %s are exported to %s again", self._name, self._exporter)
                self._failures = 0


_running: weakref.WeakSet[MetricsWatch] = weakref.WeakSet()


def _end_all() -> None:
    """Write the ends of runs that were not closed before the process exits."""
    for watch in list(_running):
        watch.end("stopped")


atexit.register(_end_all)
