"""Event that may be set from anywhere, also by a garbage collection that interrupts the thread that waits for it."""

from __future__ import annotations

import threading


class StopEvent:
    """Event as in `threading`, with a reentrant lock.

    An abandoned loop or consumer is ended by whatever thread collects it. If that thread is inside of this very event,
    the lock of `threading.Event` would never be free.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        with self._changed:
            self._set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._set = False

    def wait(self, seconds: float | None = None) -> bool:
        """True as soon as it is set; False after so many seconds."""
        with self._changed:
            return self._set or self._changed.wait_for(self.is_set, seconds)
