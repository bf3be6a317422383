"""The `penstock` command: its commands, each imported when it is used, and `--version`."""

from __future__ import annotations

import shutil
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_group

from penstock import __version__

GROUPS = {
    "Prepare data": {
        "prepare": "Tokenize files into a store that training reads at random.",
        "join": "Put the splits of `prepare --split` together.",
        "convert": "Convert stores from and to Megatron or MDS files.",
        "lint": "Check every row of a chat data set.",
        "show": "Print the tokens of a row, supervised ones in green.",
        "report": "Write a page about a store, a plan or a run.",
        "info": "Show rows, tokens, lengths and columns of a store.",
        "versions": "List the versions of a store, compare or check them out.",
        "cache": "Show the size of a cache that machines share, or clear it.",
    },
    "Check a loader before training": {
        "plan": "Count steps, tokens, padding and packing of a loader.",
        "trace": "Show which rows make up a step, or which steps use a row.",
        "verify-resume": "Stop and resume a loader, and compare its batches.",
        "probe-isolation": "Check that documents of a packed batch are isolated.",
        "bench": "Measure batches and tokens per second of a loader.",
    },
    "See it": {
        "ui": "Browse rows, plans, runs and queues in a web browser, live.",
    },
    "Feed trainers": {
        "serve": "Make the batches of a loader ahead, for RemoteLoader.",
    },
    "Run pipelines and queues": {
        "run": "Run the pipeline that a YAML file describes.",
        "plugins": "List the built-in stages and those of installed plugins.",
        "queue": "Show, purge or examine a filesystem queue.",
    },
    "Competitions": {
        "competitions": "Register the data of competitions, and list them.",
    },
}
"""Summaries of the commands, by group; `verify-resume` is `verify_resume` in the module `verify_resume`."""
_NAME_WIDTH = 16
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}


class _Commands(TyperGroup):
    """Group that knows its commands by name: `--help` imports none of them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]  # names, for suggestions

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if ctx is not None and ctx.resilient_parsing:  # completion in the shell
            from penstock.cli.completion.light_commands import table_command

            if (known := table_command(cmd_name)) is not None:
                return known
        name = cmd_name.replace("-", "_")
        found = getattr(import_module(f"penstock.cli.{name}"), name)
        if isinstance(found, typer.Typer):
            return get_group(found)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        alone.command(cmd_name)(found)
        return get_command(alone)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(_NAME_WIDTH), summary) for name, summary in commands.items()])

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Names with their summaries, for the shell; and options, as every command has them."""
        from typer.core import CompletionItem  # type: ignore[attr-defined]  # typer's own, which it does not list

        names = [name for name in COMMANDS if name.startswith(incomplete)]
        options = super(TyperGroup, self).shell_complete(ctx, incomplete)
        return [CompletionItem(name, help=COMMANDS[name]) for name in names] + options


app = typer.Typer(
    name="penstock",
    cls=_Commands,
    no_args_is_help=True,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": shutil.get_terminal_size().columns,
    },
    rich_markup_mode=None,  # the help shows YAML, whose brackets are no markup
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Any source in, ready training batches out, in a memory budget."""


if __name__ == "__main__":
    app()
