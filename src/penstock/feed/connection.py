"""Connection to the servers of a feed: one at a time, replaced when it is silent, gone, or of another config."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
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
from penstock.files.states import to_json
from penstock.memory import MemoryBudget
from penstock.order.states import plan_parts
from penstock.pipeline.prefetch import ReadAhead

log = logging.getLogger(__name__)
TOKEN_VARIABLE = "PENSTOCK_FEED_TOKEN"
_ADDRESS = re.compile(r"grpc(\+tls|\+tcp)?://(\[[0-9a-fA-F:]+\]|[^/:\[\]]+):(\d+)")
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 1.0
_MESSAGES_AHEAD = 2
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
        self._token, self._certificates = token or os.environ.get(TOKEN_VARIABLE), tls_root_certs
        self._current = first % len(self.addresses)
        self._client: flight.FlightClient | None = None
        self._failures: dict[str, LostServerError] = {}
        self._failing_since: float | None = None
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
            self._failing_since = now
            log.warning("%s; trying %s", error, "it again" if len(self.addresses) == 1 else "the next server")
        self._failures[self.address] = error
        self.close()
        refused = [each for each in self._failures.values() if isinstance(each, RefusedServerError)]
        if len(refused) == len(self.addresses):
            raise refused[-1].cause
        if now - self._failing_since > self.retry_seconds:
            told = "; ".join(f"{address}: {each}" for address, each in self._failures.items())
            raise ConnectionError(
                f"no server of the feed answered for {self.retry_seconds:g} s ({told}); is `penstock serve` running "
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
        here, found = self.expected, list[str]()
        for name, ours, theirs in (
            *_pairs(plan_parts(here["plan"]), plan_parts(there["plan"])),
            *_pairs(here["layout"], there["layout"]),
        ):
            if ours != theirs:
                found.append(f"{LAYOUT_OPTIONS.get(name, name)} is {theirs} there and was {ours}")
        return f"its config is another than that of this run: {'; '.join(found) or 'another release made its plan'}"


def _pairs(here: Mapping[str, Any], there: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    yield from ((name, here.get(name), there.get(name)) for name in {**here, **there})


def read_addresses(given: str | Sequence[str]) -> list[str]:
    """Addresses of servers, `grpc://host:port` or `grpc+tls://host:port`."""
    found = [given] if isinstance(given, str) else list(given)
    for address in found:
        if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
            raise ConfigError(f"expected an address such as grpc://host:8815 or grpc+tls://host:8815, got {address!r}")
    if not found:
        raise ConfigError("expected the address of at least one server, such as grpc://host:8815, got none")
    return found
