"""Delivery: parcels in order, batches for the loop, and the position to resume from.

State rides with the batch: each parcel carries the state of the source after it, and of the in-order transforms after
it. The position of a run is that of the last *delivered* parcel, regardless of what was read ahead.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from penstock._forks import check_process
from penstock.errors import StoppedError
from penstock.pipeline.buffers import Buffers, Parcel
from penstock.pipeline.context import Context
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.quarantine import BadRows
from penstock.pipeline.stages import State


@dataclass(frozen=True, slots=True)
class DeliveryPosition:
    """Position of a run: the states after the last parcel that was wholly delivered, and rows delivered since."""

    source: State | None
    transforms: dict[str, State]
    skip_rows: int = 0
    bad_rows: State | None = None
    """Size of the quarantine at that point."""


class Delivery:
    """Called by one thread: the sink thread, or the one that iterates."""

    def __init__(
        self, context: Context, buffers: Buffers, start: DeliveryPosition, bad_rows: BadRows, check: Callable[[], None]
    ) -> None:
        self._budget, self._sinking = context.budget, context.sinking
        self._buffers, self._check, self._rows_ahead = buffers, check, context.rows_ahead
        self._process = os.getpid()
        self._acknowledged, self._holds_rows = context.acknowledged, context.holds_rows
        self._unpublished: deque[tuple[int, State]] = deque()
        """States to acknowledge once that many rows are published."""
        self._last_acknowledged = start.source
        """The last state that was acknowledged during iteration."""
        self._deadline: float | None = None
        """Time at which the rows that wait for a full batch leave without it."""
        self.position, self.bad_rows = start, bad_rows
        self._skip = start.skip_rows
        self._parts_rows = 0
        """Rows of the parts of the current parcel that were delivered."""
        self.rows_read = self.rows_out = 0
        self.file_bytes: int | None = None
        """Bytes of the input files before the next parcel."""
        self.dropped: Counter[str] = Counter()
        self.changed: Counter[str] = Counter()
        self.latency = StageMetrics("end to end", "latency")

    def parcels(self) -> Generator[Parcel]:
        """Parcels in order, without the rows a resumed run has delivered already; raises the error of a failed one.

        The caller reports with `took` how many of its rows have reached the consumer, and closes the generator if it
        stops early: what was not delivered gives its memory back then.
        """
        with closing(self._parcels()) as parcels:
            for parcel in parcels:
                if parcel is not None:
                    yield parcel

    def _parcels(self) -> Generator[Parcel | None]:
        """Parcels in order; None whenever the deadline has passed without one."""
        while True:
            check_process(self._process, "this run of a pipeline")
            taken, waited = self._buffers.take_ready(self._deadline)
            self._sinking.waited(for_input=waited)
            self._check()
            if taken is None:
                if self._buffers.cancelled:
                    raise StoppedError("the pipeline was stopped before the end of its input")
                return
            if not taken:
                yield None
                continue
            waiting = deque(taken)
            try:
                while waiting:
                    if self._buffers.cancelled:
                        self._check()
                        raise StoppedError("the pipeline was stopped before the end of its input")
                    yield self._due(waiting[0])
                    waiting.popleft()
            finally:
                for parcel in waiting:
                    parcel.reservation.release()

    def took(self, parcel: Parcel, rows: int) -> None:
        """`rows` more rows of the parcel have reached the consumer. With its last row the position moves past it;
        before that, a resume makes the parcel again and skips what was taken of it."""
        parcel.taken += rows
        self.rows_out += rows
        self._rows_ahead.count(parcel, parcel.rows_made - parcel.taken)
        if parcel.is_part or parcel.taken < parcel.rows_made:
            # Of a block that a resumed run passes over, the parts to come are there, too.
            self.position = replace(self.position, skip_rows=self._parts_rows + parcel.taken + self._skip)
            if parcel.taken == parcel.rows_made:
                self._parts_rows += parcel.taken
                parcel.reservation.release()
            return
        self._parts_rows = 0
        self.position = DeliveryPosition(
            parcel.source_state, parcel.transform_states or {}, self._skip, parcel.bad_rows
        )
        self.latency.add(time.monotonic() - parcel.read_at, rows, rows, 0, 0)
        parcel.reservation.release()

    def batches(self, rows: int | Literal["auto"], max_wait_seconds: float | None = None) -> Iterator[pa.RecordBatch]:
        """Batches for the loop: as they come, or cut and joined so that each has exactly `rows` rows.

        With `max_wait_seconds` a batch leaves with fewer rows if its first has waited that long.
        """
        pending: deque[Parcel] = deque()
        held = 0
        try:
            with closing(self._parcels()) as parcels:
                for parcel in parcels:
                    least = 1
                    if parcel is not None:
                        pending.append(parcel)
                        held += parcel.batch.num_rows if parcel.batch is not None else 0
                        # However many rows are wanted, the next ones must be admitted: what waits here stands, not
                        # queues.
                        parcel.reservation.release()
                        self._stand(pending)
                        least = 1 if rows == "auto" else rows
                    while held >= least:
                        size = held if rows == "auto" else min(rows, held)
                        batch = self._cut(pending, size)
                        held -= size
                        self._deadline = None
                        self._stand(pending)
                        yield batch
                        check_process(self._process, "this run of a pipeline")
                        self.asked_on()
                    if not held:
                        self._deadline = None
                    elif max_wait_seconds is not None and self._deadline is None:
                        self._deadline = time.monotonic() + max_wait_seconds
            if held:
                yield self._cut(pending, held)
            while pending:
                self.took(pending.popleft(), 0)
        finally:
            self._stand(deque())

    def asked_on(self, *, at_the_end: bool = False) -> None:
        """The loop requested the next batch: acknowledge the rows delivered so far.

        Only at the end if a transform may hold some of these rows.
        """
        if self._acknowledged is None or (self._holds_rows and not at_the_end):
            return
        state = self.position.source
        if state is not None and (at_the_end or state is not self._last_acknowledged):
            self._acknowledged.delivered(state)
            self._last_acknowledged = state

    def commit(self) -> None:
        """Acknowledge the rows delivered so far: they are published or in a checkpoint, so the source may drop them."""
        if self._acknowledged is not None and self.position.source is not None:
            self._acknowledged.commit(self.position.source)

    def commit_published(self, rows: int) -> None:
        """The sink has published `rows` of the rows it got: acknowledge the rows these were made of."""
        if self._acknowledged is None or self._holds_rows:
            return
        if self.position.source is not None:
            self._unpublished.append((self.rows_out, self.position.source))
        done: State | None = None
        while self._unpublished and self._unpublished[0][0] <= rows:
            done = self._unpublished.popleft()[1]
        if done is not None:
            self._acknowledged.commit(done)

    def _stand(self, pending: deque[Parcel]) -> None:
        waiting = sum(parcel.batch.nbytes for parcel in pending if parcel.batch is not None) if pending else 0
        self._budget.hold("delivery", waiting, by=self)

    def _due(self, parcel: Parcel) -> Parcel:
        if parcel.error is not None:
            raise parcel.error
        self.rows_read += parcel.rows_in
        if not parcel.is_part:
            self.file_bytes = parcel.file_bytes
        for dropped, changed in parcel.counts:
            self.dropped.update(dropped)
            self.changed.update(changed)
        self.bad_rows.add(parcel.rejected, self.rows_read)
        parcel.bad_rows = self.bad_rows.mark() if self.bad_rows.counts else None
        if parcel.batch is not None:
            parcel.rows_made = parcel.batch.num_rows
            parcel.taken = min(self._skip, parcel.rows_made)
            if parcel.taken:
                self._skip -= parcel.taken
                parcel.batch = parcel.batch.slice(parcel.taken)
                self._rows_ahead.count(parcel, parcel.rows_made - parcel.taken)  # or the source might wait for ever
        return parcel

    def _cut(self, pending: deque[Parcel], rows: int) -> pa.RecordBatch:
        """The next `rows` rows; a view of one parcel where it has enough of them."""
        parts = []
        while rows:
            parcel = pending[0]
            if parcel.batch is None or not parcel.batch.num_rows:
                self.took(pending.popleft(), 0)
                continue
            part = parcel.batch.slice(0, rows)
            parcel.batch = parcel.batch.slice(part.num_rows)
            if not parcel.batch.num_rows:
                pending.popleft()
            parts.append(part)
            rows -= part.num_rows
            self._sinking.add(0.0, part.num_rows, part.num_rows, 0, 0)
            self.took(parcel, part.num_rows)
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)
