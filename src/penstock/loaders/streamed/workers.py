"""Choice of the workers of a stream: threads of the training process, or processes beside it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from penstock.errors import PenstockError
from penstock.loaders.streamed.processes import ProcessCount, ProcessSteps
from penstock.loaders.streamed.sampled_windows import ThreadWindows, making
from penstock.loaders.streamed.spec import StreamOptions, StreamSpec
from penstock.loaders.streamed.steps import MadeStep, StepMaker, StreamPosition, StreamSteps
from penstock.memory import MemoryBudget
from penstock.pipeline.array_worker import MAX_DEATHS, WorkerDiedError
from penstock.pipeline.cores import available_cores, ranks_on_machine

log = logging.getLogger(__name__)
_FIRST_PROCESSES = 4
_MOST_THREADS = 2
_FEW_CORES = 2
_PROCESS_BYTES = 128 << 20
"""Memory of the budget that a process beyond the first ones needs for its caches."""
_THREAD_SECONDS = 2.0
"""A stream that is read for longer than this is worth processes."""


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """Workers of a stream, and the reason for them."""

    worker_type: Literal["thread", "process", "auto"]
    """"auto": threads first, then processes."""
    count: int | None
    """None: up to two threads; more would wait for each other's turn in the interpreter."""
    reason: str
    most: int | None = None
    """Most processes, if the trainer waits for its batches."""

    @property
    def processes(self) -> ProcessCount:
        """Processes that make windows."""
        first = self.count or 1
        return ProcessCount(first, max(first, self.most or 1))

    def __str__(self) -> str:
        number = "" if self.count is None else f"{self.count} "
        number = f"{self.count} to {self.most} " if self.most and self.count != self.most else number
        kind = "thread" if self.worker_type == "thread" else "process"
        plural = kind if self.count == 1 else {"thread": "threads", "process": "processes"}[kind]
        first = "threads at first, then " if self.worker_type == "auto" else ""
        return f"{first}{number}{plural} ({self.reason})"


def choose_workers(
    options: StreamOptions,
    cores: int | None = None,
    ranks: int | None = None,
    *,
    memory: int = 1 << 30,
    stays: str | None = None,
) -> WorkerChoice:
    """Workers for these options on a machine with so many cores for so many ranks; by default this one.

    `memory` is the budget, whose caches the processes share.
    `stays` is the reason why no other process can read the input.
    """
    given = options.workers if isinstance(options.workers, int) else None
    if stays is not None and options.worker_type != "thread":
        if options.worker_type == "process":
            log.warning("streaming with threads, not processes, which slows the trainer down: %s", stays)
        return WorkerChoice("thread", given, stays)
    cores = max(1, (cores or available_cores()) // (ranks or ranks_on_machine()))
    most = given or max(1, cores - _FEW_CORES)
    processes = min(most, given or _FIRST_PROCESSES)
    most = max(processes, min(most, memory // _PROCESS_BYTES))
    if options.worker_type == "thread":
        return WorkerChoice("thread", given, "worker_type='thread'")
    if options.worker_type == "process":
        return WorkerChoice("process", processes, "worker_type='process'", most)
    if cores <= _FEW_CORES:
        return WorkerChoice(
            "thread", given, f"there are {cores} cores for each rank, and processes pay off with more than {_FEW_CORES}"
        )
    if os.name != "posix":
        return WorkerChoice("thread", given, "memory cannot be shared with processes on this system")
    return WorkerChoice(
        "auto", processes, f"there are {cores} cores for each rank, so tokenizing need not slow the trainer down", most
    )


def open_steps(spec: StreamSpec, budget: MemoryBudget, choice: WorkerChoice) -> StreamSteps:
    """Maker of the steps of a stream."""
    if choice.worker_type == "process":
        return ProcessSteps(spec, budget, choice.processes)
    local = open_step_maker(spec, budget, choice.count if choice.worker_type == "thread" else None)
    if choice.worker_type == "thread":
        return local
    return ThreadsThenProcesses(
        local, lambda: ProcessSteps(spec, budget, choice.processes), after_seconds=_THREAD_SECONDS
    )


def open_step_maker(spec: StreamSpec, budget: MemoryBudget, threads: int | None = None) -> StepMaker:
    """Maker of the steps of a stream by threads of this process."""
    # Several windows at once only if they take no more than half of the memory.
    fitting = max(1, min(available_cores(), _MOST_THREADS, budget.limit // (2 * making(spec.window_bytes))))
    threads = threads or fitting
    return StepMaker(spec, ThreadWindows(spec.filler, budget, threads), budget)


class ThreadsThenProcesses:
    """Steps made by threads at first, so that the first comes soon, and by processes as soon as these are ready."""

    def __init__(
        self,
        local: StepMaker,
        start: Callable[[], ProcessSteps],
        *,
        after_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._local, self._start, self._after, self._clock = local, start, after_seconds, clock
        self._began: float | None = None
        self._remote: ProcessSteps | None = None
        self._moved = self._refused = False
        self._deaths = 0
        """Processes that died before they could take over."""

    @property
    def elsewhere(self) -> bool:
        return self._moved

    @property
    def at_hand(self) -> int:
        return self._remote.at_hand if self._moved and self._remote is not None else 0

    def make(self, position: StreamPosition) -> MadeStep:
        if self._moved or self._moves(position):
            assert self._remote is not None
            return self._remote.make(position)
        return self._local.make(position)

    def expect(self, position: StreamPosition) -> None:
        if self._moved and self._remote is not None:
            self._remote.expect(position)

    def forget(self) -> None:
        self._local.forget()
        if self._remote is not None:
            self._remote.forget()

    def close(self) -> None:
        self._local.close()
        if self._remote is not None:
            self._remote.close()

    def _moves(self, position: StreamPosition) -> bool:
        """True from the step on that processes make."""
        now = self._clock()
        if self._began is None:
            self._began = now
        if self._refused or now - self._began < self._after:
            return False
        try:
            if self._remote is None:
                self._remote = self._start()
                self._remote.expect(position)
            if not self._remote.ready():
                return False
            self._remote.skip_to(position)
        except WorkerDiedError as error:  # another one starts at the next step
            self._deaths += 1
            if self._deaths == MAX_DEATHS:
                self._stay(error)
            self._end_remote()
            return False
        except (PenstockError, OSError) as error:
            self._stay(error)
            self._end_remote()
            return False
        self._local.close()
        self._moved = True
        log.info("processes make the batches of the stream from step %d on", position.step)
        return True

    def _stay(self, error: Exception) -> None:
        """Go on with threads: nothing is lost, but the trainer should know."""
        self._refused = True
        log.warning("streaming goes on with threads, which slow the trainer down: %s", error)

    def _end_remote(self) -> None:
        remote, self._remote = self._remote, None
        if remote is not None:
            remote.close()
