"""Order of samples: which rows make up step s. Pure arithmetic, no I/O."""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
