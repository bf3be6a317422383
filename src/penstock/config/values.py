"""Plain values, and how they are frozen: what a setting may hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, Never

import numpy as np

__all__ = ["FrozenDict", "NotPlain", "freeze", "thaw"]


class NotPlain(Exception):  # noqa: N818 - it never leaves this package: it becomes a line in a ConfigError
    """A value that cannot be a setting; says what it is, and where in the setting."""


class FrozenDict(dict[Any, Any]):
    """A dict that cannot be changed. JSON writers and `isinstance(..., dict)` take it for what it is."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Never:
        raise TypeError("the values of a config are read-only; make a copy with dict(...) and change that")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenDict, (dict(self),)


def freeze(value: Any, where: str = "") -> Any:
    """The same plain value, in which nothing can be changed: lists become tuples, dicts read-only, sets frozen.

    Plain are None, truth values, numbers, text, paths, and lists, tuples, sets and dicts of those; a NumPy scalar
    becomes the number it holds. Raises NotPlain for anything else.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum that is text too: the text, not its name
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, PurePath):
        return Path(value)
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item, f"{where}[{number}]") for number, item in enumerate(value))
    if isinstance(value, (set, frozenset)):
        return frozenset(freeze(item, where) for item in value)
    if isinstance(value, Mapping):
        return FrozenDict({freeze(key, where): freeze(item, f"{where}[{key!r}]") for key, item in value.items()})
    raise NotPlain(f"{where + ' ' if '[' in where else ''}is {_named(value)}")


def thaw(value: Any) -> Any:
    """A copy of a frozen value as JSON has it: lists, dicts, and text for paths; sets as sorted lists."""
    if isinstance(value, tuple):
        return [thaw(item) for item in value]
    if isinstance(value, frozenset):
        return [thaw(item) for item in sorted(value, key=repr)]
    if isinstance(value, dict):
        return {key: thaw(item) for key, item in value.items()}
    return str(value) if isinstance(value, PurePath) else value


def _named(value: Any) -> str:
    kind = type(value)
    if callable(value):
        return "a class" if isinstance(value, type) else "a function"
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"a value of type {name}"
