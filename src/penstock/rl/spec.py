"""How advantages are to be computed: the estimator, its conventions, and what changes rewards before it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError
from penstock.rl import advantages as known
from penstock.rl.advantages import Preset

__all__ = ["ESTIMATORS", "PER_ROW", "PER_TOKEN", "AdvantageSpec", "Estimator", "KLPenalty", "OverlongPenalty"]

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
