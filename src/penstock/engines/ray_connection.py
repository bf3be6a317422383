"""Connection of this process to a Ray cluster, or a clear error within seconds."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from penstock._optional import require
from penstock.errors import ConfigError

log = logging.getLogger(__name__)

_ADDRESS = re.compile(r"(?P<client>ray://)?(?P<host>\[[0-9A-Fa-f:]+\]|[^\s:/]+):(?P<port>\d{1,5})")

_OTHER_VERSION = ("ersion mismatch", "versions differ between client and server", "incompatible with server")
_SETTINGS = 4
_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])


def connect(address: str | None, runtime_env: Mapping[str, Any] | None, timeout_seconds: float) -> bool:
    """Connect this process, and say whether that is new: False if it was connected before."""
    ray = require("ray", "ray")
    if ray.is_initialized():
        _check_same(ray, address)
        return False
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    if wanted is not None and wanted not in ("auto", "local"):
        _check_reachable(wanted, timeout_seconds, "" if address else " (of RAY_ADDRESS)")
    try:
        ray.init(address=wanted, runtime_env=dict(runtime_env) if runtime_env else None, logging_level=logging.WARNING)
    except Exception as error:
        raise _error_of(error, wanted) from error
    return True


def _check_same(ray: Any, address: str | None) -> None:
    """Refuse another address than the connected one: a process has one connection."""
    if address is None or address == "auto" or address.startswith("ray://"):
        return
    connected = ray.get_runtime_context().gcs_address
    if connected != address:
        raise ConfigError(
            f"this process is connected to the Ray cluster at {connected}, and the job asks for {address!r}; call "
            "ray.shutdown() first, or leave the address out"
        )


def _check_reachable(address: str, timeout_seconds: float, origin: str) -> None:
    """Refuse an address where nothing listens: Ray would try for a minute, and then end the process."""
    if (parts := _ADDRESS.fullmatch(address)) is None or int(parts["port"]) > 65_535:
        raise ConfigError(
            f"{address!r}{origin} is no address of a Ray cluster; expected 'host:port' (often port 6379) on a machine "
            "of the cluster, 'ray://host:port' (often port 10001) from outside of it, or 'auto'"
        )
    try:
        with socket.create_connection((parts["host"].strip("[]"), int(parts["port"])), timeout_seconds) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
                _check_greeting(connection)
    except OSError as error:
        start = "ray start --head --ray-client-server-port=10001" if parts["client"] else "ray start --head --port=6379"
        raise ConfigError(
            f"no Ray cluster answers at {address!r}{origin} ({error}); start one there (`{start}`), or check the "
            "address with `ray status` on its head node"
        ) from None


def _check_greeting(connection: socket.socket) -> None:
    """Refuse another kind of server: Ray speaks HTTP/2, whose servers begin with a frame of settings."""
    connection.sendall(_GREETING)
    answer = b""
    while len(answer) < 9:
        if not (more := connection.recv(9 - len(answer))):
            raise ConnectionError("it closes the connection")
        answer += more
    if answer[3] != _SETTINGS:
        raise ConnectionError("another kind of server is there")


def _error_of(error: Exception, address: str | None) -> ConfigError:
    """Error in the words of a user of penstock; Ray's own text follows."""
    text, where = str(error).strip(), repr(address) if address else "this machine"
    if any(words in text for words in _OTHER_VERSION):
        return ConfigError(
            f"the Ray cluster at {where} has another version of Ray or Python than this process; install the same "
            f"versions here and there. Ray says: {text}"
        )
    if type(error).__name__ == "AuthenticationError" or (isinstance(error, ConnectionError) and address != "auto"):
        return ConfigError(
            f"the Ray cluster at {where} does not let this process in; if it asks for a token, RAY_AUTH_MODE and "
            f"RAY_AUTH_TOKEN must be those of the cluster. Ray says: {text}"
        )
    if address == "auto":
        return ConfigError(
            "no Ray cluster runs on this machine; start one (`ray start --head`), give its address, or leave the "
            f"address out to use this machine alone. Ray says: {text}"
        )
    return ConfigError(f"Ray cannot connect to {where}: {type(error).__name__}: {text}")
