"""Presets: named sets of the conventions in which TRL, verl, OpenRLHF and slime differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError

SingleMemberGroup: TypeAlias = Literal["raise", "reward", "zero", "nan"]
Nan: TypeAlias = Literal["raise", "exclude"]
Gap: TypeAlias = Literal["skip", "plain", "through"]
Empty: TypeAlias = Literal["raise", "zero"]
Aggregation: TypeAlias = Literal["token-mean", "sequence-mean", "sequence-sum", "dr-grpo"]

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "single_member_group": ("raise", "reward", "zero", "nan"),
        "nan": ("raise", "exclude"),
        "gap": ("skip", "plain", "through"),
        "empty": ("raise", "zero"),
        "scale": ("group", "batch", "none"),
        "kind": ("k1", "k2", "k3", "low_var_kl"),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Preset:
    """Conventions of one stack. Make your own with `dataclasses.replace(PRESETS["verl"], epsilon=1e-4)`."""

    name: str
    epsilon: float = 1e-6
    """Added to the standard deviation of a group before dividing by it."""
    ddof: int = 1
    """1: unbiased standard deviation of a group; 0: biased."""
    single_member_group: SingleMemberGroup = "raise"
    """Advantage of a group of one where the group mean is subtracted: an error, its reward, 0 or NaN."""
    single_member_group_scaled: SingleMemberGroup = "raise"
    """The same where the difference is also divided: by the standard deviation (GRPO), by n - 1 (RLOO)."""
    unequal: Literal["group", "batch"] = "group"
    """Groups of different sizes: each by itself, or the whole batch as one group."""
    nan: Nan = "raise"
    """Reward of NaN: an error, or a row with advantage 0 that no statistic counts."""
    varied_above: float = 0.0
    """Dynamic sampling keeps groups whose standard deviation is above this."""
    keep_single_member_groups: bool = False
    """Dynamic sampling keeps groups of one."""
    gap: Gap = "skip"
    """Tokens with mask 0 between others; see `gae`."""
    empty: Empty = "raise"
    """Row without a token of mask 1: an error, or a row of zeros."""
    whiten_ddof: int = 1
    whiten_epsilon: float = 1e-8
    whiten_floor: Literal["add", "clamp"] = "add"
    """`whiten_epsilon` is added to the variance, or is its lower bound."""
    kl_log_ratio: float | None = None
    """k3 clamps its log-ratio to plus and minus this."""
    kl_clamp: float = 10.0
    """Estimates named in `kl_clamped` are clamped to plus and minus this."""
    kl_clamped: tuple[str, ...] = ()
    baseline_kl: Literal["sequence", "to-go", "token"] = "to-go"
    """KL penalty in REINFORCE++-baseline: in the reward, before the group mean is subtracted; as token rewards, summed
    from each token on; or of each token alone."""
    aggregation: Aggregation = "token-mean"
    """Divisor of the loss; see `loss_denominators`."""
    dr_grpo_rows: bool = True
    """Dr. GRPO's divisor is rows times length, instead of the length alone."""

    def single_member_rule(self, scaled: bool) -> SingleMemberGroup:
        return self.single_member_group_scaled if scaled else self.single_member_group


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        preset.name: preset
        for preset in (
            Preset(name="penstock"),
            Preset(
                name="trl",
                epsilon=1e-4,
                single_member_group="zero",
                single_member_group_scaled="zero",
                nan="exclude",
                gap="plain",
                empty="zero",
                baseline_kl="sequence",
            ),
            Preset(
                name="verl",
                single_member_group="reward",
                single_member_group_scaled="reward",
                keep_single_member_groups=True,
                empty="zero",
                kl_log_ratio=20.0,
                kl_clamped=("k3", "low_var_kl"),
                baseline_kl="sequence",
                dr_grpo_rows=False,
            ),
            Preset(
                name="openrlhf",
                epsilon=1e-9,
                single_member_group="zero",
                gap="plain",
                empty="zero",
                whiten_ddof=0,
                whiten_floor="clamp",
                kl_clamped=CHOICES["kind"],
            ),
            Preset(
                name="slime",
                single_member_group="zero",
                single_member_group_scaled="zero",
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
"""Presets by name. `penstock` is the default: verl's numbers, with errors instead of silent rules."""


def find_preset(preset: str | Preset) -> Preset:
    """Preset of that name, or the preset itself."""
    if isinstance(preset, Preset):
        return preset
    if isinstance(preset, str) and preset in PRESETS:
        return PRESETS[preset]
    hint = did_you_mean(str(preset).lower(), PRESETS)
    raise ConfigError(f"unknown preset {preset!r}{hint}; known presets: {', '.join(map(repr, PRESETS))}")


def choice(name: str, given: Any, default: Any = None) -> Any:
    """Value of an option: as given, or the preset's; an error if the option has no such value."""
    value, known = default if given is None else given, CHOICES[name]
    if value not in known:
        raise ConfigError(
            f"{name} must be one of {', '.join(map(repr, known))}, got {value!r}{did_you_mean(str(value), known)}"
        )
    return value
