"""The workers: decode and transform in parallel, then, in order, what needs order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import pyarrow as pa

from penstock.errors import DataError, StageError
from penstock.memory.budget import column_bytes
from penstock.pipeline.buffers import Buffers, Parcel, Piece
from penstock.pipeline.chain import BrokenStageError, Chain, Failure, Inferring, Ran, StepError, stage_name
from penstock.pipeline.context import Context
from penstock.pipeline.metrics import StageMetrics
from penstock.pipeline.processes import ProcessChain, RemoteError
from penstock.pipeline.stages import (
    Block,
    Decoded,
    Expanding,
    Finishing,
    FirstOfKey,
    Origin,
    Rejected,
    State,
    Stateful,
)

_FIRST_PART, _PART = 256, 32
"""Rows to begin with, and the share of the budget for what is made of a part."""
_LONG = 0.1
"""Seconds after which a worker shares the rest of a block."""


class _Counted:
    """Counts and rejected rows of a block of which workers share the pieces: they go with the last of its parcels."""

    def __init__(self) -> None:
        self._counts: tuple[tuple[dict[str, int], dict[str, int]], ...] = ()
        self._unordered: tuple[Rejected, ...] = ()
        """Rows that were rejected before the transforms that need order."""
        self._ordered: tuple[Rejected, ...] = ()

    def take(self, parcel: Parcel, unordered: tuple[Rejected, ...]) -> None:
        """Keep what a parcel counts; the rows in `unordered` were rejected before it was due, its others since."""
        self._counts += parcel.counts
        self._unordered += unordered
        self._ordered += parcel.rejected
        parcel.counts = parcel.rejected = ()

    def give(self, parcel: Parcel) -> None:
        """Give everything to the last parcel of a block."""
        unordered = _by_row(self._unordered) if parcel.part else self._unordered
        parcel.counts, parcel.rejected = self._counts, unordered + self._ordered
        self._counts, self._unordered, self._ordered = (), (), ()


class Workers:
    """Applies the transforms.

    Everything before the first transform with a state runs in parallel; from that one on, in order, by whichever worker
    has the next parcel.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        transforms, metrics = context.transforms, context.transforming
        ordered = (i for i, t in enumerate(transforms) if isinstance(t, (Stateful, Finishing)))
        self._split = split = next(ordered, len(transforms))
        self._parallel = Chain(transforms[:split], metrics[:split])
        self._serial = Chain(transforms[split:], metrics[split:])
        self._processes: list[ProcessChain | None] = [None] * context.config.worker_limit
        self.buffers = Buffers(
            lambda: context.budget.limit, context.config.worker_limit, self._in_order, context.resident.give_back
        )
        # Parts are delivered before it is known what the transforms that need order will hold after the last of them.
        self._expands = not self._serial.transforms and any(isinstance(t, Expanding) and t.expands for t in transforms)
        self._counted = _Counted()
        self._made_bytes = 0.0
        """Most bytes made of a row, if it may become many."""
        self.settled = False
        """Set once every schema is known, so that all workers may start."""
        self.set_active()

    def work(self, index: int) -> None:
        """One worker, until there is no more."""
        while True:
            parcel, _ = self.buffers.take_work(index)
            if parcel is None:
                return
            if parcel.payload is not None:
                try:
                    self._process(parcel, self._chain_of(index), index)
                except Exception as error:  # noqa: BLE001 - it surfaces in the caller, in its turn
                    parcel.error = error
                except BaseException:
                    parcel.reservation.release()
                    raise
            parcel.payload = parcel.decoded = None
            self._count_rows(parcel)
            if parcel.batch is not None or parcel.earlier:
                _fit_reservation(parcel)
            self._context.resident.give_back()
            self.buffers.settle(parcel)

    def closing(self) -> Iterator[Parcel]:
        """Rows that the in-order transforms still hold at the end, each passed through the ones after it."""
        for i, transform in enumerate(self._serial.transforms):
            if not isinstance(transform, Finishing):
                continue
            reservation = self._context.budget.charge(0, "pipeline", by=self._context)
            parcel = Parcel(-1, None, None, self._context.source_state(), reservation, time.monotonic())
            try:
                rest = self._finished(transform, self._serial.metrics[i])
                if rest is not None and rest.num_rows:
                    later = Chain(self._serial.transforms[i + 1 :], self._serial.metrics[i + 1 :])
                    _fill(parcel, self._run(parcel, later, Decoded(rest), rest.nbytes))
                    reservation.resize(parcel.size)
                parcel.transform_states = self._serial_states()
            except Exception as error:  # noqa: BLE001 - it surfaces in the caller, in its turn
                parcel.error = error
            yield parcel

    def _finished(self, transform: Finishing, metrics: StageMetrics) -> pa.RecordBatch | None:
        since = metrics.begin()
        try:
            return transform.finish()
        except Exception as error:
            raise StageError(f"{type(error).__name__}: {error}", stage=stage_name(transform)) from error
        finally:
            metrics.leave(since)

    def set_active(self) -> None:
        """One worker until every schema is known: what a function returns for the *first* rows decides, not a race."""
        self.settled = not self._learning()
        self.buffers.set_active(self._context.tuner.workers if self.settled else 1)
        for metrics in (self._context.decoding, *self._parallel.metrics):
            metrics.threads = self.buffers.active

    def close(self) -> None:
        """End the processes, if there are any."""
        for chain in self._processes:
            if chain is not None:
                chain.close()

    def schema_without_rows(self) -> pa.Schema | None:
        """Schema of the output of a run without rows; None if that cannot be known."""
        schema: pa.Schema | None = getattr(self._context.source, "schema", None)
        for chain in (self._parallel, self._serial):
            if chain.transforms:
                schema = chain.schema_without_rows(schema)
        return schema if isinstance(schema, pa.Schema) else None

    def _learning(self) -> bool:
        return any(isinstance(t, Inferring) and t.learning for t in self._parallel.transforms)

    def _chain_of(self, index: int) -> Chain:
        if self._context.config.worker_type != "process" or not self.settled:
            return self._parallel
        chain = self._processes[index]
        if chain is None:
            chain = self._processes[index] = ProcessChain(self._parallel)
            if self._context.stop.is_set():
                chain.close()
        return chain

    def _process(self, parcel: Parcel, chain: Chain, worker: int) -> None:
        raw = parcel.size if parcel.decoded is None else 0
        decoded = self._decode(parcel)
        left = parcel.size  # of what is decoded and still to be transformed
        peak, made, columns = raw + left, 0, decoded[0].batch.num_columns
        unreadable, since = parcel.later_error, time.monotonic()
        while decoded and parcel.later_error is unreadable:
            piece = decoded.popleft()
            size = piece.batch.nbytes if decoded else left
            left -= size
            for rows in self._parts(piece):
                if parcel.batch is not None:
                    self._pass_on(parcel)
                ran = self._run(parcel, chain, rows, size if rows is piece else rows.batch.nbytes)
                peak = max(peak, left + made + ran.widest)
                _fill(parcel, ran)
                parcel.rows = rows.rows if self._split == 0 else None
                self._made_bytes = max(self._made_bytes, ran.nbytes / max(1, rows.batch.num_rows))
            if decoded and parcel.batch is not None and not self._expands:
                if parcel.batch.num_rows:
                    parcel.earlier.append(Piece(parcel.batch, parcel.size, parcel.rows))
                    made += parcel.size
                parcel.batch = None
            if decoded and parcel.later_error is unreadable and time.monotonic() - since > _LONG:
                self._share(parcel, decoded, worker)
                break
        self._context.tuner.saw_need(raw, peak, columns)
        if not self.settled and not self._learning():
            self.set_active()

    def _parts(self, decoded: Decoded) -> Iterator[Decoded]:
        """The rows for one run of the transforms: all, or so few that what is made of them takes little memory."""
        batch, start = decoded.batch, 0
        if not self._expands or not batch.num_rows:
            yield decoded
            return
        while start < batch.num_rows:
            # A schema is learned from the first rows.
            most = self._context.budget.limit / _PART
            count = _FIRST_PART if not self._made_bytes else max(1, int(most / self._made_bytes))
            numbers = range(start, min(start + count, batch.num_rows))
            rows = tuple(numbers) if decoded.rows is None else decoded.rows[numbers.start : numbers.stop]
            yield Decoded(batch.slice(start, len(numbers)), rows=rows)
            start = numbers.stop

    def _share(self, parcel: Parcel, decoded: deque[Decoded], worker: int) -> None:
        """Make parcels of the pieces that are left, which any worker takes: what is made of a row group takes long.

        What counts once goes with the last of them.
        """
        sizes = [piece.batch.nbytes for piece in decoded]
        kept = sum(piece.nbytes for piece in parcel.earlier) + (0 if parcel.batch is None else parcel.size)
        each = parcel.nbytes / max(1, kept + sum(sizes))
        parcel.reservation.resize(int(each * kept))
        parts = []
        for number, (piece, size) in enumerate(zip(decoded, sizes), parcel.part + 1):
            reservation = self._context.budget.charge(int(each * size), "pipeline", by=self._context)
            part = Parcel(parcel.number, parcel.payload, parcel.origin, None, reservation, parcel.read_at, size=size)
            part.decoded, part.part, part.is_part = piece, number, True
            self._context.rows_ahead.count(part, piece.batch.num_rows)
            parts.append(part)
        last = parts[-1]
        last.is_part, parcel.is_part = False, True
        last.rows_in, last.source_state, last.file_bytes = parcel.rows_in, parcel.source_state, parcel.file_bytes
        last.later_error, parcel.later_error = parcel.later_error, None
        parcel.rows_in = 0
        self._count_rows(parcel)
        self.buffers.share(worker, parts)

    def _pass_on(self, parcel: Parcel) -> None:
        """Hand over the rows that the parcel has so far. What counts once for a parcel goes with the last of them."""
        reservation = self._context.budget.charge(parcel.size, "pipeline", by=self._context)
        part = Parcel(parcel.number, None, parcel.origin, None, reservation, parcel.read_at, size=parcel.size)
        part.batch, part.part, part.is_part, parcel.batch = parcel.batch, parcel.part, True, None
        self._count_rows(part)
        self.buffers.settle_part(part)

    def _decode(self, parcel: Parcel) -> deque[Decoded]:
        context, payload = self._context, parcel.payload
        if parcel.decoded is not None:
            return deque([parcel.decoded])
        if not isinstance(payload, Block):
            return deque([Decoded(payload)])
        assert context.blocks is not None
        since = context.decoding.begin(parcel.origin)
        try:
            decoded = deque(
                [context.blocks.decode(payload)] if context.pieces is None else context.pieces.decode_pieces(payload)
            )
        except BaseException:
            context.decoding.leave(since)
            raise
        rows = sum(piece.batch.num_rows for piece in decoded)
        rejected = [bad for piece in decoded for bad in piece.rejected]
        parcel.size = sum(piece.batch.nbytes for piece in decoded)
        parcel.rows_in = rows + len(rejected)
        sizes = payload.nbytes, parcel.size
        context.decoding.done(since, rows=(parcel.rows_in, rows), nbytes=sizes, origin=parcel.origin)
        if rejected and context.config.on_error == "raise":
            bad = rejected[0]
            parcel.later_error = DataError(bad.reason, file=bad.file, row=bad.row, offset=bad.offset)
            return deque(_rows_before(piece, bad, parcel.origin) for piece in decoded)
        parcel.rejected += tuple(rejected)
        return decoded

    def _in_order(self, parcel: Parcel) -> Iterator[Parcel]:
        """A parcel that is due, after the transforms that need order: its earlier batches as parts, then the rest.

        What counts once for a parcel goes with the rest: a resume in between makes all of the parcel again.
        """
        unordered, parcel.rejected = parcel.rejected, ()
        while parcel.earlier:
            piece = parcel.earlier.popleft()
            reservation = self._context.budget.charge(piece.nbytes, "pipeline", by=self._context)
            _fit_reservation(parcel)
            part = Parcel(parcel.number, None, parcel.origin, None, reservation, parcel.read_at, size=piece.nbytes)
            part.batch, part.rows, part.is_part = piece.batch, piece.rows, True
            self._count_rows(parcel)
            self._count_rows(part)
            self._run_in_order(part)
            parcel.counts, parcel.rejected = parcel.counts + part.counts, parcel.rejected + part.rejected
            part.counts = part.rejected = ()
            if part.error is not None:
                parcel.error, parcel.batch = part.error, None
                parcel.earlier.clear()
                reservation.release()
            else:
                yield part
            if self.buffers.cancelled:  # the transforms may belong to another run already
                parcel.reservation.release()
                return
        self._run_in_order(parcel)
        self._counted.take(parcel, unordered)
        if not parcel.is_part:
            self._counted.give(parcel)
        yield parcel

    def _run_in_order(self, parcel: Parcel) -> None:
        if parcel.error is not None:
            return
        if not self._serial.transforms:
            parcel.error = parcel.later_error
            return
        try:
            if parcel.batch is not None:
                _fill(parcel, self._run(parcel, self._serial, Decoded(parcel.batch, rows=parcel.rows), parcel.size))
                parcel.reservation.resize(parcel.size)
                self._count_rows(parcel)
            parcel.transform_states = self._serial_states()
            parcel.error = parcel.later_error
        except Exception as error:  # noqa: BLE001 - it surfaces in the caller, in its turn
            parcel.error = error

    def _count_rows(self, parcel: Parcel) -> None:
        rows = parcel.batch.num_rows if parcel.batch is not None else 0
        self._context.rows_ahead.count(parcel, rows + sum(piece.batch.num_rows for piece in parcel.earlier))

    def _run(self, parcel: Parcel, chain: Chain, decoded: Decoded, size: int) -> Ran:
        """The batch through a chain; if a row fails, its good rows. Bad ones stop the run, or go into the parcel."""
        before = chain.states()
        try:
            return chain.run(decoded.batch, size, parcel.origin)
        except StepError as step:
            chain.restore(before)
            raising = self._context.config.on_error == "raise" or isinstance(step.error, BrokenStageError)
        ran = chain.isolate(decoded.batch, first_only=raising)
        broken = next((f for f in ran.failures if isinstance(f.error, BrokenStageError)), None)
        blamed = broken or (ran.failures[0] if raising and ran.failures else None)
        if blamed is not None:
            bad = self._rejected(parcel, decoded, blamed)
            failure = StageError(
                bad.reason, stage=bad.stage, file=bad.file or "the input", row=bad.row, offset=bad.offset
            )
            failure.__cause__ = blamed.error
            if parcel.payload is None or not self._serial.transforms:
                raise failure
            parcel.later_error = failure
            return ran  # the rows before it
        # None, if it did not happen again row by row: then nothing is lost.
        parcel.rejected += tuple(self._rejected(parcel, decoded, failure) for failure in ran.failures)
        if parcel.payload is not None:
            # In the order of the rows, so that the order does not depend on how many of them a parcel has.
            parcel.rejected = _by_row(parcel.rejected)
        return ran

    def _rejected(self, parcel: Parcel, decoded: Decoded, failure: Failure) -> Rejected:
        origin, row, offset = parcel.origin, None, None
        if isinstance(parcel.payload, Block) and self._context.blocks is not None:
            row = decoded.rows[failure.row] if decoded.rows is not None else failure.row
            offset = self._context.blocks.offset_of(parcel.payload, row)
        elif parcel.payload is not None or (self._split == 0 and parcel.number >= 0):
            row = (
                decoded.rows[failure.row] if decoded.rows is not None else failure.row
            )  # after stages that may drop rows, the row number is not known any more
        return Rejected(
            file=origin.file if origin else None,
            row=row + origin.row if origin and row is not None else row,
            offset=offset,
            stage=failure.stage,
            kind=failure.error.kind if isinstance(failure.error, RemoteError) else type(failure.error).__name__,
            reason=str(failure.error) if isinstance(failure.error, RemoteError) else _told(failure.error),
            data=self._without_keys(decoded.batch.slice(failure.row, 1)).to_pylist()[0],
        )

    def _without_keys(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows without what the parallel part has added for stages that need order."""
        for transform in self._serial.transforms:
            if isinstance(transform, FirstOfKey):
                batch = transform.without_keys(batch)
        return batch

    def _serial_states(self) -> dict[str, State]:
        return {
            str(self._split + i): t.state_dict()
            for i, t in enumerate(self._serial.transforms)
            if isinstance(t, Stateful)
        }


def _rows_before(decoded: Decoded, bad: Rejected, origin: Origin | None) -> Decoded:
    """The rows of a block before a rejected one."""
    if bad.row is None or origin is None:
        return Decoded(decoded.batch.slice(0, 0), rows=())
    count = bad.row - origin.row
    if decoded.rows is not None:
        count = sum(row < count for row in decoded.rows)
    return Decoded(decoded.batch.slice(0, count), rows=None if decoded.rows is None else decoded.rows[:count])


def _fit_reservation(parcel: Parcel) -> None:
    """Charge for the batches that a parcel has."""
    batches = [(piece.batch, piece.nbytes) for piece in parcel.earlier]
    if parcel.batch is not None:
        batches.append((parcel.batch, parcel.size))
    parcel.reservation.resize(sum(nbytes + column_bytes(batch.num_columns) for batch, nbytes in batches))


def _by_row(rejected: tuple[Rejected, ...]) -> tuple[Rejected, ...]:
    return tuple(sorted(rejected, key=lambda one: -1 if one.row is None else one.row))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _fill(parcel: Parcel, ran: Ran) -> None:
    parcel.batch, parcel.size = ran.batch, ran.nbytes
    parcel.counts += tuple(ran.counts.values())
