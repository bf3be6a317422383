"""The `penstock` command: its verbs, and `--version`."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.competitions import competitions
from penstock.cli.info import info
from penstock.cli.lint import lint
from penstock.cli.plan import plan
from penstock.cli.prepare import prepare
from penstock.cli.probe_isolation import probe_isolation
from penstock.cli.queue import queue
from penstock.cli.run import run
from penstock.cli.show import show
from penstock.cli.stage_catalog import plugins
from penstock.cli.trace import trace
from penstock.cli.verify_resume import verify_resume
from penstock.cli.versions import versions

__all__ = ["app"]

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # the help shows YAML, whose brackets must not be taken for markup
    pretty_exceptions_enable=False,
)
for verb in (run, prepare, show, lint, info, versions, plan, trace, verify_resume, probe_isolation, bench):
    app.command()(verb)
app.command()(plugins)
app.add_typer(queue)
app.add_typer(competitions)


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
