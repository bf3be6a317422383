"""Options of chats that `prepare`, `lint` and `show` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import orjson
import typer

__all__ = ["ChatOption", "chat_options", "names"]

ChatOption = Annotated[
    list[str] | None,
    typer.Option(
        "--chat",
        metavar="NAME=VALUE",
        help="More options of chats, as often as needed: now=2026-01-31, variables.enable_thinking=false, "
        "end_of_turn='<|user|>', gate.prompt=false, allow_lost=earlier_thoughts, "
        'markers=\'["<|im_start|>assistant\\n", "<|im_end|>"]\', special_tokens=A,B. Values are JSON, or else text.',
    ),
]

_TEXTS = ("now", "end_of_turn")
_LISTS = ("allow_lost", "special_tokens")
_PAIRS = ("markers",)
_MAPPINGS = ("variables", "gate")


def chat_options(
    train_on: str, columns: str = "", *, include_eot: bool, more: Sequence[str] | None = None
) -> dict[str, Any]:
    """The options of `FormatChat` that differ from its defaults; none, if none do: then rows decide what they are."""
    options: dict[str, Any] = {}
    if columns:
        pairs = [name.partition("=") for name in names(columns)]
        if not all(role and equals and column for role, equals, column in pairs):
            raise typer.BadParameter(f"expected role=column,..., got {columns!r}", param_hint="--columns")
        options["columns"] = {role.strip(): column.strip() for role, _, column in pairs}
    if train_on != "assistant":
        chosen = names(train_on)
        options["train_on"] = train_on if train_on in ("last", "all", "flags") else chosen
    if not include_eot:
        options["include_eot"] = False
    for given in more or ():
        _add(options, given)
    return options


def names(given: str) -> Sequence[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def _add(options: dict[str, Any], given: str) -> None:
    name, equals, text = given.partition("=")
    name, dot, key = name.strip().partition(".")
    known = (*_TEXTS, *_LISTS, *_PAIRS, *_MAPPINGS)
    if not equals or name not in known or (name in _MAPPINGS) != bool(dot and key):
        expected = ", ".join([*_TEXTS, *_LISTS, *_PAIRS, *(f"{each}.NAME" for each in _MAPPINGS)])
        raise typer.BadParameter(f"expected NAME=VALUE with a name of {expected}, got {given!r}", param_hint="--chat")
    value = _value(text)
    if name in _MAPPINGS:
        options.setdefault(name, {})[key] = value
    elif name in _TEXTS:
        options[name] = text if not isinstance(value, list) else value
    elif name in _LISTS:
        options[name] = value if isinstance(value, list) else [each.strip("[]'\" ") for each in names(text)]
    elif isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value):
        options[name] = tuple(value)
    else:
        raise typer.BadParameter(f"markers are a JSON list of two texts, got {text!r}", param_hint="--chat")


def _value(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
