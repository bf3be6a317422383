"""Modules that tests import when they first use them, so that collecting the tests stays fast."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["LazyModule"]


class LazyModule:
    """A module, imported for its first attribute; without it, the test that asks is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)  # what pytest asks every name of a module for must not import it
        return getattr(pytest.importorskip(self._name), attribute)

    def function(self, attribute: str) -> Any:
        """A function of the module that imports it when it is called, for lists of parameters."""
        return lambda *args, **options: getattr(self, attribute)(*args, **options)
