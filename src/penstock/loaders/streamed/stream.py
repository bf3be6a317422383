"""A stream that is being read: the window it is in, and the next one, made before it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from penstock.errors import DataError
from penstock.loaders.streamed.cursors import Start, StreamCursor
from penstock.loaders.streamed.rows import TokenRows
from penstock.loaders.streamed.samples import Shape
from penstock.loaders.streamed.windows import BlockSequence, HeldWindow, RowWindow, WindowBuilder
from penstock.memory import MemoryBudget, Reservation
from penstock.order.permutation import derive_key
from penstock.order.samples import Samples
from penstock.pipeline.metrics import TOKENS
from penstock.pipeline.prefetch import Background

__all__ = ["Filled", "Stream", "StreamLane"]

Told = Callable[[RowWindow], None]
_MAKING = 3
"""What a window takes while it is made, in sizes of its input: as bytes, as text, as tokens."""


@dataclass(frozen=True, slots=True)
class _Before:
    """What has to be known to make a window: where it begins, and what the windows before it left over."""

    start: Start
    trail: tuple[tuple[Start, int], ...] = ()
    """Where the windows that hold the left-over tokens begin, and how many tokens each has."""
    carry: TokenRows | None = None

    def cursor(self) -> StreamCursor:
        if self.carry is None:
            return StreamCursor(self.start)
        return StreamCursor(self.trail[0][0], len(self.trail), self.carry.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Filled:
    """A window and its samples."""

    rows: TokenRows
    samples: Samples
    cursor: StreamCursor
    """Of its first sample."""
    behind: _Before | None
    """What the next window needs; None if it was the last."""
    window: RowWindow
    charge: Reservation

    def __len__(self) -> int:
        return len(self.samples)


class Stream:
    """One stream of one epoch. Samples are taken in order; `seek` goes anywhere a cursor was."""

    def __init__(
        self,
        course: BlockSequence,
        maker: WindowBuilder,
        shape: Shape,
        *,
        pool: Background,
        budget: MemoryBudget,
        told: Told,
    ) -> None:
        self._course, self._maker, self._shape = course, maker, shape
        self._pool, self._budget, self._told = pool, budget, told
        self._held = HeldWindow()
        self._here: Filled | None = None
        self._next: Future[Filled] | None = None
        self.cursor = StreamCursor() if len(course.blocks) else StreamCursor(ended=True)
        self.nbytes = 0
        """Of the last window that was made."""
        self.counting = True
        """Whether what was left out of windows is told: not if they are read again."""

    @property
    def left(self) -> int:
        """Samples that can be taken without waiting."""
        return len(self._here) - self.cursor.index if self._here is not None else 0

    @property
    def waiting(self) -> bool:
        """Whether a window was made, or is in work, that nobody has asked for yet."""
        return self._next is not None

    @property
    def over(self) -> bool:
        """Whether there is no window behind the present one."""
        return self.cursor.ended or (self._here is not None and self._here.behind is None)

    def seek(self, cursor: StreamCursor) -> None:
        if cursor == self.cursor:
            return
        here = self._here
        if here is None or cursor.ended or replace(cursor, index=0) != here.cursor or cursor.index >= len(here):
            self._drop()
        self.cursor = cursor

    def rewind(self) -> None:
        """Back to the first sample."""
        self._drop()
        self.cursor = StreamCursor() if len(self._course.blocks) else StreamCursor(ended=True)

    def begin(self) -> None:
        """Have the next window made that will be asked for, if that is not done yet."""
        if self._next is not None or self.over:
            return
        here, cursor = self._here, self.cursor
        if here is None:
            self._next = self._pool.submit(lambda: self._fill(self._before(cursor)))
        elif here.behind is not None:
            behind = here.behind
            self._next = self._pool.submit(lambda: self._fill(behind))

    def take(self) -> tuple[Filled, int] | None:
        """The next sample: a window and a number in it; None at the end."""
        while not self.cursor.ended:
            if self._here is None:
                self._here = self._awaited()
                self.nbytes = self._here.rows.nbytes
                if self.counting and not self.cursor.index:
                    self._told(self._here.window)
            here, index = self._here, self.cursor.index
            if index < len(here):
                if index + 1 == len(here):
                    self._step_behind(here)
                else:
                    at = here.cursor
                    self.cursor = StreamCursor(at.start, at.ahead, at.carry, index + 1)
                return here, index
            self._step_behind(here)
        return None

    def close(self) -> None:
        self._drop()

    def _step_behind(self, here: Filled) -> None:
        self.begin()  # while it is known what comes next
        here.charge.release()
        self._here = None
        self.cursor = StreamCursor(ended=True) if here.behind is None else here.behind.cursor()

    def _awaited(self) -> Filled:
        self.begin()
        assert self._next is not None
        work, self._next = self._next, None
        return work.result()

    def _drop(self) -> None:
        if self._next is not None:
            self._next.cancel()
            # It uses the open file, so the next window has to wait for it.
            if not self._next.cancelled() and self._next.exception() is None:
                self._next.result().charge.release()
        if self._here is not None:
            self._here.charge.release()
        self._next = self._here = None
        self._held.close()

    def _before(self, cursor: StreamCursor) -> _Before:
        """Reads the windows again that hold what was carried over, one as a rule."""
        if not cursor.carry:
            return _Before(cursor.start)
        start, trail, parts = cursor.start, [], []
        for _ in range(cursor.ahead):
            window = self._maker.make(self._course, start, self._held)
            trail.append((start, window.rows.tokens))
            parts.append(window.rows)
            start = window.next
        return _Before(start, tuple(trail), TokenRows.concat(parts).tail(cursor.carry))

    def _fill(self, before: _Before) -> Filled:
        charge = self._budget.charge(_MAKING * self._maker.limits.nbytes, "streams", by=self)
        try:
            filled = self._filled(before, charge)
        except BaseException:
            charge.release()
            raise
        charge.resize(filled.rows.nbytes)
        return filled

    def _filled(self, before: _Before, charge: Reservation) -> Filled:
        course, maker, shape = self._course, self._maker, self._shape
        window = maker.make(course, before.start, self._held)
        rows = window.rows if before.carry is None else TokenRows.concat([before.carry, window.rows])
        last = window.next.block >= len(course.blocks)
        key = derive_key(maker.seed, "samples", course.epoch, course.stream, before.start.number)
        try:
            samples = shape.samples(rows, key, shuffle=maker.shuffle, last=last)
        except DataError as error:
            if error.row is None:
                raise
            file, row, offset = maker.catalog.located(int(rows.blocks[error.row]), int(rows.places[error.row]))
            raise DataError(error.reason.partition(" has ")[2], file=file, row=row, offset=offset) from None
        behind = None if last else self._behind(before, window, rows, samples)
        if not shape.carries and (cut := rows.tokens - samples.tokens):
            window.changed[f"{TOKENS}{shape.truncation}"] += cut
        return Filled(rows, samples, before.cursor(), behind, window, charge)

    def _behind(self, before: _Before, window: RowWindow, rows: TokenRows, samples: Samples) -> _Before:
        left = rows.tokens - samples.tokens if self._shape.carries else 0
        if not left:
            return _Before(window.next)
        trail = [*before.trail, (before.start, window.rows.tokens)]
        while sum(tokens for _, tokens in trail[1:]) >= left:
            del trail[0]
        return _Before(window.next, tuple(trail), rows.tail(left))


@dataclass(frozen=True, slots=True)
class StreamLane:
    """Slots that neighbouring streams fill, and nobody else: one slot and its streams, or one stream and its slots.

    The streams of a slot take turns; one that has ended is passed over, so that a slot is empty only when all of its
    streams are. Slots of a step that nothing is left for stay empty.
    """

    slots: range
    streams: range

    def due(self, step: int) -> int:
        """The stream whose turn it is."""
        return self.streams[step % len(self.streams)]

    def read(self, step: int, streams: dict[int, Stream]) -> list[tuple[Filled, int]]:
        """The samples of a step, first slot first."""
        if len(self.streams) == 1:
            stream = streams[self.streams[0]]
            taken = (stream.take() for _ in self.slots)
            return [sample for sample in taken if sample is not None]
        for turn in range(len(self.streams)):
            sample = streams[self.due(step + turn)].take()
            if sample is not None:
                return [sample]
        return []
