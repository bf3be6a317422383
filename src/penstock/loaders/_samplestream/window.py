"""How many samples may be on their way at once: the source takes room, whoever iterates gives it back."""

from __future__ import annotations

import threading
import time

__all__ = ["Window"]


class Window:
    """Room for `most` samples, of one run. Closing it wakes whoever waits, and there is no more."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.in_flight = 0
        self.peak = 0
        self.stopped = False
        """Whether nobody wants samples any more: who makes them looks at it before each."""
        self.fetching: dict[int, tuple[float, float, str, int]] = {}
        """Thread -> since when it makes a chunk, since when a sample of it, of what, and which."""
        self._waited: tuple[float, float | None] = (0.0, None)
        """Seconds of the waits that are over, and since when the source waits now: one value, read by any thread."""
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def waited(self) -> float:
        """Seconds that the source has waited for room, up to now."""
        seconds, since = self._waited
        return seconds if since is None else seconds + time.monotonic() - since

    def longest_fetch(self) -> tuple[float, str, int] | None:
        """Seconds that somebody has been making one sample by now, of what, and which."""
        now = time.monotonic()
        return max(((now - since, name, row) for _, since, name, row in list(self.fetching.values())), default=None)

    def unfinished(self) -> float:
        """Seconds spent so far on chunks that are not done."""
        now = time.monotonic()
        return sum(now - begun for begun, _, _, _ in list(self.fetching.values()))

    def take(self, count: int, timeout: float) -> bool:
        """Wait until `count` more fit; False if that was in vain: the time is up, or the window is closed."""
        with self._changed:
            self._waited = (self._waited[0], time.monotonic())
            room = self._changed.wait_for(lambda: self._closed or self.in_flight + count <= self.most, timeout)
            self._waited = (self.waited, None)
            if self._closed or not room:
                return False
            self.in_flight += count
            self.peak = max(self.peak, self.in_flight)
            return True

    def give(self, count: int) -> None:
        with self._changed:
            self.in_flight -= count
            self._changed.notify_all()

    def close(self) -> None:
        """No more room for anybody; what is on its way still comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Close it, and what is on its way is not wanted either."""
        self.stopped = True
        self.close()
