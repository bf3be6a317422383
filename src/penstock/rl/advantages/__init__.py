"""Advantages for RL as plain functions of arrays: GAE, GRPO and its kin, whitening, KL, and loss denominators.

    from penstock.rl.advantages import gae, grpo

    grpo([1.0, 0.0, 0.0, 1.0], groups=["a", "a", "b", "b"], preset="trl")
    advantages, returns = gae(rewards, values, mask=mask, gamma=1.0, lam=0.95)

Results are arrays of the framework that was given (NumPy, torch, MLX, JAX), on its device, in float32, or in float64
for float64 inputs; advantages carry no gradients. Where stacks differ, `preset` selects whose numbers are meant ("trl",
"verl", "openrlhf", "slime"; the default, "penstock", is verl's with errors instead of silent rules), and keywords
override single conventions. docs/rl.md has the table of differences.

    presets      conventions of the stacks
    inputs       checks
    statistics   group means, whitening, discounted sums
    estimators   the estimators and their registry
    losses       KL, length penalty, denominators
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
