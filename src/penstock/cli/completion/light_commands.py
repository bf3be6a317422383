"""Completion in the shell without the imports of a command, which take a second: commands are rebuilt from a table.

`table.py` holds the options of all commands. After a change of options, write it again:

    python -m penstock.cli.completion

A command that the table lacks is imported, and so completed slowly, but rightly.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from textwrap import shorten
from typing import Annotated, Any

import typer

from penstock.cli.completion.table import TABLE

VALUES: dict[str, Sequence[str]] = {
    "--engine": ("local", "ray"),
    "--filter": ("gopher", "gopher-quality", "gopher-repetition", "c4", "fineweb", "length", "latin"),
    "--dedup": ("exact", "minhash"),
    "--truncation": ("error", "drop", "left", "right", "split"),
    "--template": ("alpaca", "chatml", "gemma", "llama3", "mistral", "plain", "qwen", "vicuna", "zephyr"),
    "--train-on": ("assistant", "last", "all", "flags"),
    "--mode": ("create", "append", "overwrite"),
    "--on-error": ("raise", "skip", "quarantine"),
    "--to": ("store", "megatron", "mds"),
    "--rows": ("documents", "sequences"),
    "--compression": ("zstd",),
    "--split": ("train", "val", "test"),
    "--type": ("binary", "multiclass", "multilabel", "ordinal", "regression", "multi_target", "ranking", "time_series"),
    "--metric": ("accuracy", "auc", "f1", "log_loss", "mae", "mse", "r2", "rmse"),
    "--set": ("backend=jax", "backend=mlx", "backend=numpy", "backend=torch"),
}
"""Values of options that have a few; all others complete file names."""
ONLY_OF = {"--rows": ("convert",), "--split": ("competitions show",)}
"""Options whose name means something else in other commands."""
_WIDE = 60
LISTS = ("--filter", "--dedup", "--train-on")
"""Options that take several values, with commas between them."""


def table_command(name: str) -> Any:
    """The command or group of the table, without its function; None if the table lacks it."""
    from typer.main import get_command, get_group

    paths = [path for path in TABLE if path == name or path.startswith(f"{name} ")]
    if not paths:
        return None
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # typer would import it to clean the summaries
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    for path in paths:
        app.command(path.rpartition(" ")[2])(_function(path))
    return get_command(app) if paths == [name] else get_group(app)


def _function(path: str) -> Callable[..., None]:
    """Function with the parameters of a command, which does nothing."""

    def nothing(**given: Any) -> None:
        return

    summary, arguments, options = TABLE[path]
    parameters = [_parameter(name, Any if count == 1 else list[str], typer.Argument()) for name, count in arguments]
    for flags, text, is_flag, multiple in options:
        values = None if is_flag else values_of(path, flags)
        complete = None if values is None else _completer(values, is_list=any(flag in LISTS for flag in flags))
        kind: Any = bool if is_flag else list[str] if multiple else str
        option = typer.Option(*flags, help=text, autocompletion=complete)
        parameters.append(_parameter(_identifier(flags), kind | None, option))
    nothing.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    nothing.__annotations__ = {each.name: each.annotation for each in parameters}
    nothing.__doc__ = summary
    return nothing


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    kind = str | None if kind is Any else kind
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def values_of(path: str, flags: Sequence[str]) -> Sequence[str] | None:
    """Values of an option of a command; None if it takes anything."""
    for flag in flags:
        if flag in VALUES and path in ONLY_OF.get(flag, (path,)):
            return VALUES[flag]
    return None


def _completer(values: Sequence[str], *, is_list: bool) -> Any:
    def complete(ctx: Any, args: list[str], incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if is_list else ("", "", incomplete)
        taken = before.split(",")
        return [f"{before}{comma}{value}" for value in values if value.startswith(last) and value not in taken]

    return complete


def _identifier(flags: Sequence[str]) -> str:
    return max(flags, key=len).partition("/")[0].lstrip("-").replace("-", "_")


# -- the table -------------------------------------------------------------------------------------------------------


def current_table() -> dict[str, Any]:
    """The table of all commands as they are now: summary, arguments and options. Imports all of them."""
    from typer.main import get_command

    from penstock.cli.main import app

    root: Any = get_command(app)
    return dict(_entries(root, "", root))


def _entries(group: Any, path: str, root: Any) -> Iterator[tuple[str, Any]]:
    context = typer.Context(root)
    for name in sorted(group.list_commands(context)):
        found = group.get_command(context, name)
        here = f"{path} {name}".strip()
        if hasattr(found, "list_commands"):
            yield from _entries(found, here, root)
            continue
        arguments = [(each.name, each.nargs) for each in found.params if each.param_type_name == "argument"]
        options = [
            (_flags(each), _short(each.help or ""), bool(each.is_flag), bool(each.multiple))
            for each in found.params
            if each.param_type_name == "option"
        ]
        yield here, (_short(found.help or ""), arguments, options)


def _flags(option: Any) -> list[str]:
    if option.secondary_opts:
        return [f"{option.opts[0]}/{option.secondary_opts[0]}", *option.opts[1:]]
    return list(option.opts)


def _short(text: str) -> str:
    """First sentence of a help text, for one line of a menu."""
    sentence = " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")
    sentence = sentence.partition(":")[0] if len(sentence) > _WIDE else sentence
    return shorten(sentence, _WIDE, placeholder=" ...")


def table_source() -> str:
    """Text of `table.py`."""
    lines = [
        '"""Options of all commands, for completion in the shell; written by `python -m penstock.cli.completion`."""'
    ]
    lines += ["", "# ruff: noqa: E501", "from __future__ import annotations", "", "# fmt: off"]
    lines += ["TABLE: dict[str, tuple[str, list[tuple[str, int]], list[tuple[list[str], str, bool, bool]]]] = {"]
    for path, (summary, arguments, options) in current_table().items():
        lines += [f"    {path!r}: (", f"        {summary!r},", f"        {arguments!r},", "        ["]
        lines += [f"            {option!r}," for option in options]
        lines += ["        ],", "    ),"]
    return "\n".join([*lines, "}", ""])
