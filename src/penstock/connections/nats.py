"""Streams of NATS JetStream as logs. The client is asyncio: one thread of the process runs it, for all connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import threading
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any, TypeVar

from penstock._optional import require
from penstock.connections.logs import (
    LogAddress,
    LogBounds,
    Messages,
    Outgoing,
    Published,
    ReadLimits,
    dropped,
    hidden,
    made_again,
)
from penstock.errors import ConfigError, ResumeError

SCHEMES = ("nats", "tls", "ws", "wss")
Answer = TypeVar("Answer")
_ANSWER_SECONDS = 10.0
_CONSUMER_SECONDS = 300
"""The server forgets what an idle reader was at after that; it is made again."""
_NO_SUCH_STREAM, _NO_SUCH_CONSUMER = 10059, 10014
_ID, _STREAM = "Nats-Msg-Id", "Nats-Expected-Stream"
_IN_FLIGHT = 1024
"""Messages that wait for the server to have stored them."""


class NatsLog:
    """A stream of JetStream: one partition, whose offsets are the sequence numbers of the stream.

    Keys of messages are their subjects. `subject` reads only messages of that subject, which may have wildcards.
    """

    def __init__(self, url: str, stream: str | None, *, subject: str | None = None, credentials: str | None = None):
        address = LogAddress.of(url, SCHEMES)
        address.take(["subject"])
        found = stream or address.path
        if not found or (stream and address.path and stream != address.path):
            raise ConfigError(f"name one stream, as {hidden(address.server)}/STREAM or as stream=; got {found!r}")
        if set(found) & set(" .*>/\\\t\r\n"):
            raise ConfigError(f"{found!r} is no name of a stream: it has no spaces, dots, slashes or wildcards")
        self.stream, self.subject = found, subject or address.options.get("subject")
        self.name = f"{hidden(address.server)}/{self.stream}" + (f"?subject={self.subject}" if self.subject else "")
        self._server, self._credentials = address.server, credentials
        self._client: _Client | None = None
        self._consumer: str | None = None
        self._next = -1
        """Offset at which the consumer of the server is."""
        self._created: str | None = None

    def partitions(self) -> list[int]:
        return [0]

    def identity(self) -> str | None:
        return str(self._info()["created"])

    def bounds(self, partition: int) -> LogBounds:
        state = self._info()["state"]
        return LogBounds(max(1, state["first_seq"]), state["last_seq"] + 1)

    def read(self, partition: int, offset: int, limits: ReadLimits, *, after: bool) -> Messages:
        for _ in range(2):
            if self._consumer is None or self._next != offset:
                self._consumer = self._open_consumer(offset)
            self._next = -1  # if this is interrupted, nobody knows what the consumer has delivered
            raw, caught_up, gone = _run(self._pull(limits))
            self._next = offset
            if raw or not gone:
                break
            self._consumer = None  # idle for too long, or of a server that was restarted
        found = Messages(offset, caught_up)
        if raw:
            places = [_place(message) for message in raw]
            found.offsets = [sequence for sequence, _ in places]
            found.times = [nanoseconds // 1_000_000 for _, nanoseconds in places]
            found.values = [message.data for message in raw]
            found.keys = [message.subject.encode() for message in raw]
            found.headers = [message.headers for message in raw]
            found.following = self._next = found.offsets[-1] + 1
            if found.following - offset > len(raw) and (first := self.bounds(partition).first) > offset:
                raise dropped(self, partition, offset, first)
        elif caught_up and self.subject is None and (first := self.bounds(partition).first) > offset:
            raise dropped(self, partition, offset, first)  # all that was left
        return found

    def offset_at(self, partition: int, milliseconds: int) -> int:
        when = datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat()
        name = self._create_consumer({"deliver_policy": "by_start_time", "opt_start_time": when})
        self._consumer = name
        raw = self._pull_all(ReadLimits(1, 1 << 30))
        self._consumer = None
        return _place(raw[0])[0] if raw else self.bounds(0).end

    def publish(self, messages: Outgoing) -> None:
        subjects = [key.decode() if key else self._default_subject() for key in messages.keys]
        _run(self._publish(subjects, messages))

    def published(self, run: str, partition: int, offset: int) -> Published:
        bounds = self.bounds(partition)
        end = bounds.end
        if offset > end:
            raise made_again(self, partition, offset, end)
        if offset < bounds.first:
            raise dropped(self, partition, offset, bounds.first)
        ids: list[str] = []
        self._consumer = self._create_consumer(_from(offset) | {"headers_only": True})
        while offset < end:
            raw = self._pull_all(ReadLimits(_IN_FLIGHT, 1 << 24))
            if not raw:
                break
            ids += [message.headers[_ID] for message in raw if message.headers and _ID in message.headers]
            offset = _place(raw[-1])[0] + 1
        self._consumer = None
        return Published(max(offset, end), [each for each in ids if each.startswith(f"{run}-")])

    def _pull_all(self, limits: ReadLimits) -> list[Any]:
        """Messages of a consumer that was made for this; none only if there are none."""
        raw, _, gone = _run(self._pull(limits))
        if gone:
            raise ConnectionError(f"{self.name}: the server was restarted while messages were looked through")
        return raw

    def new_run(self) -> str:
        return secrets.token_hex(8)

    def spell(self, offset: int) -> str:
        return str(offset)

    def parse(self, text: str | int) -> int:
        return int(text)

    def close(self) -> None:
        client, self._client, self._consumer = self._client, None, None
        if client is not None and client.process == os.getpid():
            with contextlib.suppress(Exception):
                _run(client.close())

    # -- of the server -------------------------------------------------------------------------------------------------

    def _api(self, subject: str, request: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = _run(self._ask(f"$JS.API.{subject}", json.dumps(request).encode() if request else b""))
        error = answer.get("error")
        if error is None:
            return answer
        if error.get("err_code") == _NO_SUCH_STREAM:
            raise ConfigError(
                f"{self.name}: there is no stream {self.stream!r}; create it first, for example with "
                f"`nats stream add {self.stream}`"
            )
        raise ConfigError(f"{self.name}: {error.get('description')} (error {error.get('err_code')})")

    def _info(self) -> dict[str, Any]:
        info = self._api(f"STREAM.INFO.{self.stream}")
        if self._created is not None and info["created"] != self._created:
            raise ResumeError(
                f"{self.name} was deleted and made again while it was used ({self._created}, now {info['created']}); "
                "start without the state"
            )
        self._created = info["created"]
        return info

    def _default_subject(self) -> str:
        if self.subject is None:
            subjects = [each for each in self._info()["config"].get("subjects") or [] if not set(each) & set("*>")]
            if not subjects:
                raise ConfigError(f"{self.name} takes no single subject; pass subject=, or key= with a column of them")
            self.subject = subjects[0]
        return self.subject

    def _open_consumer(self, offset: int) -> str:
        bounds = self.bounds(0)
        if offset > bounds.end:
            raise made_again(self, 0, offset, bounds.end)
        if offset < bounds.first:
            raise dropped(self, 0, offset, bounds.first)
        self._next = offset
        return self._create_consumer(_from(offset))

    def _create_consumer(self, config: dict[str, Any]) -> str:
        config |= {"ack_policy": "none", "mem_storage": True, "inactive_threshold": _CONSUMER_SECONDS * 10**9}
        if self.subject is not None:
            config["filter_subject"] = self.subject
        request = {"stream_name": self.stream, "config": config}
        return str(self._api(f"CONSUMER.CREATE.{self.stream}", request)["name"])

    # -- in the thread of the client -------------------------------------------------------------------------------

    async def _connected(self) -> _Client:
        if self._client is not None and self._client.process != os.getpid():
            self._client = self._consumer = None  # a fork has the connection of its parent
        if self._client is None or self._client.lost:
            self._consumer = None
            self._client = await _Client.connect(self._server, self._credentials, self.name)
        return self._client

    async def _ask(self, subject: str, request: bytes) -> dict[str, Any]:
        client = await self._connected()
        answer: dict[str, Any] = json.loads(await client.request(subject, request))
        return answer

    async def _pull(self, limits: ReadLimits) -> tuple[list[Any], bool, bool]:
        """Messages, whether there are no more now, and whether the server has forgotten the consumer."""
        client, consumer = await self._connected(), self._consumer
        if consumer is None:
            return [], False, True
        subject, count = f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{consumer}", limits.messages
        raw, status = await client.pull(subject, {"batch": count, "max_bytes": limits.nbytes, "no_wait": True}, 0.0)
        if not raw and status == "409":  # one message larger than that
            raw, status = await client.pull(subject, {"batch": 1, "no_wait": True}, 0.0)
        if not raw and status in ("404", "408") and limits.wait_seconds > 0:
            expires = {"batch": 1, "expires": max(1, int(limits.wait_seconds * 1e9))}
            raw, status = await client.pull(subject, expires, limits.wait_seconds)
            return raw, not raw, not raw and status not in ("404", "408")
        return raw, len(raw) < count and status in ("404", "408"), not raw and status not in ("404", "408")

    async def _publish(self, subjects: list[str], messages: Outgoing) -> None:
        client = await self._connected()
        for start in range(0, len(subjects), _IN_FLIGHT):
            part = messages.part(start, start + _IN_FLIGHT)
            failed = await client.publish(self.stream, subjects[start : start + _IN_FLIGHT], part.values, part.ids())
            if failed is not None:
                raise ConfigError(f"{self.name}: a message was refused: {failed}")


def _place(message: Any) -> tuple[int, int]:
    """Sequence number and nanoseconds since 1970 of a message, from its reply subject."""
    parts = message.reply.split(".")
    at = 5 if len(parts) < 11 else 7  # behind the domain and the account of the server
    return int(parts[at]), int(parts[at + 2])


def _from(offset: int) -> dict[str, Any]:
    return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(1, offset)}


class _Client:
    """A connection that does not reconnect by itself: its user decides what to repeat."""

    def __init__(self, name: str) -> None:
        self.process, self.name = os.getpid(), name
        self.lost = False
        self._nats: Any = None
        self._inbox = ""
        self._raw: list[Any] = []
        self._wanted = 0
        self._done: asyncio.Future[str] | None = None
        self._acks: list[bytes] = []

    @classmethod
    async def connect(cls, server: str, credentials: str | None, name: str) -> _Client:
        nats = require("nats", "nats")
        made = cls(name)
        hosts = server.partition("://")[2]
        user, _, hosts = hosts.rpartition("@")
        scheme = server.partition("://")[0]
        servers = [f"{scheme}://{user}@{host}" if user else f"{scheme}://{host}" for host in hosts.split(",")]
        options = {}
        if credentials:
            require("nkeys", "nats")
            options["user_credentials"] = credentials
        try:
            made._nats = nats.NATS()
            await made._nats.connect(
                servers,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.05,
                connect_timeout=5,
                error_cb=made._on_error,
                closed_cb=made._on_closed,
                disconnected_cb=made._on_closed,
                name="penstock",
                **options,
            )
            made._inbox = made._nats.new_inbox()
            await made._nats.subscribe(made._inbox, cb=made._on_message)
            await made._nats.subscribe(f"{made._inbox}.ack", cb=made._on_ack)
        except (TimeoutError, OSError, nats.errors.Error) as error:
            told = str(error) or type(error).__name__
            await made.close()
            if "uthorization" in told or "uthentication" in told:
                raise PermissionError(f"{name}: the server refuses the credentials ({told}); check them") from None
            raise ConnectionError(f"{name} cannot be reached: {told}") from None
        return made

    async def request(self, subject: str, payload: bytes) -> bytes:
        nats = require("nats", "nats")
        try:
            return bytes((await self._nats.request(subject, payload, timeout=_ANSWER_SECONDS)).data)
        except nats.errors.NoRespondersError:
            raise ConnectionError(
                f"{self.name}: JetStream does not answer; is it enabled on the server (-js)?"
            ) from None
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise ConnectionError(f"{self.name}: {error!s}") from None

    async def pull(self, subject: str, request: dict[str, Any], wait_seconds: float) -> tuple[list[Any], str]:
        """Messages, and the status with which the server ended the request; "" if it is complete."""
        self._raw, self._wanted = [], request["batch"]
        self._done = asyncio.get_running_loop().create_future()
        if self.lost:
            raise ConnectionError(f"{self.name}: the connection was lost")
        nats = require("nats", "nats")
        try:
            await self._nats.publish(subject, json.dumps(request).encode(), reply=self._inbox)
            status = await asyncio.wait_for(self._done, wait_seconds + _ANSWER_SECONDS)
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise ConnectionError(f"{self.name}: no answer: {error!s}") from None
        return self._raw, status

    async def publish(self, stream: str, subjects: list[str], values: Any, ids: Any) -> str | None:
        """The reason why the server has refused a message; None if all are stored, in this stream."""
        nats = require("nats", "nats")
        if self.lost:
            raise ConnectionError(f"{self.name}: the connection was lost")
        self._acks, self._wanted = [], len(subjects)
        self._done = asyncio.get_running_loop().create_future()
        reply = f"{self._inbox}.ack"
        try:
            for subject, value, one in zip(subjects, values, ids):
                await self._nats.publish(subject, value, reply=reply, headers={_ID: one, _STREAM: stream})
            await asyncio.wait_for(self._done, 3 * _ANSWER_SECONDS)
        except nats.errors.MaxPayloadError:
            return f"it is larger than the {self._nats.max_payload} bytes that the server takes (max_payload)"
        except (TimeoutError, nats.errors.Error, OSError) as error:
            raise ConnectionError(f"{self.name}: no answer: {error!s}") from None
        refused = (json.loads(ack).get("error") for ack in self._acks if b'"error"' in ack)
        return next((str(error.get("description")) for error in refused if error), None)

    async def close(self) -> None:
        self.lost = True
        with contextlib.suppress(Exception):
            await self._nats.close()
        if (transport := getattr(self._nats, "_transport", None)) is not None:  # of a connection that was refused
            with contextlib.suppress(Exception):
                transport.close()

    async def _on_message(self, message: Any) -> None:
        if not message.reply:
            self._end((message.headers or {}).get("Status", "503"))
            return
        self._raw.append(message)
        if len(self._raw) == self._wanted:
            self._end("")

    async def _on_ack(self, message: Any) -> None:
        self._acks.append(message.data or b'{"error": {"description": "no stream takes this subject"}}')
        if len(self._acks) == self._wanted:
            self._end("")

    def _end(self, status: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(status)

    async def _on_closed(self) -> None:
        self.lost = True
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"{self.name}: the connection was lost"))
            self._done.exception()  # or asyncio would report it if nobody waits any more

    async def _on_error(self, error: Exception) -> None:
        return  # what is used next raises


_loops: dict[int, asyncio.AbstractEventLoop] = {}
_starting = threading.Lock()


def _run(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Result of a coroutine that runs in the thread of the client."""
    with _starting:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="penstock-nats", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, loop).result()
