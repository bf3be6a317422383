"""Batches of samples by a plan: which samples a step is made of is arithmetic, and the step is cut into micro-batches.

plan step (one optimizer step of all ranks) -> micro-batches of all ranks -> the rows of this rank -> arrays
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

from penstock.distributed.sharding import share_cuts
from penstock.errors import ConfigError, PenstockError, ResumeError
from penstock.loaders._samples.assembly import Form
from penstock.loaders._samples.columns import Columns
from penstock.loaders._samples.making import Maker, Micro
from penstock.loaders._samples.origins import Origin
from penstock.loaders.batch import TrainingBatch
from penstock.loaders.options import Options
from penstock.loaders.tuning import LoaderTuner, Setting
from penstock.memory.addresses import keep_freed
from penstock.order.plan import Plan, Position, Step
from penstock.order.states import from_state, to_state
from penstock.pipeline.ahead import WorkAhead

__all__ = ["Sampled", "Spot"]

_KEPT_BYTES = 4 << 20
_STEPS_AT_ONCE = 64
_QUICK_SECONDS = 0.002
"""Batches of fetched samples are made several at a time as long as that takes no longer."""


class Spot(NamedTuple):
    """Between two batches: in front of a step of the plan, with the first `micro` of its micro-batches done."""

    place: Position
    micro: int = 0

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def step(self) -> int:
        return self.place.step


Made = tuple[TrainingBatch, Spot]


class Sampled:
    """The batches of one rank, from any position on."""

    def __init__(
        self,
        origin: Origin,
        plan: Plan,
        options: Options,
        form: Form,
        *,
        accumulation: int,
        setting: Setting,
        tuner: LoaderTuner | None = None,
    ) -> None:
        self.origin, self.plan, self.options = origin, plan, options
        self.rank, self.batch_size, self.accumulation = options.find_rank(), options.batch_size, accumulation
        self.global_micro = self.batch_size * self.rank.world
        self.setting, self.tuner = setting, tuner
        self.maker = Maker(origin, form, options, self.rank)
        self._numbers: tuple[Plan, int, Sequence[int]] | None = None
        self._batch_seconds = 1.0
        """What a batch of fetched samples took last."""
        keep_freed(_KEPT_BYTES)

    @property
    def names(self) -> str:
        return ", ".join(self.plan.names)

    # Positions

    def start(self) -> Spot:
        return Spot(self.plan.start())

    def seek(self, step: int) -> Spot:
        return Spot(self.plan.seek(step))

    def seek_epoch(self, epoch: int, position: Spot) -> Spot:
        return Spot(self.plan.seek_epoch(epoch))

    def count(self, epoch: int) -> int:
        """Micro-batches of an epoch."""
        steps, plan = self.plan.delivered_in(epoch), self.plan
        last = self._last_step(epoch)
        if last is None or plan.skipped(last[0]):
            return steps * self.accumulation
        return (steps - 1) * self.accumulation + -(-last[1] // self.global_micro)

    def item(self, epoch: int, number: int) -> TrainingBatch:
        step, within = divmod(number, self.accumulation)
        position = self.plan.seek(self._steps_of(epoch)[step])
        read, behind = self.plan.read(position)
        assert read is not None
        micro = next(islice(self._cut(read, position, Spot(behind), self.global_micro), within, None))
        return self.maker.make(micro)

    def one(self, position: Spot, batch_size: int | None) -> Made:
        """The batch at a position, over the end of an epoch if there is one."""
        other = batch_size is not None and batch_size != self.batch_size
        if other and self.accumulation > 1:
            raise ConfigError(
                f"a step is {self.accumulation} micro-batches of {self.batch_size} for each rank, so none of "
                f"{batch_size} can be taken; call get_batch() without a size"
            )
        if other and self.plan.counts_steps:
            raise ConfigError(
                f"the plan has edits, which count steps of {self.plan.global_batch} samples, so no batch of "
                f"{batch_size} for each rank can be taken; call get_batch() without a size"
            )
        self.origin.check_unchanged()
        size = self.global_micro if batch_size is None else batch_size * self.rank.world
        count = size * self.accumulation
        place = position.place
        for _ in range(2):
            step, behind = self.plan.read(place, count)
            if step is not None:
                micro = self._at(step, place, Spot(self.plan.settle(behind, count)[0]), position.micro, size)
                return self.maker.make(micro), micro.behind
            place = self.plan.next_epoch(behind)
        raise self._nothing(count)

    def batches(self, position: Spot) -> Generator[Made, None, None]:
        """The batches of the rest of an epoch, each with the position behind it."""
        self.origin.check_unchanged()
        stages = self.maker.stages
        begun = stages.clock() if stages is not None else 0.0
        columns = self.origin.columns()
        if stages is not None:
            stages.add("fetch", stages.clock() - begun)
        micros = self._micros(position)
        return self._of_columns(micros, columns) if columns is not None else self._fetched(micros)

    def _micros(self, position: Spot) -> Iterator[Micro]:
        """The micro-batches of the rest of an epoch. Steps are read some at a time, first one and then ever more."""
        place, _ = self.plan.settle(position.place)
        first = position.micro if place == position.place else 0
        epoch, wanted = place.epoch, 1
        whole = self.accumulation == self.rank.world == 1
        while place.epoch == epoch:
            found = self.plan.read_some(place, wanted)
            if not found:
                if place.at_start:
                    raise self._nothing(None)
                return
            for step, behind in found:
                if whole:
                    yield Micro(step, 0, 1, step.samples.rows, 0, len(step.samples.rows), Spot(behind))
                else:
                    yield from islice(self._cut(step, place, Spot(behind), self.global_micro), first, None)
                place, first = behind, 0
            wanted = min(wanted * 2, _STEPS_AT_ONCE)

    def _cut(self, step: Step, place: Position, behind: Spot, size: int) -> Iterator[Micro]:
        """The micro-batches of a step."""
        samples, world = step.samples, self.rank.world
        total = len(samples)
        count = max(-(-total // size), 1)
        for number in range(count):
            part = samples if count == 1 else samples.slice(number * size, min((number + 1) * size, total))
            low, high = 0, len(part.rows)
            if world > 1:
                cuts = share_cuts(len(part), world)[self.rank.rank : self.rank.rank + 2]
                low, high = (int(part.offsets[cut]) for cut in cuts)
            after = behind if number + 1 == count else Spot(place, number + 1)
            yield Micro(step, number, count, part.rows, low, high, after)

    def _at(self, step: Step, place: Position, behind: Spot, number: int, size: int) -> Micro:
        found = next(islice(self._cut(step, place, behind, size), number, None), None)
        if found is None:
            raise ResumeError(f"step {step.number} has no micro-batch {number}")
        return found

    # Making

    def _of_columns(self, micros: Iterator[Micro], columns: Columns) -> Generator[Made, None, None]:
        """Some batches at a time: what is looked up for each row is looked up for all of them at once."""
        chunk, tuner = 1, self.tuner
        if tuner is not None:
            tuner.pause()
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

    def _fetched(self, micros: Iterator[Micro]) -> Generator[Made, None, None]:
        """Batches of samples that are fetched by threads, in order; or by this one."""
        self.maker.get_ready()
        tuner = self.tuner
        if tuner is not None:
            tuner.pause()
        ended = False
        while not ended:
            setting = self.setting
            groups = self._groups(micros, partial(self._paced, setting))
            made: Iterator[list[Made | Exception]]
            ahead: WorkAhead[list[Micro], list[Made | Exception]] | None = None
            if setting.workers:
                most = setting.workers + -(-setting.prefetch // setting.chunk)
                made = ahead = WorkAhead(
                    self._make_all, groups, setting.workers, most, budget=self.options.budget, size=_nbytes
                )
            else:
                made = map(self._make_all, groups)
            try:
                ended = yield from self._handed(made)
                if not ended and ahead is not None:  # another setting is tried; what is in work is handed out first
                    ahead.finish()
                    yield from (_made(item) for group in ahead for item in group)
            finally:
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

    def _make_all(self, micros: list[Micro]) -> list[Made | Exception]:
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

    def _next_group(self, micros: Iterator[Micro], size: int) -> list[Micro]:
        stages = self.maker.stages
        begun = stages.clock() if stages is not None else 0.0
        group = list(islice(micros, size))
        if stages is not None:
            stages.add("order", stages.clock() - begun)
        return group

    def _paced(self, setting: Setting) -> int:
        """How many batches to fetch at a time: several if that takes no time, never more than are wanted ahead."""
        quick = int(_QUICK_SECONDS / max(self._batch_seconds, 1e-6))
        trying = self.tuner is not None and not self.tuner.done
        return min(setting.chunk if trying else max(setting.chunk, quick), max(setting.prefetch, 1))

    def _groups(self, micros: Iterator[Micro], size: Callable[[], int]) -> Iterator[list[Micro]]:
        """So many at a time; those of one step together where its labels are to be counted."""
        while group := self._next_group(micros, size()):
            while self.maker.counts_step(group[-1]) and group[-1].number + 1 < group[-1].count:
                group += islice(micros, 1)
            yield group

    # State

    def to_state(self, position: Spot) -> dict[str, Any]:
        state = to_state(self.plan, position.place)
        return state | {"micro_step": position.micro, "accumulation": self.accumulation}

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> Spot:
        """The position that a state stands for; the plan takes on its edits."""
        plan, place = from_state(self.plan, state, new_batch_size=new_batch_size)
        micro, there = state.get("micro_step", 0), state.get("accumulation", 1)
        if isinstance(micro, bool) or not isinstance(micro, int) or micro < 0:
            raise ResumeError(f"the state is damaged: its micro_step is {micro!r}")
        if micro and (there != self.accumulation or state.get("global_batch") != plan.global_batch):
            raise ResumeError(
                f"the state was saved behind micro-batch {micro} of {there} of a step of {state.get('global_batch')} "
                f"samples, and this loader cuts steps of {plan.global_batch} into {self.accumulation}; use the same "
                "batch_size and gradient_accumulation_steps, or a state that was saved behind a whole step"
            )
        if micro:
            step, _ = plan.read(place)
            if step is None or micro >= -(-len(step) // self.global_micro):
                raise ResumeError(f"the state is damaged: step {place.step} has no micro-batch {micro}")
        self.plan = plan
        return Spot(place, micro)

    def edit(self, plan: Plan, position: Spot) -> Spot:
        """Go on by an edited plan from a position; what was delivered before it cannot change."""
        if plan.fingerprint != self.plan.fingerprint or plan.edits[: self.plan.version] != self.plan.edits:
            raise ConfigError("this plan was not made from the plan of the loader; edit loader.plan")
        first = position.step + (position.micro > 0)
        for edit in plan.edits[self.plan.version :]:
            if edit.step < first:
                raise ConfigError(
                    f"{edit} begins before step {first}, which is the next that nothing of was delivered; let it begin "
                    "there or later"
                )
        self.plan = plan
        return position if position.micro else Spot(plan.settle(position.place)[0])

    def close(self) -> None:
        self.origin.close()

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: without what is being tuned in this one."""
        return self.__dict__ | {"tuner": None, "_numbers": None}

    def _last_step(self, epoch: int) -> tuple[int, int] | None:
        """The number of the last step of an epoch, and its samples, if it is not a whole one."""
        left = self.plan.feeds[0].order.count(epoch) % self.plan.global_batch
        if not left or self.plan.drop_last:
            return None
        return sum(self.plan.steps_in(earlier) for earlier in range(epoch + 1)) - 1, left

    def _steps_of(self, epoch: int) -> Sequence[int]:
        """The numbers of the steps of an epoch that are delivered."""
        plan = self.plan
        if self._numbers is None or self._numbers[:2] != (plan, epoch):
            first = sum(plan.steps_in(earlier) for earlier in range(epoch))
            steps: Sequence[int] = range(first, first + plan.steps_in(epoch))
            if plan.delivered_in(epoch) < len(steps):
                steps = [step for step in steps if not plan.skipped(step)]
            self._numbers = plan, epoch, steps
        return self._numbers[2]

    def _nothing(self, count: int | None) -> PenstockError:
        return ConfigError(
            f"an epoch has fewer samples than a step of {count or self.plan.global_batch}, and drop_last=True drops "
            "what does not fill one, so nothing would be delivered; use a smaller batch, or drop_last=False"
        )


def _made(item: Made | Exception) -> Made:
    if isinstance(item, Exception):
        raise item
    return item


def _nbytes(made: list[Made | Exception]) -> int:
    return sum(item[0].nbytes for item in made if not isinstance(item, Exception))
