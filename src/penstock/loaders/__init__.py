"""Raw files and token stores to training batches: doors 000 and 001.

    prepare        raw files -> token store, once                    penstock.corpus
    a loader       token store -> batches, in the order of a plan    base.py, pretrain.py, conversation.py, mixed.py
    preferences    pairs and labelled answers -> batches of both sides    preference.py
    rollouts       what a policy generated -> batches with advantages    rollout.py
    samples        datasets with a length and items -> batches, or a stream    mlx_loader.py, streaming.py, memory.py

Names are imported when they are first used: a loader of prepared data needs none of what prepares it.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
