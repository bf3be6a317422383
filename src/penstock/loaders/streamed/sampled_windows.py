"""Windows with their samples: what a stream takes its samples from, made by threads or by processes."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.errors import DataError
from penstock.files.atomic import naming
from penstock.loaders.streamed.rows import TokenRows, WindowSampling
from penstock.loaders.streamed.windows import (
    BlockSequence,
    OpenSplit,
    RowWindow,
    StreamCursor,
    WindowBuilder,
    WindowCounts,
    WindowStart,
)
from penstock.memory import MemoryBudget, Reservation
from penstock.memory.pressure import give_back_memory
from penstock.order.permutation import derive_key
from penstock.order.samples import Samples
from penstock.pipeline.metrics import TOKENS
from penstock.pipeline.prefetch import Background

_MAKING = 3
"""Memory of a window while it is made, in sizes of its input: bytes, text and tokens."""

_WAITING = 4
"""Share of the budget for windows that wait in memory: the rest is for those being made, and for batches."""


@dataclass(frozen=True, slots=True)
class WindowInput:
    """Input of a window: its beginning, and the tokens that the windows before it left over."""

    start: WindowStart
    trail: tuple[tuple[WindowStart, int], ...] = ()
    """Beginnings of the windows that hold the left-over tokens, and their numbers of tokens."""
    carry: TokenRows | None = None

    def cursor(self) -> StreamCursor:
        if self.carry is None:
            return StreamCursor(self.start)
        return StreamCursor(self.trail[0][0], len(self.trail), self.carry.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SampledWindow:
    """A window and its samples."""

    rows: TokenRows
    samples: Samples
    cursor: StreamCursor
    """Cursor of the first sample."""
    following: WindowInput | None
    """Input of the next window; None after the last."""
    counts: WindowCounts
    charge: Reservation | None = None
    spilled: SpilledArrays | None = None
    """File that holds the arrays, if the budget has no room for them."""

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes + self.samples.nbytes

    def spill(self) -> SampledWindow:
        """The same window with its arrays in a file."""
        rows, samples = self.rows, self.samples
        tokens = [rows.ids.values, rows.ids.offsets, rows.mask, rows.blocks, rows.places]
        spilled = SpilledArrays([*tokens, samples.offsets, samples.rows, samples.starts, samples.lengths])
        values, offsets, mask, blocks, places, of_samples, of_rows, starts, lengths = spilled.arrays
        return replace(
            self,
            rows=TokenRows(Ragged(values, offsets), mask, blocks, places),
            samples=Samples(of_samples, of_rows, starts, lengths, samples.single),
            spilled=spilled,
        )

    def release(self) -> None:
        """Give the memory back to the budget."""
        if self.charge is not None:
            self.charge.release()


class WindowFiller:
    """Reads, transforms and samples windows. A window depends on the arguments alone."""

    def __init__(self, builder: WindowBuilder, sampling: WindowSampling) -> None:
        self.builder, self.sampling = builder, sampling

    def fill(self, sequence: BlockSequence, source: WindowInput | StreamCursor, split: OpenSplit) -> SampledWindow:
        """The window after another one, or at a cursor. `split` keeps the file open between windows of a stream."""
        builder, sampling = self.builder, self.sampling
        before = self._before(sequence, source, split) if isinstance(source, StreamCursor) else source
        window = builder.make(sequence, before.start, split)
        rows = window.rows if before.carry is None else TokenRows.concat([before.carry, window.rows])
        last = window.next.block >= len(sequence.blocks)
        key = derive_key(builder.seed, "samples", sequence.epoch, sequence.stream, before.start.number)
        try:
            samples = sampling.samples(rows, key, shuffle=builder.shuffle, last=last)
        except DataError as error:
            if error.row is None:
                raise
            file, row, offset = builder.catalog.located(int(rows.blocks[error.row]), int(rows.places[error.row]))
            raise DataError(
                error.reason.partition(" has ")[2] or error.reason, file=file, row=row, offset=offset
            ) from None
        following = None if last else self._following(before, window, rows, samples)
        if not sampling.carries and (cut := rows.tokens - samples.tokens):
            window.counts.changed[f"{TOKENS}{sampling.sampling.truncation}"] += cut
        return SampledWindow(rows, samples, before.cursor(), following, window.counts)

    def _before(self, sequence: BlockSequence, cursor: StreamCursor, split: OpenSplit) -> WindowInput:
        """Read the windows again that hold the carried tokens: usually one."""
        if not cursor.carry:
            return WindowInput(cursor.start)
        start, trail, parts = cursor.start, [], []
        for _ in range(cursor.ahead):
            window = self.builder.make(sequence, start, split)
            trail.append((start, window.rows.tokens))
            parts.append(window.rows)
            start = window.next
        return WindowInput(start, tuple(trail), TokenRows.concat(parts).tail(cursor.carry))

    def _following(self, before: WindowInput, window: RowWindow, rows: TokenRows, samples: Samples) -> WindowInput:
        left = rows.tokens - samples.tokens if self.sampling.carries else 0
        if not left:
            return WindowInput(window.next)
        trail = [*before.trail, (before.start, window.rows.tokens)]
        while sum(tokens for _, tokens in trail[1:]) >= left:
            del trail[0]
        return WindowInput(window.next, tuple(trail), rows.tail(left))


class WindowMakers(Protocol):
    """Threads or processes that make windows."""

    @property
    def count(self) -> int:
        """Windows that are made at once."""
        ...

    def submit(
        self, sequence: BlockSequence, source: WindowInput | StreamCursor, split: OpenSplit, by: object
    ) -> Future[SampledWindow]:
        """Make a window, charged to the budget in the name of `by`; those of a stream one after the other."""
        ...

    def close(self) -> None: ...


class ThreadWindows:
    """Windows made by threads of this process."""

    def __init__(self, filler: WindowFiller, budget: MemoryBudget, threads: int | None) -> None:
        self._filler, self._budget, self._pool = filler, budget, Background(threads)

    @property
    def count(self) -> int:
        return self._pool.threads

    def submit(
        self, sequence: BlockSequence, source: WindowInput | StreamCursor, split: OpenSplit, by: object
    ) -> Future[SampledWindow]:
        def work() -> SampledWindow:
            charge = reserve(self._budget, self._filler.builder.limits.nbytes, by)
            try:
                window = keep(self._filler.fill(sequence, source, split), charge, self._budget)
            except BaseException:
                charge.release()
                raise
            if window.spilled is not None:
                split.rest(self._filler.builder.catalog)
                give_back_memory()
            return window

        return self._pool.submit(work)

    def close(self) -> None:
        self._pool.close()


def reserve(budget: MemoryBudget, nbytes: int, by: object) -> Reservation:
    """Charge for a window of so many bytes of input while it is made."""
    return budget.charge(making(nbytes), "streams", by=by)


def keep(window: SampledWindow, charge: Reservation, budget: MemoryBudget) -> SampledWindow:
    """A window that was just made, with its charge: in memory, or in a file if the windows take too much of that."""
    charge.resize(window.nbytes)
    if budget.used > budget.limit // _WAITING:
        window = window.spill()
        charge.resize(0)
    return replace(window, charge=charge)


def making(nbytes: int) -> int:
    """Memory that a window of so many bytes of input takes while it is made."""
    return _MAKING * nbytes


_ALIGNED = 64


class SpilledArrays:
    """Read-only arrays in a file without a name in the directory for temporary files, gone with the last of them."""

    def __init__(self, arrays: Sequence[npt.NDArray[Any] | None]) -> None:
        self._pages: mmap.mmap | None = None
        starts, end = [], 0
        with naming(tempfile.gettempdir()), tempfile.TemporaryFile(prefix="penstock-window-", buffering=0) as file:
            for array in arrays:
                starts.append(end)
                if array is not None and array.nbytes:
                    left = memoryview(np.ascontiguousarray(array)).cast("B")  # type: ignore[arg-type]
                    file.seek(end)
                    end += -(-left.nbytes // _ALIGNED) * _ALIGNED
                    while left:
                        left = left[file.write(left) :]
            if end:
                file.truncate(end)
                self._pages = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        self.arrays = [self._view(array, start) for array, start in zip(arrays, starts)]
        """The arrays that were given, in their order; None where none was."""

    def drop_pages(self) -> None:
        """Keep nothing of the file in the memory of this process: what was read stays there otherwise."""
        if self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)

    def _view(self, array: npt.NDArray[Any] | None, start: int) -> Any:
        if array is None or not array.nbytes or self._pages is None:
            return array
        return np.frombuffer(self._pages, array.dtype, array.size, start)
