"""Where the time of a training loop goes: what `enable_profiling` counts, and what can be told from it.

loader.enable_profiling()
for batch in loader:
    train(batch)
print(loader.get_profiling_results()["advice"])
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError

__all__ = ["Profile", "Stages"]

Item = TypeVar("Item")
Clock = Callable[[], float]
_LITTLE = 0.05
"""A share of the time that is not worth any advice."""
_MUCH_PADDING = 0.25


class Stages:
    """Seconds by the name of what they were spent on; any thread may add to them."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        begun = self.clock()
        try:
            yield
        finally:
            self.add(name, self.clock() - begun)

    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)


class Profile:
    """What a loop over a loader does, counted between its batches."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.stages = Stages(clock)
        self._clock = clock
        self._asked = self._given = clock()
        self._running = False
        self._batches = self._samples = self._tokens = self._places = 0
        self._waited = self._trained = 0.0

    def asked(self) -> None:
        """A batch is wanted: whatever is done with the one before is over."""
        self._asked = self._clock()
        if self._running:
            self._trained += self._asked - self._given
        self._running = False

    def given(self, batch: TrainingBatch) -> None:
        """A batch is handed over."""
        self._given = self._clock()
        self._waited += self._given - self._asked
        self._running = True
        self._batches += 1
        told = batch.metadata.get("sample")
        self._samples += batch.batch_size if told is None else int(told[-1]) + 1 if len(told) else 0
        if batch.input_ids is not None:
            self._tokens += batch.num_tokens
            self._places += int(batch.input_ids.shape[0]) * int(batch.input_ids.shape[1])

    def left(self) -> None:
        """The loop is over, or was left; what comes until the next batch is asked for is not training."""
        if self._running:
            self._trained += self._clock() - self._given
        self._running = False

    def making(self, made: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """The same batches, and what making them takes, in whatever thread."""
        try:
            while True:
                begun = self._clock()
                try:
                    item = next(made)
                except StopIteration:
                    return
                finally:
                    self.stages.add("make", self._clock() - begun)
                yield item
                del item
        finally:
            made.close()

    def results(self, **facts: Any) -> dict[str, Any]:
        """Everything that was counted; `facts` are of the loader, for the advice."""
        if not self._batches:
            raise ConfigError("no batch was handed out since profiling was enabled; loop over the loader first")
        trained = self._trained + (self._clock() - self._given if self._running else 0.0)
        total = max(self._waited + trained, 1e-12)
        seconds = {**self.stages.seconds(), "wait": self._waited, "train": trained}
        if len(seconds) > 3:
            seconds.pop("make", None)  # its parts are there
        shares = {name: spent / total for name, spent in seconds.items()}
        padding = 1 - self._tokens / self._places if self._places else 0.0
        return {
            "throughput_samples_per_sec": self._samples / total,
            "avg_batch_time_ms": 1000 * total / self._batches,
            "batches": self._batches,
            "samples": self._samples,
            "tokens": self._tokens,
            "tokens_per_sec": self._tokens / total,
            "padding_share": padding,
            "stages": shares,
            "seconds": total,
            "advice": advice(shares, padding, **facts),
        }


def advice(
    shares: dict[str, float],
    padding: float,
    *,
    workers: int | None = None,
    fetched: bool | None = None,
    buckets: bool | None = None,
    tuned: bool = False,
    **_: Any,
) -> str:
    """One sentence about what would help most."""
    wait = shares["wait"]
    if wait < _LITTLE:
        if padding > _MUCH_PADDING and buckets is False:
            return (
                f"The trainer waits for {wait:.0%} of the time, but {padding:.0%} of what it computes on is padding: "
                "set bucket_by_length=True."
            )
        return f"The trainer waits for {wait:.0%} of the time: the loader is fast enough."
    parts = {name: share for name, share in shares.items() if name not in ("wait", "train")}
    busiest = max(parts, key=lambda name: parts[name]) if parts else "make"
    said = f"The trainer waits for {wait:.0%} of the time, mostly for {_SAID.get(busiest, busiest)}: "
    if busiest == "fetch" and not fetched:
        return said + "they are read as columns when the loader is first used, and not again."
    if busiest == "fetch":
        if workers is not None and workers < 4 and not tuned:
            return said + f"raise num_workers (now {workers}), or set tune='auto'."
        return said + (
            ("" if tuned else "try more workers with tune='auto', ")
            + "make __getitem__ cheaper, give the dataset to_columns(), or keep samples with cache_mb."
        )
    if busiest == "collate" and padding > _MUCH_PADDING and buckets is False:
        return said + f"{padding:.0%} of it is padding, so set bucket_by_length=True."
    if fetched is False:
        return said + "use larger batches."
    return said + "use larger batches, or let more of them be made ahead (prefetch)."


_SAID = {
    "order": "which rows come next",
    "fetch": "samples to be fetched",
    "collate": "samples to be put together",
    "convert": "arrays to be converted",
    "make": "batches to be made",
}
