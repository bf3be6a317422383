"""Counters of rollouts: rewards, staleness and groups of the rollout batches that were used.

They are counted once for each rollout batch, from columns in host memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.metrics.readings import Readings, key_of
from penstock.rl.minibatches import RolloutMinibatches
from penstock.rl.selection import staleness

REWARD_BOUNDS = (-10.0, -5.0, -2.0, -1.0, -0.5, -0.1, 0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0, 5.0, 10.0)
"""Upper bounds of the reward histogram, each included; the last bucket is open."""


class RolloutCounters:
    """Counters of one loader in one process."""

    def __init__(self) -> None:
        self._last: RolloutMinibatches | None = None
        self._used = self._groups = self._truncated = 0
        self._buckets = np.zeros(len(REWARD_BOUNDS) + 1, np.int64)
        self._reward_sum = 0.0
        self._ages: tuple[float, int] | None = None
        self._version: int | None = None

    def count(self, rollouts: RolloutMinibatches) -> None:
        """Count a rollout batch, the first time that it is seen."""
        if rollouts is self._last:
            return
        self._last, self._version = rollouts, rollouts.version
        table = rollouts.table
        rewards = table.rewards[np.isfinite(table.rewards)]
        self._used += len(table)
        self._truncated += int(rollouts.truncated.sum())
        self._groups = len(np.unique(rollouts.keys))
        self._buckets += np.bincount(np.searchsorted(REWARD_BOUNDS, rewards), minlength=len(self._buckets))
        self._reward_sum += float(rewards.sum())
        ages = staleness(table, rollouts.version)
        known = ages[ages >= 0]
        self._ages = (float(known.mean()), int(known.max())) if len(known) else None

    def readings(self, dropped: dict[str, int], incomplete: int) -> Readings:
        """Metrics by name; `incomplete` rollouts wait for the rest of their group."""
        lost = incomplete + dropped.get("incomplete group", 0)
        found: Readings = {
            "penstock_rollouts_used_total": self._used,
            "penstock_rollouts_groups": self._groups,
            "penstock_rollouts_incomplete": incomplete,
            "penstock_loader_truncated_tokens_total": self._truncated,
            "penstock_rollouts_group_completion_ratio": self._used / (self._used + lost) if self._used + lost else 1.0,
        }
        if self._version is not None:
            found["penstock_rollouts_policy_version"] = self._version
        if self._ages is not None:
            found["penstock_rollouts_staleness_mean"], found["penstock_rollouts_staleness_max"] = self._ages
        for reason, number in sorted(dropped.items()):
            found[key_of("penstock_rollouts_dropped_total", reason=reason)] = number
        counts: list[Any] = np.cumsum(self._buckets).tolist()
        for bound, count in zip((*map(str, REWARD_BOUNDS), "+Inf"), counts):
            found[key_of("penstock_rollouts_reward_bucket", le=bound)] = count
        found["penstock_rollouts_reward_sum"], found["penstock_rollouts_reward_count"] = self._reward_sum, counts[-1]
        return found
