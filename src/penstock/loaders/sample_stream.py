"""One run of a stream of samples: threads that fetch ahead of the loop, the rate limit, and the loop's position."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from penstock._amounts import counted
from penstock._forks import check_process
from penstock.batching.backends.lookup import evaluate
from penstock.errors import ConfigError, DataError, PenstockError, ResumeError, StageError, StalledError, StoppedError
from penstock.loaders.rate_limit import RateLimit
from penstock.loaders.samples.datasets import own_arrays
from penstock.memory import MemoryBudget, format_bytes, object_nbytes
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.context import StopEvent
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.prefetch import ReadAhead, WorkAhead
from penstock.pipeline.stages import Source
from penstock.sources.by_suffix import open_source
from penstock.sources.memory import MemorySource
from penstock.types import to_rows

if TYPE_CHECKING:
    from penstock.loaders.streaming import StreamingConfig

log = logging.getLogger("penstock.loaders.streaming")

Position = tuple[Any, int]
"""A place that a feed can start from, and the samples after it that were delivered already."""
_END, _UNKNOWN = object(), object()
_POLL_SECONDS = 0.25
"""Interval at which a waiting loop checks its throughput and looks for a fetch that hangs."""
_STOP_SECONDS = 6.0
"""Limit of `stop`: a little longer than the pipeline waits for its own threads."""
_SLOW_SECONDS = 0.5
"""A sample that takes longer is named as the reason."""
_GATHER_SECONDS = 0.05
"""A chunk of an iterable is passed on incomplete after this time."""
_READY_CHUNKS = 2
"""Chunks that wait for the loop, besides the one that it has. With one only, nothing more would be fetched before the
loop starts: the first chunk, by which the others are measured, is fetched alone."""
_CHUNKS_IN_BUFFER = 8
"""Chunks of rows of a file or table that a buffer holds at least."""
_ROWS_AT_ONCE = 32
"""Rows converted at a time: Python objects take several times the memory of Arrow."""


class Signals:
    """Events between a loop and the thread that reads ahead of it. They refer to neither, so a run can be collected."""

    def __init__(self) -> None:
        self.stop, self.ended = StopEvent(), StopEvent()
        self.failed = False
        self.chunks = threading.Semaphore(0)
        """Released for each chunk, and once at the end."""

    def check(self) -> None:
        # Pools run what is queued before the interpreter exits: without the second test that would be a whole buffer.
        if self.failed or self.stop.is_set() or not threading.main_thread().is_alive():
            raise StoppedError("the stream was stopped before the end of its dataset")


@dataclass(slots=True)
class SampleChunk:
    """Consecutive samples that travel together."""

    samples: Iterable[Any]
    nbytes: int
    position: Callable[[int], Position]
    """Position after the first n samples of the chunk."""
    rest: range = range(0)
    """Rows that belong to the chunk and were not fetched, because the samples before them filled its memory."""
    is_last: bool = False


def open_feed(dataset: Any, config: StreamingConfig, budget: MemoryBudget) -> SampleFeed | PipelineFeed:
    """Feed for anything that can be streamed."""
    if callable(getattr(dataset, "next_batch", None)):
        return PipelineFeed(dataset, config, budget)
    if isinstance(dataset, (str, os.PathLike)):
        return PipelineFeed(open_source(dataset), config, budget)
    if isinstance(dataset, Mapping) or hasattr(dataset, "__arrow_c_stream__") or hasattr(dataset, "__arrow_c_array__"):
        return PipelineFeed(MemorySource(dataset), config, budget)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        return IndexedFeed(dataset, config, budget)
    if callable(dataset) or isinstance(dataset, Iterable):
        return IterableFeed(dataset, config, budget)
    raise ConfigError(
        f"cannot stream a {type(dataset).__name__}; give something with __len__ and __getitem__, an iterable, a table, "
        "a path, or a Source"
    )


class SampleFeed:
    """Samples fetched in chunks by threads, in order, at most `buffer_size` of them in flight.

    A chunk has fewer samples if they are large: each of those in flight gets an equal share of the budget.
    """

    stage = ""
    threads = 1

    def __init__(self, dataset: Any, config: StreamingConfig, budget: MemoryBudget) -> None:
        self._dataset, self._config, self._budget = dataset, config, budget
        self._name = getattr(dataset, "__name__", type(dataset).__name__)
        # The loop has one chunk, and while all of them are being fetched all but one of the others wait for it.
        self._chunk_size = min(config.chunk_size, max(1, config.buffer_size // (self.threads + _READY_CHUNKS)))
        self._chunks_ahead = max(1, config.buffer_size // self._chunk_size - _READY_CHUNKS)
        self._chunk_bytes = budget.capacity // (2 * (self.threads + 1 + _READY_CHUNKS))
        self._lock = threading.Lock()
        self._fetching: dict[int, tuple[float, int]] = {}
        """Thread -> when it began to fetch a sample, and the row."""
        self._restart()

    def _restart(self) -> None:
        self._started, self._busy, self._fetched, self._sample_bytes = time.monotonic(), 0.0, 0, 0.0
        self.skipped: Counter[str] = Counter()
        """Rows of this run left out because of an error, by its class."""

    def start(self) -> Position:
        return 0, 0

    def chunks(self, row: int, signals: Signals) -> Generator[SampleChunk]:
        self._restart()
        fetch, items = self._open(row, signals)
        ahead = WorkAhead(
            fetch, items, self.threads, self._chunks_ahead, budget=self._budget, size=lambda chunk: chunk.nbytes
        )
        try:
            for chunk in ahead:
                yield chunk
                while chunk.rest:
                    chunk = fetch(chunk.rest)
                    yield chunk
                if chunk.is_last:
                    return
        finally:
            signals.failed = True  # or at the end, when no thread is at work
            ahead.close()

    def _open(self, row: int, signals: Signals) -> tuple[Callable[[Any], SampleChunk], Iterator[Any]]:
        """Function that fetches a chunk, and its arguments in order."""
        raise NotImplementedError

    def _fetch(
        self, rows: range, get: Callable[[int], Any], signals: Signals, seconds: float | None = None
    ) -> SampleChunk:
        """Samples of `rows`, up to the first that exceeds the memory of a chunk, or its time."""
        samples: list[Any] = []
        ends: list[int] = []
        nbytes, thread, row = 0, threading.get_ident(), rows.start
        begun = now = time.monotonic()
        is_last = False
        try:
            for row in rows:
                signals.check()
                self._fetching[thread] = (now, row)
                try:
                    if (sample := self._sample(row, get)) is _END:
                        is_last = True
                        break
                except PenstockError as error:
                    if not self._skips(row, error):
                        raise
                    continue
                finally:
                    now = time.monotonic()
                samples.append(sample)
                ends.append(row + 1)
                nbytes += object_nbytes(sample)
                if nbytes > self._chunk_bytes or (seconds is not None and now - begun > seconds):
                    break
        finally:
            self._fetching.pop(thread, None)
        with self._lock:
            self._busy += now - begun
            self._fetched += len(samples)
            if samples:
                size = nbytes / len(samples)
                self._sample_bytes = max(size, 0.9 * self._sample_bytes + 0.1 * size, 1.0)
        return SampleChunk(samples, nbytes, lambda count: (ends[count - 1], 0), range(row + 1, rows.stop), is_last)

    def _sample(self, row: int, get: Callable[[int], Any]) -> Any:
        try:
            sample = own_arrays(get(row))
        except PenstockError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise StageError(reason, stage=self.stage, file=self._name, row=row) from error
        try:
            evaluate(sample)
        except RuntimeError as error:
            raise DataError(
                f"an MLX array cannot be computed in this thread ({error}); call mlx.core.eval on the arrays that the "
                "dataset keeps, when it is made",
                file=self._name,
                row=row,
            ) from error
        return sample

    def _skips(self, row: int, error: PenstockError) -> bool:
        return False

    def stop(self) -> None:
        """Nothing to do: the threads look at the signal before each sample."""

    def slowest(self) -> tuple[float, int, int] | None:
        """Longest of the fetches in progress: seconds so far, row, thread."""
        now = time.monotonic()
        return max(((now - since, row, thread) for thread, (since, row) in list(self._fetching.items())), default=None)

    def check_stall(self) -> None:
        slowest, limit = self.slowest(), self._config.stall_seconds
        if limit is not None and slowest is not None and slowest[0] > limit:
            frame = sys._current_frames().get(slowest[2])
            stack = "".join(traceback.format_stack(frame)[-6:]) if frame else "unknown\n"
            raise StalledError(
                f"row {slowest[1]} of {self._name} has taken {slowest[0]:.1f} s, longer than stall_seconds={limit:g}; "
                f"it is in:\n{stack}"
            )

    def bottleneck(self) -> str:
        slowest = self.slowest()
        if slowest is not None and slowest[0] >= _SLOW_SECONDS:
            return f"row {slowest[1]} of {self._name} has taken {slowest[0]:.1f} s so far"
        seconds = time.monotonic() - self._started
        load = min(1.0, self._busy / (self.threads * seconds)) if seconds else 0.0
        if self._budget.available < self._sample_bytes * self._chunk_size and load < 0.5:
            used, limit = format_bytes(self._budget.used), format_bytes(self._budget.limit)
            return f"the budget is full: {used} of {limit} are in use"
        workers = counted(self.threads, "worker")
        return f"fetching from {self!r} is the bottleneck: {workers} busy {load:.0%} of the time"

    def stats(self, delivered: int) -> dict[str, Any]:
        return {"in_flight": self._fetched - delivered, "skipped": dict(self.skipped)}

    def state(self, position: Position) -> dict[str, Any]:
        return {"dataset": repr(self), "row": position[0], "skip": position[1]}

    def read_state(self, state: Mapping[str, Any]) -> Position:
        if "pipeline" in state:  # saved when samples passed through a Pipeline
            engine = state["pipeline"]
            saved, row, skip = engine["stages"], engine["source"].get("row"), state["skip"] + engine["skip_rows"]
        else:
            saved, row, skip = state["dataset"], state["row"], state["skip"]
        if saved != repr(self):
            raise ResumeError(f"the state was saved by another stream, of {saved}; this one is of {self!r}")
        return row, skip


class IndexedFeed(SampleFeed):
    """Anything with `__len__` and `__getitem__`, in the order of its rows."""

    stage = "__getitem__"

    def __init__(self, dataset: Any, config: StreamingConfig, budget: MemoryBudget) -> None:
        self.threads = config.num_workers
        super().__init__(dataset, config, budget)
        self._name = type(dataset).__name__

    def _open(self, row: int, signals: Signals) -> tuple[Callable[[Any], SampleChunk], Iterator[Any]]:
        return (lambda rows: self._fetch(rows, self._dataset.__getitem__, signals)), self._ranges(row)

    def _ranges(self, start: int) -> Iterator[range]:
        stop, count = len(self._dataset), 1  # by the first row the others are measured
        while start < stop:
            yield range(start, min(stop, start + count))
            start += count
            fitting = int(self._chunk_bytes / self._sample_bytes) if self._sample_bytes else self._chunk_size
            count = max(1, min(self._chunk_size, fitting))

    def _skips(self, row: int, error: PenstockError) -> bool:
        if self._config.on_error == "raise" or isinstance(error, StoppedError):
            return False
        kind = type(error.__cause__ or error).__name__
        with self._lock:
            self.skipped[kind] += 1
            first = self.skipped[kind] == 1
        if first:
            log.warning("row %d of %s is skipped, as are all with such an error: %s", row, self._name, error)
        return True

    def __repr__(self) -> str:
        return f"{self._name}({len(self._dataset)} samples)"


class IterableFeed(SampleFeed):
    """Samples of an iterable, or of a function that makes one; a single thread iterates.

    Resuming passes over the samples before the saved one, so it costs as much as making them.
    """

    stage = "iterating"
    _opened = False

    def _open(self, row: int, signals: Signals) -> tuple[Callable[[Any], SampleChunk], Iterator[Any]]:
        if self._opened and isinstance(self._dataset, Iterator):
            raise ConfigError(f"the iterator {self._name} runs only once: give a function that makes it, or a list")
        self._opened = True
        iterator: Iterator[Any] | None = None
        next_row = row

        def fetch(_: None) -> SampleChunk:
            nonlocal iterator, next_row
            if iterator is None:
                iterator = self._skipped_to(row, signals)
            # The first sample comes alone, so that it does not wait for others.
            rows = range(next_row, next_row + (self._chunk_size if next_row > row else 1))
            chunk = self._fetch(rows, lambda _: next(iterator, _END), signals, _GATHER_SECONDS)
            next_row, chunk.rest = chunk.rest.start, range(0)
            return chunk

        return fetch, repeat(None)

    def _skipped_to(self, row: int, signals: Signals) -> Iterator[Any]:
        iterator: Iterator[Any] = iter(self._dataset() if callable(self._dataset) else self._dataset)
        for passed in range(row):
            signals.check()
            if next(iterator, _END) is _END:
                raise ResumeError(f"the state was saved at sample {row}, {self._name} ended after {passed}")
        return iterator

    def __repr__(self) -> str:
        return f"IterableSource({self._name})"


class PipelineFeed:
    """Rows of a source, read by a `Pipeline`."""

    def __init__(self, source: Source, config: StreamingConfig, budget: MemoryBudget) -> None:
        # The loop has a chunk, others wait for it, and as many rows may be on their way.
        rows = min(config.chunk_size, max(1, config.buffer_size // _CHUNKS_IN_BUFFER))
        settings = PipelineConfig(
            workers=config.num_workers,
            batch_rows=rows,
            rows_ahead=max(rows, config.buffer_size - rows * (1 + _READY_CHUNKS)),
            on_error=config.on_error,
            stall_seconds=config.stall_seconds,
        )
        self._pipeline = Pipeline(source, config=settings, budget=budget)
        self._first: Any = _UNKNOWN

    def start(self) -> Position:
        # A run, or a state that is loaded, moves the state of the pipeline away from its first row.
        if self._first is _UNKNOWN:
            self._first = self._state()
        return self._first, 0

    def chunks(self, before: Any, signals: Signals) -> Generator[SampleChunk]:
        if before is not self._first:
            self._pipeline.load_state_dict(before)
        for batch in self._pipeline:
            after = self._state()
            count = batch.num_rows

            def position(taken: int, before: Any = before, after: Any = after, count: int = count) -> Position:
                return (before, taken) if taken < count else (after, 0)

            yield SampleChunk(_rows(batch), batch.nbytes, position)
            before = after

    def _state(self) -> Any:
        try:
            return self._pipeline.state_dict()
        except ResumeError:  # the source has no state
            return None

    def stop(self) -> None:
        self._pipeline.stop()

    def check_stall(self) -> None:
        """Nothing to do: the pipeline raises the error itself."""

    def bottleneck(self) -> str:
        return str(self._pipeline.snapshot().get("bottleneck", "nothing has been read yet"))

    def stats(self, delivered: int) -> dict[str, Any]:
        snapshot = self._pipeline.snapshot()
        return {"in_flight": snapshot.get("rows_in", 0) - delivered, "skipped": {}, "pipeline": snapshot}

    def state(self, position: Position) -> dict[str, Any]:
        return {"pipeline": position[0], "skip": position[1]}

    def read_state(self, state: Mapping[str, Any]) -> Position:
        if "pipeline" not in state:
            raise ResumeError(f"the state was saved by another stream, of {state['dataset']}; this one is of {self!r}")
        self.start()
        self._pipeline.load_state_dict(state["pipeline"])  # refuses a state of another source now instead of later
        return state["pipeline"], state["skip"]

    def __repr__(self) -> str:
        return repr(self._pipeline.source)


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
        yield from to_rows(batch.slice(start, _ROWS_AT_ONCE))


class SampleRun:
    """One run of a stream: its threads, its rate and its position."""

    def __init__(
        self,
        feed: SampleFeed | PipelineFeed,
        position: Position,
        budget: MemoryBudget,
        target: float | None,
        clock: Callable[[], float],
        sleep: Callable[[float], object] | None,
    ) -> None:
        self._feed, self._budget, self.position = feed, budget, position
        self._signals = signals = Signals()
        weakref.finalize(self, _end, signals, budget).atexit = False
        self.rate = RateLimit(target, clock, sleep or signals.stop.wait, self._report_behind)
        self._final_stats: dict[str, Any] | None = None
        self._stop_seconds = _STOP_SECONDS
        self._process = os.getpid()
        self._ahead = ReadAhead(_read(feed.chunks(position[0], signals), signals, budget), _READY_CHUNKS)

    def samples(self) -> Generator[Any]:
        skip = self.position[1]
        self.rate.begin()
        while (chunk := self._next()) is not None:
            for number, sample in enumerate(chunk.samples, 1):
                if skip:
                    skip -= 1
                    continue
                self.rate.step()
                if self._signals.stop.is_set():
                    return
                self.position = chunk.position(number)
                yield sample
                check_process(self._process, "this loop over a stream")

    def _next(self) -> SampleChunk | None:
        check_process(self._process, "this loop over a stream")
        self.rate.wait()
        try:
            while not self._signals.chunks.acquire(timeout=_POLL_SECONDS):
                self.rate.look()
                self._feed.check_stall()
            return next(self._ahead, None)
        except StalledError:
            self._stop_seconds = 0.2
            raise
        except StoppedError:
            if self._signals.stop.is_set():
                return None
            raise
        finally:
            self.rate.arrived()

    def stop(self) -> None:
        """End and join every thread, except one that hangs; idempotent."""
        if sys.is_finalizing():
            return  # threads are frozen, maybe with locks
        if self._final_stats is None:
            self.rate.end()
            self._final_stats = {**self.stats(), "running": False}
        signals = self._signals
        _end(signals, self._budget)
        self._ahead.stop()
        signals.chunks.release()
        deadline = time.monotonic() + self._stop_seconds
        # The pipeline may not have begun yet: only then is there something to stop.
        while self._feed.stop() or not signals.ended.wait(0.05):
            if time.monotonic() > deadline:
                log.warning("%r still hangs after %.1f s; its thread is abandoned", self._feed, self._stop_seconds)
                return
        self._ahead.close()

    def stats(self) -> dict[str, Any]:
        if self._final_stats is not None:
            return self._final_stats
        rate = self.rate
        behind = rate.behind
        return {
            "running": True,
            "samples": rate.samples,
            "seconds": rate.seconds,
            "samples_per_sec": rate.overall,
            "recent_samples_per_sec": rate.recent,
            "target_throughput": rate.target,
            "behind": behind,
            "reason": self._reason(behind),
            "waited_seconds": rate.waited,
            "paced_seconds": rate.paced,
            **self._feed.stats(rate.samples),
        }

    def _reason(self, behind: bool | None) -> str:
        if behind is False:
            return f"the target of {self.rate.target:g} samples a second is met"
        share = self.rate.wait_share
        if share < 0.5:
            return f"the loop that takes the samples is busy {1 - share:.0%} of the time"
        return self._feed.bottleneck()

    def _report_behind(self) -> None:
        log.warning(
            "streaming %.1f samples a second, less than target_throughput=%g: %s",
            self.rate.recent,
            self.rate.target,
            self._reason(True),
        )


def _read(chunks: Generator[SampleChunk], signals: Signals, budget: MemoryBudget) -> Generator[SampleChunk]:
    """The chunks, charged to the budget while they wait or are looped over. Does not refer to the run."""
    sizes: deque[int] = deque(maxlen=1 + _READY_CHUNKS)
    try:
        for chunk in chunks:
            sizes.append(chunk.nbytes)
            budget.hold("samples", sum(sizes), by=signals)
            signals.chunks.release()
            yield chunk
    finally:
        chunks.close()
        if signals.stop.is_set():
            _end(signals, budget)
        signals.ended.set()
        signals.chunks.release()


def _end(signals: Signals, budget: MemoryBudget) -> None:
    signals.stop.set()
    budget.hold("samples", 0, by=signals)
