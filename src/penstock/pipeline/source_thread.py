"""The source thread: reserve, read, hand over."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import pyarrow as pa

from penstock.errors import DataError, PenstockError, StageError, StalledError
from penstock.memory.budget import Reservation
from penstock.pipeline.buffers import Buffers, Parcel
from penstock.pipeline.context import Context
from penstock.pipeline.stages import Block, Origin, Rejected

__all__ = ["SourceThread"]


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
            except Exception as error:  # noqa: BLE001 - whatever the source raises goes to the caller, in its turn
                parcel = self._unreadable(number, reservation, error)
            except BaseException:
                reservation.release()
                raise
            if parcel is None or parcel.payload is None:
                context.reading.leave(since)
            else:
                rows, size = parcel.rows_in, parcel.size
                context.reading.done(since, rows=(rows, rows), nbytes=(size, size))
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
        """Wait for room. It comes when parcels of ours are delivered (with none in flight the budget admits the next
        one at once), and those who work on them have deadlines of their own."""
        context, since = self._context, time.monotonic()
        try:
            while not context.stop.is_set():
                with contextlib.suppress(StalledError):
                    return context.budget.reserve(nbytes, "pipeline", timeout=0.1, by=context)
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
        rows = 0
        if isinstance(payload, pa.RecordBatch):
            rows = payload.num_rows
        elif not isinstance(payload, Block):
            raise StageError(
                f"next_batch returned {type(payload).__name__}, expected a pyarrow.RecordBatch or None",
                stage=context.reading.name,
            )
        size = payload.nbytes
        context.tuner.saw_read(rows, size)
        state = context.source_state()
        return Parcel(number, payload, origin, state, reservation, time.monotonic(), rows_in=rows, size=size)

    def _unreadable(self, number: int, reservation: Reservation, error: Exception) -> Parcel:
        """A parcel that carries the source's failure; or, if bad rows may be left out, the loss of the file's rest."""
        context = self._context
        parcel = Parcel(number, None, None, None, reservation, time.monotonic(), error=self._named(error))
        skip = getattr(context.source, "skip_file", None)
        if context.config.on_error == "raise" or not isinstance(error, DataError) or not callable(skip):
            return parcel
        skipped = skip()
        parcel.error, parcel.source_state = None, context.source_state()
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
