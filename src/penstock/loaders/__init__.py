"""The trainer's door: raw files in, a token store, and from there batches."""

from penstock.loaders.preparation import Prepared, Recipe, prepare

__all__ = ["Prepared", "Recipe", "prepare"]
