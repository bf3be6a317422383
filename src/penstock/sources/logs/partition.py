"""Reading of one partition of a log: from an offset to an end, with retries."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.connections.logs import Log, Messages, ReadLimits, Retries

AHEAD_MESSAGES = 1000
"""Messages that are fetched at least, if there are as many: an answer costs more than a message."""
_SLICE_SECONDS = 0.25
"""Longest wait of a client for messages, after which a stop is noticed."""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Next message of a partition, and how many of its rows are delivered already."""

    offset: int
    rows: int = 0
    after: bool = False
    """True if the message before was read."""


class PartitionReader:
    """Messages of a partition in order, up to `end` (None: without an end)."""

    def __init__(
        self,
        log: Log,
        partition: int,
        position: LogPosition,
        end: int | None,
        retries: Retries,
        is_stopped: Callable[[], bool],
    ) -> None:
        self.partition, self.position, self._end = partition, position, end
        self.fetch_bytes = 1 << 20
        self._log, self._retries, self._is_stopped = log, retries, is_stopped
        self._held = Messages(position.offset)
        self._used = 0
        self._over = end is not None and position.offset >= end

    @property
    def over(self) -> bool:
        """True after the last message before the end."""
        return self._over and self._used >= len(self._held)

    @property
    def held_bytes(self) -> int:
        return self._held.nbytes if self._used < len(self._held) else 0

    def take(self, most: int, nbytes: int, wait_seconds: float | None) -> Messages:
        """Up to `most` messages with up to `nbytes` (and one more), that are there or come within a time from now.

        None waits for all of them, so that they depend on the log alone. Fewer come at the end, and if the run is
        stopped.
        """
        until = None if wait_seconds is None else time.monotonic() + wait_seconds
        found = Messages(self.position.offset)
        while most > 0 and nbytes > 0 and not self._is_stopped():
            if self._used >= len(self._held):
                if self._over:
                    break
                left = _SLICE_SECONDS if until is None else min(_SLICE_SECONDS, until - time.monotonic())
                self._fetch(most, 0.0 if self._end is not None else max(0.0, left))
                if not len(self._held):
                    if until is not None and time.monotonic() >= until:
                        break
                    continue
            stop = self._used
            for value in self._held.values[self._used : self._used + most]:
                stop += 1
                nbytes -= len(value or b"")
                if nbytes <= 0:
                    break
            most -= stop - self._used
            found.extend(self._held.part(self._used, stop))
            self._used = stop
        if len(found):
            self.position = LogPosition(found.following, after=True)
        return found

    def _fetch(self, most: int, wait_seconds: float) -> None:
        limits = ReadLimits(max(most, AHEAD_MESSAGES), self.fetch_bytes, wait_seconds)
        offset, after = self._held.following, self.position.after
        held = self._retries(lambda: self._log.read(self.partition, offset, limits, after=after))
        self._used = 0
        if self._end is not None:
            inside = len(held)
            while inside and held.offsets[inside - 1] >= self._end:
                inside -= 1
            self._over = inside < len(held) or held.following >= self._end or held.caught_up
            if inside < len(held):
                held = held.part(0, inside)
        self._held = held
