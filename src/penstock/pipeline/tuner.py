"""Tuner of a run: how much to read at a time, and how many workers, by CPU time and throughput.

Wall time is no measure of a batch: threads that wait for each other, or a machine that is busy otherwise, make any
batch slow, and smaller batches then cost more and bring nothing. So the CPU time of a batch decides its size, and the
throughput decides whether a change stays: one change at a time is on trial, and is taken back if the next window of
time is not better (more workers, larger batches) or is worse (fewer workers, smaller batches).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from penstock.memory.budget import column_bytes
from penstock.pipeline.config import PipelineConfig

_FIRST_ROWS = 256
_MOST_ROWS = 1 << 17
_NARROW_ROW = 64  # bytes of a row before any was seen, where the number of rows is limited
_COLUMN_RAW_BYTES = 1 << 10  # of a batch for each of its columns, if the budget allows: a column costs time of its own
_FEWEST_BYTES, _USUAL_BYTES, _MOST_BYTES = 32 << 10, 1 << 20, 8 << 20
_QUICK, _SLOW = 0.1, 0.25  # CPU seconds of a batch in its busiest stage: between these its size is left alone
_PATIENCE = 5.0  # seconds of any kind that a batch may take: stages that wait for a service get smaller ones
_WINDOW, _LONGEST_WINDOW = 0.4, 5.0  # seconds over which throughput is measured, if enough batches end in them
_FEWEST_BATCHES = 8
_GAIN, _LOSS = 1.03, 0.985  # throughput that more of something must bring, and that less of it may cost
_SETTLED, _FEW_WORKERS = 3.0, 4  # seconds before so few workers become fewer: a shorter run would have no gain
_RESTS = (4, 64)  # windows between two trials of the same step: after the first failure, and at most
_IDLE, _HINDERED = 0.5, 0.8  # share of its time that a worker waits for work; share of its work that is CPU time

Step = Literal["more workers", "fewer workers", "larger batches", "smaller batches"]


@dataclass(frozen=True, slots=True)
class RunTotals:
    """Totals of a run so far, over all workers."""

    stage_cpu: float = 0.0
    """CPU seconds in the stage that has most of them."""
    stage_seconds: float = 0.0
    """Seconds in the stage that has most of them."""
    cpu: float = 0.0
    """CPU seconds in all stages that workers run."""
    seconds: float = 0.0
    """Seconds in all stages that workers run."""
    backlog: int = 0
    """Batches that wait for a worker now."""
    starving: bool = False
    """True if the consumer waits for a batch now."""


@dataclass(frozen=True, slots=True)
class _Trial:
    step: Step
    workers: int
    nbytes: int
    rate: float
    """Setting and throughput before the step."""


@dataclass(frozen=True, slots=True)
class _Mark:
    at: float
    done: int
    done_at: float
    """Time at which the last of the batches was done: a rate from batch to batch does not depend on when one looks."""
    batches: int
    totals: RunTotals


class Tuner:
    """Decides batch sizes and worker counts. Rows and their order never depend on it."""

    def __init__(
        self, config: PipelineConfig, limit: Callable[[], int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config, self._limit, self._clock = config, limit, clock
        self._adding = threading.Lock()
        self._row_bytes = 0.0
        self._need = 4.0
        self._columns = 0
        self._done = self._batches = 0
        """Bytes and batches that are through the workers."""
        self._done_at = clock()
        self.workers = config.worker_limit
        """Number of workers that take work now."""
        self._bytes = self._clamp(_USUAL_BYTES)
        self._trial: _Trial | None = None
        self._rate: float | None = None
        """Throughput of the window before, if it had the same setting."""
        self._resting: dict[Step, int] = {}
        self._failed: dict[Step, int] = {}
        self._looked: _Mark | None = None
        """State of the run when the batch size was last looked at."""
        self._window: _Mark | None = None
        """State of the run at the beginning of the window."""
        self._began = clock()

    @property
    def batch_bytes(self) -> int:
        """Raw bytes to read at a time."""
        nbytes = self._clamp(self._bytes)
        if self._config.rows_ahead is None:
            return nbytes
        return max(1, min(nbytes, int(self._rows_at_once * (self._row_bytes or _NARROW_ROW))))

    @property
    def batch_rows(self) -> int:
        """Rows to request from a source that counts in rows."""
        if isinstance(self._config.batch_rows, int):
            return self._config.batch_rows
        if not self._row_bytes:
            return min(_FIRST_ROWS, self._rows_at_once)
        return max(1, min(_MOST_ROWS, self._rows_at_once, int(self.batch_bytes / self._row_bytes)))

    @property
    def _rows_at_once(self) -> int:
        """A quarter of the rows that may be ahead, so that they are read while others wait."""
        most = self._config.rows_ahead
        return _MOST_ROWS if most is None else max(1, most // 4)

    def to_reserve(self, nbytes: int) -> int:
        """Memory that a batch of `nbytes` takes in all: itself, its decoded form, its transformed form."""
        return int(nbytes * self._need)

    def saw_read(self, rows: int, nbytes: int) -> None:
        """A batch was read; remembers how wide rows are (the widest lately, so that growth is met quickly)."""
        if rows:
            width = nbytes / rows
            self._row_bytes = max(width, 0.9 * self._row_bytes + 0.1 * width)

    def saw_need(self, raw: int, peak: int, columns: int = 0) -> None:
        """A batch of `raw` bytes is done and took `peak` bytes on its way; half of that again is allowed for
        temporaries.

        No more is learned than that a batch of the usual size takes the whole budget: it goes alone then.
        """
        if not raw:
            return
        peak += column_bytes(columns)
        need = max(2.0, min(1.5 * peak / raw, self._limit() / self.batch_bytes))
        with self._adding:
            self._columns = max(self._columns, columns)
            self._need = max(need, 0.98 * self._need + 0.02 * need)
            self._done += raw
            self._batches += 1
            self._done_at = self._clock()

    def look(self, totals: RunTotals) -> None:
        """Adapt the batch size and the worker count; called many times a second."""
        with self._adding:
            now = _Mark(self._clock(), self._done, self._done_at, self._batches, totals)
        if self._looked is None or self._window is None:
            self._looked = self._window = now
            return
        if self._config.batch_rows == "auto" and self._trial is None and now.batches > self._looked.batches:
            self._resize(now, self._looked)
            self._looked = now
        self._try_steps(now, self._window)

    def _resize(self, now: _Mark, before: _Mark) -> None:
        """Steps that need no trial: a batch that is done in no time may be larger, one that takes long is halved."""
        batches = now.batches - before.batches
        cpu = (now.totals.stage_cpu - before.totals.stage_cpu) / batches
        seconds = (now.totals.stage_seconds - before.totals.stage_seconds) / batches
        if cpu < _QUICK and seconds < _PATIENCE / 2.5:
            self._bytes = self._clamp(self._bytes * 2)
        elif seconds > _PATIENCE or (cpu > _SLOW and self.batch_bytes > _USUAL_BYTES):
            self._bytes = self._clamp(self.batch_bytes // 2)

    def _try_steps(self, now: _Mark, before: _Mark) -> None:
        """At the end of a window, judge the step on trial and begin another."""
        elapsed, batches = now.at - before.at, now.batches - before.batches
        if elapsed < _WINDOW or (batches < max(_FEWEST_BATCHES, 2 * self.workers) and elapsed < _LONGEST_WINDOW):
            return
        self._window = now
        if batches:
            self._looked = now
        self._resting = {step: left - 1 for step, left in self._resting.items() if left > 1}
        rate = (now.done - before.done) / max(now.done_at - before.done_at, 1e-9)
        earlier, self._rate = self._rate, None
        if rate <= 0 or (self._trial is not None and not self._keeps(self._trial, rate)):
            return
        seconds, cpu = now.totals.seconds - before.totals.seconds, now.totals.cpu - before.totals.cpu
        idle = max(0.0, 1 - seconds / (elapsed * self.workers))
        batch_cpu = (now.totals.stage_cpu - before.totals.stage_cpu) / max(1, batches)
        patient = (now.totals.stage_seconds - before.totals.stage_seconds) < max(1, batches) * _PATIENCE / 2.5
        working = min(1 - idle, cpu / seconds if seconds else 1.0)
        for step in self._steps(now.totals, idle, batch_cpu, hindered=cpu < _HINDERED * seconds):
            if step in self._resting or (step == "larger batches" and not patient):
                continue
            if step in ("fewer workers", "smaller batches"):
                if earlier is None:
                    break
                # The better of two windows: on a machine that is busy otherwise, chance must not take workers away.
                rate = max(rate, earlier)
            self._trial = _Trial(step, self.workers, self._bytes, rate)
            self._take(step, working)
            return
        self._rate = rate

    def _keeps(self, trial: _Trial, rate: float) -> bool:
        """End a trial; False if its step is taken back."""
        self._trial = None
        more = trial.step in ("more workers", "larger batches")
        if rate >= trial.rate * (_GAIN if more else _LOSS):
            self._failed.pop(trial.step, None)
            return True
        self.workers, self._bytes = trial.workers, trial.nbytes
        first, most = _RESTS
        self._failed[trial.step] = self._resting[trial.step] = min(most, 2 * self._failed.get(trial.step, first // 2))
        return False

    def _steps(self, now: RunTotals, idle: float, batch_cpu: float, *, hindered: bool) -> Iterator[Step]:
        """Steps that may bring something, the likeliest first."""
        if self._config.batch_rows == "auto":
            if batch_cpu > _SLOW and self.batch_bytes > self._least():
                yield "smaller batches"
            elif batch_cpu < _SLOW / 2 and self.batch_bytes < min(_USUAL_BYTES, self._clamp(_USUAL_BYTES)):
                yield "larger batches"
        if self._config.adaptive:
            settled = self.workers > _FEW_WORKERS or self._clock() - self._began >= _SETTLED
            if self.workers > 1 and settled and (idle > _IDLE or hindered):
                yield "fewer workers"
            if self.workers < self._config.worker_limit and now.backlog and now.starving:
                yield "more workers"

    def _take(self, step: Step, working: float) -> None:
        """Change the setting; `working` is the share of their time in which the workers used a core."""
        if step == "smaller batches":
            self._bytes = self._clamp(self._bytes // 2)
        elif step == "larger batches":
            self._bytes = self._clamp(self._bytes * 2)
        elif step == "more workers":
            self.workers = min(self._config.worker_limit, self.workers + max(1, self.workers // 2))
        else:
            # As many as there is work for, but no more than three quarters fewer: they may wait for a service.
            fewer = max(self.workers // 4, round(self.workers * working * 1.25))
            self.workers = max(1, min(self.workers - 1, fewer))

    def _least(self) -> int:
        limit = self._limit()
        wide = min(_COLUMN_RAW_BYTES * self._columns, limit // 16, _MOST_BYTES)
        return max(min(_FEWEST_BYTES, max(1, limit // 64)), wide)

    def _clamp(self, nbytes: int) -> int:
        """Within the budget: every worker has a batch in hand and another one waits for it."""
        limit = self._limit()
        fair = int(limit / (self._need * (2 * self.workers + 8)))
        most = min(limit // 128, _MOST_BYTES, max(fair, _USUAL_BYTES))
        return max(self._least(), min(nbytes, most))
