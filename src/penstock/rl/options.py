"""Options of `RolloutDataLoader` beyond those of every loader, in four groups.

A loader takes the fields by name (`max_staleness=1`), or a whole group (`staleness=Staleness(max_staleness=1)`).
"""

# ruff: noqa: RUF009 - option() makes a dataclass field

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import index
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from penstock._suggest import check_options, did_you_mean, named_options
from penstock.batching.options import Options, flat_options, option, option_names
from penstock.errors import ConfigError
from penstock.rl.advantages.presets import Preset
from penstock.rl.collate import RolloutForm

OnStale: TypeAlias = Literal["drop", "keep", "flag"]
MissingRewards: TypeAlias = Literal["error", "zero", "exclude", "drop"]
AllMasked: TypeAlias = Literal["error", "drop", "keep"]

NOT_FOR_ROLLOUTS = {
    "max_tokens": "split batches with micro_batch_tokens=",
    "sharding": "rollouts are balanced over ranks by length",
    "context": "advantages and masks are by token of whole sequences; slice them in the trainer",
    "padding_side": "prompts are padded on the left and responses on the right",
    "cache_dir": "rollouts are not cached",
    "cache": "rollouts are not cached",
    "progress": "rollouts are not prepared first",
    "verify": "rollouts are not read from a store",
    "on_error": "pass missing_rewards= and all_masked=, which are the rules for bad rollouts",
    "quarantine": "pass missing_rewards= and all_masked=, which are the rules for bad rollouts",
    "transforms": "change the rollouts before they are passed, or name their columns with columns=",
    "allow_empty": "leave the empty file out",
    "raw": "pass template=, add_bos= and add_eos= by themselves",
}


@named_options
@dataclass(frozen=True, kw_only=True)
class RolloutBatching:
    """Sizes of rollout batches, and their split into minibatches."""

    rollout_batch_size: int | None = option(
        None,
        "rollouts that advantages are computed over: the shortest run of whole groups with at least as many. "
        "None: all of a list or a file; a live source needs a number.",
    )
    group_size: int | None = option(
        None,
        "rollouts of a group. Of a list or a file without groups: each so many neighbours are one. Of a live source: a "
        "group is complete with so many, from any number of appends. None: rollouts with equal prompts, or of one "
        "append, belong together.",
    )
    max_pending_appends: int | None = option(
        None,
        "with `group_size`: drop a group that is incomplete this many appends after its first, because its "
        "producer may have died. None: wait for it, while a queue keeps everything that came after it.",
    )
    ppo_epochs: int = option(1, "passes over each rollout batch")
    keep_groups: bool = option(
        True,
        "keep the rollouts of a group in one minibatch. Advantages are the same either way.",
    )
    padding: Literal["sides", "free"] = option(
        "sides",
        "prompts padded on the left and responses on the right, or all rollouts end to end in one row",
    )
    micro_batch_tokens: int | None = option(
        None,
        'split each batch into `metadata["micro_batches"]` of at most this many tokens, padding included; every '
        "rank gets the same number of them",
    )
    gradients: Literal["summed", "averaged"] = option(
        "summed",
        "sum or mean of the gradients of ranks in the trainer. If they are averaged, as in DDP, denominators are "
        "divided by the number of ranks.",
    )

    def __post_init__(self) -> None:
        optional = ("rollout_batch_size", "group_size", "max_pending_appends", "micro_batch_tokens")
        _check_whole(self, dict.fromkeys([name for name in optional if getattr(self, name) is not None], 1))
        _check_whole(self, {"ppo_epochs": 1})
        _check_flag(self, "keep_groups")
        _check_choices(self, gradients=("summed", "averaged"))


@named_options
@dataclass(frozen=True, kw_only=True)
class Staleness:
    """Versions of the policy, and the rule for rollouts of old ones."""

    policy_version: int | None = option(
        None,
        "initial version of the policy that is trained; later set `loader.policy_version`",
    )
    max_staleness: int | None = option(None, "rollouts more than this many versions old are stale")
    on_stale: OnStale = option(
        "drop",
        'drop and count groups with stale rollouts, keep them, or keep them with `metadata["stale"]` set',
    )

    def __post_init__(self) -> None:
        optional = ("policy_version", "max_staleness")
        _check_whole(self, dict.fromkeys([name for name in optional if getattr(self, name) is not None], 0))
        _check_choices(self, on_stale=("drop", "keep", "flag"))


@named_options
@dataclass(frozen=True, kw_only=True)
class RolloutSelection:
    """Rules for rollouts that may be unfit for training."""

    drop_zero_variance: bool = option(
        False,
        "DAPO's dynamic sampling: drop and count groups whose rewards are all equal. A live source then takes "
        "more groups until the rollout batch is full.",
    )
    group_prompts: Literal["equal", "any"] = option(
        "equal",
        "different prompts in one group: an error, or allowed, for turns of one episode say",
    )
    duplicate_ids: Literal["error", "drop"] = option(
        "error",
        "live source: an id that occurs twice in a rollout batch, as after a repeated append, is an error, or the "
        "second rollout is dropped and counted. In a list or a file it is always an error.",
    )
    missing_rewards: MissingRewards | None = option(
        None,
        "rollout without a reward (None or NaN): an error; reward 0; kept with advantage 0 and outside of all "
        'statistics ("exclude"); or dropped and counted. None: "exclude" if the preset does so, else an error.',
    )
    all_masked: AllMasked | None = option(
        None,
        "rollout without a supervised token; None: kept if the preset has zeros for it, else an error",
    )

    def __post_init__(self) -> None:
        _check_flag(self, "drop_zero_variance")
        _check_choices(
            self,
            group_prompts=("equal", "any"),
            duplicate_ids=("error", "drop"),
            missing_rewards=("error", "zero", "exclude", "drop", None),
            all_masked=("error", "drop", "keep", None),
        )

    def on_missing(self, rules: Preset) -> MissingRewards:
        """Rule for a rollout without a reward."""
        return self.missing_rewards or ("exclude" if rules.nan == "exclude" else "error")

    def on_empty(self, rules: Preset) -> AllMasked:
        """Rule for a rollout without a supervised token."""
        return self.all_masked or ("keep" if rules.empty == "zero" else "error")


@named_options
@dataclass(frozen=True, kw_only=True)
class LengthLimits:
    """Longest prompts and responses, and the truncation of longer ones; checked by `RolloutForm`."""

    max_prompt_length: int | None = option(None, "most tokens of a prompt")
    max_response_length: int | None = option(None, "most tokens of a response")
    prompt_truncation: Literal["error", "left", "right"] = option(
        "error", "longer prompts are an error, or lose their beginning (`left`) or their end (`right`)"
    )
    response_truncation: Literal["error", "right"] = option(
        "error", "longer responses are an error, or lose their end (`right`)"
    )


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """Options that only rollouts have."""

    batching: RolloutBatching = field(default_factory=RolloutBatching)
    staleness: Staleness = field(default_factory=Staleness)
    selection: RolloutSelection = field(default_factory=RolloutSelection)
    limits: LengthLimits = field(default_factory=LengthLimits)

    def form(self, options: Options, pad_id: int, integer: npt.DTypeLike) -> RolloutForm:
        """Form of the batches."""
        return RolloutForm(
            padding="free" if options.padding_free else self.batching.padding,
            pad_id=pad_id if options.pad_id is None else options.pad_id,
            pad_to_multiple_of=options.pad_to_multiple_of or 1,
            integer=integer,
            fields=options.wanted_fields,
            **{limit.name: getattr(self.limits, limit.name) for limit in fields(LengthLimits)},
        )

    def facts(self) -> dict[str, Any]:
        """Options that decide which minibatches come, for states."""
        values = {name: getattr(getattr(self, group), name) for group, name in _STATE_NAMES}
        found = {name: value for name, value in values.items() if value is not None}
        if self.selection.duplicate_ids != "error":
            found["duplicate_ids"] = self.selection.duplicate_ids
        return found


_GROUPS: dict[str, Any] = {
    "batching": RolloutBatching,
    "staleness": Staleness,
    "selection": RolloutSelection,
    "limits": LengthLimits,
}
_STATE_NAMES = (
    ("batching", "rollout_batch_size"),
    ("batching", "max_pending_appends"),
    ("batching", "ppo_epochs"),
    ("batching", "keep_groups"),
    ("staleness", "max_staleness"),
    ("staleness", "on_stale"),
    ("selection", "drop_zero_variance"),
    ("selection", "missing_rewards"),
    ("selection", "all_masked"),
    ("limits", "max_prompt_length"),
    ("limits", "max_response_length"),
    ("limits", "prompt_truncation"),
    ("limits", "response_truncation"),
)
"""Order of the names in saved states."""


OPTION_KINDS = (*_GROUPS.values(), RolloutOptions, Options)
"""Dataclasses whose fields are keywords of a `RolloutDataLoader`, except those in `NOT_FOR_ROLLOUTS`."""


def read_rollout_options(given: Mapping[str, Any], own: Sequence[str] = ()) -> tuple[Options, RolloutOptions]:
    """Options of every loader and those of rollouts; an unknown one is a ConfigError that names the nearest.

    `own` are the parameters of the loader itself, which the error lists too.
    """
    given = flat_options(given)
    if "chat_template" in given:
        if given.get("template") is not None:
            raise ConfigError("template and chat_template are two names of one option; pass one of them")
        given["template"] = given.pop("chat_template")
    for name in given:
        if name in NOT_FOR_ROLLOUTS:
            raise ConfigError(f"{name} is not an option of a RolloutDataLoader: {NOT_FOR_ROLLOUTS[name]}")
    known = [name for kind in OPTION_KINDS for name in option_names(kind) if name not in NOT_FOR_ROLLOUTS]
    check_options(given, dict.fromkeys([*own, *known]))
    groups: dict[str, Any] = {}
    for name, kind in _GROUPS.items():
        group = given.get(name)
        if group is not None and not isinstance(group, kind):
            raise ConfigError(f"{name} must be a {kind.__name__}, got {group!r}")
        flat = {option.name: given[option.name] for option in fields(kind) if option.name in given}
        groups[name] = kind(**flat) if group is None else replace(group, **flat)
    shared = {option.name for option in fields(Options)}
    return Options(**{name: value for name, value in given.items() if name in shared}), RolloutOptions(**groups)


def _check_whole(options: Any, least: Mapping[str, int]) -> None:
    for name, low in least.items():
        value = getattr(options, name)
        try:
            fits = not isinstance(value, bool) and index(value) >= low
        except TypeError:
            fits = False
        if not fits:
            raise ConfigError(f"{name} must be a whole number of at least {low}, got {value!r}")


def _check_flag(options: Any, name: str) -> None:
    if not isinstance(getattr(options, name), bool):
        raise ConfigError(f"{name} must be True or False, got {getattr(options, name)!r}")


def _check_choices(options: Any, **choices: tuple[str | None, ...]) -> None:
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            names = [choice for choice in allowed if choice is not None]
            raise ConfigError(
                f"{name} must be one of {', '.join(names)}, got {value!r}{did_you_mean(str(value), names)}"
            )
