"""Advantages for RL, as the stacks compute them: GAE, GRPO and its kin, whitening, KL, and what a loss is divided by.

    from penstock.rl.advantages import gae, grpo

    grpo([1.0, 0.0, 0.0, 1.0], groups=["a", "a", "b", "b"], preset="trl")
    advantages, returns = gae(rewards, values, mask=mask, gamma=1.0, lam=0.95)

Plain functions of arrays. What comes back is of the framework that was given (NumPy, torch, MLX, JAX), on its device,
in float32, or in float64 if that was given; advantages carry no gradients. Where stacks differ, `preset` says whose
numbers are meant ("trl", "verl", "openrlhf", "slime"; the default, "penstock", is verl's, with errors in the place of
silent rules), and keywords override single conventions. The table of differences is in docs/rl.md.
"""

from penstock.rl.advantages.estimators import (
    dr_grpo,
    dynamic_sampling,
    gae,
    gae_ragged,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    remax,
    reward_to_go,
    rloo,
    token_rewards,
    zero_variance_groups,
)
from penstock.rl.advantages.losses import aggregate_loss, kl_estimate, loss_denominators, overlong_penalty
from penstock.rl.advantages.presets import PRESETS, Preset
from penstock.rl.advantages.statistics import whiten

__all__ = [
    "PRESETS",
    "Preset",
    "aggregate_loss",
    "dr_grpo",
    "dynamic_sampling",
    "gae",
    "gae_ragged",
    "gpg",
    "grpo",
    "kl_estimate",
    "loss_denominators",
    "opo",
    "overlong_penalty",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "reward_to_go",
    "rloo",
    "token_rewards",
    "whiten",
    "zero_variance_groups",
]
