"""Samples of a dataset that is larger than memory, one by one, fetched ahead of the loop within one memory budget.

pipeline = StreamingPipeline(dataset, StreamingConfig(buffer_size=1024, target_throughput=1000))
pipeline.start()
for sample in pipeline:
    ...
pipeline.stop()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from penstock._suggest import named_options
from penstock.batching.options import configured
from penstock.errors import ConfigError, ResumeError
from penstock.files.states import StateFormat
from penstock.loaders.sample_stream import SampleRun, open_feed
from penstock.memory import MemoryBudget, format_bytes, suggest_limit
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.stages import State

_CHUNK_SIZE = 256
_STATE = StateFormat("stream of samples", "a StreamingPipeline")


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class StreamingConfig:
    """Buffering, threads and rate of a stream. No option changes the samples or their order."""

    buffer_size: int = 1024
    """Most samples in flight, including those being fetched (three at least, and of files and tables eight). Files are
    read in parts, of which the last may be more."""
    chunk_size: int = _CHUNK_SIZE
    """Most samples that travel together. Chunks are smaller if samples are large, if an iterable makes them slowly, or
    if the buffer could not hold one for each worker and two for the loop."""
    num_workers: int = 4
    """Threads that fetch: all of them call `__getitem__`."""
    target_throughput: float | None = None
    """Samples a second: faster samples are delayed, slower ones are reported with the reason."""
    on_error: Literal["raise", "skip"] = "raise"
    """A sample that raises an error stops the stream, or is skipped and counted."""
    stall_seconds: float | None = 300.0
    """A sample that takes longer is taken to hang, which is an error; None waits for ever."""
    budget: MemoryBudget | int | str | None = None
    """Memory for samples in flight; a `MemoryBudget` may be shared. By default a share of the machine's memory."""

    def __post_init__(self) -> None:
        for name in ("buffer_size", "chunk_size", "num_workers"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name} must be a positive number, got {value!r}")
        if self.chunk_size > self.buffer_size and self.chunk_size != _CHUNK_SIZE:  # the default shrinks
            raise ConfigError(
                f"chunk_size={self.chunk_size} is larger than buffer_size={self.buffer_size}; make it smaller"
            )
        target = self.target_throughput
        if target is not None and not (isinstance(target, (int, float)) and 0 < target < float("inf")):
            raise ConfigError(f"target_throughput must be a positive number of samples a second, got {target!r}")
        if self.on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error must be 'raise' or 'skip', got {self.on_error!r}")
        PipelineConfig(stall_seconds=self.stall_seconds)


class StreamingPipeline:
    """Stream of the samples of a dataset, in its order, each exactly once.

    Takes anything with `__len__` and `__getitem__`, an iterable or a function that makes one, a path, a table or a
    DataFrame, or a `Source`. Samples may have any type; arrays in them are copies, so that a dataset
    may reuse its buffers.

        pipeline = StreamingPipeline(dataset, StreamingConfig(chunk_size=64))
        pipeline = StreamingPipeline(dataset, chunk_size=64)

    `start` begins to fetch in the background; so does a loop. A second loop begins again at the first sample. One loop
    at a time. `stop`, from any thread, and leaving the loop end all threads: they wait for the sample that each worker
    is fetching, at most a few seconds. The thread of a dataset that hangs is abandoned, with a warning.
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
        budget = self.config.budget
        self.budget = MemoryBudget.of(suggest_limit() if budget is None else budget)
        self._feed = open_feed(dataset, self.config, self.budget)
        self._run: SampleRun | None = None
        self._looping: SampleRun | None = None
        self._last: SampleRun | None = None
        self._samples_before = 0
        """Samples delivered before the last run."""
        self._loaded: State | None = None

    @property
    def running(self) -> bool:
        """True if its threads are running."""
        return self._run is not None

    def start(self) -> Self:
        """Begin to fetch in the background, up to `buffer_size` samples ahead. Does nothing if it has begun."""
        if self._run is None:
            position, self._samples_before = self._feed.start(), 0
            if self._loaded is not None:
                position, self._samples_before = self._feed.read_state(self._loaded), self._loaded["samples"]
                self._loaded = None
            self._run = self._last = SampleRun(
                self._feed, position, self.budget, self.config.target_throughput, self._clock, self._sleep
            )
        return self

    def stop(self) -> None:
        """End all threads and wait for them, at most a few seconds. The next loop begins at the first sample.

        A second call does nothing.
        """
        run, self._run = self._run, None
        if run is not None:
            run.stop()

    close = stop

    def __iter__(self) -> Iterator[Any]:
        self._check_single_loop()
        return self._samples()

    def _samples(self) -> Generator[Any]:
        self._check_single_loop()
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
        """Figures of the current or last run, as plain values; `reason` names the bottleneck."""
        return self._last.stats() if self._last is not None else {"samples": 0, "running": False}

    def state_dict(self) -> State:
        """Position of the loop: an equal pipeline that loads it resumes with the next sample."""
        if self._loaded is not None:
            return self._loaded
        position, samples = self._feed.start(), 0
        if self._last is not None:
            position, samples = self._last.position, self._samples_before + self._last.rate.samples
        if position[0] is None:
            raise ResumeError(f"{self._feed!r} has no state_dict, so this pipeline cannot be resumed")
        return _STATE.write({**self._feed.state(position), "samples": samples})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state with the next loop, or `start`."""
        if self._run is not None:
            raise ResumeError("stop the running pipeline before loading a state into it")
        state = _STATE.read(state)
        self._feed.read_state(state)
        self._loaded = state

    def _check_single_loop(self) -> None:
        if self._run is not None and self._looping is self._run:
            raise ConfigError("another loop over this pipeline is running; stop it first, or make another pipeline")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<StreamingPipeline {self._feed!r}  [budget {format_bytes(self.budget.capacity)}]>"
