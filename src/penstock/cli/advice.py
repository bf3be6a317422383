"""Advice of errors in the words of the command line: the library says `pass truncation='drop'`, a command
`pass --truncation drop`.

Only what the command has an option for is spelled this way; everything else stays as it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import get_args

from typer.models import OptionInfo

Wording = Callable[[str], str]
"""Function of a message of the library: the message of a command."""

_TEXT = r"'[^']*'|\"[^\"]*\""
_VALUE = rf"(?:{_TEXT})(?:(?:, | or )(?:{_TEXT}))*|\{{[^}}]*\}}|\[[^\]]*\]|\.\.\.|datetime\([^)]*\)|[\w.]*\w"
_ARGUMENT = re.compile(
    rf"(?P<verb>\bpass )?(?<![\w.\-'\"(\[])(?P<name>[a-z_]+)=(?P<value>{_VALUE})?(?: \((?P<option>--[^)]+)\))?"
)
_CHAT_NAMES = ("allow_lost", "end_of_turn", "markers", "now", "special_tokens")
"""Options of `FormatChat` that `--chat NAME=VALUE` takes, and the key `chat` of a loader file."""
_PREFERENCES = re.compile(
    r"use PreferenceDataLoader(?: \(FormatPreference in a pipeline\)|, or FormatPreference in a pipeline)?"
)
_RECEIVER = re.compile(r"(--[\w-]+(?: [\w,]+)?) to (?:FormatChat|a loader)\b")
_LOADER_NAMES = {"template": "chat_template", "column": "text_column"}
"""Keys of a loader file that are called otherwise in a recipe."""


@dataclass(frozen=True, slots=True)
class _Flags:
    """Option of a command: its flag, and that of its opposite."""

    flag: str
    opposite: str | None = None


def command_wording(parameters: Iterable[inspect.Parameter]) -> Wording:
    """The wording of a command with these parameters."""
    flags = {each.name: found for each in parameters if (found := _flags(each)) is not None}
    if "eot" in flags:
        flags["include_eot"] = flags["eot"]

    def reworded(message: str) -> str:
        if "preference" in flags:
            message = _PREFERENCES.sub("pass --preference", message)
        message = _ARGUMENT.sub(lambda found: _reworded(found, flags), message)
        return _RECEIVER.sub(r"\1", message)

    return reworded


def _reworded(found: re.Match[str], flags: Mapping[str, _Flags]) -> str:
    verb, name, value, option = (found[part] or "" for part in ("verb", "name", "value", "option"))
    known = flags.get(name)
    if known is not None and option:
        return f"{verb}{option}"
    if name == "columns" and not value.startswith("{"):
        return found[0]  # those of a source, not the roles of a chat
    if known is not None and (known.opposite is not None or value == "True"):
        return f"{verb}{known.opposite if value == 'False' else known.flag}"
    if known is not None:
        return f"{verb}{known.flag}{' ' if value else ''}{_shell_value(value)}"
    if name in _CHAT_NAMES and "chat" in flags:
        return f"{verb}--chat {name}={_shell_value(value) or '...'}"
    if verb and "assignments" in flags:
        return f"{verb}{_assignment(name, value)}"
    return found[0]


def _shell_value(value: str) -> str:
    """A Python value as the options of `penstock` take it."""
    if value.startswith("datetime("):
        return "2026-01-31"
    if value.startswith("{"):
        return ",".join(f"{key}={text}" for key, text in re.findall(r"'([^']*)': (\.\.\.|[^,}]+)", value))
    if value.startswith("["):
        value = value.replace(", ", ",")
    return re.sub(r"['\"\[\]]", "", value)


def _assignment(name: str, value: str) -> str:
    """`--set` for a key of a loader file; the values are YAML."""
    if name == "columns" and value.startswith("{"):
        pairs = re.findall(r"'([^']*)': (\.\.\.|[^,}]+)", value)
        return " ".join(f"--set columns.{key}={text}" for key, text in pairs)
    name = f"chat.{name}" if name in (*_CHAT_NAMES, "include_eot") else _LOADER_NAMES.get(name, name)
    value = value.replace(", ", ",") if value.startswith("[") else value
    return f"--set {name}={ {'None': 'null', '': '...'}.get(value, value) }"


def _flags(parameter: inspect.Parameter) -> _Flags | None:
    info = next((each for each in get_args(parameter.annotation) if isinstance(each, OptionInfo)), None)
    if info is None:
        return None
    # typer keeps the first flag of an annotation in the place of the default
    given = [each for each in map(str, (info.default, *(info.param_decls or ()))) if each.startswith("--")]
    flag, _, opposite = (given[0] if given else f"--{parameter.name.replace('_', '-')}").partition("/")
    return _Flags(flag, opposite or None)
