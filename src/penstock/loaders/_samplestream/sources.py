"""A dataset as a source of the engine: ranges of rows are cut, and the workers fetch them."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, cast

import pyarrow as pa

from penstock.errors import ConfigError, DataError, PenstockError, ResumeError, StageError
from penstock.loaders._samplestream.packing import pack
from penstock.loaders._samplestream.window import Window
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected, Source, State
from penstock.sources.memory import MemorySource
from penstock.sources.opening import open_source

__all__ = ["IterableSource", "SampleSource", "source_of"]

log = logging.getLogger(__name__)

_SIGN_OF_LIFE_SECONDS = 20.0
"""How long a source waits for room before it shows the engine, which takes silence for a hang, that it is alive."""
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


class SampleSource(Source):
    """Anything with `__len__` and `__getitem__`, in the order of its rows; any number of workers fetch at once.

    A chunk is `chunk_size` rows, or fewer if those are large; the first is a single one, by which rows are measured.
    """

    def __init__(self, dataset: Any, chunk_size: int, *, on_error: Literal["raise", "skip"] = "raise") -> None:
        self._dataset, self._chunk_size, self._on_error = dataset, chunk_size, on_error
        self._name = type(dataset).__name__
        self._rows = len(dataset)
        self._row = 0
        self._row_bytes = 0.0
        self._counting = threading.Lock()
        self.skipped: Counter[str] = Counter()
        """Rows left out of what was fetched so far, by reason."""
        self.window: Window | None = None
        """Set by whoever limits how many samples are on their way."""

    def size_hint(self) -> int | None:
        return self._rows

    def next_block(self, max_bytes: int) -> Block | None:
        if self._row >= self._rows:
            return None
        start = self._row
        count = 1
        if self._row_bytes:
            count = max(1, min(self._chunk_size, int(max_bytes / self._row_bytes), self._rows - start))
        if self.window is not None and not self.window.take(count, _SIGN_OF_LIFE_SECONDS):
            return None if self.window.closed else Block(Origin(self._name, start), range(start, start), 0)
        self._row += count
        rows = range(start, start + count)
        data = rows if self._row_bytes else self._fetch(rows)
        return Block(Origin(self._name, start), data, int(count * self._row_bytes))

    def decode(self, block: Block) -> Decoded:
        try:
            return block.data if isinstance(block.data, Decoded) else self._fetch(block.data)
        except BaseException:
            if self.window is not None:
                self.window.close()  # nothing behind it will be asked for, and who waits for room need not wait
            raise

    def offset_of(self, block: Block, row: int) -> int | None:
        return None

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._row >= self._rows:
            return None
        start = self._row
        self._row = min(self._rows, start + min(max_rows, self._chunk_size))
        return self._fetch(range(start, self._row)).batch

    def reset(self) -> None:
        """Back to the first row."""
        self._row, self._rows = 0, len(self._dataset)
        self.skipped.clear()

    def state_dict(self) -> State:
        return {"row": self._row, "rows": self._rows}

    def load_state_dict(self, state: State) -> None:
        if state["rows"] != self._rows:
            raise ResumeError(
                f"the state was saved over {state['rows']} rows of {self._name}, there are {self._rows} now"
            )
        self._row = state["row"]

    def __repr__(self) -> str:
        return f"{self._name}({self._rows} samples)"

    def _fetch(self, rows: range) -> Decoded:
        samples: list[Any] = []
        kept: list[int] = []
        rejected: list[Rejected] = []
        for row in rows:
            try:
                samples.append(self._sample(row))
                kept.append(row)
            except Exception as error:
                if self._on_error == "raise":
                    raise
                rejected.append(self._rejected(row, error))
        batch = self._packed(samples, kept, rejected)
        if batch.num_rows:
            size = batch.nbytes / batch.num_rows
            # Any worker may come by; one that comes too late costs a chunk that is a little too large.
            self._row_bytes = max(size, 0.9 * self._row_bytes + 0.1 * size, 1.0)
        if self.window is not None and rejected:
            self.window.give(len(rejected))
        return Decoded(batch, tuple(rejected), tuple(row - rows.start for row in kept) if rejected else None)

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

    Resuming passes over the samples before the saved one, so it costs as much as making them.
    """

    def __init__(self, items: Iterable[Any] | Callable[[], Iterable[Any]], chunk_size: int) -> None:
        self._items, self._chunk_size = items, chunk_size
        self._name = getattr(items, "__name__", type(items).__name__)
        self._iterator: Iterator[Any] | None = None
        self._row = self._first_row = 0
        self._ended = False
        self.window: Window | None = None

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        if self._ended:
            return None
        count = min(max_rows, self._chunk_size) if self._row else 1
        if self.window is not None and not self.window.take(count, _SIGN_OF_LIFE_SECONDS):
            return None if self.window.closed else pack([], where=self._name, rows=())
        self._first_row = self._row
        samples = []
        for sample in self._taken(count):
            samples.append(sample)
            self._row += 1
        if self.window is not None:
            self.window.give(count - len(samples))
        self._ended = len(samples) < count
        return pack(samples, where=self._name, rows=range(self._first_row, self._row)) if samples else None

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
        return {"row": self._row}

    def load_state_dict(self, state: State) -> None:
        self.reset()
        for _ in range(state["row"]):
            if next(self._open(), _END) is _END:
                raise ResumeError(f"the state was saved at sample {state['row']}, {self._name} ended after {self._row}")
            self._row += 1

    def __repr__(self) -> str:
        return f"IterableSource({self._name})"

    def _taken(self, count: int) -> Iterator[Any]:
        try:
            yield from islice(self._open(), count)
        except PenstockError:
            raise
        except Exception as error:
            raise StageError(
                f"{type(error).__name__}: {error}", stage="iterating", file=self._name, row=self._row
            ) from error

    def _open(self) -> Iterator[Any]:
        if self._iterator is None:
            self._iterator = iter(self._items() if callable(self._items) else self._items)
        return self._iterator
