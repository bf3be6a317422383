"""Not faster than asked for, and whether it is slower: samples against a clock."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RateLimit"]

_SHORTEST_SLEEP = 0.002
"""Seconds: a system sleeps no shorter than that with any precision, so samples come a few at a time instead."""
_CREDIT_SECONDS = 1.0
"""After a pause no more than this is caught up on at full speed."""
_LOOK_SECONDS = 1.0
_ENOUGH = 0.95


class RateLimit:
    """Counts samples as they are handed out, holds them back when they come faster than `target` a second, and
    measures: over the whole run, and over the last second or more.

    `on_behind` is called once, the first time a whole second had fewer than 95 % of the target. One thread loops:
    it calls the methods. Any thread may read: figures are of this moment, with a wait that is not over yet in them.
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
        self.paced = 0.0
        """Seconds spent holding samples back."""
        self._told = self._begun = False
        self._start = self._due = clock()
        self._end: float | None = None
        self._wait: tuple[float, float | None] = (0.0, None)
        """Seconds of the waits that are over, and since when there is one."""
        self._look_back = (self._start, 0, 0.0)
        """When it was last looked at, the samples and the seconds waited until then."""
        self._last: tuple[float, float] | None = None
        """What was seen then: samples a second, and the share of that time spent waiting."""

    def begin(self) -> None:
        """Somebody asks for samples from here on: what was before is not slowness."""
        self._begun = True
        self._look_back = (self._clock(), self.samples, self.waited)

    def wait(self) -> None:
        """Whoever asks has to wait for data from here on, until `got`."""
        self._wait = (self._wait[0], self._clock())

    def got(self) -> None:
        seconds, since = self._wait
        self._wait = (seconds if since is None else seconds + self._clock() - since, None)

    def step(self) -> None:
        """Called before each sample is handed out: returns when it is due."""
        now = self._clock()
        if self.target is not None:
            if self._due - now >= _SHORTEST_SLEEP:
                self._sleep(self._due - now)
                before, now = now, self._clock()
                self.paced += now - before
            self._due = max(self._due, now - _CREDIT_SECONDS) + 1 / self.target
        if now - self._look_back[0] >= _LOOK_SECONDS:
            self.look(now)
        self.samples += 1

    def look(self, now: float | None = None) -> None:
        """Now and then, also while waiting: if a second has passed, whether it had samples enough."""
        now = self._clock() if now is None else now
        if now - self._look_back[0] < _LOOK_SECONDS:
            return
        self._last = self._lately(now)
        self._look_back = (now, self.samples, self.waited)
        if self.behind and not self._told:
            self._told = True
            self._on_behind()

    def end(self) -> None:
        """No more will come; the clock stands still from here."""
        if self._end is None:
            self.got()
            self._end = self._clock()

    @property
    def waited(self) -> float:
        """Seconds spent waiting for data."""
        seconds, since = self._wait
        return seconds if since is None else seconds + self._now() - since

    @property
    def seconds(self) -> float:
        return self._now() - self._start

    @property
    def overall(self) -> float:
        """Samples a second since the start."""
        seconds = self.seconds
        return self.samples / seconds if seconds > 0 else 0.0

    @property
    def recent(self) -> float | None:
        """Samples a second over the last second or more; None if that has not passed yet."""
        lately = self._recently()
        return None if lately is None else lately[0]

    @property
    def behind(self) -> bool | None:
        """Whether the target is missed: lately, or in all if that was shorter than a second; None without one."""
        if self.target is None:
            return None
        lately = self._recently() or self._so_far()
        return lately is not None and lately[0] < _ENOUGH * self.target

    @property
    def wait_share(self) -> float:
        """How much of the time whoever iterates waited for data, over the same time as `behind`."""
        lately = self._recently() or self._so_far()
        return 0.0 if lately is None else lately[1]

    def _now(self) -> float:
        return self._clock() if self._end is None else self._end

    def _recently(self) -> tuple[float, float] | None:
        now = self._now()
        return self._lately(now) if self._begun and now - self._look_back[0] >= _LOOK_SECONDS else self._last

    def _so_far(self) -> tuple[float, float] | None:
        """The same while it is less than a second, if there was anything."""
        now = self._now()
        return self._lately(now) if self.samples and now > self._look_back[0] else None

    def _lately(self, now: float) -> tuple[float, float]:
        since, samples, waited = self._look_back
        return (self.samples - samples) / (now - since), (self.waited - waited) / (now - since)
