"""State that the threads of one run share, and the tuner that sizes reads and workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from penstock.memory.budget import MemoryBudget
from penstock.memory.pressure import ResidentWatch
from penstock.pipeline.chain import stage_name
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.metrics import StageMetrics, bottleneck
from penstock.pipeline.stages import Acknowledged, BlockSource, Finishing, Located, Source, State, Stateful, Transform

__all__ = ["Context", "Tuner"]


_FIRST_ROWS = 256
_MOST_ROWS = 1 << 17
_FEWEST_BYTES, _MOST_BYTES = 32 << 10, 4 << 20
_QUICK, _SLOW = 0.02, 0.25  # seconds a batch should take in the busiest stage: between these it is left alone
_WINDOW, _FIRST_WINDOW = 0.4, 0.1  # seconds between two looks at the worker count; before the first one
_GAIN = 1.03  # one more worker must bring at least this, or it is taken back


class Tuner:
    """Decides batch sizes and worker counts. Rows and their order never depend on it."""

    def __init__(self, config: PipelineConfig, limit: Callable[[], int]) -> None:
        self._config = config
        self._limit = limit
        self._bytes = self._clamp(1 << 20)
        self._row_bytes = 0.0
        self._need = 4.0
        self.workers = (config.worker_limit + 1) // 2 if config.adaptive else config.worker_limit
        self._window_start = time.monotonic()
        self._window = _FIRST_WINDOW
        self._window_rows = 0
        self._trial_from: float | None = None
        self._rest = 0

    @property
    def batch_bytes(self) -> int:
        """Raw bytes to read at a time."""
        return min(self._bytes, self._clamp(self._bytes))

    @property
    def batch_rows(self) -> int:
        """Rows to request from a source that counts in rows."""
        if isinstance(self._config.batch_rows, int):
            return self._config.batch_rows
        if not self._row_bytes:
            return _FIRST_ROWS
        return max(1, min(_MOST_ROWS, int(self.batch_bytes / self._row_bytes)))

    def to_reserve(self, nbytes: int) -> int:
        """Memory that a batch of `nbytes` takes in all: itself, its decoded form, its transformed form."""
        return int(nbytes * self._need)

    def saw_read(self, rows: int, nbytes: int) -> None:
        """A batch was read; remembers how wide rows are (the widest lately, so that growth is met quickly)."""
        if rows:
            width = nbytes / rows
            self._row_bytes = max(width, 0.9 * self._row_bytes + 0.1 * width)

    def saw_need(self, raw: int, peak: int) -> None:
        """A batch of `raw` bytes took `peak` bytes on its way; half of that again is allowed for temporaries.

        No more is learned than that a batch of the usual size takes the whole budget: it goes alone then.
        """
        if raw:
            need = max(2.0, min(1.5 * peak / raw, self._limit() / self.batch_bytes))
            self._need = max(need, 0.98 * self._need + 0.02 * need)

    def adjust_batch(self, busiest_seconds: float) -> None:
        """Larger batches while the busiest stage is fast, smaller ones while it is slow."""
        if 0 < busiest_seconds < _QUICK:
            self._bytes = self._clamp(self._bytes * 2)
        elif busiest_seconds > _SLOW:
            self._bytes = self._clamp(self._bytes // 2)

    def adjust_workers(self, rows: int, backlog: int, starving: bool, idle: float) -> int:
        """One more when work waits and the sink starves, one fewer when they are idle; a step that brings nothing is
        taken back and not tried again for a while. `rows` is the running total, `idle` the share of time waited."""
        now = time.monotonic()
        if not self._config.adaptive or now - self._window_start < self._window:
            return self.workers
        self._window = _WINDOW
        rate = (rows - self._window_rows) / (now - self._window_start)
        self._window_start, self._window_rows = now, rows
        if self._trial_from is not None:
            before, self._trial_from = self._trial_from, None
            if rate < before * _GAIN:
                self.workers, self._rest = self.workers - 1, 25
                return self.workers
        if self._rest:
            self._rest -= 1
        elif backlog > self.workers and starving and self.workers < self._config.worker_limit:
            self.workers, self._trial_from = self.workers + 1, rate
        elif idle > 0.85 and not backlog and self.workers > 1:
            self.workers -= 1
        return self.workers

    def _clamp(self, nbytes: int) -> int:
        limit = self._limit()
        return max(min(_FEWEST_BYTES, max(1, limit // 64)), min(nbytes, limit // 128, _MOST_BYTES))


class Context:
    """The stages, the config, the budget and the figures of a run."""

    def __init__(
        self,
        source: Source,
        transforms: Sequence[Transform],
        config: PipelineConfig,
        budget: MemoryBudget,
        sink_name: str,
    ) -> None:
        self.source, self.transforms, self.config, self.budget = source, list(transforms), config, budget
        # Checked once: a runtime check of a protocol costs microseconds, and these would be checked for every batch.
        self.blocks = source if isinstance(source, BlockSource) else None
        self.located = source if isinstance(source, Located) else None
        self._stateful = source if isinstance(source, Stateful) else None
        self.acknowledged = source if isinstance(source, Acknowledged) else None
        self.holds_rows = any(isinstance(transform, Finishing) for transform in transforms)
        """True if a transform may hold rows that were read before the position of the run and are not delivered."""
        self.stop = threading.Event()
        self.tuner = Tuner(config, lambda: budget.limit)
        self.resident = ResidentWatch(budget)
        self.reading = StageMetrics(stage_name(source), "source")
        self.decoding = StageMetrics(f"decoding {stage_name(source)}", "decode")
        self.transforming = [StageMetrics(stage_name(t), "transform") for t in transforms]
        self.sinking = StageMetrics(sink_name, "sink")

    @property
    def working(self) -> list[StageMetrics]:
        """The stages between the source and the sink."""
        return [self.decoding, *self.transforming] if self.blocks is not None else self.transforming

    @property
    def stages(self) -> list[StageMetrics]:
        return [self.reading, *self.working, self.sinking]

    @property
    def rows_in(self) -> int:
        """Rows read so far; those of raw blocks are known when they are decoded."""
        return self.reading.rows_in + self.decoding.rows_in

    def source_state(self) -> State | None:
        return self._stateful.state_dict() if self._stateful is not None else None

    def bottleneck(self, seconds: float) -> str:
        return bottleneck(self.reading, self.working, self.sinking, seconds)
