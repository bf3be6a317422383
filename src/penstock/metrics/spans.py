"""Spans: how long one stage took for one batch, for a sampled share of the batches.

The hot path only appends to a bounded buffer; the thread of the watch takes the spans out and exports them.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import xxhash

from penstock.errors import ConfigError

_MOST_WAITING = 4096
"""Spans that wait for the exporter; while it is down, older ones are lost."""


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Work of one stage on one batch."""

    name: str
    trace: str
    """What the spans of one batch have in common."""
    end_ns: int
    """Unix time."""
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict)


class SpanBuffer:
    """Bounded buffer of spans of sampled batches. Appending takes no lock."""

    def __init__(self, share: float) -> None:
        if not 0 <= share <= 1:
            raise ConfigError(f"the share of batches that are traced is between 0 and 1, got {share!r}")
        self.share = share
        self._limit = int(share * (1 << 32))
        self._spans: deque[StageSpan] = deque(maxlen=_MOST_WAITING)

    def wants(self, trace: str) -> bool:
        """True if a batch is in the sample: the same answer for every stage that it goes through."""
        return xxhash.xxh32_intdigest(trace.encode("utf-8", "replace")) < self._limit

    def add(self, name: str, trace: str, seconds: float, **facts: Any) -> None:
        """Work that ends now, if its batch is in the sample."""
        if self.wants(trace):
            self._spans.append(StageSpan(name, trace, time.time_ns(), seconds, facts))

    def take(self) -> list[StageSpan]:
        """Spans since the last call."""
        taken = []
        while self._spans:
            taken.append(self._spans.popleft())
        return taken
