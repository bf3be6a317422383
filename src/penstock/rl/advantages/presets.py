"""Presets: the conventions in which the RL stacks differ, by name, so that each of their numbers can be had."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from penstock.errors import ConfigError

__all__ = ["PRESETS", "Aggregation", "Empty", "Gap", "Lone", "Nan", "Preset", "choice", "find_preset"]

Lone: TypeAlias = Literal["raise", "reward", "zero", "nan"]
Nan: TypeAlias = Literal["raise", "exclude"]
Gap: TypeAlias = Literal["skip", "plain", "through"]
Empty: TypeAlias = Literal["raise", "zero"]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"]

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lone": ("raise", "reward", "zero", "nan"),
        "nan": ("raise", "exclude"),
        "gap": ("skip", "plain", "through"),
        "empty": ("raise", "zero"),
        "scale": ("group", "batch", "none"),
        "kind": ("k1", "k2", "k3", "low_var_kl"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """The conventions of one stack. Make your own with `dataclasses.replace(PRESETS["verl"], epsilon=1e-4)`."""

    name: str
    epsilon: float = 1e-6
    """Added to the standard deviation of a group before dividing by it."""
    ddof: int = 1
    """1: the unbiased standard deviation of a group; 0: the biased one."""
    lone: Lone = "raise"
    """A group of one, where the mean of the group is subtracted: an error, its reward, 0 or NaN."""
    lone_scaled: Lone = "raise"
    """The same where it is divided too: by the standard deviation (GRPO), by n - 1 (RLOO)."""
    unequal: Literal["group", "batch"] = "group"
    """Groups of different sizes: each by itself, or the whole batch as one group."""
    nan: Nan = "raise"
    """A reward that is NaN: an error, or a row outside of all statistics, with an advantage of 0."""
    varied_above: float = 0.0
    """Dynamic sampling keeps groups whose standard deviation is above this."""
    keep_lone: bool = False
    """Whether dynamic sampling keeps groups of one."""
    gap: Gap = "skip"
    """Tokens with mask 0 between others; see `gae`."""
    empty: Empty = "raise"
    """A row without a token of mask 1: an error, or a row of zeros."""
    whiten_ddof: int = 1
    whiten_epsilon: float = 1e-8
    whiten_floor: Literal["add", "clamp"] = "add"
    """`whiten_epsilon` is added to the variance, or is the least that the variance can be."""
    kl_log_ratio: float | None = None
    """k3 is computed from a log-ratio held within plus and minus this."""
    kl_clamp: float = 10.0
    """The estimates named in `kl_clamped` are held within plus and minus this."""
    kl_clamped: tuple[str, ...] = ()
    baseline_kl: Literal["sequence", "to-go", "token"] = "to-go"
    """The KL penalty in REINFORCE++-baseline: in the reward before its group's mean is subtracted; as token rewards,
    summed from each token on; or of each token alone."""
    aggregation: Aggregation = "token-mean"
    """What the loss is divided by."""
    dr_grpo_rows: bool = True
    """Whether Dr. GRPO's divisor has the number of rows in it, beside the length."""


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(name="penstock"),
            Preset(
                name="trl",
                epsilon=1e-4,
                lone="zero",
                lone_scaled="zero",
                nan="exclude",
                gap="plain",
                empty="zero",
                baseline_kl="sequence",
            ),
            Preset(
                name="verl",
                lone="reward",
                lone_scaled="reward",
                keep_lone=True,
                empty="zero",
                kl_log_ratio=20.0,
                kl_clamped=("k3", "low_var_kl"),
                baseline_kl="sequence",
                dr_grpo_rows=False,
            ),
            Preset(
                name="openrlhf",
                epsilon=1e-9,
                lone="zero",
                gap="plain",
                empty="zero",
                whiten_ddof=0,
                whiten_floor="clamp",
                kl_clamped=CHOICES["kind"],
            ),
            Preset(
                name="slime",
                lone="zero",
                lone_scaled="zero",
                unequal="batch",
                varied_above=1e-6,
                gap="through",
                kl_clamped=("low_var_kl",),
                baseline_kl="token",
                aggregation="sequence-mean",
            ),
        )
    }
)
"""By name. `penstock` is the default: verl's numbers, and an error where a stack would go on in silence."""


def find_preset(preset: str | Preset) -> Preset:
    """The preset of that name, or the preset itself."""
    if isinstance(preset, Preset):
        return preset
    if isinstance(preset, str) and preset in PRESETS:
        return PRESETS[preset]
    near = difflib.get_close_matches(str(preset).lower(), PRESETS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"there is no preset {preset!r}, only {', '.join(map(repr, PRESETS))}{hint}")


def choice(name: str, given: Any, default: Any = None) -> Any:
    """What was given for an option, or the preset's way; an error if it is none of the option's values."""
    value = default if given is None else given
    if value not in CHOICES[name]:
        near = difflib.get_close_matches(str(value), CHOICES[name], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{name} must be one of {', '.join(map(repr, CHOICES[name]))}, got {value!r}{hint}")
    return value
