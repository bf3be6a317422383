"""Counters of a loader: what it has delivered, and how long its trainer waited.

A batch adds a few numbers that are known already: no array is read, no field is made, no device is waited for. Rows by
source and truncated tokens are counted from row numbers in host memory, many batches at once, mostly by the reader.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._forks import renewed
from penstock.arrays.truncation import Truncation
from penstock.batching.batch import TrainingBatch
from penstock.metrics.readings import Readings, key_of
from penstock.metrics.spans import SpanBuffer

log = logging.getLogger(__name__)
Lengths = Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
_Parts = tuple[Sequence[str], Any, Any, Any]
"""Names of the sources of a batch; source, sample and row of each of its parts."""
_WINDOW_SECONDS = 10.0
"""Time that rates are taken over."""
_MARK_SECONDS = 0.5
_UNCOUNTED = 256
"""Batches whose row numbers may wait to be counted."""


class LoaderCounters:
    """Counters of one loader in one process."""

    def __init__(
        self,
        cuts: Sequence[tuple[Truncation, Lengths] | None] = (),
        many_files: Callable[[], bool] | None = None,
    ) -> None:
        self.spans: SpanBuffer | None = None
        self._cuts = cuts
        """Truncation of each source, and the lengths of its rows; None where nothing is cut."""
        self._truncates = any(cut is not None for cut in cuts)
        self._many_files = many_files
        """Tells of a stream whether it has more than one file, of which each batch names its own; None: no stream."""
        self._keeps_all = self._truncates or many_files is not None
        """True if batches of a single source are counted, too."""
        self._clock = time.perf_counter
        self._began: float | None = None
        self._requested = self._delivered = 0.0
        self._waiting = self._training = False
        self._steps = self._samples = self._tokens = self._places = self._truncated = 0
        self._waited = self._trained = 0.0
        self._uncounted: deque[_Parts] = deque()
        self.last: tuple[int, int] | None = None
        """Step and epoch of the last batch that says them."""
        self._by_source: Counter[str] = Counter()
        self._marks: deque[tuple[float, int, int, float]] = deque()
        self._failed = False
        self._lock = renewed(threading.Lock())

    def request(self) -> None:
        """The trainer asks for a batch."""
        now = self._clock()
        if self._training:
            self._trained += now - self._delivered
            self._training = False
        elif self._began is None:
            self._began = now
        self._requested, self._waiting = now, True

    def deliver(self, batch: TrainingBatch) -> None:
        """The trainer gets a batch."""
        now = self._clock()
        if self._waiting:
            self._waited += now - self._requested
        self._delivered, self._waiting, self._training = now, False, True
        self._steps += 1
        try:
            self._add(batch, now)
        except Exception as error:  # noqa: BLE001 - a batch that cannot be counted is delivered all the same
            if not self._failed:
                log.warning("batches are delivered, but not counted: %s: %s", type(error).__name__, error)
            self._failed = True

    def _add(self, batch: TrainingBatch, now: float) -> None:
        facts = batch.metadata
        get = facts.get
        if "step" in facts:
            self.last = facts["step"], get("epoch", 0)
        rows, columns = _shape(batch)
        places, tokens = rows * columns, batch._num_tokens
        self._places += places
        self._tokens += places if tokens is None else tokens
        samples = get("sample")
        self._samples += rows if samples is None else int(samples[-1]) + 1 if len(samples) else 0
        cut = get("truncated_tokens")
        if type(cut) is int:  # rollouts have one for each row, maybe on a device
            self._truncated += cut
        names = get("sources")
        if names is not None and (len(names) > 1 or self._keeps_all):
            self._uncounted.append((names, get("source"), samples, get("row") if self._truncates else None))
            if len(self._uncounted) >= _UNCOUNTED:
                self._count()
        elif (name := get("loader")) is not None:
            self._by_source[name] += 1  # weights of such a mixture count batches
        if self.spans is not None:
            self.spans.add("batch", f"step {facts.get('step')}", now - self._requested, tokens=tokens or 0, rows=rows)

    def stop(self) -> None:
        """The loop is over; the time until the next request is not training."""
        if self._training:
            self._trained += self._clock() - self._delivered
        self._training = self._waiting = False

    def readings(self) -> Readings:
        """Metrics by name; any thread may ask."""
        if self._began is None:
            return {}
        self._count()
        now = self._clock()
        waited = self._waited + (now - self._requested if self._waiting else 0.0)
        trained = self._trained + (now - self._delivered if self._training else 0.0)
        tokens_per_second, steps_per_second, wait_share = self._rates(now, waited)
        places, drawn = self._places, sum(self._by_source.values())
        found: Readings = {
            "penstock_loader_seconds": now - self._began,
            "penstock_loader_steps_total": self._steps,
            "penstock_loader_samples_total": self._samples,
            "penstock_loader_tokens_total": self._tokens,
            "penstock_loader_places_total": places,
            "penstock_loader_tokens_per_second": tokens_per_second,
            "penstock_loader_steps_per_second": steps_per_second,
            "penstock_loader_data_wait_seconds_total": waited,
            "penstock_loader_train_seconds_total": trained,
            "penstock_loader_data_wait_ratio": wait_share,
            "penstock_loader_padding_ratio": 1 - min(self._tokens, places) / places if places else 0.0,
            "penstock_loader_truncated_tokens_total": self._truncated,
        }
        for name, number in sorted(self._by_source.items()):
            found[key_of("penstock_loader_source_samples_total", source=name)] = number
            found[key_of("penstock_loader_source_ratio", source=name)] = number / drawn
        return found

    def _rates(self, now: float, waited: float) -> tuple[float, float, float]:
        """Tokens and steps a second and the share of waiting, lately."""
        with self._lock:
            marks = self._marks
            if not marks:
                marks.append((self._began or now, 0, 0, 0.0))
            while len(marks) > 1 and now - marks[1][0] >= _WINDOW_SECONDS:
                marks.popleft()
            since, tokens, steps, waiting = marks[0]
            if now - marks[-1][0] >= _MARK_SECONDS:
                marks.append((now, self._tokens, self._steps, waited))
        seconds = max(now - since, 1e-9)
        share = min(max((waited - waiting) / seconds, 0.0), 1.0)
        return (self._tokens - tokens) / seconds, (self._steps - steps) / seconds, share

    def _count(self) -> None:
        """Count the row numbers of the batches before; the training thread and a reader take turns."""
        with self._lock:
            waiting = [self._uncounted.popleft() for _ in range(len(self._uncounted))]
            waiting = [each for each in waiting if each[1] is not None and len(each[1])]
            if not waiting:
                return
            many_files = self._many_files is not None and self._many_files()
            self._add_samples([each for each in waiting if many_files or len(each[0]) > 1])
            if self._truncates:
                self._add_truncated(waiting)

    def _add_samples(self, waiting: list[_Parts]) -> None:
        """Count samples by name: a number is that of a source in its own batch, and may be another's in the next."""
        if not waiting:
            return
        listed: list[str] = []
        begins: list[int] = []
        last: Sequence[str] = ()
        for names, _, _, _ in waiting:
            if names is not last and names != last:
                listed += names
                last = names
            begins.append(len(listed) - len(names))
        sources = np.concatenate([source for _, source, _, _ in waiting])
        if begins[-1]:  # the names differ
            sources = sources + np.repeat(begins, [len(source) for _, source, _, _ in waiting])
        # A sample is of one source, as weights have it; its parts are as many as its documents are short.
        firsts = np.concatenate([_firsts(source, samples) for _, source, samples, _ in waiting])
        for name, number in zip(listed, np.bincount(sources[firsts]).tolist()):
            if number:
                self._by_source[name] += number

    def _add_truncated(self, waiting: list[_Parts]) -> None:
        sources = np.concatenate([source for _, source, _, _ in waiting])
        rows = np.concatenate([rows for _, _, _, rows in waiting])
        for number, cut in enumerate(self._cuts):
            if cut is not None and len(mine := rows[sources == number]):
                self._truncated += cut[0].lost_tokens(cut[1](mine))


def _firsts(source: npt.NDArray[Any], samples: npt.NDArray[Any] | None) -> npt.NDArray[np.bool_]:
    """True for the first part of each sample of a batch."""
    first = np.ones(len(source), np.bool_)
    if samples is not None:
        np.not_equal(samples[1:], samples[:-1], out=first[1:])
    return first


def _shape(batch: TrainingBatch) -> tuple[int, int]:
    """Rows and columns of a batch, without making its fields."""
    mine = batch.__dict__
    made = mine.get("input_ids")
    if made is not None:
        shape = made.shape
        return (int(shape[0]), int(shape[1])) if len(shape) == 2 else (int(shape[0]), 0)
    compact = getattr(mine.get("_deferred"), "compact", None)
    if compact is None:
        return 0, 0
    grid = compact.grid
    return grid.rows, grid.tokens
