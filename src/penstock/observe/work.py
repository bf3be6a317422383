"""Progress of counted work that is no pipeline: a check of every byte, a plan, the steps of a comparison.

    with work_progress("checking corpus.store", unit="bytes") as progress:
        for file in files:
            progress(done, total)

A thread draws, so that the time goes on while a long call has nothing to count.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console

from penstock.memory.budget import format_bytes
from penstock.observe.display import LIVE_SECONDS, LineDisplay, LiveDisplay, Moment, RateWindow, display_on

_INTERVAL_SECONDS = 0.25


def work_progress(
    title: str,
    *,
    unit: str = "",
    total: float | None = None,
    console: Console | None = None,
    interval_seconds: float = _INTERVAL_SECONDS,
) -> WorkProgress:
    """Progress of work on standard error: a live display if that is a terminal, else lines."""
    display = display_on(Console(stderr=True) if console is None else console, title)
    return WorkProgress(display, unit=unit, total=total, interval_seconds=interval_seconds)


@dataclass(frozen=True, slots=True)
class _Figures:
    """Last figures of the work, replaced as one: another thread draws them."""

    done: float
    total: float | None = None
    share: float | None = None
    note: str = ""
    counted: bool = False


class WorkProgress:
    """Progress of work that is counted in `unit`: `bytes`, `seconds`, or a plural such as `rows`."""

    def __init__(
        self,
        display: LiveDisplay | LineDisplay,
        *,
        unit: str = "",
        total: float | None = None,
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        self._display, self._unit, self._interval_seconds = display, unit, interval_seconds
        self._figures = _Figures(0.0, total)
        self._started = time.monotonic()
        self._window = RateWindow()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, done: float, total: float | None = None, *, share: float | None = None, note: str = "") -> None:
        """Note how much is done, of how much (or which share) if that is known, and a remark for the last line."""
        total = self._figures.total if total is None else total
        if share is None and total:
            share = done / total
        self._figures = _Figures(done, total, None if share is None else min(1.0, share), note, counted=True)

    def clear(self) -> None:
        """Remove a live display until it is drawn next, so that lines can be printed."""
        self._display.clear()

    def moment(self) -> Moment:
        """Moment of the work now, as the display shows it."""
        seconds, now = time.monotonic() - self._started, self._figures
        if not now.done:
            self._window.clear()  # the time before the first figure (an open store, a scan) is not part of the speed
        self._window.add(seconds, now.done, now.share or 0.0)
        speed, share_speed = (self._window.per_second(each) if len(self._window) > 1 else 0.0 for each in (0, 1))
        left = (1.0 - now.share) / share_speed if now.share is not None and share_speed > 0 else None
        counts, speeds = self._counts(now), _speeds(self._unit, speed)
        return Moment(seconds, now.share, left, counts, speeds, bottleneck=now.note)

    def __enter__(self) -> Self:
        self._display.__enter__()
        self._thread = threading.Thread(target=self._draw, name="penstock-progress", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        self._display.__exit__(kind, error, tb)

    def _draw(self) -> None:
        wait = LIVE_SECONDS
        while not self._end.wait(wait):
            wait = self._interval_seconds
            try:
                self._display(self.moment())
            except (OSError, ValueError):
                return  # nobody reads standard error any more; the work goes on

    def _counts(self, now: _Figures) -> tuple[str, str] | None:
        if not now.counted or self._unit in ("", "seconds"):
            return None
        if self._unit == "bytes":
            return "read", format_bytes(int(now.done)) + (f" of {format_bytes(int(now.total))}" if now.total else "")
        return self._unit, f"{int(now.done):,}" + (f" of {int(now.total):,}" if now.total else "")


def _speeds(unit: str, speed: float) -> list[str]:
    """Units per second; none of what stands still."""
    if unit in ("", "seconds"):
        return []
    if unit == "bytes":
        return [f"{speed / 1e6:,.1f} MB/s"] if speed >= 5e4 else []
    return [f"{speed:,.0f} {unit}/s" if speed >= 10 else f"{speed:,.1f} {unit}/s"] if speed >= 0.05 else []
