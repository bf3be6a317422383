"""A rollout batch that is at hand, and the minibatches it is cut into, each with the share of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.distributed.ranks import Rank
from penstock.order.permutation import Permutation
from penstock.rl.collate import assemble, truncate
from penstock.rl.compute import AdvantageInputs, check_rewards, compute, denominators
from penstock.rl.groups import check_whole_groups, describe_lone_groups
from penstock.rl.layout import RolloutForm
from penstock.rl.selection import SelectionRules, labels_of, learned_tokens, staleness
from penstock.rl.sharding import deal_rows, micro_batches_of
from penstock.rl.sources import Taken
from penstock.rl.table import RolloutTable

__all__ = ["Minibatch", "RolloutMinibatches"]

Ints = npt.NDArray[np.int64]


class RolloutMinibatches:
    """A rollout batch that is at hand. Advantages are computed when they are first asked for."""

    def __init__(self, taken: Taken, rules: SelectionRules, form: RolloutForm, *, compute_advantages: bool) -> None:
        self.behind, self.dropped, self.version = taken.behind, taken.dropped, rules.version
        self.rules, self._compute = rules, compute_advantages
        self.table, self.cut_tokens = taken.table, np.zeros(len(taken.table), np.int64)
        self._lengths = taken.table.response_ids.lengths
        if compute_advantages:
            check_rewards(taken.table)
        if len(taken.table):
            self.table, self.cut_tokens = truncate(taken.table, form)
        self.keys = taken.keys
        units = self.keys if rules.options.keep_groups else np.arange(len(self.keys))
        self._order = np.argsort(units, kind="stable")
        _, self.sizes = np.unique(units, return_counts=True)
        self._ends = np.cumsum(self.sizes)
        self._drawn: tuple[int | None, tuple[Ints, Ints]] | None = None
        self.lone: str | None = None
        """What the preset does to groups of one, if that was not asked for; known with the columns."""

    def __len__(self) -> int:
        """Groups, or rollouts where groups are not kept whole."""
        return len(self.sizes)

    def order(self, key: int | None) -> tuple[Ints, Ints]:
        """The units in the order that a key draws, and how many rollouts there are up to the end of each."""
        drawn = self._drawn
        if drawn is None or drawn[0] != key:
            order = np.arange(len(self))
            if key is not None:
                order = Permutation(len(self), key)(order)
            drawn = self._drawn = key, (order, np.cumsum(self.sizes[order]))
        return drawn[1]

    def rows(self, units: Ints) -> Ints:
        """The rollouts of some units, one unit after the other."""
        return np.concatenate([self._order[self._ends[u] - self.sizes[u] : self._ends[u]] for u in units.tolist()])

    @cached_property
    def learned(self) -> Ints:
        return learned_tokens(self.table)

    @cached_property
    def columns(self) -> AdvantageInputs:
        """What batches have beside what was given."""
        table = self.table
        spec = self.rules.spec
        found = AdvantageInputs({}, {})
        if self._compute:
            labels = labels_of(table, self.keys)
            check_whole_groups(table, labels, spec)
            self.lone = describe_lone_groups(table, labels, spec)
            found = compute(table, labels, spec, lengths=self._lengths)
        told: dict[str, Any] = {"stale": self.rules.flags(table), "staleness": staleness(table, self.version)}
        return AdvantageInputs(found.per_token, {**found.per_row, **told})


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rollouts of one step of all ranks."""

    round: RolloutMinibatches
    units: Ints
    form: RolloutForm
    rank: Rank

    def assembled(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The arrays and the metadata of this rank's batch."""
        held = self.round
        rows = held.rows(self.units)
        table, columns, learned = held.table, held.columns, held.learned[rows]
        options = held.rules.options
        divisors = np.ones(len(table))
        ranks = self.rank.world_size if options.gradients == "averaged" else 1
        divisors[rows] = denominators(learned, held.rules.spec, ranks=ranks)
        dealt = self._dealt(table.lengths[rows])
        mine = rows[dealt[self.rank.rank]]
        cut = held.cut_tokens[mine]
        per_token: Mapping[str, Ragged] = columns.per_token
        per_row: Mapping[str, Any] = {**columns.per_row, "denominators": divisors}
        blank = self.rank.rank >= len(rows)
        if blank:
            table, per_token, per_row = _blanked(table, per_token, per_row, mine)
            mine = np.arange(len(mine))
        arrays, metadata = assemble(
            table, self.form, rows=mine, per_token=per_token, per_row=per_row, num_items_in_batch=int(learned.sum())
        )
        metadata["truncated_tokens"] = cut.astype(metadata["truncated_tokens"].dtype)  # cut in front of the estimator
        metadata |= {"policy_version": held.version, "blank": blank}
        if options.micro_batch_tokens is not None:
            metadata["micro_batches"] = self._micro_batches(options.micro_batch_tokens, rows, dealt)
        return arrays, metadata

    def _dealt(self, lengths: Ints) -> list[Ints]:
        """The rows of each rank. Fewer rows than ranks: those without one get a copy of the shortest, blanked."""
        world = self.rank.world_size
        if len(lengths) >= world:
            return deal_rows(lengths, world)
        shortest = np.array([int(np.argmin(lengths))])
        return [np.array([rank]) if rank < len(lengths) else shortest for rank in range(world)]

    def _micro_batches(self, most: int, rows: Ints, dealt: list[Ints]) -> list[list[int]]:
        """Of this rank's batch, as row numbers in it; none where another rank has more: `take` makes a blank of it."""
        table = self.round.table
        prompts, responses = table.prompt_ids.lengths[rows], table.response_ids.lengths[rows]
        names = table.ids[rows]
        cut = micro_batches_of(prompts, responses, most, form=self.form, deal=dealt, names=names)[self.rank.rank]
        numbers = {row: number for number, row in enumerate(dealt[self.rank.rank].tolist())}
        return [[numbers[row] for row in part.tolist()] for part in cut]


def _blanked(
    table: RolloutTable, per_token: Mapping[str, Ragged], per_row: Mapping[str, Any], rows: Ints
) -> tuple[RolloutTable, dict[str, Ragged], dict[str, Any]]:
    """Rows from which nothing is learned: the mask and what was computed are 0, and nothing is divided."""
    some = table.take(rows)
    mask = some.loss_mask
    tokens = {name: column.take(rows) for name, column in per_token.items()}
    fixed = {"denominators": np.ones(len(rows)), "sequence_advantages": np.zeros(len(rows))}
    return (
        replace(some, loss_mask=Ragged(np.zeros_like(mask.values), mask.offsets)),
        {name: Ragged(np.zeros_like(column.values), column.offsets) for name, column in tokens.items()},
        {name: fixed[name] if name in fixed else column[rows] for name, column in per_row.items()},
    )
