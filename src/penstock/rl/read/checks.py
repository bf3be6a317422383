"""What must hold of the tokens of a rollout, and what becomes of rows that have nothing to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError
from penstock.rl.read.columns import ListColumn
from penstock.rl.read.problems import RolloutProblems

if TYPE_CHECKING:
    from penstock.transforms.tokenization import Tokenizer

__all__ = [
    "LOGPROB_ROUNDING",
    "TokenRules",
    "check_ids",
    "check_logprobs",
    "checked_mask",
    "checked_numbers",
    "rows_to_keep",
]

Flags = npt.NDArray[np.bool_]
LOGPROB_ROUNDING = 0.01
"""What a log-probability may be above 0 by: those of bfloat16 logits are, by rounding."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What to do with rows that have nothing to learn from."""

    missing_rewards: str
    empty_responses: str
    all_masked: str
    group_prompts: str = "equal"

    def __post_init__(self) -> None:
        for name, known in {
            "missing_rewards": ("error", "zero", "drop", "keep"),
            "empty_responses": ("error", "drop", "keep"),
            "all_masked": ("error", "drop", "keep"),
            "group_prompts": ("equal", "any"),
        }.items():
            given = getattr(self, name)
            if given not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {given!r}{did_you_mean(str(given), known)}"
                )


def check_ids(lists: ListColumn, name: str, tokenizer: Tokenizer | None, problems: RolloutProblems) -> None:
    """Refuse ids below 0, and those that the tokenizer does not have."""
    most = 2**63 - 1 if tokenizer is None else tokenizer.vocab_size - 1
    values = lists.ragged.values
    if not len(values) or (values.min() >= 0 and values.max() <= most):
        return
    rows, at = _first_of_each(lists.ragged, (values < 0) | (values > most))
    reach = "2**63 - 1" if tokenizer is None else f"{most}, the vocabulary of {tokenizer.name}"
    shown = dict(zip(rows.tolist(), at.tolist()))
    problems.add(
        rows,
        lambda row: (
            f"{name} has {values[shown[row]]} at token {shown[row] - lists.ragged.offsets[row]}, expected ids "
            f"from 0 to {reach}"
        ),
    )


def checked_mask(mask: ListColumn | None, response: ListColumn, name: str, problems: RolloutProblems) -> Ragged:
    """Which tokens are the policy's own: all of them, in rows that do not say otherwise."""
    if mask is not None and not mask.missing.any() and _as_long(mask, response, name, problems):
        return mask.ragged
    flags = np.ones(len(response.ragged.values), np.bool_)
    if mask is not None and _as_long(mask, response, name, problems):
        flags[np.repeat(~mask.missing, response.lengths)] = mask.ragged.values
    return Ragged(flags, response.ragged.offsets)


def checked_numbers(
    lists: ListColumn, response: ListColumn, mask: Ragged, name: str, problems: RolloutProblems, changed: dict[str, int]
) -> Ragged | None:
    """Numbers that are finite where the policy wrote, and 0 where it did not and there was none; None for no column."""
    if lists.missing.all() and not len(lists.odd):
        return None
    lacking = np.flatnonzero(lists.missing & (response.lengths > 0))
    others = int((~lists.missing).sum())
    problems.add(lacking, f"{name} is missing, and {others} other rows have it; give it for all rows, or for none")
    if not _as_long(lists, response, name, problems) or len(lacking):
        return None
    values = lists.ragged.values
    endless = ~np.isfinite(values)
    if not endless.any():
        return lists.ragged
    rows, at = _first_of_each(lists.ragged, endless & mask.values)
    shown = dict(zip(rows.tolist(), at.tolist()))
    problems.add(
        rows,
        lambda row: (
            f"{name} has {values[shown[row]]} at token {shown[row] - lists.ragged.offsets[row]} of the "
            "response, which is to be learned; expected a finite number"
        ),
    )
    changed[f"{name} of masked tokens set to 0"] = int(endless.sum())
    return Ragged(np.where(endless, np.float32(0), values), lists.ragged.offsets)


def check_logprobs(column: Ragged | None, mask: Ragged, name: str, problems: RolloutProblems) -> None:
    """Refuse log-probs of learned tokens that are clearly above 0."""
    if column is None or not (column.values > LOGPROB_ROUNDING).any():
        return
    values, offsets = column.flat, column.offsets - column.offsets[0]
    rows, at = _first_of_each(Ragged(values, offsets), (values > LOGPROB_ROUNDING) & mask.flat.astype(np.bool_))
    shown = dict(zip(rows.tolist(), at.tolist()))
    problems.add(
        rows,
        lambda row: (
            f"{name} has {values[shown[row]]:g} at token {shown[row] - offsets[row]} of the response, expected "
            f"log-probabilities, which are at most 0 (up to {LOGPROB_ROUNDING:g} passes as rounding); if these are "
            "probabilities, give their logarithms"
        ),
    )


def rows_to_keep(
    rules: TokenRules,
    response: ListColumn,
    mask: Ragged,
    rewards: npt.NDArray[np.float64],
    numbers: Mapping[str, Any],
    problems: RolloutProblems,
    changed: dict[str, int],
) -> Flags:
    """Which rows stay; rewards that are missing are set, if that is the rule."""
    keep = np.ones(len(response), np.bool_)
    empty = response.lengths == 0
    masked = np.zeros(len(response), np.bool_)
    if not empty.all():
        masked[~empty] = ~np.logical_or.reduceat(mask.values, mask.offsets[:-1][~empty])
    unscored = np.isnan(rewards) & (numbers.get("token_rewards") is None)
    if rules.missing_rewards == "zero":
        changed["reward missing, set to 0"] = int(unscored.sum())
        rewards[unscored] = 0.0
    for bad, rule, reason, text in (
        (
            empty,
            rules.empty_responses,
            "empty response",
            "the response is empty; pass empty_responses='drop' or 'keep'",
        ),
        (
            masked,
            rules.all_masked,
            "all masked",
            "no token is to be learned, the loss mask is 0 everywhere; pass all_masked='drop' or 'keep'",
        ),
        (
            unscored,
            rules.missing_rewards,
            "missing reward",
            "there is no reward, or it is NaN; pass missing_rewards='zero', 'drop' or 'keep'",
        ),
    ):
        if rule == "error":
            problems.add(np.flatnonzero(bad), text)
        elif rule == "drop":
            changed[reason] = int((bad & keep).sum())
            keep &= ~bad
    return keep


def _as_long(lists: ListColumn, response: ListColumn, name: str, problems: RolloutProblems) -> bool:
    """Whether every row that has a list has as many entries as its response has tokens."""
    wrong = np.flatnonzero(~lists.missing & (lists.lengths != response.lengths))
    problems.add(
        wrong,
        lambda row: f"{name} has {lists.lengths[row]} entries, the response has {response.lengths[row]} tokens",
    )
    return not len(wrong)


def _first_of_each(ragged: Ragged, flags: Flags) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The rows with a True in them, and where in the values its first one is."""
    where = np.flatnonzero(flags)
    rows, first = np.unique(np.searchsorted(ragged.offsets, where, "right") - 1, return_index=True)
    return rows, where[first]
