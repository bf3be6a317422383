"""Rate limit and throughput of a loop."""

from __future__ import annotations

from collections.abc import Callable


class RateLimit:
    """Clock of a loop: delays samples that are faster than `target` a second, and measures the throughput.

    It measures the whole run and the last window of a second or more. `on_behind` is called once, after the first
    window with less than 95 % of the target. The looping thread calls the methods; any thread may read the figures.
    """

    _SHORTEST_SLEEP = 0.002
    """Shorter sleeps are imprecise: at high rates samples come a few at a time."""
    _CREDIT_SECONDS = 1.0
    """Most that is caught up on at full speed after a pause."""
    _WINDOW_SECONDS = 1.0
    _ENOUGH = 0.95

    def __init__(
        self,
        target: float | None,
        clock: Callable[[], float],
        sleep: Callable[[float], object],
        on_behind: Callable[[], None] = lambda: None,
    ) -> None:
        self.target, self._clock, self._sleep, self._on_behind = target, clock, sleep, on_behind
        self.samples, self.paced = 0, 0.0
        self._reported = self._begun = False
        self._start = self._due = clock()
        self._end: float | None = None
        self._wait: tuple[float, float | None] = (0.0, None)
        """Seconds of the waits that are over, and the start of the current one."""
        self._window = (self._start, 0, 0.0)
        """Start of the window, and the samples and seconds waited before it."""
        self._last: tuple[float, float] | None = None
        """Samples a second, and share of the time spent waiting, of the last window."""

    def begin(self) -> None:
        """Start of the loop: time before it is not slowness."""
        self._begun, self._window = True, (self._clock(), self.samples, self.waited)

    def wait(self) -> None:
        """The loop waits for data until `arrived`."""
        self._wait = (self._wait[0], self._clock())

    def arrived(self) -> None:
        self._wait = (self.waited, None)

    def step(self) -> None:
        """Called before each sample: returns when the sample is due."""
        now = self._clock()
        if self.target is not None:
            if self._due - now >= self._SHORTEST_SLEEP:
                self._sleep(self._due - now)
                before, now = now, self._clock()
                self.paced += now - before
            self._due = max(self._due, now - self._CREDIT_SECONDS) + 1 / self.target
        if now - self._window[0] >= self._WINDOW_SECONDS:
            self.look()
        self.samples += 1

    def look(self) -> None:
        """Close the window if it is long enough, and report a missed target. Called while waiting, too."""
        now = self._clock()
        if now - self._window[0] < self._WINDOW_SECONDS:
            return
        self._last = self._measure(now)
        self._window = (now, self.samples, self.waited)
        if self.behind and not self._reported:
            self._reported = True
            self._on_behind()

    def end(self) -> None:
        """Stop the clock; idempotent."""
        if self._end is None:
            self.arrived()
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
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def recent(self) -> float | None:
        """Samples a second of the last window; None before there is one."""
        recent = self._recent()
        return None if recent is None else recent[0]

    @property
    def behind(self) -> bool | None:
        """True if the target is missed, lately or since the start; None without a target."""
        if self.target is None:
            return None
        measured = self._recent() or self._so_far()
        return measured is not None and measured[0] < self._ENOUGH * self.target

    @property
    def wait_share(self) -> float:
        """Share of the time that the loop waited for data, over the same time as `behind`."""
        measured = self._recent() or self._so_far()
        return 0.0 if measured is None else measured[1]

    def _now(self) -> float:
        return self._clock() if self._end is None else self._end

    def _recent(self) -> tuple[float, float] | None:
        now = self._now()
        return self._measure(now) if self._begun and now - self._window[0] >= self._WINDOW_SECONDS else self._last

    def _so_far(self) -> tuple[float, float] | None:
        """The window that is shorter than a second, once it has samples."""
        now = self._now()
        return self._measure(now) if self.samples and now > self._window[0] else None

    def _measure(self, now: float) -> tuple[float, float]:
        since, samples, waited = self._window
        return (self.samples - samples) / (now - since), (self.waited - waited) / (now - since)
