"""A stream that is being read, and batches of the samples of several streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.batching.collate import BatchLayout, CompactBatch, collate_compact, width
from penstock.loaders.streamed.catalog import Catalog
from penstock.loaders.streamed.rows import TokenRows
from penstock.loaders.streamed.sampled_windows import SampledWindow, WindowInput, WindowMakers
from penstock.loaders.streamed.windows import BlockSequence, OpenSplit, StreamCursor, WindowCounts
from penstock.order.samples import Samples

Ints = npt.NDArray[np.int64]


class Stream:
    """One stream of one epoch, with its window and the next one made in the background.

    Samples are taken in order; `seek` goes to any cursor.
    """

    def __init__(
        self, sequence: BlockSequence, makers: WindowMakers, on_window: Callable[[WindowCounts], None] | None
    ) -> None:
        self._sequence, self._makers, self._on_window = sequence, makers, on_window
        self._split = OpenSplit()
        self._here: SampledWindow | None = None
        self._next: Future[SampledWindow] | None = None
        self._input: WindowInput | None = None
        """Input of the window at the cursor, if the one before it was read here."""
        self.cursor = StreamCursor() if len(sequence.blocks) else StreamCursor(ended=True)
        self.nbytes = 0
        """Size of the last window."""
        self.counting = True
        """True if windows are reported to `on_window`, if there is one: not when they are read again."""

    @property
    def left(self) -> int:
        """Samples that can be taken without waiting."""
        return len(self._here) - self.cursor.index if self._here is not None else 0

    @property
    def waiting(self) -> bool:
        """True if a window is being made, or is ready and not used yet."""
        return self._next is not None

    @property
    def over(self) -> bool:
        """True if the current window is the last."""
        return self.cursor.ended or (self._here is not None and self._here.following is None)

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
        self.cursor = StreamCursor() if len(self._sequence.blocks) else StreamCursor(ended=True)

    def begin(self) -> None:
        """Start to make the next window in the background, unless that has begun."""
        if self._next is not None or self.over:
            return
        here = self._here
        source = (self._input or self.cursor) if here is None else here.following
        if source is not None:
            self._next = self._makers.submit(self._sequence, source, self._split, self)

    def take(self) -> tuple[SampledWindow, int] | None:
        """The next sample, as a window and an index; None at the end."""
        while not self.cursor.ended:
            if self._here is None:
                self._here = self._awaited()
                self.nbytes = self._here.nbytes
                if self.counting and self._on_window is not None and not self.cursor.index:
                    self._on_window(self._here.counts)
            here, index = self._here, self.cursor.index
            if index < len(here):
                if index + 1 == len(here):
                    self._step_past(here)
                else:
                    at = here.cursor
                    self.cursor = StreamCursor(at.start, at.ahead, at.carry, index + 1)
                return here, index
            self._step_past(here)
        return None

    def close(self) -> None:
        self._drop()

    def _step_past(self, here: SampledWindow) -> None:
        here.release()
        self._here, self._input = None, here.following
        self.cursor = StreamCursor(ended=True) if here.following is None else here.following.cursor()

    def _awaited(self) -> SampledWindow:
        self.begin()
        assert self._next is not None
        work, self._next = self._next, None
        return work.result()

    def _drop(self) -> None:
        if self._next is not None:
            self._next.cancel()
            # It uses the open file, so the next window has to wait for it.
            if not self._next.cancelled() and self._next.exception() is None:
                self._next.result().release()
        if self._here is not None:
            self._here.release()
        self._next = self._here = self._input = None
        self._split.close()


@dataclass(frozen=True, slots=True)
class StreamLane:
    """Slots of the global batch and the streams that fill them: one slot and its streams, or one stream and its slots.

    The streams of a slot take turns. A stream that has ended is skipped, so a slot is empty only after the end of all
    its streams.
    """

    slots: range
    streams: range

    def due(self, step: int) -> int:
        """The stream whose turn it is."""
        return self.streams[step % len(self.streams)]

    def read(self, step: int, streams: dict[int, Stream]) -> list[tuple[SampledWindow, int]]:
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


class MemoryTokens:
    """Token table of a batch: parts of rows of several windows, by number."""

    def __init__(self, windows: Sequence[TokenRows], owners: Ints, begins: Ints, *, masked: bool) -> None:
        self._windows, self._owners, self._begins, self._masked = windows, owners, begins, masked
        kinds = {window.ids.values.dtype for window in windows}
        self.dtype = kinds.pop() if len(kinds) == 1 else np.dtype(np.int64)

    @property
    def masked(self) -> bool:
        return self._masked

    def copy(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[Any], at: Ints) -> None:
        for number, begin, size, target in self._slices(rows, starts, lengths, at):
            out[target : target + size] = self._windows[number].ids.values[begin : begin + size]

    def copy_mask(self, rows: Ints, starts: Ints, lengths: Ints, out: npt.NDArray[np.bool_], at: Ints) -> None:
        for number, begin, size, target in self._slices(rows, starts, lengths, at):
            mask = self._windows[number].mask
            out[target : target + size] = True if mask is None else mask[begin : begin + size]

    def _slices(self, rows: Ints, starts: Ints, lengths: Ints, at: Ints) -> list[tuple[int, int, int, int]]:
        """Slices to copy, as (window, begin, size, target); adjacent ones are joined."""
        if not len(rows):
            return []
        owners, begins = self._owners[rows], self._begins[rows] + starts
        follows = (owners[1:] == owners[:-1]) & (begins[1:] == begins[:-1] + lengths[:-1])
        follows &= at[1:] == at[:-1] + lengths[:-1]
        heads = np.flatnonzero(np.concatenate([[True], ~follows]))
        sizes = np.add.reduceat(lengths, heads)
        return list(zip(owners[heads].tolist(), begins[heads].tolist(), sizes.tolist(), at[heads].tolist()))


def collate_samples(
    taken: Sequence[tuple[SampledWindow, int]], catalog: Catalog, form: BatchLayout, *, masked: bool
) -> tuple[CompactBatch, dict[str, Any], int]:
    """A batch, the origin of each of its parts, and its tokens without padding."""
    made = CollatedSamples(taken, form, masked=masked)
    return made.compact, _provenance(made.numbered, catalog, form, made.blocks, made.places), made.tokens


class CollatedSamples:
    """Batch of samples of any windows, and the places of its parts in the input."""

    def __init__(
        self, taken: Sequence[tuple[SampledWindow, int]], form: BatchLayout, *, masked: bool, columns: int | None = None
    ) -> None:
        runs = _runs(taken)
        parts = [window.samples.slice(low, high) for window, low, high in runs]
        samples = Samples.concat(parts)
        none = np.zeros(0, np.int64)
        owners = np.repeat(np.arange(len(runs)), [len(part.rows) for part in parts])
        windows = [window.rows for window, _, _ in runs]
        begins = np.concatenate([none, *(window.ids.offsets[part.rows] for window, part in zip(windows, parts))])
        table = MemoryTokens(windows, owners, begins + samples.starts, masked=masked)
        self.blocks = np.concatenate([none, *(window.blocks[part.rows] for window, part in zip(windows, parts))])
        self.places = np.concatenate([none, *(window.places[part.rows] for window, part in zip(windows, parts))])
        self.tokens = samples.tokens
        count = len(owners)
        # For the collator the rows are the numbers of the parts.
        self.numbered = Samples(samples.offsets, np.arange(count), np.zeros(count, np.int64), samples.lengths)
        columns = width(self.numbered, form) if columns is None else columns
        self.compact = collate_compact(self.numbered, np.zeros(count, np.int64), [table], form, columns)


def _runs(taken: Sequence[tuple[SampledWindow, int]]) -> list[tuple[SampledWindow, int, int]]:
    """Neighbouring samples of one window together."""
    runs: list[tuple[SampledWindow, int, int]] = []
    for window, index in taken:
        if runs and runs[-1][0] is window and runs[-1][2] == index:
            runs[-1] = (window, runs[-1][1], index + 1)
        else:
            runs.append((window, index, index + 1))
    return runs


def _provenance(samples: Samples, catalog: Catalog, form: BatchLayout, blocks: Ints, places: Ints) -> dict[str, Any]:
    names, source, rows = catalog.origins(blocks, places)
    unknown = np.full(len(places), -1, np.int64)
    return {
        "sources": names,
        "source": source,
        "row": unknown if catalog.by_bytes else rows,
        "offset": rows if catalog.by_bytes else unknown,
        "sample": samples.rows if form.split else samples.numbers(),
    }
