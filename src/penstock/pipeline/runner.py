"""One run of a pipeline: a source thread, a pool of workers, a sink thread and a control thread.

Memory is reserved once, before a batch is read, for its whole way (read, decoded, transformed) and given back as it
shrinks. So a batch that was admitted never waits for memory again, and order cannot turn into a deadlock.

State rides with the batch: each parcel carries the state of the source after it, and of the in-order transforms after
it. The position of the run is that of the last *delivered* parcel, whatever had been read ahead.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import pyarrow as pa

from penstock.errors import DataError, PenstockError, StageError, StalledError
from penstock.memory.budget import MemoryBudget, Reservation
from penstock.memory.pressure import MemoryPressureHandler
from penstock.memory.resident import ResidentWatch
from penstock.pipeline.chain import Chain, Failure, Inferring, Ran, StepError, stage_name
from penstock.pipeline.channel import Buffers, Parcel
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.metrics import StageMetrics, bottleneck
from penstock.pipeline.processes import ProcessChain
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.stages import (
    Block,
    BlockSource,
    Decoded,
    Finishing,
    Located,
    Origin,
    Rejected,
    Source,
    State,
    Stateful,
    Transform,
)
from penstock.pipeline.tuning import Tuner

__all__ = ["Position", "Runner"]

log = logging.getLogger("penstock.pipeline")

_TICK = 0.05
_GRACE = 5.0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a run stands: the states after the last parcel that was wholly delivered, and rows delivered since."""

    source: State | None
    transforms: dict[str, State]
    skip_rows: int = 0


class Runner:
    """Runs the stages until the input ends, somebody calls `close`, or something fails."""

    def __init__(
        self,
        source: Source,
        transforms: list[Transform],
        config: PipelineConfig,
        budget: MemoryBudget,
        *,
        sink_name: str,
        start: Position,
        bad_rows: BadRows,
    ) -> None:
        self._source, self._config, self._budget = source, config, budget
        self._transforms = transforms
        self.position = start
        self._skip = start.skip_rows
        self._released = 0
        self.bad_rows = bad_rows
        self.rows_read = 0
        self.rows_out = 0
        self.dropped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.tuner = Tuner(config, lambda: budget.limit)
        self.pressure = MemoryPressureHandler(budget)
        self.resident = ResidentWatch(budget)

        split = next((i for i, t in enumerate(transforms) if isinstance(t, (Stateful, Finishing))), len(transforms))
        self.source_metrics = StageMetrics(stage_name(source), "source")
        self.sink_metrics = StageMetrics(sink_name, "sink")
        stage_metrics = [StageMetrics(stage_name(t), "transform") for t in transforms]
        # Asked once: a runtime check of a protocol costs microseconds, and these would be asked for every batch.
        self._blocks = source if isinstance(source, BlockSource) else None
        self._located = source if isinstance(source, Located) else None
        self._stateful = source if isinstance(source, Stateful) else None
        self._decode_metrics = StageMetrics(f"decoding {stage_name(source)}", "decode")
        self.worker_metrics = ([self._decode_metrics] if self._blocks else []) + stage_metrics[:split]
        self.transform_metrics = ([self._decode_metrics] if self._blocks else []) + stage_metrics
        self._chain = Chain(transforms[:split], stage_metrics[:split])
        self._serial = Chain(transforms[split:], stage_metrics[split:])
        self._first_serial = split

        workers = config.worker_limit
        self.buffers = Buffers(lambda: budget.limit, workers, self._in_order, self.resident.give_back)
        self._process_chains: list[ProcessChain | None] = [None] * workers
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._failing = threading.Lock()
        self._waited = [0.0] * workers
        self._waits_seen = (0.0, 0.0)
        self._latency = StageMetrics("end to end", "latency")
        self.started = time.monotonic()
        self.ended: float | None = None
        self._settle_workers()
        self.threads = [threading.Thread(target=self._guard, args=(self._read,), name="penstock-source", daemon=True)]
        self.threads += [
            threading.Thread(target=self._guard, args=(self._work, i), name=f"penstock-worker-{i}", daemon=True)
            for i in range(workers)
        ]
        self._control = threading.Thread(target=self._control_loop, name="penstock-control", daemon=True)

    # -- lifetime ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.resident.begin()
        for thread in (*self.threads, self._control):
            thread.start()

    def halt(self) -> None:
        """Tell every thread to stop, without waiting for them. Idempotent."""
        self._stop.set()
        self.buffers.cancel()
        if self.ended is None:
            self.ended = time.monotonic()

    def close(self) -> None:
        """Stop every thread and wait for them. Idempotent; a hung stage is left behind, named in the log."""
        self.halt()
        for chain in self._process_chains:
            if chain is not None:
                chain.close()
        grace = 0.2 if isinstance(self.failure, StalledError) else _GRACE
        deadline = time.monotonic() + grace
        for thread in (*self.threads, self._control):
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    log.warning("%s is still busy after %.1f s and is left behind", thread.name, grace)
        close = getattr(self._source, "close", None)
        if callable(close) and not self.threads[0].is_alive():
            close()
        self._budget.hold("source", 0)
        self._budget.hold("transforms", 0)
        self.resident.end()
        self.pressure.restore()

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
        return self._stop.is_set()

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    # -- delivery: called by the sink thread, or by whoever iterates --------------------------------------------

    def parcels(self) -> Iterator[Parcel]:
        """Parcels in order, without the rows a resumed run has delivered already; raises the error of a failed one.

        The caller says with `took` how many rows of it have reached the consumer.
        """
        while True:
            taken, waited = self.buffers.take_ready()
            self.sink_metrics.waited(for_input=waited)
            self.check()
            if taken is None:
                return
            try:
                while taken:
                    parcel = taken.pop(0)
                    yield self._due(parcel)
            finally:
                for parcel in taken:
                    parcel.reservation.release()

    def _due(self, parcel: Parcel) -> Parcel:
        if parcel.error is not None:
            parcel.reservation.release()
            raise parcel.error
        self.rows_read += parcel.rows_in
        self.dropped.update(parcel.dropped)
        self.changed.update(parcel.changed)
        self.bad_rows.add(parcel.rejected, self.rows_read)
        if parcel.batch is not None:
            parcel.rows_made = parcel.batch.num_rows
            parcel.taken = min(self._skip, parcel.rows_made)
            if parcel.taken:
                self._skip -= parcel.taken
                parcel.batch = parcel.batch.slice(parcel.taken)
        return parcel

    def took(self, parcel: Parcel, rows: int) -> None:
        """`rows` more rows of the parcel have reached the consumer. With its last row the position moves past it;
        before that, a resume makes the parcel again and skips what was taken of it."""
        parcel.taken += rows
        self.rows_out += rows
        if parcel.taken < parcel.rows_made:
            self.position = replace(self.position, skip_rows=parcel.taken)
            return
        self.position = Position(parcel.source_state, parcel.transform_states or {}, self._skip)
        self._latency.add(time.monotonic() - parcel.read_at, rows, rows, 0, 0)
        self._released += 1
        parcel.reservation.release()

    def batches(self, rows: int | Literal["auto"]) -> Iterator[pa.RecordBatch]:
        """Batches for whoever iterates: as they come, or cut and joined so that each has exactly `rows` rows."""
        pending: deque[Parcel] = deque()
        held = 0
        for parcel in self.parcels():
            batch = parcel.batch
            if batch is None or not batch.num_rows:
                if not pending:
                    self.took(parcel, 0)
                    continue
                pending.append(parcel)
                continue
            if rows == "auto":
                self._consumed(parcel, batch.num_rows)
                yield batch
                continue
            pending.append(parcel)
            held += batch.num_rows
            while held >= rows:
                yield self._cut(pending, rows)
                held -= rows
        if held and rows != "auto":
            yield self._cut(pending, held)
        for parcel in pending:
            self.took(parcel, 0)

    def _cut(self, pending: deque[Parcel], rows: int) -> pa.RecordBatch:
        """The next `rows` rows; a view of one parcel where it has enough of them."""
        parts = []
        while rows:
            parcel = pending[0]
            batch = parcel.batch
            if batch is None or not batch.num_rows:
                self.took(pending.popleft(), 0)
                continue
            part = batch.slice(0, rows)
            parcel.batch = batch.slice(part.num_rows)
            parts.append(part)
            rows -= part.num_rows
            if not parcel.batch.num_rows:
                pending.popleft()
            self._consumed(parcel, part.num_rows)
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)

    def _consumed(self, parcel: Parcel, rows: int) -> None:
        self.sink_metrics.add(0.0, rows, rows, 0, 0)
        self.took(parcel, rows)

    # -- the source thread ---------------------------------------------------------------------------------------

    def _read(self) -> None:
        number = 0
        while not self._stop.is_set():
            want = self.tuner.to_reserve(self.tuner.batch_bytes)
            reservation = self._reserve(want)
            if reservation is None:
                return
            since = self.source_metrics.begin()
            try:
                parcel = self._next_parcel(number, reservation)
            except Exception as error:  # noqa: BLE001 - whatever the source raises goes to the caller, in its turn
                self.source_metrics.leave()
                parcel = self._unreadable(number, reservation, error)
            if parcel is None:
                self.source_metrics.leave()
                reservation.release()
                break
            if parcel.payload is not None:
                size = parcel.size
                self.source_metrics.done(since, rows=(parcel.rows_in, parcel.rows_in), nbytes=(size, size))
                reservation.resize(self.tuner.to_reserve(size))
            self.resident.give_back()
            waited = self.buffers.put_read(parcel)
            self.source_metrics.waited(for_room=waited)
            number += 1
            if parcel.error is not None:
                break
        self.buffers.end(number, self._closing)

    def _reserve(self, nbytes: int) -> Reservation | None:
        since = time.monotonic()
        try:
            while not self._stop.is_set():
                try:
                    return self._budget.reserve(nbytes, "pipeline", timeout=0.1)
                except StalledError as full:
                    self.resident.give_back()
                    waited, allowed = time.monotonic() - since, self._config.stall_seconds
                    # Our own parcels will be released by whoever works on them; a stranger's bytes may never be.
                    if allowed is not None and waited > allowed and self.buffers.put == self._released:
                        raise StalledError(
                            f"{self.source_metrics.name} waited {waited:.0f} s for memory: {full}"
                        ) from None
            return None
        finally:
            self.source_metrics.waited(for_room=time.monotonic() - since)

    def _next_parcel(self, number: int, reservation: Reservation) -> Parcel | None:
        payload: Block | pa.RecordBatch | None
        origin: Origin | None
        if self._blocks is not None:
            payload = block = self._blocks.next_block(self.tuner.batch_bytes)
            origin = block.origin if block is not None else None
        else:
            payload = self._source.next_batch(self.tuner.batch_rows)
            origin = self._located.origin() if self._located is not None else None
        if payload is None:
            return None
        rows, size = 0, 0
        if isinstance(payload, pa.RecordBatch):
            rows, size = payload.num_rows, payload.nbytes
            self.tuner.saw_read(rows, size)
        elif not isinstance(payload, Block):
            raise StageError(
                f"next_batch returned {type(payload).__name__}, expected a pyarrow.RecordBatch or None",
                stage=self.source_metrics.name,
            )
        else:
            size = payload.nbytes
        state = self._source_state()
        return Parcel(number, payload, origin, state, reservation, time.monotonic(), rows_in=rows, size=size)

    def _source_state(self) -> State | None:
        return self._stateful.state_dict() if self._stateful is not None else None

    def _unreadable(self, number: int, reservation: Reservation, error: Exception) -> Parcel:
        """A parcel that carries the source's failure; or, if bad rows may be left out, the loss of the file's rest."""
        parcel = Parcel(number, None, None, None, reservation, time.monotonic(), error=self._source_error(error))
        skip = getattr(self._source, "skip_file", None)
        if self._config.on_error != "raise" and isinstance(error, DataError) and callable(skip):
            skip()
            parcel.error = None
            parcel.source_state = self._source_state()
            parcel.rejected = (
                Rejected(
                    file=error.file,
                    row=error.row,
                    offset=error.offset,
                    stage=self.source_metrics.name,
                    kind="the rest of the file is unreadable",
                    reason=error.reason,
                ),
            )
        return parcel

    def _source_error(self, error: Exception) -> Exception:
        if isinstance(error, (PenstockError, OSError)):
            return error
        wrapped = StageError(f"{type(error).__name__}: {error}", stage=self.source_metrics.name)
        wrapped.__cause__ = error
        return wrapped

    # -- the workers ---------------------------------------------------------------------------------------------

    def _work(self, index: int) -> None:
        while True:
            parcel, waited = self.buffers.take_work(index)
            self._waited[index] += waited
            if parcel is None:
                return
            if parcel.payload is not None:
                try:
                    self._process(parcel, self._chain_of(index))
                except Exception as error:  # noqa: BLE001 - it surfaces in the caller, in its turn
                    parcel.error = error
            parcel.payload = None
            if parcel.batch is not None:
                parcel.reservation.resize(parcel.size)
            self.resident.give_back()
            self.buffers.settle(parcel)

    def _chain_of(self, index: int) -> Chain:
        if self._config.workers != "process" or self._learning():
            return self._chain
        chain = self._process_chains[index]
        if chain is None:
            chain = self._process_chains[index] = ProcessChain(self._chain.transforms, self._chain.metrics)
            if self._stop.is_set():
                chain.close()
        return chain

    def _process(self, parcel: Parcel, chain: Chain) -> None:
        raw = parcel.size
        decoded = self._decode(parcel)
        size = parcel.size  # of the decoded batch
        try:
            ran = chain.run(decoded.batch, size, parcel.origin)
        except StepError:
            ran = self._isolated(parcel, chain, decoded)
        self._take(parcel, ran)
        self.tuner.saw_need(raw, max(raw + size, ran.widest))
        if self._learning_done is False and not self._learning():
            self._settle_workers()

    def _decode(self, parcel: Parcel) -> Decoded:
        payload = parcel.payload
        if not isinstance(payload, Block):
            return Decoded(payload)
        assert self._blocks is not None
        since = self._decode_metrics.begin(parcel.origin)
        try:
            decoded = self._blocks.decode(payload)
        except BaseException:
            self._decode_metrics.leave()
            raise
        rows, parcel.size = decoded.batch.num_rows, decoded.batch.nbytes
        parcel.rows_in = rows + len(decoded.rejected)
        self._decode_metrics.done(since, rows=(parcel.rows_in, rows), nbytes=(payload.nbytes, parcel.size))
        if decoded.rejected:
            if self._config.on_error == "raise":
                bad = decoded.rejected[0]
                raise DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
            parcel.rejected += decoded.rejected
        return decoded

    def _take(self, parcel: Parcel, ran: Ran) -> None:
        parcel.batch, parcel.size = ran.batch, ran.nbytes
        for dropped, changed in ran.counts.values():
            parcel.dropped.update(dropped)
            parcel.changed.update(changed)

    def _isolated(self, parcel: Parcel, chain: Chain, decoded: Decoded) -> Ran:
        ran = chain.isolate(decoded.batch, first_only=self._config.on_error == "raise")
        rejected = tuple(self._rejected(parcel, decoded, failure) for failure in ran.failures)
        if rejected and self._config.on_error == "raise":
            self._raise(rejected[0], ran.failures[0].error)
        parcel.rejected += rejected  # none, if it did not happen again row by row: then nothing is lost
        return ran

    def _rejected(self, parcel: Parcel, decoded: Decoded, failure: Failure) -> Rejected:
        data = decoded.batch.slice(failure.row, 1).to_pylist()[0]
        row = decoded.rows[failure.row] if decoded.rows is not None else failure.row
        offset = None
        if self._blocks is not None and isinstance(parcel.payload, Block):
            offset = self._blocks.offset_of(parcel.payload, row)
        origin = parcel.origin
        return Rejected(
            file=origin.file if origin else None,
            row=origin.row + row if origin else row,
            offset=offset,
            stage=failure.stage,
            kind=type(failure.error).__name__,
            reason=f"{type(failure.error).__name__}: {failure.error}",
            data=data,
        )

    def _raise(self, bad: Rejected, cause: Exception) -> None:
        raise StageError(
            bad.reason, stage=bad.stage, file=bad.file or "the input", row=bad.row, offset=bad.offset
        ) from cause

    # -- in order ------------------------------------------------------------------------------------------------

    def _in_order(self, parcel: Parcel) -> Parcel:
        """The transforms that need order, run by whichever worker has the next parcel."""
        if self._serial.transforms and parcel.error is None:
            try:
                if parcel.batch is not None:
                    batch = parcel.batch
                    try:
                        ran = self._serial.run(batch, parcel.size, parcel.origin)
                    except StepError:
                        ran = self._isolated(parcel, self._serial, Decoded(batch))
                    self._take(parcel, ran)
                    parcel.reservation.resize(parcel.size)
                parcel.transform_states = self._serial_states()
            except Exception as error:  # noqa: BLE001 - it surfaces in the caller, in its turn
                parcel.error = error
        return parcel

    def _closing(self) -> Iterator[Parcel]:
        """What the in-order transforms still hold, each passed through the ones after it."""
        for i, transform in enumerate(self._serial.transforms):
            if not isinstance(transform, Finishing):
                continue
            reservation = self._budget.reserve(0, "pipeline")
            state = self._source_state()
            parcel = Parcel(-1, None, None, state, reservation, time.monotonic())
            try:
                rest = transform.finish()
                if rest is not None and rest.num_rows:
                    later = Chain(self._serial.transforms[i + 1 :], self._serial.metrics[i + 1 :])
                    self._take(parcel, later.run(rest, rest.nbytes))
                    reservation.resize(parcel.size)
                parcel.transform_states = self._serial_states()
            except StepError as step:
                parcel.error = StageError(
                    f"{type(step.error).__name__}: {step.error}",
                    stage=stage_name(self._serial.transforms[i + 1 + step.index]),
                )
                parcel.error.__cause__ = step.error
            except Exception as error:  # noqa: BLE001 - it surfaces in the caller, in its turn
                parcel.error = StageError(f"{type(error).__name__}: {error}", stage=stage_name(transform))
                parcel.error.__cause__ = error
            yield parcel

    def _serial_states(self) -> dict[str, State]:
        return {
            str(self._first_serial + i): t.state_dict()
            for i, t in enumerate(self._serial.transforms)
            if isinstance(t, Stateful)
        }

    # -- schemas learned from the first rows ---------------------------------------------------------------------

    def _learning(self) -> bool:
        return any(isinstance(t, Inferring) and t.learning for t in self._chain.transforms)

    def _settle_workers(self) -> None:
        """One worker until every schema is known: what a function returns for the *first* rows decides, not a race."""
        learning = self._learning()
        self._learning_done: bool | None = not learning
        self.buffers.set_active(1 if learning else self.tuner.workers)
        for metrics in self.worker_metrics:
            metrics.threads = self.buffers.active

    @property
    def output_schema(self) -> pa.Schema | None:
        return self._serial.output_schema or self._chain.output_schema

    # -- control -------------------------------------------------------------------------------------------------

    def _control_loop(self) -> None:
        ticks = 0
        try:
            while not self._stop.wait(_TICK):
                ticks += 1
                self._watch()
                self.resident.look()
                if ticks % 20 == 0:
                    self.pressure.check()
                if self._learning_done:
                    self._tune()
                self._charge_stages()
        except BaseException as error:  # noqa: BLE001 - a control thread that dies in silence would hide a hang
            self.fail(error)

    def _tune(self) -> None:
        stages = [self.source_metrics, *self.transform_metrics, self.sink_metrics]
        if self._config.batch_rows == "auto":
            batches = max(1, self.sink_metrics.batches or self.source_metrics.batches)
            self.tuner.adjust_batch(max(stage.busy for stage in stages) / batches)
        then, waited_then = self._waits_seen
        waited, now = sum(self._waited), time.monotonic()
        idle = (waited - waited_then) / max(1e-9, (now - then) * self.buffers.active) if then else 0.0
        workers = self.tuner.adjust_workers(
            self.source_metrics.rows_in + self._decode_metrics.rows_in,
            self.buffers.backlog(),
            self.buffers.waiting_consumer,
            idle,
        )
        if workers != self.buffers.active:
            self._waits_seen = (now, waited)
            self._settle_workers()
        elif not then or now - then > 1.0:
            self._waits_seen = (now, waited)

    def _watch(self) -> None:
        """Name a stage that has been inside its own code for too long."""
        allowed = self._config.stall_seconds
        if allowed is None:
            return
        now = time.monotonic()
        for stage in (self.source_metrics, *self.transform_metrics, self.sink_metrics):
            for thread, (since, origin) in list(stage.working.items()):
                if now - since > allowed:
                    frame = sys._current_frames().get(thread)
                    stack = "".join(traceback.format_stack(frame)[-6:]) if frame else "unknown\n"
                    where = f" on the batch that begins at {origin.file}, row {origin.row}" if origin else ""
                    self.fail(
                        StalledError(
                            f"{stage.name} has been working{where} for {now - since:.1f} s, longer than "
                            f"stall_seconds={allowed:g}; it is in:\n{stack}"
                        )
                    )
                    return

    def _charge_stages(self) -> None:
        """Bytes that stages hold between calls stand against the budget too."""
        self.source_metrics.memory = _held(self._source)
        self._budget.hold("source", self.source_metrics.memory)
        total = 0
        for transform, metrics in zip(self._transforms, self.transform_metrics[-len(self._transforms) :]):
            metrics.memory = _held(transform)
            total += metrics.memory
        self._budget.hold("transforms", total)

    def snapshot(self) -> dict[str, Any]:
        """Everything that is known about the run now, as plain values."""
        seconds = self.seconds
        stages = [self.source_metrics, *self.transform_metrics, self.sink_metrics]
        return {
            "seconds": round(seconds, 3),
            "rows_in": self.source_metrics.rows_in + self._decode_metrics.rows_in,
            "rows_out": self.rows_out,
            "bytes_in": self.source_metrics.bytes_in,
            "dropped": self.dropped.total(),
            "bad_rows": self.bad_rows.counts.total(),
            "memory": {
                "used": self._budget.used,
                "limit": self._budget.limit,
                "peak": self._budget.peak,
                "by_owner": self._budget.by_owner(),
            },
            "buffers": self.buffers.depths(),
            "workers": self.buffers.active,
            "stolen": self.buffers.stolen,
            "batch_bytes": self.tuner.batch_bytes,
            "latency_ms": self._latency.snapshot(seconds)["latency_ms"],
            "stages": [stage.snapshot(seconds) for stage in stages],
            "bottleneck": self.bottleneck(),
        }

    def bottleneck(self) -> str:
        return bottleneck(self.source_metrics, self.transform_metrics, self.sink_metrics, self.seconds)

    def _guard(self, work: Callable[..., None], *args: object) -> None:
        try:
            work(*args)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the caller
            self.fail(error)


def _held(stage: object) -> int:
    usage = getattr(stage, "memory_usage", None)
    return int(usage()) if callable(usage) else 0
