"""Which rollouts a rank gets, and in which micro-batches: arithmetic on lengths, the same on every rank that asks.

A rank that runs out of work while the others go on hangs all of them. So nobody gets nothing, and everybody gets
equally many micro-batches, be it some with nothing in them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.distributed.balancing import attention_cost, karmarkar_karp, micro_batches
from penstock.errors import ConfigError
from penstock.rl.layout import RolloutForm, widths

__all__ = ["deal_rows", "micro_batches_of"]

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
