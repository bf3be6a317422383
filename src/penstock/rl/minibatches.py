"""A rollout batch that is at hand, and the minibatches it is cut into, each with the share of every rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.distributed.balancing import attention_cost, karmarkar_karp, micro_batches
from penstock.distributed.ranks import Rank
from penstock.errors import ConfigError
from penstock.order.permutation import Permutation
from penstock.rl.collate import RolloutForm, assemble, truncate, widths
from penstock.rl.compute import AdvantageInputs, check_rewards, compute, denominators
from penstock.rl.rollout import RolloutTable
from penstock.rl.selection import (
    SelectionRules,
    check_whole_groups,
    describe_lone_groups,
    labels_of,
    learned_tokens,
    staleness,
)
from penstock.rl.sources import Taken

__all__ = ["Minibatch", "RolloutMinibatches", "deal_rows", "micro_batches_of"]


Ints = npt.NDArray[np.int64]
Cost = Callable[[npt.ArrayLike], npt.NDArray[np.float64]]


def deal_rows(
    lengths: npt.ArrayLike,
    world: int,
    *,
    equal_size: bool = True,
    groups: Sequence[Hashable] | npt.NDArray[Any] | None = None,
    cost: Cost = attention_cost,
) -> list[Ints]:
    """The rows of each rank, in order: each row once, the work nearly equal, no rank without rows.

    `lengths` are tokens of prompt and response, `cost` the work in them. With `equal_size` the ranks get equally many
    rows, or one less; without, the work is more even. With `groups`, one name a row, those of one name stay together,
    and `equal_size` is about the number of groups.
    """
    tokens = np.asarray(lengths)
    if world < 1:
        raise ConfigError(f"world must be at least 1, got {world}")
    costs = cost(tokens)
    if groups is None:
        _enough(len(tokens), world, "rollouts")
        return karmarkar_karp(costs, world, equal_size)
    if len(groups) != len(tokens):
        raise ConfigError(f"groups names {len(groups)} rows, lengths are of {len(tokens)}; one each is needed")
    numbers: dict[Hashable, int] = {}
    group_of = np.array([numbers.setdefault(name, len(numbers)) for name in groups], np.int64)
    _enough(len(numbers), world, "groups")
    parts = karmarkar_karp(np.bincount(group_of, costs, len(numbers)), world, equal_size)
    rank_of = np.empty(len(numbers), np.int64)
    for rank, part in enumerate(parts):
        rank_of[part] = rank
    return [np.flatnonzero(rank_of[group_of] == rank) for rank in range(world)]


def micro_batches_of(
    prompts: npt.ArrayLike,
    responses: npt.ArrayLike,
    max_tokens: int,
    *,
    form: RolloutForm,
    deal: Sequence[Ints] | None = None,
    at_least: int = 1,
    multiple_of: int = 1,
    names: Sequence[Any] | npt.NDArray[Any] | None = None,
) -> list[list[Ints]]:
    """The micro-batches of each rank, as rows: of at most `max_tokens` as `form` lays them out, padding included.

    `prompts` and `responses` are their lengths, `deal` the rows of each rank as `deal_rows` gives them (None: one rank
    has all), `names` what rollouts are called in messages. Each row of a rank is in one micro-batch, and every rank has
    equally many: as few as the one with the most work needs, but `at_least` so many, and a multiple of `multiple_of`
    (the virtual stages of a pipeline). A rank with fewer rows than that has empty ones at the end, of which
    `RolloutBatch.take` makes a rollout that teaches nothing. The largest come first, so what does not fit into memory
    fails at once.
    """
    left, right = np.asarray(prompts, np.int64), np.asarray(responses, np.int64)
    ranks = [np.arange(len(left))] if deal is None else [np.asarray(rows, np.int64) for rows in deal]
    if max_tokens < 1 or at_least < 1 or multiple_of < 1:
        raise ConfigError(
            f"max_tokens, at_least and multiple_of must be at least 1, got {max_tokens}, {at_least}, {multiple_of}"
        )
    for rows in ranks:
        _enough(len(rows), 1, "rollouts")
    _check_longest(left, right, np.concatenate(ranks), max_tokens, form, names)
    count = _round_up(at_least, multiple_of)
    while True:
        cut = [_cut(left, right, rows, max_tokens, form, min(count, len(rows))) for rows in ranks]
        most = _round_up(max(map(len, cut)), multiple_of)
        if most <= count:
            nothing = np.empty(0, np.int64)
            return [[*parts, *[nothing] * (count - len(parts))] for parts in cut]
        count = most  # which may take some rank one more than that: then again, and never past its rows


def _cut(prompts: Ints, responses: Ints, rows: Ints, max_tokens: int, form: RolloutForm, at_least: int) -> list[Ints]:
    """As few parts as can be, but `at_least` so many, which are no more than there are rows."""
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
    """Neighbours by length: as many as fit at the widths of the longest prompt and the longest response of them."""
    order = np.argsort(-(prompts + responses), kind="stable")
    parts: list[Ints] = []
    start = 0
    while start < len(order):
        most = max_tokens // max(1, int(prompts[order[start]] + responses[order[start]]))
        ahead = order[start : start + most]
        rows = np.arange(1, len(ahead) + 1)
        wide = _tokens(np.maximum.accumulate(prompts[ahead]), np.maximum.accumulate(responses[ahead]), form)
        end = start + int(np.searchsorted(rows * wide, max_tokens, "right"))
        parts.append(order[start:end])
        start = end
    return parts


def _tokens(prompts: Ints, responses: Ints, form: RolloutForm) -> Ints:
    """Tokens of a row with a prompt and a response so wide, padding included: `widths`, for many."""
    if form.fixed:
        return np.full(len(prompts), sum(widths(prompts, responses, form)))
    multiple = form.pad_to_multiple_of
    rounded: Ints = -(-prompts // multiple) * multiple - (-np.maximum(responses, 1) // multiple) * multiple
    return rounded


def _check_longest(
    prompts: Ints,
    responses: Ints,
    rows: Ints,
    max_tokens: int,
    form: RolloutForm,
    names: Sequence[Any] | npt.NDArray[Any] | None,
) -> None:
    sizes = _tokens(prompts[rows], responses[rows], form)
    if form.padding == "free":
        sizes = -(-(prompts + responses)[rows] // form.pad_to_multiple_of) * form.pad_to_multiple_of
    longest = int(np.argmax(sizes))
    if sizes[longest] > max_tokens:
        row = rows[longest]
        name = f"row {row}" if names is None else f"rollout {names[row]!r}"
        raise ConfigError(
            f"{name} has a prompt of {prompts[row]} tokens and a response of {responses[row]}: "
            f"{sizes[longest]} with padding, more than max_tokens={max_tokens}; raise max_tokens, or truncate or leave "
            f"out such rollouts"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _enough(items: int, world: int, what: str) -> None:
    if items < world:
        raise ConfigError(
            f"{items} {what} cannot be dealt to {world} ranks: one would have nothing to do, and the others would wait "
            f"for it; use larger batches, or fewer ranks"
        )


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
        ranks = self.rank.world if options.gradients == "averaged" else 1
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
        world = self.rank.world
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
