"""Advantages of a whole rollout batch, computed before it is split: ranks and minibatches change no number."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock._suggest import check_options, did_you_mean, named_options
from penstock.arrays.ragged import Ragged
from penstock.batching.backends.operations import operations_of
from penstock.errors import ConfigError, DataError
from penstock.rl import advantages as known
from penstock.rl.advantages.estimators import ESTIMATORS, EstimatorEntry, EstimatorFunction, TokenInputs
from penstock.rl.advantages.losses import divisors_of
from penstock.rl.advantages.presets import PRESETS, Preset
from penstock.rl.rollout import RolloutTable

logger = logging.getLogger(__name__)

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_OWN_ARGUMENTS = {
    *("rewards", "groups", "values", "mask", "lengths", "baselines"),
    *("kl", "beta", "gamma", "lam", "preset", "reduce"),
}
"""Arguments of estimators that are set here, so `options` cannot set them."""
_SPELLED = {"single_member_group_scaled": "lone_scaled", "single_member_group": "lone"}
"""Spelling of names in saved states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KLPenalty:
    """KL penalty of the reward: `beta` times the estimated KL from the reference, per token or summed."""

    beta: float
    kind: str = "k1"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < float("inf"):
            raise ConfigError(f"beta must be a finite number of at least 0, got {self.beta!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlongPenalty:
    """DAPO's penalty for long responses, see `overlong_penalty`. Lengths are those before truncation."""

    max_length: int
    buffer: int
    penalty: float = 1.0

    def __post_init__(self) -> None:
        known.overlong_penalty([0], self.max_length, self.buffer, penalty=self.penalty)


@named_options
@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageSpec:
    """Estimator of advantages, its conventions, and changes of the rewards before it.

        AdvantageSpec(estimator="gae", gamma=0.99, lam=0.95, kl=KLPenalty(beta=0.05))

    `estimator` is the name of a registered estimator (`penstock.rl.advantages.ESTIMATORS`) or its function; or a
    function of your own, called as `estimator(rewards, groups, mask=mask, **options)` with NumPy arrays, returning
    (rows,) or (rows, tokens).
    """

    estimator: str | EstimatorFunction = "grpo"
    preset: str | Preset = "penstock"
    gamma: float = 1.0
    lam: float = 1.0
    whiten: bool | None = None
    """Whiten advantages over the rollout batch; None: as registered, which is True for `gae`."""
    kl: KLPenalty | None = None
    overlong: OverlongPenalty | None = None
    aggregation: str | None = None
    """Divisor of the loss, see `loss_denominators`; None: the preset's, or "dr-grpo" for `dr_grpo` if the longest
    allowed response is known."""
    max_length: int | None = None
    """Longest allowed response, which divides Dr. GRPO's loss."""
    both_rewards: Literal["error", "add"] = "error"
    """A response reward next to token rewards with another sum: an error, or added to the reward of the last token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keywords of the estimator: `{"scale": "batch"}`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", dict(self.options))
        entry = self.entry
        if entry is not None:
            allowed = sorted(inspect.signature(entry.function).parameters.keys() - _OWN_ARGUMENTS)
            check_options(self.options, allowed, where=f"estimator {entry.name!r}")
        elif not callable(self.estimator):
            raise ConfigError(
                f"unknown estimator {self.estimator!r}{did_you_mean(str(self.estimator), ESTIMATORS)}; pass one of "
                f"{', '.join(sorted(ESTIMATORS))}, or a function"
            )
        if self.both_rewards not in ("error", "add"):
            raise ConfigError(f"both_rewards must be 'error' or 'add', got {self.both_rewards!r}")
        known.loss_denominators([[1]], self.aggregation, preset=self.preset, max_length=self.max_length or 1)

    @property
    def entry(self) -> EstimatorEntry | None:
        """Registered estimator; None for a function of your own."""
        if isinstance(self.estimator, str):
            return ESTIMATORS.get(self.estimator)
        return next((entry for entry in ESTIMATORS.values() if entry.function is self.estimator), None)

    @property
    def needs_groups(self) -> bool:
        """True if rewards are compared within groups; always True for a function of your own."""
        return self.entry is None or "groups" in self.entry.needs

    @property
    def single_member_rule(self) -> str | None:
        """Rule for groups of one; None if groups do not matter, or the rule is that of a function of your own."""
        entry = self.entry
        if entry is None or "groups" not in entry.needs:
            return None
        chosen = self.options.get("single_member_group")
        if chosen is not None or entry.own_single_rule:
            return chosen or "raise"
        return self.rules.single_member_rule(entry.scaled and self.options.get("scale", "group") == "group")

    @property
    def loss_aggregation(self) -> str | None:
        """Aggregation of the loss; None: the preset's."""
        if self.aggregation is None and self.entry is not None and self.entry.aggregation is not None:
            if self.max_length is not None:
                return self.entry.aggregation
            _log_missing_length(self.entry.name, self.rules.aggregation)
        return self.aggregation

    @property
    def rules(self) -> Preset:
        return self.preset if isinstance(self.preset, Preset) else PRESETS[self.preset]

    def describe(self) -> str:
        """Everything that the numbers depend on, as text for states."""
        function = self.estimator
        name = self.entry.name if self.entry else getattr(function, "__qualname__", type(function).__qualname__)
        facts = {
            "estimator": name,
            "preset": self.rules.name if self.rules == PRESETS.get(self.rules.name) else _state_spelling(self.rules),
            "gamma": self.gamma,
            "lam": self.lam,
            "whiten": self.whiten,
            "kl": self.kl,
            "overlong": repr(self.overlong).replace("OverlongPenalty(", "Overlong(") if self.overlong else None,
            "aggregation": self.aggregation,
            "max_length": self.max_length,
            "both_rewards": None if self.both_rewards == "error" else self.both_rewards,
            **{_SPELLED.get(option, option): value for option, value in self.options.items()},
        }
        return ", ".join(f"{key}={value}" for key, value in facts.items() if value is not None)


def _state_spelling(preset: Preset) -> str:
    """Representation of a preset of your own, with the field names that saved states have."""
    text = repr(preset).replace("keep_single_member_groups=", "keep_lone=")
    for name, spelled in _SPELLED.items():
        text = text.replace(f"{name}=", f"{spelled}=")
    return text


@lru_cache(maxsize=1)
def _log_missing_length(name: str, instead: str) -> None:
    """Logged once in a process."""
    logger.warning(
        "the loss of %s is divided by the longest allowed response, which is not set, so denominators are those of %s; "
        "pass max_response_length=, or AdvantageSpec(max_length=...), or choose an aggregation",
        name,
        instead,
    )


@dataclass(frozen=True, slots=True)
class AdvantageColumns:
    """Computed columns: per response token, and per rollout."""

    per_token: dict[str, Ragged]
    per_row: dict[str, Floats]


def compute_advantages(
    table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec, *, lengths: Ints | None = None
) -> AdvantageColumns:
    """Advantages of all rollouts of a table.

    `labels` names the group of each rollout, `lengths` are those of the responses before truncation.

    per token: `advantages`, `returns` if the estimator has them, `kl` if there is a penalty, `token_rewards` if rewards
    were put on tokens. per row: `shaped_rewards` if a penalty changed them, and `sequence_advantages` if the estimator
    has one number a response; then there are no `advantages` per token, unless they are whitened.
    """
    try:
        return _RolloutBatchAdvantages(table, labels, spec, lengths).columns()
    except DataError as error:
        if error.row is None or error.row >= len(table):
            raise
        row = error.row
        raise DataError(f"rollout {table.ids[row]!r} of group {table.groups[row]!r}: {error.reason}", row=row) from None


class _RolloutBatchAdvantages:
    """One rollout batch on its way through an estimator. Tokens are flat: those of all responses end to end."""

    def __init__(self, table: RolloutTable, labels: Sequence[str], spec: AdvantageSpec, lengths: Ints | None) -> None:
        self.table, self.labels, self.spec = table, labels, spec
        function = spec.estimator
        if (entry := spec.entry) is None:
            assert callable(function)
            entry = EstimatorEntry(name="", function=function, per="token", needs=("groups", "mask"))
        self.entry = entry
        self.offsets = table.response_ids.offsets - table.response_ids.offsets[0]
        self.lengths = table.response_ids.lengths
        self.mask = table.loss_mask.flat.astype(bool, copy=False)
        scored = ~np.isnan(table.rewards)
        if not scored.all():  # rows without a reward are excluded: no token of theirs is trained on
            self.mask = self.mask & scored[self.owners]
        self.kl = self._kl()
        self.penalty = self._overlong(self.lengths if lengths is None else lengths)
        self.per_sequence = entry.per == "row"
        """One advantage a response; the result of a function of your own may change it."""

    @cached_property
    def owners(self) -> Ints:
        """Response of each token."""
        return np.repeat(np.arange(len(self.table)), self.lengths)

    def columns(self) -> AdvantageColumns:
        spec, entry = self.spec, self.entry
        per_row: dict[str, Floats] = {}
        per_token: dict[str, Ragged] = {} if self.kl is None else {"kl": self._ragged(self.kl)}
        rewards, returns, of_rows = self.table.rewards + self.penalty, None, None
        whiten = entry.whiten if spec.whiten is None else spec.whiten
        if entry.rewards == "token":
            on_tokens = self._token_rewards(rewards)
            per_token["token_rewards"] = self._ragged(on_tokens)
            advantages, returns = self._from_tokens(on_tokens)
        else:
            if self.kl is not None and "kl" not in entry.needs:
                assert spec.kl is not None
                rewards = rewards - spec.kl.beta * self._sums(self.kl * self.mask)
            found = self._from_rows(rewards)
            if np.shape(found) == (len(self.table),) and not whiten:
                of_rows = np.where(self._supervised, np.asarray(found, np.float64), 0.0)
            else:
                advantages = self._on_flat_tokens(found, len(rewards))
        if not np.array_equal(rewards, self.table.rewards, equal_nan=True):
            per_row["shaped_rewards"] = rewards
        if of_rows is None:
            if whiten:
                advantages = known.whiten(advantages, self.mask, preset=spec.preset)
            per_token["advantages"] = self._ragged(advantages)
            if self.per_sequence:
                of_rows = np.zeros(len(self.table))
                of_rows[self.owners[self._last]] = np.asarray(advantages)[self._last]
        if of_rows is not None:
            per_row["sequence_advantages"] = of_rows
        if returns is not None:
            per_token["returns"] = self._ragged(returns)
        return AdvantageColumns(per_token, per_row)

    def _from_rows(self, rewards: Floats) -> Any:
        """Result of an estimator that takes one reward a response: one number a response, or padded tokens."""
        spec, entry = self.spec, self.entry
        given = dict(spec.options)
        if spec.entry is not None:
            # The rules of the loader have admitted rows without a reward or without a supervised token.
            given = {"preset": replace(spec.rules, empty="zero"), **given}
            if np.isnan(rewards).any():
                given["nan"] = "exclude"
        if "lengths" in entry.needs:
            given["lengths"] = np.maximum(self._sums(self.mask.astype(np.float64)), 1.0)
        if "mask" in entry.needs:
            given["mask"] = self._padded(self.mask)
        if "kl" in entry.needs and self.kl is not None and spec.kl is not None:
            given |= {"kl": self._padded(self.kl), "beta": spec.kl.beta}
        return entry.function(rewards, *([self.labels] if "groups" in entry.needs else []), **given)

    def _from_tokens(self, rewards: Floats) -> tuple[Floats, Floats | None]:
        """(advantages, returns) of an estimator that takes one reward a token."""
        spec, entry = self.spec, self.entry
        tokens = TokenInputs(
            rewards,
            self.offsets,
            self.mask,
            self.owners,
            spec.gamma,
            spec.lam,
            spec.preset,
            values=self._values() if "values" in entry.needs else None,
            baselines=self._baselines() if "baselines" in entry.needs else None,
        )
        if entry.ragged is not None:
            return entry.ragged(tokens, **{"empty": "zero", **spec.options})
        given = {"preset": replace(spec.rules, empty="zero"), "mask": self._padded(self.mask), **spec.options}
        given |= {name: getattr(spec, name) for name in ("gamma", "lam") if name in entry.needs}
        second = [self._padded(tokens.values)] if tokens.values is not None else []
        second += [tokens.baselines] if tokens.baselines is not None else []
        found = entry.function(self._padded(rewards), *second, **given)
        advantages, returns = found if isinstance(found, tuple) else (found, None)
        rows = len(self.table)
        return self._on_flat_tokens(advantages, rows), None if returns is None else self._on_flat_tokens(returns, rows)

    def _on_flat_tokens(self, found: Any, rows: int) -> Floats:
        """Result of an estimator, one number a row or a token, on flat tokens."""
        numbers = np.asarray(found, np.float64)
        if numbers.shape == (rows,):
            self.per_sequence = True
            return np.where(self.mask, numbers[self.owners], 0.0)
        if numbers.shape != (rows, self._width):
            raise ConfigError(
                f"the estimator {self.spec.describe()} returned shape {numbers.shape} for {rows} rewards and a mask of "
                f"{(rows, self._width)}; expected one number a row, or one a token"
            )
        return np.where(self.mask, numbers[self._front], 0.0)

    def _token_rewards(self, rewards: Floats) -> Floats:
        """Token rewards as given, or the reward of the response on its last token; less the KL penalty."""
        table, last = self.table, self._last
        if table.token_rewards is None:
            found = np.zeros(len(self.mask))
            at_end = rewards
        else:
            found = self._on_supervised(table.token_rewards.flat.astype(np.float64))
            at_end = self.penalty
        found[last] += at_end[self.owners[last]]
        if self.kl is not None and self.spec.kl is not None:
            found -= self.spec.kl.beta * np.where(self.mask, self.kl, 0.0)
        return found

    @cached_property
    def _supervised(self) -> npt.NDArray[np.bool_]:
        """True for responses with a supervised token."""
        found = self.lengths > 0
        if found.any():
            found[found] = np.logical_or.reduceat(self.mask, self.offsets[:-1][found])
        return found

    @cached_property
    def _last(self) -> Ints:
        """Last supervised token of each response that has one."""
        starts: Ints = self.offsets[:-1][self._supervised]
        if not len(starts):
            return starts
        places = np.where(self.mask, np.arange(len(self.mask)), -1)
        found: Ints = np.maximum.reduceat(places, starts)  # responses between two of them have no supervised token
        return found

    def _on_supervised(self, rewards: Floats) -> Floats:
        """Rewards with those of masked tokens moved to the last supervised token before them, or to the first after.

        So no reward is lost, and none is credited to a token that came later.
        """
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
            raise ConfigError(f"a KL penalty needs logprobs and ref_logprobs; the rollouts have no {missing}")
        ours, theirs = (column.flat.astype(np.float64) for column in (table.logprobs, table.ref_logprobs))
        return np.where(self.mask, known.kl_estimate(ours, theirs, penalty.kind, preset=self.spec.preset), 0.0)

    def _overlong(self, lengths: Ints) -> Floats:
        rule = self.spec.overlong
        if rule is None:
            return np.zeros(len(self.table))
        tokens = lengths.astype(np.float64)
        return np.asarray(known.overlong_penalty(tokens, rule.max_length, rule.buffer, penalty=rule.penalty))

    def _values(self) -> Floats:
        if self.table.values is None:
            raise ConfigError(f"{self.entry.name} needs the values of a critic; the rollouts have no `values`")
        return self.table.values.flat.astype(np.float64)

    def _baselines(self) -> Floats:
        """Rewards of the greedy answers, which rollouts carry in their metadata."""
        found = [entry.get("baseline") for entry in self.table.metadata]
        for row, value in enumerate(found):
            if not isinstance(value, (int, float, np.number)):
                raise DataError(
                    f"{self.entry.name} needs the reward of the greedy answer as metadata['baseline'], got {value!r}",
                    row=row,
                )
        return np.array(found, np.float64)

    def _sums(self, values: Floats) -> Floats:
        """Sum of each response."""
        found: Floats = np.bincount(self.owners, values, len(self.table)).astype(np.float64)
        return found

    @property
    def _width(self) -> int:
        return max(1, int(self.lengths.max(initial=1)))

    @property
    def _front(self) -> npt.NDArray[np.bool_]:
        """(rows, tokens): True for the tokens of padded responses."""
        return np.arange(self._width) < self.lengths[:, None]

    def _padded(self, flat: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = np.zeros((len(self.lengths), self._width), flat.dtype)
        found[self._front] = flat
        return found

    def _ragged(self, flat: Any) -> Ragged:
        return Ragged(np.asarray(flat).astype(np.float32, copy=False), self.offsets)


def denominators(supervised: Ints, spec: AdvantageSpec, *, ranks: int = 1) -> Floats:
    """Divisors of the token losses of each row of a minibatch; `supervised` counts the tokens of each row."""
    arrays, lengths = operations_of(supervised), supervised.astype(np.float64)
    kind, most = spec.loss_aggregation, spec.max_length
    return np.asarray(divisors_of(arrays, lengths, kind, spec.rules, max_length=most, ranks=ranks))


def row_sums(column: Ragged) -> Floats:
    """Sum of each row."""
    owners = np.repeat(np.arange(len(column)), column.lengths)
    found: Floats = np.bincount(owners, column.flat, len(column)).astype(np.float64)
    return found


def with_final_rewards(table: RolloutTable) -> RolloutTable:
    """Table with the reward of each response added to that of its last token; rewards are the sums of both."""
    column = table.token_rewards
    assert column is not None
    rows = np.flatnonzero(~np.isnan(table.rewards) & (column.lengths > 0))
    rewards, values = table.rewards.copy(), column.values.copy()
    rewards[rows] += row_sums(column)[rows]
    values[column.offsets[rows + 1] - 1] += table.rewards[rows].astype(values.dtype)
    return replace(table, rewards=rewards, token_rewards=Ragged(values, column.offsets))


def check_rewards(table: RolloutTable) -> None:
    """Refuse rollouts whose reward is not the sum of their token rewards."""
    column = table.token_rewards
    if column is None:
        return
    sums = row_sums(column)
    apart = ~np.isnan(table.rewards) & ~np.isclose(sums, table.rewards, 1e-4, 1e-5) & (column.lengths > 0)
    if apart.any():
        row = int(np.argmax(apart))
        more = f" (and {int(apart.sum()) - 1} more)" if apart.sum() > 1 else ""
        raise DataError(
            f"rollout {table.ids[row]!r} of group {table.groups[row]!r}{more} has a reward of {table.rewards[row]:g} "
            f"and token rewards that sum to {sums[row]:g}; give one of the two, or pass estimator=AdvantageSpec("
            "both_rewards='add', ...) to add the reward to that of the last token",
            row=row,
        )
