"""Waiting for something that another process does to a directory, with a deadline and a word about what for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.errors import StalledError

__all__ = ["Backoff"]

logger = logging.getLogger(__name__)

_SHORTEST, _SHORT, _LONG = 0.0005, 0.004, 0.025
_A_WHILE, _FIRST_WORD = 30.0, 15.0


class Backoff:
    """One wait: short pauses first, so that what comes soon is met soon, and longer ones when nothing comes.

    Without `describe` nobody is told of a long wait: it is as it should be.

    A pause is at most 4 ms for the first half minute and 25 ms later on, or `longest_seconds`; or always
    `poll_seconds`. Looking into a directory costs some 50 us, on a network more.
    """

    def __init__(
        self,
        timeout_seconds: float | None,
        describe: Callable[[], str] | None = None,
        *,
        poll_seconds: float | None = None,
        longest_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.timeout_seconds, self.describe, self.clock = timeout_seconds, describe, clock
        self.poll_seconds, self.longest_seconds = poll_seconds, longest_seconds
        self._since: float | None = None
        self._spoken = False

    @property
    def waited(self) -> float:
        return 0.0 if self._since is None else self.clock() - self._since

    def pause(self) -> None:
        """Wait a little; raises StalledError when the time is up."""
        now = self.clock()
        if self._since is None:
            self._since = now
        waited = now - self._since
        if self.timeout_seconds is not None and waited >= self.timeout_seconds:
            what = "something to happen" if self.describe is None else self.describe()
            raise StalledError(f"waited {self.timeout_seconds:g} s for {what}")
        if waited > _FIRST_WORD and not self._spoken and self.describe is not None:
            self._spoken = True
            logger.warning("waiting for %s", self.describe())
        longest = self.longest_seconds or (_SHORT if waited < _A_WHILE else _LONG)
        pause = min(max(_SHORTEST, waited / 20), longest) if self.poll_seconds is None else self.poll_seconds
        if self.timeout_seconds is not None:
            pause = min(pause, max(self.timeout_seconds - waited, 0.0))
        time.sleep(pause)
