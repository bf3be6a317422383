"""The arguments of a stage from a YAML file, checked against its signature before it is made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, get_type_hints

from penstock._dtypes import did_you_mean
from penstock.cli.values import Misfit, Parts, convert, could_be, takes_mapping
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
