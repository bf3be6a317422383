"""Is a config sufficient? Everything that is wrong with one, said at once, and the defaults of what it leaves out."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.kinds import Misfit, in_words
from penstock.config.settings import KNOWN, PREPARE, REQUIRED, TRAIN, Setting, check_settings, contradictions
from penstock.config.shared import SharedConfig, problems_with

__all__ = ["REQUIRED", "Setting", "validate"]

_log = logging.getLogger(__name__)

_NEAR = 0.85


def validate(
    config: SharedConfig | Mapping[str, Any],
    settings: Mapping[str, Setting] = MappingProxyType({}),
    *,
    owner: str = "the provider",
) -> SharedConfig:
    """The same config with every value as its setting has it, and with the defaults of those it leaves out.

    Checked are the settings of both commands and `settings`, those that `owner` declares; what is both must be right
    for both. Raises one ConfigError with all problems. A name that nobody knows is a problem if it looks like a slip
    of the pen; any other is kept, since the provider may read it, and logged.
    """
    if not isinstance(config, SharedConfig):
        config = SharedConfig(config)
    check_settings(settings, owner)
    checked = _Checked(config, settings, owner)
    problems = [*checked.slips(), *checked.missing(), *checked.misfits()]
    if not problems:
        problems = list(contradictions(checked.values))
    where = str(config.path) if config.path is not None else "the config"
    if problems:
        raise problems_with(where, problems)
    if unknown := [name for name in config if name not in checked.known]:
        _log.info("%s: no setting of the commands or of %s, passed on as it is: %s", where, owner, ", ".join(unknown))
    return config.replace(**checked.values)


class _Checked:
    """A config beside the settings it is checked against."""

    def __init__(self, config: SharedConfig, settings: Mapping[str, Setting], owner: str) -> None:
        self._config, self._settings, self._owner = config, settings, owner
        self.known = {**KNOWN, **settings}
        self.values: dict[str, Any] = {}
        self._meant: set[str] = set()

    def slips(self) -> Iterator[str]:
        """Unknown names that look like a known one, be that one there or not: the file may build on another."""
        for name in self._config:
            if name in self.known:
                continue
            for other in self.known:
                if _is_slip(name, other):
                    self._meant.add(other)
                    yield (
                        f"{name} = {self._config[name]!r:.60}: no such setting; did you mean {other!r} (of "
                        f"{self._of(other)})? A name of your own goes into the settings of the provider"
                    )
                    break

    def missing(self) -> Iterator[str]:
        """Required names that are not there, unless they were just misspelt."""
        for name in self.known:
            if name in self._config or name in self._meant:
                continue
            if name in self._config.left_out:
                yield f"{name} {self._config.left_out[name]}; {self._of(name)}: expected {_expected(self.known[name])}"
                continue
            declared = self._declared(name)
            if any(setting.required for setting in declared):
                yield f"{name} is missing; {self._of(name)}: expected {_expected(declared[-1])}"
            else:
                self.values[name] = declared[-1].default

    def misfits(self) -> Iterator[str]:
        """Values that are not of their kind, or do not pass their check."""
        for name in self.known:
            if name not in self._config:
                continue
            try:
                for setting in self._declared(name):
                    self.values[name] = setting.accept(self.values.get(name, self._config[name]))
            except Misfit as error:
                yield f"{name} = {self._config[name]!r:.60}: {error} ({self._of(name)})"

    def _declared(self, name: str) -> list[Setting]:
        """Ours, then the provider's: its default counts, if ours has one."""
        return [settings[name] for settings in (KNOWN, self._settings) if name in settings]

    def _of(self, name: str) -> str:
        """Who wants it."""
        if name in self._settings:
            return self._owner
        return "prepare" if name in PREPARE else "train" if name in TRAIN else "prepare and train"


def _expected(setting: Setting) -> str:
    return f"{in_words(setting.kind)} ({setting.text})" if setting.text else in_words(setting.kind)


def _is_slip(name: str, known: str) -> bool:
    """Whether one is the other mistyped; names that differ in a number only (`beta1`, `beta3`) are not."""
    first, second = (each.lower().replace("_", "") for each in (name, known))
    if first == second:
        return True
    if first.strip("0123456789") == second.strip("0123456789"):
        return False
    return difflib.SequenceMatcher(None, first, second).ratio() >= _NEAR
