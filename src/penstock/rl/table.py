"""Many rollouts as columns: ragged arrays of ids and numbers, one entry per rollout for the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.errors import DataError
from penstock.rl.rollout import Rollout

__all__ = ["RolloutTable"]

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RolloutTable:
    """N rollouts. Columns that nobody gave are None; a column that some gave, all have to give."""

    prompt_ids: Ragged
    response_ids: Ragged
    loss_mask: Ragged
    """bool, as long as the responses."""
    rewards: npt.NDArray[np.float64]
    """(N,) of the whole responses; NaN where there is none."""
    groups: npt.NDArray[np.object_]
    """(N,) names: str or int. Rollouts without a group have one of their own, `~17`, before a loader groups prompts."""
    versions: Ints
    """(N,) of the policy; -1 where it is not known."""
    tokenized: npt.NDArray[np.bool_]
    """(N,) whether the ids were made here, of text."""
    ids: npt.NDArray[np.object_]
    """(N,) names that are told in messages and metadata."""
    finish_reasons: npt.NDArray[np.object_]
    metadata: npt.NDArray[np.object_]
    """(N,) mappings, as they were given."""
    token_rewards: Ragged | None = None
    logprobs: Ragged | None = None
    ref_logprobs: Ragged | None = None
    values: Ragged | None = None

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def lengths(self) -> Ints:
        """(N,) tokens of prompt and response together."""
        return self.prompt_ids.lengths + self.response_ids.lengths

    def take(self, rows: npt.ArrayLike) -> Self:
        """Some rollouts, in the order given."""
        chosen = np.asarray(rows, np.int64)
        columns = ((column.name, getattr(self, column.name)) for column in fields(self))
        return replace(self, **{name: _taken(column, chosen) for name, column in columns if column is not None})

    def rollout(self, row: int) -> Rollout:
        """One of them, its arrays views of the table's. That its ids were made of text is not part of it."""
        row = range(len(self))[row]
        reward, version = float(self.rewards[row]), int(self.versions[row])
        numbers = {name: getattr(self, name) for name in ("token_rewards", "logprobs", "ref_logprobs", "values")}
        return Rollout(
            prompt_ids=self.prompt_ids[row],
            response_ids=self.response_ids[row],
            reward=None if np.isnan(reward) else reward,
            loss_mask=self.loss_mask[row],
            policy_version=None if version < 0 else version,
            group=self.groups[row],
            finish_reason=self.finish_reasons[row],
            id=self.ids[row],
            metadata=self.metadata[row],
            **{name: column[row] for name, column in numbers.items() if column is not None},
        )

    def to_rollouts(self) -> list[Rollout]:
        """All of them, one by one."""
        return [self.rollout(row) for row in range(len(self))]

    @classmethod
    def joined(cls, tables: Iterable[Self]) -> Self:
        """One after the other; all have the same columns."""
        given = list(tables)
        if not given:
            raise ValueError("there are no tables to join; give at least one")
        parts = [table for table in given if len(table)] or given[:1]
        if len(parts) == 1:
            return parts[0]
        found: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            lacking = [part for part, value in zip(parts, values) if value is None]
            if lacking and len(lacking) < len(parts):
                count, others = sum(map(len, lacking)), sum(map(len, parts)) - sum(map(len, lacking))
                raise DataError(
                    f"{count} rollouts, the first of them {lacking[0].ids[0]!r}, have no {column.name}, and {others} "
                    "have; give it for all of them, or for none"
                )
            if lacking:
                found[column.name] = None
            elif isinstance(values[0], Ragged):
                found[column.name] = Ragged.joined(values)
            else:
                found[column.name] = np.concatenate(values)
        return cls(**found)


def _taken(column: Any, rows: Ints) -> Any:
    return column.take(rows) if isinstance(column, Ragged) else column[rows]
