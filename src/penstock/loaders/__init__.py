"""The trainer's door: raw files in, a token store, and from there batches."""

from penstock.loaders.preparation import Prepared, prepare
from penstock.loaders.recipes import Recipe

__all__ = ["Prepared", "Recipe", "prepare"]
