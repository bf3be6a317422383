"""One run of a pipeline: a source thread, a pool of workers, a sink thread and a control thread."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from penstock.errors import DataError, PenstockError, StageError, StalledError, StoppedError
from penstock.memory.budget import MemoryBudget, Reservation
from penstock.metrics.readings import Readings
from penstock.metrics.spans import SpanBuffer
from penstock.pipeline.buffers import Buffers, Parcel
from penstock.pipeline.chain import stage_name
from penstock.pipeline.checkpoint import Checkpoint
from penstock.pipeline.context import Context, StopEvent
from penstock.pipeline.control import Control
from penstock.pipeline.delivery import Delivery, DeliveryPosition
from penstock.pipeline.metrics import pipeline_readings, reason_readings
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.report import Report
from penstock.pipeline.stages import Block, Committing, Live, Origin, Publishing, Rejected, Sink, State
from penstock.pipeline.workers import Workers


class SourceThread:
    """Reads ahead as far as the budget and the buffers allow.

    Memory is reserved before a batch is read, for its whole way (read, decoded, transformed), and given back as it
    shrinks. So a batch that was admitted never waits for memory again, and order cannot turn into a deadlock.
    """

    def __init__(self, context: Context, buffers: Buffers) -> None:
        self._context, self._buffers = context, buffers

    def read(self, closing: Callable[[], Iterable[Parcel]]) -> None:
        """Until the input ends, the run is stopped, or the source fails; a failure travels in its turn, as a parcel."""
        context, number = self._context, 0
        while not context.stop.is_set():
            reservation = self._reserve(context.tuner.to_reserve(context.tuner.batch_bytes))
            if reservation is None:
                return
            since = context.reading.begin()
            try:
                parcel = self._next_parcel(number, reservation)
            except Exception as error:  # noqa: BLE001 - any error of the source goes to the caller, in its turn
                parcel = self._unreadable(number, reservation, error)
            except BaseException:
                reservation.release()
                raise
            if parcel is None or parcel.payload is None:
                context.reading.leave(since)
            else:
                rows, size = parcel.rows_in, parcel.size
                context.reading.done(since, rows=(rows, rows), nbytes=(size, size), origin=parcel.origin)
                reservation.resize(context.tuner.to_reserve(size))
            if parcel is None:
                reservation.release()
                break
            context.resident.give_back()
            context.reading.waited(for_room=self._buffers.put_read(parcel))
            number += 1
            if parcel.error is not None:
                break
        self._buffers.end(number, closing)

    def _reserve(self, nbytes: int) -> Reservation | None:
        """Wait until the budget has room. Delivered parcels free it, and an empty budget admits any parcel. There is no
        time limit here: the stages that hold parcels have their own."""
        context, since = self._context, time.monotonic()
        try:
            while not context.stop.is_set() and not (context.rows_ahead.wait(0.1) and self._buffers.wait_to_read(0.1)):
                context.resident.give_back()
            while not context.stop.is_set():
                with contextlib.suppress(StalledError):
                    return context.budget.reserve(nbytes, "pipeline", timeout_seconds=0.1, by=context)
                context.resident.give_back()
            return None
        finally:
            context.reading.waited(for_room=time.monotonic() - since)

    def _next_parcel(self, number: int, reservation: Reservation) -> Parcel | None:
        context = self._context
        payload: Block | pa.RecordBatch | None
        origin: Origin | None
        if context.blocks is not None:
            payload = block = context.blocks.next_block(context.tuner.batch_bytes)
            origin = block.origin if block is not None else None
        else:
            payload = context.source.next_batch(context.tuner.batch_rows)
            origin = context.located.origin() if context.located is not None else None
        if payload is None:
            return None
        rows = records = 0
        if isinstance(payload, pa.RecordBatch):
            rows = records = payload.num_rows
        elif isinstance(payload, Block):
            records = payload.meta.get("records") or 0
        else:
            raise StageError(
                f"next_batch returned {type(payload).__name__}, expected a pyarrow.RecordBatch or None",
                stage=context.reading.name,
            )
        size = payload.nbytes
        context.tuner.saw_read(records, size)
        state = context.source_state()
        parcel = Parcel(number, payload, origin, state, reservation, time.monotonic(), rows_in=rows, size=size)
        parcel.file_bytes = context.measured.file_bytes_read() if context.measured is not None else None
        context.rows_ahead.count(parcel, records)
        return parcel

    def _unreadable(self, number: int, reservation: Reservation, error: Exception) -> Parcel:
        """A parcel that carries the source's failure; or, if bad rows may be left out, the loss of the file's rest."""
        context = self._context
        parcel = Parcel(number, None, None, None, reservation, time.monotonic(), error=self._named(error))
        skip = getattr(context.source, "skip_file", None)
        if context.config.on_error == "raise" or not isinstance(error, DataError) or not callable(skip):
            return parcel
        skipped = skip()
        parcel.error, parcel.source_state = None, context.source_state()
        parcel.rows_in = 1  # as when it is found while decoding: rows in are rows out, dropped and bad ones
        parcel.rejected = (
            Rejected(
                file=error.file,
                row=error.row,
                offset=error.offset,
                stage=context.reading.name,
                kind=skipped or "the rest of the file is unreadable",
                reason=error.reason,
                data=error.data,
            ),
        )
        return parcel

    def _named(self, error: Exception) -> Exception:
        if isinstance(error, (PenstockError, OSError)):
            return error
        wrapped = StageError(f"{type(error).__name__}: {error}", stage=self._context.reading.name)
        wrapped.__cause__ = error
        return wrapped


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
        self.process = os.getpid()
        self._failing = threading.Lock()
        self._started = time.monotonic()
        self._ended: float | None = None
        self.threads = [self._thread("source", self._reader.read, self.workers.closing)]
        self.threads += [self._thread(f"worker-{i}", self.workers.work, i) for i in range(context.config.worker_limit)]
        self.threads.append(self._thread("control", self._control.run))

    def start(self) -> None:
        self.context.budget.restart_peak()
        self.context.resident.begin()
        self.context.watch()
        for thread in self.threads:
            thread.start()

    def halt(self) -> None:
        """Tell every thread to stop, without waiting for them. Idempotent."""
        self.context.stop.set()
        self.context.unwatch()
        self.workers.buffers.cancel()
        if isinstance(self.context.source, Live):
            self.context.source.interrupt()
        if self._ended is None:
            self._ended = time.monotonic()

    def close(self) -> None:
        """Stop every thread and wait for them. Idempotent; a hung stage is abandoned, and named in the log."""
        if os.getpid() != self.process:  # a fork has none of the threads, and maybe the locks that they held
            self.context.stop = StopEvent()
            self.context.stop.set()
            return
        self.halt()
        self.workers.close()
        grace = 0.2 if isinstance(self.failure, StalledError) else _GRACE
        deadline = time.monotonic() + grace
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.1f s and is abandoned", thread.name, grace)
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
            "rows_done": delivery.rows_read,
            "file_bytes_done": delivery.file_bytes,
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

    def metrics(self) -> Readings:
        """The same under the names of the metrics registry, with rows by reason."""
        delivery = self.delivery
        counts = dict(delivery.dropped), dict(delivery.changed), dict(delivery.bad_rows.counts)
        return pipeline_readings(self.snapshot()) | reason_readings(*counts, self.context.config.on_error)

    def trace(self, spans: SpanBuffer | None) -> None:
        """Have every stage put spans of sampled batches into a buffer."""
        for stage in self.context.stages:
            stage.spans = spans

    def _thread(self, name: str, work: Callable[..., None], *args: object) -> threading.Thread:
        return threading.Thread(target=self._guard, args=(work, *args), name=f"penstock-{name}", daemon=True)

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller
            self.fail(error)


@runtime_checkable
class _Bounded(Protocol):
    """A sink that may have no room. Waiting for it is its consumer's time, so no deadline applies."""

    def wait_for_room(self, timeout_seconds: float, /) -> bool: ...


class SinkThread:
    """Feeds a sink from a runner in a thread of its own, with optional checkpoints."""

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
        # With a checkpoint, the checkpoint decides which rows come again.
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
        except BaseException as error:  # noqa: BLE001 - wait() raises it again in the caller
            self._runner.fail(error)
            self.error = self._runner.failure
            self._give_up()
        finally:
            self._runner.halt()
            with contextlib.suppress(OSError):  # a full disk: the error of the run names it; otherwise all is synced
                self._runner.delivery.bad_rows.close()
            if self._checkpoint is not None:
                self._checkpoint.close()
            self._budget.hold("sink", 0, by=self)
            self.done.set()

    def _consume_all(self) -> None:
        runner, delivery, checkpoint = self._runner, self._runner.delivery, self._checkpoint
        if checkpoint is not None and checkpoint.saved is None and isinstance(self._sink, Publishing | Committing):
            self._save(checkpoint)  # or a crash before the first checkpoint would leave rows that nobody knows of
        with closing(delivery.parcels()) as parcels:
            for parcel in parcels:
                batch = parcel.batch
                rows = batch.num_rows if batch is not None else 0
                if batch is not None and rows:
                    if self._bounded is not None:
                        self._wait_for_room(self._bounded)
                    self._consume(batch, parcel.size, parcel.origin)
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
        was_there = checkpoint is not None and checkpoint.is_at_end(delivery)
        schema = None if delivery.rows_out or was_there else self._runner.workers.schema_without_rows()
        if schema is not None:
            # No rows, but the columns are known: a file with a header tells more than no file.
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

    def _consume(self, batch: pa.RecordBatch, size: int, origin: Origin | None) -> None:
        metrics = self._runner.context.sinking
        since = metrics.begin()
        self._guarded(lambda: self._sink.consume(batch))
        metrics.done(since, rows=(batch.num_rows, batch.num_rows), nbytes=(size, size), origin=origin)
        self._charge()

    def _call(self, action: Callable[[], None]) -> None:
        metrics = self._runner.context.sinking
        since = metrics.begin()
        self._guarded(action)
        metrics.leave(since)
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
        """Charge the rows that the sink holds between calls to the budget."""
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
