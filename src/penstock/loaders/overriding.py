"""A config, or none, and options by name: the config that both make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from penstock._dtypes import did_you_mean
from penstock.errors import ConfigError

__all__ = ["configured"]

Config = TypeVar("Config")


def configured(kind: type[Config], config: Config | None, overrides: Mapping[str, Any]) -> Config:
    """`config`, or the usual one, with the options that were passed by name."""
    if config is not None and not isinstance(config, kind):
        raise ConfigError(f"config must be of type {kind.__name__}, got {config!r}; options can be passed by name")
    known = [option.name for option in fields(kind)]  # type: ignore[arg-type]
    for name in overrides:
        if name not in known:
            raise TypeError(f"no option is called {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}")
    if config is None:
        return kind(**overrides)  # the usual one alone may need a framework that is not installed
    return replace(config, **overrides)  # type: ignore[type-var]
