"""The options that only rollouts have: what makes a rollout batch, what is left out of it, and how often it is used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import index
from typing import Any, Literal

import numpy.typing as npt

from penstock._suggest import did_you_mean
from penstock.batching.options import LoaderOptions, Options, flat_options
from penstock.errors import ConfigError
from penstock.rl.advantages import Preset
from penstock.rl.layout import RolloutForm

__all__ = ["RolloutKeywords", "RolloutOptions", "read_rollout_options"]

OnStale = Literal["drop", "keep", "flag"]
MissingRewards = Literal["error", "zero", "exclude", "drop"]
_FOREIGN = {
    "max_tokens": "cut batches into parts of so many tokens with micro_batch_tokens=",
    "sharding": "rollouts are dealt to ranks by their lengths",
    "padding_side": "prompts are padded at the left and responses at the right",
    "cache_dir": "nothing is prepared",
    "verify": "nothing is prepared",
}


class RolloutKeywords(LoaderOptions, total=False):
    """The keywords of `RolloutOptions` and `Options`, for the signature of the loader."""

    rollout_batch_size: int | None
    group_size: int | None
    max_pending_appends: int | None
    ppo_epochs: int
    keep_groups: bool
    policy_version: int | None
    max_staleness: int | None
    on_stale: OnStale
    drop_zero_variance: bool
    group_prompts: Literal["equal", "any"]
    duplicate_ids: Literal["error", "drop"]
    missing_rewards: MissingRewards | None
    all_masked: Literal["error", "drop", "keep"] | None
    padding: Literal["sides", "free"]
    max_prompt_length: int | None
    max_response_length: int | None
    prompt_truncation: Literal["error", "left", "right"]
    response_truncation: Literal["error", "right"]
    micro_batch_tokens: int | None
    gradients: Literal["summed", "averaged"]


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How rollouts become batches."""

    rollout_batch_size: int | None = None
    """Rollouts that advantages are computed over, and that are used `ppo_epochs` times before the next ones are: the
    fewest whole groups with so many. None: all there are, of a list or a file; a live source needs a number."""
    group_size: int | None = None
    """Of a live source: a group is whole when so many rollouts of it came, in however many appends. None: the rollouts
    of one append belong together, and a group is whole as it comes."""
    max_pending_appends: int | None = None
    """With `group_size`: a group that is not whole when so many appends came after its first is dropped and counted,
    since whoever was to append the rest has died. None: it is waited for, and a queue keeps all that came after it."""
    ppo_epochs: int = 1
    keep_groups: bool = True
    """Whether the rollouts of a group come in one minibatch. Advantages are the same either way."""
    policy_version: int | None = None
    """Of the policy that is trained, at the beginning; afterwards set `loader.policy_version`."""
    max_staleness: int | None = None
    """Rollouts of a policy that is more versions old than this are stale."""
    on_stale: OnStale = "drop"
    """Groups with stale rollouts are dropped and counted; kept; or kept with `metadata["stale"]` set, for importance
    weights."""
    drop_zero_variance: bool = False
    """DAPO's dynamic sampling: groups whose rewards are all alike are dropped and counted. Of a live source more are
    taken until the rollout batch is full."""
    group_prompts: Literal["equal", "any"] = "equal"
    """Rollouts of one group with different prompts: an error, or passed on: turns of one episode, say."""
    duplicate_ids: Literal["error", "drop"] = "error"
    """Of a live source: a rollout whose id came before in the same rollout batch, as an append that was sent twice
    makes it, is an error, or dropped and counted. In a list or a file it is always an error."""
    missing_rewards: MissingRewards | None = None
    """A rollout without a reward (None or NaN): an error; a reward of 0; kept, outside of all statistics and with an
    advantage of 0 ("exclude"); or dropped and counted. None: an error, or excluded where the preset does so."""
    all_masked: Literal["error", "drop", "keep"] | None = None
    """A rollout without a token to learn; None: an error, or kept where the preset has zeros for it."""
    padding: Literal["sides", "free"] = "sides"
    max_prompt_length: int | None = None
    max_response_length: int | None = None
    prompt_truncation: Literal["error", "left", "right"] = "error"
    response_truncation: Literal["error", "right"] = "error"
    micro_batch_tokens: int | None = None
    """`metadata["micro_batches"]` has the rows of a batch in parts of at most so many tokens, padding included; every
    rank has equally many."""
    gradients: Literal["summed", "averaged"] = "summed"
    """What the trainer does with the gradients of ranks. Where they are averaged, as DDP does, denominators are divided
    by the number of ranks, so that the average is the sum that is meant."""

    def __post_init__(self) -> None:
        least = {"rollout_batch_size": 1, "group_size": 1, "policy_version": 0, "max_staleness": 0}
        for name, low in {**least, "max_pending_appends": 1, "ppo_epochs": 1, "micro_batch_tokens": 1}.items():
            value = getattr(self, name)
            if value is None and name != "ppo_epochs":
                continue
            try:
                fits = not isinstance(value, bool) and index(value) >= low
            except TypeError:
                fits = False
            if not fits:
                raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")
        for name in ("keep_groups", "drop_zero_variance"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is True or False, got {getattr(self, name)!r}")
        choices: dict[str, tuple[Any, ...]] = {
            "on_stale": ("drop", "keep", "flag"),
            "group_prompts": ("equal", "any"),
            "duplicate_ids": ("error", "drop"),
            "missing_rewards": ("error", "zero", "exclude", "drop", None),
            "all_masked": ("error", "drop", "keep", None),
            "gradients": ("summed", "averaged"),
        }
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                names = [choice for choice in allowed if choice is not None]
                raise ConfigError(
                    f"{name} is one of {', '.join(names)}, got {value!r}{did_you_mean(str(value), names)}"
                )

    def on_missing(self, rules: Preset) -> MissingRewards:
        """What is done with a rollout without a reward."""
        return self.missing_rewards or ("exclude" if rules.nan == "exclude" else "error")

    def on_empty(self, rules: Preset) -> Literal["error", "drop", "keep"]:
        """What is done with a rollout without a token to learn."""
        return self.all_masked or ("keep" if rules.empty == "zero" else "error")

    def form(self, options: Options, pad_id: int, integer: npt.DTypeLike) -> RolloutForm:
        """What batches look like."""
        return RolloutForm(
            padding="free" if options.padding_free else self.padding,
            pad_id=pad_id if options.pad_id is None else options.pad_id,
            pad_to_multiple_of=options.pad_to_multiple_of or 1,
            max_prompt_length=self.max_prompt_length,
            max_response_length=self.max_response_length,
            prompt_truncation=self.prompt_truncation,
            response_truncation=self.response_truncation,
            integer=integer,
            fields=options.wanted_fields,
        )


def read_rollout_options(given: Mapping[str, Any]) -> tuple[Options, RolloutOptions]:
    """The options of every loader, and those of rollouts; an unknown one is an error that names the nearest."""
    given = flat_options(given)
    shared = [option.name for option in fields(Options) if option.name not in _FOREIGN]
    own = [option.name for option in fields(RolloutOptions)]
    for name in given:
        if name in _FOREIGN:
            raise ConfigError(f"{name} is no option for rollouts: {_FOREIGN[name]}")
        if name not in shared and name not in own:
            known = [*own, *shared]
            raise TypeError(f"no option is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return (
        Options(**{name: value for name, value in given.items() if name in shared}),
        RolloutOptions(**{name: value for name, value in given.items() if name in own}),
    )
