"""`penstock ui TARGET...`: a live web page about stores, files, plans, runs and queues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from penstock.cli.console import fact_table, print_json, print_table, warn
from penstock.cli.options import JsonOption, command
from penstock.ui.guard import Access, is_loopback
from penstock.ui.server import listen, serve
from penstock.ui.site import Site
from penstock.ui.targets import find_targets


@command()
def ui(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Stores, data files, loader files, metrics files of runs, or directories of queues.",
        ),
    ],
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, metavar="P", help="Port. Default: the first free one from 8710 on.")
    ] = None,
    host: Annotated[
        str, typer.Option(metavar="H", help="Address to listen on. Another than this machine's own is not encrypted.")
    ] = "127.0.0.1",
    tokenizer: Annotated[
        str | None, typer.Option(metavar="T", help="Tokenizer for raw rows, and for stores that name none.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", "--chat-template", metavar="X", help="Chat template for raw rows.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show stores, data files, plans, runs and queues in a browser, live. It only reads.

    \b
    penstock ui corpus.store chats.jsonl train.yaml run.metrics.jsonl data/shakespeare

    The address has a token: nobody without it sees a page. It ends with Ctrl-C or SIGTERM. With --json, one line says
    where it listens.
    """
    site = Site(find_targets(targets), tokenizer=tokenizer, template=template)
    listener = listen(host, port)

    def started(access: Access) -> None:
        if as_json:
            facts = {"address": access.address, "port": access.port, "pid": os.getpid(), "targets": len(site.targets)}
            print_json(facts, indent=False)
            return
        if not is_loopback(host):
            warn(
                f"{host} can be reached from other machines, and the page is not encrypted: rows and token go in clear"
            )
        if listener.port != listener.wanted and port is None:
            warn(f"port {listener.wanted} is taken, so this one listens on {listener.port}")
        shown = [(f"{target.kind}", target.shown) for target in site.targets]
        print_table(fact_table([("address", access.address), *shown, ("", "Ctrl-C ends it")]))

    with _ended_by_signals():
        serve(site, listener, started=started)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the command with 0, also before there is a server."""

    def end(number: int, _: object) -> None:
        raise SystemExit(0)

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
