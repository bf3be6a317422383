"""Samples of a dataset that is too large for memory, one by one, made ahead by the engine under one budget.

pipeline = StreamingPipeline(dataset, StreamingConfig(buffer_size=1024, target_throughput=1000))
pipeline.start()
for sample in pipeline:
    ...
pipeline.stop()
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError, StoppedError
from penstock.loaders._samplestream.pacing import Pace
from penstock.loaders._samplestream.packing import is_packed, unpack
from penstock.loaders._samplestream.sources import IterableSource, SampleSource, source_of
from penstock.loaders._samplestream.window import Window
from penstock.memory import MemoryBudget
from penstock.pipeline.ahead import ReadAhead
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.metrics import StageMetrics, bottleneck
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stages import State
from penstock.types import to_rows

__all__ = ["StreamingConfig", "StreamingPipeline"]

log = logging.getLogger(__name__)

_VERSION = 1
_SLICE_ROWS = 32
"""Samples made at once from a chunk: as Python objects they are several times as large as in Arrow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingConfig:
    """How samples are streamed. Nothing here changes which samples come, or in which order."""

    buffer_size: int = 1024
    """Samples on their way at most, the ones being fetched included. Rows of files and tables are limited by the
    budget alone."""
    chunk_size: int = 256
    """Samples that travel together, at most: fewer, if they are large."""
    num_workers: int = 4
    """Threads that fetch: `__getitem__` is called from all of them at once."""
    target_throughput: float | None = None
    """Samples a second: held back when they come faster, reported with the reason when they come slower."""
    on_error: Literal["raise", "skip"] = "raise"
    """A sample that cannot be made stops the stream, or is left out and counted."""
    budget: MemoryBudget | int | str | None = None
    """Shared with everything that is given the same one; by default a share of the machine's memory."""

    def __post_init__(self) -> None:
        for name in ("buffer_size", "chunk_size", "num_workers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")
        if self.chunk_size > self.buffer_size:
            raise ConfigError(
                f"a chunk of {self.chunk_size} samples does not fit into a buffer of {self.buffer_size}; "
                "make buffer_size larger (chunk_size * num_workers keeps all workers busy), or chunk_size smaller"
            )
        target = self.target_throughput
        if target is not None and not (isinstance(target, (int, float)) and 0 < target < float("inf")):
            raise ConfigError(f"target_throughput must be a positive number of samples a second, got {target!r}")
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")

    def pipeline_config(self) -> PipelineConfig:
        return PipelineConfig(workers=self.num_workers, on_error=self.on_error)


class StreamingPipeline:
    """A dataset as a stream of samples, in its own order, each exactly once, whatever the number of workers.

    Takes anything with `__len__` and `__getitem__`, an iterable or a function that makes one, a path, a table or a
    DataFrame, or a `Source`. Samples come out with the kinds of values they went in with: a mapping as a dict, arrays
    of NumPy, torch, MLX and JAX as such, on the CPU and with memory of their own.

    `start` begins to read in the background; iterating does too, if that was not called. Iterating again begins
    again. `stop` ends all threads, from any of them; leaving the loop early does the same. One loop at a time.
    """

    def __init__(
        self,
        dataset: Any,
        config: StreamingConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self.config = config if config is not None else StreamingConfig()
        self._clock, self._sleep = clock, sleep
        source = source_of(dataset, self.config.chunk_size, self.config.on_error)
        self._pipeline = Pipeline(source, config=self.config.pipeline_config(), budget=self.config.budget)
        self._run: _Run | None = None
        self._looping: _Run | None = None
        self._last: _Run | None = None
        self._start_from: State | None = None
        self._first: State | None = None

    @property
    def budget(self) -> MemoryBudget:
        return self._pipeline.budget

    @property
    def running(self) -> bool:
        """Whether threads are at work for it."""
        return self._run is not None

    def start(self) -> Self:
        """Begin to read in the background, up to `buffer_size` samples ahead. Does nothing if that has begun."""
        if self._run is None:
            state, self._start_from = self._start_from, None
            if state is not None:
                self._pipeline.load_state_dict(state["pipeline"])
            begin = state or self._beginning()
            self._run = self._last = _Run(self._pipeline, self.config, self._clock, self._sleep, begin)
        return self

    def stop(self) -> None:
        """End all threads and wait for them; idempotent. The next loop, or `start`, begins at the first sample."""
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    close = stop

    def __iter__(self) -> Iterator[Any]:
        self._check_alone()
        return self._samples()

    def _samples(self) -> Generator[Any]:
        self._check_alone()
        self.start()
        run = self._looping = self._run
        assert run is not None
        try:
            yield from run.samples()
        finally:
            run.stop()
            if self._run is run:
                self._run = None

    def stats(self) -> dict[str, Any]:
        """What this or the last run did, as plain values; `reason` says what keeps it from being faster."""
        return self._last.stats() if self._last is not None else {"samples": 0, "running": False}

    def state_dict(self) -> State:
        """Where the loop stands: loaded into an equal pipeline, it goes on with the sample after the last one."""
        if self._start_from is not None:
            return self._start_from
        state = self._last.state() if self._last is not None else self._beginning()
        if state["pipeline"] is None:
            raise ResumeError(f"{self._pipeline.source!r} has no state_dict, so this pipeline cannot be resumed")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state with the next loop, or `start`."""
        if self._run is not None:
            raise ResumeError("stop the running pipeline before loading a state into it")
        if state.get("version") != _VERSION or not {"pipeline", "skip", "samples"} <= state.keys():
            raise ResumeError(f"not a state of a StreamingPipeline of version {_VERSION}: {state!r:.200}")
        self._pipeline.load_state_dict(state["pipeline"])  # refuses what is not of this dataset, here and not later
        self._start_from = dict(state)

    def _check_alone(self) -> None:
        if self._run is not None and self._looping is self._run:
            raise ConfigError("this pipeline is being looped over already; stop that loop first, or make another one")

    def _beginning(self) -> State:
        if self._last is None:  # a run moves the engine's state, and this is about the first sample
            self._first = _state(self._pipeline)
        return {"version": _VERSION, "pipeline": self._first, "skip": 0, "samples": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<StreamingPipeline {self._pipeline}>"


class _Run:
    """One run: its threads, its window, its pace."""

    def __init__(
        self,
        pipeline: Pipeline,
        config: StreamingConfig,
        clock: Callable[[], float],
        sleep: Callable[[float], object] | None,
        state: State,
    ) -> None:
        self._pipeline, self._config, self._clock = pipeline, config, clock
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._window = Window(config.buffer_size)
        weakref.finalize(self, self._window.close).atexit = False
        self._windowed = isinstance(pipeline.source, (SampleSource, IterableSource))
        if isinstance(pipeline.source, (SampleSource, IterableSource)):
            pipeline.source.window = self._window
        self._pace = Pace(config.target_throughput, clock, sleep or self._stopped.wait, self._report_behind)
        self._before = state["pipeline"]
        """The engine's state before the chunk that is handed out, of which `_taken` samples are."""
        self._taken = self._skip = state["skip"]
        self._samples_before = state["samples"]
        self._final: dict[str, Any] | None = None
        self._ahead = ReadAhead(
            _chunks(pipeline, self._ended), 1, budget=pipeline.budget, size=lambda chunk: int(chunk[0].nbytes)
        )

    def samples(self) -> Generator[Any]:
        skip = self._skip
        while (chunk := self._next()) is not None:
            batch, after = chunk
            self._pipeline.budget.hold("samples", batch.nbytes, by=self)
            skipped = min(skip, batch.num_rows)
            skip -= skipped
            if self._windowed:
                self._window.give(skipped)
            for start in range(skipped, batch.num_rows, _SLICE_ROWS):
                part = batch.slice(start, _SLICE_ROWS)
                for sample in unpack(part) if is_packed(part) else to_rows(part):
                    self._pace.step()
                    if self._stopped.is_set():
                        return
                    self._taken += 1
                    yield sample
                if self._windowed:
                    self._window.give(part.num_rows)
            # A state may be asked for between two samples, so it moves on with the chunk that is done.
            self._before, self._taken = after, skip

    def _next(self) -> tuple[pa.RecordBatch, State | None] | None:
        since = self._clock()
        try:
            return next(self._ahead, None)
        except StoppedError:
            if self._stopped.is_set():
                return None
            raise
        finally:
            self._pace.waiting(self._clock() - since)
            self._pipeline.budget.hold("samples", 0, by=self)

    def stop(self) -> None:
        """End and join every thread; idempotent."""
        if self._final is None:
            self._pace.end()
            self._final = self.stats()
        self._stopped.set()
        self._ahead.stop()
        # The thread that runs the engine may have yet to begin with it: only from then on there is something to stop.
        while True:
            self._window.close()
            self._pipeline.stop()
            if self._ended.wait(0.05):
                break
        self._ahead.close()
        self._pipeline.budget.hold("samples", 0, by=self)

    def state(self) -> State:
        samples = self._samples_before + self._pace.samples
        return {"version": _VERSION, "pipeline": self._before, "skip": self._taken, "samples": samples}

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
            "in_flight": self._window.in_flight if self._windowed else None,
            "skipped": dict(getattr(self._pipeline.source, "skipped", {})),
            "pipeline": snapshot,
        }

    def _reason(self, snapshot: Mapping[str, Any], behind: bool | None) -> str:
        if behind is False:
            return f"the target of {self._pace.target:g} samples a second is met"
        share = self._pace.wait_share
        if share < 0.5:
            return f"the loop that takes the samples is busy {1 - share:.0%} of the time"
        return self._bottleneck(snapshot)

    def _bottleneck(self, snapshot: Mapping[str, Any]) -> str:
        """The engine's sentence; the source's wait for room in our window is not work, which the engine cannot know."""
        stages = [_measured(stage) for stage in snapshot.get("stages", ())]
        if not stages:
            return "nothing has been read yet"
        source, *working, sink = stages
        source.busy = max(0.0, source.busy - self._window.waited)
        return bottleneck(source, working, sink, snapshot["seconds"])

    def _report_behind(self) -> None:
        reason = self._reason(self._pipeline.snapshot(), True)
        log.warning(
            "streaming %.1f samples a second, fewer than the %g asked for: %s",
            self._pace.recent,
            self._pace.target,
            reason,
        )


def _chunks(pipeline: Pipeline, ended: threading.Event) -> Generator[tuple[pa.RecordBatch, State | None]]:
    """The engine's batches, each with the engine's state behind it. Knows no run, so that one may be forgotten."""
    try:
        for batch in pipeline:
            yield batch, _state(pipeline)
    finally:
        ended.set()


def _measured(stage: Mapping[str, Any]) -> StageMetrics:
    found = StageMetrics(stage["name"], stage["kind"])
    found.busy, found.threads, found.batches = stage["busy_seconds"], stage["threads"], stage["batches"]
    return found


def _state(pipeline: Pipeline) -> State | None:
    try:
        return pipeline.state_dict()
    except ResumeError:
        return None
