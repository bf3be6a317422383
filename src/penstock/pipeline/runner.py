"""One run of a pipeline: a source thread, a pool of workers, a sink thread and a control thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from penstock.errors import StalledError
from penstock.pipeline.context import Context
from penstock.pipeline.control import Control
from penstock.pipeline.delivery import Delivery, DeliveryPosition
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.source_thread import SourceThread
from penstock.pipeline.workers import Workers

__all__ = ["Runner"]

log = logging.getLogger("penstock.pipeline")

_GRACE = 5.0


class Runner:
    """Owns the threads: starts them, stops them, and passes on the first thing that goes wrong in any of them."""

    def __init__(self, context: Context, start: DeliveryPosition, bad_rows: BadRows) -> None:
        self.context = context
        self.workers = Workers(context)
        self.delivery = Delivery(context, self.workers.buffers, start, bad_rows, self.check)
        self._control = Control(context, self.workers)
        self._reader = SourceThread(context, self.workers.buffers)
        self.failure: BaseException | None = None
        self._failing = threading.Lock()
        self._started = time.monotonic()
        self._ended: float | None = None
        self.threads = [self._thread("source", self._reader.read, self.workers.closing)]
        self.threads += [self._thread(f"worker-{i}", self.workers.work, i) for i in range(context.config.worker_limit)]
        self.threads.append(self._thread("control", self._control.run))

    def start(self) -> None:
        self.context.budget.restart_peak()
        self.context.resident.begin()
        for thread in self.threads:
            thread.start()

    def halt(self) -> None:
        """Tell every thread to stop, without waiting for them. Idempotent."""
        self.context.stop.set()
        self.workers.buffers.cancel()
        if self._ended is None:
            self._ended = time.monotonic()

    def close(self) -> None:
        """Stop every thread and wait for them. Idempotent; a hung stage is left behind, named in the log."""
        self.halt()
        self.workers.close()
        grace = 0.2 if isinstance(self.failure, StalledError) else _GRACE
        deadline = time.monotonic() + grace
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.1f s and is left behind", thread.name, grace)
        close = getattr(self.context.source, "close", None)
        if callable(close) and not self.threads[0].is_alive():
            close()
        self._control.close()

    def fail(self, error: BaseException) -> None:
        """The first failure counts; it surfaces in the caller."""
        with self._failing:
            if self.failure is None:
                self.failure = error
        self.halt()

    def check(self) -> None:
        """Raise what any thread failed with."""
        if self.failure is not None:
            raise self.failure

    @property
    def stopping(self) -> bool:
        return self.context.stop.is_set()

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._started

    def snapshot(self) -> dict[str, Any]:
        """Everything that is known about the run now, as plain values."""
        context, delivery, buffers, seconds = self.context, self.delivery, self.workers.buffers, self.seconds
        return {
            "seconds": round(seconds, 3),
            "rows_in": context.rows_in,
            "rows_out": delivery.rows_out,
            "bytes_in": context.reading.bytes_in,
            "dropped": delivery.dropped.total(),
            "bad_rows": delivery.bad_rows.counts.total(),
            "memory": {
                "used": context.budget.used,
                "limit": context.budget.limit,
                "peak": context.budget.peak,
                "by_owner": context.budget.by_owner(),
            },
            "buffers": buffers.depths(),
            "workers": buffers.active,
            "stolen": buffers.stolen,
            "batch_bytes": context.tuner.batch_bytes,
            "latency_ms": delivery.latency.snapshot(seconds)["latency_ms"],
            "stages": [stage.snapshot(seconds) for stage in context.stages],
            "bottleneck": context.bottleneck(seconds),
        }

    def _thread(self, name: str, work: Callable[..., None], *args: object) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(work, *args), name=f"penstock-{name}", daemon=True)

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller
            self.fail(error)
