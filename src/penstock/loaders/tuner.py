"""How many threads, how far ahead and how much at a time: found by trying, in the first seconds of a run.

What is tuned never changes which batches come, nor their order, so trying costs nothing but time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

__all__ = ["LoaderTuner", "LoaderTuning", "Trial", "TunerSetting"]

_FEWEST_BATCHES = 8
_LEAST_SECONDS = 0.15
_MOST_SECONDS = 1.5
_GAIN = 0.9
"""A setting that costs more than another (threads, memory) must wait for less than this of its time."""
_NO_WAIT = 0.02
"""A trainer that waits for less than this share of the time has nothing to gain."""


@dataclass(frozen=True, slots=True)
class TunerSetting:
    """How batches are made."""

    workers: int
    """Threads that fetch samples; 0: the one that wants them."""
    prefetch: int
    """Batches made ahead."""
    chunk: int
    """Batches made at a time."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What a setting did."""

    setting: TunerSetting
    batches: int
    seconds: float
    waited: float
    """Seconds of them that whoever wanted the batches waited."""

    @property
    def wait(self) -> float:
        """Seconds waited for a batch."""
        return self.waited / max(self.batches, 1)


@dataclass(frozen=True, slots=True)
class LoaderTuning:
    """What was found."""

    setting: TunerSetting
    trials: tuple[Trial, ...] = ()
    done: bool = False
    """Whether all was tried; until then `setting` is what is being tried now."""

    def __str__(self) -> str:
        now = self.setting
        state = "found" if self.done else "trying"
        return (
            f"{state} workers={now.workers}, prefetch={now.prefetch}, chunk={now.chunk} after {len(self.trials)} trials"
        )


class LoaderTuner:
    """Tries settings one after the other, each for some batches, and keeps the best.

    Workers first, then how far ahead, then how much at a time; each with what was best before. It ends early where the
    trainer does not wait at all.
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
        """A batch was handed over after so many seconds; whether another setting is to be tried now."""
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
        """A loop begins: what is being tried goes on, without the time since the last batch of the loop before."""
        self._since = self.clock()

    def _restart(self) -> None:
        self._batches, self._waited, self._seconds = 0, 0.0, 0.0
        self._since = self.clock()

    def _end_trial(self, trial: Trial) -> None:
        self._trials.append(trial)
        # Settings of a round come from the cheapest to the dearest.
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
            self._rounds.pop(0)  # nothing is made ahead
        if not self._rounds:
            return
        name, values = self._rounds[0]
        settings = [replace(self._kept, **{name: value}) for value in values]
        self._now, *self._left = settings
