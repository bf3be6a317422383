"""Selection of the rollouts to train on. Others are dropped, each for a reason that is counted; groups are checked."""

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
from penstock.rl.compute import AdvantageSpec, row_sums, with_final_rewards
from penstock.rl.options import RolloutSelection, Staleness
from penstock.rl.read.columns import RolloutProblems
from penstock.rl.rollout import RolloutTable

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_UNNAMED = re.compile(r"~+\d+")
"""Name that `read_rollouts` gives to the group of a rollout without one."""


@dataclass(frozen=True, slots=True)
class SelectionRules:
    """Rules for the rollouts of a rollout batch, under one version of the policy."""

    selection: RolloutSelection
    staleness: Staleness
    spec: AdvantageSpec
    version: int | None

    def scored(self, table: RolloutTable) -> RolloutTable:
        """Table with a reward for each response that has any: given, or the sum of its token rewards.

        With `both_rewards="add"` the reward is added to that of the last token, and the sum is of both.
        """
        if table.token_rewards is not None and self.spec.both_rewards == "add":
            table = with_final_rewards(table)
        rewards = table.rewards
        if table.token_rewards is not None and np.isnan(rewards).any():
            sums = np.where(table.response_ids.lengths > 0, row_sums(table.token_rewards), np.nan)
            rewards = np.where(np.isnan(rewards), sums, rewards)
        if self.selection.on_missing(self.spec.rules) == "zero":
            rewards = np.nan_to_num(rewards, nan=0.0, posinf=np.inf, neginf=-np.inf)
        return table if rewards is table.rewards else replace(table, rewards=rewards)

    def judge(self, table: RolloutTable, keys: Ints) -> npt.NDArray[np.object_]:
        """Reason to drop each rollout, or None; `keys` numbers the groups. Raises if the rule is an error.

        Staleness and dynamic sampling concern whole groups.
        """
        reasons = np.full(len(table), None, np.object_)
        stale = self._stale(table)
        if self.staleness.on_stale == "drop":
            reasons[np.isin(keys, keys[stale])] = "stale"
        missing, empty = self.selection.on_missing(self.spec.rules), self.selection.on_empty(self.spec.rules)
        self._apply(table, reasons, np.isnan(table.rewards), "missing reward", missing)
        self._apply(table, reasons, supervised_counts(table) == 0, "all masked", empty)
        if self.selection.drop_zero_variance:
            left = np.flatnonzero(reasons == None)  # noqa: E711 - elementwise
            if len(left):
                equal = zero_variance_groups(table.rewards[left], keys[left], preset=self.spec.preset, nan="exclude")
                reasons[left[np.asarray(equal)]] = "zero variance"
        return reasons

    def _apply(self, table: RolloutTable, reasons: npt.NDArray[np.object_], bad: Flags, reason: str, rule: str) -> None:
        bad = bad & (reasons == None)  # noqa: E711 - elementwise
        if not bad.any():
            return
        if rule == "drop":
            reasons[bad] = reason
        elif rule == "error":
            row = int(np.argmax(bad))
            problem = {
                "missing reward": "has no reward; give it one, or pass missing_rewards='zero', 'exclude' or 'drop'",
                "all masked": "has no supervised token: its loss_mask is 0 everywhere, or its response is empty; leave "
                "it out, or pass all_masked='drop' or 'keep'",
            }[reason]
            more = f" (and {int(bad.sum()) - 1} more)" if bad.sum() > 1 else ""
            raise DataError(f"rollout {table.ids[row]!r} of group {table.groups[row]!r}{more} {problem}", row=row)

    def _stale(self, table: RolloutTable) -> Flags:
        """Rollouts that are too old; raises for a version that is newer than the policy, or unknown."""
        most = self.staleness.max_staleness
        if self.version is None:
            if most is not None:
                raise ConfigError(
                    "max_staleness needs the version of the policy that is trained; pass policy_version=, or set "
                    "loader.policy_version"
                )
            return np.zeros(len(table), np.bool_)
        newer = table.versions > self.version
        if newer.any():
            row = int(np.argmax(newer))
            raise DataError(
                f"rollout {table.ids[row]!r} has policy version {table.versions[row]}, and the policy that is trained "
                f"has version {self.version}; set loader.policy_version when the policy changes",
                row=row,
            )
        if most is None:
            return np.zeros(len(table), np.bool_)
        unknown = table.versions < 0
        if unknown.any():
            row = int(np.argmax(unknown))
            raise DataError(
                f"rollout {table.ids[row]!r} has no policy version, which max_staleness={most} needs; give it one, or "
                "pass max_staleness=None",
                row=row,
            )
        return self.version - table.versions > most

    def stale_flags(self, table: RolloutTable) -> Flags:
        """Values of `metadata["stale"]`."""
        return self._stale(table) if self.staleness.on_stale == "flag" else np.zeros(len(table), np.bool_)


def staleness(table: RolloutTable, version: int | None) -> Ints:
    """Age of each rollout in versions; -1 if unknown."""
    if version is None:
        return np.full(len(table), -1, np.int64)
    return np.where(table.versions < 0, -1, version - table.versions)


def supervised_counts(table: RolloutTable) -> Ints:
    """(N,) supervised tokens of each response."""
    mask, found = table.loss_mask, np.zeros(len(table), np.int64)
    if mask.flat.all():
        return mask.lengths
    some = np.flatnonzero(mask.lengths)
    if len(some):
        found[some] = np.add.reduceat(mask.flat, (mask.offsets[:-1] - mask.offsets[0])[some], dtype=np.int64)
    return found


# -- groups ------------------------------------------------------------------------------------------------------------


def group_labels(table: RolloutTable, keys: Ints) -> Sequence[str]:
    """Label of each rollout's group; groups of the same name that came separately get different labels."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    for key, group in zip(keys.tolist(), table.groups.tolist()):
        if key not in names:
            name = str(group)
            names[key] = name if name not in taken else f"{name} ({key})"
            taken.add(names[key])
    return [names[key] for key in keys.tolist()]


def is_unnamed(group: Any) -> bool:
    """True if the name of a group was generated."""
    return isinstance(group, str) and _UNNAMED.fullmatch(group) is not None


def group_by_prompt(table: RolloutTable) -> RolloutTable:
    """Table with equal prompts grouped, if none of its rollouts names a group; else the table itself.

    A group has the name of its first rollout's.
    """
    names = table.groups.tolist()
    if len(set(names)) < len(names) or not all(map(is_unnamed, names)):
        return table
    first: dict[bytes, Any] = {}
    groups = np.empty(len(names), np.object_)
    groups[:] = [first.setdefault(prompt, name) for prompt, name in zip(_row_bytes(table.prompt_ids), names)]
    return replace(table, groups=groups)


def group_by_size(table: RolloutTable, size: int) -> RolloutTable:
    """Table with every `size` neighbours as a group; if rollouts name groups, these must have that size."""
    names = table.groups.tolist()
    if len(set(names)) < len(names) or not all(map(is_unnamed, names)):
        wrong = next(((name, count) for name, count in Counter(names).items() if count != size), None)
        if wrong is not None:
            raise ConfigError(
                f"group {wrong[0]!r} has {wrong[1]} rollouts, and group_size={size}; complete the group, or omit "
                "group_size: the groups of a list or a file may have any size"
            )
        return table
    if len(names) % size:
        raise ConfigError(
            f"{len(names)} rollouts cannot be split into groups of group_size={size}; give each rollout a `group`, or "
            "omit group_size to group equal prompts"
        )
    groups = np.empty(len(names), np.object_)
    groups[:] = [names[row - row % size] for row in range(len(names))]
    return replace(table, groups=groups)


def log_prompt_groups(table: RolloutTable, source: str) -> None:
    """Log that rollouts were grouped by equal prompts."""
    sizes = Counter(table.groups.tolist()).values()
    logger.warning(
        "%s: no rollout names a group, so rollouts with equal prompts are a group: %d groups of %s; to group them "
        "differently, give each rollout a `group`, or pass group_size= or columns={'group': ...}",
        source,
        len(sizes),
        f"{min(sizes)}" if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}",
    )


def check_group_prompts(table: RolloutTable, keys: Sequence[Any], problems: RolloutProblems | None = None) -> None:
    """Refuse rollouts of one group with different prompts; `keys` are the groups.

    Problems are added to `problems`; without it the first one is raised.
    """
    if len(set(keys)) == len(keys):
        return
    first: dict[Any, int] = {}
    reference = [first.setdefault(key, row) for row, key in enumerate(keys)]
    prompts = _row_bytes(table.prompt_ids)
    wrong = [row for row, other in enumerate(reference) if row != other and prompts[row] != prompts[other]]
    if not wrong:
        return
    if problems is not None:
        names = problems.rows
        problems.add(wrong, lambda row: _prompt_problem(table, row, reference[row], names.describe(reference[row])))
        return
    row = wrong[0]
    more = f" (and {len(wrong) - 1} more rollouts like it)" if len(wrong) > 1 else ""
    problem = _prompt_problem(table, row, reference[row], f"rollout {table.ids[reference[row]]!r}")
    raise DataError(f"rollout {table.ids[row]!r}{more}: {problem}", row=row)


def _prompt_problem(table: RolloutTable, row: int, other: int, other_name: str) -> str:
    ours, theirs = table.prompt_ids[row], table.prompt_ids[other]
    shared = min(len(ours), len(theirs))
    apart = np.flatnonzero(ours[:shared] != theirs[:shared])
    if len(apart):
        at = int(apart[0])
        difference = f"token {at} of the prompt is {ours[at]} here and {theirs[at]} there"
    else:
        difference = f"the prompt has {len(ours)} tokens here and {len(theirs)} there"
    return (
        f"group {table.groups[row]!r} has another prompt in {other_name}: {difference}; rewards are compared within a "
        "group, so its rollouts need the same prompt tokens; name groups by their prompts, or leave `group` out to "
        "group equal prompts, or pass group_prompts='any' to allow different prompts in a group"
    )


def check_unique_ids(ids: Sequence[Any], given: Flags, column: str, problems: RolloutProblems) -> None:
    """Refuse an id that two rollouts were given."""
    first: dict[Any, int] = {}
    reference = {row: first.setdefault(ids[row], row) for row in np.flatnonzero(given).tolist()}
    wrong = [row for row, other in reference.items() if row != other]
    problems.add(
        wrong,
        lambda row: (
            f"{column} {ids[row]!r} is also that of {problems.rows.describe(reference[row], with_id=False)}, and ids "
            f"must be unique; remove the copy, or give it another id; if {column} names the prompt, pass columns="
            f"{{'group': {column!r}}}, and columns={{'metadata': [{column!r}]}} if it names something else"
        ),
    )


def check_single_members(table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec) -> None:
    """Refuse groups of one reward if the rule is an error, or if all groups have one member and would get 0."""
    single, rule = _single_members(table, labels), spec.single_member_rule
    if not len(single) or rule not in ("raise", "zero"):
        return
    row = int(single[0])
    rollout = f"rollout {table.ids[row]!r} of group {table.groups[row]!r}"
    remedy = (
        "give the rollouts of one prompt the same `group`, and append them to a live source together or pass "
        "group_size="
    )
    if rule == "raise":
        if _one_whole_group(spec, labels):
            return
        more = f" (and {len(single) - 1} more)" if len(single) > 1 else ""
        raise DataError(
            f"{rollout}{more} is alone in its group and cannot be compared; {remedy}; or leave it out, or pass an "
            "AdvantageSpec with options={'single_member_group': 'zero'}",
            row=row,
        )
    scored = int((~np.isnan(table.rewards)).sum())
    if len(single) < scored or "single_member_group" in spec.options:
        return
    each = f"each of the {scored} rollouts" if scored > 1 else "the only rollout"
    raise DataError(
        f"{each} is alone in its group ({rollout}), so with preset={spec.rules.name!r} every advantage is 0 and "
        f"nothing is learned; {remedy}; or pass an AdvantageSpec with options={{'single_member_group': 'zero'}} if "
        "zeros are intended",
        row=row,
    )


def describe_group_sizes(table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec) -> str | None:
    """Effect of the preset on groups of one or of different sizes, for a warning; None if there is none."""
    rule, entry = spec.single_member_rule, spec.entry
    if rule is None or entry is None or "single_member_group" in spec.options or entry.own_single_rule:
        return None
    if _one_whole_group(spec, labels):
        sizes = set(Counter(labels).values())
        return (
            f"groups have {min(sizes)} to {max(sizes)} rollouts, so preset={spec.rules.name!r} treats the whole "
            "rollout batch as one group"
        )
    single = _single_members(table, labels)
    if not len(single) or rule == "raise":
        return None
    row = int(single[0])
    return (
        f"{len(single)} of {len(table)} rollouts are alone in their group (the first is {table.ids[row]!r} of group "
        f"{table.groups[row]!r}), and preset={spec.rules.name!r} gives them "
        f"{'an advantage of 0' if rule == 'zero' else 'their reward as advantage'}"
    )


def _one_whole_group(spec: AdvantageSpec, labels: Sequence[str]) -> bool:
    """True if the preset treats groups of these sizes as one."""
    entry = spec.entry
    whole = entry is not None and entry.whole_batch and spec.rules.unequal == "batch"
    return whole and len(set(Counter(labels).values())) > 1


def _single_members(table: RolloutTable, labels: Sequence[str]) -> Ints:
    """Rollouts with a reward whose group has no other one with a reward."""
    scored = ~np.isnan(table.rewards)
    counts = Counter(label for label, there in zip(labels, scored.tolist()) if there)
    alone = np.array([counts[label] == 1 for label in labels], np.bool_)
    return np.flatnonzero(alone & scored)


def _row_bytes(ragged: Ragged) -> list[bytes]:
    """Rows as bytes, equal if the rows are."""
    data = ragged.values.tobytes()
    ends = (ragged.offsets * ragged.values.dtype.itemsize).tolist()
    return [data[low:high] for low, high in pairwise(ends)]
