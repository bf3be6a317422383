"""Batches of rollouts from any position on.

    source -> rollout batch -> rules -> advantages -> ppo_epochs x (groups in a drawn order -> minibatches -> ranks)

Every rank reads the same rollout batch and computes the same numbers, then takes its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError, ResumeError
from penstock.loaders._rollouts.advantages_of import AdvantageSpec, Columns, compute, denominators
from penstock.loaders._rollouts.assembly import assemble, truncate
from penstock.loaders._rollouts.batch import RolloutBatch
from penstock.loaders._rollouts.dealing import deal_rows, micro_batches_of
from penstock.loaders._rollouts.options import RolloutOptions
from penstock.loaders._rollouts.placing import RolloutForm
from penstock.loaders._rollouts.rules import Rules, labels_of, learned_tokens, staleness
from penstock.loaders._rollouts.sources import Cursor, RolloutSource, Taken
from penstock.loaders._rollouts.table import Ragged, RolloutTable
from penstock.loaders.batch import TrainingBatch
from penstock.loaders.options import Options
from penstock.order.permutation import Permutation, derive_key

__all__ = ["Place", "RolloutEngine"]

_VERSION = 1
Ints = npt.NDArray[np.int64]
Made = tuple[TrainingBatch, "Place"]


@dataclass(frozen=True, slots=True)
class Place:
    """In front of a minibatch."""

    epoch: int = 0
    """Of a list or a file: how often all of it was used; of a live source: the number of the rollout batch."""
    step: int = 0
    cursor: Cursor = None
    """Where the rollout batch begins in its source."""
    number: int = 0
    """Of the rollout batch, in its epoch."""
    version: int | None = None
    """Of the policy when the rollout batch was begun with."""
    ppo_epoch: int = 0
    unit: int = 0
    """Groups of this PPO epoch that were used."""
    minibatch: int = 0
    counts: tuple[tuple[str, int], ...] = ()
    """Rollouts dropped so far, by reason."""

    @property
    def begun(self) -> bool:
        """Whether something of the rollout batch was used, so that it has to stay what it is."""
        return bool(self.ppo_epoch or self.unit)

    def counting(self, dropped: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted((Counter(dict(self.counts)) + Counter(dict(dropped))).items()))


class Round:
    """A rollout batch that is at hand. Advantages are computed when they are first asked for."""

    def __init__(self, taken: Taken, engine: RolloutEngine, rules: Rules) -> None:
        self.behind, self.dropped, self.version = taken.behind, taken.dropped, rules.version
        self._spec, self._advantages = engine.spec, engine.compute_advantages
        self._rules = rules
        self.table, self.cut_tokens = taken.table, np.zeros(len(taken.table), np.int64)
        if len(taken.table):
            self.table, self.cut_tokens = truncate(taken.table, engine.form)
        self.keys = taken.keys
        units = self.keys if engine.rollout.keep_groups else np.arange(len(self.keys))
        self._order = np.argsort(units, kind="stable")
        _, self.sizes = np.unique(units, return_counts=True)
        self._ends = np.cumsum(self.sizes)

    def __len__(self) -> int:
        """Groups, or rollouts where groups are not kept whole."""
        return len(self.sizes)

    def rows(self, units: Ints) -> Ints:
        """The rollouts of some units, one unit after the other."""
        return np.concatenate([self._order[self._ends[u] - self.sizes[u] : self._ends[u]] for u in units.tolist()])

    @cached_property
    def learned(self) -> Ints:
        return learned_tokens(self.table)

    @cached_property
    def columns(self) -> Columns:
        """What batches have beside what was given."""
        table = self.table
        found = compute(table, labels_of(table, self.keys), self._spec) if self._advantages else Columns({}, {})
        told: dict[str, Any] = {"stale": self._rules.flags(table), "staleness": staleness(table, self.version)}
        return Columns(found.per_token, {**found.per_row, **told})


@dataclass(frozen=True, slots=True)
class _Minibatch:
    round: Round
    rows: Ints
    """Of the global minibatch."""
    place: Place


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
        self._held: tuple[Any, Round | None] | None = None
        # A mistake in the aggregation is told now and not with the first batch.
        denominators(np.ones(1, np.int64), self.spec)

    @property
    def names(self) -> str:
        return self.source.name

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.rank.world

    # Positions

    def start(self) -> Place:
        return Place()

    def seek(self, step: int) -> Place:
        self._countable("go to a step")
        place = Place()
        while place.step < step:
            place = self._walked(place, step)
        return place

    def seek_epoch(self, epoch: int, position: Place) -> Place:
        self._countable("go to an epoch")
        place = Place()
        while place.epoch < epoch:
            place = self._walked(place, None)
        return place

    def _walked(self, place: Place, step: int | None) -> Place:
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
        place = replace(Place(), epoch=epoch)
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

    def one(self, position: Place, batch_size: int | None) -> Made:
        size = self.global_batch if batch_size is None else batch_size * self.rank.world
        found = self._next(position, size)
        if found is None:
            if self.source.live:
                raise EOFError(f"{self.source.name} is at its end: no more rollouts will come")
            raise self._nothing()
        return self._make(found[0]), found[1]

    def item(self, epoch: int, number: int) -> TrainingBatch:
        self._countable("ask for a batch by its number")
        place = replace(Place(), epoch=epoch)
        for _ in range(number):
            found = self._next(place, self.global_batch)
            assert found is not None
            place = found[1]
        found = self._next(place, self.global_batch)
        assert found is not None
        return self._make(found[0])

    def batches(self, position: Place) -> Generator[Made, None, None]:
        """The rest of an epoch. What a live source has to be waited for is waited for here, by whoever calls."""
        found = self._next(position, self.global_batch)
        if found is None and not self.source.live:
            raise self._nothing()
        return self._rest(found)

    def _rest(self, found: tuple[_Minibatch, Place] | None) -> Generator[Made, None, None]:
        while found is not None:
            minibatch, behind = found
            yield self._make(minibatch), behind
            found = self._next(behind, self.global_batch) if behind.epoch == minibatch.place.epoch else None

    def _next(self, place: Place, size: int) -> tuple[_Minibatch, Place] | None:
        """The minibatch at a place, or the next one there is, and the place behind it; None if there are no more."""
        begun = place
        while True:
            held = self._round(place)
            if held is None:
                return None
            place = _entered(held, place)
            found = self._cut(held, place, size) if len(held) else None
            if found is not None:
                end, rows = found
                behind = replace(place, step=place.step + 1, unit=end, minibatch=place.minibatch + 1)
                return _Minibatch(held, rows, place), self._settled(held, behind, size)
            place = self._after(held, place)
            if place.epoch > begun.epoch + 1 and not self.source.live:
                return None  # a whole epoch without a single minibatch

    def _settled(self, held: Round, place: Place, size: int) -> Place:
        """The place, or that of the next epoch if nothing of this one is left. A live source is not waited for."""
        while not len(held) or self._cut(held, place, size) is None:
            epoch, place = place.epoch, self._after(held, place)
            if place.epoch != epoch or self.source.live:
                break
            if not place.begun:
                ahead = self._round(place)
                assert ahead is not None  # the cursor says that there is one
                if len(ahead) and self._cut(ahead, place, size) is not None:
                    break
                held, place = ahead, _entered(ahead, place)
        return place

    def _cut(self, held: Round, place: Place, size: int) -> tuple[int, Ints] | None:
        """The units from a place on that fill a minibatch: where they end, and their rows. None at the end of a pass,
        and with `drop_last` where too few are left."""
        if place.unit >= len(held):
            return None
        largest = int(np.argmax(held.sizes))
        if held.sizes[largest] > size:
            name = held.table.groups[held.rows(np.array([largest]))[0]]
            least = -(-int(held.sizes[largest]) // self.rank.world)
            raise ConfigError(
                f"group {name!r} has {held.sizes[largest]} rollouts, and a minibatch of all ranks {size}; pass a "
                f"batch_size of at least {least}, or keep_groups=False: advantages stay the same"
            )
        order = self._order(held, place)
        ends = np.cumsum(held.sizes[order[place.unit :]])
        count = int(np.searchsorted(ends, size, "right"))
        if self.options.drop_last and count == len(ends) and ends[-1] < size:
            return None
        return place.unit + count, held.rows(order[place.unit : place.unit + count])

    def _order(self, held: Round, place: Place) -> Ints:
        if not self.options.shuffle:
            return np.arange(len(held))
        key = derive_key(self.options.seed, "rollouts", place.epoch, place.number, place.ppo_epoch)
        return Permutation(len(held), key)(np.arange(len(held)))

    def _after(self, held: Round, place: Place) -> Place:
        """Behind the end of a pass: the next PPO epoch, the next rollout batch, or the next epoch."""
        if place.ppo_epoch + 1 < self.rollout.ppo_epochs and len(held):
            return replace(place, ppo_epoch=place.ppo_epoch + 1, unit=0, minibatch=0)
        over = self.source.live or held.behind is None
        return Place(
            epoch=place.epoch + over,
            step=place.step,
            cursor=held.behind,
            number=0 if over else place.number + 1,
            counts=place.counts,
        )

    def _round(self, place: Place) -> Round | None:
        """The rollout batch at a place. Two threads may take one of a list at the same time: then it is taken twice."""
        version = place.version if place.begun else self.version
        key = repr((place.cursor, version))
        held = self._held
        if held is None or held[0] != key:
            rules = Rules(self.rollout, self.spec, version)
            taken = self.source.take(place.cursor, rules)
            held = self._held = key, None if taken is None else Round(taken, self, rules)
            self.ended = self.source.live and taken is None
            if self.ended:
                self._held = None
        return held[1]

    def _make(self, minibatch: _Minibatch) -> TrainingBatch:
        held, rows, place = minibatch.round, minibatch.rows, minibatch.place
        table, columns, learned = held.table, held.columns, held.learned[rows]
        divisors = np.ones(len(table))
        ranks = self.rank.world if self.rollout.gradients == "averaged" else 1
        divisors[rows] = denominators(learned, self.spec, ranks=ranks)
        dealt = self._dealt(table.lengths[rows])
        mine = rows[dealt[self.rank.rank]]
        blank = self.rank.rank >= len(rows)
        per_token, per_row = columns.per_token, {**columns.per_row, "denominators": divisors}
        if blank:
            table, per_token, per_row = _blanked(table, per_token, per_row, mine)
            mine = np.arange(len(mine))
        arrays, metadata = assemble(
            table, self.form, rows=mine, per_token=per_token, per_row=per_row, num_items_in_batch=int(learned.sum())
        )
        cut = held.cut_tokens[rows[dealt[self.rank.rank]]]
        metadata |= {
            "truncated_tokens": cut.astype(metadata["truncated_tokens"].dtype),  # before advantages were computed
            "step": place.step,
            "epoch": place.epoch,
            "sources": (self.source.name,),
            "rollout_batch": place.epoch if self.source.live else place.number,
            "ppo_epoch": place.ppo_epoch,
            "minibatch": place.minibatch,
            "policy_version": held.version,
            "blank": blank,
        }
        if self.rollout.micro_batch_tokens is not None:
            metadata["micro_batches"] = self._micro_batches(held.table, rows, dealt)
        return self._handed_over(arrays, metadata, int(table.lengths[mine].sum()))

    def _dealt(self, lengths: Ints) -> list[Ints]:
        """The rows of each rank. Fewer rows than ranks: those without one get a copy of the shortest, blanked."""
        world = self.rank.world
        if len(lengths) >= world:
            return deal_rows(lengths, world)
        shortest = np.array([int(np.argmin(lengths))])
        return [np.array([rank]) if rank < len(lengths) else shortest for rank in range(world)]

    def _micro_batches(self, table: RolloutTable, rows: Ints, dealt: list[Ints]) -> list[list[int]]:
        """Of this rank's batch, as row numbers in it."""
        prompts, responses = table.prompt_ids.lengths[rows], table.response_ids.lengths[rows]
        most = self.rollout.micro_batch_tokens
        assert most is not None
        cut = micro_batches_of(prompts, responses, most, form=self.form, deal=dealt)[self.rank.rank]
        numbers = {row: number for number, row in enumerate(dealt[self.rank.rank].tolist())}
        return [[numbers[row] for row in part.tolist()] for part in cut]

    def _handed_over(self, arrays: dict[str, Any], metadata: dict[str, Any], tokens: int) -> TrainingBatch:
        options = self.options
        batch = RolloutBatch.from_numpy(arrays, metadata, options.backend, num_tokens=tokens)
        if options.pin_memory:
            batch = batch.pin_memory()
        return batch if options.device is None else batch.to(options.device, non_blocking=options.pin_memory)

    def _nothing(self) -> Exception:
        reasons = dict(replace(Place(), counts=()).counts)
        held = self._round(Place())
        if held is not None:
            reasons = dict(held.dropped)
        if reasons:
            told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
            return DataError(f"no rollout is left to train on; dropped were: {told}")
        return ConfigError(
            f"there are fewer rollouts than a minibatch of {self.global_batch}, and drop_last=True drops what does not "
            "fill one, so nothing would be delivered; use a smaller batch, or drop_last=False"
        )

    # State

    def facts(self) -> dict[str, Any]:
        """What the batches depend on besides the position."""
        chosen, rollout = self.options, self.rollout
        rules = {name: getattr(rollout, name) for name in _RULES if getattr(rollout, name) is not None}
        return {
            "source": self.source.facts(),
            "seed": chosen.seed,
            "shuffle": chosen.shuffle,
            "drop_last": chosen.drop_last,
            "rules": rules,
            "advantages": self.spec.described() if self.compute_advantages else "none",
        }

    def to_state(self, position: Place) -> dict[str, Any]:
        self.source.check_saved(position.cursor, between=not position.begun)
        return {
            "version": _VERSION,
            "kind": "rollouts",
            "facts": self.facts(),
            "global_batch": self.global_batch,
            "policy_version": self.version,
            "position": {
                "epoch": position.epoch,
                "step": position.step,
                "cursor": position.cursor,
                "number": position.number,
                "policy_version": position.version if position.begun else None,
                "ppo_epoch": position.ppo_epoch,
                "unit": position.unit,
                "minibatch": position.minibatch,
                "counts": dict(position.counts),
            },
        }

    def from_state(self, state: Mapping[str, Any], *, new_batch_size: bool = False) -> Place:
        if not isinstance(state, Mapping) or state.get("kind") != "rollouts":
            raise ResumeError(f"not a state of a RolloutDataLoader: {state!r:.200}")
        if state.get("version") != _VERSION:
            raise ResumeError(f"the state has version {state.get('version')!r}, this penstock reads {_VERSION}")
        theirs, ours = _flat(state["facts"]), _flat(self.facts())
        for name in dict.fromkeys([*theirs, *ours]):
            if theirs.get(name) != ours.get(name):
                raise ResumeError(
                    f"the state is of a loader with {name} {theirs.get(name)!r}, this one has {ours.get(name)!r}; "
                    "it would not go on with what was to come"
                )
        if state["global_batch"] != self.global_batch and not new_batch_size:
            raise ResumeError(
                f"the state is of a loader with minibatches of {state['global_batch']} rollouts over all ranks, this "
                f"one has {self.global_batch} ({self.batch_size} for each of {self.rank.world}); use as many, or pass "
                "new_batch_size=True"
            )
        given = state["position"]
        place = Place(
            epoch=given["epoch"],
            step=given["step"],
            cursor=self.source.restored(given["cursor"]),
            number=given["number"],
            version=given["policy_version"],
            ppo_epoch=given["ppo_epoch"],
            unit=given["unit"],
            minibatch=given["minibatch"],
            counts=tuple(sorted(given["counts"].items())),
        )
        if state["policy_version"] is not None:
            self.version = state["policy_version"]
        self._held = None
        return place

    def commit(self, state: Mapping[str, Any]) -> None:
        self.source.commit(state["position"]["cursor"])

    def close(self) -> None:
        self._held = None
        self.source.close()


_RULES = (
    "rollout_batch_size",
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


def _entered(held: Round, place: Place) -> Place:
    """The place, knowing what it knows once something of its rollout batch is used."""
    if place.begun:
        return place
    return replace(place, version=held.version, counts=place.counting(held.dropped))


def _blanked(
    table: RolloutTable, per_token: Mapping[str, Ragged], per_row: Mapping[str, Any], rows: Ints
) -> tuple[RolloutTable, dict[str, Ragged], dict[str, Any]]:
    """Rows from which nothing is learned: the mask and what was computed are 0, and nothing is divided."""
    some = table.take(rows)
    mask = some.loss_mask
    tokens = {name: column.take(rows) for name, column in per_token.items()}
    return (
        replace(some, loss_mask=Ragged(np.zeros_like(mask.values), mask.offsets)),
        {name: Ragged(np.zeros_like(column.values), column.offsets) for name, column in tokens.items()},
        {name: np.ones(len(rows)) if name == "denominators" else column[rows] for name, column in per_row.items()},
    )


def _flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= _flat(value, f"{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found
