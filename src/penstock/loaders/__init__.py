"""Raw files and token stores to training batches: doors 000 and 001.

    prepare        raw files -> token store, once                    preparation.py, recipes.py
    a loader       token store -> batches, in the order of a plan    base.py, pretrain.py, conversation.py, mixed.py

Names are imported when they are first used: a loader of prepared data needs none of what prepares it.
"""

from typing import TYPE_CHECKING

from penstock._lazy import lazy

if TYPE_CHECKING:
    from penstock.loaders.base import DataLoader
    from penstock.loaders.batch import TrainingBatch
    from penstock.loaders.conversation import ConversationDataLoader
    from penstock.loaders.integrations import Endless
    from penstock.loaders.mixed import MixedDataLoader
    from penstock.loaders.preparation import Prepared, prepare
    from penstock.loaders.pretrain import PretrainDataLoader
    from penstock.loaders.recipes import Recipe
    from penstock.loaders.streams import StreamOptions

__all__ = [
    "ConversationDataLoader",
    "DataLoader",
    "Endless",
    "MixedDataLoader",
    "Prepared",
    "PretrainDataLoader",
    "Recipe",
    "StreamOptions",
    "TrainingBatch",
    "prepare",
]

__getattr__ = lazy(
    __name__,
    {
        "ConversationDataLoader": "penstock.loaders.conversation",
        "DataLoader": "penstock.loaders.base",
        "MixedDataLoader": "penstock.loaders.mixed",
        "Prepared": "penstock.loaders.preparation",
        "PretrainDataLoader": "penstock.loaders.pretrain",
        "Recipe": "penstock.loaders.recipes",
        "TrainingBatch": "penstock.loaders.batch",
        "prepare": "penstock.loaders.preparation",
        "Endless": "penstock.loaders.integrations",
        "StreamOptions": "penstock.loaders.streams",
    },
)
