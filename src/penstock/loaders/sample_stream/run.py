"""One run of a stream: threads ahead of the loop, room for what they make, pace, and where the loop stands."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

import pyarrow as pa

from penstock.errors import ConfigError, DataError, PenstockError, ResumeError, StageError, StoppedError
from penstock.files.states import StateFormat
from penstock.loaders.sample_stream.arrow import is_packed, pack, unpack
from penstock.loaders.sample_stream.pace import RateLimit
from penstock.memory import format_bytes
from penstock.pipeline.metrics import StageMetrics, bottleneck
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.prefetch import ReadAhead
from penstock.pipeline.stages import Block, Decoded, Origin, Rejected, Source, State
from penstock.sources.by_suffix import open_source
from penstock.sources.memory import MemorySource
from penstock.types import to_rows

__all__ = [
    "IterableSource",
    "Run",
    "SampleSource",
    "SampleWindow",
    "buffer_hint",
    "engine_state",
    "rest_of",
    "rough_bytes",
    "source_of",
    "why_waiting",
    "with_rest",
]


_REST = b"penstock.rest"
_SMALL = 8
_NUMBERS = frozenset((int, float, bool, type(None)))
_LOOKED_AT = 4
"""Items of a long list, at either end, that stand for the others."""
_DEEPEST = 4
"""Below that nothing is looked at: a value may contain itself."""


def rough_bytes(value: Any, depth: int = 0) -> int:
    """Right for arrays, texts and bytes; long lists are taken to have items like the first and the last ones."""
    kind = type(value)
    if kind in _NUMBERS or depth > _DEEPEST:
        return _SMALL
    if kind is str or kind is bytes:
        return len(value)
    if kind is dict:
        depth += 1
        nbytes = 0
        for each in value.values():
            nbytes += rough_bytes(each, depth)
        return nbytes
    if kind is list or kind is tuple:
        return _of_items(value, depth + 1)
    known = getattr(value, "nbytes", None)
    if known is not None:
        return int(known)
    return rough_bytes(dict(value), depth) if isinstance(value, Mapping) else _SMALL


def with_rest(batch: pa.RecordBatch, rows: range) -> pa.RecordBatch:
    """The batch, with a note that `rows` of the dataset belong behind it and are still to be fetched."""
    note = f"{rows.start} {rows.stop}".encode()
    return batch.replace_schema_metadata({**(batch.schema.metadata or {}), _REST: note})


def rest_of(batch: pa.RecordBatch) -> range:
    """The rows of the dataset that belong behind the batch; mostly none."""
    note = (batch.schema.metadata or {}).get(_REST)
    return range(*map(int, note.split())) if note is not None else range(0)


def _of_items(items: Sequence[Any], depth: int) -> int:
    if len(items) > 2 * _LOOKED_AT:
        if type(items[0]) in _NUMBERS and type(items[-1]) in _NUMBERS:
            return _SMALL * len(items)
        looked_at = [*items[:_LOOKED_AT], *items[-_LOOKED_AT:]]
        return sum(rough_bytes(each, depth) for each in looked_at) * len(items) // len(looked_at)
    return sum(rough_bytes(each, depth) for each in items)


class SampleWindow:
    """Room for `most` samples, of one run. Closing it wakes whoever waits, and there is no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_flight = 0
        self.peak = 0
        self.stopped = False
        """Whether nobody wants samples any more: who makes them looks at it before each."""
        self.fetching: dict[int, tuple[float, float, str, int]] = {}
        """Thread -> since when it makes a chunk, since when a sample of it, of what, and which."""
        self._waited: tuple[float, float | None] = (0.0, None)
        """Seconds of the waits that are over, and since when the source waits now: one value, read by any thread."""
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waited(self) -> float:
        """Seconds that the source has waited for room, up to now."""
        seconds, since = self._waited
        return seconds if since is None else seconds + time.monotonic() - since

    def longest_fetch(self) -> tuple[float, str, int] | None:
        """Seconds that somebody has been making one sample by now, of what, and which."""
        now = time.monotonic()
        return max(((now - since, name, row) for _, since, name, row in list(self.fetching.values())), default=None)

    def unfinished(self) -> float:
        """Seconds spent so far on chunks that are not done."""
        now = time.monotonic()
        return sum(now - begun for begun, _, _, _ in list(self.fetching.values()))

    def take(self, count: int, timeout: float) -> bool:
        """Wait until `count` more fit; False if that was in vain: the time is up, or the window is closed."""
        with self._changed:
            self._waited = (self._waited[0], time.monotonic())
            room = self._changed.wait_for(lambda: self._closed or self.in_flight + count <= self.most, timeout)
            self._waited = (self.waited, None)
            if self._closed or not room:
                return False
            self.in_flight += count
            self.peak = max(self.peak, self.in_flight)
            return True

    def give(self, count: int) -> None:
        with self._changed:
            self.in_flight -= count
            self._changed.notify_all()

    def close(self) -> None:
        """No more room for anybody; what is on its way still comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Close it, and what is on its way is not wanted either."""
        self.stopped = True
        self.close()


_LONG_SECONDS = 0.5
"""A sample that takes longer is named."""
_MUCH = 0.3
"""The share of the time from which something is worth naming."""


def why_waiting(snapshot: Mapping[str, Any], window: SampleWindow | None, hint: str | None) -> str:
    """What a loop waits for that is not the one that sets the pace. `hint`: what `buffer_hint` says."""
    fetch = window.longest_fetch() if window is not None else None
    if fetch is not None and fetch[0] >= _LONG_SECONDS:
        seconds, name, row = fetch
        return f"row {row} of {name} has been in the making for {seconds:.1f} s"
    stages = [_measured(stage) for stage in snapshot.get("stages", ())]
    if not stages:
        return "nothing has been read yet"
    source, *working, sink = stages
    seconds = snapshot["seconds"]
    if window is not None:
        if hint is not None and window.waited >= _MUCH * seconds:
            return hint
        # For the engine the source is at work while it waits for room in our window.
        source.busy = max(0.0, source.busy - window.waited)
        # And it counts a chunk when that is done.
        (working or [source])[0].busy += window.unfinished()
    loads = [source.utilisation(seconds), *(stage.utilisation(seconds) for stage in working)]
    if source.batches and max(loads) < _MUCH:
        if source.wait_room >= _MUCH * seconds:
            memory = snapshot["memory"]
            return f"the budget is full: {format_bytes(memory['used'])} of {format_bytes(memory['limit'])} are in use"
        name = max(zip(loads, stages[:-1], strict=True), key=lambda load: load[0])[1].name
        return f"the loop waits for samples, though no stage is busy: {name} is most, {max(loads):.0%} of the time"
    return bottleneck(source, working, sink, seconds)


def buffer_hint(buffer_size: int, chunk_size: int, num_workers: int) -> str | None:
    """What to change if the buffer has no room for a chunk of every worker; None if it has."""
    chunks = buffer_size // chunk_size
    if chunks >= num_workers:
        return None
    smaller = f", or chunk_size at most {buffer_size // num_workers}" if buffer_size >= num_workers else ""
    return (
        f"buffer_size={buffer_size} has room for {chunks} chunk{'s' * (chunks != 1)} of chunk_size={chunk_size}, so "
        f"only {chunks} of {num_workers} workers can be busy; make buffer_size at least {chunk_size * num_workers}"
        f"{smaller}"
    )


def _measured(stage: Mapping[str, Any]) -> StageMetrics:
    found = StageMetrics(stage["name"], stage["kind"])
    found.busy, found.threads, found.batches = stage["busy_seconds"], stage["threads"], stage["batches"]
    found.wait_room = stage["wait_room_seconds"]
    return found


log = logging.getLogger("penstock.loaders.streaming")

_T = TypeVar("_T")
_SLICE_ROWS = 32
"""Samples made at once from a chunk: as Python objects they are several times as large as in Arrow."""
_LOOK_SECONDS = 0.25
"""How often a loop that waits looks whether it is behind."""
_GRACE_SECONDS = 6.0
"""How long `stop` waits at most: a little longer than the engine waits for its threads."""


class Run:
    """One run: its threads, its window, its pace."""

    def __init__(
        self,
        pipeline: Pipeline,
        position: State,
        *,
        buffer_size: int,
        target: float | None,
        hint: str | None,
        clock: Callable[[], float],
        sleep: Callable[[float], object] | None,
    ) -> None:
        self._pipeline = pipeline
        self._stopped = threading.Event()
        self._signs = _Signs()
        self._window = SampleWindow(buffer_size)
        weakref.finalize(self, self._window.stop).atexit = False
        self._source = pipeline.source if isinstance(pipeline.source, (SampleSource, IterableSource)) else None
        if self._source is not None:
            self._source.window = self._window
        self._hint = hint if isinstance(self._source, SampleSource) else None
        self._pace = RateLimit(target, clock, sleep or self._stopped.wait, self._report_behind)
        self._before = position["pipeline"]
        """The engine's state before the chunk that is handed out, of which `_taken` samples are."""
        self._taken = self._skip = position["skip"]
        self._samples_before = position["samples"]
        self._final: dict[str, Any] | None = None
        self._ahead = ReadAhead(
            _chunks(pipeline, self._signs), 1, budget=pipeline.budget, size=lambda chunk: int(chunk[0].nbytes)
        )

    def samples(self) -> Generator[Any]:
        skip = self._skip
        self._pace.begin()
        while (chunk := self._waited_for(self._next)) is not None:
            first, after = chunk
            for batch in self._whole(first):
                skipped = min(skip, batch.num_rows)
                skip -= skipped
                self._window.give(skipped)
                for start in range(skipped, batch.num_rows, _SLICE_ROWS):
                    part = batch.slice(start, _SLICE_ROWS)
                    for sample in unpack(part) if is_packed(part) else to_rows(part):
                        self._pace.step()
                        if self._stopped.is_set():
                            return
                        self._taken += 1
                        yield sample
                    self._window.give(part.num_rows)
            if self._stopped.is_set():
                return  # perhaps while the end of the chunk was being made
            # A state may be asked for between two samples, so it moves on with the chunk that is done.
            self._before, self._taken = after, skip

    def _whole(self, batch: pa.RecordBatch) -> Generator[pa.RecordBatch]:
        """A chunk, and behind it what it was cut short of."""
        late = self._source.late(batch) if isinstance(self._source, SampleSource) else iter(())
        part: pa.RecordBatch | None = batch
        while part is not None:
            self._pipeline.budget.hold("samples", part.nbytes, by=self)
            yield part
            part = self._waited_for(lambda: next(late, None))

    def _next(self) -> tuple[pa.RecordBatch, State | None] | None:
        while not self._signs.made.acquire(timeout=_LOOK_SECONDS):
            self._pace.look()
        return next(self._ahead, None)

    def _waited_for(self, get: Callable[[], _T]) -> _T | None:
        self._pace.wait()
        try:
            return get()
        except StoppedError:
            if self._stopped.is_set():
                return None
            raise
        finally:
            self._pace.got()
            self._pipeline.budget.hold("samples", 0, by=self)

    def stop(self) -> None:
        """End and join every thread, unless one does not come back; idempotent."""
        if sys.is_finalizing():
            return  # threads stand still where they were, locks in their hands, and nobody will see them end
        if self._final is None:
            self._pace.end()
            self._final = self.stats()
        self._stopped.set()
        self._ahead.stop()
        self._window.stop()
        self._signs.made.release()
        # The thread that runs the engine may have yet to begin with it: only from then on there is something to stop.
        until = time.monotonic() + _GRACE_SECONDS
        while True:
            self._pipeline.stop()
            if self._signs.ended.wait(0.05):
                self._ahead.close()
                break
            if time.monotonic() > until:
                log.warning("%r is still busy after %.1f s and is left behind", self._pipeline.source, _GRACE_SECONDS)
                break
        self._pipeline.budget.hold("samples", 0, by=self)

    def position(self) -> State:
        """Where the loop stands: the engine's state, and what was taken of the chunk behind it."""
        samples = self._samples_before + self._pace.samples
        return {"pipeline": self._before, "skip": self._taken, "samples": samples}

    def stats(self) -> dict[str, Any]:
        if self._final is not None:
            return {**self._final, "running": False}
        pace, snapshot = self._pace, self._pipeline.snapshot()
        behind = pace.behind
        return {
            "running": True,
            "samples": pace.samples,
            "seconds": pace.seconds,
            "samples_per_sec": pace.overall,
            "recent_samples_per_sec": pace.recent,
            "target_throughput": pace.target,
            "behind": behind,
            "reason": self._reason(snapshot, behind),
            "waited_seconds": pace.waited,
            "paced_seconds": pace.paced,
            "in_flight": self._window.in_flight if self._source is not None else None,
            "skipped": dict(getattr(self._pipeline.source, "skipped", {})),
            "pipeline": snapshot,
        }

    def _reason(self, snapshot: Mapping[str, Any], behind: bool | None) -> str:
        if behind is False:
            return f"the target of {self._pace.target:g} samples a second is met"
        share = self._pace.wait_share
        if share < 0.5:
            return f"the loop that takes the samples is busy {1 - share:.0%} of the time"
        return why_waiting(snapshot, self._window if self._source is not None else None, self._hint)

    def _report_behind(self) -> None:
        reason = self._reason(self._pipeline.snapshot(), True)
        log.warning(
            "streaming %.1f samples a second, fewer than the %g asked for: %s",
            self._pace.recent,
            self._pace.target,
            reason,
        )


class _Signs:
    """What the thread that runs the engine tells whoever waits for it."""

    def __init__(self) -> None:
        self.made = threading.Semaphore(0)
        """One for each chunk, and one for the end."""
        self.ended = threading.Event()


def _chunks(pipeline: Pipeline, signs: _Signs) -> Generator[tuple[pa.RecordBatch, State | None]]:
    """The engine's batches, each with the engine's state behind it. Knows no run, so that one may be forgotten."""
    try:
        for batch in pipeline:
            signs.made.release()
            yield batch, engine_state(pipeline)
    finally:
        signs.ended.set()
        signs.made.release()


def engine_state(pipeline: Pipeline) -> State | None:
    """None where the source has no state."""
    try:
        return pipeline.state_dict()
    except ResumeError:
        return None


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
    window: SampleWindow


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
        self.window = SampleWindow(1 << 62)
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
        self.window = SampleWindow(1 << 62)

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

    def _gather(self, count: int, window: SampleWindow) -> tuple[list[Any], bool]:
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
