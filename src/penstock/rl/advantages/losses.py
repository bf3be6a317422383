"""Terms of a policy loss besides advantages: KL estimates, DAPO's length penalty, and denominators."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from penstock._suggest import did_you_mean
from penstock.batching.backends.base import Array
from penstock.batching.backends.operations import ArrayOperations, operations_of
from penstock.errors import ConfigError, DataError
from penstock.rl.advantages.inputs import per_row, per_token, rows_of, token_mask
from penstock.rl.advantages.presets import Empty, Preset, choice, find_preset
from penstock.rl.advantages.statistics import Number, Reduce, at_least, reduced

AGGREGATIONS = {
    "token-mean": "token-mean",
    "sequence-mean": "sequence-mean",
    "sequence-sum": "sequence-sum",
    "dr-grpo": "dr-grpo",
    # TRL's names
    "dapo": "token-mean",
    "grpo": "sequence-mean",
    "luspo": "sequence-sum",
    "dr_grpo": "dr-grpo",
    # verl's names
    "seq-mean-token-mean": "sequence-mean",
    "seq-mean-token-sum": "sequence-sum",
    "seq-mean-token-sum-norm": "dr-grpo",
}


def kl_estimate(
    log_probs: Any,
    reference: Any,
    kind: str = "k3",
    *,
    preset: str | Preset = "penstock",
    clamp: float | None = None,
    clamp_log_ratio: float | None = None,
) -> Array:
    """KL of the policy from the reference, estimated at each token; gradients pass.

    With `d = log_probs - reference`: k1 is d, k2 is d² / 2, k3 is exp(-d) - 1 + d, and "low_var_kl" another name of k3
    (which slime clamps). Clamps are the preset's unless given: `clamp_log_ratio` limits d of k3, `clamp` the estimate.
    """
    rules = find_preset(preset)
    choice("kind", kind)
    arrays = operations_of(log_probs, reference, gradients=True)
    xp = arrays.xp
    ours, theirs = (arrays.floats(array, gradients=True) for array in (log_probs, reference))
    if tuple(ours.shape) != tuple(theirs.shape):
        raise DataError(
            f"log_probs have shape {tuple(ours.shape)}, and reference {tuple(theirs.shape)}; give both per token"
        )
    if kind == "k1":
        estimate = ours - theirs
    elif kind == "k2":
        apart = ours - theirs
        estimate = apart * apart / 2
    else:
        most, back = rules.kl_log_ratio if clamp_log_ratio is None else clamp_log_ratio, theirs - ours
        back = back if most is None else xp.clip(back, -most, most)
        estimate = xp.expm1(back) - back  # exp(-d) - 1 would cancel for a small d
    most = rules.kl_clamp if clamp is None and kind in rules.kl_clamped else clamp
    return estimate if most is None else xp.clip(estimate, -most, most)


def overlong_penalty(lengths: Any, max_length: int, buffer: int, *, penalty: float = 1.0, check: bool = False) -> Array:
    """DAPO's soft penalty for long responses, to be added to their rewards: 0 up to `max_length - buffer` tokens, then
    linear down to `-penalty` at `max_length` and beyond."""
    if not 0 < buffer <= max_length:
        raise ConfigError(f"buffer must be between 1 and max_length ({max_length}), got {buffer!r}")
    arrays = operations_of(lengths, check=check)
    length = per_row(arrays, lengths, "lengths")
    if not arrays.check:
        length = arrays.xp.where(length < 0, float("nan"), length)
    elif bool(arrays.xp.any(length < 0)):
        row = int(np.argmax(arrays.host(length) < 0))
        raise DataError(f"the length of row {row} is negative", row=row)
    return arrays.give(arrays.xp.clip((max_length - buffer - length) / buffer, -1.0, 0.0) * penalty)


def loss_denominators(
    mask: Any,
    aggregation: str | None = None,
    *,
    preset: str | Preset = "penstock",
    max_length: int | None = None,
    reduce: Reduce | None = None,
    ranks: int = 1,
    empty: Empty | None = None,
    check: bool = False,
) -> Array:
    """Divisors for the token losses of each row; with them the loss of a batch is a sum.

    - "token-mean": the number of tokens in the batch (DAPO; TRL's `dapo`, verl's `token-mean`);
    - "sequence-mean": the tokens of the row times the number of rows (GRPO's own; `grpo`, `seq-mean-token-mean`);
    - "sequence-sum": the number of rows (`luspo`, `seq-mean-token-sum`);
    - "dr-grpo": the number of rows times `max_length`, the longest a response may be (`dr_grpo`); with preset verl the
      length alone (`seq-mean-token-sum-norm`).

    The batch is everything that makes up one step: pass its whole mask and split rows into micro-batches afterwards.
    `reduce` counts over ranks (see `whiten`). A trainer that averages gradients over ranks, where this is a sum,
    passes their number as `ranks`, which divides the divisors.
    """
    rules = find_preset(preset)
    arrays = operations_of(mask, check=check)
    bools, rule = arrays.bools(mask), choice("empty", empty, rules.empty)
    counted = token_mask(arrays, bools, rows_of(bools), rule)
    lengths = arrays.wide(arrays.xp.sum(counted, axis=1))
    unchecked = rule == "raise" and not arrays.check
    divisors = divisors_of(
        arrays, lengths, aggregation, rules, max_length=max_length, reduce=reduce, ranks=ranks, unchecked=unchecked
    )
    return arrays.give(divisors)


def divisors_of(
    arrays: ArrayOperations,
    lengths: Array,
    aggregation: str | None,
    rules: Preset,
    *,
    max_length: int | None = None,
    reduce: Reduce | None = None,
    ranks: int = 1,
    unchecked: bool = False,
) -> Array:
    """`loss_denominators` of rows with these numbers of tokens; NaN for 0 if they are `unchecked`."""
    name = rules.aggregation if aggregation is None else aggregation
    if name not in AGGREGATIONS:
        known = ", ".join(map(repr, AGGREGATIONS))
        raise ConfigError(f"unknown aggregation {name!r}{did_you_mean(str(name), AGGREGATIONS)}; known are {known}")
    if ranks < 1:
        raise ConfigError(f"ranks must be positive, got {ranks!r}")
    xp, kind, some = arrays.xp, AGGREGATIONS[name], lengths > 0
    zeros = arrays.nan_if_false(some) if unchecked else arrays.floats(some) * 0.0
    rows: Number = float(lengths.shape[0])
    tokens: Number = 0.0
    if reduce is not None:
        tokens, rows = reduced(arrays, [xp.sum(lengths), xp.sum(xp.ones_like(lengths))], reduce)
    elif kind == "token-mean":
        (tokens,) = reduced(arrays, [xp.sum(lengths)], None)
    divisor: Any
    if kind == "token-mean":
        divisor = at_least(arrays, tokens, 1.0)
    elif kind == "sequence-mean":
        divisor = xp.clip(lengths, 1.0, None) * rows
    elif kind == "sequence-sum":
        divisor = rows
    else:
        if max_length is None or max_length < 1:
            raise ConfigError(f"{name} divides by the longest allowed response: pass max_length=, got {max_length!r}")
        divisor = max_length * (rows if rules.dr_grpo_rows else 1)
    return arrays.into(operator.add, zeros, divisor if ranks == 1 else divisor / ranks, zeros)


def aggregate_loss(losses: Any, mask: Any, denominators: Any) -> Array:
    """Sum of the losses of tokens with mask 1, each divided by the denominator of its row; gradients pass.

    `denominators` is one a row, or one a token, as in padding-free batches, whose rollouts share a row. Micro-batches
    and ranks add up to the loss of the batch that the denominators were computed for.
    """
    arrays = operations_of(losses, mask, denominators, gradients=True)
    xp = arrays.xp
    loss = arrays.floats(losses, gradients=True)
    rows, tokens = rows_of(loss)
    counted = token_mask(arrays, mask, (rows, tokens), "zero")
    if len(np.shape(denominators)) == 2:
        divisors = per_token(arrays, denominators, "denominators", shape=(rows, tokens))
        divisors = xp.where(counted, divisors, 1.0)  # masked tokens need no denominator
    else:
        divisors = per_row(arrays, denominators, "denominators", rows=rows)[:, None]
    return xp.sum(xp.where(counted, loss, 0.0) / divisors)
