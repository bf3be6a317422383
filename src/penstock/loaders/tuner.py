"""Tuner of a loader: workers, prefetch and chunk size, found by trial in the first seconds of a run.

No setting changes the batches or their order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

_FEWEST_BATCHES = 8
_LEAST_SECONDS = 0.15
_MOST_SECONDS = 1.5
_GAIN = 0.9
"""Largest ratio of waiting times at which a more expensive setting (threads, memory) is preferred."""
_NO_WAIT = 0.02
"""Share of the time below which waiting is not worth tuning."""


@dataclass(frozen=True, slots=True)
class TunerSetting:
    """Setting of a loader."""

    workers: int
    """Threads that fetch samples; 0: the thread of the loop."""
    prefetch: int
    """Batches prepared ahead."""
    chunk: int
    """Batches prepared at a time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Trial of a setting."""

    setting: TunerSetting
    batches: int
    seconds: float
    waited: float
    """Seconds of these that the loop waited."""

    @property
    def wait(self) -> float:
        """Mean seconds waited for a batch."""
        return self.waited / max(self.batches, 1)


@dataclass(frozen=True, slots=True)
class LoaderTuning:
    """Result of tuning."""

    setting: TunerSetting
    trials: tuple[Trial, ...] = ()
    done: bool = False
    """True after the last trial; until then `setting` is the one on trial."""

    def __str__(self) -> str:
        now = self.setting
        state = "found" if self.done else "trying"
        return (
            f"{state} workers={now.workers}, prefetch={now.prefetch}, chunk={now.chunk} after {len(self.trials)} trials"
        )


class LoaderTuner:
    """Tuner that tries settings one after the other, each for some batches, and keeps the best.

    Workers first, then prefetch, then chunk, each with the best of the others. It ends early if the loop does not wait.
    """

    def __init__(
        self,
        start: TunerSetting,
        *,
        workers: Sequence[int] = (0, 1, 2, 4, 8),
        prefetches: Sequence[int] = (2, 4, 8),
        chunks: Sequence[int] = (1, 4),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self._since = clock()
        self._rounds: list[tuple[str, list[int]]] = [
            (name, sorted(set(values)))
            for name, values in (("workers", workers), ("prefetch", prefetches), ("chunk", chunks))
            if len(set(values)) > 1
        ]
        self._best: Trial | None = None
        self._trials: list[Trial] = []
        self._kept = start
        self._left: list[TunerSetting] = []
        self._now = start
        self._begin_round()
        self._restart()

    @property
    def result(self) -> LoaderTuning:
        return LoaderTuning(self._now, tuple(self._trials), self.done)

    @property
    def setting(self) -> TunerSetting:
        return self._now

    @property
    def done(self) -> bool:
        return not self._rounds

    def saw(self, waited: float) -> bool:
        """Count a batch that the loop waited for; returns True if the setting has changed."""
        if self.done:
            return False
        self._batches += 1
        self._waited += waited
        now = self.clock()
        self._seconds += now - self._since
        self._since = now
        enough = self._batches >= _FEWEST_BATCHES and self._seconds >= _LEAST_SECONDS
        if not enough and not (self._batches >= 2 and self._seconds >= _MOST_SECONDS):
            return False
        self._end_trial(Trial(self._now, self._batches, self._seconds, self._waited))
        return True

    def resume(self) -> None:
        """Continue the trial in a new loop, without the time between the loops."""
        self._since = self.clock()

    def _restart(self) -> None:
        self._batches, self._waited, self._seconds = 0, 0.0, 0.0
        self._since = self.clock()

    def _end_trial(self, trial: Trial) -> None:
        self._trials.append(trial)
        # Settings of a round go from the cheapest to the most expensive.
        if self._best is None or trial.wait < self._best.wait * _GAIN:
            self._best = trial
        if trial.waited < _NO_WAIT * trial.seconds:
            self._best = trial
            self._rounds = []
            self._now = trial.setting
            return
        if self._left:
            self._now = self._left.pop(0)
        else:
            self._kept, self._best = self._best.setting, None
            self._rounds.pop(0)
            self._now = self._kept
            self._begin_round()
        self._restart()

    def _begin_round(self) -> None:
        if self._rounds and self._rounds[0][0] == "prefetch" and not self._kept.workers:
            self._rounds.pop(0)  # without workers nothing is prefetched
        if not self._rounds:
            return
        name, values = self._rounds[0]
        settings = [replace(self._kept, **{name: value}) for value in values]
        self._now, *self._left = settings
