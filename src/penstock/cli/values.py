"""One value from a YAML file for one parameter: does it fit the annotation, and what does it become.

Text where a function is expected names one (`module:function`); a mapping there holds columns and their expressions.
A mapping where a schema is expected holds columns and their types.
"""

from __future__ import annotations

import collections.abc
import importlib
import os
import re
import types
from collections.abc import Mapping
from typing import Any, Literal, Protocol, Union, get_args, get_origin

import pyarrow as pa
import pyarrow.compute as pc

from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError
from penstock.pipeline.stages import Transform
from penstock.transforms import parse_expression
from penstock.types import Schema

__all__ = ["Misfit", "Parts", "convert", "could_be", "import_function", "takes_mapping"]

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_PLAIN: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    types.NoneType: ((types.NoneType,), "null"),
}
_LISTS = (list, collections.abc.Iterable, collections.abc.Sequence, collections.abc.Collection)
_MAPPINGS = (dict, collections.abc.Mapping)


class Misfit(Exception):  # noqa: N818 - it never leaves the command line: it becomes a line in a ConfigError
    """A value that a parameter does not take."""


class Parts(Protocol):
    """Makes what a plain value may stand for."""

    def function(self, path: str) -> Any:
        """The function that `module:name` names."""
        ...

    def transform(self, given: Any, where: str) -> Any:
        """A transform that is an argument of another one."""
        ...


def convert(value: Any, hint: Any, parts: Parts, where: str) -> Any:
    """The value as the annotation wants it."""
    members = _members(hint)
    if value is None and types.NoneType in members:
        return None
    if pa.Schema in members:
        if not isinstance(value, Mapping):
            raise Misfit(_misfit(value, hint))
        return Schema(value).to_arrow()
    if Transform in members:
        return parts.transform(value, where)
    if any(_is_function(member) for member in members):
        if isinstance(value, str) and _FUNCTION.fullmatch(value):
            return parts.function(value)
        if isinstance(value, Mapping) and takes_mapping(hint):
            return {name: _expression(text) for name, text in value.items()}
    if not any(_fits(value, member) for member in members):
        raise Misfit(_misfit(value, hint))
    return value


def could_be(value: Any, hint: Any) -> bool:
    """Whether a value has the shape of what is expected, without importing or making anything."""
    members = _members(hint)
    if pa.Schema in members and isinstance(value, Mapping):
        return True
    return any(_fits(value, member) or (_is_function(member) and isinstance(value, str)) for member in members)


def takes_mapping(hint: Any) -> bool:
    """Whether a mapping in the file can be this one argument (`rename: {old: new}`)."""
    return any(get_origin(member) in _MAPPINGS or member in _MAPPINGS for member in _members(hint))


def import_function(path: str) -> Any:
    """The object behind `module:name`."""
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"no module {error.name!r} for {path!r}; put it beside the YAML file, or install it"
            ) from error
        raise ConfigError(f"importing {module_name!r} failed: {error}") from error
    except Exception as error:
        raise ConfigError(f"importing {module_name!r} failed: {type(error).__name__}: {error}") from error
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [known for known in vars(found) if not known.startswith("_")])
            raise ConfigError(f"no {name!r} in {getattr(module, '__file__', None) or module_name}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{path!r} is {found!r:.80}, expected a function")
    return found


def _expression(text: Any) -> pc.Expression:
    return parse_expression(text) if isinstance(text, str) else pc.scalar(text)


def _members(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(inner for member in get_args(hint) for inner in _members(member))
    return (types.NoneType,) if hint is None else (hint,)


def _is_function(hint: Any) -> bool:
    return hint is collections.abc.Callable or get_origin(hint) is collections.abc.Callable


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain YAML value is of this type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return isinstance(value, _PLAIN[hint][0]) and (hint is bool or not isinstance(value, bool))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin in _LISTS or hint in _LISTS:
        return isinstance(value, list) and all(_fits_any(item, *arguments[:1]) for item in value)
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(_fits_any, value, arguments))
    if origin in _MAPPINGS or hint in _MAPPINGS:
        return isinstance(value, dict) and all(
            _fits_any(key, *arguments[:1]) and _fits_any(item, *arguments[1:]) for key, item in value.items()
        )
    # No YAML value is one of these; what is not known here is left to the constructor.
    return not (_is_function(hint) or origin is os.PathLike or hint in (pc.Expression, pa.DataType))


def _fits_any(value: Any, hint: Any = Any) -> bool:
    return any(_fits(value, member) for member in _members(hint))


def _misfit(value: Any, hint: Any) -> str:
    words = list(dict.fromkeys(word for member in _members(hint) if (word := _in_words(member))))
    text = f"expected {' or '.join(words)}, got {value!r:.80}"
    if isinstance(value, str) and {int, float} & set(_members(hint)) and _is_number(value):
        return text + ", which YAML takes for text; write it with a point, as 1.0e-3, and without quotes"
    if str in _members(hint) and isinstance(value, (bool, int, float)):
        return text + "; put quotes around it"
    return text


def _in_words(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _PLAIN[hint][1]
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin in _LISTS or hint in _LISTS:
        inside = [word for member in arguments[:1] for part in _members(member) if (word := _in_words(part))]
        return f"a list of {' or '.join(inside)}" if inside else "a list"
    if origin is tuple:
        return f"a list of {len(arguments)}"
    if origin in _MAPPINGS or hint in _MAPPINGS:
        return "a mapping"
    if _is_function(hint):
        return "a function as module:name"
    if hint is pa.Schema:
        return "a mapping of columns to types"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
