"""State that the threads of one run share."""

from __future__ import annotations

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
    Source,
    State,
    Stateful,
    Transform,
)
from penstock.pipeline.stop_event import StopEvent
from penstock.pipeline.tuner import RunTotals, Tuner
from penstock.pipeline.watchdog import Watchdog, watchdog


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
        self.measured = source if isinstance(source, Measured) else None
        self._stateful = source if isinstance(source, Stateful) else None
        self.acknowledged = source if isinstance(source, Acknowledged) else None
        self.holds_rows = any(isinstance(transform, Finishing) for transform in transforms)
        """True if a transform may hold rows that were read before the position of the run and are not delivered."""
        self.stop = StopEvent()
        self.rows_ahead = RowsAhead(config.rows_ahead)
        self.tuner = Tuner(config, lambda: budget.limit)
        self.resident = ResidentWatch(budget)
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
