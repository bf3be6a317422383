"""Micro-batches made into batches, in order: of columns some at a time, of samples that are fetched by threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from itertools import islice
from typing import Any

from penstock.batching.batch import TrainingBatch
from penstock.loaders.samples.collate import MicroBatch, SampleCollator
from penstock.loaders.samples.columns import SampleColumns
from penstock.loaders.tuner import LoaderTuner, TunerSetting
from penstock.memory import MemoryBudget
from penstock.pipeline.prefetch import WorkAhead

__all__ = ["Made", "Production"]

_QUICK_SECONDS = 0.002
"""Batches of fetched samples are made several at a time as long as that takes no longer."""
Made = tuple[TrainingBatch, Any]
"""A batch, and the position behind it."""


class Production:
    """Makes the batches of one loop after the other, as a setting says, which a tuner may change meanwhile."""

    def __init__(
        self, maker: SampleCollator, setting: TunerSetting, tuner: LoaderTuner | None, budget: MemoryBudget | None
    ) -> None:
        self.maker, self.setting, self.tuner, self._budget = maker, setting, tuner, budget
        self._batch_seconds = 1.0
        """What a batch of fetched samples took last."""
        self._ahead: WorkAhead[list[MicroBatch], list[Made | Exception]] | None = None
        """The threads of the loop that was begun last."""

    def of_columns(self, micros: Iterator[MicroBatch], columns: SampleColumns) -> Generator[Made, None, None]:
        """Some batches at a time: what is looked up for each row is looked up for all of them at once."""
        chunk, tuner = 1, self.tuner
        if tuner is not None:
            tuner.resume()
        while True:
            begun = tuner.clock() if tuner is not None else 0.0
            group = self._next_group(micros, chunk)
            if not group:
                return
            made = self.maker.make_group(group, columns)
            for micro in group:
                batch = next(made)
                if tuner is not None and tuner.saw(tuner.clock() - begun):
                    self.setting = tuner.setting
                yield batch, micro.behind
                del batch
                if tuner is not None:
                    begun = tuner.clock()
            chunk = min(chunk * 2, max(self.setting.chunk, 1))

    def fetched(self, micros: Iterator[MicroBatch]) -> Generator[Made, None, None]:
        """Batches of samples that are fetched by threads, in order; or by this one."""
        self.maker.get_ready()
        tuner = self.tuner
        if tuner is not None:
            tuner.resume()
        ended = False
        while not ended:
            groups = self._groups(micros, partial(self._paced, self.setting))
            ahead = self._begin_ahead(groups)
            try:
                ended = yield from self._handed(map(self._make_all, groups) if ahead is None else ahead)
                if not ended and ahead is not None:  # another setting is tried; what is in work is handed out first
                    ahead.finish()
                    yield from (_made(item) for group in ahead for item in group)
            finally:
                if ahead is not None:
                    ahead.stop()

    def _begin_ahead(
        self, groups: Iterator[list[MicroBatch]]
    ) -> WorkAhead[list[MicroBatch], list[Made | Exception]] | None:
        """Threads that make batches, once those of the loop before have ended; None: the one that wants them does."""
        self.end()
        workers = self.setting.workers
        if workers:
            self._ahead = WorkAhead(
                self._make_all,
                groups,
                workers,
                workers + self.setting.prefetch,
                weight=len,
                budget=self._budget,
                size=_nbytes,
                beside=lambda: self.maker.most_fetched,
            )
        return self._ahead

    def end(self) -> None:
        """Wait until the threads of a loop that was left have ended."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _handed(self, made: Iterator[list[Made | Exception]]) -> Generator[Made, None, bool]:
        """Hand out batches; whether they are all out, or another setting is to be tried first."""
        tuner = self.tuner
        begun = tuner.clock() if tuner is not None else 0.0
        for group in made:
            changed = False
            for item in group:
                if tuner is not None:
                    changed = tuner.saw(tuner.clock() - begun) or changed
                yield _made(item)
                if tuner is not None:
                    begun = tuner.clock()
            del group
            if changed and tuner is not None:
                self.setting = tuner.setting
                return False
        return True

    def _make_all(self, micros: list[MicroBatch]) -> list[Made | Exception]:
        """Batches, up to the first that cannot be made, and why."""
        begun = time.perf_counter()
        try:
            batches = self.maker.make_fetched(micros)
        except Exception as error:  # noqa: BLE001 - it is raised where the batch would have been
            if len(micros) == 1:
                return [error]
            made: list[Made | Exception] = []
            for micro in micros:
                made += self._make_all([micro])
                if isinstance(made[-1], Exception):
                    break
            return made
        self._batch_seconds = (time.perf_counter() - begun) / len(micros)
        return [(batch, micro.behind) for batch, micro in zip(batches, micros, strict=True)]

    def _next_group(self, micros: Iterator[MicroBatch], size: int) -> list[MicroBatch]:
        stages = self.maker.stages
        begun = stages.clock() if stages is not None else 0.0
        group = list(islice(micros, size))
        if stages is not None:
            stages.add("order", stages.clock() - begun)
        return group

    def _paced(self, setting: TunerSetting) -> int:
        """How many batches to fetch at a time: several if that takes no time, but at most half of what may be ahead."""
        quick = int(_QUICK_SECONDS / max(self._batch_seconds, 1e-6))
        trying = self.tuner is not None and not self.tuner.done
        most = (setting.workers + setting.prefetch) // 2 if setting.workers else setting.prefetch
        return min(setting.chunk if trying else max(setting.chunk, quick), max(most, 1))

    def _groups(self, micros: Iterator[MicroBatch], size: Callable[[], int]) -> Iterator[list[MicroBatch]]:
        """So many at a time; those of one step together where its labels are to be counted."""
        while group := self._next_group(micros, size()):
            while self.maker.labels.counts_step(group[-1]) and group[-1].number + 1 < group[-1].count:
                group += islice(micros, 1)
            yield group

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what runs, or is being tuned, in this one."""
        return self.__dict__ | {"tuner": None, "_ahead": None}


def _made(item: Made | Exception) -> Made:
    if isinstance(item, Exception):
        raise item
    return item


def _nbytes(made: list[Made | Exception]) -> int:
    return sum(item[0].nbytes for item in made if not isinstance(item, Exception))
