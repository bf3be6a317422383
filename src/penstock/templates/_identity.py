"""Which class makes a text, as one line: the same in every process, another one when its code is."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

import xxhash

__all__ = ["identity"]

_PLAIN = (str, bytes, int, float, bool, type(None))


def identity(kind: type) -> str:
    """A class of ours by its name; any other by module and name, and by what its code does.

    The code of its methods counts, with their defaults and what they close over, and so do the plain values among its
    attributes: all of it in the class and in its bases. What its methods call elsewhere does not.
    """
    if _is_ours(kind):
        return kind.__name__
    digest = xxhash.xxh3_128()
    for base in inspect.getmro(kind):
        digest.update(f"\n{base.__module__}.{base.__qualname__}".encode())
        if base is not object and not _is_ours(base):
            for name, value in sorted(vars(base).items()):
                said = "".join(_said(value))
                if said and (callable(value) or not name.startswith("__")):
                    digest.update(f"\n{name} {said}".encode("utf-8", "surrogatepass"))
    return f"{kind.__module__}.{kind.__qualname__} {digest.hexdigest()}"


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _said(value: Any, within: frozenset[int] = frozenset()) -> Iterator[str]:
    """What is in a value, without addresses or the order of a set; nothing for what cannot be told."""
    if isinstance(value, _PLAIN):
        yield f"{value!r};"
    elif isinstance(value, (set, frozenset)):
        yield from ("{", *sorted("".join(_said(item)) for item in value), "}")
    elif id(value) not in within:  # a function may close over itself
        parts = _parts(value)
        if parts is not None:
            within |= {id(value)}
            yield from ("[", *(text for part in parts for text in _said(part, within)), "]")


def _parts(value: Any) -> Iterable[Any] | None:
    if isinstance(value, (tuple, list)):
        return value
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, CodeType):
        return value.co_code, value.co_names, value.co_varnames, value.co_freevars, value.co_consts
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.cached_property):
        return (value.func,)
    return None


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
