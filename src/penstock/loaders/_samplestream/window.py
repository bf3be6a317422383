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
        self.waited = 0.0
        """Seconds that the source has waited for room."""
        self._changed = threading.Condition()
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def take(self, count: int, timeout: float) -> bool:
        """Wait until `count` more fit; False if that was in vain: the time is up, or the window is closed."""
        with self._changed:
            since = time.monotonic()
            room = self._changed.wait_for(lambda: self._closed or self.in_flight + count <= self.most, timeout)
            self.waited += time.monotonic() - since
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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
