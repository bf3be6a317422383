"""Rollout batch split into minibatches, and each of these into the batches of ranks and their micro-batches.

Everything here is arithmetic on lengths with the same result on every rank. A rank without work would block the others
in their collectives, so every rank gets rows, and the same number of micro-batches, some of them empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.distributed.balancing import micro_batches
from penstock.distributed.ranks import Rank
from penstock.distributed.sharding import Balanced
from penstock.errors import ConfigError
from penstock.order.permutation import Permutation
from penstock.rl.collate import RolloutForm, assemble, round_up, truncate, widths
from penstock.rl.compute import AdvantageColumns, check_rewards, compute_advantages, denominators
from penstock.rl.options import RolloutBatching
from penstock.rl.rollout import RolloutTable
from penstock.rl.selection import (
    SelectionRules,
    check_single_members,
    describe_group_sizes,
    group_labels,
    staleness,
    supervised_counts,
)
from penstock.rl.sources import SelectedRollouts

Ints = npt.NDArray[np.int64]


class RolloutMinibatches:
    """Rollout batch in memory. Advantages are computed when they are first needed.

    A *unit* is what stays in one minibatch: a group, or a rollout if groups are not kept.
    """

    def __init__(
        self,
        selected: SelectedRollouts,
        rules: SelectionRules,
        batching: RolloutBatching,
        form: RolloutForm,
        *,
        compute_advantages: bool,
    ) -> None:
        self.next_cursor, self.dropped, self.version = selected.next_cursor, selected.dropped, rules.version
        self.rules, self.batching, self._compute = rules, batching, compute_advantages
        self.table, self.truncated = selected.table, np.zeros(len(selected.table), np.int64)
        self._lengths = selected.table.response_ids.lengths
        if compute_advantages:
            check_rewards(selected.table)
        if len(selected.table):
            self.table, self.truncated = truncate(selected.table, form)
        self.keys = selected.keys
        units = self.keys if batching.keep_groups else np.arange(len(self.keys))
        self._order = np.argsort(units, kind="stable")
        _, self.sizes = np.unique(units, return_counts=True)
        self._ends = np.cumsum(self.sizes)
        self._drawn: tuple[int | None, tuple[Ints, Ints]] | None = None
        self.group_warning: str | None = None
        """Effect of the preset on groups of unusual sizes; known once `columns` is."""

    def __len__(self) -> int:
        """Number of units."""
        return len(self.sizes)

    def order(self, key: int | None) -> tuple[Ints, Ints]:
        """Units in the order of a shuffle key (None: unshuffled), and the number of rollouts up to the end of each."""
        drawn = self._drawn
        if drawn is None or drawn[0] != key:
            order = np.arange(len(self))
            if key is not None:
                order = Permutation(len(self), key)(order)
            drawn = self._drawn = key, (order, np.cumsum(self.sizes[order]))
        return drawn[1]

    def rows(self, units: Ints) -> Ints:
        """Rollouts of units, one unit after the other."""
        return np.concatenate([self._order[self._ends[u] - self.sizes[u] : self._ends[u]] for u in units.tolist()])

    @cached_property
    def supervised(self) -> Ints:
        return supervised_counts(self.table)

    @cached_property
    def columns(self) -> AdvantageColumns:
        """Computed columns of all rollouts."""
        table, spec = self.table, self.rules.spec
        found = AdvantageColumns({}, {})
        if self._compute:
            labels = group_labels(table, self.keys)
            check_single_members(table, labels, spec)
            self.group_warning = describe_group_sizes(table, labels, spec)
            found = compute_advantages(table, labels, spec, lengths=self._lengths)
        ages: dict[str, Any] = {"stale": self.rules.stale_flags(table), "staleness": staleness(table, self.version)}
        return AdvantageColumns(found.per_token, {**found.per_row, **ages})


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rollouts of one step of all ranks."""

    rollouts: RolloutMinibatches
    units: Ints
    form: RolloutForm
    rank: Rank

    def assembled(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arrays and metadata of this rank's batch."""
        held = self.rollouts
        rows = held.rows(self.units)
        table, columns, supervised = held.table, held.columns, held.supervised[rows]
        divisors = np.ones(len(table))
        ranks = self.rank.world_size if held.batching.gradients == "averaged" else 1
        divisors[rows] = denominators(supervised, held.rules.spec, ranks=ranks)
        shards = self._shards(table.lengths[rows])
        mine = rows[shards[self.rank.rank]]
        truncated = held.truncated[mine]
        per_token: Mapping[str, Ragged] = columns.per_token
        per_row: Mapping[str, Any] = {**columns.per_row, "denominators": divisors}
        blank = self.rank.rank >= len(rows)
        if blank:
            table, per_token, per_row = _blanked(table, per_token, per_row, mine)
            mine = np.arange(len(mine))
        arrays, metadata = assemble(
            table,
            self.form,
            rows=mine,
            per_token=per_token,
            per_row=per_row,
            num_items_in_batch=int(supervised.sum()),
            deferred=True,
        )
        # Truncated before the estimator, so `assemble` saw nothing to cut.
        metadata["truncated_tokens"] = truncated.astype(metadata["truncated_tokens"].dtype)
        metadata |= {"policy_version": held.version, "blank": blank}
        if held.batching.micro_batch_tokens is not None:
            metadata["micro_batches"] = self._micro_batches(held.batching.micro_batch_tokens, rows, shards)
        return arrays, metadata

    def _shards(self, lengths: Ints) -> list[Ints]:
        """Rows of each rank, balanced by length. With fewer rows than ranks, the rest get the shortest, blanked."""
        world = self.rank.world_size
        if world == 1:
            return [np.arange(len(lengths))]
        if len(lengths) >= world:
            return Balanced().shares(lengths, world)
        shortest = np.array([int(np.argmin(lengths))])
        return [np.array([rank]) if rank < len(lengths) else shortest for rank in range(world)]

    def _micro_batches(self, most: int, rows: Ints, shards: list[Ints]) -> list[list[int]]:
        """Micro-batches of this rank as row numbers of its batch; empty ones if another rank has more."""
        table, own = self.rollouts.table, shards[self.rank.rank]
        prompts, responses = table.prompt_ids.lengths[rows], table.response_ids.lengths[rows]
        parts = micro_batches_of(prompts, responses, most, form=self.form, shards=shards, names=table.ids[rows])
        numbers = {row: number for number, row in enumerate(own.tolist())}
        return [[numbers[row] for row in part.tolist()] for part in parts[self.rank.rank]]


def _blanked(
    table: RolloutTable, per_token: Mapping[str, Ragged], per_row: Mapping[str, Any], rows: Ints
) -> tuple[RolloutTable, dict[str, Ragged], dict[str, Any]]:
    """Rows without a supervised token: mask and computed columns are 0, denominators 1."""
    chosen = table.take(rows)
    mask = chosen.loss_mask
    tokens = {name: column.take(rows) for name, column in per_token.items()}
    fixed = {"denominators": np.ones(len(rows)), "sequence_advantages": np.zeros(len(rows))}
    return (
        replace(chosen, loss_mask=Ragged(np.zeros_like(mask.values), mask.offsets)),
        {name: Ragged(np.zeros_like(column.values), column.offsets) for name, column in tokens.items()},
        {name: fixed[name] if name in fixed else column[rows] for name, column in per_row.items()},
    )


def micro_batches_of(
    prompts: npt.ArrayLike,
    responses: npt.ArrayLike,
    max_tokens: int,
    *,
    form: RolloutForm,
    shards: Sequence[Ints] | None = None,
    at_least: int = 1,
    names: Sequence[Any] | npt.NDArray[Any] | None = None,
) -> list[list[Ints]]:
    """Micro-batches of each rank, as rows: of at most `max_tokens` in the layout of `form`, padding included.

    `prompts` and `responses` are lengths, `shards` the rows of each rank (None: one rank has all), `names` the ids of
    rollouts for messages. Each row of a rank is in one micro-batch. Every rank has the same number of them: as few as
    the rank with the most work needs, and `at_least` this many. A rank with fewer rows has empty ones at the end, which
    `RolloutBatch.take` fills with a blank rollout. The largest come first, so that running out of memory happens early.
    """
    left, right = np.asarray(prompts, np.int64), np.asarray(responses, np.int64)
    ranks = [np.arange(len(left))] if shards is None else [np.asarray(rows, np.int64) for rows in shards]
    if max_tokens < 1 or at_least < 1:
        raise ConfigError(f"max_tokens and at_least must be at least 1, got {max_tokens} and {at_least}")
    if not all(map(len, ranks)):
        raise ConfigError("a rank has 0 rollouts, and each needs at least one; use larger batches, or fewer ranks")
    _check_longest(left, right, np.concatenate(ranks), max_tokens, form, names)
    count = at_least
    while True:
        split = [_split(left, right, rows, max_tokens, form, min(count, len(rows))) for rows in ranks]
        most = max(map(len, split))
        if most <= count:
            nothing = np.empty(0, np.int64)
            return [[*parts, *[nothing] * (count - len(parts))] for parts in split]
        count = most  # a rank may then need one more: repeat, which ends at the number of its rows


def _split(prompts: Ints, responses: Ints, rows: Ints, max_tokens: int, form: RolloutForm, at_least: int) -> list[Ints]:
    """As few parts as possible, and `at_least` this many, which is no more than there are rows."""
    left, right = prompts[rows], responses[rows]
    if form.padding == "free":
        room = max_tokens // form.pad_to_multiple_of * form.pad_to_multiple_of
        return [rows[part] for part in micro_batches(left + right, room, at_least=at_least)]
    parts = _by_sides(left, right, max_tokens, form)
    while len(parts) < at_least:
        largest = max(range(len(parts)), key=lambda number: len(parts[number]))
        parts[largest : largest + 1] = np.array_split(parts[largest], 2)
    sizes = [len(part) * sum(widths(left[part], right[part], form)) for part in parts]
    order = sorted(range(len(parts)), key=lambda number: (-sizes[number], number))
    return [np.sort(rows[parts[number]]) for number in order]


def _by_sides(prompts: Ints, responses: Ints, max_tokens: int, form: RolloutForm) -> list[Ints]:
    """Runs of rows sorted by length, each as long as fits at the widths of its longest prompt and response."""
    order = np.argsort(-(prompts + responses), kind="stable")
    parts: list[Ints] = []
    start = 0
    while start < len(order):
        most = max_tokens // max(1, int(prompts[order[start]] + responses[order[start]]))
        ahead = order[start : start + most]
        rows = np.arange(1, len(ahead) + 1)
        wide = _row_tokens(np.maximum.accumulate(prompts[ahead]), np.maximum.accumulate(responses[ahead]), form)
        end = start + int(np.searchsorted(rows * wide, max_tokens, "right"))
        parts.append(order[start:end])
        start = end
    return parts


def _row_tokens(prompts: Ints, responses: Ints, form: RolloutForm) -> Ints:
    """Tokens of rows with prompts and responses of these widths, padding included."""
    multiple = form.pad_to_multiple_of
    if form.padding == "free":
        return round_up(prompts + responses, multiple)
    if form.fixed:
        return np.full(len(prompts), sum(widths(prompts, responses, form)))
    return round_up(prompts, multiple) + round_up(np.maximum(responses, 1), multiple)


def _check_longest(
    prompts: Ints,
    responses: Ints,
    rows: Ints,
    max_tokens: int,
    form: RolloutForm,
    names: Sequence[Any] | npt.NDArray[Any] | None,
) -> None:
    sizes = _row_tokens(prompts[rows], responses[rows], form)
    longest = int(np.argmax(sizes))
    if sizes[longest] > max_tokens:
        row = rows[longest]
        name = f"row {row}" if names is None else f"rollout {names[row]!r}"
        raise ConfigError(
            f"{name} has a prompt of {prompts[row]} tokens and a response of {responses[row]}: {sizes[longest]} with "
            f"padding, more than max_tokens={max_tokens}; raise max_tokens, or truncate or leave out such rollouts"
        )
