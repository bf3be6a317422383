"""Connection to the servers of a feed: one at a time, replaced when it is silent, gone, or of another config."""

from __future__ import annotations

import logging
import os
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as flight

from penstock import __version__
from penstock._forks import check_process
from penstock.batching.collate import LAYOUT_OPTIONS
from penstock.errors import ConfigError
from penstock.feed.protocol import (
    PROTOCOL,
    TOKEN_HEADER,
    MalformedMessageError,
    Message,
    decode,
    read_failure,
)
from penstock.files.listing import PathLike
from penstock.files.states import to_json
from penstock.memory import MemoryBudget
from penstock.order.states import plan_parts
from penstock.pipeline.prefetch import ReadAhead

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "PENSTOCK_FEED_TOKEN"
_ADDRESS = re.compile(r"grpc(\+tls|\+tcp)?://(\[[0-9a-fA-F:]+\]|[^/:\[\]]+):(\d+)")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_MESSAGES_AHEAD = 2
_PROBE_SECONDS = 3.0
"""Longest wait for a server that is not needed yet, and for one that closes every connection."""
_CHANNEL = [
    ("grpc.use_local_subchannel_pool", 1),  # a new connection does not wait for the pauses of an old one
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
]
Answer = TypeVar("Answer")


class LostServerError(ConnectionError):
    """A server that does not answer; another one, or the same one later, may."""


class RefusedServerError(LostServerError):
    """A server that answers, and is not to be used: another config, release or token. `cause` is the error to raise."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


class ClosedConnectionError(LostServerError):
    """A server that takes the connection and closes it at once, as one with TLS does without it."""


class FeedConnection:
    """Requests to the first server that answers them, and their retries.

    A server that says nothing for `deadline_seconds` is given up. All are tried in turn for `retry_seconds`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None,
        tls_root_certs: bytes | None,
        deadline_seconds: float,
        retry_seconds: float,
        first: int = 0,
    ) -> None:
        self.addresses = read_addresses(addresses)
        self.deadline_seconds, self.retry_seconds = deadline_seconds, retry_seconds
        given = token or os.environ.get(TOKEN_VARIABLE) or None
        self._token = clean_token(given, "token=" if token else TOKEN_VARIABLE)
        self._certificates = tls_root_certs
        self._current = first % len(self.addresses)
        self._client: flight.FlightClient | None = None
        self._failures: dict[str, LostServerError] = {}
        self._failing_since: float | None = None
        self._warned = False
        self._process = os.getpid()
        self.expected: Mapping[str, Any] | None = None
        """Facts of the feed that this client began with."""
        self.budget: MemoryBudget | None = None
        """Memory for what was received and not used yet."""

    @property
    def address(self) -> str:
        return self.addresses[self._current]

    def retrying(self, attempt: Callable[[], Answer]) -> Answer:
        """Result of a function that makes a request, tried again until a server answers."""
        while True:
            try:
                return attempt()
            except LostServerError as error:
                self.recover(error)

    def ask(self, request: Mapping[str, Any]) -> Message:
        """Answer that is one message. Raises LostServerError without one."""
        messages = list(self.stream(request))
        if len(messages) != 1:
            raise LostServerError(f"{self.address} sent {len(messages)} messages, expected one")
        return messages[0]

    def ask_others(self, request: Mapping[str, Any]) -> Iterator[tuple[str, Message]]:
        """Answer of each other server that can be reached, with its address; one that cannot is passed over."""
        for address in dict.fromkeys(each for each in self.addresses if each != self.address):
            other = FeedConnection(
                address,
                token=self._token,
                tls_root_certs=self._certificates,
                deadline_seconds=min(self.deadline_seconds, _PROBE_SECONDS),
                retry_seconds=0.0,
            )
            try:
                yield address, other.ask(request)
            except LostServerError as error:
                log.debug("%s is compared when it is used: %s", address, error)
            finally:
                other.close()

    def stream(self, request: Mapping[str, Any]) -> Iterator[Message]:
        """Messages of an answer. Raises LostServerError if it is cut, or if nothing comes for too long."""
        check_process(self._process, "a RemoteLoader")
        calls: list[Any] = []
        ahead: ReadAhead[tuple[Any, bytes]] = ReadAhead(
            self._chunks(request, calls),
            _MESSAGES_AHEAD,
            budget=self.budget,
            size=lambda chunk: int(chunk[0].nbytes),
            always_one=True,
        )
        try:
            while True:
                if not ahead.wait(self.deadline_seconds):
                    raise LostServerError(f"{self.address} has been silent for {self.deadline_seconds:g} s")
                chunk = next(ahead, None)
                if chunk is None:
                    raise LostServerError(f"{self.address} ended its answer in the middle")
                try:
                    message = decode(*chunk)
                except MalformedMessageError as error:
                    raise LostServerError(f"{self.address} sent {error}") from error
                del chunk
                self._failures.clear()
                self._failing_since = None
                kind = message.notes.get("type")
                if kind == "end":
                    return
                if kind == "error":
                    self._raise(message.notes)
                if kind != "heartbeat":
                    yield message
                del message
        finally:
            ahead.stop()
            for call in calls:
                with suppress(flight.FlightError, pa.ArrowException):
                    call.cancel()

    def recover(self, error: LostServerError) -> None:
        """Go to the next server after a failure; raise if all have failed for too long, or refuse this client."""
        now = time.monotonic()
        if self._failing_since is None:
            self._failing_since, self._warned = now, False
        self._failures[self.address] = error
        self.close()
        failures = list(self._failures.values())
        refused = [each for each in failures if isinstance(each, RefusedServerError)]
        if len(refused) == len(self.addresses):
            raise refused[-1].cause
        # Before the first answer, servers that close every connection are the wrong ones, and will not become others.
        closing = self.expected is None and len(failures) == len(self.addresses)
        closing = closing and all(isinstance(each, (RefusedServerError, ClosedConnectionError)) for each in failures)
        if not self._warned and not closing:
            self._warned = True
            log.warning("%s; trying %s", error, "it again" if len(self.addresses) == 1 else "the next server")
        limit = min(self.retry_seconds, _PROBE_SECONDS) if closing else self.retry_seconds
        if now - self._failing_since > limit:
            told = "; ".join(f"{address}: {each}" for address, each in self._failures.items())
            raise ConnectionError(
                f"no server of the feed answered for {limit:g} s ({told}); is `penstock serve` running "
                "there? An address is grpc://host:port, and grpc+tls:// for a server with --tls-cert"
            ) from error
        self._current = (self._current + 1) % len(self.addresses)
        if self._current == 0 or len(self._failures) >= len(self.addresses):
            passed = now - self._failing_since
            time.sleep(min(max(_FIRST_PAUSE_SECONDS, passed / 4), _LONGEST_PAUSE_SECONDS))

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and os.getpid() == self._process:
            with suppress(flight.FlightError, pa.ArrowException):
                client.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes, which connect themselves."""
        return self.__dict__ | {"_client": None, "budget": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _process=os.getpid())

    def __repr__(self) -> str:
        return f"FeedConnection({', '.join(self.addresses)})"  # never the token

    def _chunks(self, request: Mapping[str, Any], calls: list[Any]) -> Iterator[tuple[Any, bytes]]:
        """Received pieces of an answer, read by a thread of their own."""
        headers = [(TOKEN_HEADER.encode(), f"Bearer {self._token}".encode())] if self._token else []
        ticket = flight.Ticket(to_json({"protocol": PROTOCOL, "version": __version__, **request}))
        try:
            if self._client is None:
                self._client = flight.FlightClient(
                    self.address, tls_root_certs=self._certificates, generic_options=_CHANNEL
                )
            reader = self._client.do_get(ticket, flight.FlightCallOptions(headers=headers))
            calls.append(reader)
            while True:
                chunk = reader.read_chunk()
                notes = chunk.app_metadata
                yield chunk.data, b"" if notes is None else notes.to_pybytes()
                del chunk
        except StopIteration:
            return
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> LostServerError:
        told = re.split(r"\. (?:Detail|gRPC client debug context)", str(error))[0]
        if isinstance(error, flight.FlightUnauthenticatedError):
            given = "the token that was given" if self._token else "no token"
            return RefusedServerError(
                PermissionError(
                    f"{self.address} does not accept {given}; pass token=, or set {TOKEN_VARIABLE}, to the text in "
                    "the server's --token-file"
                )
            )
        if isinstance(error, flight.FlightServerError):
            return RefusedServerError(ConfigError(f"{self.address} is no server of a penstock feed: {told}"))
        if "certificate verify failed" in told or "Hostname" in told:
            return RefusedServerError(
                ConnectionError(
                    f"{self.address} has a certificate that is not trusted here ({told[-80:]}); pass tls_root_certs= "
                    "with the certificate of the server, or of the authority that signed it"
                )
            )
        if "is not in peer certificate" in told:
            return RefusedServerError(
                ConnectionError(
                    f"{self.address} has a certificate of another name ({told.rpartition(': ')[2]}); use the name that "
                    "the certificate has, or make one with this name (subjectAltName)"
                )
            )
        if "wrong version number" in told.lower().replace("_", " "):
            return RefusedServerError(
                ConnectionError(f"{self.address} does not use TLS; its address is {self.address.replace('+tls', '')}")
            )
        if "failed to connect" in told and "Socket closed" in told and "+tls" not in self.address:
            return ClosedConnectionError(
                f"{self.address} closed the connection at once, as a server with --tls-cert does: its address is "
                f"grpc+tls://{self.address.partition('://')[2]}"
            )
        return LostServerError(f"{self.address} cannot be reached or was lost: {told}")

    def _raise(self, notes: Mapping[str, Any]) -> None:
        if not notes.get("refused"):
            raise read_failure(notes, self.address)
        told = notes["message"] if notes["hello"] is None else self._difference(notes["hello"])
        raise RefusedServerError(ConfigError(f"the feed at {self.address} cannot be used: {told}"))

    def _difference(self, there: Mapping[str, Any]) -> str:
        """Parts of the config of a server that differ from those this client began with."""
        if self.expected is None:
            return "its config has changed"
        found = differences(config_parts(self.expected), config_parts(there), "was {}")
        return f"its config is another than that of this run: {found or 'another release made its plan'}"


def config_parts(hello: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of the config of a server that decide batches and that no request brings, by the names of options."""
    layout = {LAYOUT_OPTIONS.get(name, name): value for name, value in hello["layout"].items()}
    return {**layout, **plan_parts(hello["plan"])}


def differences(here: Mapping[str, Any], there: Mapping[str, Any], ours: str) -> str:
    """Parts that differ between there and here, as text; "" if none do. `ours` is such as `was {}`."""
    names = [name for name in {**here, **there} if here.get(name) != there.get(name)]
    return "; ".join(f"{name} is {there.get(name)} there and {ours.format(here.get(name))}" for name in names)


def clean_token(text: str | None, where: str) -> str | None:
    """Token without the space around it, such as the newline at the end of a file; None without one."""
    if text is None:
        return None
    if not isinstance(text, str):  # not shown: it is a secret of another type
        raise ConfigError(f"{where}: expected a token as text, got {type(text).__name__}")
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable():
        raise ConfigError(f"{where}: expected a token of printable ASCII, such as the output of `openssl rand -hex 32`")
    return token


def read_certificates(path: PathLike) -> bytes:
    """Certificates to trust, in PEM. gRPC takes a file without any for a server that is away."""
    data = Path(path).read_bytes()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except ssl.SSLError as error:
        raise ConfigError(
            f"tls_root_certs={os.fspath(path)!r}: expected certificates in PEM ({error.reason}); pass the certificate "
            "of the server, or of the authority that signed it"
        ) from None
    return data


def read_addresses(given: str | Sequence[str]) -> list[str]:
    """Addresses of servers, `grpc://host:port` or `grpc+tls://host:port`."""
    found = [given] if isinstance(given, str) else list(given)
    for address in found:
        known = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
        if known is None or not 0 < int(known[3]) < 1 << 16:
            raise ConfigError(f"expected an address such as grpc://host:8815 or grpc+tls://host:8815, got {address!r}")
    if not found:
        raise ConfigError("expected the address of at least one server, such as grpc://host:8815, got none")
    return found
