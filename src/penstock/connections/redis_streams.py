"""Streams of Redis as logs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson

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
    message_id,
)
from penstock.connections.redis import connect_redis
from penstock.errors import ConfigError, ResumeError

SCHEMES = ("redis", "rediss")
Answer = TypeVar("Answer")
_ANSWER_SECONDS = 30.0
_SEQUENCE_BITS = 64
_FIRST_BYTES = 1 << 10
"""Size of a message before any was seen."""
_MOST_AT_ONCE = 10_000


class RedisLog:
    """Streams of Redis, each of them a partition; offsets are the ids of entries.

    The value of a message is the field `field` of its entry; all fields as a JSON object if it is None.
    """

    def __init__(self, url: str, stream: str | Sequence[str] | None, *, field: str | None = "data") -> None:
        address = LogAddress.of(url, SCHEMES)
        address.take(["stream"])
        given = stream if stream is not None else address.options.get("stream", "")
        self.streams = [given] if isinstance(given, str) else list(given)
        if not all(self.streams) or not self.streams or (stream and "stream" in address.options):
            raise ConfigError(f"name the streams once, as {hidden(address.server)}/0?stream=NAME or as stream=")
        self._url, self._field = f"{address.server}/{address.path}", None if field is None else field.encode()
        self.name = f"{hidden(self._url)}?stream={','.join(self.streams)}"
        self._client: Any = None
        self._message_bytes: float = _FIRST_BYTES

    def partitions(self) -> list[int]:
        for name in self.streams:
            if self._info(name) is None:
                raise ConfigError(f"{self.name}: there is no stream {name!r}; check the name and the database number")
        return list(range(len(self.streams)))

    def identity(self) -> str | None:
        return None  # ids grow with the time, so a stream that was made again has none of those before

    def bounds(self, partition: int) -> LogBounds:
        info = self._info(self.streams[partition])
        if info is None:
            return LogBounds(0, 0)
        first = info[b"first-entry"]
        end = _number(info[b"last-generated-id"]) + 1
        return LogBounds(_number(first[0]) if first else end, end)

    def read(self, partition: int, offset: int, limits: ReadLimits, *, after: bool) -> Messages:
        key = self.streams[partition]
        count = max(1, min(limits.messages, int(limits.nbytes / self._message_bytes), _MOST_AT_ONCE))
        entries = self._range(key, offset, count, after=after, partition=partition)
        if not entries and limits.wait_seconds > 0:
            wait, last = max(1, int(limits.wait_seconds * 1000)), self.spell(max(0, offset - 1))
            if self._call("XREAD", "COUNT", 1, "BLOCK", wait, "STREAMS", key, last):
                entries = self._range(key, offset, count, after=after, partition=partition)
        found = Messages(offset, caught_up=len(entries) < count)
        for name, fields in entries:
            number = _number(name)
            found.offsets.append(number)
            found.times.append(number >> _SEQUENCE_BITS)
            found.values.append(self._value(fields))
        found.keys, found.headers = [None] * len(entries), [None] * len(entries)
        if entries:
            found.following = found.offsets[-1] + 1
            self._message_bytes = max(1.0, found.nbytes / len(entries))
        return found

    def offset_at(self, partition: int, milliseconds: int) -> int:
        return milliseconds << _SEQUENCE_BITS

    def new_run(self) -> str:
        """Milliseconds of the ids of a run: later than all that are in the streams."""
        last = max(self.bounds(partition).end >> _SEQUENCE_BITS for partition in range(len(self.streams)))
        return str(max(last + 1, time.time_ns() // 1_000_000))

    def publish(self, messages: Outgoing) -> None:
        field = self._field or b"data"
        redis = require("redis", "redis")
        refused: list[int] = []

        def send(client: Any) -> list[Any]:
            with client.pipeline(transaction=False) as pipeline:
                for number, value, partition in zip(messages.numbers, messages.values, messages.partitions):
                    pipeline.execute_command("XADD", self.streams[partition], f"{messages.run}-{number}", field, value)
                found: list[Any] = pipeline.execute(raise_on_error=False)
                return found

        for at, answer in enumerate(self._try(send)):
            if isinstance(answer, redis.exceptions.ResponseError) and "equal or smaller" in str(answer):
                refused.append(at)
            elif isinstance(answer, Exception):
                self._try(partial(_raise, answer))
        for at in refused:  # it is there already, or somebody else has appended
            key, name = self.streams[messages.partitions[at]], f"{messages.run}-{messages.numbers[at]}"
            there = self._call("XRANGE", key, name, name)
            if not there or self._value(there[0][1]) != messages.values[at]:
                raise ConfigError(
                    f"{self.name}: {key!r} has entries after {name!r} that this run has not written; a sink needs a "
                    "stream for itself, since its ids keep entries from being written twice"
                )

    def published(self, run: str, partition: int, offset: int) -> Published:
        found = Published(offset)
        info = self._info(self.streams[partition]) if offset else None
        if offset and (info is None or _number(info[b"last-generated-id"]) + 1 < offset):
            there = "does not exist" if info is None else f"ends with the id {info[b'last-generated-id'].decode()}"
            raise ResumeError(
                f"{self.name}: entries up to the id {self.spell(offset - 1)} were written, and the stream {there} now: "
                "it was deleted and made again, or restored from a backup; delete the checkpoint to write all rows "
                "again, into a stream without those of before"
            )
        while entries := self._range(self.streams[partition], found.following, 1000, after=False, partition=partition):
            for name, fields in entries:
                milliseconds, _, number = name.decode().partition("-")
                if milliseconds == run:
                    found.ids.append(message_id(run, int(number), self._value(fields) or b""))
            found.following = _number(entries[-1][0]) + 1
        return found

    def spell(self, offset: int) -> str:
        return f"{offset >> _SEQUENCE_BITS}-{offset & ((1 << _SEQUENCE_BITS) - 1)}"

    def parse(self, text: str | int) -> int:
        milliseconds, _, sequence = str(text).partition("-")
        try:
            return int(milliseconds) << _SEQUENCE_BITS | int(sequence or 0)
        except ValueError:
            raise ConfigError(
                f"{text!r} is no id of a stream of Redis; expected one such as '1526919030474-55'"
            ) from None

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    # -- of the server -------------------------------------------------------------------------------------------------

    def _range(self, key: str, offset: int, count: int, *, after: bool, partition: int) -> list[Any]:
        """Entries from an offset on. The one before, if it was read, is asked for too: if it is there, none is lost."""
        start = offset - 1 if after else offset
        entries: list[Any] = self._call("XRANGE", key, self.spell(start), "+", "COUNT", count + after)
        if not after:
            return entries
        if entries and _number(entries[0][0]) == start:
            return entries[1:]
        info = self._info(key)
        last = _number(info[b"last-generated-id"]) if info is not None else 0
        if info is None or last < start:
            raise made_again(self, partition, offset, last + 1 if info is not None else 0)
        if last == start:
            return []
        first, deleted = info[b"first-entry"], info.get(b"max-deleted-entry-id")  # Redis 7; of XDEL, not of trimming
        if deleted is None or _number(deleted) > start or not first or _number(first[0]) > start:
            raise dropped(self, partition, offset, _number(entries[0][0]) if entries else last + 1)
        return entries[:count]

    def _info(self, key: str) -> dict[bytes, Any] | None:
        """Facts of a stream; None if there is none."""
        try:
            flat = self._call("XINFO", "STREAM", key)
        except ConfigError as error:
            if "no such key" in str(error):
                return None
            raise
        return dict(zip(flat[::2], flat[1::2]))

    def _value(self, fields: list[bytes]) -> bytes | None:
        pairs = zip(fields[::2], fields[1::2])
        if self._field is not None:
            return next((value for name, value in pairs if name == self._field), None)
        named = list(pairs)
        try:
            return orjson.dumps({name.decode(): value.decode() for name, value in named})
        except UnicodeDecodeError:  # the bytes as they are, which are a bad row
            found = {_as_is(name): _as_is(value) for name, value in named}
            return json.dumps(found, ensure_ascii=False).encode(errors="surrogateescape")

    def _call(self, *command: Any) -> Any:
        # Without the parsing of the client, which makes a dict of each entry.
        def ask(client: Any) -> Any:
            connection = client.connection_pool.get_connection()
            try:
                connection.send_command(*command)
                return connection.read_response()
            except BaseException:
                connection.disconnect()
                raise
            finally:
                client.connection_pool.release(connection)

        return self._try(ask)

    def _try(self, action: Callable[[Any], Answer]) -> Answer:
        errors = require("redis", "redis").exceptions
        if self._client is None:
            self._client = connect_redis(self._url, answer_seconds=_ANSWER_SECONDS)
        try:
            return action(self._client)
        except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError) as error:
            raise PermissionError(f"{self.name}: the server refuses the credentials ({error}); check them") from None
        except (errors.ConnectionError, errors.TimeoutError, errors.BusyLoadingError, OSError) as error:
            raise ConnectionError(f"{self.name} cannot be reached: {error}") from None
        except errors.ResponseError as error:
            if str(error).startswith(("NOAUTH", "WRONGPASS")):
                raise PermissionError(
                    f"{self.name}: the server refuses the credentials ({error}); check them"
                ) from None
            raise ConfigError(f"{self.name}: {error}") from None


def _as_is(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _number(name: bytes) -> int:
    milliseconds, _, sequence = name.partition(b"-")
    return int(milliseconds) << _SEQUENCE_BITS | int(sequence)


def _raise(error: Exception, _: Any) -> None:
    raise error
