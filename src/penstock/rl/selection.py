"""Which rollouts of those that came are trained on: the others are dropped, each for a reason that is counted."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError
from penstock.rl.advantages import zero_variance_groups
from penstock.rl.compute import AdvantageSpec, summed, with_final_rewards
from penstock.rl.options import RolloutOptions
from penstock.rl.read.columns import RolloutProblems
from penstock.rl.rollout import RolloutTable

__all__ = [
    "ANY_PROMPT",
    "SelectionRules",
    "check_group_prompts",
    "check_unique_ids",
    "check_whole_groups",
    "describe_lone_groups",
    "group_by_prompt",
    "is_unnamed",
    "labels_of",
    "learned_tokens",
    "log_prompt_groups",
    "staleness",
]


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


logger = logging.getLogger(__name__)

_UNNAMED = re.compile(r"~+\d+")
"""The name that `read_rollouts` gives to the group of a rollout without one."""
ANY_PROMPT = "pass group_prompts='any' if the rollouts of a group may differ in their prompts"
_BASELINE = (
    "a group's rewards are compared with each other, so its rollouts need the same prompt tokens; name the groups by "
    f"their prompts, or leave `group` out and equal prompts are grouped, or {ANY_PROMPT}"
)


def is_unnamed(group: Any) -> bool:
    """Whether the name of a group is one that nobody gave."""
    return isinstance(group, str) and _UNNAMED.fullmatch(group) is not None


def group_by_prompt(table: RolloutTable) -> RolloutTable:
    """The table with equal prompts grouped, if none of its rollouts names a group; else the table itself.

    A group has the name of its first rollout's.
    """
    names = table.groups.tolist()
    if len(set(names)) < len(names) or not all(map(is_unnamed, names)):
        return table
    first: dict[bytes, Any] = {}
    groups = np.empty(len(names), np.object_)
    groups[:] = [first.setdefault(prompt, name) for prompt, name in zip(_row_bytes(table.prompt_ids), names)]
    return replace(table, groups=groups)


def log_prompt_groups(table: RolloutTable, whose: str) -> None:
    """Say that the groups are those of equal prompts."""
    sizes = Counter(table.groups.tolist()).values()
    told = f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"
    logger.warning(
        "%s: no rollout names a group, so rollouts with equal prompts are a group: %d groups of %s; to group them "
        "otherwise, give each rollout a `group`, or pass columns={'group': ...}",
        whose,
        len(sizes),
        told,
    )


def check_group_prompts(table: RolloutTable, keys: Sequence[Any], problems: RolloutProblems | None = None) -> None:
    """Refuse rollouts of one group with different prompts; `keys` says which belong together.

    With `problems` they are told there, else the first of them is raised.
    """
    if len(set(keys)) == len(keys):
        return
    first: dict[Any, int] = {}
    against = [first.setdefault(key, row) for row, key in enumerate(keys)]
    prompts = _row_bytes(table.prompt_ids)
    wrong = [row for row, other in enumerate(against) if row != other and prompts[row] != prompts[other]]
    if not wrong:
        return
    if problems is not None:
        problems.add(wrong, lambda row: _other_prompt(table, row, against[row], problems.places.told(against[row])))
        return
    row = wrong[0]
    more = f" (and {len(wrong) - 1} more rollouts like it)" if len(wrong) > 1 else ""
    told = _other_prompt(table, row, against[row], f"rollout {table.ids[against[row]]!r}")
    raise DataError(f"rollout {table.ids[row]!r}{more}: {told}", row=row)


def check_unique_ids(ids: Sequence[Any], given: npt.NDArray[np.bool_], column: str, problems: RolloutProblems) -> None:
    """Refuse an id that two rollouts were given."""
    first: dict[Any, int] = {}
    rows = np.flatnonzero(given).tolist()
    against = {row: first.setdefault(ids[row], row) for row in rows}
    wrong = [row for row, other in against.items() if row != other]
    problems.add(
        wrong,
        lambda row: (
            f"{column} {ids[row]!r} is also that of {_placed(problems, against[row])}, and an id names one rollout; "
            f"leave out the copy, or give it an id of its own; if {column} names the prompt, pass columns="
            f"{{'group': {column!r}}}, and columns={{'metadata': [{column!r}]}} if it names something else"
        ),
    )


def check_whole_groups(table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec) -> None:
    """Refuse rollouts that are each alone in their group, where the preset makes every advantage 0."""
    lone = _lone(table, labels)
    scored = int((~np.isnan(table.rewards)).sum())
    if not len(lone) or len(lone) < scored or spec.lone_rule != "zero" or "lone" in spec.options:
        return
    row = int(lone[0])
    each = f"each of the {scored} rollouts" if scored > 1 else "the only rollout"
    raise DataError(
        f"{each} is alone in its group (rollout {table.ids[row]!r} of group {table.groups[row]!r}), so with preset="
        f"{spec.rules.name!r} every advantage is 0 and nothing is learned; give the rollouts of one prompt the same "
        "`group`, and of a live source append them at once or pass group_size=; or pass an AdvantageSpec with "
        "options={'lone': 'zero'} if zeros are meant",
        row=row,
    )


def describe_lone_groups(table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec) -> str | None:
    """What a preset does to groups of one, or of different sizes, that nobody asked for; None if there are none."""
    lone, rule = _lone(table, labels), spec.lone_rule
    if rule is None or "lone" in spec.options:
        return None
    sizes = set(Counter(labels).values())
    if spec.rules.unequal == "batch" and spec.name in ("grpo", "dr_grpo") and len(sizes) > 1:
        return (
            f"groups have {min(sizes)} to {max(sizes)} rollouts, and preset={spec.rules.name!r} takes the whole "
            "rollout batch as one group then"
        )
    if not len(lone) or rule == "raise":
        return None
    row = int(lone[0])
    return (
        f"{len(lone)} of {len(table)} rollouts are alone in their group (the first is {table.ids[row]!r} of group "
        f"{table.groups[row]!r}), and preset={spec.rules.name!r} gives them "
        f"{'an advantage of 0' if rule == 'zero' else 'their reward as advantage'}"
    )


def _placed(problems: RolloutProblems, row: int) -> str:
    file, number = problems.places.of(row)
    return (f"{file}, " if file is not None else "") + f"row {number}"


def _lone(table: RolloutTable, labels: Sequence[str]) -> npt.NDArray[np.int64]:
    """The rollouts with a reward whose group has no other one with a reward."""
    scored = ~np.isnan(table.rewards)
    counts = Counter(label for label, there in zip(labels, scored.tolist()) if there)
    alone = np.array([counts[label] == 1 for label in labels], np.bool_)
    return np.flatnonzero(alone & scored)


def _other_prompt(table: RolloutTable, row: int, other: int, told: str) -> str:
    ours, theirs = table.prompt_ids[row], table.prompt_ids[other]
    shared = min(len(ours), len(theirs))
    apart = np.flatnonzero(ours[:shared] != theirs[:shared])
    if len(apart):
        at = int(apart[0])
        difference = f"token {at} of the prompt is {ours[at]} here and {theirs[at]} there"
    else:
        difference = f"the prompt has {len(ours)} tokens here and {len(theirs)} there"
    return f"group {table.groups[row]!r} has another prompt in {told}: {difference}; {_BASELINE}"


def _row_bytes(ragged: Ragged) -> list[bytes]:
    """The rows as bytes, equal where the rows are."""
    data = ragged.values.tobytes()
    ends = (ragged.offsets * ragged.values.dtype.itemsize).tolist()
    return [data[low:high] for low, high in pairwise(ends)]
