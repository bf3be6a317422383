"""Server of the web page: a free port, uvicorn, and a shutdown that waits for no client."""

from __future__ import annotations

import errno
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from penstock._optional import require
from penstock.errors import ConfigError
from penstock.ui.app import make_app
from penstock.ui.guard import Access
from penstock.ui.site import Site

PORT = 8710
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Listener:
    """Socket that listens, and the port it got."""

    socket: socket.socket
    host: str
    port: int
    wanted: int
    """Port that was tried first."""


def listen(host: str, port: int | None) -> Listener:
    """A socket on a port: the one given, or the first free one from 8710 on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port] if port is not None else range(PORT, PORT + _TRIES)
    for each in ports:
        made = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Not SO_REUSEADDR on Windows, where it would share a port that is taken.
            if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):
                made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
            else:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((host, each))
            made.listen(128)
            return Listener(made, host, made.getsockname()[1], ports[0])
        except OSError as error:
            made.close()
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"--host {host}: this machine has no such address ({error.strerror})") from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = error.strerror
    if port is not None:
        raise ConfigError(f"--port {port} cannot be used: {reason}; choose another one, or leave it out for a free one")
    raise ConfigError(f"no port from {PORT} to {PORT + _TRIES - 1} is free; choose one with --port")


def serve(site: Site, listener: Listener, *, started: Callable[[Access], Any]) -> None:
    """Serve until Ctrl-C or SIGTERM. `started` gets the address, with its token, before the first request."""
    uvicorn = require("uvicorn", "ui")
    access = Access(listener.host, listener.port)
    config = uvicorn.Config(
        make_app(site, access),
        log_level="warning",
        access_log=False,  # it would print the token
        server_header=False,
        lifespan="off",
        ws="none",
        proxy_headers=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=1,  # a browser that never reads its answer does not hold the end
    )
    server = uvicorn.Server(config)
    with closing(listener.socket), _ended_by_signals(server):
        started(access)
        server.run(sockets=[listener.socket])


@contextmanager
def _ended_by_signals(server: Any) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the server, also before it handles them. An exception may be lost: in a finalizer."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> None:
        server.should_exit = True

    before = {each: signal.signal(each, end) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
