"""Queue directory, looked at without a write: backlog, leases, members, rates between two looks."""

from __future__ import annotations

import threading
import time

from penstock.fsqueue.queue import Queue
from penstock.fsqueue.status import Status, look

_RATE_SECONDS = 5.0
"""Time over which rates are measured, once the page is open so long."""


class QueueView:
    """Queue that is looked at again and again."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._before: list[Status] = []
        self._id = ""

    def look(self) -> Status:
        """The state now, with rates since a look of some seconds ago."""
        queue = Queue.read(self._path)
        now = look(queue)
        with self._lock:
            if queue.id != self._id:
                self._id, self._before = queue.id, []  # purged and made again
            while len(self._before) > 1 and now.at - self._before[1].at >= _RATE_SECONDS:
                self._before.pop(0)
            rated = now.since(self._before[0]) if self._before and now.at - self._before[0].at > 0.5 else now
            if not self._before or now.at - self._before[-1].at >= 0.5:
                self._before.append(now)
            while self._before and time.monotonic() - self._before[0].at > 60:
                self._before.pop(0)  # nobody looked for a while: the rate would be that of the pause
        return rated
