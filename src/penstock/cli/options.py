"""Options that commands share, and the decorator that adds them to a command."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from penstock.cli.console import log_lines, report_errors
from penstock.corpus.recipe import Recipe
from penstock.errors import ConfigError
from penstock.loaders.base import DataLoader
from penstock.loaders.loader_file import LoaderConfig, load_config

__all__ = [
    "RECIPE_OPTIONS",
    "ConfigArgument",
    "JsonOption",
    "QuietOption",
    "SetOption",
    "StoreArgument",
    "check_assignments",
    "command",
    "open_rank",
    "opened",
    "read_config",
    "read_planned",
]

ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML or JSON file that describes a loader, or a token store.")
]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="Directory of the store.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a value of the file, e.g. --set batch_size=4 --set weights.web=0.5. The value is YAML; items of a "
        "list go by number, from 0. May be given several times.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no closing table.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

_NAMES = "A,B"
RECIPE_OPTIONS: dict[str, Any] = {
    "tokenizer": Annotated[
        str,
        typer.Option(
            metavar="T", help="tokenizer.json, a model directory, a SentencePiece model, a tiktoken name, or byte."
        ),
    ],
    "template": Annotated[
        str | None,
        typer.Option(
            metavar="X",
            help="Chat template: chatml, llama3, mistral, gemma, qwen, zephyr, alpaca, vicuna, plain, or a .jinja "
            "file. Default: the tokenizer's own.",
        ),
    ],
    "column": Annotated[str | None, typer.Option(help="Column with the text of documents. Default: text.")],
    "filters": Annotated[
        str, typer.Option("--filter", metavar=_NAMES, help="Quality filters: gopher, c4, fineweb, length, latin.")
    ],
    "dedup": Annotated[str, typer.Option(metavar=_NAMES, help="Drop duplicates: exact, minhash, or both.")],
    "max_length": Annotated[int | None, typer.Option(min=1, help="Maximum number of tokens in a row.")],
    "truncation": Annotated[str, typer.Option(help="Policy for longer rows: error, drop, left, right, split.")],
    "add_bos": Annotated[bool, typer.Option("--bos/--no-bos", help="Begin every document with BOS.")],
    "add_eos": Annotated[
        bool | None,
        typer.Option("--eos/--no-eos", help="End every document with EOS. Default: if the tokenizer has one."),
    ],
    "keep": Annotated[str, typer.Option(metavar=_NAMES, help="Columns to keep in addition to the tokens.")],
    "preference": Annotated[
        bool | None,
        typer.Option(
            "--preference/--no-preference",
            help="Prepare rows with chosen and rejected answers, or with a label (KTO), as preferences; or as plain "
            "chats, trained on the chosen answer, or on every answer regardless of its label. Default: refuse them.",
        ),
    ],
    "max_prompt_length": Annotated[
        int | None, typer.Option(min=1, help="For preferences: a longer prompt loses its beginning.")
    ],
    "fast": Annotated[
        bool, typer.Option("--fast/--no-fast", help="Use the fast tokenizer where it gives the reference's ids.")
    ],
}
"""A command-line option for each field of `Recipe`; `chat` has the four below."""
_CHAT_OPTIONS: dict[str, tuple[Any, Any]] = {
    "train_on": (
        Annotated[
            str,
            typer.Option(metavar="WHAT", help="Supervised turns: assistant, last, all, flags, or roles (A,B)."),
        ],
        "assistant",
    ),
    "eot": (Annotated[bool, typer.Option("--eot/--no-eot", help="Supervise the token that ends a turn.")], True),
    "columns": (
        Annotated[
            str,
            typer.Option(
                metavar="ROLE=COLUMN,...",
                help="Chats in plain columns, such as user=question,assistant=answer,system=context.",
            ),
        ],
        "",
    ),
    "chat": (
        Annotated[
            list[str] | None,
            typer.Option(
                "--chat",
                metavar="NAME=VALUE",
                help="Other chat options, may be given several times: now=2026-01-31, "
                "variables.enable_thinking=false, end_of_turn='<|user|>', gate.prompt=false, "
                'allow_lost=earlier_thoughts, markers=\'["<|im_start|>assistant\\n", "<|im_end|>"]\', '
                "special_tokens=A,B. Values are JSON, or else text.",
            ),
        ],
        None,
    ),
}
_TEXTS = ("now", "end_of_turn")
_LISTS = ("allow_lost", "special_tokens")
_MAPPINGS = ("variables", "gate")


def command(recipe: Sequence[str] = (), *, stopped: str = "stopped") -> Callable[..., Callable[..., None]]:
    """Decorator of every command: reports errors, and adds `--debug`.

    With `recipe`, names of fields of `Recipe`, the parameter `recipe` of the function becomes an option for each field.
    The function gets the keywords of `Recipe`. `stopped` is the message after Ctrl-C.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function, eval_str=True)
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            each.replace(kind=keyword)
            for parameter in own.parameters.values()
            for each in (_recipe_parameters(recipe) if parameter.name == "recipe" else [parameter])
        ]
        debug = inspect.Parameter("debug", keyword, default=False, annotation=DebugOption)

        @functools.wraps(function)
        def reporting(*, debug: bool = False, **given: Any) -> None:
            if "recipe" in own.parameters:
                given["recipe"] = _recipe_keywords(recipe, given)
            with report_errors(debug=debug, stopped=stopped):
                function(**given, **({"debug": debug} if "debug" in own.parameters else {}))

        if "debug" not in own.parameters:
            parameters.append(debug)
        reporting.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        return reporting

    return decorate


def _recipe_parameters(names: Sequence[str]) -> Iterator[inspect.Parameter]:
    defaults = {field.name: field.default for field in fields(Recipe)}
    for name in names:
        if name == "chat":
            for option, (annotation, default) in _CHAT_OPTIONS.items():
                yield inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            continue
        given = "" if defaults[name] == () else defaults[name]
        default = inspect.Parameter.empty if given is MISSING else given
        annotation = RECIPE_OPTIONS[name]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _recipe_keywords(names: Sequence[str], given: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the recipe out of `given`."""
    keywords = {name: given.pop(name) for name in names if name != "chat"}
    lists = [name for name in keywords if isinstance(keywords[name], str) and name in ("filters", "dedup", "keep")]
    keywords |= {name: _split(keywords[name]) for name in lists}
    return keywords | ({"chat": _chat_keywords(given)} if "chat" in names else {})


def _chat_keywords(given: dict[str, Any]) -> dict[str, Any]:
    """The options of `FormatChat` that differ from their defaults; without any, the rows decide if they are chats."""
    train_on, eot, columns, more = (given.pop(name) for name in _CHAT_OPTIONS)
    options: dict[str, Any] = {}
    if columns:
        pairs = [name.partition("=") for name in _split(columns)]
        if not all(role and equals and column for role, equals, column in pairs):
            raise typer.BadParameter(f"expected role=column,..., got {columns!r}", param_hint="--columns")
        options["columns"] = {role.strip(): column.strip() for role, _, column in pairs}
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


def read_config(path: Path, assignments: Sequence[str] | None) -> LoaderConfig:
    """The loader file, changed by `--set`."""
    return load_config(path, check_assignments(assignments))


def read_planned(path: Path, assignments: Sequence[str] | None) -> LoaderConfig:
    """The loader file, if the loader has a plan: a stream has none."""
    config = read_config(path, assignments)
    if config.arguments.get("streaming"):
        raise ConfigError(
            f"{config.name}: a stream has no plan, since its length is known only at its end; prepare the data first, "
            "or pass --set streaming=false"
        )
    return config


def open_rank(config: LoaderConfig, rank: int = 0, **more: Any) -> DataLoader:
    """The loader of one rank of the planned world size. The default backend is NumPy, which is always installed."""
    arguments = config.arguments
    place = {"rank": rank, "world_size": arguments.get("world_size") or 1, "model_parallel_size": 1}
    return config.open(**{"backend": arguments.get("backend") or "numpy", **place, **more})


@contextmanager
def opened(config: LoaderConfig, **more: Any) -> Iterator[DataLoader]:
    """The loader of rank 0; warnings while raw files are prepared go to standard error."""
    with log_lines(Console(stderr=True), logging.WARNING), open_rank(config, **more) as loader:
        yield loader
