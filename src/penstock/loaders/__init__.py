"""Raw files and token stores to training batches: doors 000 and 001.

    prepare        raw files -> token store, once                    preparation.py, recipes.py
    a loader       token store -> batches, in the order of a plan    base.py, pretrain.py, conversation.py, mixed.py
    preferences    pairs and labelled answers -> batches of both sides    preference.py
    rollouts       what a policy generated -> batches with advantages    rollout.py
    samples        anything with a length and items -> batches, or a stream    mlx_loader.py, streaming.py, memory.py

Names are imported when they are first used: a loader of prepared data needs none of what prepares it.
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.loaders._preference.batch import PreferenceBatch
    from penstock.loaders._rollouts.advantages_of import AdvantageSpec, KLPenalty, Overlong
    from penstock.loaders._rollouts.batch import RolloutBatch
    from penstock.loaders._rollouts.live import LiveBuffer
    from penstock.loaders._rollouts.queueing import RolloutQueue
    from penstock.loaders._rollouts.reading import read_rollouts
    from penstock.loaders._rollouts.reading_text import TextRule
    from penstock.loaders._rollouts.rollout import Rollout
    from penstock.loaders.base import DataLoader
    from penstock.loaders.batch import TrainingBatch
    from penstock.loaders.conversation import ConversationDataLoader
    from penstock.loaders.integrations import Endless
    from penstock.loaders.masking import MaskedLM
    from penstock.loaders.memory import MemoryConfig, UnifiedMemoryManager
    from penstock.loaders.mixed import MixedDataLoader
    from penstock.loaders.mlx_loader import MLXDataLoader, MLXLoaderConfig
    from penstock.loaders.preference import PreferenceDataLoader
    from penstock.loaders.preparation import Prepared, prepare
    from penstock.loaders.pretrain import PretrainDataLoader
    from penstock.loaders.recipes import Recipe
    from penstock.loaders.rollout import RolloutDataLoader
    from penstock.loaders.streaming import StreamingConfig, StreamingPipeline
    from penstock.loaders.streams import StreamOptions

__all__ = [
    "AdvantageSpec",
    "ConversationDataLoader",
    "DataLoader",
    "Endless",
    "KLPenalty",
    "LiveBuffer",
    "MLXDataLoader",
    "MLXLoaderConfig",
    "MaskedLM",
    "MemoryConfig",
    "MixedDataLoader",
    "Overlong",
    "PreferenceBatch",
    "PreferenceDataLoader",
    "Prepared",
    "PretrainDataLoader",
    "Recipe",
    "Rollout",
    "RolloutBatch",
    "RolloutDataLoader",
    "RolloutQueue",
    "StreamOptions",
    "StreamingConfig",
    "StreamingPipeline",
    "TextRule",
    "TrainingBatch",
    "UnifiedMemoryManager",
    "prepare",
    "read_rollouts",
]

__getattr__ = lazy(
    __name__,
    {
        "ConversationDataLoader": "penstock.loaders.conversation",
        "DataLoader": "penstock.loaders.base",
        "MixedDataLoader": "penstock.loaders.mixed",
        "PreferenceBatch": "penstock.loaders._preference.batch",
        "PreferenceDataLoader": "penstock.loaders.preference",
        "Prepared": "penstock.loaders.preparation",
        "PretrainDataLoader": "penstock.loaders.pretrain",
        "Recipe": "penstock.loaders.recipes",
        "TrainingBatch": "penstock.loaders.batch",
        "prepare": "penstock.loaders.preparation",
        "Endless": "penstock.loaders.integrations",
        "StreamOptions": "penstock.loaders.streams",
        "RolloutDataLoader": "penstock.loaders.rollout",
        "Rollout": "penstock.loaders._rollouts.rollout",
        "RolloutBatch": "penstock.loaders._rollouts.batch",
        "LiveBuffer": "penstock.loaders._rollouts.live",
        "RolloutQueue": "penstock.loaders._rollouts.queueing",
        "AdvantageSpec": "penstock.loaders._rollouts.advantages_of",
        "KLPenalty": "penstock.loaders._rollouts.advantages_of",
        "Overlong": "penstock.loaders._rollouts.advantages_of",
        "TextRule": "penstock.loaders._rollouts.reading_text",
        "read_rollouts": "penstock.loaders._rollouts.reading",
        "MLXDataLoader": "penstock.loaders.mlx_loader",
        "MLXLoaderConfig": "penstock.loaders.mlx_loader",
        "MaskedLM": "penstock.loaders.masking",
        "MemoryConfig": "penstock.loaders.memory",
        "UnifiedMemoryManager": "penstock.loaders.memory",
        "StreamingConfig": "penstock.loaders.streaming",
        "StreamingPipeline": "penstock.loaders.streaming",
    },
)
