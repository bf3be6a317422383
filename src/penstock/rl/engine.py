"""Engine of `RolloutDataLoader`: minibatches of rollouts from any position on.

    source -> rollout batch -> selection -> advantages -> ppo_epochs x (shuffled groups -> minibatches -> ranks)

Every rank reads the same rollout batch and computes the same numbers, then takes its share.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from penstock.batching.batch import TrainingBatch
from penstock.batching.options import Options
from penstock.errors import ConfigError, DataError, ResumeError
from penstock.files.states import Fields, StateFormat, check_fields
from penstock.order.permutation import derive_key
from penstock.rl.batch import RolloutBatch
from penstock.rl.collate import RolloutForm
from penstock.rl.compute import AdvantageSpec, denominators
from penstock.rl.counters import RolloutCounters
from penstock.rl.minibatches import Minibatch, RolloutMinibatches
from penstock.rl.options import RolloutOptions
from penstock.rl.selection import SelectionRules
from penstock.rl.sources import Cursor, RolloutSource

logger = logging.getLogger(__name__)

_STATE = StateFormat(
    "rollouts",
    "a RolloutDataLoader",
    fields={
        "facts": (dict,),
        "global_batch": (int,),
        "policy_version": (int, None),
        "version_settled": (bool,),
        "position": (dict,),
    },
)
_POSITION: Fields = {
    **dict.fromkeys(("epoch", "step", "number", "ppo_epoch", "unit", "minibatch"), (int,)),
    "version": (int, None),
    "counts": (dict,),
}


@dataclass(frozen=True, slots=True)
class RolloutPosition:
    """Position of the next minibatch."""

    epoch: int = 0
    """List or file: number of full passes; live source: number of the rollout batch."""
    step: int = 0
    cursor: Cursor = None
    """Start of the rollout batch in its source."""
    number: int = 0
    """Number of the rollout batch in its epoch."""
    version: int | None = None
    """Version of the policy when the rollout batch was started."""
    ppo_epoch: int = 0
    unit: int = 0
    """Units of this PPO epoch that were used."""
    minibatch: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    """Dropped rollouts so far, by reason."""

    @property
    def begun(self) -> bool:
        """True if a minibatch of the rollout batch was used, so the rollout batch must stay as it is."""
        return bool(self.ppo_epoch or self.unit)

    def entered(self, rollouts: RolloutMinibatches) -> RolloutPosition:
        """Position with the version and the counts of its rollout batch, which is now in use."""
        if self.begun:
            return self
        counts = Counter(dict(self.counts)) + Counter(dict(rollouts.dropped))
        return replace(self, version=rollouts.version, counts=tuple(sorted(counts.items())))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"version": self.version if self.begun else None, "counts": dict(self.counts)}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> RolloutPosition:
        check_fields(given, _POSITION)
        return cls(**{**given, "counts": tuple(sorted(given["counts"].items()))})


@dataclass(frozen=True, slots=True)
class RolloutState:
    """State of a loader for a checkpoint."""

    facts: Mapping[str, Any]
    """Everything besides the position that decides the batches."""
    global_batch: int
    policy_version: int | None
    settled: bool
    """True if the rollout batch at the position is judged under `policy_version`. After the last minibatch of a rollout
    batch the policy may be about to get its next version."""
    position: RolloutPosition

    def to_dict(self) -> dict[str, Any]:
        return _STATE.write(
            {
                "facts": dict(self.facts),
                "global_batch": self.global_batch,
                "policy_version": self.policy_version,
                "version_settled": self.settled,
                "position": self.position.to_dict(),
            }
        )

    def check(self, facts: Mapping[str, Any], global_batch: int | None, *, live: bool) -> list[str]:
        """Raise if a loader with these facts would continue differently. `global_batch` None: any size.

        Options and estimators apply to whole rollout batches, so they may change between two of them. Returns a
        description of each change.
        """
        theirs, ours = _flat(self.facts), _flat(facts)
        changed = []
        for name in dict.fromkeys([*theirs, *ours]):
            if theirs.get(name) == ours.get(name):
                continue
            change = f"{name} {theirs.get(name)!r}, this loader has {ours.get(name)!r}"
            if not (name.startswith("rules.") or name == "advantages"):
                raise ResumeError(f"the state has {change}; its batches would not continue")
            if self.position.begun:
                raise ResumeError(
                    f"the state has {change}; it is inside a rollout batch, which must be finished with the same "
                    "options; a state from after its last minibatch can be loaded with others"
                )
            if name == "rules.rollout_batch_size" and not live and self.position.cursor is not None:
                raise ResumeError(f"the state has {change}; it is inside an epoch that was split by it")
            changed.append(change)
        if global_batch not in (None, self.global_batch):
            raise ResumeError(
                f"the state has minibatches of {self.global_batch} rollouts over all ranks, this loader has "
                f"{global_batch}; use the same size, or pass new_batch_size=True"
            )
        return changed


def read_state(state: Mapping[str, Any]) -> RolloutState:
    """State that `RolloutState.to_dict` wrote."""
    _STATE.read(state)
    try:
        position = RolloutPosition.from_dict(state["position"])
        settled = bool(state["version_settled"])
        return RolloutState(state["facts"], state["global_batch"], state["policy_version"], settled, position)
    except (KeyError, TypeError, AttributeError) as error:
        raise ResumeError(f"the state is damaged ({error!r}): {state!r:.200}") from None


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"source": {"rollouts": 3}}` as `{"source.rollouts": 3}`."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


@dataclass(frozen=True, slots=True)
class _Step:
    """Minibatch, its position and the next one."""

    minibatch: Minibatch
    position: RolloutPosition
    next_position: RolloutPosition


Made: TypeAlias = tuple[TrainingBatch, RolloutPosition]
"""Batch and the next position."""


class RolloutEngine:
    """Batches of one rank."""

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
        self.spec = spec if spec.max_length else replace(spec, max_length=rollout.limits.max_response_length)
        self.compute_advantages = compute_advantages
        self.rank, self.batch_size = options.find_rank(), options.batch_size
        self.version = rollout.staleness.policy_version
        self.ended = False
        """True once a live source has no more rollouts."""
        self.end_position: RolloutPosition | None = None
        """Position at the end of a live source, with the final counts."""
        self._version_of: tuple[int, int] | None = None
        """Rollout batch that `version` was set for."""
        self._unsettled = False
        """True if the version comes from a state that was taken before it was set."""
        self._held: tuple[Any, RolloutMinibatches | None] | None = None
        self._known: tuple[int, int, RolloutPosition] | None = None
        """Epoch, number and position that were looked up last; the next lookup starts there."""
        self._logged_groups = False
        self.counters = RolloutCounters()
        denominators(np.ones(1, np.int64), self.spec)  # an impossible aggregation fails now, not at the first batch

    @property
    def names(self) -> str:
        return self.source.name

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.rank.world_size

    # Positions

    def start(self) -> RolloutPosition:
        self.end_position = None
        return RolloutPosition()

    def set_version(self, version: int | None, position: RolloutPosition) -> None:
        """Set the version of the policy for rollout batches that are not begun."""
        self.version, self._version_of, self._unsettled = version, (position.epoch, position.number), False
        self._known = None

    def seek(self, step: int) -> RolloutPosition:
        self._check_countable("seek a step")
        position = RolloutPosition()
        while position.step < step:
            position = self._step(position).next_position
        return position

    def seek_epoch(self, epoch: int, position: RolloutPosition) -> RolloutPosition:
        self._check_countable("seek an epoch")
        found = RolloutPosition()
        while found.epoch < epoch:
            found = self._step(found).next_position
        return found

    def count(self, epoch: int) -> int:
        self._check_countable("count batches")
        position = replace(RolloutPosition(), epoch=epoch)
        while position.epoch == epoch:
            position = self._step(position).next_position
        return position.step

    def _check_countable(self, action: str) -> None:
        if self.source.live:
            raise TypeError(f"cannot {action}: the rollouts of {self.source.name} are not known before they arrive")

    # Batches

    def one(self, position: RolloutPosition, batch_size: int | None) -> Made:
        step = self._next(position, self.global_batch if batch_size is None else batch_size * self.rank.world_size)
        if step is None:
            if self.source.live:
                raise EOFError(f"{self.source.name} is at its end: no more rollouts will come")
            raise self._no_batches()
        return self._make(step), step.next_position

    def item(self, epoch: int, number: int) -> TrainingBatch:
        return self._make(self._step(self.position_of(epoch, number)))

    def position_of(self, epoch: int, number: int) -> RolloutPosition:
        """Position of a batch of an epoch; after the last one, the beginning of the next epoch."""
        self._check_countable("look up a batch by its number")
        known = self._known
        if known is None or known[0] != epoch or known[1] > number:
            known = epoch, 0, self.seek_epoch(epoch, RolloutPosition())
        _, first, position = known
        for _ in range(number - first):
            position = self._step(position).next_position
        self._known = epoch, number, position
        return position

    def number_of(self, position: RolloutPosition) -> int:
        """Number of a batch in its epoch."""
        return position.step - self.seek_epoch(position.epoch, RolloutPosition()).step

    def batches(self, position: RolloutPosition) -> Generator[Made, None, None]:
        """Rest of an epoch. The caller waits here for the rollouts of a live source."""
        step = self._next(position, self.global_batch)
        if step is None and not self.source.live:
            raise self._no_batches()
        return self._rest(step)

    def _rest(self, step: _Step | None) -> Generator[Made, None, None]:
        while step is not None:
            following = step.next_position
            yield self._make(step), following
            step = self._next(following, self.global_batch) if following.epoch == step.position.epoch else None

    def _step(self, position: RolloutPosition) -> _Step:
        step = self._next(position, self.global_batch)
        if step is None:
            raise self._no_batches()
        return step

    def _next(self, position: RolloutPosition, size: int) -> _Step | None:
        """Minibatch at a position, or the next one there is; None at the end."""
        begun = position
        while True:
            rollouts = self._rollouts(position)
            if rollouts is None:
                self.end_position = position if self.source.live else None
                return None
            position = position.entered(rollouts)
            end = self._end(rollouts, position, size)
            if end is not None:
                units = rollouts.order(self._key(position))[0][position.unit : end]
                following = replace(position, step=position.step + 1, unit=end, minibatch=position.minibatch + 1)
                minibatch = Minibatch(rollouts, units, self.form, self.rank)
                return _Step(minibatch, position, self._settled(rollouts, following, size))
            position = self._after_pass(rollouts, position)
            if position.epoch > begun.epoch + 1 and not self.source.live:
                return None  # a whole epoch without a minibatch

    def _settled(self, rollouts: RolloutMinibatches, position: RolloutPosition, size: int) -> RolloutPosition:
        """The position, or that of the next epoch if nothing of this one is left. Does not wait for a live source."""
        while self._end(rollouts, position, size) is None:
            epoch, position = position.epoch, self._after_pass(rollouts, position)
            if position.epoch != epoch or self.source.live:
                break
            if not position.begun:
                ahead = self._rollouts(position)
                assert ahead is not None  # the cursor points at a rollout batch
                if self._end(ahead, position, size) is not None:
                    break
                rollouts, position = ahead, position.entered(ahead)
        return position

    def _end(self, rollouts: RolloutMinibatches, position: RolloutPosition, size: int) -> int | None:
        """End of the units that fill a minibatch; None after a pass, or if `drop_last` drops the remaining ones."""
        if position.unit >= len(rollouts):
            return None
        largest = int(rollouts.sizes.max())
        if largest > size:
            name = rollouts.table.groups[rollouts.rows(np.flatnonzero(rollouts.sizes == largest)[:1])[0]]
            raise ConfigError(
                f"group {name!r} has {largest} rollouts, and a minibatch of all ranks {size}; pass a batch_size of at "
                f"least {-(-largest // self.rank.world_size)}, or keep_groups=False: advantages stay the same"
            )
        ends = rollouts.order(self._key(position))[1]
        used = int(ends[position.unit - 1]) if position.unit else 0
        end = int(np.searchsorted(ends, used + size, "right"))
        too_few = end == len(rollouts) and ends[-1] - used < size
        return None if self.options.drop_last and too_few else end

    def _key(self, position: RolloutPosition) -> int | None:
        """Shuffle key of a pass; None: unshuffled."""
        if not self.options.shuffle:
            return None
        return derive_key(self.options.seed, "rollouts", position.epoch, position.number, position.ppo_epoch)

    def _after_pass(self, rollouts: RolloutMinibatches, position: RolloutPosition) -> RolloutPosition:
        """Position after the end of a pass: the next PPO epoch, the next rollout batch, or the next epoch."""
        if position.ppo_epoch + 1 < self.rollout.batching.ppo_epochs and len(rollouts):
            return replace(position, ppo_epoch=position.ppo_epoch + 1, unit=0, minibatch=0)
        over = self.source.live or rollouts.next_cursor is None
        return RolloutPosition(
            epoch=position.epoch + over,
            step=position.step,
            cursor=rollouts.next_cursor,
            number=0 if over else position.number + 1,
            counts=position.counts,
        )

    def _rollouts(self, position: RolloutPosition) -> RolloutMinibatches | None:
        """Rollout batch at a position. Two threads may read one of a list at the same time; it is then read twice."""
        version = position.version if position.begun else self.version
        key = repr((position.cursor, version))
        held = self._held
        if held is None or held[0] != key:
            if self._unsettled and not position.begun:
                self._unsettled = False
                logger.warning(
                    "the state was taken after the last minibatch of a rollout batch, so the next one is judged under "
                    "the same policy_version, %s; set loader.policy_version before each loop",
                    version,
                )
            rules = SelectionRules(self.rollout.selection, self.rollout.staleness, self.spec, version)
            selected = self.source.take(position.cursor, rules)
            self.ended = self.source.live and selected is None
            if selected is None:
                held = key, None
            else:
                compute = self.compute_advantages
                found = RolloutMinibatches(
                    selected, rules, self.rollout.batching, self.form, compute_advantages=compute
                )
                held = key, found
            self._held = None if self.ended else held
        return held[1]

    def _make(self, step: _Step) -> TrainingBatch:
        self.counters.count(step.minibatch.rollouts)
        arrays, metadata = step.minibatch.assembled()
        if (warning := step.minibatch.rollouts.group_warning) is not None and not self._logged_groups:
            self._logged_groups = True
            logger.warning("%s: %s", self.source.name, warning)
        position = step.position
        metadata |= {
            "step": position.step,
            "epoch": position.epoch,
            "sources": (self.source.name,),
            "rollout_batch": position.epoch if self.source.live else position.number,
            "ppo_epoch": position.ppo_epoch,
            "minibatch": position.minibatch,
        }
        return RolloutBatch.from_numpy(arrays, metadata, self.options.backend)

    def _no_batches(self) -> Exception:
        rollouts = self._rollouts(RolloutPosition())
        if rollouts is not None and rollouts.dropped:
            dropped = ", ".join(f"{count} {reason}" for reason, count in rollouts.dropped.items())
            return DataError(f"no rollout is left to train on; dropped: {dropped}")
        return ConfigError(
            f"there are fewer rollouts than a minibatch of {self.global_batch}, and drop_last=True drops incomplete "
            "ones, so there are no batches; use a smaller batch_size, or drop_last=False"
        )

    # State

    def facts(self) -> dict[str, Any]:
        """Everything besides the position that decides the batches."""
        return {
            "source": self.source.facts(),
            "seed": self.options.seed,
            "shuffle": self.options.shuffle,
            "drop_last": self.options.drop_last,
            "rules": self.rollout.facts(),
            "advantages": self.spec.describe() if self.compute_advantages else "none",
        }

    def to_state(self, position: RolloutPosition) -> dict[str, Any]:
        if self.end_position is not None:
            position = self.end_position
        self.source.check_saved(position.cursor, between=not position.begun)
        was_set = (position.epoch, position.number) == self._version_of
        settled = was_set or self.version is None or position.begun or not position.step or not self.source.live
        return RolloutState(self.facts(), self.global_batch, self.version, settled, position).to_dict()

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> RolloutPosition:
        read = read_state(state)
        changed = read.check(self.facts(), None if new_batch_size else self.global_batch, live=self.source.live)
        for change in changed:
            logger.warning("the state has %s, from the next rollout batch on", change)
        position = replace(read.position, cursor=self.source.restored(read.position.cursor))
        self._held = self.end_position = self._known = None
        if read.policy_version is not None:
            self.version = read.policy_version
            self._version_of = (position.epoch, position.number) if read.settled else None
            self._unsettled = not read.settled
        return position

    def commit(self, state: Mapping[str, Any]) -> None:
        self.source.commit(read_state(state).position.cursor)

    def close(self) -> None:
        self._held = None
        self.source.close()
