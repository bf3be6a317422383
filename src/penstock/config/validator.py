"""Validation of a shared config: defaults, checks, and all problems in one error."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from penstock.config.settings import KNOWN, PREPARE, REQUIRED, TRAIN, Setting, check_settings, conflicts
from penstock.config.shared import SharedConfig
from penstock.errors import ConfigError
from penstock.types.conversion import Problems, in_words

__all__ = ["REQUIRED", "Setting", "validate"]

_log = logging.getLogger(__name__)

_SIMILAR = 0.85


def validate(
    config: SharedConfig | Mapping[str, Any],
    settings: Mapping[str, Setting] = MappingProxyType({}),
    *,
    owner: str = "the provider",
) -> SharedConfig:
    """The config with converted values and with defaults for what it leaves out.

    Checks the settings of both commands and `settings`, those of `owner`; a setting of both must pass both checks.
    Raises one ConfigError with all problems. An unknown name is a problem if it is close to a known one; any other is
    logged and kept, since the provider may read it.
    """
    if not isinstance(config, SharedConfig):
        config = SharedConfig(config)
    check_settings(settings, owner)
    known = {**KNOWN, **settings}
    problems, values = Problems(), dict[str, Any]()

    def reader(name: str) -> str:
        if name in settings:
            return owner
        return "prepare" if name in PREPARE else "train" if name in TRAIN else "prepare and train"

    misspelled = {}
    for name in config:
        if name not in known and (meant := next((other for other in known if _is_misspelling(name, other)), None)):
            misspelled[meant] = name
            hint = "a name of your own goes into the settings of the provider"
            shown = f"{name} = {config[name]!r:.60}"
            problems.add(shown, f"unknown setting; did you mean {meant!r} ({reader(meant)})? {hint}")
    for name in known:
        declared = [each[name] for each in (KNOWN, settings) if name in each]
        if name in config:
            continue
        if name in config.left_out:
            problems.add(name, f"{config.left_out[name]}; expected {_expected(known[name])} ({reader(name)})")
        elif name not in misspelled and any(setting.required for setting in declared):
            problems.add(name, f"missing; expected {_expected(declared[-1])} ({reader(name)})")
        else:
            values[name] = declared[-1].default
    for name in known:
        try:
            for setting in (each[name] for each in (KNOWN, settings) if name in config and name in each):
                values[name] = setting.accept(values.get(name, config[name]))
        except ConfigError as error:
            problems.add(f"{name} = {config[name]!r:.60}", f"{error} ({reader(name)})")
    if not problems:
        problems.found += conflicts(values)
    where = str(config.path) if config.path is not None else "the config"
    problems.check(where)
    if unknown := [name for name in config if name not in known]:
        _log.info("%s: unknown settings, passed on to %s: %s", where, owner, ", ".join(unknown))
    return config.replace(**values)


def _expected(setting: Setting) -> str:
    return f"{in_words(setting.kind)} ({setting.text})" if setting.text else in_words(setting.kind)


def _is_misspelling(name: str, known: str) -> bool:
    """True if one is close to the other; names that differ in a number only (`beta1`, `beta3`) are not."""
    first, second = (each.lower().replace("_", "") for each in (name, known))
    if first == second:
        return True
    if first.strip("0123456789") == second.strip("0123456789"):
        return False
    return difflib.SequenceMatcher(None, first, second).ratio() >= _SIMILAR
