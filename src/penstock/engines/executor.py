"""Executors: where the tasks of a job run.

A task is a small description of work whose result appears in the job's directory by an atomic rename, or not at all.
So a task may be run again, anywhere, and an executor only has to say how each one ended.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a job."""

    name: str
    """Unique in a job, such as `map-0-000017`."""
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able and small."""
    described: str = ""
    """File and rows of its input, for messages."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """End of a task: a result, an error of its own, or the crash of the process or the node that ran it."""

    task: Task
    result: dict[str, Any] | None = None
    error: Exception | None = None
    crash: str | None = None
    """Reason of a crash, in words: out of memory, a signal."""
    node_lost: bool = False
    """True if the whole node died, which is not the fault of the task."""
    node: str = ""
    seconds: float = 0.0


Work = Callable[[Task], dict[str, Any]]
"""Function of all tasks of a job; it can be sent to other processes."""


class Executor(Protocol):
    """Place where tasks run."""

    @property
    def slots(self) -> int:
        """Tasks that run at once, as of now."""
        ...

    @property
    def room(self) -> int:
        """Tasks to submit at once: at least as many as run, more where a cluster grows with its backlog."""
        ...

    def start(self, work: Work, checks: Mapping[str, Any]) -> None:
        """Check every node, and make the work known there."""
        ...

    def submit(self, task: Task) -> None: ...

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        """Tasks that have ended since the last call, in any order; none after the timeout."""
        ...

    def cancel(self, task: Task) -> None:
        """Cancel a task that is not done, if that is possible; its outcome may still come."""
        ...

    def snapshot(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class InProcess:
    """Executor in this process: one task after the other, each when it is waited for."""

    slots = room = 1

    def __init__(self) -> None:
        self._work: Work | None = None
        self._waiting: deque[Task] = deque()

    def start(self, work: Work, checks: Mapping[str, Any]) -> None:
        self._work = work

    def submit(self, task: Task) -> None:
        self._waiting.append(task)

    def wait(self, timeout_seconds: float) -> list[Outcome]:
        if not self._waiting:
            return []
        assert self._work is not None
        task, since = self._waiting.popleft(), time.monotonic()
        try:
            result = self._work(task)
        except Exception as error:  # noqa: BLE001 - the driver decides
            return [Outcome(task, error=error, seconds=time.monotonic() - since)]
        return [Outcome(task, result, seconds=time.monotonic() - since)]

    def cancel(self, task: Task) -> None:
        if task in self._waiting:
            self._waiting.remove(task)

    def snapshot(self) -> dict[str, Any]:
        return {"nodes": 1, "running": 0}

    def close(self) -> None:
        self._waiting.clear()
