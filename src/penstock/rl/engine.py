"""Batches of rollouts from any position on.

    source -> rollout batch -> rules -> advantages -> ppo_epochs x (groups in a drawn order -> minibatches -> ranks)

Every rank reads the same rollout batch and computes the same numbers, then takes its share.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.errors import ConfigError, DataError
from penstock.order.permutation import derive_key
from penstock.rl.batch import RolloutBatch
from penstock.rl.compute import AdvantageSpec, denominators
from penstock.rl.layout import RolloutForm
from penstock.rl.minibatches import Minibatch, RolloutMinibatches
from penstock.rl.options import RolloutOptions
from penstock.rl.selection import SelectionRules
from penstock.rl.sources import RolloutSource, Taken
from penstock.rl.state import RolloutPosition, RolloutState, read_state

__all__ = ["RolloutEngine"]

logger = logging.getLogger(__name__)

Made = tuple[TrainingBatch, RolloutPosition]
_LONE = "leave it out, or pass lone='zero', 'reward' or 'nan'"
_LONE_HERE = (
    "give the rollouts of one prompt the same `group`, and append them at once or pass group_size=; leave it out; or "
    "pass an AdvantageSpec with options={'lone': 'zero'}"
)


@dataclass(frozen=True, slots=True)
class _Step:
    minibatch: Minibatch
    place: RolloutPosition


class RolloutEngine:
    """The batches of one rank."""

    def __init__(
        self,
        source: RolloutSource,
        options: Options,
        rollout: RolloutOptions,
        spec: AdvantageSpec,
        *,
        compute_advantages: bool,
        form: RolloutForm,
    ) -> None:
        self.source, self.options, self.rollout, self.form = source, options, rollout, form
        self.spec = spec if spec.max_length else replace(spec, max_length=rollout.max_response_length)
        self.compute_advantages = compute_advantages
        self.rank, self.batch_size = options.find_rank(), options.batch_size
        self.version = rollout.policy_version
        self.ended = False
        """Whether a live source was asked for more, and no more will come."""
        self.over: RolloutPosition | None = None
        """Where a live source ended, with the counts of what was dropped on the way there."""
        self._version_of: tuple[int, int] | None = None
        """The rollout batch that `version` was set for."""
        self._unsettled = False
        """Whether the version is that of a state which was taken before it was set."""
        self._held: tuple[Any, RolloutMinibatches | None] | None = None
        self._known: tuple[int, int, RolloutPosition] | None = None
        """The batch of an epoch whose place was asked for last: the next one is looked for from there."""
        self._told_lone = False
        # A mistake in the aggregation is told now and not with the first batch.
        denominators(np.ones(1, np.int64), self.spec)

    @property
    def names(self) -> str:
        return self.source.name

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.rank.world_size

    # Positions

    def start(self) -> RolloutPosition:
        self.over = None
        return RolloutPosition()

    def set_version(self, version: int | None, position: RolloutPosition) -> None:
        """Rollout batches that are not begun are judged under this version of the policy."""
        self.version, self._version_of, self._unsettled = version, (position.epoch, position.number), False
        self._known = None

    def seek(self, step: int) -> RolloutPosition:
        self._countable("go to a step")
        place = RolloutPosition()
        while place.step < step:
            place = self._walked(place, step)
        return place

    def seek_epoch(self, epoch: int, position: RolloutPosition) -> RolloutPosition:
        self._countable("go to an epoch")
        place = RolloutPosition()
        while place.epoch < epoch:
            place = self._walked(place, None)
        return place

    def _walked(self, place: RolloutPosition, step: int | None) -> RolloutPosition:
        """The place some minibatches on: in front of a step, or at the end of the epoch if that comes first."""
        begun = place
        while place.epoch == begun.epoch and (step is None or place.step < step):
            found = self._next(place, self.global_batch)
            if found is None:
                raise self._nothing()
            place = found[1]
        return place

    def count(self, epoch: int) -> int:
        self._countable("count batches")
        place = replace(RolloutPosition(), epoch=epoch)
        while place.epoch == epoch:
            found = self._next(place, self.global_batch)
            if found is None:
                raise self._nothing()
            place = found[1]
        return place.step

    def _countable(self, what: str) -> None:
        if self.source.live:
            raise TypeError(f"{self.source.name} has rollouts as they come, so nobody can {what} before they do")

    # Batches

    def one(self, position: RolloutPosition, batch_size: int | None) -> Made:
        size = self.global_batch if batch_size is None else batch_size * self.rank.world_size
        found = self._next(position, size)
        if found is None:
            if self.source.live:
                raise EOFError(f"{self.source.name} is at its end: no more rollouts will come")
            raise self._nothing()
        return self._make(found[0]), found[1]

    def item(self, epoch: int, number: int) -> TrainingBatch:
        self._countable("ask for a batch by its number")
        found = self._next(self.position_of(epoch, number), self.global_batch)
        assert found is not None
        return self._make(found[0])

    def position_of(self, epoch: int, number: int) -> RolloutPosition:
        """In front of a batch of an epoch; behind the last one, the beginning of the next epoch."""
        self._countable("ask for a batch by its number")
        known = self._known
        if known is None or known[0] != epoch or known[1] > number:
            known = epoch, 0, self.seek_epoch(epoch, RolloutPosition())
        _, first, place = known
        for _ in range(number - first):
            found = self._next(place, self.global_batch)
            if found is None:
                raise self._nothing()
            place = found[1]
        self._known = epoch, number, place
        return place

    def number_of(self, position: RolloutPosition) -> int:
        """How many batches of its epoch are in front of a position."""
        return position.step - self.seek_epoch(position.epoch, RolloutPosition()).step

    def batches(self, position: RolloutPosition) -> Generator[Made, None, None]:
        """The rest of an epoch. What a live source has to be waited for is waited for here, by whoever calls."""
        found = self._next(position, self.global_batch)
        if found is None and not self.source.live:
            raise self._nothing()
        return self._rest(found)

    def _rest(self, found: tuple[_Step, RolloutPosition] | None) -> Generator[Made, None, None]:
        while found is not None:
            step, behind = found
            yield self._make(step), behind
            found = self._next(behind, self.global_batch) if behind.epoch == step.place.epoch else None

    def _next(self, place: RolloutPosition, size: int) -> tuple[_Step, RolloutPosition] | None:
        """The minibatch at a place, or the next one there is, and the place behind it; None if there are no more."""
        begun = place
        while True:
            held = self._round(place)
            if held is None:
                self.over = place if self.source.live else None
                return None
            place = _entered(held, place)
            end = self._cut(held, place, size)
            if end is not None:
                units = held.order(self._key(place))[0][place.unit : end]
                behind = replace(place, step=place.step + 1, unit=end, minibatch=place.minibatch + 1)
                return _Step(Minibatch(held, units, self.form, self.rank), place), self._settled(held, behind, size)
            place = self._after(held, place)
            if place.epoch > begun.epoch + 1 and not self.source.live:
                return None  # a whole epoch without a single minibatch

    def _settled(self, held: RolloutMinibatches, place: RolloutPosition, size: int) -> RolloutPosition:
        """The place, or that of the next epoch if nothing of this one is left. A live source is not waited for."""
        while self._cut(held, place, size) is None:
            epoch, place = place.epoch, self._after(held, place)
            if place.epoch != epoch or self.source.live:
                break
            if not place.begun:
                ahead = self._round(place)
                assert ahead is not None  # the cursor says that there is one
                if self._cut(ahead, place, size) is not None:
                    break
                held, place = ahead, _entered(ahead, place)
        return place

    def _cut(self, held: RolloutMinibatches, place: RolloutPosition, size: int) -> int | None:
        """Where the units end that fill a minibatch from a place on. None at the end of a pass, and with `drop_last`
        where too few are left."""
        if place.unit >= len(held):
            return None
        largest = int(held.sizes.max())
        if largest > size:
            name = held.table.groups[held.rows(np.flatnonzero(held.sizes == largest)[:1])[0]]
            raise ConfigError(
                f"group {name!r} has {largest} rollouts, and a minibatch of all ranks {size}; pass a batch_size of at "
                f"least {-(-largest // self.rank.world_size)}, or keep_groups=False: advantages stay the same"
            )
        ends = held.order(self._key(place))[1]
        used = int(ends[place.unit - 1]) if place.unit else 0
        end = int(np.searchsorted(ends, used + size, "right"))
        too_few = end == len(held) and ends[-1] - used < size
        return None if self.options.drop_last and too_few else end

    def _key(self, place: RolloutPosition) -> int | None:
        """Of the order that units have in a pass; None: their own."""
        if not self.options.shuffle:
            return None
        return derive_key(self.options.seed, "rollouts", place.epoch, place.number, place.ppo_epoch)

    def _after(self, held: RolloutMinibatches, place: RolloutPosition) -> RolloutPosition:
        """Behind the end of a pass: the next PPO epoch, the next rollout batch, or the next epoch."""
        if place.ppo_epoch + 1 < self.rollout.ppo_epochs and len(held):
            return replace(place, ppo_epoch=place.ppo_epoch + 1, unit=0, minibatch=0)
        over = self.source.live or held.behind is None
        return RolloutPosition(
            epoch=place.epoch + over,
            step=place.step,
            cursor=held.behind,
            number=0 if over else place.number + 1,
            counts=place.counts,
        )

    def _round(self, place: RolloutPosition) -> RolloutMinibatches | None:
        """The rollout batch at a place. Two threads may take one of a list at the same time: then it is taken twice."""
        version = place.version if place.begun else self.version
        key = repr((place.cursor, version))
        held = self._held
        if held is None or held[0] != key:
            if self._unsettled and not place.begun:
                self._unsettled = False
                logger.warning(
                    "the state was taken behind the last minibatch of a rollout batch, and the next one is judged "
                    "under the same policy_version, %s; set loader.policy_version in front of each loop",
                    version,
                )
            rules = SelectionRules(self.rollout, self.spec, version)
            taken = self.source.take(place.cursor, rules)
            held = self._held = key, None if taken is None else self._formed(taken, rules)
            self.ended = self.source.live and taken is None
            if self.ended:
                self._held = None
        return held[1]

    def _formed(self, taken: Taken, rules: SelectionRules) -> RolloutMinibatches:
        return RolloutMinibatches(taken, rules, self.form, compute_advantages=self.compute_advantages)

    def _make(self, step: _Step) -> TrainingBatch:
        try:
            arrays, metadata = step.minibatch.assembled()
        except DataError as error:  # in the words of a function that has other keywords
            if _LONE not in error.reason:
                raise
            raise DataError(error.reason.replace(_LONE, _LONE_HERE), row=error.row) from None
        if (lone := step.minibatch.round.lone) is not None and not self._told_lone:
            self._told_lone = True
            logger.warning("%s: %s", self.source.name, lone)
        place, options = step.place, self.options
        metadata |= {
            "step": place.step,
            "epoch": place.epoch,
            "sources": (self.source.name,),
            "rollout_batch": place.epoch if self.source.live else place.number,
            "ppo_epoch": place.ppo_epoch,
            "minibatch": place.minibatch,
        }
        batch = RolloutBatch.from_numpy(arrays, metadata, options.backend)
        return batch.pin_memory() if options.pin_memory else batch

    def _nothing(self) -> Exception:
        held = self._round(RolloutPosition())
        if held is not None and held.dropped:
            told = ", ".join(f"{count} {reason}" for reason, count in held.dropped.items())
            return DataError(f"no rollout is left to train on; dropped were: {told}")
        return ConfigError(
            f"there are fewer rollouts than a minibatch of {self.global_batch}, and drop_last=True drops what does not "
            "fill one, so nothing would be delivered; use a smaller batch, or drop_last=False"
        )

    # State

    def facts(self) -> dict[str, Any]:
        """What the batches depend on besides the position."""
        chosen, rollout = self.options, self.rollout
        return {
            "source": self.source.facts(),
            "seed": chosen.seed,
            "shuffle": chosen.shuffle,
            "drop_last": chosen.drop_last,
            "rules": {name: getattr(rollout, name) for name in _RULES if getattr(rollout, name) is not None}
            | ({} if rollout.duplicate_ids == "error" else {"duplicate_ids": rollout.duplicate_ids}),
            "advantages": self.spec.described() if self.compute_advantages else "none",
        }

    def to_state(self, position: RolloutPosition) -> dict[str, Any]:
        if self.over is not None:
            position = self.over
        self.source.check_saved(position.cursor, between=not position.begun)
        told = (position.epoch, position.number) == self._version_of
        settled = told or self.version is None or position.begun or not position.step or not self.source.live
        return RolloutState(self.facts(), self.global_batch, self.version, settled, position).to_dict()

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> RolloutPosition:
        read = read_state(state)
        changed = read.check(self.facts(), None if new_batch_size else self.global_batch, live=self.source.live)
        for told in changed:
            logger.warning("the state is of a loader with %s, from the next rollout batch on", told)
        place = replace(read.position, cursor=self.source.restored(read.position.cursor))
        self._held = self.over = self._known = None
        if read.policy_version is not None:
            self.version = read.policy_version
            self._version_of = (place.epoch, place.number) if read.settled else None
            self._unsettled = not read.settled
        return place

    def commit(self, state: Mapping[str, Any]) -> None:
        self.source.commit(read_state(state).position.cursor)

    def close(self) -> None:
        self._held = None
        self.source.close()


_RULES = (
    "rollout_batch_size",
    "max_pending_appends",
    "ppo_epochs",
    "keep_groups",
    "max_staleness",
    "on_stale",
    "drop_zero_variance",
    "missing_rewards",
    "all_masked",
    "max_prompt_length",
    "max_response_length",
    "prompt_truncation",
    "response_truncation",
)


def _entered(held: RolloutMinibatches, place: RolloutPosition) -> RolloutPosition:
    """The place, knowing what it knows once something of its rollout batch is used."""
    if place.begun:
        return place
    return replace(place, version=held.version, counts=place.counting(held.dropped))
