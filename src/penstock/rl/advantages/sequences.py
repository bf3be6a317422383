"""One advantage for each response, from its reward and those of its group."""

from __future__ import annotations

import operator
from typing import Any, Literal

import numpy as np

from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.groups import Groups, deviations, lone_rows
from penstock.rl.advantages.inputs import finite, per_row, rows_of, token_mask
from penstock.rl.advantages.presets import Lone, Nan, Preset, choice, find_preset
from penstock.rl.advantages.whiten import Reduce, moments, reduced
from penstock.rl.arrays import Array, Arrays, arrays_of

__all__ = ["dr_grpo", "dynamic_sampling", "gpg", "grpo", "opo", "pass_at_k", "rloo", "zero_variance_groups"]


def grpo(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float | None = None,
    ddof: int | None = None,
    lone: Lone | None = None,
    nan: Nan | None = None,
    reduce: Reduce | None = None,
) -> Array:
    """GRPO: (R - mean of its group) / (standard deviation + epsilon), one number a row.

    `groups` is an id for each row (numbers or strings; sizes may differ, rows may stand in any order), or the size of
    groups of consecutive rows. With a `mask` (rows, tokens) every token of a row gets the row's number, and 0 where the
    mask is. `scale="batch"` divides by the standard deviation of all rewards, over ranks if `reduce` sums over them
    (see `whiten`); `"none"` is Dr. GRPO. Groups must be whole: all rows of one on the same rank.
    """
    rules = find_preset(preset)
    choice("scale", scale)
    arrays, given, rows, valid = _rewards(rewards, mask, nan, rules)
    groups_ = _groups(arrays, groups, rules, len(given))
    apart = deviations(rows, groups_, valid)
    ddof = rules.ddof if ddof is None else ddof
    epsilon = rules.epsilon if epsilon is None else epsilon
    advantages, alone = apart.values, rows
    if scale == "group":
        advantages = groups_.combine(operator.truediv, apart.values, apart.std(ddof) + epsilon)
        alone = rows / (1.0 + epsilon)
    elif scale == "batch":
        ones = arrays.xp.ones_like(rows) if valid is None else arrays.like(valid, rows)
        count, _, variance = moments(arrays, rows, ones, reduce)
        std = (variance * count / max(count - ddof, 1)) ** 0.5
        advantages, alone = apart.values / (std + epsilon), rows / (std + epsilon)
    rule = choice("lone", lone, rules.lone_scaled if scale == "group" else rules.lone)
    own = rules.name if lone is None else None
    return _finished(arrays, lone_rows(advantages, alone, apart, rule, valid=valid, of_preset=own), given, mask)


def dr_grpo(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    lone: Lone | None = None,
    nan: Nan | None = None,
) -> Array:
    """Dr. GRPO: R - mean of its group. Its other half is the loss: `loss_denominators(mask, "dr-grpo")`."""
    return grpo(rewards, groups, mask=mask, preset=preset, scale="none", lone=lone, nan=nan)


def rloo(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    lone: Lone | None = None,
    nan: Nan | None = None,
) -> Array:
    """RLOO: R - mean of the others in its group, that is n / (n - 1) times (R - mean).

    TRL subtracts beta times the KL of the response (k1, summed over tokens) from the reward first: do so in `rewards`.
    """
    rules = find_preset(preset)
    arrays, given, rows, valid = _rewards(rewards, mask, nan, rules)
    apart = deviations(rows, _groups(arrays, groups, rules, len(given), unequal="group"), valid)
    factor = apart.counts / arrays.xp.clip(apart.counts - 1, 1, None)
    advantages = apart.groups.combine(operator.mul, apart.values, factor)
    rule = choice("lone", lone, rules.lone_scaled)
    own = rules.name if lone is None else None
    return _finished(arrays, lone_rows(advantages, rows, apart, rule, valid=valid, of_preset=own), given, mask)


def opo(
    rewards: Any,
    groups: Any,
    *,
    lengths: Any = None,
    mask: Any = None,
    preset: str | Preset = "penstock",
    lone: Lone | None = None,
    nan: Nan | None = None,
) -> Array:
    """OPO: R - the mean of its group weighted by length. Lengths are given, or counted in `mask`."""
    rules = find_preset(preset)
    arrays, given, rows, valid = _rewards(rewards, mask, nan, rules)
    if (lengths is None) == (mask is None):
        raise ConfigError("opo needs the lengths of the responses: pass either lengths= or mask=")
    if lengths is None:
        checked = token_mask(arrays, mask, (len(given), *tuple(np.shape(mask))[1:]), "zero")
        lengths = arrays.xp.sum(checked, axis=1)
    weights = arrays.wide(per_row(arrays, lengths, "lengths", rows=len(given)))
    if not bool(arrays.xp.all(weights > 0)):
        row = int(np.argmax(arrays.host(weights) <= 0))
        raise DataError(f"the response of row {row} has no tokens; leave it out", row=row)
    apart = deviations(rows, _groups(arrays, groups, rules, len(given), unequal="group"), valid, weights=weights)
    rule = choice("lone", lone, rules.lone)
    own = rules.name if lone is None else None
    return _finished(arrays, lone_rows(apart.values, rows, apart, rule, valid=valid, of_preset=own), given, mask)


def gpg(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    norm: float = 1.0,
    lone: Lone | None = None,
    nan: Nan | None = None,
    reduce: Reduce | None = None,
) -> Array:
    """GPG: (R - mean of its group) * rows / rows whose reward is not 0, over ranks if `reduce` sums over them."""
    rules = find_preset(preset)
    arrays, given, rows, valid = _rewards(rewards, mask, nan, rules)
    xp = arrays.xp
    apart = deviations(rows, _groups(arrays, groups, rules, len(given), unequal="group"), valid)
    own = rules.name if lone is None else None
    rule = choice("lone", lone, rules.lone)
    advantages = lone_rows(apart.values, rows, apart, rule, valid=valid, of_preset=own)
    ones = xp.ones_like(rows) if valid is None else arrays.like(valid, rows)
    nonzero = xp.where(ones > 0, rows, 0.0) != 0
    total, scoring = reduced(arrays, xp.stack([xp.sum(ones), xp.sum(arrays.like(nonzero, rows))]), reduce)
    return _finished(arrays, advantages * (total / max(scoring, 1.0) / norm), given, mask)


def pass_at_k(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    scale: Literal["group", "none"] = "group",
    epsilon: float | None = None,
    lone: Lone = "raise",
    nan: Nan | None = None,
) -> Array:
    """Pass@k: the best of a group gets how far it is above the second, over (standard deviation + epsilon); all others
    get 0. A group needs two."""
    rules = find_preset(preset)
    choice("scale", scale)
    arrays, given, rows, valid = _rewards(rewards, mask, nan, rules)
    groups_ = _groups(arrays, groups, rules, len(given), unequal="group")
    apart = deviations(rows, groups_, valid)
    best, second = _best_two(arrays.host(rows), groups_)
    lead = rows[arrays.put(best)] - rows[arrays.put(second)]
    if valid is not None:
        lead = arrays.xp.where(valid[arrays.put(second)], lead, 0.0)
    if scale == "group":
        epsilon = rules.epsilon if epsilon is None else epsilon
        lead = lead / (apart.std(rules.ddof) + epsilon)
    advantages = arrays.segment_sum(lead, arrays.put(best), len(given))
    return _finished(arrays, lone_rows(advantages, rows, apart, choice("lone", lone), valid=valid), given, mask)


def zero_variance_groups(
    rewards: Any,
    groups: Any,
    *,
    preset: str | Preset = "penstock",
    above: float | None = None,
    nan: Nan | None = None,
) -> Array:
    """Which rows are in a group whose rewards are all alike: true for rows that teach nothing.

    Alike is a standard deviation not above `above`: 0, or 1e-6 with slime.
    """
    rules = find_preset(preset)
    arrays, given, rows, valid = _rewards(rewards, None, nan, rules)
    apart = deviations(rows, _groups(arrays, groups, rules, len(given), unequal="group"), valid)
    alike = apart.std(rules.ddof) <= (rules.varied_above if above is None else above)
    return arrays.give(apart.groups.spread(alike & (apart.counts != 1) if rules.keep_lone else alike))


def dynamic_sampling(
    rewards: Any,
    groups: Any,
    *,
    preset: str | Preset = "penstock",
    above: float | None = None,
    nan: Nan | None = None,
) -> Array:
    """DAPO's dynamic sampling: which rows to keep, those whose group has rewards that differ."""
    return ~zero_variance_groups(rewards, groups, preset=preset, above=above, nan=nan)


def on_tokens(arrays: Arrays, advantages: Array, mask: Any) -> Array:
    """The number of each row on all its tokens, 0 where the mask is."""
    checked = arrays.bools(mask)
    rows_of(checked)
    if checked.shape[0] != advantages.shape[0]:
        raise DataError(f"mask has {checked.shape[0]} rows for {advantages.shape[0]} rewards; give one for each row")
    return arrays.xp.where(checked, advantages[:, None], 0.0)


def _finished(arrays: Arrays, advantages: Array, given: Array, mask: Any) -> Array:
    advantages = arrays.like(advantages, given)
    return arrays.give(advantages if mask is None else on_tokens(arrays, advantages, mask))


def _rewards(rewards: Any, mask: Any, nan: Nan | None, rules: Preset) -> tuple[Arrays, Array, Array, Array | None]:
    """The framework, the rewards as given, in wide floats, and which of them are numbers (None: all)."""
    arrays = arrays_of(rewards, mask)
    given = per_row(arrays, rewards, "rewards")
    valid = finite(arrays, given, "the reward", choice("nan", nan, rules.nan))
    return arrays, given, arrays.wide(given), valid


def _groups(arrays: Arrays, groups: Any, rules: Preset, rows: int, *, unequal: str | None = None) -> Groups:
    found = Groups.of(arrays, groups, rows)
    if (unequal or rules.unequal) == "batch" and not found.equal:
        return Groups.whole(arrays, rows)
    return found


def _best_two(rewards: Any, groups: Groups) -> tuple[Any, Any]:
    """The rows of the best and the second of each group; NaN comes last, and a group of one is its own second."""
    order = np.lexsort((-np.where(np.isnan(rewards), -np.inf, rewards), groups.index))
    sizes = np.bincount(groups.index, minlength=groups.count)
    starts = np.cumsum(sizes) - sizes
    return order[starts], order[starts + (sizes > 1)]
