"""A config that notes what is read of it."""

from __future__ import annotations

from typing import Any

from penstock.config.shared import SharedConfig

__all__ = ["NotedConfig"]


class NotedConfig(SharedConfig):
    """The same settings; `read` has the names that were asked for so far."""

    __slots__ = ("read",)
    read: set[str]

    def __init__(self, values: Any = None, /, **more: Any) -> None:
        object.__setattr__(self, "read", set())
        super().__init__(values, **more)
        self.read.clear()  # making the copy read them all

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.add(name)
        return value

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        self.read.add(name)
        return value
