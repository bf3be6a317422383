"""The `penstock` command: its commands, and `--version`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.competitions import competitions
from penstock.cli.info import info
from penstock.cli.lint import lint
from penstock.cli.plan import plan
from penstock.cli.plugins import plugins
from penstock.cli.prepare import prepare
from penstock.cli.probe_isolation import probe_isolation
from penstock.cli.queue import queue
from penstock.cli.run import run
from penstock.cli.show import show
from penstock.cli.trace import trace
from penstock.cli.verify_resume import verify_resume
from penstock.cli.versions import versions

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the help shows YAML, whose brackets are no markup
    pretty_exceptions_enable=False,
)
for each in (run, prepare, show, lint, info, versions, plan, trace, verify_resume, probe_isolation, bench, plugins):
    app.command()(each)
for group in (queue, competitions):
    app.add_typer(group)


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
    """Any source in, ready training batches out, through one memory-budgeted engine."""


if __name__ == "__main__":
    app()
