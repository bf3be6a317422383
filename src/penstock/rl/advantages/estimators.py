"""Advantage estimators. To add one, write the function here with `@estimator(...)` above it, and export it.

The decorator says what the estimator takes and returns, so `AdvantageSpec` and `RolloutDataLoader` need no change.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from penstock.batching.backends.base import Array
from penstock.batching.backends.operations import ArrayOperations, operations_of
from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.inputs import (
    blank_rows,
    finite,
    on_tokens,
    per_row,
    per_token,
    row_bounds,
    token_mask,
    token_shape,
    unit,
)
from penstock.rl.advantages.presets import Empty, Gap, Nan, Preset, SingleMemberGroup, choice, find_preset
from penstock.rl.advantages.statistics import (
    Deviations,
    Groups,
    PaddedRows,
    Reduce,
    at_least,
    deviations,
    discounted,
    moments,
    reduced,
    single_member_rows,
    whiten,
    whitened,
)

EstimatorFunction: TypeAlias = Callable[..., Any]
F = TypeVar("F", bound=EstimatorFunction)
Need: TypeAlias = Literal["groups", "lengths", "mask", "kl", "values", "baselines", "gamma", "lam"]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """Tokens of all responses end to end, for the ragged form of an estimator: row i from `offsets[i]` on."""

    rewards: Any
    offsets: Any
    mask: Any
    owners: Any
    """Row of each token."""
    gamma: float
    lam: float
    preset: str | Preset
    values: Any = None
    baselines: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorEntry:
    """Registered estimator: what it takes, what it returns, and what belongs to it in a loader."""

    name: str
    function: EstimatorFunction
    per: Literal["row", "token"]
    """Advantages that the function returns: one a row, or one a token."""
    rewards: Literal["row", "token"] = "row"
    """Rewards that the function takes."""
    needs: tuple[Need, ...] = ()
    """Further arguments: groups, values and baselines are the second positional one, the others are keywords."""
    ragged: Callable[..., tuple[Any, Any]] | None = None
    """`ragged(tokens, **options)` gives (advantages, returns) without padding; None: the function gets padded rows."""
    scaled: bool = False
    """Deviations are divided by that of the group, so `single_member_group_scaled` of the preset applies."""
    own_single_rule: bool = False
    """The function has its own rule for groups of one, instead of the preset's."""
    whole_batch: bool = False
    """The preset's rule for groups of unequal size applies."""
    whiten: bool = False
    """A loader whitens the advantages by default."""
    aggregation: str | None = None
    """Loss aggregation that belongs to the estimator; None: the preset's."""


ESTIMATORS: dict[str, EstimatorEntry] = {}
"""Registered estimators by name."""


def estimator(**traits: Any) -> Callable[[F], F]:
    """Register the decorated function under its name; `traits` are the fields of `EstimatorEntry`.

    Loaders call it as `function(rewards, groups, preset=..., **given)`, without `groups` if it is not among `needs`.
    `given` has the other `needs` by name, `nan="exclude"` if a reward is missing, and the options of the user. A
    function that uses none of them takes `**options`.
    """

    def register(function: F) -> F:
        ESTIMATORS[function.__name__] = EstimatorEntry(name=function.__name__, function=function, **traits)
        return function

    return register


# -- one advantage a response ------------------------------------------------------------------------------------------


@estimator(per="row", needs=("groups",), scaled=True, whole_batch=True)
def grpo(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    scale: Literal["group", "batch", "none"] = "group",
    epsilon: float | None = None,
    ddof: int | None = None,
    single_member_group: SingleMemberGroup | None = None,
    nan: Nan | None = None,
    reduce: Reduce | None = None,
    check: bool = False,
) -> Array:
    """GRPO: (R - mean of its group) / (standard deviation + epsilon), one number a row.

    `groups` is an id for each row (numbers or strings, any sizes, any order), or the size of groups of consecutive
    rows. With a `mask` (rows, tokens) every token of a row gets the row's number, and 0 where the mask is 0.
    `scale="batch"` divides by the standard deviation of all rewards, over ranks if `reduce` is given (see `whiten`);
    `"none"` is Dr. GRPO. All rows of a group must be on the same rank.
    """
    choice("scale", scale)
    batch = _RowRewards(rewards, mask, find_preset(preset), single_member_group, nan, check)
    arrays, rows, rules = batch.arrays, batch.wide, batch.rules
    ddof = rules.ddof if ddof is None else ddof
    apart = batch.deviations(groups, unequal=rules.unequal, ddof=ddof)
    epsilon = rules.epsilon if epsilon is None else epsilon
    advantages, divisor = apart.values, 1.0
    if scale == "group":
        advantages = apart.groups.combine(operator.truediv, apart.values, apart.std() + epsilon, like=batch.given)
        divisor += epsilon
    elif scale == "batch":
        counted = batch.counted()
        count, _, _, squares = moments(arrays, arrays.kept(counted, rows), counted, reduce)
        divisor = (squares / at_least(arrays, count - ddof, 1.0)) ** 0.5 + epsilon
        advantages = apart.values / divisor
    scaled = scale == "group"
    return batch.finish(batch.single_members(advantages, apart, divisor, scaled=scaled, marked=scaled or None))


@estimator(per="row", needs=("groups",), whole_batch=True, aggregation="dr-grpo")
def dr_grpo(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    single_member_group: SingleMemberGroup | None = None,
    nan: Nan | None = None,
    check: bool = False,
) -> Array:
    """Dr. GRPO: R - mean of its group. Its other half is the loss: `loss_denominators(mask, "dr-grpo")`."""
    return grpo(
        rewards,
        groups,
        mask=mask,
        preset=preset,
        scale="none",
        single_member_group=single_member_group,
        nan=nan,
        check=check,
    )


@estimator(per="row", needs=("groups",), scaled=True)
def rloo(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    single_member_group: SingleMemberGroup | None = None,
    nan: Nan | None = None,
    check: bool = False,
) -> Array:
    """RLOO: R - mean of the others in its group, that is n / (n - 1) times (R - mean).

    TRL first subtracts beta times the KL of the response (k1, summed over tokens) from the reward: do so in `rewards`.
    """
    batch = _RowRewards(rewards, mask, find_preset(preset), single_member_group, nan, check)
    apart = batch.deviations(groups)
    factor = apart.counts / at_least(batch.arrays, apart.counts - 1, 1.0)
    advantages = apart.groups.combine(operator.mul, apart.values, factor, like=batch.given)
    return batch.finish(batch.single_members(advantages, apart, scaled=True))


@estimator(per="row", needs=("groups", "lengths"))
def opo(
    rewards: Any,
    groups: Any,
    *,
    lengths: Any = None,
    mask: Any = None,
    preset: str | Preset = "penstock",
    single_member_group: SingleMemberGroup | None = None,
    nan: Nan | None = None,
    check: bool = False,
) -> Array:
    """OPO: R - mean of its group weighted by length. Lengths are given, or counted in `mask`."""
    batch = _RowRewards(rewards, mask, find_preset(preset), single_member_group, nan, check)
    arrays, count = batch.arrays, len(batch.given)
    if (lengths is None) == (mask is None):
        raise ConfigError("opo needs the lengths of the responses: pass either lengths= or mask=")
    if lengths is None:
        checked = token_mask(arrays, mask, (count, *tuple(np.shape(mask))[1:]), "zero")
        lengths = arrays.xp.sum(checked, axis=1)
    weights = arrays.wide(per_row(arrays, lengths, "lengths", rows=count))
    if not arrays.check:
        weights = arrays.xp.where(weights > 0, weights, float("nan"))
    elif not bool(arrays.xp.all(weights > 0)):
        row = int(np.argmax(arrays.host(weights) <= 0))
        raise DataError(f"the response of row {row} has no tokens; leave it out", row=row)
    apart = batch.deviations(groups, weights=weights)
    return batch.finish(batch.single_members(apart.values, apart))


@estimator(per="row", needs=("groups",))
def gpg(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    norm: float = 1.0,
    single_member_group: SingleMemberGroup | None = None,
    nan: Nan | None = None,
    reduce: Reduce | None = None,
    check: bool = False,
) -> Array:
    """GPG: (R - mean of its group) * rows / rows with a reward other than 0, over ranks if `reduce` is given."""
    batch = _RowRewards(rewards, mask, find_preset(preset), single_member_group, nan, check)
    arrays, rows = batch.arrays, batch.wide
    apart = batch.deviations(groups)
    advantages = batch.single_members(apart.values, apart)
    counted = batch.counted()
    counts = [arrays.xp.sum(arrays.like(array, rows)) for array in (counted, counted & (rows != 0))]
    total, scoring = reduced(arrays, counts, reduce)
    return batch.finish(advantages * (total / at_least(arrays, scoring, 1.0) / norm))


@estimator(per="row", needs=("groups",), own_single_rule=True)
def pass_at_k(
    rewards: Any,
    groups: Any,
    *,
    mask: Any = None,
    preset: str | Preset = "penstock",
    scale: Literal["group", "none"] = "group",
    epsilon: float | None = None,
    single_member_group: SingleMemberGroup = "raise",
    nan: Nan | None = None,
    check: bool = False,
) -> Array:
    """Pass@k: the best of a group gets its lead over the second, over (standard deviation + epsilon); the others get 0.

    A group needs two members.
    """
    choice("scale", scale)
    batch = _RowRewards(rewards, mask, find_preset(preset), single_member_group, nan, check)
    rules, apart = batch.rules, batch.deviations(groups)
    advantages = _leads(batch, apart.groups)
    if scale == "group":
        least = rules.epsilon if epsilon is None else epsilon
        advantages = apart.groups.combine(operator.truediv, advantages, apart.std() + least)
    return batch.finish(batch.single_members(advantages, apart, marked=False))


def zero_variance_groups(
    rewards: Any,
    groups: Any,
    *,
    preset: str | Preset = "penstock",
    above: float | None = None,
    nan: Nan | None = None,
    check: bool = False,
) -> Array:
    """True for rows of groups whose rewards are all equal: nothing can be learned from them.

    Equal means a standard deviation of at most `above`: 0, or 1e-6 with slime. Groups whose standard deviation is not
    finite count as equal: on a device these are groups with a reward that is NaN or infinite.
    """
    batch = _RowRewards(rewards, None, find_preset(preset), None, nan, check)
    rules, apart = batch.rules, batch.deviations(groups)
    std = apart.std()
    equal = std <= (rules.varied_above if above is None else above)
    if rules.keep_single_member_groups:
        equal = equal & (apart.counts != 1)
    return batch.arrays.give(apart.groups.spread(equal | ~batch.arrays.xp.isfinite(std)))


def dynamic_sampling(
    rewards: Any,
    groups: Any,
    *,
    preset: str | Preset = "penstock",
    above: float | None = None,
    nan: Nan | None = None,
    check: bool = False,
) -> Array:
    """DAPO's dynamic sampling: true for the rows to keep, those of groups with different rewards."""
    return ~zero_variance_groups(rewards, groups, preset=preset, above=above, nan=nan, check=check)


class _RowRewards:
    """Rewards of responses, one a row, on their way through an estimator."""

    def __init__(
        self,
        rewards: Any,
        mask: Any,
        rules: Preset,
        single_member_group: SingleMemberGroup | None,
        nan: Nan | None,
        check: bool,
    ) -> None:
        self.rules, self.mask, self._single = rules, mask, single_member_group
        self.arrays = operations_of(rewards, mask, check=check)
        self.given = per_row(self.arrays, rewards, "rewards")
        self.wide = self.arrays.wide(self.given)
        self.valid = finite(self.arrays, self.given, "the reward", choice("nan", nan, rules.nan))
        """Rows with a reward that counts; None: all."""

    def counted(self) -> Array:
        """True for rows that count."""
        return self.arrays.true((len(self.given),)) if self.valid is None else self.valid

    def deviations(
        self, groups: Any, *, unequal: str = "group", weights: Array | None = None, ddof: int | None = None
    ) -> Deviations:
        found = Groups.of(self.arrays, groups, len(self.given))
        if unequal == "batch":
            found = found.whole_if_unequal()
        ddof = self.rules.ddof if ddof is None else ddof
        return deviations(self.wide, found, self.valid, ddof=ddof, weights=weights)

    def single_members(
        self,
        advantages: Array,
        apart: Deviations,
        divisor: Array | float = 1.0,
        *,
        scaled: bool = False,
        marked: bool | None = None,
    ) -> Array:
        """Advantages with the rule for groups of one applied; "reward" gives such a row its reward over `divisor`. If
        values are not checked, all rows of a group with a reward that is not finite become NaN. `marked`: they are that
        already; None: if their deviations are."""
        rules, given = self.rules, self._single
        rule = choice("single_member_group", given, rules.single_member_rule(scaled))
        own = rules.name if given is None else None
        rewards = partial(operator.truediv, self.wide, divisor)
        found = single_member_rows(advantages, rewards, apart, rule, valid=self.valid, of_preset=own)
        marked = apart.row_std is not None if marked is None else marked
        if self.arrays.check or (marked and (found is advantages or rule in ("raise", "nan"))):
            return found
        return apart.groups.combine(operator.add, found, apart.nan_if_not_finite())

    def finish(self, advantages: Array) -> Array:
        advantages = self.arrays.like(advantages, self.given)
        return self.arrays.give(advantages if self.mask is None else on_tokens(self.arrays, advantages, self.mask))


def _leads(batch: _RowRewards, groups: Groups) -> Array:
    """Lead of the best row of each group over the second; 0 for all other rows, and where only one counts."""
    arrays, xp, rows, numbers = batch.arrays, batch.arrays.xp, batch.wide, groups.numbers()
    keys = rows if batch.valid is None else xp.where(batch.valid, rows, float("-inf"))
    best_first = arrays.stable_order(-keys)
    order = best_first[arrays.stable_order(numbers[best_first])]  # by group, the best first
    number, reward, end = numbers[order], rows[order], arrays.true((1,))
    changes = number[1:] != number[:-1]
    compared = xp.concatenate([end, changes]) & ~xp.concatenate([changes, end])
    if batch.valid is not None:
        compared = compared & xp.concatenate([batch.valid[order][1:], end])
    following = xp.concatenate([reward[1:], reward[-1:]])
    return arrays.scatter(xp.where(compared, reward - following, 0.0), order, len(batch.given))


# -- one advantage a token ---------------------------------------------------------------------------------------------


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
    check: bool = False,
) -> tuple[Array, Array]:
    """`gae` without padding: tokens of all rows end to end, row i from `offsets[i]` to `offsets[i + 1]`.

    Offsets decide shapes, so they are read: offsets on a device are waited for. Give those in main memory.
    """
    rules = find_preset(preset)
    gap, empty = choice("gap", gap, rules.gap), choice("empty", empty, rules.empty)
    gamma, lam = unit("gamma", gamma), unit("lam", lam)
    arrays = operations_of(rewards, values, mask, check=check)
    given = [per_row(arrays, rewards, "rewards"), per_row(arrays, values, "values")]
    tokens = len(given[0])
    bounds = row_bounds(offsets, tokens)
    if len(given[1]) != tokens:
        raise DataError(f"values has {len(given[1])} tokens and rewards {tokens}; give one of each per token")
    counted = arrays.true((tokens,)) if mask is None else arrays.bools(mask)
    if tuple(counted.shape) != (tokens,):
        raise DataError(f"mask has shape {tuple(counted.shape)} and rewards {tokens} tokens; give one per token")
    step = max(1, arrays.at_once // max(1, int(np.diff(bounds).max(initial=1))))
    parts: list[tuple[Array, ...]] = []
    for start in range(0, len(bounds) - 1, step):
        rows = PaddedRows(arrays, bounds[start : start + step + 1])
        padded = [rows.padded(array) for array in (*given, counted)]
        try:
            token_mask(arrays, padded[-1], rows.shape, empty)
            found = discounted(arrays, padded, gamma, lam, gap, empty)
        except DataError as error:
            if error.row is None:
                raise
            row = error.row + start
            raise DataError(error.reason.replace(f"row {error.row}", f"row {row}", 1), row=row) from None
        parts.append(tuple(rows.flat(array) for array in found))
    advantages, returns = (arrays.xp.concatenate(list(part)) for part in zip(*parts))
    return arrays.give(advantages), arrays.give(returns)


def _ragged_gae(tokens: TokenInputs, **options: Any) -> tuple[Any, Any]:
    return gae_ragged(
        tokens.rewards,
        tokens.values,
        tokens.offsets,
        mask=tokens.mask,
        gamma=tokens.gamma,
        lam=tokens.lam,
        preset=tokens.preset,
        **options,
    )


def _ragged_reward_to_go(tokens: TokenInputs, **options: Any) -> tuple[Any, Any]:
    """GAE of values that are all 0."""
    _, returns = _ragged_gae(replace(tokens, values=np.zeros(len(tokens.rewards)), lam=1.0), **options)
    return returns, returns


def _ragged_remax(tokens: TokenInputs, **options: Any) -> tuple[Any, Any]:
    returns, _ = _ragged_reward_to_go(tokens, **options)
    return np.where(tokens.mask, returns - tokens.baselines[tokens.owners], 0.0), returns


def _ragged_reinforce_plus_plus(tokens: TokenInputs, **options: Any) -> tuple[Any, Any]:
    returns, _ = _ragged_reward_to_go(tokens, **options)
    return whiten(returns, tokens.mask, preset=tokens.preset), returns


@estimator(per="token", rewards="token", needs=("values", "gamma", "lam"), ragged=_ragged_gae, whiten=True)
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
    check: bool = False,
) -> tuple[Array, Array]:
    """Generalised advantages of token rewards and values (rows, tokens), and the returns: advantages + values.

    `d_t = r_t + gamma V_{t+1} - V_t`, `A_t = d_t + gamma lam A_{t+1}`, 0 after the last token; not whitened.
    Tokens with mask 0 get 0, and their numbers count with `gap="through"` only. Masked tokens between others (tool
    output) are a gap:

    - "skip" (verl): the token before a gap is followed by the token after it;
    - "plain" (OpenRLHF, TRL): each token of a gap is a step with reward and value 0;
    - "through" (slime): each token of a gap is a step with its own reward and value.
    """
    rules = find_preset(preset)
    gap, empty = choice("gap", gap, rules.gap), choice("empty", empty, rules.empty)
    arrays = operations_of(rewards, values, mask, check=check)
    reward = per_token(arrays, rewards, "rewards")
    value = per_token(arrays, values, "values", shape=tuple(reward.shape))
    counted = token_mask(arrays, mask, tuple(reward.shape), empty)
    inputs = [reward, value, counted]
    advantages, returns = discounted(arrays, inputs, unit("gamma", gamma), unit("lam", lam), gap, empty)
    return arrays.give(advantages), arrays.give(returns)


@estimator(per="token", rewards="token", needs=("gamma",), ragged=_ragged_reward_to_go)
def reward_to_go(
    rewards: Any,
    *,
    mask: Any = None,
    gamma: float = 1.0,
    preset: str | Preset = "penstock",
    gap: Gap | None = None,
    empty: Empty | None = None,
    check: bool = False,
) -> Array:
    """`G_t = r_t + gamma G_{t+1}` of token rewards (rows, tokens); masks and gaps as in `gae`."""
    rules = find_preset(preset)
    gap, empty = choice("gap", gap, rules.gap), choice("empty", empty, rules.empty)
    arrays = operations_of(rewards, mask, check=check)
    reward = per_token(arrays, rewards, "rewards")
    counted = token_mask(arrays, mask, tuple(reward.shape), empty)
    (returns,) = discounted(arrays, [reward, counted], unit("gamma", gamma), 1.0, gap, empty)
    return arrays.give(returns)


def token_rewards(
    rewards: Any,
    mask: Any,
    *,
    kl: Any = None,
    beta: float = 0.0,
    preset: str | Preset = "penstock",
    empty: Empty | None = None,
    check: bool = False,
) -> Array:
    """Rewards on tokens: `-beta kl_t` on all with mask 1, and the reward of the response on the last of them.

    TRL's PPO puts it on the token after the last, if there is one.
    """
    rules = find_preset(preset)
    arrays = operations_of(rewards, mask, kl, check=check)
    given = per_row(arrays, rewards, "rewards")
    empty = choice("empty", empty, rules.empty)
    counted = token_mask(arrays, mask, token_shape(mask, len(given)), empty)
    return arrays.give(_on_last_tokens(arrays, given, counted, kl, beta, blank_rows(arrays, counted, empty)))


def _on_last_tokens(
    arrays: ArrayOperations, given: Array, counted: Array, kl: Any, beta: float, blank: Array | float
) -> Array:
    """Reward of each row on the last token that counts, less `beta * kl`; `blank` where no token counts."""
    finite(arrays, given, "the reward", "raise")
    seen = arrays.running_counts(counted)
    last = counted & (seen == seen[:, -1:])
    placed = arrays.kept(last, given[:, None], blank)
    if kl is None:
        return placed
    penalty = per_token(arrays, kl, "kl", shape=tuple(counted.shape)) * beta
    return arrays.like(placed - arrays.kept(counted, penalty), given)


@estimator(per="token", rewards="token", needs=("baselines", "gamma"), ragged=_ragged_remax)
def remax(
    rewards: Any,
    baselines: Any,
    *,
    mask: Any = None,
    gamma: float = 1.0,
    preset: str | Preset = "penstock",
    check: bool = False,
) -> Array:
    """ReMax: reward to go less the reward of the greedy answer, `baselines`, one a row.

    `rewards` is one a row, for one advantage a row or, with a mask, a token; or (rows, tokens), with a mask.
    """
    rules = find_preset(preset)
    arrays = operations_of(rewards, baselines, mask, check=check)
    if len(np.shape(rewards)) != 2:
        given = per_row(arrays, rewards, "rewards")
        baseline = per_row(arrays, baselines, "baselines", rows=len(given))
        if mask is None:
            finite(arrays, given - baseline, "the reward less the baseline", "raise")
            return arrays.give(given - baseline)
        rewards = token_rewards(given, mask, preset=rules, check=check)
    returns = arrays.floats(reward_to_go(rewards, mask=mask, gamma=gamma, preset=rules, check=check))
    baseline = per_row(arrays, baselines, "baselines", rows=returns.shape[0])
    finite(arrays, baseline, "the baseline", "raise")
    counted = token_mask(arrays, mask, tuple(returns.shape), "zero")
    advantages = arrays.xp.where(counted, returns - baseline[:, None], blank_rows(arrays, counted, rules.empty))
    return arrays.give(arrays.like(advantages, returns))


@estimator(per="token", rewards="token", needs=("gamma",), ragged=_ragged_reinforce_plus_plus)
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
    check: bool = False,
) -> Array:
    """REINFORCE++: reward to go of token rewards, whitened over the batch, of all ranks if `reduce` is given.

    `rewards` is one a row, put on tokens by `token_rewards`, or (rows, tokens).
    """
    rules = find_preset(preset)
    arrays = operations_of(rewards, mask, kl, check=check)
    if len(np.shape(rewards)) == 2:
        if kl is not None:
            raise DataError(
                "rewards and kl are both given per token; subtract beta * kl from rewards, or give one a row"
            )
        given = per_token(arrays, rewards, "rewards")
        counted = token_mask(arrays, mask, tuple(given.shape), rules.empty)
    else:
        of_rows = per_row(arrays, rewards, "rewards")
        counted = token_mask(arrays, mask, token_shape(mask, len(of_rows)), rules.empty)
        given = _on_last_tokens(arrays, of_rows, counted, kl, beta, 0.0)
    gap = choice("gap", gap, rules.gap)
    (returns,) = discounted(arrays, [given, counted], unit("gamma", gamma), 1.0, gap, "zero")
    blank = blank_rows(arrays, counted, rules.empty)
    return arrays.give(whitened(arrays, returns, counted, rules, reduce, blank=blank))


@estimator(per="token", needs=("groups", "mask", "kl"))
def reinforce_plus_plus_baseline(
    rewards: Any,
    groups: Any,
    *,
    mask: Any,
    kl: Any = None,
    beta: float = 0.0,
    preset: str | Preset = "penstock",
    single_member_group: SingleMemberGroup | None = None,
    nan: Nan | None = None,
    reduce: Reduce | None = None,
    check: bool = False,
) -> Array:
    """REINFORCE++-baseline: R - mean of its group on all its tokens, whitened over the batch (of all ranks).

    The KL penalty enters as the preset has it: summed into the reward before the mean is taken (verl), as token
    rewards summed from each token on (OpenRLHF, penstock), or on each token alone (slime).
    """
    rules = find_preset(preset)
    arrays = operations_of(rewards, mask, kl, check=check)
    xp = arrays.xp
    given = per_row(arrays, rewards, "rewards")
    counted = token_mask(arrays, mask, token_shape(mask, len(given)), rules.empty)
    penalty = None
    if kl is not None:
        penalty = per_token(arrays, kl, "kl", shape=tuple(counted.shape)) * beta
        penalty = xp.where(counted, penalty, 0.0)
        if rules.baseline_kl == "sequence":
            given = given - xp.sum(penalty, axis=1)
        elif rules.baseline_kl == "to-go":
            penalty = reward_to_go(penalty, mask=counted, preset=rules, empty="zero", check=check)
    centred = dr_grpo(given, groups, preset=rules, single_member_group=single_member_group, nan=nan, check=check)
    advantages = on_tokens(arrays, centred, counted)
    if penalty is not None and rules.baseline_kl != "sequence":
        advantages = advantages - penalty
    blank = blank_rows(arrays, counted, rules.empty)
    return arrays.give(whitened(arrays, advantages, counted, rules, reduce, blank=blank))
