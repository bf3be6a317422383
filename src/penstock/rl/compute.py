"""Advantages of a whole rollout batch, before it is cut: so neither ranks nor minibatches change a number."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.arrays.ragged import Ragged
from penstock.errors import ConfigError, DataError
from penstock.rl import advantages as known
from penstock.rl.advantages import Preset
from penstock.rl.rollout import RolloutTable

__all__ = [
    "ESTIMATORS",
    "PER_ROW",
    "PER_TOKEN",
    "AdvantageInputs",
    "AdvantageSpec",
    "Estimator",
    "KLPenalty",
    "OverlongPenalty",
    "check_rewards",
    "compute",
    "denominators",
    "summed",
    "with_final_rewards",
]


logger = logging.getLogger(__name__)

Estimator = Callable[..., Any]

PER_ROW = ("dr_grpo", "gpg", "grpo", "opo", "pass_at_k", "rloo")
"""Estimators with one number for each response."""
PER_TOKEN = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "reward_to_go")
ESTIMATORS = tuple(sorted((*PER_ROW, *PER_TOKEN)))
_OURS = {
    "rewards",
    "groups",
    "values",
    "mask",
    "lengths",
    "baselines",
    "kl",
    "beta",
    "gamma",
    "lam",
    "preset",
    "reduce",
}
"""What estimators are given here, so that nobody else may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """`beta` times the estimated KL from the reference is taken off the reward: of each token, or of the sum."""

    beta: float
    kind: str = "k1"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < float("inf"):
            raise ConfigError(f"beta must be a number from 0 on, got {self.beta!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongPenalty:
    """DAPO's penalty for long responses, see `overlong_penalty`. They are as long as they came, before any cut."""

    max_length: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        known.overlong_penalty([0], self.max_length, self.buffer, penalty=self.penalty)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSpec:
    """How advantages are computed.

        AdvantageSpec(estimator="gae", gamma=0.99, lam=0.95, kl=KLPenalty(beta=0.05))

    `estimator` is a function of `penstock.rl.advantages` or its name, or a function of your own, called as
    `grpo` is: `estimator(rewards, groups, mask=mask)` with NumPy arrays, returning (rows,) or (rows, tokens).
    """

    estimator: str | Estimator = "grpo"
    preset: str | Preset = "penstock"
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool | None = None
    """Advantages whitened over the rollout batch; None: those of `gae`, as PPO has it."""
    kl: KLPenalty | None = None
    overlong: OverlongPenalty | None = None
    aggregation: str | None = None
    """What the loss is divided by, see `loss_denominators`; None: as the preset has it, and Dr. GRPO by its own if the
    longest that a response may be is known."""
    max_length: int | None = None
    """The longest a response may be, which Dr. GRPO's loss is divided by."""
    both_rewards: Literal["error", "add"] = "error"
    """A reward of the response, and rewards of its tokens with another sum: an error, since nobody can tell whether one
    stands for the other; or the first is added to that of the last token, as a final score to rewards of steps."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the estimator besides: `{"scale": "batch"}`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options))
        name = self.name
        if name is None:
            if not callable(self.estimator):
                raise ConfigError(
                    f"there is no estimator {self.estimator!r}{did_you_mean(str(self.estimator), ESTIMATORS)}; "
                    f"there are {', '.join(ESTIMATORS)}, or pass a function"
                )
        else:
            allowed = sorted(inspect.signature(getattr(known, name)).parameters.keys() - _OURS)
            for option in self.options:
                if option not in allowed:
                    raise ConfigError(
                        f"{name} has no option {option!r}{did_you_mean(option, allowed)}; it has {', '.join(allowed)}"
                    )
        if self.both_rewards not in ("error", "add"):
            raise ConfigError(f"both_rewards is 'error' or 'add', got {self.both_rewards!r}")
        known.loss_denominators([[1]], self.aggregation, preset=self.preset, max_length=self.max_length or 1)

    @property
    def name(self) -> str | None:
        """Of a known estimator; None of others."""
        if isinstance(self.estimator, str):
            return self.estimator if self.estimator in ESTIMATORS else None
        return next((name for name in ESTIMATORS if getattr(known, name) is self.estimator), None)

    @property
    def needs_groups(self) -> bool:
        """Whether rewards are compared within groups; of a function of your own it is taken for granted."""
        return self.name is None or self.name in PER_ROW or self.name == "reinforce_plus_plus_baseline"

    @property
    def lone_rule(self) -> str | None:
        """What the preset does with groups of one; None where groups do not matter, or nobody knows."""
        if self.name is None or not self.needs_groups or self.name == "pass_at_k":
            return None
        scaled = self.name == "rloo" or (self.name == "grpo" and self.options.get("scale", "group") == "group")
        return self.rules.lone_scaled if scaled else self.rules.lone

    @property
    def divided_by(self) -> str | None:
        """The aggregation of the loss; None: the preset's."""
        if self.aggregation is None and self.name == "dr_grpo":
            if self.max_length is not None:
                return "dr-grpo"
            _tell_missing_length(self.rules.aggregation)
        return self.aggregation

    @property
    def rules(self) -> Preset:
        return self.preset if isinstance(self.preset, Preset) else known.PRESETS[self.preset]

    def described(self) -> str:
        """What the numbers depend on, for a state."""
        called = self.name or getattr(self.estimator, "__qualname__", type(self.estimator).__qualname__)
        facts = {
            "estimator": called,
            "preset": self.rules.name if self.rules == known.PRESETS.get(self.rules.name) else self.rules,
            "gamma": self.gamma,
            "lam": self.lam,
            "whiten": self.whiten,
            "kl": self.kl,
            # The spelling that saved states hold.
            "overlong": repr(self.overlong).replace("OverlongPenalty(", "Overlong(") if self.overlong else None,
            "aggregation": self.aggregation,
            "max_length": self.max_length,
            "both_rewards": None if self.both_rewards == "error" else self.both_rewards,
            **self.options,
        }
        return ", ".join(f"{key}={value}" for key, value in facts.items() if value is not None)


@lru_cache(maxsize=1)
def _tell_missing_length(instead: str) -> None:
    """Once in a process."""
    logger.warning(
        "Dr. GRPO divides its loss by the longest a response may be, which nobody has said: denominators are those of "
        "%s; pass max_response_length=, or AdvantageSpec(max_length=...), or choose an aggregation",
        instead,
    )


Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What was computed: per response token, and per rollout."""

    per_token: dict[str, Ragged]
    per_row: dict[str, Floats]


def compute(
    table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec, *, lengths: npt.NDArray[np.int64] | None = None
) -> AdvantageInputs:
    """Advantages of all rollouts of a table; `labels` says which belong together, `lengths` how long the responses were
    before they were cut, if they were.

    per token: `advantages`, `returns` where the estimator has them, `kl` where there is a penalty, `token_rewards`
    where rewards were put on tokens. per row: `shaped_rewards`, if a penalty changed them, and `sequence_advantages`
    where the estimator has one number for a response.
    """
    try:
        return _Computing(table, labels, spec, lengths).columns()
    except DataError as error:
        if error.row is None or error.row >= len(table):
            raise
        row = error.row
        raise DataError(f"rollout {table.ids[row]!r} of group {table.groups[row]!r}: {error.reason}", row=row) from None


class _Computing:
    """One rollout batch on its way through an estimator. Tokens are flat: those of all responses end to end."""

    def __init__(
        self, table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec, lengths: npt.NDArray[np.int64] | None
    ) -> None:
        self.table, self.labels, self.spec = table, labels, spec
        self.offsets = table.response_ids.offsets - table.response_ids.offsets[0]
        self.lengths = table.response_ids.lengths
        self.owners = np.repeat(np.arange(len(table)), self.lengths)
        self.mask = table.loss_mask.flat.astype(bool)
        scored = ~np.isnan(table.rewards)
        if not scored.all():  # rows without a reward: as `missing_rewards="exclude"` wants it, nothing is learned
            self.mask = self.mask & scored[self.owners]
        self.kl = self._kl()
        self.penalty = self._overlong(self.lengths if lengths is None else lengths)
        self.per_sequence = spec.name in PER_ROW
        """Whether there is one advantage for a response; of a function that nobody knows this is seen later."""

    def columns(self) -> AdvantageInputs:
        spec, name = self.spec, self.spec.name
        per_row: dict[str, Floats] = {}
        per_token: dict[str, Ragged] = {} if self.kl is None else {"kl": self._ragged(self.kl)}
        rewards, returns = self.table.rewards + self.penalty, None
        if name in PER_TOKEN and name != "reinforce_plus_plus_baseline":
            on_tokens = self._token_rewards(rewards)
            per_token["token_rewards"] = self._ragged(on_tokens)
            advantages, returns = self._of_tokens(name, on_tokens)
        else:
            if self.kl is not None and name != "reinforce_plus_plus_baseline":
                assert spec.kl is not None
                rewards = rewards - spec.kl.beta * self._sums(self.kl * self.mask)
            advantages = self._of_rows(name, rewards)
        if not np.array_equal(rewards, self.table.rewards, equal_nan=True):
            per_row["shaped_rewards"] = rewards
        if spec.whiten or (spec.whiten is None and name == "gae"):
            advantages = known.whiten(advantages, self.mask, preset=spec.preset)
        per_token["advantages"] = self._ragged(advantages)
        if self.per_sequence:
            per_row["sequence_advantages"] = self._of_last_tokens(np.asarray(advantages))
        if returns is not None:
            per_token["returns"] = self._ragged(returns)
        return AdvantageInputs(per_token, per_row)

    def _of_rows(self, name: str | None, rewards: Floats) -> Floats:
        """Estimators that take a reward for each response; their advantages on tokens."""
        spec = self.spec
        # Rows without a token to learn, or without a reward, were let in by rule.
        given: dict[str, Any] = {"preset": replace(spec.rules, empty="zero"), **spec.options}
        if np.isnan(rewards).any():
            given["nan"] = "exclude"
        if name in PER_ROW:
            if name == "opo":
                given["lengths"] = np.maximum(self._sums(self.mask.astype(np.float64)), 1.0)
            return self._on_tokens(getattr(known, name)(rewards, self.labels, **given))
        estimator: Estimator
        if name is not None:
            estimator = getattr(known, name)
            if self.kl is not None and spec.kl is not None:
                given |= {"kl": self._padded(self.kl), "beta": spec.kl.beta}
        else:
            assert callable(spec.estimator)
            estimator, given = spec.estimator, dict(spec.options)
        found = np.asarray(estimator(rewards, self.labels, mask=self._padded(self.mask), **given), np.float64)
        if found.shape == (len(rewards),):
            self.per_sequence = True
            return self._on_tokens(found)
        if found.shape != (len(rewards), self._width):
            raise ConfigError(
                f"the estimator {spec.described()} returned shape {found.shape} for {len(rewards)} rewards and a mask "
                f"of {(len(rewards), self._width)}; one number for each row, or for each token, was expected"
            )
        flat: Floats = found[self._front]
        return np.where(self.mask, flat, 0.0)

    def _of_tokens(self, name: str | None, rewards: Floats) -> tuple[Floats, Floats | None]:
        """Estimators that take a reward for each token: (advantages, returns)."""
        spec = self.spec
        given: dict[str, Any] = {"mask": self.mask, "preset": spec.preset, "empty": "zero", **spec.options}
        if name == "gae":
            if self.table.values is None:
                raise ConfigError("gae needs the values of a critic, and the rollouts have none; give `values`")
            values = self.table.values.flat.astype(np.float64)
            advantages, returns = known.gae_ragged(
                rewards, values, self.offsets, gamma=spec.gamma, lam=spec.lam, **given
            )
            return advantages, returns
        # The reward to go is GAE of values that are all 0.
        zeros = np.zeros(len(rewards))
        _, returns = known.gae_ragged(rewards, zeros, self.offsets, gamma=spec.gamma, lam=1.0, **given)
        if name == "reinforce_plus_plus":
            return known.whiten(returns, self.mask, preset=spec.preset), returns
        if name == "remax":
            return np.where(self.mask, returns - self._baselines()[self.owners], 0.0), returns
        return returns, returns

    def _token_rewards(self, rewards: Floats) -> Floats:
        """What was given for tokens, or the reward of the response on its last token; less the KL penalty."""
        table, last = self.table, self._last
        if table.token_rewards is None:
            found = np.zeros(len(self.mask))
            at_end = rewards
        else:
            found = self._on_learned(table.token_rewards.flat.astype(np.float64))
            at_end = self.penalty
        found[last] += at_end[self.owners[last]]
        if self.kl is not None and self.spec.kl is not None:
            found -= self.spec.kl.beta * np.where(self.mask, self.kl, 0.0)
        return found

    @property
    def _last(self) -> npt.NDArray[np.int64]:
        """The last token to learn of each response that has one."""
        tokens = np.flatnonzero(self.mask)
        owners = self.owners[tokens]
        return tokens[np.append(np.flatnonzero(np.diff(owners)), len(owners) - 1)] if len(tokens) else tokens

    def _of_last_tokens(self, tokens: Floats) -> Floats:
        found = np.zeros(len(self.table))
        found[self.owners[self._last]] = tokens[self._last]
        return found

    def _on_learned(self, rewards: Floats) -> Floats:
        """Rewards of masked tokens, such as those at the end of a tool's answer, go to the last token to learn before
        them, or to the first where there is none before: no reward is lost, and none is of what came after."""
        found = np.where(self.mask, rewards, 0.0)
        stray = np.flatnonzero(~self.mask & (rewards != 0))
        if len(stray):
            places = np.arange(len(self.mask))
            before = np.maximum.accumulate(np.where(self.mask, places, -1))[stray]
            after = np.minimum.accumulate(np.where(self.mask, places, len(places))[::-1])[::-1][stray]
            rows = self.owners[stray]
            inside = before >= self.offsets[rows]
            there = inside | (after < self.offsets[rows + 1])
            np.add.at(found, np.where(inside, before, after)[there], rewards[stray[there]])
        return found

    def _kl(self) -> Floats | None:
        table, penalty = self.table, self.spec.kl
        if penalty is None:
            return None
        if table.logprobs is None or table.ref_logprobs is None:
            missing = "logprobs" if table.logprobs is None else "ref_logprobs"
            raise ConfigError(f"a KL penalty needs log-probs and reference log-probs; the rollouts have no {missing}")
        ours, theirs = (column.flat.astype(np.float64) for column in (table.logprobs, table.ref_logprobs))
        return np.where(self.mask, known.kl_estimate(ours, theirs, penalty.kind, preset=self.spec.preset), 0.0)

    def _overlong(self, lengths: npt.NDArray[np.int64]) -> Floats:
        rule = self.spec.overlong
        if rule is None:
            return np.zeros(len(self.table))
        tokens = lengths.astype(np.float64)
        return np.asarray(known.overlong_penalty(tokens, rule.max_length, rule.buffer, penalty=rule.penalty))

    def _baselines(self) -> Floats:
        """ReMax: the reward of the greedy answer, which rollouts carry in their metadata."""
        found = [entry.get("baseline") for entry in self.table.metadata]
        for row, value in enumerate(found):
            if not isinstance(value, (int, float, np.number)):
                raise DataError(
                    f"remax needs the reward of the greedy answer as metadata['baseline'], got {value!r}", row=row
                )
        return np.array(found, np.float64)

    def _sums(self, values: Floats) -> Floats:
        """Of each response."""
        found: Floats = np.bincount(self.owners, values, len(self.table)).astype(np.float64)
        return found

    def _on_tokens(self, rows: Any) -> Floats:
        return np.where(self.mask, np.asarray(rows, np.float64)[self.owners], 0.0)

    @property
    def _width(self) -> int:
        return max(1, int(self.lengths.max(initial=1)))

    @property
    def _front(self) -> npt.NDArray[np.bool_]:
        """(rows, tokens): where the tokens of padded responses stand."""
        return np.arange(self._width) < self.lengths[:, None]

    def _padded(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = np.zeros((len(self.lengths), self._width), flat.dtype)
        found[self._front] = flat
        return found

    def _ragged(self, flat: Any) -> Ragged:
        return Ragged(np.asarray(flat).astype(np.float32, copy=False), self.offsets)


def denominators(learned: npt.NDArray[np.int64], spec: AdvantageSpec, *, ranks: int = 1) -> Floats:
    """For each row of a minibatch, what the loss of its tokens is divided by; `learned` is how many those are."""
    mask = np.arange(max(1, operator.index(learned.max(initial=1)))) < learned[:, None]
    return np.asarray(
        known.loss_denominators(
            mask, spec.divided_by, preset=spec.preset, max_length=spec.max_length, ranks=ranks, empty="zero"
        )
    )


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
