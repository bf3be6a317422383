"""The four bounded buffers between the threads, and the rule that keeps order without a deadlock.

    source --1--> [read]  --2--> [lane of each worker]  --3--> [settled, by number]  --4--> [ready, in order] --> sink

1. `read`: what the source thread has read.
2. `lanes`: each worker takes a few parcels at a time into its own lane; an idle worker with nothing to take steals the
   oldest parcel of the longest lane. A worker to which a large block takes long puts the rest of it at the head of its
   lane, as parcels that are parts of it.
3. `settled`: parcels that are through the workers, in the order they finished.
4. `ready`: the next parcels in order, after the stages that must run in order.

All four are bounded in bytes, each by a share of the budget, and always admit one parcel. The parcel the order waits
for is never held back at 3: every other one may wait there, since lanes are first-in-first-out and parcels are numbered
in the order they are read, so the awaited one is either settled, being worked on, or at the head of a lane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from penstock.memory.budget import Reservation
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected, State

_SHARE = 4  # each of the four buffers may hold a quarter of the budget
_READ_AHEAD = 8  # parcels that may wait to be worked on, or two for each worker if those are more
_WAIT = 0.1  # waits are woken by notification; the slices are for `idle`


@dataclass(frozen=True, slots=True)
class Piece:
    """A batch that was made of some rows of a parcel."""

    batch: pa.RecordBatch
    nbytes: int
    rows: Sequence[int] | None
    """As `Parcel.rows`."""


@dataclass(slots=True)
class Parcel:
    """A batch on its way, and the state that rebuilds everything after it."""

    number: int
    payload: Block | pa.RecordBatch | None
    origin: Origin | None
    source_state: State | None
    reservation: Reservation
    read_at: float
    rows_in: int = 0
    size: int = 0
    """Bytes of its batch; computed once, since Arrow releases the interpreter lock for it."""
    batch: pa.RecordBatch | None = None
    rejected: tuple[Rejected, ...] = ()
    counts: tuple[tuple[dict[str, int], dict[str, int]], ...] = ()
    """Rows left out, and rows changed but kept, by reason; one pair for each transform that has any."""
    error: BaseException | None = None
    later_error: Exception | None = None
    """Error of the row after those of the batch: an earlier row may still fail in a transform that needs order."""
    rows: Sequence[int] | None = None
    """Row numbers of the batch's rows, if they are not those from the first on and no transform has had it yet."""
    earlier: deque[Piece] = field(default_factory=deque)
    """Batches before its last one, if its rows were decoded in pieces."""
    decoded: Decoded | None = None
    """Rows of the payload that are transformed here, if workers share those of a block."""
    part: int = 0
    """Number of this parcel among those that share a block."""
    transform_states: dict[str, State] | None = None
    rows_made: int = 0
    """Rows of the batch when it became due."""
    bad_rows: State | None = None
    """Size of the quarantine when this parcel became due, its own bad rows included."""
    file_bytes: int | None = None
    """Bytes of the input files before the next parcel, if the source is `Measured`."""
    rows_ahead: int = 0
    """Rows that count as read and not delivered."""
    is_part: bool = False
    """True if more rows of the same parcel follow, in another one."""
    taken: int = 0
    """Number of those rows that have reached the consumer, in this run or an earlier one."""

    @property
    def nbytes(self) -> int:
        return self.reservation.nbytes

    @property
    def place(self) -> tuple[int, int]:
        """Place in the order of delivery."""
        return self.number, self.part


class RowsAhead:
    """Rows between the source and the consumer, and the limit that reading waits for, if there is one."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._rows = 0
        self._fewer = threading.Condition()

    def count(self, parcel: Parcel, rows: int) -> None:
        """The parcel has so many rows now: as it was read, after the transforms, or none once it is delivered."""
        if self.most is None:
            return
        with self._fewer:
            self._rows += rows - parcel.rows_ahead
            parcel.rows_ahead = rows
            self._fewer.notify_all()

    def wait(self, timeout_seconds: float) -> bool:
        """True if there is room for more rows."""
        if self.most is None:
            return True
        most = self.most
        with self._fewer:
            return self._fewer.wait_for(lambda: self._rows < most, timeout_seconds)


class Buffers:
    """Moves parcels from the source thread through the workers to the sink thread, in order."""

    def __init__(
        self,
        limit: Callable[[], int],
        workers: int,
        in_order: Callable[[Parcel], Iterable[Parcel]],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._limit = limit
        self._in_order = in_order
        """What is delivered of a parcel that is due, one part after the other."""
        self._idle = idle
        """Called now and then by a thread that waits: what others free of its memory, only it can give back."""
        # Reentrant: a garbage collection inside of it may end the loop that nobody uses any more.
        self._lock = threading.RLock()
        self._room_to_read = threading.Condition(self._lock)
        self._work_there = threading.Condition(self._lock)
        self._parked = threading.Condition(self._lock)
        self._room_to_settle = threading.Condition(self._lock)
        self._room_ready = threading.Condition(self._lock)
        self._ready_there = threading.Condition(self._lock)
        self._read: deque[Parcel] = deque()
        self._lanes: list[deque[Parcel]] = [deque() for _ in range(workers)]
        self._settled: dict[tuple[int, int], Parcel] = {}
        self._ready: deque[Parcel] = deque()
        self._bytes = {"read": 0, "lanes": 0, "settled": 0, "ready": 0}
        self._next = (0, 0)
        """Place of the parcel that the order waits for."""
        self._total: int | None = None
        self._baton = False
        self._closing: Callable[[], Iterable[Parcel]] | None = None
        self._finished = False
        self._cancelled = False
        self.active = workers
        """Number of workers that may take work; the others park."""
        self.stolen = 0
        self.waiting_consumer = False

    # -- 1: the source thread ------------------------------------------------------------------------------------

    def wait_to_read(self, timeout_seconds: float) -> bool:
        """True if few parcels wait to be worked on: what is read long before takes fresh memory, which costs time."""
        with self._lock:
            return self._reads_on() or self._room_to_read.wait_for(
                lambda: self._reads_on() or self._cancelled, timeout_seconds
            )

    def put_read(self, parcel: Parcel) -> float:
        """Hand over what was read; returns the seconds waited for room."""
        with self._lock:
            waited = self._wait(self._room_to_read, lambda: self._room("read", parcel))
            if self._cancelled:
                parcel.reservation.release()
            else:
                self._read.append(parcel)
                self._bytes["read"] += parcel.nbytes
                self._work_there.notify()
            return waited

    def end(self, total: int, closing: Callable[[], Iterable[Parcel]]) -> None:
        """No more than `total` will be read. `closing` makes the parcels that follow: what stages still hold."""
        with self._lock:
            self._closing = closing
            self._total = total
            self._work_there.notify_all()
            self._parked.notify_all()
        self._advance()

    # -- 2: the workers ------------------------------------------------------------------------------------------

    def take_work(self, worker: int) -> tuple[Parcel | None, float]:
        """The next parcel for this worker (None: no more will come), and the seconds waited for it."""
        with self._lock:
            waited = self._wait_for_work(worker)
            if self._cancelled:
                return None, waited
            lane = self._lanes[worker]
            if worker < self.active and not lane:
                self._refill(lane)
            if not lane:
                return None, waited
            parcel = lane.popleft()
            self._bytes["lanes"] -= parcel.nbytes
            return parcel, waited

    def share(self, worker: int, parcels: Sequence[Parcel]) -> None:
        """Parts of the block that this worker has in hand, for itself and those that have nothing to do."""
        with self._lock:
            if self._cancelled:
                for parcel in parcels:
                    parcel.reservation.release()
                return
            self._lanes[worker].extendleft(reversed(parcels))  # before later ones, or the order would wait for them
            self._bytes["lanes"] += sum(parcel.nbytes for parcel in parcels)
            self._work_there.notify_all()

    def settle(self, parcel: Parcel) -> float:
        """A parcel is through the worker; returns the seconds waited for room. May run the in-order stages."""
        with self._lock:
            waited = self._wait(
                self._room_to_settle, lambda: parcel.place == self._next or self._room("settled", parcel)
            )
            if self._cancelled:
                parcel.reservation.release()
                return waited
            self._settled[parcel.place] = parcel
            self._bytes["settled"] += parcel.nbytes
        return waited + self._advance()

    def settle_part(self, parcel: Parcel) -> float:
        """Rows of a parcel of which more follow: passed on once all parcels before it are; returns the seconds waited.

        The last part is settled as any parcel.
        """
        with self._lock:
            waited = self._wait(self._room_to_settle, lambda: parcel.place == self._next and not self._baton)
            if self._cancelled:
                parcel.reservation.release()
                return waited
            self._baton = True
        try:
            return waited + self._put_ready(parcel)
        finally:
            with self._lock:
                self._baton = False

    # -- 4: the sink thread --------------------------------------------------------------------------------------

    def take_ready(self, deadline: float | None = None) -> tuple[list[Parcel] | None, float]:
        """All parcels that are ready, in order (None: the end; none of them: the deadline), and the seconds waited."""
        with self._lock:
            self.waiting_consumer = True
            waited = self._wait(self._ready_there, lambda: bool(self._ready) or self._finished, deadline)
            self.waiting_consumer = False
            if self._cancelled:
                return None, waited
            if not self._ready:
                return (None if self._finished else []), waited
            taken = list(self._ready)
            self._ready.clear()
            self._bytes["ready"] = 0
            self._room_ready.notify_all()
            return taken, waited

    # -- everybody -----------------------------------------------------------------------------------------------

    def cancel(self) -> None:
        """Wake every waiter, let nothing more through, and give back the memory of what lies in the buffers."""
        with self._lock:
            self._cancelled = True
            for condition in self._conditions():
                condition.notify_all()
            for parcel in (
                *self._read,
                *(p for lane in self._lanes for p in lane),
                *self._settled.values(),
                *self._ready,
            ):
                parcel.reservation.release()

    def set_active(self, workers: int) -> None:
        with self._lock:
            self.active = max(1, min(workers, len(self._lanes)))
            self._work_there.notify_all()
            self._parked.notify_all()

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def depths(self) -> dict[str, dict[str, int]]:
        """Parcels and bytes in each buffer."""
        with self._lock:
            counts = {
                "read": len(self._read),
                "lanes": sum(map(len, self._lanes)),
                "settled": len(self._settled),
                "ready": len(self._ready),
            }
            return {name: {"batches": counts[name], "bytes": self._bytes[name]} for name in counts}

    def backlog(self) -> int:
        """Parcels that wait for a worker."""
        return len(self._read) + sum(map(len, self._lanes))

    def _advance(self) -> float:
        """Pass on, in order, the parcels that are due. One thread at a time does it; the others only add theirs."""
        waited = 0.0
        with self._lock:
            if self._baton:
                return waited
            self._baton = True
        try:
            while True:
                with self._lock:
                    parcel = self._settled.pop(self._next, None)
                    if parcel is None or self._cancelled:
                        closing = self._closing if self._is_over and not self._cancelled else None
                        self._closing = None if closing else self._closing
                        if closing is None:
                            # Released inside the lock, or a parcel settled in between would wait forever.
                            self._baton = False
                            self._room_to_settle.notify_all()
                            return waited
                    else:
                        self._bytes["settled"] -= parcel.nbytes
                        number, part = parcel.place
                        self._next = (number, part + 1) if parcel.is_part else (number + 1, 0)
                        self._room_to_settle.notify_all()
                        if self._is_over:
                            self._work_there.notify_all()
                if parcel is None:
                    for last in closing() if closing else ():
                        waited += self._put_ready(last)
                    with self._lock:
                        self._finished = True
                        self._ready_there.notify_all()
                else:
                    for due in self._in_order(parcel):
                        waited += self._put_ready(due)
        except BaseException:
            with self._lock:
                self._baton = False
            raise

    def _put_ready(self, parcel: Parcel) -> float:
        with self._lock:
            waited = self._wait(self._room_ready, lambda: self._room("ready", parcel))
            if self._cancelled:
                parcel.reservation.release()
                return waited
            self._ready.append(parcel)
            self._bytes["ready"] += parcel.nbytes
            self._ready_there.notify()
            return waited

    @property
    def _is_over(self) -> bool:
        """True once every parcel was due. Until then another worker may share the block that it has in hand."""
        return self._total is not None and self._next >= (self._total, 0)

    def _reads_on(self) -> bool:
        return len(self._read) < max(_READ_AHEAD, 2 * self.active)

    def _room(self, buffer: str, parcel: Parcel) -> bool:
        held = self._bytes[buffer]
        return held == 0 or held + parcel.nbytes <= self._limit() // _SHARE

    def _wait_for_work(self, worker: int) -> float:
        waited = 0.0
        while not (self._has_work(worker) or self._cancelled):
            # Parked workers sleep elsewhere: a call for one worker must not wake one that may not work.
            parked = worker >= self.active
            waited += self._wait(
                self._parked if parked else self._work_there,
                lambda parked=parked: self._has_work(worker) or (worker >= self.active) != parked,  # type: ignore[misc]
            )
        return waited

    def _has_work(self, worker: int) -> bool:
        if self._lanes[worker]:
            return True
        if worker >= self.active:
            return self._total is not None and not self._read
        return bool(self._read) or any(self._lanes) or self._is_over

    def _refill(self, lane: deque[Parcel]) -> None:
        if self._read:
            share = max(1, len(self._read) // (2 * self.active))
            for _ in range(min(share, 4)):
                parcel = self._read.popleft()
                lane.append(parcel)
                self._bytes["read"] -= parcel.nbytes
                self._bytes["lanes"] += parcel.nbytes
            self._room_to_read.notify()
            if self._read:
                self._work_there.notify()
            return
        victim = max(self._lanes, key=len)
        if victim:
            lane.append(victim.popleft())
            self.stolen += 1

    def _wait(self, condition: threading.Condition, ready: Callable[[], Any], deadline: float | None = None) -> float:
        if ready() or self._cancelled:
            return 0.0
        since = now = time.monotonic()
        while not (ready() or self._cancelled or (deadline is not None and now >= deadline)):
            if not condition.wait(_WAIT if deadline is None else min(_WAIT, deadline - now)):
                self._idle()
            now = time.monotonic()
        return now - since

    def _conditions(self) -> list[threading.Condition]:
        return [
            self._room_to_read,
            self._work_there,
            self._parked,
            self._room_to_settle,
            self._room_ready,
            self._ready_there,
        ]
