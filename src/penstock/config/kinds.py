"""What kind of value a setting takes: does a value fit, what does text on the command line mean, in words.

A kind is a type or an annotation: `int`, `float`, `bool`, `str`, `Path`, `ByteSize`, `list[int]`, `tuple[int, int]`,
`dict[str, float]`, `set[str]`, `Literal["a", "b"]`, `Any`, and unions of them (`int | None`).
"""

from __future__ import annotations

import ast
import types
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

from penstock.config.values import freeze
from penstock.errors import ConfigError
from penstock.memory.budget import parse_bytes

__all__ = ["ByteSize", "Misfit", "fit", "from_text", "in_words", "kind_of", "understood"]

_YES, _NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    list: "a list",
    tuple: "a list",
    set: "a set",
    dict: "a dict",
    types.NoneType: "None",
    Any: "any plain value",
}
_CONTAINERS = (list, tuple, set, frozenset, dict)


class Misfit(Exception):  # noqa: N818 - it never leaves this package: it becomes a line in a ConfigError
    """A value that is not of the kind; says what is expected."""


class ByteSize:
    """A kind: bytes, as a number or as text with a unit (`"256 MiB"`); the value becomes the number."""


def fit(value: Any, kind: Any) -> Any:
    """The frozen value as the kind has it: `1` becomes `1.0` where a float is expected, `1e3` a whole 1000 for an int.

    In a union the member that takes the value as it is comes first.
    """
    members = _members(kind)
    for member in (*(m for m in members if type(value) is m), *members):
        fitted = _fit_one(value, member)
        if fitted is not Misfit:
            return fitted
    raise Misfit(f"expected {in_words(kind)}" + _remedy(value, members))


def from_text(text: str, kind: Any) -> Any:
    """What the text of `--name=text` means where this kind is expected; it need not fit yet."""
    members, literal = _members(kind), _literal(text)
    if types.NoneType in members and text.lower() in ("none", "null"):
        return None
    if int in members or float in members:
        number = _number(text)
        if number is not None and (float in members or isinstance(number, int) or number.is_integer()):
            return number
    if bool in members and text.lower() in _YES + _NO:
        return text.lower() in _YES
    for member in members:
        if get_origin(member) is Literal:
            for choice in get_args(member):
                if text == str(choice) or (type(literal) is type(choice) and literal == choice):
                    return choice
    containers = tuple(c for c in _CONTAINERS if any(c in (m, get_origin(m)) for m in members))
    if containers and isinstance(literal, (list, tuple, set, dict)):
        return literal
    if any(m in (str, Path, ByteSize) for m in members):
        return literal if isinstance(literal, str) else text
    return literal


def kind_of(value: Any) -> Any:
    """The kind that a value in the file sets for its name; one that is None or empty of meaning sets none."""
    if value is None:
        return Any
    if isinstance(value, PurePath):
        return Path
    for kind in (bool, int, float, str, dict, set):
        if isinstance(value, kind):
            return kind
    return set if isinstance(value, frozenset) else list if isinstance(value, (list, tuple)) else Any


def understood(kind: Any) -> bool:
    """Whether it is a kind at all."""
    return all(
        m in _WORDS or m in (ByteSize, frozenset) or get_origin(m) is Literal or _is_container(m)
        for m in _members(kind)
    )


def in_words(kind: Any) -> str:
    """`a whole number or None`, for messages."""
    return " or ".join(dict.fromkeys(_one_in_words(member) for member in _members(kind)))


def _one_in_words(kind: Any) -> str:
    origin, inside = get_origin(kind), get_args(kind)
    if kind is ByteSize:
        return "a number of bytes such as 268435456 or '256 MiB'"
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin is dict:
        return f"a dict of {in_words(inside[0])} to {in_words(inside[1])}"
    if origin is tuple and Ellipsis not in inside:
        return f"a list of {len(inside)} ({', '.join(map(in_words, inside))})"
    if origin in _CONTAINERS:
        return f"{_WORDS[set if origin is frozenset else origin]}, each of it {in_words(inside[0])}"
    return _WORDS.get(set if kind is frozenset else kind, repr(kind))


def _fit_one(value: Any, kind: Any) -> Any:
    """The value as one member of a union has it; the class Misfit itself if it does not take it."""
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if kind is Any:
        return value
    if origin is Literal:
        return next((choice for choice in inside if type(choice) is type(value) and choice == value), Misfit)
    if kind is types.NoneType:
        return value if value is None else Misfit
    if isinstance(value, bool):
        return value if kind is bool else Misfit
    if kind is int and isinstance(value, float):
        return int(value) if value.is_integer() else Misfit
    if kind is float and isinstance(value, int):
        return float(value) if abs(value) < 2**1023 else Misfit
    if kind is Path:
        return _path(value)
    if kind is ByteSize:
        return _byte_size(value)
    if kind in (int, float, str):
        return value if isinstance(value, kind) else Misfit
    if origin in _CONTAINERS:
        return _fit_container(value, origin, inside)
    return Misfit


def _fit_container(value: Any, origin: Any, inside: tuple[Any, ...]) -> Any:
    try:
        if origin is dict:
            if not isinstance(value, dict):
                return Misfit
            key_kind, item_kind = inside or (Any, Any)
            return freeze({fit(key, key_kind): fit(item, item_kind) for key, item in value.items()})
        if origin in (set, frozenset):
            return frozenset(fit(item, *inside or (Any,)) for item in value) if isinstance(value, frozenset) else Misfit
        if not isinstance(value, tuple):
            return Misfit
        if origin is tuple and inside and Ellipsis not in inside:
            return tuple(map(fit, value, inside)) if len(value) == len(inside) else Misfit
        return tuple(fit(item, inside[0] if inside else Any) for item in value)
    except Misfit:
        return Misfit


def _path(value: Any) -> Any:
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        return Misfit
    if not isinstance(value, (str, PurePath)):
        return Misfit
    try:
        return Path(value).expanduser()  # or "~/queue" would make a directory called "~"
    except RuntimeError:
        return Misfit


def _byte_size(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    try:
        return parse_bytes(value) if isinstance(value, (int, str)) else Misfit
    except ConfigError:
        return Misfit


def _members(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(inner for member in get_args(kind) for inner in _members(member))
    return (types.NoneType,) if kind is None else (kind,)


def _is_container(kind: Any) -> bool:
    return get_origin(kind) in _CONTAINERS and all(understood(m) for m in get_args(kind) if m is not Ellipsis)


def _literal(text: str) -> Any:
    """The Python value that the text spells, or the text."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def _number(text: str) -> int | float | None:
    literal = _literal(text)
    if isinstance(literal, (int, float)) and not isinstance(literal, bool):
        return literal
    try:
        return float(text)  # inf, nan, 007
    except ValueError:
        return None


def _remedy(value: Any, members: tuple[Any, ...]) -> str:
    if isinstance(value, str) and {int, float} & set(members) and _number(value) is not None:
        return "; write it without quotes"
    if isinstance(value, str) and bool in members and value.lower() in _YES + _NO:
        return "; write True or False, without quotes"
    if str in members and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    return ""
