"""Profile of a training loop: where its time goes, and what would help.

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

from penstock._forks import renewed
from penstock.batching.batch import TrainingBatch
from penstock.errors import ConfigError

Item = TypeVar("Item")
Clock = Callable[[], float]
_SHORT_WAIT = 0.05
"""Share of the time that is not worth advice."""
_MUCH_PADDING = 0.25
_STAGES = {
    "order": "the order of rows",
    "fetch": "samples",
    "collate": "the collation of samples",
    "convert": "the conversion of arrays",
    "make": "batches",
}


class Stages:
    """Seconds by stage; any thread may add to them."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._seconds: dict[str, float] = {}
        self._lock = renewed(threading.Lock())

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        started = self.clock()
        try:
            yield
        finally:
            self.add(name, self.clock() - started)

    def seconds(self) -> dict[str, float]:
        with self._lock:
            return dict(self._seconds)


class Profile:
    """Measurements of a loop over a loader, taken between its batches."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.stages = Stages(clock)
        self._clock = clock
        self._requested = self._delivered = clock()
        self._training = False
        self._batches = self._samples = self._tokens = self._places = 0
        self._waited = self._trained = 0.0

    def wait(self) -> None:
        """The loop requests a batch: training on the one before is over."""
        self._requested = self._clock()
        if self._training:
            self._trained += self._requested - self._delivered
        self._training = False

    def deliver(self, batch: TrainingBatch) -> None:
        """A batch is delivered."""
        self._delivered = self._clock()
        self._waited += self._delivered - self._requested
        self._training = True
        self._batches += 1
        samples = batch.metadata.get("sample")
        self._samples += batch.batch_size if samples is None else int(samples[-1]) + 1 if len(samples) else 0
        if batch.input_ids is not None:
            self._tokens += batch.num_tokens
            self._places += int(batch.input_ids.shape[0]) * int(batch.input_ids.shape[1])

    def stop(self) -> None:
        """The loop is over; the time until the next request is not training."""
        if self._training:
            self._trained += self._clock() - self._delivered
        self._training = False

    def timed(self, made: Generator[Item, None, None]) -> Generator[Item, None, None]:
        """The same items; the time to make them is measured in whichever thread iterates."""
        try:
            while True:
                started = self._clock()
                try:
                    item = next(made)
                except StopIteration:
                    return
                finally:
                    self.stages.add("make", self._clock() - started)
                yield item
                del item
        finally:
            made.close()

    def results(self, **facts: Any) -> dict[str, Any]:
        """All measurements; `facts` of the loader are for the advice."""
        if not self._batches:
            raise ConfigError("no batch was delivered since profiling was enabled; loop over the loader first")
        trained = self._trained + (self._clock() - self._delivered if self._training else 0.0)
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
    """One sentence on what would help most."""
    wait = shares["wait"]
    waits = f"The trainer waits for {wait:.0%} of the time"
    if wait < _SHORT_WAIT:
        if padding > _MUCH_PADDING and buckets is False:
            return f"{waits}, but {padding:.0%} of its input is padding: set bucket_by_length=True."
        return f"{waits}: the loader is fast enough."
    parts = {name: share for name, share in shares.items() if name not in ("wait", "train")}
    busiest = max(parts, key=lambda name: parts[name]) if parts else "make"
    waits += f", mostly for {_STAGES.get(busiest, busiest)}: "
    if busiest == "fetch" and not fetched:
        return waits + "they are read as columns once, when the loader is first used."
    if busiest == "fetch":
        if workers is not None and workers < 4 and not tuned:
            return waits + f"raise num_workers (now {workers}), or set tune='auto'."
        return waits + (
            ("" if tuned else "try more workers with tune='auto', ")
            + "make __getitem__ cheaper, give the dataset to_columns(), or keep samples with cache_mb."
        )
    if busiest == "collate" and padding > _MUCH_PADDING and buckets is False:
        return waits + f"{padding:.0%} of it is padding, so set bucket_by_length=True."
    if fetched is False:
        return waits + "use larger batches."
    return waits + "use larger batches, or raise prefetch."
