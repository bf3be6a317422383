"""`penstock serve CONFIG`: batches of a loader file for `RemoteLoader`, over Arrow Flight."""

from __future__ import annotations

import logging
import os
import signal
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from penstock.cli.console import fact_table, log_lines, print_json, print_table, warn, working
from penstock.cli.options import ConfigArgument, JsonOption, MetricsOption, SetOption, command, read_config
from penstock.engines.run import engine_of
from penstock.errors import ConfigError
from penstock.feed.connection import TOKEN_VARIABLE, clean_token
from penstock.feed.replicas import FeedReplicas
from penstock.feed.server import FeedServer, TLSFiles
from penstock.files.filesystems import require_local


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
    engine: Annotated[
        str | None, typer.Option(metavar="ENGINE", help="Where to run: local, ray, or ray://HOST:PORT.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, metavar="N", help="Servers, with --engine ray.")] = 1,
    budget: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory for batches that are made ahead or shared, such as 4GiB.")
    ] = "1 GiB",
    metrics: MetricsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the batches of a loader ahead, and hand them to RemoteLoader("grpc://host:port") in each rank.

    The server keeps no state: it can be killed and started again, and several of the same config can serve one run.
    It ends with Ctrl-C or SIGTERM. With --json, one line says where it listens. With --engine ray, replicas are actors
    of a cluster, on the addresses of their nodes and the ports from --port on.
    """
    described = read_config(config, assignments)
    given: dict[str, Any] = {"token": read_token(token_file), "tls": read_tls(tls_cert, tls_key), "budget": budget}
    given["metrics"] = metrics or None
    stop = threading.Event()
    with log_lines(Console(stderr=True), logging.WARNING), ExitStack() as stack:
        if engine in (None, "local"):
            if replicas != 1:
                raise ConfigError(
                    f"--replicas {replicas} needs --engine ray; or start penstock serve several times, on other ports"
                )
            with working(f"opening {described.name}"):
                server = stack.enter_context(FeedServer.of_config(described, host=host, port=port, **given))
            facts = {"address": server.address, "addresses": [server.address], "port": server.port, **server.facts()}
        else:
            engine_of(engine)
            with working(f"starting {described.name}"):
                started = stack.enter_context(FeedReplicas(described, replicas, engine=str(engine), port=port, **given))
            facts = {"addresses": started.addresses}
        with _stopped_by_signals(stop):
            if as_json:
                print_json({"config": described.name, "pid": os.getpid(), **facts}, indent=False)
            else:
                shown = [("address" if not number else "", each) for number, each in enumerate(facts["addresses"])]
                print_table(fact_table([*shown, *((name, str(facts[name])) for name in ("plan",) if name in facts)]))
            while not stop.wait(1.0):  # in pieces, since a signal interrupts no endless wait on Windows
                pass
    warn("stopped")
    if engine in (None, "local") and not server.finished:
        os._exit(0)  # a client that does not read would hold the process


def read_token(path: Path | None) -> str | None:
    """Token of a file, or of the environment; None without either."""
    if path is None:
        return clean_token(os.environ.get(TOKEN_VARIABLE), TOKEN_VARIABLE)
    text = require_local(path, "--token-file").read_text(encoding="utf-8", errors="replace")
    return clean_token(text, str(path))


def read_tls(certificate: Path | None, key: Path | None) -> TLSFiles | None:
    """Certificate and key for TLS; None without both."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("--tls-cert and --tls-key belong together; pass both, or neither")
    certificate, key = require_local(certificate, "--tls-cert"), require_local(key, "--tls-key")
    found = TLSFiles(certificate.read_bytes(), key.read_bytes())
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")  # asks nobody
    except ssl.SSLError as error:
        told = f" ({error.reason})" if error.reason else ""
        raise ConfigError(
            f"--tls-cert {certificate} and --tls-key {key}: expected a certificate and its private key in PEM, the key "
            f"without a passphrase{told}"
        ) from None
    return found


@contextmanager
def _stopped_by_signals(stopped: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM set an event; a second one ends the process at once."""
    before: dict[int, Any] = {}

    def stop(number: int, _: object) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        stopped.set()

    for each in (signal.SIGINT, signal.SIGTERM):
        before[each] = signal.signal(each, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
