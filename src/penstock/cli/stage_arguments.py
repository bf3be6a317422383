"""The arguments of a stage from a YAML file, checked against its signature before it is made."""

from __future__ import annotations

import collections.abc
import importlib
import inspect
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, PenstockError
from penstock.pipeline.stages import Transform
from penstock.transforms import parse_expression
from penstock.types import Schema

__all__ = ["ArgumentProblems", "Misfit", "Parts", "convert", "could_be", "import_function", "make", "takes_mapping"]


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


_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class ArgumentProblems:
    """Everything that is wrong with a description, each with its place, to be said at once."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, where: str, what: str) -> None:
        self._found.append(f"{where}: {what}")

    def check(self, name: str) -> None:
        """Raise one ConfigError with all of them, if there are any."""
        if len(self._found) == 1:
            raise ConfigError(f"{name}: {self._found[0]}")
        if self._found:
            raise ConfigError(f"{name} has {len(self._found)} problems:" + "".join(f"\n  {one}" for one in self._found))


def make(
    maker: Callable[..., Any],
    given: Any,
    where: str,
    problems: ArgumentProblems,
    *,
    parts: Parts,
    called: str = "argument",
) -> Any:
    """What `maker` makes of the value behind its name in the file; None if there were problems.

    A mapping holds keyword arguments; anything else is the first argument, and nothing (null) no argument. Where the
    first argument is itself a mapping (`rename: {old: new}`), one that names no parameter is taken to be it.
    """
    signature = _Signature.of(maker)
    arguments = signature.named(given)
    if arguments is None:
        problems.add(where, f"takes no arguments, got {given!r:.80}")
        return None
    before = len(problems)
    for problem in signature.name_problems(arguments, called):
        problems.add(where, problem)
    for name, value in arguments.items():
        place = f"{where}.{_shown(name)}" if value is not given else where
        try:
            arguments[name] = convert(value, signature.hint(name), parts, place)
        except (Misfit, PenstockError) as error:
            problems.add(place, str(error))
    if len(problems) > before:
        return None
    try:
        return maker(**arguments)
    except (PenstockError, ValueError, TypeError, LookupError, OSError) as error:
        problems.add(where, str(error))
        return None


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a maker takes."""

    parameters: dict[str, inspect.Parameter]
    hints: dict[str, Any]
    takes_any: bool
    """Whether it has `**options`, and so no unknown names."""

    @classmethod
    def of(cls, maker: Callable[..., Any]) -> Self:
        parameters = inspect.signature(maker).parameters.values()
        try:
            hints = get_type_hints(maker.__init__ if isinstance(maker, type) else maker)  # type: ignore[misc]
        except (NameError, TypeError, AttributeError):
            hints = {}  # a plugin's annotations that only a type checker can read: its constructor checks
        return cls(
            {parameter.name: parameter for parameter in parameters if parameter.kind not in _VARIADIC},
            hints,
            any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
        )

    def hint(self, name: str) -> Any:
        return self.hints.get(name, Any)

    def named(self, given: Any) -> dict[str, Any] | None:
        """The arguments by name; None if there is one and nothing takes it."""
        first = next(iter(self.parameters), None)
        if given is None:
            return {}
        if isinstance(given, Mapping):
            arguments = {self._spelled(name): value for name, value in given.items()}
            by_name = any(name in self.parameters and could_be(arguments[name], self.hint(name)) for name in arguments)
            if by_name or first is None or not takes_mapping(self.hint(first)):
                return arguments
        return {first: given} if first is not None else None

    def name_problems(self, arguments: Mapping[str, Any], called: str) -> Iterator[str]:
        """Names that are unknown, and names that are missing unless they were just misspelt."""
        known = [_shown(name) for name in self.parameters]
        meant: set[str] = set()
        for name in arguments:
            if name in self.parameters or self.takes_any:
                continue
            hint = did_you_mean(str(name), known)
            meant.update(other for other in known if repr(other) in hint)
            yield f"unknown {called} {name!r}" + (hint or f"; it takes {', '.join(known) or 'none'}")
        for name, parameter in self.parameters.items():
            if parameter.default is inspect.Parameter.empty and name not in arguments and _shown(name) not in meant:
                yield f"the {called} {_shown(name)!r} is missing"

    def _spelled(self, name: Any) -> Any:
        """`path` and `paths` mean the same, whichever the stage has."""
        other = {"path": "paths", "paths": "path"}.get(name)
        return other if other in self.parameters and name not in self.parameters else name


def _shown(name: str) -> str:
    return "path" if name == "paths" else name
