"""Samples of a dataset that is too large for memory, one by one, made ahead by the engine under one budget.

pipeline = StreamingPipeline(dataset, StreamingConfig(buffer_size=1024, target_throughput=1000))
pipeline.start()
for sample in pipeline:
    ...
pipeline.stop()
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from penstock.batching.options import configured
from penstock.errors import ConfigError, ResumeError
from penstock.files.states import StateFormat
from penstock.loaders.sample_stream.run import Run, SampleSource, buffer_hint, engine_state, source_of
from penstock.memory import MemoryBudget
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stages import State

__all__ = ["StreamingConfig", "StreamingPipeline"]

log = logging.getLogger(__name__)

_STATE = StateFormat("stream of samples", "a StreamingPipeline")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingConfig:
    """How samples are streamed. Nothing here changes which samples come, or in which order."""

    buffer_size: int = 1024
    """Samples on their way at most, the ones being fetched included: with fewer than `chunk_size * num_workers` some
    workers are idle. Rows of files and tables are limited by the budget alone."""
    chunk_size: int = 256
    """Samples that travel together, at most: fewer, if they are large, or if an iterable makes them slowly. Of a source
    that pauses for long, such as a feed, the last ones before a pause come with `chunk_size=1` only."""
    num_workers: int = 4
    """Threads that fetch: `__getitem__` is called from all of them at once."""
    target_throughput: float | None = None
    """Samples a second: held back when they come faster, reported with the reason when they come slower."""
    on_error: Literal["raise", "skip"] = "raise"
    """A sample that cannot be made stops the stream, or is left out and counted."""
    stall_seconds: float | None = 300.0
    """A chunk that takes longer is taken to hang, and is an error; None, as for a feed that pauses, waits for ever."""
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
        self.pipeline_config()

    def pipeline_config(self) -> PipelineConfig:
        return PipelineConfig(workers=self.num_workers, on_error=self.on_error, stall_seconds=self.stall_seconds)

    def hint(self) -> str | None:
        """What keeps workers idle here, if anything does."""
        return buffer_hint(self.buffer_size, self.chunk_size, self.num_workers)


class StreamingPipeline:
    """A dataset as a stream of samples, in its own order, each exactly once, whatever the number of workers.

    Takes anything with `__len__` and `__getitem__`, an iterable or a function that makes one, a path, a table or a
    DataFrame, or a `Source`. Samples come out with the kinds of values they went in with: a mapping as a dict, arrays
    of NumPy, torch, MLX and JAX as such, on the CPU and with memory of their own.

        pipeline = StreamingPipeline(dataset, StreamingConfig(chunk_size=64))
        pipeline = StreamingPipeline(dataset, chunk_size=64)

    `start` begins to read in the background; iterating does too, if that was not called. Iterating again begins
    again. `stop` ends all threads, from any of them; leaving the loop early does the same. One loop at a time.
    Both wait for the samples that are being made just then, one of each worker, but no longer than a few seconds:
    a dataset that hangs keeps its thread, which the log names.
    """

    def __init__(
        self,
        dataset: Any,
        config: StreamingConfig | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        **overrides: Any,
    ) -> None:
        self.config = configured(StreamingConfig, config, overrides)
        self._clock, self._sleep = clock, sleep
        source = source_of(dataset, self.config.chunk_size, self.config.on_error)
        hint = self.config.hint()
        if hint is not None and isinstance(source, SampleSource):
            log.warning("%s", hint)
        self._pipeline = Pipeline(source, config=self.config.pipeline_config(), budget=self.config.budget)
        self._run: Run | None = None
        self._looping: Run | None = None
        self._last: Run | None = None
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
            begin = self._beginning()
            state, self._start_from = self._start_from, None
            if state is not None:
                self._pipeline.load_state_dict(state["pipeline"])
                begin = state
            self._run = self._last = Run(
                self._pipeline,
                begin,
                buffer_size=self.config.buffer_size,
                target=self.config.target_throughput,
                hint=self.config.hint(),
                clock=self._clock,
                sleep=self._sleep,
            )
        return self

    def stop(self) -> None:
        """End all threads, and wait for them: as long as a sample takes, at most some seconds. Idempotent.

        The next loop, or `start`, begins at the first sample.
        """
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
        position = self._last.position() if self._last is not None else self._beginning()
        if position["pipeline"] is None:
            raise ResumeError(f"{self._pipeline.source!r} has no state_dict, so this pipeline cannot be resumed")
        return _STATE.write(position)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state with the next loop, or `start`."""
        if self._run is not None:
            raise ResumeError("stop the running pipeline before loading a state into it")
        state = _STATE.read(state)
        self._beginning()
        self._pipeline.load_state_dict(state["pipeline"])  # refuses what is not of this dataset, here and not later
        self._start_from = state

    def _check_alone(self) -> None:
        if self._run is not None and self._looping is self._run:
            raise ConfigError("this pipeline is being looped over already; stop that loop first, or make another one")

    def _beginning(self) -> State:
        # A run, or a state that is loaded, moves the engine's state, and this is about the first sample.
        if self._last is None and self._start_from is None and self._first is None:
            self._first = engine_state(self._pipeline)
        return {"pipeline": self._first, "skip": 0, "samples": 0}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<StreamingPipeline {self._pipeline}>"
