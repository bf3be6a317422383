"""Transforms by name: those of penstock in snake case, and those of plugins."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from typing import Any

from penstock import plugins
from penstock._suggest import check_options, did_you_mean
from penstock.errors import ConfigError


def snake_case(name: str) -> str:
    """The name of a class as files have it."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@cache
def built_in_transforms() -> Mapping[str, Callable[..., Any]]:
    """The transforms of penstock by name."""
    from penstock import transforms

    public = {name: getattr(transforms, name) for name in dir(transforms)}
    return {
        snake_case(name): kind
        for name, kind in public.items()
        if isinstance(kind, type) and hasattr(kind, "transform") and kind.__module__ != "penstock.pipeline.stages"
    }


def named_transform(given: str | Mapping[str, Any]) -> Any:
    """The transform that a name stands for: `drop_nulls`, or `{"lower": "text"}`, or `{"shout": {"column": "text"}}`.

    A mapping of its parameters is passed by name, any other value as the first argument.
    """
    if isinstance(given, Mapping):
        if len(given) != 1:
            raise ConfigError(f"expected one transform with its options, such as {{'lower': 'text'}}, got {given!r}")
        ((name, options),) = given.items()
    else:
        name, options = given, {}
    known = built_in_transforms()
    if name in known:
        maker: Callable[..., Any] = known[name]
    elif name in (installed := [each.name for each in plugins.installed() if each.group == "transforms"]):
        maker = plugins.find("transforms", name)
    else:
        hint = did_you_mean(name, [*known, *installed])
        raise ConfigError(
            f"no transform is called {name!r}{hint}; `penstock plugins` lists them; a transform of yours is passed as "
            "an object"
        )
    parameters = signature(maker).parameters
    by_name = options is None or isinstance(options, Mapping)
    if isinstance(options, Mapping) and not options.keys() <= parameters.keys():
        first = str(next(iter(parameters.values())).annotation) if parameters else ""
        by_name = "Mapping" not in first and "dict" not in first  # `rename: {old: new}` is the first argument
        check_options(options if by_name else (), parameters, "argument", where=f"transform {name!r}")
    try:
        return maker(**(options or {})) if by_name else maker(options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"transform {name!r} with {options!r:.200}: {error}") from None
