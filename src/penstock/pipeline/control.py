"""The control thread: watches for hangs, memory and the bottleneck."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from penstock.errors import StalledError
from penstock.memory.pressure import MemoryPressureHandler
from penstock.pipeline.context import Context, StopEvent
from penstock.pipeline.metrics import on_batch
from penstock.pipeline.stages import Live
from penstock.pipeline.workers import Workers

_TICK = 0.05
_PRESSURE_TICKS = 20


_GAP_SECONDS = 1.0
_IDLE = 0.1
"""Share of a gap between two looks for which a process that runs has used the processor at least."""


class AwakeTime:
    """Time without that for which the whole process was held: by SIGSTOP, Ctrl-Z, a paused container, a debugger.

    Nothing of it runs then, and no processor is used, until `look` is called after a gap.
    """

    def __init__(self, now: float, cpu: float) -> None:
        self._now, self._cpu = now, cpu
        self._gaps: list[tuple[float, float]] = []
        """End and length of each gap."""

    def look(self, now: float, cpu: float) -> None:
        """Called all the time, with the time and the CPU seconds of the process."""
        gap = now - self._now
        if gap > _GAP_SECONDS and cpu - self._cpu < _IDLE * gap:
            self._gaps.append((now, gap))
        self._now, self._cpu = now, cpu

    def since(self, since: float) -> float:
        """Seconds from a time to the last look."""
        return self._now - since - sum(length for end, length in self._gaps if end - length >= since - _GAP_SECONDS)


class Control:
    """Looks at a run twenty times a second."""

    def __init__(self, context: Context, workers: Workers) -> None:
        self._context, self._workers = context, workers
        self._pressure = MemoryPressureHandler(context.budget)
        self._awake = AwakeTime(time.monotonic(), time.process_time())

    def run(self) -> None:
        """Until the run stops; a stage that hangs raises `StalledError`."""
        ticks = 0
        while not self._context.stop.wait(_TICK):
            ticks += 1
            if self._context.watchdog is not None:
                self._context.watchdog.beat()
            self._watch()
            self._context.resident.look()
            if ticks % _PRESSURE_TICKS == 0:
                self._pressure.check()
            if self._workers.settled:
                self._tune()
            self._charge_stages()

    def close(self) -> None:
        """Give the budget back as it was."""
        for owner in ("source", "transforms"):
            self._context.budget.hold(owner, 0, by=self._context)
        self._context.resident.end()
        self._pressure.restore()

    def _watch(self) -> None:
        """Name a stage that has been inside its own code for too long."""
        allowed = self._context.config.stall_seconds
        self._awake.look(time.monotonic(), time.process_time())
        if allowed is None:
            return
        for stage in self._context.stages:
            for thread, (since, origin) in list(stage.working.items()):
                if (seconds := self._awake.since(since)) > allowed:
                    source = self._context.source
                    if stage is self._context.reading and isinstance(source, Live):
                        thread = source.reading_thread or thread
                    frame = sys._current_frames().get(thread)
                    stack = "".join(traceback.format_stack(frame)[-6:]) if frame else "unknown\n"
                    raise StalledError(
                        f"{stage.name} has been working{on_batch(origin)} for {seconds:.1f} s, longer than "
                        f"stall_seconds={allowed:g}; it is in:\n{stack}"
                    )

    def _tune(self) -> None:
        context, buffers = self._context, self._workers.buffers
        context.tuner.look(context.totals(buffers.backlog(), starving=buffers.waiting_consumer))
        if context.tuner.workers != buffers.active:
            self._workers.set_active()

    def _charge_stages(self) -> None:
        """Charge the bytes that stages hold between calls to the budget."""
        context = self._context
        context.reading.memory = _held(context.source)
        context.budget.hold("source", context.reading.memory, by=context)
        for transform, metrics in zip(context.transforms, context.transforming):
            metrics.memory = _held(transform)
        context.budget.hold("transforms", sum(metrics.memory for metrics in context.transforming), by=context)


def _held(stage: object) -> int:
    usage = getattr(stage, "memory_usage", None)
    return int(usage()) if callable(usage) else 0


logger = logging.getLogger(__name__)


class PeriodicThread:
    """Calls `work` every `seconds` from `start` to `stop`; what it raises is logged, and the next call comes anyway."""

    def __init__(self, seconds: float, work: Callable[[], object], *, name: str = "penstock-ticker") -> None:
        self.seconds, self.work, self.name = seconds, work, name
        self._stopping = StopEvent()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """A second call does nothing."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Returns when no call is under way, and none will come."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self.seconds):
            try:
                self.work()
            except Exception:
                logger.exception("%s: its work failed", self.name)
