"""Which rollouts of those that came are trained on: the others are dropped, each for a reason that is counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataError
from penstock.rl.advantages import zero_variance_groups
from penstock.rl.compute import AdvantageSpec, summed, with_final_rewards
from penstock.rl.options import RolloutOptions
from penstock.rl.table import RolloutTable

__all__ = ["SelectionRules", "labels_of", "learned_tokens", "staleness"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """What is kept under one policy version."""

    options: RolloutOptions
    spec: AdvantageSpec
    version: int | None

    def scored(self, table: RolloutTable) -> RolloutTable:
        """The table with a reward for each response that has any: given, or the sum of those of its tokens, masked
        ones too. Where both are to be added up, rewards of tokens have the other one at the end, and the sum is both.
        """
        if table.token_rewards is not None and self.spec.both_rewards == "add":
            table = with_final_rewards(table)
        rewards = table.rewards
        if table.token_rewards is not None and np.isnan(rewards).any():
            sums = np.where(table.response_ids.lengths > 0, summed(table.token_rewards), np.nan)
            rewards = np.where(np.isnan(rewards), sums, rewards)
        if self.options.on_missing(self.spec.rules) == "zero":
            rewards = np.nan_to_num(rewards, nan=0.0, posinf=np.inf, neginf=-np.inf)
        return table if rewards is table.rewards else replace(table, rewards=rewards)

    def judge(self, table: RolloutTable, keys: Ints) -> npt.NDArray[np.object_]:
        """For each rollout why it is dropped, or None; `keys` numbers their groups. Raises where the rule is an error.

        Staleness and dynamic sampling concern whole groups.
        """
        options = self.options
        reasons = np.full(len(table), None, np.object_)
        old = self._stale(table)
        if options.on_stale == "drop":
            reasons[np.isin(keys, keys[old])] = "stale"
        self._rows(table, reasons, np.isnan(table.rewards), "missing reward", options.on_missing(self.spec.rules))
        empty = options.on_empty(self.spec.rules)
        self._rows(table, reasons, learned_tokens(table) == 0, "all masked", empty)
        if options.drop_zero_variance:
            left = np.flatnonzero(reasons == None)  # noqa: E711 - entry by entry
            if len(left):
                alike = zero_variance_groups(table.rewards[left], keys[left], preset=self.spec.preset, nan="exclude")
                reasons[left[np.asarray(alike)]] = "zero variance"
        return reasons

    def _rows(self, table: RolloutTable, reasons: npt.NDArray[np.object_], bad: Flags, reason: str, rule: str) -> None:
        bad = bad & (reasons == None)  # noqa: E711
        if not bad.any():
            return
        if rule == "drop":
            reasons[bad] = reason
        elif rule == "error":
            row = int(np.argmax(bad))
            said = {
                "missing reward": "has no reward; give it one, or pass missing_rewards='zero', 'exclude' or 'drop'",
                "all masked": "has no token to learn: its loss_mask is 0 everywhere, or its response is empty; leave "
                "it out, or pass all_masked='drop' or 'keep'",
            }[reason]
            more = f" (and {int(bad.sum()) - 1} more)" if bad.sum() > 1 else ""
            raise DataError(f"rollout {table.ids[row]!r} of group {table.groups[row]!r}{more} {said}", row=row)

    def _stale(self, table: RolloutTable) -> Flags:
        """Which are too old; raises for a version from the future, or one that nobody told."""
        most = self.options.max_staleness
        if self.version is None:
            if most is not None:
                raise ConfigError(
                    "max_staleness needs to know the version of the policy that is trained; pass policy_version=, or "
                    "set loader.policy_version"
                )
            return np.zeros(len(table), np.bool_)
        ahead = table.versions > self.version
        if ahead.any():
            row = int(np.argmax(ahead))
            raise DataError(
                f"rollout {table.ids[row]!r} is of policy version {table.versions[row]}, and the policy that is "
                f"trained has version {self.version}; set loader.policy_version when the policy changes",
                row=row,
            )
        if most is None:
            return np.zeros(len(table), np.bool_)
        unknown = table.versions < 0
        if unknown.any():
            row = int(np.argmax(unknown))
            raise DataError(
                f"rollout {table.ids[row]!r} has no policy version, so nobody can say whether it is more than "
                f"max_staleness={most} versions old; give it one, or pass max_staleness=None",
                row=row,
            )
        return self.version - table.versions > most

    def flags(self, table: RolloutTable) -> Flags:
        """What `metadata["stale"]` says."""
        if self.options.on_stale != "flag":
            return np.zeros(len(table), np.bool_)
        return self._stale(table)


def staleness(table: RolloutTable, version: int | None) -> Ints:
    """How many versions old each rollout is; -1 where it is not known."""
    if version is None:
        return np.full(len(table), -1, np.int64)
    return np.where(table.versions < 0, -1, version - table.versions)


def learned_tokens(table: RolloutTable) -> Ints:
    """(N,) tokens of each response with a loss mask of 1."""
    offsets = table.loss_mask.offsets
    counted = np.concatenate([[0], np.cumsum(table.loss_mask.values, dtype=np.int64)])
    found: Ints = counted[offsets[1:]] - counted[offsets[:-1]]
    return found


def labels_of(table: RolloutTable, keys: Ints) -> Sequence[str]:
    """A name for the group of each rollout; groups that were named alike but came apart get names of their own."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for key, group in zip(keys.tolist(), table.groups.tolist()):
        if key not in names:
            name = str(group)
            names[key] = name if name not in taken else f"{name} ({key})"
            taken.add(names[key])
    return [names[key] for key in keys.tolist()]
