"""Options that commands share, and the decorator that adds them to a command."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from typer.core import TyperGroup

from penstock.chat.templates import BUILT_IN
from penstock.cli.advice import command_wording
from penstock.cli.console import log_lines, report_errors, working
from penstock.corpus.quality.filters import FILTERS
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig, load_config
from penstock.loaders.loader_file import open_rank as open_rank
from penstock.loaders.loader_file import planned_world as planned_world

ConfigArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML or JSON file that describes a loader, or a token store.")
]
"""A text: a `Path` would spoil a URL."""
StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help="Directory of the store, or its URL in a bucket.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the file, e.g. --set batch_size=4 --set weights.web=0.5. The value is YAML; items of a "
        "list go by number, from 0. May be given several times.",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(metavar="ENGINE", help="Where to run: local, ray, or ray://HOST:PORT. The output has the same bytes."),
]
MetricsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics",
        metavar="TARGET",
        help="Where metrics go: FILE.jsonl, prometheus://:9464, otlp://HOST, tensorboard:DIR ... May be repeated.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no closing table.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def _option(kind: Any, help_text: str, *flags: str, **more: Any) -> Any:
    return Annotated[kind, typer.Option(*flags, help=help_text, **more)]


_TOKENIZER = "tokenizer.json, a model directory, a SentencePiece model, a tiktoken name, or byte."
_TEMPLATE = f"Chat template: {', '.join(BUILT_IN)}, or a .jinja file. Default: the tokenizer's own."
_PREFERENCE = (
    "Prepare rows with chosen and rejected answers, or with a label (KTO), as preferences; or as plain chats, trained "
    "on the chosen answer, or on every answer regardless of its label. Default: refuse them."
)
_CHAT = (
    "Other chat options, may be given several times: now=2026-01-31, variables.enable_thinking=false, "
    "end_of_turn='<|user|>', gate.prompt=false, allow_lost=earlier_thoughts, "
    'markers=\'["<|im_start|>assistant\\n", "<|im_end|>"]\', special_tokens=A,B. Values are JSON, or else text.'
)
_TRANSFORM = (
    "Transform of raw rows, before they are tokenized, may be given several times: drop_nulls=text, lower=text, "
    'replace_regex=\'{"column": "text", "pattern": "a+", "replacement": "a"}\', or one of a plugin. Values are JSON, '
    "or else text."
)
_COLUMNS = "Columns to read, A,B; or chats in plain columns, such as user=question,assistant=answer."
RECIPE_OPTIONS: dict[str, Any] = {
    "transforms": _option(list[str] | None, _TRANSFORM, "--transform", metavar="NAME[=VALUE]"),
    "columns": _option(str, _COLUMNS, metavar="A,B | ROLE=COLUMN,..."),
    "allow_empty": _option(bool, "Pass over files of 0 bytes.", "--allow-empty"),
    "tokenizer": _option(str, _TOKENIZER, metavar="T"),
    "template": _option(str | None, _TEMPLATE, "--template", "--chat-template", metavar="X"),
    "column": _option(str | None, "Column with the text of documents. Default: text."),
    "filters": _option(str, f"Quality filters: {', '.join(FILTERS)}, or those of plugins.", "--filter", metavar="A,B"),
    "dedup": _option(str, "Drop duplicates: exact, minhash, or both.", metavar="A,B"),
    "max_length": _option(int | None, "Maximum number of tokens in a row.", min=1),
    "truncation": _option(str, "Policy for longer rows: error, drop, left, right, split."),
    "add_bos": _option(
        bool | None, "Begin every document with BOS. Default: if the tokenizer itself does.", "--bos/--no-bos"
    ),
    "add_eos": _option(
        bool | None, "End every document with EOS. Default: if the tokenizer has one.", "--eos/--no-eos"
    ),
    "keep": _option(str, "Columns to keep in addition to the tokens.", metavar="A,B"),
    "preference": _option(bool | None, _PREFERENCE, "--preference/--no-preference"),
    "max_prompt_length": _option(int | None, "For preferences: a longer prompt loses its beginning.", min=1),
    "fast": _option(bool, "Use the fast tokenizer where it gives the reference's ids.", "--fast/--no-fast"),
}
"""A command-line option for each field of `Recipe`; `chat` has the three below."""
_CHAT_OPTIONS: dict[str, tuple[Any, Any]] = {
    "train_on": (
        _option(str, "Supervised turns: assistant, last, all, flags, or roles (A,B).", metavar="WHAT"),
        "assistant",
    ),
    "eot": (_option(bool, "Supervise the token that ends a turn.", "--eot/--no-eot"), True),
    "chat": (_option(list[str] | None, _CHAT, "--chat", metavar="NAME=VALUE"), None),
}
_TEXTS = ("now", "end_of_turn")
_LISTS = ("allow_lost", "special_tokens")
_MAPPINGS = ("variables", "gate")
_WHOLE = 10_000
"""Characters of a summary."""


class CommandGroup(TyperGroup):
    """Group of commands whose help has their summaries in full."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(_WHOLE)) for name, found in commands if found])


def command(recipe: Sequence[str] = (), *, stopped: str = "stopped") -> Callable[..., Callable[..., None]]:
    """Decorator of every command: reports errors, and adds `--debug`.

    With `recipe`, names of fields of `Recipe`, the parameter `recipe` of the function becomes an option for each field.
    The function gets the keywords of `Recipe`. `stopped` is the message after Ctrl-C.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True)
        takes_recipe, takes_debug = ("recipe" in own.parameters, "debug" in own.parameters)
        parameters = [
            each
            for parameter in own.parameters.values()
            for each in (_recipe_parameters(recipe) if parameter.name == "recipe" else [parameter])
        ]
        if not takes_debug:
            parameters.append(_parameter("debug", DebugOption, default=False))

        wording = command_wording(parameters)

        @functools.wraps(function)
        def reporting(*, debug: bool = False, **given: Any) -> None:
            if takes_recipe:
                given["recipe"] = _recipe_keywords(recipe, given)
            if takes_debug:
                given["debug"] = debug
            with report_errors(debug=debug, stopped=stopped, wording=wording):
                function(**given)

        ordered = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
        reporting.__signature__ = own.replace(parameters=ordered)  # type: ignore[attr-defined]
        return reporting

    return decorate


def _parameter(name: str, annotation: Any, *, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _recipe_parameters(names: Sequence[str]) -> Iterator[inspect.Parameter]:
    defaults = {
        field.name: {MISSING: inspect.Parameter.empty, (): ""}.get(field.default, field.default)
        for field in fields(Recipe)
    } | {"transforms": None, "columns": ""}
    for name in names:
        if name == "chat":
            yield from (_parameter(each, kind, default=value) for each, (kind, value) in _CHAT_OPTIONS.items())
        else:
            yield _parameter(name, RECIPE_OPTIONS[name], default=defaults[name])


def _recipe_keywords(names: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the recipe out of `given`."""
    keywords = {name: given.pop(name) for name in names if name != "chat"}
    keywords |= {name: _split(keywords[name]) for name in ("filters", "dedup", "keep") if name in keywords}
    if "columns" in keywords:
        keywords["columns"] = _column_names(keywords["columns"])
    if "transforms" in keywords:
        keywords["transforms"] = [_transform(each) for each in keywords["transforms"] or ()]
    return keywords | ({"chat": _chat_keywords(given)} if "chat" in names else {})


def _column_names(given: str) -> list[str] | dict[str, str] | None:
    """Names of columns, or the column of each role."""
    pairs = [name.partition("=") for name in _split(given)]
    if not any(equals for _, equals, _ in pairs):
        return [name.strip() for name, _, _ in pairs] or None
    if not all(role and equals and column for role, equals, column in pairs):
        raise typer.BadParameter(f"expected A,B or role=column,..., got {given!r}", param_hint="--columns")
    return {role.strip(): column.strip() for role, _, column in pairs}


def _transform(given: str) -> str | dict[str, Any]:
    """Name of a transform with its options."""
    name, equals, text = given.partition("=")
    if not equals:
        return name.strip()
    try:
        return {name.strip(): orjson.loads(text)}
    except orjson.JSONDecodeError:
        return {name.strip(): text}


def _chat_keywords(given: dict[str, Any]) -> dict[str, Any]:
    """The options of `FormatChat` that differ from their defaults; without any, the rows decide if they are chats."""
    train_on, eot, more = (given.pop(name) for name in _CHAT_OPTIONS)
    options: dict[str, Any] = {}
    if train_on != "assistant":
        options["train_on"] = train_on if train_on in ("last", "all", "flags") else _split(train_on)
    if not eot:
        options["include_eot"] = False
    for assignment in more or ():
        _add_chat_option(options, assignment)
    return options


def _add_chat_option(options: dict[str, Any], assignment: str) -> None:
    name, equals, text = assignment.partition("=")
    name, dot, key = name.strip().partition(".")
    known = (*_TEXTS, *_LISTS, "markers", *_MAPPINGS)
    if not equals or name not in known or (name in _MAPPINGS) != bool(dot and key):
        expected = ", ".join(f"{each}.NAME" if each in _MAPPINGS else each for each in known)
        raise typer.BadParameter(
            f"expected NAME=VALUE with a name of {expected}, got {assignment!r}", param_hint="--chat"
        )
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = text
    if name in _MAPPINGS:
        options.setdefault(name, {})[key] = value
    elif name in _TEXTS:
        options[name] = text if not isinstance(value, list) else value
    elif name in _LISTS:
        options[name] = value if isinstance(value, list) else [each.strip("[]'\" ") for each in _split(text)]
    elif isinstance(value, list) and len(value) == 2 and all(isinstance(each, str) for each in value):
        options[name] = tuple(value)
    else:
        raise typer.BadParameter(f"markers: expected a JSON list of two texts, got {text!r}", param_hint="--chat")


def _split(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


def check_assignments(assignments: Sequence[str] | None) -> Sequence[str]:
    """The values of `--set`; one that is no assignment is a usage error."""
    for assignment in assignments or ():
        if not assignment.partition("=")[0].strip() or "=" not in assignment:
            raise typer.BadParameter(f"expected a.b=value, got {assignment!r}", param_hint="--set")
    return assignments or ()


def read_config(path: str, assignments: Sequence[str] | None) -> LoaderConfig:
    """The loader file, changed by `--set`."""
    return load_config(path, check_assignments(assignments))


def read_planned(path: str, assignments: Sequence[str] | None) -> LoaderConfig:
    """The loader file, if the loader has a plan: a stream has none."""
    config = read_config(path, assignments)
    if config.arguments.get("streaming"):
        raise ConfigError(
            f"{config.name}: a stream has no plan, since its length is known only at its end; prepare the data first, "
            "or pass --set streaming=false"
        )
    return config


@contextmanager
def opened(config: LoaderConfig, **more: Any) -> Iterator[DataLoader]:
    """The loader of rank 0; warnings while raw files are prepared go to standard error."""
    with log_lines(Console(stderr=True), logging.WARNING):
        with working(f"opening {config.name}"):
            loader = open_rank(config, **more)
        with loader:
            yield loader
