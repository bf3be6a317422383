"""Rewards of responses and of their tokens: what one is of the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.errors import DataError
from penstock.loaders._rollouts.table import Ragged, RolloutTable

__all__ = ["check_rewards", "summed", "with_final_rewards"]

Floats = npt.NDArray[np.float64]


def summed(column: Ragged) -> Floats:
    """The sum of each row."""
    owners = np.repeat(np.arange(len(column)), column.lengths)
    found: Floats = np.bincount(owners, column.flat, len(column)).astype(np.float64)
    return found


def with_final_rewards(table: RolloutTable) -> RolloutTable:
    """The reward of each response added to that of its last token; then it is the sum of both."""
    column = table.token_rewards
    assert column is not None
    rows = np.flatnonzero(~np.isnan(table.rewards) & (column.lengths > 0))
    rewards, values = table.rewards.copy(), column.values.copy()
    rewards[rows] += summed(column)[rows]
    values[column.offsets[rows + 1] - 1] += table.rewards[rows].astype(values.dtype)
    return replace(table, rewards=rewards, token_rewards=Ragged(values, column.offsets))


def check_rewards(table: RolloutTable) -> None:
    """Refuses rollouts with a reward and with rewards of tokens that are not what it is made up of."""
    column = table.token_rewards
    if column is None:
        return
    sums = summed(column)
    apart = ~np.isnan(table.rewards) & ~np.isclose(sums, table.rewards, 1e-4, 1e-5) & (column.lengths > 0)
    if apart.any():
        row = int(np.argmax(apart))
        more = f" (and {int(apart.sum()) - 1} more)" if apart.sum() > 1 else ""
        raise DataError(
            f"rollout {table.ids[row]!r} of group {table.groups[row]!r}{more} has a reward of {table.rewards[row]:g}, "
            f"and rewards of its tokens that sum to {sums[row]:g}; give one of the two, or pass estimator="
            f"AdvantageSpec(both_rewards='add', ...) if the reward comes on top, at the last token",
            row=row,
        )
