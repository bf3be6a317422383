"""The arguments of a stage from a YAML file, checked against its signature before it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from penstock._dtypes import did_you_mean
from penstock.cli.values import Misfit, convert, takes_mapping
from penstock.errors import ConfigError, PenstockError

__all__ = ["Problems", "make"]

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Problems:
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
    problems: Problems,
    *,
    nested: Callable[[Any], Any],
    called: str = "argument",
) -> Any:
    """What `maker` makes of the value behind its name in the file; None if there were problems.

    A mapping holds keyword arguments; anything else is the first argument, and nothing (null) no argument. Where the
    first argument is itself a mapping (`rename: {old: new}`), one that names no parameter is taken to be it.
    """
    parameters = dict(inspect.signature(maker).parameters)
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.kind not in _VARIADIC}
    hints = _hints(maker)
    arguments = _named(given, parameters, hints, nested)
    before = len(problems)
    if arguments is None:
        problems.add(where, f"takes no arguments, got {given!r:.80}")
        return None
    for name in arguments:
        if name not in parameters and not takes_any:
            known = [_shown(parameter) for parameter in parameters]
            hint = did_you_mean(str(name), known) or f"; it takes {', '.join(known) or 'none'}"
            problems.add(where, f"unknown {called} {name!r}{hint}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            problems.add(where, f"the {called} {_shown(name)!r} is missing")
    for name, value in arguments.items():
        try:
            arguments[name] = convert(value, hints.get(name, Any), nested)
        except (Misfit, PenstockError) as error:
            problems.add(f"{where}.{_shown(name)}", str(error))
    if len(problems) > before:
        return None
    try:
        return maker(**arguments)
    except (PenstockError, ValueError, TypeError, LookupError, OSError) as error:
        problems.add(where, str(error))
        return None


def _named(
    given: Any, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any], nested: Callable[[Any], Any]
) -> dict[str, Any] | None:
    """The arguments by name; None if there is one and nothing takes it."""
    first = next(iter(parameters), None)
    if given is None:
        return {}
    if isinstance(given, Mapping):
        arguments = {_spelled(name, parameters): value for name, value in given.items()}
        whole = first is not None and takes_mapping(hints.get(first, Any))
        if not whole or any(name in parameters and _fits(value, hints.get(name, Any)) for name, value in arguments.items()):
            return arguments
    return {first: given} if first is not None else None


def _fits(value: Any, hint: Any) -> bool:
    try:
        convert(value, hint, nested=lambda given: given)
    except (Misfit, PenstockError):
        return False
    return True


def _spelled(name: Any, parameters: Mapping[str, inspect.Parameter]) -> Any:
    """`path` and `paths` mean the same, whichever the stage has."""
    other = {"path": "paths", "paths": "path"}.get(name)
    return other if other in parameters and name not in parameters else name


def _shown(name: str) -> str:
    return "path" if name == "paths" else name


def _hints(maker: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(maker.__init__ if isinstance(maker, type) else maker)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):
        return {}  # a plugin's annotations that only a type checker can read: its constructor checks
