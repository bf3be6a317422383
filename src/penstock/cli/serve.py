"""`penstock serve CONFIG`: batches of a loader file for `RemoteLoader`, over Arrow Flight."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock.batching.options import Output, Shard, option_names
from penstock.cli.console import emit, fact_table, log_lines, print_json, print_table, warn
from penstock.cli.options import ConfigArgument, JsonOption, SetOption, command, open_rank, read_config
from penstock.errors import ConfigError
from penstock.feed.connection import TOKEN_VARIABLE
from penstock.feed.server import FeedServer, TLSFiles
from penstock.loaders.loader_file import LoaderConfig

_CLIENT_OPTIONS = set(option_names(Shard) + option_names(Output)) - {"rank", "group", "sharding", "fields"}
"""Options of a loader file that the clients follow."""


@command()
def serve(
    config: ConfigArgument,
    assignments: SetOption = None,
    host: Annotated[
        str, typer.Option(metavar="H", help="Address to listen on. Another than this machine's own needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="P", help="Port; 0: a free one, printed.")] = 8815,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help=f"File with the token that clients have to show. Default: {TOKEN_VARIABLE}."),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate chain in PEM, for TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of the certificate.")] = None,
    budget: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for batches that are made ahead or shared, such as 4GiB.")
    ] = "1 GiB",
    as_json: JsonOption = False,
) -> None:
    """Make the batches of a loader ahead, and hand them to RemoteLoader("grpc://host:port") in each rank.

    The server keeps no state: it can be killed and started again, and several of the same config can serve one run.
    It ends with Ctrl-C or SIGTERM. With --json, one line says where it listens.
    """
    described = read_config(config, assignments)
    token, tls = read_token(token_file), read_tls(tls_cert, tls_key)
    with ExitStack() as stack:
        stack.enter_context(log_lines(Console(stderr=True), logging.WARNING))
        server = stack.enter_context(open_server(described, host=host, port=port, token=token, tls=tls, budget=budget))
        facts: dict[str, Any] = {"address": server.address, "port": server.port, "pid": os.getpid(), **server.facts()}
        rows = (("address", server.address), ("plan", facts["plan"]), ("sources", ", ".join(facts["sources"])))
        with _stopped_by_signals(server):
            if as_json:
                print_json({"config": described.name, **facts}, indent=False)
            else:
                emit(facts, lambda: print_table(fact_table(rows)), as_json=False)
            server.wait()
    warn("stopped")
    if not server.finished:
        os._exit(0)  # a client that does not read would hold the process


@contextmanager
def open_server(config: LoaderConfig, **given: Any) -> Iterator[FeedServer]:
    """Running server of a loader file; closed with its loader."""
    arguments = config.arguments
    if arguments.get("streaming"):
        raise ConfigError(
            f"{config.name}: a stream has no plan, and its position is in the process that reads it, so that no other "
            "server could go on; prepare the data first, or pass --set streaming=false"
        )
    defaults = {name: arguments.get(name) for name in _CLIENT_OPTIONS}
    own: dict[str, Any] = {"backend": "numpy", "device": None, "pin_memory": False, "prefetch": 0}
    own |= {name: Shard.__dataclass_fields__[name].default for name in ("dp", "cp", "tp", "pp", "context")}
    with open_rank(config, **own) as loader, FeedServer(loader, defaults=defaults, **given) as server:
        yield server


def read_token(path: Path | None) -> str | None:
    """Token of a file, or of the environment; None without either."""
    text = os.environ.get(TOKEN_VARIABLE) if path is None else path.read_text(encoding="utf-8")
    token = (text or "").strip()
    if text is not None and (not token or not token.isascii() or not token.isprintable()):
        raise ConfigError(
            f"{TOKEN_VARIABLE if path is None else path}: expected a token of printable ASCII, such as the output of "
            "`openssl rand -hex 32`"
        )
    return token or None


def read_tls(certificate: Path | None, key: Path | None) -> TLSFiles | None:
    """Certificate and key for TLS; None without both."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together; pass both, or neither")
    return TLSFiles(certificate.read_bytes(), key.read_bytes())


@contextmanager
def _stopped_by_signals(server: FeedServer) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the server; a second one ends the process at once."""
    before: dict[int, Any] = {}

    def stop(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        server.stop()

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
