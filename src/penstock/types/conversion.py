"""Conversion of plain values (YAML, JSON, a Python file, the command line) to annotated types.

`convert(value, kind)` is the one place where a value of a file meets an annotation. Numbers are never read from text
there: `"1"` is not `1`. Only `from_text`, for `--name=text`, parses text. A bool is not an int, a whole float is.
Kinds are types and annotations: `int`, `float`, `bool`, `str`, `Path`, `list[int]`, `tuple[int, int]`, `set[str]`,
`dict[str, float]`, `Literal["a", "b"]`, `Any`, unions of them, and classes with `expected` and `from_plain` of their
own. Other annotations are left to the constructor that has them.
"""

from __future__ import annotations

import collections.abc
import os
import types
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock._syntax import literal
from penstock.errors import ConfigError, PenstockError

_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SETS, _MAPPINGS = (set, frozenset), (dict, collections.abc.Mapping)
_SEQUENCES = (list, tuple, collections.abc.Iterable, collections.abc.Sequence, collections.abc.Collection)
_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    types.NoneType: "None",
    Any: "any plain value",
    pa.Schema: "a mapping of columns to types",
    collections.abc.Callable: "a function as module:name",
    **dict.fromkeys(_SEQUENCES, "a list"),
    **dict.fromkeys(_SETS, "a set"),
    **dict.fromkeys(_MAPPINGS, "a mapping"),
}
_NEVER_PLAIN = (collections.abc.Callable, os.PathLike, pc.Expression, pa.DataType, pa.Schema)
_NO = object()


class Problems:
    """All problems of a file, each with its place in it, to be raised as one error."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __len__(self) -> int:
        return len(self.found)

    def add(self, place: str, problem: object) -> None:
        self.found.append(f"{place}: {problem}" if place else str(problem))

    def attempt(
        self, place: str, function: Callable[..., Any], *arguments: Any, errors: Any = PenstockError, **more: Any
    ) -> Any:
        """The result of the function; None if it raises, which is then a problem."""
        try:
            return function(*arguments, **more)
        except errors as error:
            self.add(place, error)
            return None

    def check(self, name: str) -> None:
        """Raise a ConfigError that lists every problem, if there is one."""
        if len(self.found) == 1:
            raise ConfigError(f"{name}: {self.found[0]}")
        if self.found:
            raise ConfigError(f"{name} has {len(self.found)} problems:" + "".join(f"\n  {line}" for line in self.found))


def convert(value: Any, kind: Any) -> Any:
    """The value as the kind has it; raises ConfigError with what is expected.

    `1` becomes `1.0` for a float, `1e3` becomes `1000` for an int, text becomes a Path. Containers keep their own type.
    A union prefers the member that has the type of the value.
    """
    choices = members(kind)
    for choice in (*(choice for choice in choices if type(value) is choice), *choices):
        converted = _convert_one(value, choice)
        if converted is not _NO:
            return converted
    raise ConfigError(f"expected {in_words(kind)}, got {value!r:.80}{_remedy(value, choices)}")


def from_text(text: str, kind: Any) -> Any:
    """The plain value that the text of `--name=text` means for this kind; `convert` still has to accept it."""
    choices, literal = members(kind), _literal(text)
    origins = {get_origin(choice) or choice for choice in choices}
    if types.NoneType in choices and text.lower() in ("none", "null"):
        return None
    if int in choices or float in choices:
        number = _number(text)
        if number is not None and (float in choices or isinstance(number, int) or number.is_integer()):
            return number
    if bool in choices and text.lower() in _TRUE + _FALSE:
        return text.lower() in _TRUE
    for name in (name for choice in choices if get_origin(choice) is Literal for name in get_args(choice)):
        if text == str(name) or (type(literal) is type(name) and literal == name):
            return name
    if origins & {*_SEQUENCES, *_SETS, *_MAPPINGS} and isinstance(literal, (list, tuple, set, dict)):
        return literal
    if any(choice in (str, Path) or hasattr(choice, "from_plain") for choice in choices):
        return literal if isinstance(literal, str) else text
    return literal


def kind_of(value: Any) -> Any:
    """The kind of a plain value; None has none."""
    if isinstance(value, PurePath):
        return Path
    for kind in (bool, int, float, str, dict, set):
        if isinstance(value, kind):
            return kind
    return set if isinstance(value, frozenset) else list if isinstance(value, (list, tuple)) else Any


def is_convertible(kind: Any) -> bool:
    """True if every part of the kind is one that `convert` checks itself."""
    return all(
        (choice in _WORDS and choice not in _NEVER_PLAIN)
        or hasattr(choice, "from_plain")
        or get_origin(choice) is Literal
        or _is_container(choice)
        for choice in members(kind)
    )


def in_words(kind: Any) -> str:
    """`a whole number or None`, for messages."""
    return " or ".join(dict.fromkeys(word for choice in members(kind) if (word := _one_in_words(choice))))


def members(kind: Any) -> tuple[Any, ...]:
    """The members of a union, flattened; any other kind alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return tuple(inner for member in get_args(kind) for inner in members(member))
    return (types.NoneType,) if kind is None else (kind,)


def _convert_one(value: Any, kind: Any) -> Any:
    """The value as one member of a union has it, or _NO."""
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if hasattr(kind, "from_plain"):
        try:
            return kind.from_plain(value)
        except ValueError:
            return _NO
    if origin is Literal:
        return next((name for name in inside if type(name) is type(value) and name == value), _NO)
    if kind is Path:
        return _path(value)
    if kind in (bool, types.NoneType, str):
        return value if isinstance(value, kind) else _NO
    if kind is int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        return int(value) if whole and not isinstance(value, bool) else _NO
    if kind is float:
        if isinstance(value, int) and not isinstance(value, bool):
            return float(value) if abs(value) < 2**1023 else _NO
        return value if isinstance(value, float) else _NO
    if origin in _SEQUENCES + _SETS + _MAPPINGS:
        return _convert_container(value, origin, inside)
    return _NO if origin in _NEVER_PLAIN else value


def _convert_container(value: Any, origin: Any, inside: tuple[Any, ...]) -> Any:
    try:
        if origin in _MAPPINGS:
            if not isinstance(value, Mapping):
                return _NO
            key_kind, item_kind = inside or (Any, Any)
            made = {convert(key, key_kind): convert(item, item_kind) for key, item in value.items()}
            return type(value)(made) if isinstance(value, dict) else made
        accepted: tuple[Any, ...] = (list, tuple, *_SETS) if origin in _SETS else (list, tuple)
        if not isinstance(value, accepted):
            return _NO
        if origin is tuple and inside and Ellipsis not in inside:
            return type(value)(map(convert, value, inside)) if len(value) == len(inside) else _NO
        items = [convert(item, inside[0] if inside else Any) for item in value]
        if origin in _SETS:
            return (set if isinstance(value, (list, set)) else frozenset)(items)
        return type(value)(items)
    except (ConfigError, TypeError):
        return _NO


def _path(value: Any) -> Any:
    if not isinstance(value, (str, PurePath)) or (isinstance(value, str) and (not value.strip() or "\0" in value)):
        return _NO
    try:
        return Path(value).expanduser()  # or "~/queue" would make a directory called "~"
    except RuntimeError:
        return _NO


def _is_container(kind: Any) -> bool:
    known = get_origin(kind) in _SEQUENCES + _SETS + _MAPPINGS
    return known and all(is_convertible(inner) for inner in get_args(kind) if inner is not Ellipsis)


def _one_in_words(kind: Any) -> str:
    origin, inside = get_origin(kind) or kind, get_args(kind)
    if hasattr(kind, "from_plain"):
        return str(kind.expected)
    if origin is Literal:
        return " or ".join(map(repr, inside))
    if origin is tuple and inside and Ellipsis not in inside:
        return f"a list of {len(inside)} ({', '.join(map(in_words, inside))})"
    if origin in _MAPPINGS and all(map(in_words, inside)) and inside:
        return f"a mapping of {in_words(inside[0])} to {in_words(inside[1])}"
    if origin in _SEQUENCES + _SETS and inside and in_words(inside[0]):
        return f"{_WORDS[origin]} of {in_words(inside[0])}"
    return _WORDS.get(origin, "")


def _literal(text: str) -> Any:
    """The Python value that the text spells, or the text."""
    try:
        return literal(text.strip())
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


def _remedy(value: Any, choices: tuple[Any, ...]) -> str:
    if str in choices and isinstance(value, (bool, int, float)):
        return "; put it in quotes"
    if not isinstance(value, str):
        return ""
    if {int, float} & {*choices} and _number(value) is not None:
        # YAML reads 1e-3 as text.
        return f"; write it without quotes{', as 1.0e-3' if 'e' in value.lower() else ''}"
    if types.NoneType in choices and value.lower() in ("none", "null"):
        return "; write None in Python, null in YAML"
    if bool in choices and value.lower() in _TRUE + _FALSE:
        return "; write it without quotes"
    return did_you_mean(
        value, [str(name) for kind in choices if get_origin(kind) is Literal for name in get_args(kind)]
    )
