"""Transforms of batches: functions, columns, text, cleaning, validation, scaling, encoding, augmentation,
quality filters, deduplication, tokenizing, chats.

A transform is anything with `transform(batch) -> batch`. Without a `state_dict` it must be a pure function of the
batch, and runs on several threads at once.
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
