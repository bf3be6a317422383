"""A dataset as a source of the engine: ranges of rows are cut, and the workers fetch them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import pyarrow as pa

from penstock.errors import ConfigError, DataError, PenstockError, ResumeError, StageError, StoppedError
from penstock.files.states import StateFormat
from penstock.loaders._samplestream.packing import pack
from penstock.loaders._samplestream.sizing import rest_of, rough_bytes, with_rest
from penstock.loaders._samplestream.window import Window
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected, Source, State
from penstock.sources.memory import MemorySource
from penstock.sources.opening import open_source

__all__ = ["IterableSource", "SampleSource", "source_of"]

log = logging.getLogger(__name__)

_SAMPLES_STATE = StateFormat("samples", "a dataset of samples")
_ITERABLE_STATE = StateFormat("samples of an iterable", "an iterable of samples")
_SIGN_OF_LIFE_SECONDS = 20.0
"""How long a source waits for room before it shows the engine, which takes silence for a hang, that it is alive."""
_SURPRISE = 4
"""How many times what was reserved for it a chunk may turn out to take before it is cut short."""
_LATE_ROWS = 16
"""Rows fetched at a time of those that were cut off."""
_PASS_ON_SECONDS = 0.05
"""A chunk of an iterable that has been gathered for longer is passed on as it is."""
_MOST_BYTES = 16 << 20
_END = object()


def source_of(dataset: Any, chunk_size: int, on_error: Literal["raise", "skip"]) -> Source:
    """The source for what somebody wants streamed."""
    if callable(getattr(dataset, "next_batch", None)):
        return cast(Source, dataset)
    if isinstance(dataset, (str, os.PathLike)):
        return open_source(dataset)
    if isinstance(dataset, Mapping) or hasattr(dataset, "__arrow_c_stream__") or hasattr(dataset, "__arrow_c_array__"):
        return MemorySource(dataset)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return SampleSource(dataset, chunk_size, on_error=on_error)
    if callable(dataset) or isinstance(dataset, Iterable):
        return IterableSource(dataset, chunk_size)
    raise ConfigError(
        f"cannot stream a {type(dataset).__name__}; give something with __len__ and __getitem__, an iterable, a table, "
        "a path, or a Source"
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows that a worker is to fetch, for which run, and how many bytes they may turn out to take."""

    rows: range
    allowed: int
    window: Window


class SampleSource(Source):
    """Anything with `__len__` and `__getitem__`, in the order of its rows; any number of workers fetch at once.

    A chunk is `chunk_size` rows, or fewer if those are large; the first is a single one, by which rows are measured.
    One that turns out much larger than rows were so far is cut short: `late` fetches the rest for whoever iterates.
    """

    def __init__(self, dataset: Any, chunk_size: int, *, on_error: Literal["raise", "skip"] = "raise") -> None:
        self._dataset, self._chunk_size, self._on_error = dataset, chunk_size, on_error
        self._name = type(dataset).__name__
        self._rows = len(dataset)
        self._row = 0
        self._row_bytes = 0.0
        self._allowed = _MOST_BYTES
        self._counting = threading.Lock()
        self.skipped: Counter[str] = Counter()
        """Rows left out of what was fetched so far, by reason."""
        self.window = Window(1 << 62)
        """Set by whoever limits how many samples are on their way."""

    def size_hint(self) -> int | None:
        return self._rows

    def next_block(self, max_bytes: int) -> Block | None:
        if self._row >= self._rows:
            return None
        start, window = self._row, self.window
        count = self._count(max_bytes)
        if not window.take(count, _SIGN_OF_LIFE_SECONDS):
            return None if window.closed else Block(Origin(self._name, start), _Chunk(range(0), 0, window), 0)
        if count > (now := self._count(max_bytes)):  # rows have turned out larger while there was no room
            window.give(count - now)
            count = now
        self._row += count
        rows = range(start, start + count)
        if not self._row_bytes:
            first = self._fetch(_Chunk(rows, _MOST_BYTES, window))
            return Block(Origin(self._name, start), first, first.batch.nbytes)
        # No row is there yet, so this is what room is made for; not less than a share of what a chunk may take, or
        # rows that grow would take a multiple of it that says nothing about the next ones.
        chunks = -(-window.most // self._chunk_size)
        expected = max(int(count * self._row_bytes), 8 * max_bytes // max(8, chunks))
        self._allowed = _SURPRISE * expected
        return Block(Origin(self._name, start), _Chunk(rows, self._allowed, window), expected)

    def decode(self, block: Block) -> Decoded:
        if isinstance(block.data, Decoded):
            return block.data
        try:
            return self._fetch(block.data)
        except BaseException:
            block.data.window.close()  # nothing behind it will be asked for, and who waits for room need not wait
            raise

    def late(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """What belongs behind a batch that was cut short, a few rows at a time, made as it is asked for."""
        rows, window = rest_of(batch), self.window
        while rows:
            part = self._fetch(_Chunk(rows[:_LATE_ROWS], self._allowed, window)).batch
            rest = rest_of(part)
            rows = range(rest.start if rest else rows[:_LATE_ROWS].stop, rows.stop)
            yield part

    def offset_of(self, block: Block, row: int) -> int | None:
        return None

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self._rows:
            return None
        start = self._row
        self._row = min(self._rows, start + min(max_rows, self._chunk_size))
        return self._fetch(_Chunk(range(start, self._row), 1 << 62, self.window)).batch

    def reset(self) -> None:
        """Back to the first row."""
        self._row, self._rows = 0, len(self._dataset)
        self.skipped.clear()

    def state_dict(self) -> State:
        return _SAMPLES_STATE.write({"row": self._row, "rows": self._rows})

    def load_state_dict(self, state: State) -> None:
        state = _SAMPLES_STATE.read(state)
        if state["rows"] != self._rows:
            raise ResumeError(
                f"the state was saved over {state['rows']} rows of {self._name}, there are {self._rows} now"
            )
        self._row = state["row"]

    def __repr__(self) -> str:
        return f"{self._name}({self._rows} samples)"

    def _count(self, max_bytes: int) -> int:
        """Rows of the next chunk, by what rows have taken so far."""
        if not self._row_bytes:
            return 1
        return max(1, min(self._chunk_size, int(max_bytes / self._row_bytes), self._rows - self._row))

    def _fetch(self, chunk: _Chunk) -> Decoded:
        rejected: list[Rejected] = []
        rest = chunk.rows
        while True:
            samples, kept, rest = self._gather(rest, chunk, rejected)
            batch = self._packed(samples, kept, rejected)
            if batch.num_rows or not rest:  # nobody would look at the rest of a batch without rows
                break
        if batch.num_rows:
            size = batch.nbytes / batch.num_rows
            # Any worker may come by; one that comes too late costs a chunk that is a little too large.
            self._row_bytes = max(size, 0.9 * self._row_bytes + 0.1 * size, 1.0)
        if rejected:
            chunk.window.give(len(rejected))
        rows = tuple(row - chunk.rows.start for row in kept) if rejected else None
        return Decoded(with_rest(batch, rest) if rest else batch, tuple(rejected), rows)

    def _gather(self, rows: range, chunk: _Chunk, rejected: list[Rejected]) -> tuple[list[Any], list[int], range]:
        """Samples, their rows, and the rows that are left because the samples were large."""
        samples: list[Any] = []
        kept: list[int] = []
        nbytes, window, me, begun = 0, chunk.window, threading.get_ident(), time.monotonic()
        try:
            for row in rows:
                if window.stopped:
                    raise StoppedError("the pipeline was stopped before the end of its input")
                window.fetching[me] = (begun, time.monotonic(), self._name, row)
                try:
                    sample = self._sample(row)
                except Exception as error:
                    if self._on_error == "raise":
                        raise
                    rejected.append(self._rejected(row, error))
                    continue
                samples.append(sample)
                kept.append(row)
                nbytes += rough_bytes(sample)
                if nbytes > chunk.allowed:
                    return samples, kept, range(row + 1, rows.stop)
        finally:
            window.fetching.pop(me, None)
        return samples, kept, range(0)

    def _sample(self, row: int) -> Any:
        try:
            return self._dataset[row]
        except PenstockError:
            raise
        except Exception as error:
            raise StageError(
                f"{type(error).__name__}: {error}", stage="__getitem__", file=self._name, row=row
            ) from error

    def _packed(self, samples: list[Any], kept: list[int], rejected: list[Rejected]) -> pa.RecordBatch:
        try:
            return pack(samples, where=self._name, rows=kept)
        except DataError:
            if self._on_error == "raise":
                raise
        good = [self._alone(sample, row, rejected) for sample, row in zip(samples, kept, strict=True)]
        samples = [sample for sample, fits in zip(samples, good, strict=True) if fits]
        kept[:] = [row for row, fits in zip(kept, good, strict=True) if fits]
        return pack(samples, where=self._name, rows=kept)

    def _alone(self, sample: Any, row: int, rejected: list[Rejected]) -> bool:
        try:
            pack([sample], where=self._name, rows=[row])
        except DataError as error:
            rejected.append(self._rejected(row, error))
            return False
        return True

    def _rejected(self, row: int, error: Exception) -> Rejected:
        kind = type(error.__cause__ or error).__name__
        with self._counting:
            first = not self.skipped[kind]
            self.skipped[kind] += 1
        if first:
            log.warning(
                "row %d of %s is left out, and so is every other with such an error: %s", row, self._name, error
            )
        return Rejected(self._name, row, None, "__getitem__", kind, str(error))


class IterableSource(Source):
    """Samples of any iterable, or of a function that makes one, `chunk_size` at a time; one thread makes them all.

    What is gathered waits no longer for more than a twentieth of a second, or for the sample that is being made.
    Resuming passes over the samples before the saved one, so it costs as much as making them.
    """

    def __init__(self, items: Iterable[Any] | Callable[[], Iterable[Any]], chunk_size: int) -> None:
        self._items, self._chunk_size = items, chunk_size
        self._name = getattr(items, "__name__", type(items).__name__)
        self._iterator: Iterator[Any] | None = None
        self._row = self._first_row = 0
        self._allowed = _MOST_BYTES
        self._ended = False
        self.window = Window(1 << 62)

    def fit_budget(self, nbytes: int) -> None:
        """What a chunk may take: room was made for rows like those before it, and these may be larger."""
        self._allowed = min(_MOST_BYTES, nbytes // 32)

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._ended:
            return None
        window, first = self.window, self._row
        count = min(max_rows, self._chunk_size) if first else 1
        if not window.take(count, _SIGN_OF_LIFE_SECONDS):
            return None if window.closed else pack([], where=self._name, rows=())
        samples, ended = self._gather(count, window)
        if window.stopped:  # by now this may be another run's source
            return None
        self._first_row, self._row, self._ended = first, first + len(samples), ended
        window.give(count - len(samples))
        return pack(samples, where=self._name, rows=range(first, self._row)) if samples else None

    def origin(self) -> Origin | None:
        return Origin(self._name, self._first_row)

    def reset(self) -> None:
        """Back to the first sample."""
        if self._iterator is not None and isinstance(self._items, Iterator):
            raise ConfigError(
                f"{self._name} is an iterator and runs only once: give a function that makes it, or a list"
            )
        self._iterator, self._row, self._ended = None, 0, False

    def state_dict(self) -> State:
        return _ITERABLE_STATE.write({"row": self._row})

    def load_state_dict(self, state: State) -> None:
        state = _ITERABLE_STATE.read(state)
        self.reset()
        for _ in range(state["row"]):
            if self.window.stopped:
                raise StoppedError("the pipeline was stopped before it came to where it was to go on")
            if next(self._open(), _END) is _END:
                raise ResumeError(f"the state was saved at sample {state['row']}, {self._name} ended after {self._row}")
            self._row += 1

    def __repr__(self) -> str:
        return f"IterableSource({self._name})"

    def _gather(self, count: int, window: Window) -> tuple[list[Any], bool]:
        """The next samples, and whether they are the last."""
        samples: list[Any] = []
        nbytes, me, since = 0, threading.get_ident(), time.monotonic()
        now = since
        try:
            while len(samples) < count and nbytes <= self._allowed and now - since <= _PASS_ON_SECONDS:
                if window.stopped:
                    break
                window.fetching[me] = (since, now, self._name, self._row + len(samples))
                sample = next(self._open(), _END)
                if sample is _END:
                    return samples, True
                samples.append(sample)
                nbytes += rough_bytes(sample)
                now = time.monotonic()
        except PenstockError:
            raise
        except Exception as error:
            raise StageError(
                f"{type(error).__name__}: {error}", stage="iterating", file=self._name, row=self._row + len(samples)
            ) from error
        finally:
            window.fetching.pop(me, None)
        return samples, False

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._items() if callable(self._items) else self._items)
        return self._iterator
