"""One run of a stream: threads ahead of the loop, room for what they make, pace, and where the loop stands."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import pyarrow as pa

from penstock.errors import ResumeError, StoppedError
from penstock.loaders._samplestream.pacing import Pace
from penstock.loaders._samplestream.packing import is_packed, unpack
from penstock.loaders._samplestream.reasons import why_waiting
from penstock.loaders._samplestream.sources import IterableSource, SampleSource
from penstock.loaders._samplestream.window import Window
from penstock.pipeline.ahead import ReadAhead
from penstock.pipeline.pipeline import Pipeline
from penstock.pipeline.stages import State
from penstock.types import to_rows

__all__ = ["Run", "engine_state"]

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
        self._window = Window(buffer_size)
        weakref.finalize(self, self._window.stop).atexit = False
        self._source = pipeline.source if isinstance(pipeline.source, (SampleSource, IterableSource)) else None
        if self._source is not None:
            self._source.window = self._window
        self._hint = hint if isinstance(self._source, SampleSource) else None
        self._pace = Pace(target, clock, sleep or self._stopped.wait, self._report_behind)
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
