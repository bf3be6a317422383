"""Rollouts for RL: reading, advantages, live sources, and batches.

    rollout          one rollout, a table of many, and its Arrow form
    read             lists, files and the columns of other stacks -> a table (names: column_aliases)
    live, queue      appends of inference engines, in this process and in others
    sources          rollout batches of whole groups, from a table or from appends
    selection        rollouts that are not trained on, and checks of groups
    advantages       estimators, presets and losses as functions of arrays
    compute          advantages of a rollout batch
    minibatches      rollout batch -> minibatches -> ranks -> micro-batches
    collate, batch   minibatch -> padded or padding-free arrays, and the batch that the trainer gets
    engine           all of it, from any position on
    options          options of `RolloutDataLoader`

The loader itself is `penstock.loaders.rollout`.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
