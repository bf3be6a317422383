"""State that the threads of one run share."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.memory.budget import MemoryBudget
from penstock.memory.pressure import ResidentWatch
from penstock.pipeline.buffers import RowsAhead
from penstock.pipeline.chain import stage_name
from penstock.pipeline.config import PipelineConfig
from penstock.pipeline.metrics import StageMetrics, bottleneck
from penstock.pipeline.stages import (
    Acknowledged,
    BlockSource,
    Finishing,
    Located,
    Measured,
    PieceSource,
    Source,
    State,
    Stateful,
    Transform,
)
from penstock.pipeline.tuner import RunTotals, Tuner
from penstock.pipeline.watchdog import Watchdog, watchdog


class StopEvent:
    """Event as in `threading`, with a reentrant lock.

    An abandoned loop or consumer is ended by whatever thread collects it. If that thread is inside of this very event,
    the lock of `threading.Event` would never be free.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, seconds: float | None = None) -> bool:
        """True as soon as it is set; False after so many seconds."""
        with self._changed:
            return self._set or self._changed.wait_for(self.is_set, seconds)


class Context:
    """The stages, the config, the budget and the figures of a run."""

    def __init__(
        self,
        source: Source,
        transforms: Sequence[Transform],
        config: PipelineConfig,
        budget: MemoryBudget,
        sink_name: str,
        loaded_bytes: int = 0,
    ) -> None:
        self.source, self.transforms, self.config, self.budget = source, list(transforms), config, budget
        # Checked once: a runtime check of a protocol costs microseconds, and these would be checked for every batch.
        self.blocks = source if isinstance(source, BlockSource) else None
        self.pieces = _in_pieces(source)
        self.located = source if isinstance(source, Located) else None
        self.measured = source if isinstance(source, Measured) else None
        self._stateful = source if isinstance(source, Stateful) else None
        self.acknowledged = source if isinstance(source, Acknowledged) else None
        self.holds_rows = any(isinstance(transform, Finishing) for transform in transforms)
        """True if a transform may hold rows that were read before the position of the run and are not delivered."""
        self.stop = StopEvent()
        self.rows_ahead = RowsAhead(config.rows_ahead)
        self.tuner = Tuner(config, lambda: budget.limit)
        self.resident = ResidentWatch(budget, loaded_bytes)
        self.reading = StageMetrics(stage_name(source), "source")
        self.decoding = StageMetrics(f"decoding {stage_name(source)}", "decode")
        self.transforming = [StageMetrics(stage_name(t), "transform") for t in transforms]
        self.sinking = StageMetrics(sink_name, "sink")
        self.watchdog: Watchdog | None = None

    def watch(self) -> None:
        """Have the watchdog of this process look at the stages too, from now to `unwatch`."""
        allowed = self.config.stall_seconds
        self.watchdog = watchdog() if allowed is not None else None
        if self.watchdog is not None and allowed is not None:
            for stage in self.stages:
                stage.watch(self.watchdog, allowed)
            self.watchdog.begin_run()

    def unwatch(self) -> None:
        """A second call does nothing."""
        watching, self.watchdog = self.watchdog, None
        if watching is not None:
            watching.end_run()

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

    def totals(self, backlog: int, *, starving: bool) -> RunTotals:
        """Totals for the tuner."""
        return RunTotals(
            stage_cpu=max(stage.cpu for stage in self.stages),
            stage_seconds=max(stage.busy for stage in self.stages),
            cpu=sum(stage.cpu for stage in self.working),
            seconds=sum(stage.busy for stage in self.working),
            backlog=backlog,
            starving=starving,
        )

    def source_state(self) -> State | None:
        return self._stateful.state_dict() if self._stateful is not None else None

    def bottleneck(self, seconds: float) -> str:
        return bottleneck(self.reading, self.working, self.sinking, seconds)


def _in_pieces(source: Source) -> PieceSource | None:
    """The source, if its blocks are decoded in pieces. A subclass that overrides `decode` alone has its own called."""
    if isinstance(source, PieceSource):
        for names in (getattr(source, "__dict__", {}), *map(vars, type(source).__mro__)):
            if "decode_pieces" in names:
                break
            if "decode" in names:
                return None
        return source
    return None
