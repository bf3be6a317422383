"""Not faster than asked for, and whether it is slower: samples against a clock."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Pace"]

_SHORTEST_SLEEP = 0.002
"""Seconds: a system sleeps no shorter than that with any precision, so samples come a few at a time instead."""
_CREDIT_SECONDS = 1.0
"""After a pause no more than this is caught up on at full speed."""
_LOOK_SECONDS = 1.0
_ENOUGH = 0.95


class Pace:
    """Counts samples as they are handed out, holds them back when they come faster than `target` a second, and
    measures: over the whole run, and over the last second or more.

    `on_behind` is called once, the first time a whole second had fewer than 95 % of the target.
    """

    def __init__(
        self,
        target: float | None,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
        on_behind: Callable[[], None] = lambda: None,
    ) -> None:
        self.target, self._clock, self._sleep, self._on_behind = target, clock, sleep, on_behind
        self.samples = 0
        self.waited = self.paced = 0.0
        """Seconds spent waiting for data, and spent holding it back."""
        self.recent: float | None = None
        """Samples a second when it was last looked at."""
        self.recent_wait = 0.0
        """The share of that time spent waiting for data."""
        self._told = False
        self._start = self._since = self._due = clock()
        self._end: float | None = None
        self._since_samples, self._since_waited = 0, 0.0

    def waiting(self, seconds: float) -> None:
        self.waited += seconds

    def step(self) -> None:
        """Called before each sample is handed out: returns when it is due."""
        now = self._clock()
        if self.target is not None:
            if self._due - now >= _SHORTEST_SLEEP:
                self._sleep(self._due - now)
                before, now = now, self._clock()
                self.paced += now - before
            self._due = max(self._due, now - _CREDIT_SECONDS) + 1 / self.target
        if now - self._since >= _LOOK_SECONDS:
            self._look(now)
        self.samples += 1

    def end(self) -> None:
        """No more will come; the clock stands still from here."""
        if self._end is None:
            self._end = self._clock()

    @property
    def seconds(self) -> float:
        return (self._clock() if self._end is None else self._end) - self._start

    @property
    def overall(self) -> float:
        """Samples a second since the start."""
        seconds = self.seconds
        return self.samples / seconds if seconds > 0 else 0.0

    @property
    def behind(self) -> bool | None:
        """Whether the target is missed: lately, or in all if that was shorter than a second; None without one."""
        if self.target is None:
            return None
        rate = self.recent if self.recent is not None else self.overall
        return self.samples > 0 and self.seconds > 0 and rate < _ENOUGH * self.target

    @property
    def wait_share(self) -> float:
        """How much of the time whoever iterates waited for data, over the same time as `behind`."""
        if self.recent is not None:
            return self.recent_wait
        seconds = self.seconds
        return self.waited / seconds if seconds > 0 else 0.0

    def _look(self, now: float) -> None:
        span = now - self._since
        self.recent = (self.samples - self._since_samples) / span
        self.recent_wait = (self.waited - self._since_waited) / span
        self._since, self._since_samples, self._since_waited = now, self.samples, self.waited
        if self.behind and not self._told:
            self._told = True
            self._on_behind()
