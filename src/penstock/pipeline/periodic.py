"""A thread that does something small again and again."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

__all__ = ["PeriodicThread"]

logger = logging.getLogger(__name__)


class PeriodicThread:
    """Calls `work` every `seconds` from `start` to `stop`; what it raises is logged, and the next call comes anyway."""

    def __init__(self, seconds: float, work: Callable[[], object], *, name: str = "penstock-ticker") -> None:
        self.seconds, self.work, self.name = seconds, work, name
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """A second call does nothing."""
        if self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Returns when no call is under way, and none will come."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._stopping.set()
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(self.seconds):
            try:
                self.work()
            except Exception:
                logger.exception("%s: its work failed", self.name)
