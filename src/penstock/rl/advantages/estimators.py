"""One advantage for each response, from its reward and those of its group."""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.inputs import finite, per_row, per_token, rows_of, token_mask, unit
from penstock.rl.advantages.presets import Empty, Gap, Lone, Nan, Preset, choice, find_preset
from penstock.rl.advantages.statistics import Groups, Reduce, deviations, lone_rows, moments, reduced, whiten
from penstock.rl.arrays import Array, Arrays, arrays_of

__all__ = [
    "BLOCK",
    "advance",
    "dr_grpo",
    "dynamic_sampling",
    "gae",
    "gae_ragged",
    "gpg",
    "grpo",
    "opo",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reward_to_go",
    "rloo",
    "suffix_sums",
    "through_gaps",
    "token_rewards",
    "zero_variance_groups",
]


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


BLOCK = 32
"""Steps of a block: longer ones cost more in their own products, shorter ones in those between blocks."""


def advance(
    arrays: Arrays, rewards: Array, values: Array | None, mask: Array, gamma: float, decay: float, gap: Gap
) -> tuple[Array, ...]:
    """`A_t = r_t + gamma V_{t+1} - V_t + decay A_{t+1}` of a few rows, and `A + V` if there are values; 0 where the
    mask is. A FloatingPointError says that a number is not finite."""
    xp = arrays.xp
    rows, steps = mask.shape
    lengths = xp.sum(mask, axis=1)
    columns = arrays.put(np.arange(-(-steps // BLOCK) * BLOCK, dtype=np.int32))
    front = columns[None, :] < lengths[:, None]
    has_gaps = bool(xp.any(front[:, :steps] != mask))
    squeezed = has_gaps and gap == "skip"
    counted = through_gaps(arrays, mask) if has_gaps and gap == "through" else mask
    whole = bool(xp.all(counted))
    padding = np.zeros((rows, columns.shape[0] - steps), np.float32)

    def laid_out(array: Array) -> Array:
        if squeezed:  # the tokens that count side by side, so that nothing is left to be skipped
            return arrays.place(arrays.wide(arrays.select(array, mask)), front)
        kept = arrays.wide(array if whole else xp.where(counted, array, 0.0))
        return xp.concatenate([kept, arrays.like(arrays.put(padding), kept)], axis=1) if padding.size else kept

    def back(array: Array) -> Array:
        if squeezed:
            return arrays.place(arrays.select(array, front), mask)
        return xp.where(mask, array[:, :steps], 0.0) if has_gaps else array[:, :steps]

    terms = laid_out(rewards)
    value = None if values is None else laid_out(values)
    if value is None:
        terms = terms + 0.0  # a copy: the sums may be written over it, and it may be what the caller gave
    else:
        terms = arrays.add_at(terms - value, (slice(None), slice(None, -1)), value[:, 1:] * gamma)
    sums = suffix_sums(arrays, terms, decay)
    if not bool(xp.isfinite(xp.sum(sums[:, 0]))):  # the first sum of a row has everything in it
        raise FloatingPointError
    return (back(sums),) if value is None else (back(sums), back(sums + value))


def suffix_sums(arrays: Arrays, steps: Array, decay: float) -> Array:
    """`S_t = x_t + decay S_{t+1}` for rows whose length is a multiple of `BLOCK`; may write into `steps`."""
    rows, length = steps.shape
    count = length // BLOCK
    inner = arrays.like(arrays.put(_powers(decay, BLOCK)), steps)
    blocks = steps.reshape(rows, count, BLOCK)
    if count > 1:
        between = arrays.like(arrays.put(_powers(decay**BLOCK, count)), steps)
        sums = arrays.product(arrays.product(blocks, inner[:, 0]), between)
        blocks = arrays.add_at(blocks, (slice(None), slice(None, -1), -1), sums[:, 1:] * decay)
    return arrays.product(blocks, inner).reshape(rows, length)


def through_gaps(arrays: Arrays, mask: Array) -> Array:
    """The mask with its gaps filled: all tokens up to the last that counts."""
    ones = mask * 1
    return arrays.xp.sum(ones, axis=1)[:, None] - arrays.xp.cumsum(ones, axis=1) + ones > 0


@lru_cache(maxsize=64)
def _powers(base: float, size: int) -> npt.NDArray[np.float64]:
    """`base ** (k - j)` where k >= j: a row times this is its discounted sums from each element on."""
    exponents = np.subtract.outer(np.arange(size), np.arange(size))
    return np.where(exponents >= 0, np.float64(base) ** np.maximum(exponents, 0), 0.0)


def gae(
    rewards: Any,
    values: Any,
    *,
    mask: Any = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    preset: str | Preset = "penstock",
    gap: Gap | None = None,
    empty: Empty | None = None,
) -> tuple[Array, Array]:
    """Generalised advantages of token rewards and values (rows, tokens), and the returns: advantages + values.

    `d_t = r_t + gamma V_{t+1} - V_t`, `A_t = d_t + gamma lam A_{t+1}`, nothing after the last token; not whitened.
    Tokens with mask 0 get 0, and what stands there never counts, but for `gap="through"`. Between tokens that count
    (tool output) they are a gap, and the stacks differ:

    - "skip" (verl): the token before a gap is followed by the token after it;
    - "plain" (OpenRLHF, TRL): a gap is so many steps with reward and value 0;
    - "through" (slime): a gap is so many steps with the rewards and values that stand there.
    """
    rules = find_preset(preset)
    gap = choice("gap", gap, rules.gap)
    arrays = arrays_of(rewards, values, mask)
    reward = per_token(arrays, rewards, "rewards")
    value = per_token(arrays, values, "values", shape=tuple(reward.shape))
    counted = token_mask(arrays, mask, tuple(reward.shape), choice("empty", empty, rules.empty))
    advantages, returns = _discounted(arrays, [reward, value, counted], unit("gamma", gamma), unit("lam", lam), gap)
    return arrays.give(advantages), arrays.give(returns)


def reward_to_go(
    rewards: Any,
    *,
    mask: Any = None,
    gamma: float = 1.0,
    preset: str | Preset = "penstock",
    gap: Gap | None = None,
    empty: Empty | None = None,
) -> Array:
    """`G_t = r_t + gamma G_{t+1}` of token rewards (rows, tokens); masks and gaps as in `gae`."""
    rules = find_preset(preset)
    gap = choice("gap", gap, rules.gap)
    arrays = arrays_of(rewards, mask)
    reward = per_token(arrays, rewards, "rewards")
    counted = token_mask(arrays, mask, tuple(reward.shape), choice("empty", empty, rules.empty))
    (returns,) = _discounted(arrays, [reward, counted], unit("gamma", gamma), 1.0, gap)
    return arrays.give(returns)


def gae_ragged(
    rewards: Any,
    values: Any,
    offsets: Any,
    *,
    mask: Any = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    preset: str | Preset = "penstock",
    gap: Gap | None = None,
    empty: Empty | None = None,
) -> tuple[Array, Array]:
    """`gae` without padding: the tokens of all rows one after another, row i from `offsets[i]` to `offsets[i + 1]`."""
    rules = find_preset(preset)
    gap, empty = choice("gap", gap, rules.gap), choice("empty", empty, rules.empty)
    gamma, lam = unit("gamma", gamma), unit("lam", lam)
    arrays = arrays_of(rewards, values, mask)
    given = [per_row(arrays, rewards, "rewards"), per_row(arrays, values, "values")]
    bounds = _bounds(offsets, len(given[0]))
    if len(given[1]) != len(given[0]):
        raise DataError(f"values has {len(given[1])} tokens, and rewards {len(given[0])}; one of each a token")
    counted = arrays.bools(np.ones(len(given[0]), bool) if mask is None else mask)
    if tuple(counted.shape) != tuple(given[0].shape):
        raise DataError(f"mask has shape {tuple(counted.shape)}, and rewards have {len(given[0])} tokens; one a token")
    step = max(1, arrays.at_once // max(1, int(np.diff(bounds).max(initial=1))))
    parts: list[tuple[Array, ...]] = []
    for start in range(0, len(bounds) - 1, step):
        some = bounds[start : start + step + 1]
        lengths = np.diff(some)
        front = arrays.put(np.arange(max(1, lengths.max(initial=1))) < lengths[:, None])
        tokens = slice(int(some[0]), int(some[-1]))
        padded = [arrays.place(array[tokens], front) for array in (*given, counted)]
        try:
            token_mask(arrays, padded[-1], tuple(front.shape), empty)
            found = _discounted(arrays, padded, gamma, lam, gap)
        except DataError as error:
            if error.row is None:
                raise
            raise DataError(
                error.reason.replace(f"row {error.row}", f"row {error.row + start}", 1), row=error.row + start
            ) from None
        parts.append(tuple(arrays.select(array, front) for array in found))
    advantages, returns = (arrays.xp.concatenate(list(part)) for part in zip(*parts))
    return arrays.give(advantages), arrays.give(returns)


def token_rewards(
    rewards: Any,
    mask: Any,
    *,
    kl: Any = None,
    beta: float = 0.0,
    preset: str | Preset = "penstock",
    empty: Empty | None = None,
) -> Array:
    """Rewards on tokens: `-beta kl_t` on all with mask 1, and the reward of the response on the last of them.

    TRL's PPO puts it one further, on the token after the last, when there is one.
    """
    rules = find_preset(preset)
    arrays = arrays_of(rewards, mask, kl)
    xp = arrays.xp
    given = per_row(arrays, rewards, "rewards")
    finite(arrays, given, "the reward", "raise")
    counted = token_mask(arrays, mask, _tokens(mask, len(given)), choice("empty", empty, rules.empty))
    seen = xp.cumsum(counted * 1, axis=1)
    last = counted & (seen == seen[:, -1:])
    placed = xp.where(last, given[:, None], 0.0)
    if kl is None:
        return arrays.give(placed)
    penalty = per_token(arrays, kl, "kl", shape=tuple(counted.shape)) * beta
    return arrays.give(arrays.like(placed - xp.where(counted, penalty, 0.0), given))


def remax(
    rewards: Any, baselines: Any, *, mask: Any = None, gamma: float = 1.0, preset: str | Preset = "penstock"
) -> Array:
    """ReMax: the reward to go less the reward of the greedy answer, `baselines`, one a row.

    `rewards` is one a row, for one advantage a row or, with a mask, a token; or (rows, tokens), with a mask.
    """
    rules = find_preset(preset)
    arrays = arrays_of(rewards, baselines, mask)
    if len(np.shape(rewards)) != 2:
        given = per_row(arrays, rewards, "rewards")
        baseline = per_row(arrays, baselines, "baselines", rows=len(given))
        if mask is None:
            finite(arrays, given - baseline, "the reward less the baseline", "raise")
            return arrays.give(given - baseline)
        rewards = token_rewards(given, mask, preset=rules)
    returns = arrays.floats(reward_to_go(rewards, mask=mask, gamma=gamma, preset=rules))
    baseline = per_row(arrays, baselines, "baselines", rows=returns.shape[0])
    finite(arrays, baseline, "the baseline", "raise")
    counted = token_mask(arrays, mask, tuple(returns.shape), "zero")
    return arrays.give(arrays.like(arrays.xp.where(counted, returns - baseline[:, None], 0.0), returns))


def reinforce_plus_plus(
    rewards: Any,
    mask: Any,
    *,
    kl: Any = None,
    beta: float = 0.0,
    gamma: float = 1.0,
    preset: str | Preset = "penstock",
    gap: Gap | None = None,
    reduce: Reduce | None = None,
) -> Array:
    """REINFORCE++: the reward to go of token rewards, whitened over the batch, of all ranks if `reduce` is given.

    `rewards` is one a row, put on tokens by `token_rewards`, or (rows, tokens).
    """
    rules = find_preset(preset)
    if len(np.shape(rewards)) != 2:
        rewards = token_rewards(rewards, mask, kl=kl, beta=beta, preset=rules)
    elif kl is not None:
        raise DataError("rewards are given for each token and kl too; subtract beta * kl from them, or give one a row")
    returns = reward_to_go(rewards, mask=mask, gamma=gamma, preset=rules, gap=gap)
    return whiten(returns, mask, preset=rules, reduce=reduce)


def reinforce_plus_plus_baseline(
    rewards: Any,
    groups: Any,
    *,
    mask: Any,
    kl: Any = None,
    beta: float = 0.0,
    preset: str | Preset = "penstock",
    lone: Lone | None = None,
    nan: Nan | None = None,
    reduce: Reduce | None = None,
) -> Array:
    """REINFORCE++-baseline: R - mean of its group on all its tokens, whitened over the batch (of all ranks).

    A KL penalty enters as the preset has it: summed into the reward before the mean is taken (verl), as token rewards
    summed from each token on (OpenRLHF, penstock), or on each token alone (slime).
    """
    rules = find_preset(preset)
    arrays = arrays_of(rewards, mask, kl)
    xp = arrays.xp
    given = per_row(arrays, rewards, "rewards")
    counted = token_mask(arrays, mask, _tokens(mask, len(given)), rules.empty)
    penalty = None
    if kl is not None:
        penalty = per_token(arrays, kl, "kl", shape=tuple(counted.shape)) * beta
        penalty = xp.where(counted, penalty, 0.0)
        if rules.baseline_kl == "sequence":
            given = given - xp.sum(penalty, axis=1)
        elif rules.baseline_kl == "to-go":
            penalty = reward_to_go(penalty, mask=counted, preset=rules, empty="zero")
    advantages = on_tokens(arrays, dr_grpo(given, groups, preset=rules, lone=lone, nan=nan), counted)
    if penalty is not None and rules.baseline_kl != "sequence":
        advantages = advantages - penalty
    return whiten(arrays.give(advantages), arrays.give(counted), preset=rules, reduce=reduce)


def _discounted(arrays: Arrays, inputs: list[Array], gamma: float, lam: float, gap: Gap) -> tuple[Array, ...]:
    """Rewards, perhaps values, and the mask, a block of rows after the other."""

    def block(reward: Array, *rest: Array) -> tuple[Array, ...]:
        value = rest[0] if len(rest) == 2 else None
        return advance(arrays, reward, value, rest[-1], gamma, gamma * lam, gap)

    try:
        return arrays.by_rows(block, inputs, inputs[0].shape[1])
    except FloatingPointError:
        raise _not_finite(arrays, inputs, gap) from None


def _not_finite(arrays: Arrays, inputs: list[Array], gap: Gap) -> DataError:
    counted = arrays.host(inputs[-1]) | (gap == "through")
    for name, array in zip(("reward", "value"), inputs[:-1]):
        host = arrays.host(array)
        bad = np.argwhere(counted & ~np.isfinite(host))
        if len(bad):
            row, token = map(int, bad[0])
            return DataError(f"the {name} of row {row}, token {token} is {host[row, token]}; give it a number", row=row)
    return DataError("rewards and values are too large to be summed")


def _tokens(mask: Any, rows: int) -> tuple[int, int]:
    shape = tuple(np.shape(mask))
    if len(shape) != 2:
        raise DataError(f"mask must be (rows, tokens), got shape {shape}")
    return rows, shape[1]


def _bounds(offsets: Any, tokens: int) -> Any:
    bounds = arrays_of(offsets).host(offsets)
    if bounds.ndim != 1 or len(bounds) < 2 or bounds.dtype.kind not in "iu":
        raise DataError(
            f"offsets must be whole numbers, one more than rows, got shape {bounds.shape} of {bounds.dtype}"
        )
    bounds = bounds.astype(np.int64)
    if bounds[0] != 0 or bounds[-1] != tokens:
        raise DataError(f"offsets must go from 0 to the {tokens} tokens, got {bounds[0]} to {bounds[-1]}")
    falling = np.flatnonzero(np.diff(bounds) < 0)
    if len(falling):
        row = int(falling[0])
        raise DataError(f"row {row} would end at {bounds[row + 1]}, before it begins at {bounds[row]}", row=row)
    return bounds
