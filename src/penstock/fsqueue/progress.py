"""What a provider has made so far: a line that is drawn over and over on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock.fsqueue.provider import Progress
from penstock.memory.budget import format_bytes

__all__ = ["ProgressLines", "summary"]

_RATE_SECONDS = 5.0


class ProgressLines:
    """Shows every progress on a terminal; elsewhere a line every few seconds, and fewer while nothing is made."""

    def __init__(self, console: Console, *, every_seconds: float = 5.0, idle_seconds: float = 60.0) -> None:
        self._console = console
        self._every_seconds, self._idle_seconds = every_seconds, idle_seconds
        self._rate = _Rate()
        self._shown_at = 0.0
        self._shown_batches = -1
        # Without a refresh thread: nothing changes but when there is progress.
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, progress: Progress) -> None:
        rate = self._rate.add(progress)
        line = progress_line(progress, rate)
        if self._live is not None:
            self._live.update(Text(line, style="cyan"), refresh=True)
            return
        batches = sum(progress.batches.values())
        due = self._every_seconds if batches != self._shown_batches else self._idle_seconds
        if progress.seconds - self._shown_at >= due:
            self._shown_at, self._shown_batches = progress.seconds, batches
            self._console.print(f"prepare.py: {line}", markup=False, highlight=False, soft_wrap=True)


def progress_line(progress: Progress, batches_per_second: float) -> str:
    """`train 128, val 16 batches in 18 files, 12.5 MiB, 45.2 batches/s; backlog train 16, val 2 files; waiting ...`."""
    parts = [
        f"{_made(progress)}, {batches_per_second:,.1f} batches/s",
        f"backlog {_by_split(progress.backlog)} files",
    ]
    if progress.waiting:
        parts.append("waiting for the trainer to read")
    return "; ".join(parts)


def summary(progress: Progress) -> str:
    """The last line of a run."""
    return f"done: {_made(progress)}, in {progress.seconds:,.1f} s"


def _made(progress: Progress) -> str:
    files = sum(progress.files.values())
    return (
        f"{_by_split(progress.batches)} batches in {files:,} file{'s' * (files != 1)}, {format_bytes(progress.bytes)}"
    )


def _by_split(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{split} {count:,}" for split, count in counts.items()) or "0"


class _Rate:
    """Batches per second over the last few seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque([(0.0, 0)])

    def add(self, progress: Progress) -> float:
        now, batches = progress.seconds, sum(progress.batches.values())
        self._points.append((now, batches))
        while len(self._points) > 2 and self._points[1][0] <= now - _RATE_SECONDS:
            self._points.popleft()
        then, before = self._points[0]
        return (batches - before) / (now - then) if now > then else 0.0
