"""What one setting of a config may be."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.config.kinds import Misfit, fit, in_words, understood
from penstock.config.values import NotPlain, freeze
from penstock.errors import ConfigError

__all__ = ["REQUIRED", "Setting", "check_settings"]


class _Required(enum.Enum):
    REQUIRED = "REQUIRED"

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED: Final = _Required.REQUIRED
"""The default of a setting that every config has to have."""


@dataclass(frozen=True)
class Setting:
    """A value of the shared config: its kind, its default, what else it must fulfil, and what it is for.

        settings = {"mask_probability": Setting(float, 0.15, check=lambda p: 0 < p <= 1, text="above 0, at most 1")}

    `kind` is a type or an annotation (`penstock.config.kinds`). `check` is given a value of that kind and returns
    whether it will do; or, for a message of its own, what is wrong with it in words (None: nothing).
    """

    kind: Any
    default: Any = REQUIRED
    check: Callable[[Any], bool | str | None] | None = field(default=None, kw_only=True)
    text: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        if not understood(self.kind):
            raise ConfigError(
                f"a setting cannot be of the kind {self.kind!r}; use int, float, bool, str, Path, list, tuple, set, "
                "dict, Literal[...], Any, or a union of them"
            )
        if self.default is REQUIRED:
            return
        try:
            object.__setattr__(self, "default", fit(freeze(self.default), self.kind))
        except (Misfit, NotPlain) as error:
            raise ConfigError(f"the default {self.default!r} of a setting does not fit its kind: {error}") from None

    @property
    def required(self) -> bool:
        """Whether a config has to have it."""
        return self.default is REQUIRED

    def accept(self, value: Any) -> Any:
        """The value as the kind has it; raises Misfit with what is wrong."""
        fitted = fit(value, self.kind)
        if self.check is None:
            return fitted
        try:
            verdict = self.check(fitted)
        except Exception as error:  # the check is the provider's: whatever it raises is a verdict
            raise Misfit(f"its check raised {type(error).__name__}: {error}") from error
        if isinstance(verdict, str) and verdict:
            raise Misfit(verdict)
        if verdict is not None and verdict != "" and not verdict:
            raise Misfit(f"not allowed; expected {self.text or in_words(self.kind)}")
        return fitted


def check_settings(settings: Mapping[str, Setting], owner: str) -> None:
    """Refuse what a provider declares if it is not names and settings."""
    for name, setting in settings.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise ConfigError(f"{owner}.settings: a name in a config file is expected, got {name!r}")
        if not isinstance(setting, Setting):
            raise ConfigError(f"{owner}.settings[{name!r}] is {setting!r}; write Setting(kind, default)")
