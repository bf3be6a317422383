"""SIGINT and SIGTERM: the first asks for a checkpoint and an end, the second ends at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["INTERRUPTED", "Stopping", "WaitInterruptedError"]

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_REQUEST_SECONDS = 1.0


class WaitInterruptedError(BaseException):
    """A wait for data that a signal ended; never leaves the trainer."""


class Stopping:
    """Whether somebody asked for an end. Waits inside `waiting()` end at once, everything else is finished first."""

    def __init__(self, *, launched: bool) -> None:
        # A terminal sends its signal to a launcher and to its ranks, and the launcher sends it on to the ranks.
        self._launched = launched
        self._asked_at: float | None = None
        self._waiting = False
        self._before: list[Any] = []

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    def __enter__(self) -> Self:
        self._before = [signal.signal(each, self._ask) for each in _SIGNALS]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for each, before in zip(_SIGNALS, self._before):
            signal.signal(each, before)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a wait that leaves nothing half done when it is cut short."""
        self._waiting = True
        try:
            if self.asked:
                raise WaitInterruptedError
            yield
        finally:
            self._waiting = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
        elif not self._launched or now - self._asked_at > _SAME_REQUEST_SECONDS:
            raise SystemExit(INTERRUPTED)
        if self._waiting:
            self._waiting = False
            raise WaitInterruptedError
