"""Moments of work: its share, speed and remaining time, as a display shows them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW_SECONDS, _WINDOW_SHARE = 5.0, 0.2


@dataclass(frozen=True, slots=True)
class Moment:
    """State of work at one time."""

    seconds: float
    """Since its beginning."""
    share: float | None = None
    """Part of it that is done, from 0 to 1; None if its size is not known."""
    seconds_left: float | None = None
    counts: tuple[str, str] | None = None
    """What is counted, and the figures: `("rows", "20 in, 18 out")`."""
    speeds: Sequence[str] = ()
    workers: int | None = None
    memory: tuple[int, int] | None = None
    """Bytes in use, and their limit."""
    bottleneck: str = ""


class RateWindow:
    """Speed of figures over the last few seconds, or the last fifth of longer work."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, tuple[float, ...]]] = deque()

    def add(self, seconds: float, *figures: float) -> None:
        """Note the figures at a time."""
        self._marks.append((seconds, figures))
        window = max(_WINDOW_SECONDS, _WINDOW_SHARE * seconds)
        while len(self._marks) > 2 and seconds - self._marks[1][0] >= window:
            self._marks.popleft()

    def clear(self) -> None:
        """Forget everything: what was before is not part of the speed."""
        self._marks.clear()

    def per_second(self, figure: int = 0) -> float:
        """Speed of one of the figures."""
        if not self._marks:
            return 0.0
        (before, first), (now, last) = self._marks[0], self._marks[-1]
        if len(self._marks) == 1:
            return last[figure] / now if now > 0 else 0.0
        return (last[figure] - first[figure]) / max(1e-9, now - before)

    def __len__(self) -> int:
        return len(self._marks)
