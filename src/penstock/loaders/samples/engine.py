"""Batches of samples by a plan: which samples a step is made of is arithmetic, and the step is cut into micro-batches.

plan step (one optimizer step of all ranks) -> micro-batches of all ranks -> the rows of this rank -> arrays
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.distributed.sharding import share_cuts
from penstock.errors import ConfigError, PenstockError, ResumeError
from penstock.loaders.samples.collate import MicroBatch, SampleCollator
from penstock.loaders.samples.columns import SampleColumns
from penstock.loaders.samples.datasets import SampleDataset
from penstock.loaders.samples.layout import SampleLayout
from penstock.loaders.tuner import LoaderTuner, TunerSetting
from penstock.memory import MemoryBudget
from penstock.memory.views import keep_freed
from penstock.order.plan import Plan, Position, Step
from penstock.order.positions import larger_than_epoch
from penstock.order.states import STATE, from_state, to_state
from penstock.order.steps import next_epoch
from penstock.pipeline.prefetch import WorkAhead

_QUICK_SECONDS = 0.002
"""Batches of fetched samples are made several at a time as long as that takes no longer."""
ReadyBatch = tuple[TrainingBatch, Any]
"""A batch and the position after it."""


class BatchProducer:
    """Makes the batches of one loop after the other, as a setting says, which a tuner may change meanwhile."""

    def __init__(
        self, collator: SampleCollator, setting: TunerSetting, tuner: LoaderTuner | None, budget: MemoryBudget | None
    ) -> None:
        self.collator, self.setting, self.tuner, self._budget = collator, setting, tuner, budget
        self._batch_seconds = 1.0
        """What a batch of fetched samples took last."""
        self._ahead: WorkAhead[list[MicroBatch], list[ReadyBatch | Exception]] | None = None
        """The threads of the loop that was begun last."""

    def of_columns(self, micros: Iterator[MicroBatch], columns: SampleColumns) -> Generator[ReadyBatch, None, None]:
        """Batches of columns, collated several at a time."""
        chunk, tuner = 1, self.tuner
        if tuner is not None:
            tuner.resume()
        while True:
            begun = tuner.clock() if tuner is not None else 0.0
            group = self._next_group(micros, chunk)
            if not group:
                return
            made = self.collator.make_group(group, columns)
            for micro in group:
                batch = next(made)
                if tuner is not None and tuner.saw(tuner.clock() - begun):
                    self.setting = tuner.setting
                yield batch, micro.next_position
                del batch
                if tuner is not None:
                    begun = tuner.clock()
            chunk = min(chunk * 2, max(self.setting.chunk, 1))

    def fetched(self, micros: Iterator[MicroBatch]) -> Generator[ReadyBatch, None, None]:
        """Batches of samples that threads fetch, in order; without workers, the calling thread."""
        self.collator.get_ready()
        tuner = self.tuner
        if tuner is not None:
            tuner.resume()
        ended = False
        while not ended:
            groups = self._groups(micros, partial(self._paced, self.setting))
            ahead = self._begin_ahead(groups)
            try:
                ended = yield from self._handed(map(self._make_all, groups) if ahead is None else ahead)
                if not ended and ahead is not None:  # another setting is tried after what was begun with this one
                    ahead.finish()
                    yield from (_made(item) for group in ahead for item in group)
            finally:
                if ahead is not None:
                    ahead.stop()

    def _begin_ahead(
        self, groups: Iterator[list[MicroBatch]]
    ) -> WorkAhead[list[MicroBatch], list[ReadyBatch | Exception]] | None:
        """Threads that make batches, after those of the previous loop have ended; None without workers."""
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
                extra=lambda: self.collator.most_fetched,
            )
        return self._ahead

    def end(self) -> None:
        """Wait for the threads of a loop that was left."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def _handed(self, made: Iterator[list[ReadyBatch | Exception]]) -> Generator[ReadyBatch, None, bool]:
        """Yield batches; False if another setting is to be tried before the rest."""
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

    def _make_all(self, micros: list[MicroBatch]) -> list[ReadyBatch | Exception]:
        """Batches up to the first that fails, and its error."""
        begun = time.perf_counter()
        try:
            batches = self.collator.make_fetched(micros)
        except Exception as error:  # noqa: BLE001 - it is raised where the batch would have been
            if len(micros) == 1:
                return [error]
            made: list[ReadyBatch | Exception] = []
            for micro in micros:
                made += self._make_all([micro])
                if isinstance(made[-1], Exception):
                    break
            return made
        self._batch_seconds = (time.perf_counter() - begun) / len(micros)
        return [(batch, micro.next_position) for batch, micro in zip(batches, micros, strict=True)]

    def _next_group(self, micros: Iterator[MicroBatch], size: int) -> list[MicroBatch]:
        stages = self.collator.stages
        begun = stages.clock() if stages is not None else 0.0
        group = list(islice(micros, size))
        if stages is not None:
            stages.add("order", stages.clock() - begun)
        return group

    def _paced(self, setting: TunerSetting) -> int:
        """Number of batches to fetch at a time: several if they are quick, at most half of the prefetch."""
        quick = int(_QUICK_SECONDS / max(self._batch_seconds, 1e-6))
        trying = self.tuner is not None and not self.tuner.done
        most = (setting.workers + setting.prefetch) // 2 if setting.workers else setting.prefetch
        return min(setting.chunk if trying else max(setting.chunk, quick), max(most, 1))

    def _groups(self, micros: Iterator[MicroBatch], size: Callable[[], int]) -> Iterator[list[MicroBatch]]:
        """Groups of micro-batches; those of a step stay together where its labels are counted."""
        while group := self._next_group(micros, size()):
            while self.collator.labels.counts_step(group[-1]) and group[-1].number + 1 < group[-1].count:
                group += islice(micros, 1)
            yield group

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, without threads and the tuner."""
        return self.__dict__ | {"tuner": None, "_ahead": None}


def _made(item: ReadyBatch | Exception) -> ReadyBatch:
    if isinstance(item, Exception):
        raise item
    return item


def _nbytes(made: list[ReadyBatch | Exception]) -> int:
    return sum(item[0].nbytes for item in made if not isinstance(item, Exception))


_KEPT_BYTES = 4 << 20
_STEPS_AT_ONCE = 64
"""Steps of the plan that are read together."""


class SamplePosition(NamedTuple):
    """Position between two batches: a step of the plan, and the number of its micro-batches that are done."""

    place: Position
    micro: int = 0

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def step(self) -> int:
        return self.place.step


class SampleEngine:
    """Batches of one rank, from any position."""

    def __init__(
        self,
        dataset: SampleDataset,
        plan: Plan,
        options: Options,
        layout: SampleLayout,
        *,
        accumulation: int,
        setting: TunerSetting,
        tuner: LoaderTuner | None = None,
    ) -> None:
        self.dataset, self.plan, self.options = dataset, plan, options
        self.rank, self.batch_size, self.accumulation = options.find_rank(), options.batch_size, accumulation
        self.global_micro = self.batch_size * self.rank.world_size
        self.collator = SampleCollator(dataset, layout, options, self.rank)
        self._producer = BatchProducer(self.collator, setting, tuner, options.memory)
        keep_freed(_KEPT_BYTES)

    @property
    def setting(self) -> TunerSetting:
        """Current setting of workers and prefetch."""
        return self._producer.setting

    @property
    def tuner(self) -> LoaderTuner | None:
        return self._producer.tuner

    @property
    def names(self) -> str:
        return ", ".join(self.plan.names)

    # Positions

    def start(self) -> SamplePosition:
        return SamplePosition(self.plan.start())

    def seek(self, step: int) -> SamplePosition:
        return SamplePosition(self.plan.seek(step))

    def seek_epoch(self, epoch: int, position: SamplePosition) -> SamplePosition:
        return SamplePosition(self.plan.seek_epoch(epoch))

    def count(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        steps, plan = len(self.plan.delivered_steps(epoch)), self.plan
        last = self._last_step(epoch)
        if last is None or plan.skipped(last[0]):
            return steps * self.accumulation
        return (steps - 1) * self.accumulation + -(-last[1] // self.global_micro)

    def item(self, epoch: int, number: int) -> TrainingBatch:
        step, within = divmod(number, self.accumulation)
        position = self.plan.seek(self.plan.delivered_steps(epoch)[step])
        read, next_position = self.plan.read(position)
        assert read is not None
        micro = next(islice(self._cut(read, position, SamplePosition(next_position), self.global_micro), within, None))
        return self.collator.make(micro)

    def position_of(self, epoch: int, number: int) -> SamplePosition:
        """Position of a micro-batch of an epoch; after the last one, the beginning of the next epoch."""
        if number >= self.count(epoch):
            return SamplePosition(self.plan.next_delivered(self.plan.seek_epoch(epoch + 1)))
        step, micro = divmod(number, self.accumulation)
        return SamplePosition(self.plan.seek(self.plan.delivered_steps(epoch)[step]), micro)

    def number_of(self, position: SamplePosition) -> int:
        """Number of micro-batches of the epoch before a position."""
        steps = self.plan.delivered_steps(position.epoch)
        return bisect_left(steps, position.step) * self.accumulation + position.micro

    def one(self, position: SamplePosition, batch_size: int | None) -> ReadyBatch:
        """The batch at a position; at the end of an epoch, the first of the next."""
        other = batch_size is not None and batch_size != self.batch_size
        if other and self.accumulation > 1:
            raise ConfigError(
                f"a step is {self.accumulation} micro-batches of {self.batch_size} for each rank, got a batch size of "
                f"{batch_size}; call get_batch() without a size"
            )
        if other and self.plan.counts_steps:
            raise ConfigError(
                f"the plan has edits, which count steps of {self.plan.global_batch} samples, got a batch size of "
                f"{batch_size}; call get_batch() without a size"
            )
        self.dataset.check_unchanged()
        size = self.global_micro if batch_size is None else batch_size * self.rank.world_size
        count = size * self.accumulation
        place = position.place
        for _ in range(2):
            step, next_position = self.plan.read(place, count)
            if step is not None:
                if other and place.at_start and len(step.samples) < count:
                    raise larger_than_epoch(batch_size, self.rank.world_size, len(step.samples))
                micro = self._at(
                    step, place, SamplePosition(self.plan.next_delivered(next_position, count)), position.micro, size
                )
                return self.collator.make(micro), micro.next_position
            place = next_epoch(next_position)
        raise self._nothing(count)

    def batches(self, position: SamplePosition) -> Generator[ReadyBatch, None, None]:
        """Batches of the rest of an epoch, each with the position after it."""
        self.dataset.check_unchanged()
        stages = self.collator.stages
        begun = stages.clock() if stages is not None else 0.0
        columns = self.dataset.columns()
        if stages is not None:
            stages.add("fetch", stages.clock() - begun)
        micros = self._micros(position)
        making = self._producer
        return making.of_columns(micros, columns) if columns is not None else making.fetched(micros)

    def _micros(self, position: SamplePosition) -> Iterator[MicroBatch]:
        """Micro-batches of the rest of an epoch. The plan is read one step at first, and then ever more at a time."""
        place = self.plan.next_delivered(position.place)
        first = position.micro if place == position.place else 0
        epoch, wanted = place.epoch, 1
        whole = self.accumulation == self.rank.world_size == 1
        while place.epoch == epoch:
            found = self.plan.read_block(place, wanted)
            if not found:
                if place.at_start:
                    raise self._nothing(None)
                return
            for step, next_position in found:
                if whole:
                    yield MicroBatch(
                        step, 0, 1, step.samples.rows, 0, len(step.samples.rows), SamplePosition(next_position)
                    )
                else:
                    yield from islice(
                        self._cut(step, place, SamplePosition(next_position), self.global_micro), first, None
                    )
                place, first = next_position, 0
            wanted = min(wanted * 2, _STEPS_AT_ONCE)

    def _cut(self, step: Step, place: Position, next_position: SamplePosition, size: int) -> Iterator[MicroBatch]:
        """Micro-batches of a step."""
        samples, world = step.samples, self.rank.world_size
        total = len(samples)
        count = max(-(-total // size), 1)
        for number in range(count):
            part = samples if count == 1 else samples.slice(number * size, min((number + 1) * size, total))
            low, high = 0, len(part.rows)
            if world > 1:
                cuts = share_cuts(len(part), world)[self.rank.rank : self.rank.rank + 2]
                low, high = (int(part.offsets[cut]) for cut in cuts)
            after = next_position if number + 1 == count else SamplePosition(place, number + 1)
            yield MicroBatch(step, number, count, part.rows, low, high, after)

    def _at(self, step: Step, place: Position, next_position: SamplePosition, number: int, size: int) -> MicroBatch:
        found = next(islice(self._cut(step, place, next_position, size), number, None), None)
        if found is None:
            raise ResumeError(f"step {step.number} has no micro-batch {number}")
        return found

    # State

    def to_state(self, position: SamplePosition) -> dict[str, Any]:
        return to_state(self.plan, position.place, {"micro_step": position.micro, "accumulation": self.accumulation})

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> SamplePosition:
        """The position that a state stands for; the plan takes on its edits."""
        STATE.read(state)
        self._check_step_size(state, new_batch_size)
        plan, place = from_state(self.plan, state, new_batch_size=new_batch_size)
        micro, there = state.get("micro_step", 0), state.get("accumulation", 1)
        if isinstance(micro, bool) or not isinstance(micro, int) or micro < 0:
            raise ResumeError(f"the state is damaged: its micro_step is {micro!r}")
        if micro and (there != self.accumulation or state.get("global_batch") != plan.global_batch):
            raise ResumeError(
                f"the state was saved after micro-batch {micro} of {there} of a step of {state.get('global_batch')} "
                f"samples, and this loader cuts steps of {plan.global_batch} into {self.accumulation}; use the same "
                "batch_size and gradient_accumulation_steps, or a state that was saved after a whole step"
            )
        if micro:
            step, _ = plan.read(place)
            if step is None or micro >= -(-len(step) // self.global_micro):
                raise ResumeError(f"the state is damaged: step {place.step} has no micro-batch {micro}")
        self.plan = plan
        return SamplePosition(place, micro)

    def _check_step_size(self, state: Any, new_batch_size: bool) -> None:
        """Refuse a state of steps of another size by all that they are made of."""
        if new_batch_size or not isinstance(state, Mapping) or state.get("plan") != self.plan.fingerprint:
            return
        there, here = state.get("global_batch"), self.plan.global_batch
        if there != here:
            raise ResumeError(
                f"the state was saved with steps of {there} samples, in {state.get('accumulation', 1)} batches each, "
                f"and this run has steps of {here} in {self.accumulation} (batch_size times world_size times "
                "gradient_accumulation_steps); choose them so that the steps agree, or, to go on at the same row with "
                "steps of another size, load_state_dict(state, new_batch_size=True)"
            )

    def edit(self, plan: Plan, position: SamplePosition) -> SamplePosition:
        """Go on by an edited plan from a position; what was delivered before it cannot change."""
        if plan.fingerprint != self.plan.fingerprint or plan.edits[: len(self.plan.edits)] != self.plan.edits:
            raise ConfigError("this plan was not made from the plan of the loader; edit loader.plan")
        first = position.step + (position.micro > 0)
        for edit in plan.edits[len(self.plan.edits) :]:
            if edit.step < first:
                raise ConfigError(
                    f"{edit} begins before step {first}, which is the next that nothing of was delivered; let it begin "
                    "there or later"
                )
        self.plan = plan
        return position if position.micro else SamplePosition(plan.next_delivered(position.place))

    def close(self) -> None:
        self._producer.end()
        self.dataset.close()

    def _last_step(self, epoch: int) -> tuple[int, int] | None:
        """The number of the last step of an epoch, and its samples, if it is not a whole one."""
        left = self.plan.sources[0].order.count(epoch) % self.plan.global_batch
        if not left or self.plan.drop_last:
            return None
        return sum(self.plan.steps_in(earlier) for earlier in range(epoch + 1)) - 1, left

    def _nothing(self, count: int | None) -> PenstockError:
        return ConfigError(
            f"an epoch has fewer samples than a step of {count or self.plan.global_batch}, and drop_last=True drops "
            "what does not fill one, so nothing would be delivered; use a smaller batch, or drop_last=False"
        )
