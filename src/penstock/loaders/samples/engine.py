"""Batches of samples by a plan: which samples a step is made of is arithmetic, and the step is cut into micro-batches.

plan step (one optimizer step of all ranks) -> micro-batches of all ranks -> the rows of this rank -> arrays
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.distributed.sharding import share_cuts
from penstock.errors import ConfigError, PenstockError, ResumeError
from penstock.loaders.samples.collate import MicroBatch, SampleCollator
from penstock.loaders.samples.datasets import SampleDataset
from penstock.loaders.samples.layout import Form
from penstock.loaders.samples.prefetch import Made, Production
from penstock.loaders.tuner import LoaderTuner, TunerSetting
from penstock.memory.addresses import keep_freed
from penstock.order.plan import Plan, Position, Step
from penstock.order.states import STATE, from_state, to_state
from penstock.order.steps import next_epoch

__all__ = ["SampleEngine", "SamplePosition"]

_KEPT_BYTES = 4 << 20
_STEPS_AT_ONCE = 64
"""Of the plan, which are read together."""


class SamplePosition(NamedTuple):
    """Between two batches: in front of a step of the plan, with the first `micro` of its micro-batches done."""

    place: Position
    micro: int = 0

    @property
    def epoch(self) -> int:
        return self.place.epoch

    @property
    def step(self) -> int:
        return self.place.step


class SampleEngine:
    """The batches of one rank, from any position on."""

    def __init__(
        self,
        origin: SampleDataset,
        plan: Plan,
        options: Options,
        form: Form,
        *,
        accumulation: int,
        setting: TunerSetting,
        tuner: LoaderTuner | None = None,
    ) -> None:
        self.origin, self.plan, self.options = origin, plan, options
        self.rank, self.batch_size, self.accumulation = options.find_rank(), options.batch_size, accumulation
        self.global_micro = self.batch_size * self.rank.world_size
        self.maker = SampleCollator(origin, form, options, self.rank)
        self._production = Production(self.maker, setting, tuner, options.budget)
        keep_freed(_KEPT_BYTES)

    @property
    def setting(self) -> TunerSetting:
        """How batches are made now."""
        return self._production.setting

    @property
    def tuner(self) -> LoaderTuner | None:
        return self._production.tuner

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
        read, behind = self.plan.read(position)
        assert read is not None
        micro = next(islice(self._cut(read, position, SamplePosition(behind), self.global_micro), within, None))
        return self.maker.make(micro)

    def position_of(self, epoch: int, number: int) -> SamplePosition:
        """In front of a micro-batch of an epoch; behind the last one, the beginning of the next epoch."""
        if number >= self.count(epoch):
            return SamplePosition(self.plan.next_delivered(self.plan.seek_epoch(epoch + 1)))
        step, micro = divmod(number, self.accumulation)
        return SamplePosition(self.plan.seek(self.plan.delivered_steps(epoch)[step]), micro)

    def number_of(self, position: SamplePosition) -> int:
        """How many micro-batches of its epoch are in front of a position."""
        steps = self.plan.delivered_steps(position.epoch)
        return bisect_left(steps, position.step) * self.accumulation + position.micro

    def one(self, position: SamplePosition, batch_size: int | None) -> Made:
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
        size = self.global_micro if batch_size is None else batch_size * self.rank.world_size
        count = size * self.accumulation
        place = position.place
        for _ in range(2):
            step, behind = self.plan.read(place, count)
            if step is not None:
                micro = self._at(
                    step, place, SamplePosition(self.plan.next_delivered(behind, count)), position.micro, size
                )
                return self.maker.make(micro), micro.behind
            place = next_epoch(behind)
        raise self._nothing(count)

    def batches(self, position: SamplePosition) -> Generator[Made, None, None]:
        """The batches of the rest of an epoch, each with the position behind it."""
        self.origin.check_unchanged()
        stages = self.maker.stages
        begun = stages.clock() if stages is not None else 0.0
        columns = self.origin.columns()
        if stages is not None:
            stages.add("fetch", stages.clock() - begun)
        micros = self._micros(position)
        making = self._production
        return making.of_columns(micros, columns) if columns is not None else making.fetched(micros)

    def _micros(self, position: SamplePosition) -> Iterator[MicroBatch]:
        """The micro-batches of the rest of an epoch. Steps are read some at a time, first one and then ever more."""
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
            for step, behind in found:
                if whole:
                    yield MicroBatch(step, 0, 1, step.samples.rows, 0, len(step.samples.rows), SamplePosition(behind))
                else:
                    yield from islice(self._cut(step, place, SamplePosition(behind), self.global_micro), first, None)
                place, first = behind, 0
            wanted = min(wanted * 2, _STEPS_AT_ONCE)

    def _cut(self, step: Step, place: Position, behind: SamplePosition, size: int) -> Iterator[MicroBatch]:
        """The micro-batches of a step."""
        samples, world = step.samples, self.rank.world_size
        total = len(samples)
        count = max(-(-total // size), 1)
        for number in range(count):
            part = samples if count == 1 else samples.slice(number * size, min((number + 1) * size, total))
            low, high = 0, len(part.rows)
            if world > 1:
                cuts = share_cuts(len(part), world)[self.rank.rank : self.rank.rank + 2]
                low, high = (int(part.offsets[cut]) for cut in cuts)
            after = behind if number + 1 == count else SamplePosition(place, number + 1)
            yield MicroBatch(step, number, count, part.rows, low, high, after)

    def _at(self, step: Step, place: Position, behind: SamplePosition, number: int, size: int) -> MicroBatch:
        found = next(islice(self._cut(step, place, behind, size), number, None), None)
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
                f"the state was saved behind micro-batch {micro} of {there} of a step of {state.get('global_batch')} "
                f"samples, and this loader cuts steps of {plan.global_batch} into {self.accumulation}; use the same "
                "batch_size and gradient_accumulation_steps, or a state that was saved behind a whole step"
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
        self._production.end()
        self.origin.close()

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
