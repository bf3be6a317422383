"""The sink thread: takes what is ready, in order, and sees it through to the published end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Protocol, runtime_checkable

import pyarrow as pa

from penstock.errors import PenstockError, StageError, StoppedError
from penstock.memory.budget import MemoryBudget
from penstock.pipeline.chain import stage_name
from penstock.pipeline.checkpoint import Checkpoint
from penstock.pipeline.metrics import Report
from penstock.pipeline.runner import Runner
from penstock.pipeline.stages import Publishing, Sink, State

__all__ = ["SinkThread"]

log = logging.getLogger("penstock.pipeline")


@runtime_checkable
class _Bounded(Protocol):
    """A sink that may have no room. Waiting for it is its consumer's time, so no deadline applies."""

    def wait_for_room(self, timeout: float, /) -> bool: ...


class SinkThread:
    """Feeds a sink from a runner in a thread of its own, with checkpoints if asked for."""

    def __init__(
        self,
        runner: Runner,
        sink: Sink,
        budget: MemoryBudget,
        checkpoint: Checkpoint | None,
        state: Callable[[], State],
        report: Callable[[], Report],
    ) -> None:
        self._runner, self._sink, self._budget = runner, sink, budget
        self._checkpoint, self._state, self._make_report = checkpoint, state, report
        self._bounded = sink if isinstance(sink, _Bounded) else None
        # With a checkpoint it is the checkpoint that says what comes again.
        self._publishing = sink if checkpoint is None and isinstance(sink, Publishing) else None
        self._published_before = self._publishing.rows_published if self._publishing is not None else 0
        usage = getattr(sink, "memory_usage", None)
        self._usage: Callable[[], int] | None = usage if callable(usage) else None
        self.report: Report | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._run, name="penstock-sink", daemon=True)

    def _run(self) -> None:
        try:
            self._consume_all()
            self.report = self._publish()
        except BaseException as error:  # noqa: BLE001 - whatever it is, wait() raises it again in the caller
            self._runner.fail(error)
            self.error = self._runner.failure
            self._give_up()
        finally:
            self._runner.halt()
            with contextlib.suppress(
                OSError
            ):  # a full disk, of which the error of the run has told; else all is synced
                self._runner.delivery.bad_rows.close()
            if self._checkpoint is not None:
                self._checkpoint.close()
            self._budget.hold("sink", 0, by=self)
            self.done.set()

    def _consume_all(self) -> None:
        runner, delivery, checkpoint = self._runner, self._runner.delivery, self._checkpoint
        with closing(delivery.parcels()) as parcels:
            for parcel in parcels:
                batch = parcel.batch
                rows = batch.num_rows if batch is not None else 0
                if batch is not None and rows:
                    if self._bounded is not None:
                        self._wait_for_room(self._bounded)
                    self._consume(batch, parcel.size)
                parcel.batch = batch = None
                delivery.took(parcel, rows)
                runner.context.resident.give_back()
                if self._publishing is not None:
                    delivery.commit_published(self._publishing.rows_published - self._published_before)
                if checkpoint is not None and checkpoint.due():
                    self._save(checkpoint)
                    delivery.commit()

    def _publish(self) -> Report:
        delivery, checkpoint = self._runner.delivery, self._checkpoint
        schema = self._runner.workers.schema_without_rows() if not delivery.rows_out else None
        if schema is not None:
            # No rows, but the columns are known: a file with a header says more than none.
            self._call(lambda: self._sink.consume(pa.RecordBatch.from_pylist([], schema=schema)))
        delivery.bad_rows.finish(delivery.rows_read)
        if checkpoint is not None:
            self._save(checkpoint, finishing=True)
        self._call(self._sink.flush)
        report = self._make_report()
        if checkpoint is not None:
            checkpoint.save(delivery, self._state(), finishing=True, report=report)
        delivery.commit()
        return report

    def _save(self, checkpoint: Checkpoint, *, finishing: bool = False) -> None:
        self._call(lambda: checkpoint.save(self._runner.delivery, self._state(), finishing=finishing))

    def _give_up(self) -> None:
        """Keep what a checkpoint can still use, drop the rest."""
        try:
            if self._checkpoint is not None and isinstance(self.error, StoppedError):
                self._checkpoint.save(self._runner.delivery, self._state())
                self._runner.delivery.commit()
            abort = getattr(self._sink, "abort", None)
            if callable(abort):
                abort()
        except Exception:
            log.exception("cleaning up after a failed run failed too")

    def _consume(self, batch: pa.RecordBatch, size: int) -> None:
        metrics = self._runner.context.sinking
        since = metrics.begin()
        self._guarded(lambda: self._sink.consume(batch))
        metrics.done(since, rows=(batch.num_rows, batch.num_rows), nbytes=(size, size))
        self._charge()

    def _call(self, action: Callable[[], None]) -> None:
        metrics = self._runner.context.sinking
        since = metrics.begin()
        self._guarded(action)
        metrics.leave()
        metrics.busy += time.monotonic() - since
        self._charge()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self._runner.context.sinking.leave()
            remote = isinstance(error, (ConnectionError, TimeoutError))
            if isinstance(error, PenstockError) or (isinstance(error, OSError) and not remote):
                raise  # it names the file already
            raise StageError(f"{type(error).__name__}: {error}", stage=stage_name(self._sink)) from error

    def _charge(self) -> None:
        """What the sink holds between calls stands against the budget."""
        if self._usage is not None:
            self._runner.context.sinking.memory = held = self._usage()
            self._budget.hold("sink", held, by=self)

    def _wait_for_room(self, sink: _Bounded) -> None:
        since = time.monotonic()
        while not sink.wait_for_room(0.2):
            if self._runner.stopping:
                self._runner.check()
                raise StoppedError("the pipeline was stopped before the end of its input")
        self._runner.context.sinking.waited(for_room=time.monotonic() - since)
