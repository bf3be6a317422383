"""Topics of Kafka as logs, with the client of librdkafka."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar
from urllib.parse import unquote

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
from penstock.errors import ConfigError

SCHEMES = ("kafka",)
Answer = TypeVar("Answer")
_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_AT_ONCE = 1000
_AHEAD_KIB = 4096
_ID = "penstock-id"


class KafkaLog:
    """A topic of Kafka. No group is joined and nothing is committed: the broker keeps no position."""

    def __init__(self, url: str, topic: str | None, *, options: Mapping[str, Any] | None = None) -> None:
        address = LogAddress.of(url, SCHEMES)
        address.take([])
        found = topic or address.path
        if not found or (topic and address.path and topic != address.path):
            raise ConfigError(f"name one topic, as {hidden(address.server)}/TOPIC or as topic=; got {found!r}")
        self.topic = found
        self.name = f"{hidden(address.server)}/{found}"
        user, _, hosts = address.server.partition("://")[2].rpartition("@")
        self._config: dict[str, Any] = {"bootstrap.servers": hosts, "socket.timeout.ms": int(_ANSWER_SECONDS * 1000)}
        if user:
            name, _, password = user.partition(":")
            self._config |= {
                "security.protocol": "SASL_SSL",
                "sasl.mechanisms": "PLAIN",
                "sasl.username": unquote(name),
                "sasl.password": unquote(password),
            }
        self._config |= options or {}
        self._readers: dict[int, tuple[Any, int]] = {}
        """Client of each partition that is read, and the offset at which it is."""
        self._asker: Any = None
        self._producer: Any = None
        self._failed: list[str] = []

    def partitions(self) -> list[int]:
        topic = self._try(lambda: self._client().list_topics(self.topic, timeout=_ANSWER_SECONDS)).topics.get(
            self.topic
        )
        if topic is None or topic.error is not None or not topic.partitions:
            raise ConfigError(f"{self.name}: there is no topic {self.topic!r}; create it first")
        return sorted(topic.partitions)

    def identity(self) -> str | None:
        return None

    def bounds(self, partition: int) -> LogBounds:
        kafka = require("confluent_kafka", "kafka")
        place = kafka.TopicPartition(self.topic, partition)
        low, high = self._try(lambda: self._client().get_watermark_offsets(place, timeout=_ANSWER_SECONDS))
        return LogBounds(low, high)

    def read(self, partition: int, offset: int, limits: ReadLimits, *, after: bool) -> Messages:
        found, reader = Messages(offset), self._reader(partition, offset)
        self._readers[partition] = (reader, -1)  # if this is interrupted, nobody knows what it has delivered
        until = time.monotonic() + (limits.wait_seconds or _ANSWER_SECONDS)
        nbytes = 0
        while len(found) < limits.messages and nbytes < limits.nbytes and not found.caught_up:
            taken = self._try(lambda: reader.consume(min(_AT_ONCE, limits.messages - len(found)), 0))
            if not taken and len(found):
                break
            if not taken:
                if not limits.wait_seconds and offset >= self.bounds(partition).end:
                    found.caught_up = True
                    break
                left = until - time.monotonic()
                if left <= 0:
                    if not limits.wait_seconds:
                        raise ConnectionError(f"{self.name}: no answer within {_ANSWER_SECONDS:g} s")
                    found.caught_up = True
                    break
                one = self._try(lambda: reader.poll(min(_LOOK_SECONDS, left)))  # noqa: B023 - called at once
                taken = [] if one is None else [one]
            for message in taken:
                if message.error() is None:
                    self._add(found, message)
                    nbytes += len(message.value() or b"")
                else:
                    self._take_event(found, message)
        self._readers[partition] = (reader, found.following)
        return found

    def _take_event(self, found: Messages, event: Any) -> None:
        """Take what a consumer returns in place of a message: the end of the partition, or an error."""
        codes, error = require("confluent_kafka", "kafka").KafkaError, event.error()
        if error.code() == codes._PARTITION_EOF:
            found.caught_up, found.following = True, max(found.following, event.offset())
        elif error.code() in (codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE):
            raise self._out_of_range(event.partition(), found.following)
        else:
            self._raise(error)

    def offset_at(self, partition: int, milliseconds: int) -> int:
        kafka = require("confluent_kafka", "kafka")
        place = kafka.TopicPartition(self.topic, partition, milliseconds)
        (found,) = self._try(lambda: self._client().offsets_for_times([place], timeout=_ANSWER_SECONDS))
        return int(found.offset) if found.offset >= 0 else self.bounds(partition).end

    def new_run(self) -> str:
        return secrets.token_hex(8)

    def publish(self, messages: Outgoing) -> None:
        kafka = require("confluent_kafka", "kafka")
        if self._producer is None:
            # Idempotent: what the client sends again after a lost answer is stored once, and in order.
            config = {"enable.idempotence": True, "linger.ms": 5, "message.timeout.ms": 30_000} | self._config
            self._producer = self._try(lambda: kafka.Producer(config, logger=_silent()))
        producer, self._failed = self._producer, []
        for one, value, key, partition in zip(messages.ids(), messages.values, messages.keys, messages.partitions):
            while True:
                try:
                    producer.produce(
                        self.topic, value, key, partition, on_delivery=self._delivered, headers={_ID: one.encode()}
                    )
                    break
                except BufferError:
                    producer.poll(0.1)
                except kafka.KafkaException as error:
                    self._raise(error.args[0])
        left = producer.flush(3 * _ANSWER_SECONDS)
        if left or self._failed:
            told = self._failed[0] if self._failed else f"{left} messages are not confirmed"
            raise ConnectionError(f"{self.name}: {told}")

    def published(self, run: str, partition: int, offset: int) -> Published:
        end, found = self.bounds(partition).end, Published(offset)
        if offset > end:
            raise made_again(self, partition, offset, end)
        while found.following < end:
            read = self.read(partition, found.following, ReadLimits(1000, 1 << 22, 1.0), after=False)
            ids = [headers[_ID] for headers in read.headers if headers and _ID in headers]
            found.ids += [one for one in ids if one.startswith(f"{run}-")]
            found.following = read.following
        return found

    def spell(self, offset: int) -> str:
        return str(offset)

    def parse(self, text: str | int) -> int:
        return int(text)

    def close(self) -> None:
        clients = [reader for reader, _ in self._readers.values()]
        if self._asker is not None:
            clients.append(self._asker)
        self._readers, self._asker = {}, None
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
        for client in clients:
            with contextlib.suppress(Exception):
                client.close()

    # -- of the client -------------------------------------------------------------------------------------------------

    def _client(self) -> Any:
        if self._asker is None:
            self._asker = self._consumer()
        return self._asker

    def _reader(self, partition: int, offset: int) -> Any:
        kafka = require("confluent_kafka", "kafka")
        reader, at = self._readers.get(partition, (None, -1))
        if reader is not None and at == offset:
            return reader
        bounds = self.bounds(partition)
        if not bounds.first <= offset <= bounds.end:
            raise self._out_of_range(partition, offset)
        if reader is None:
            reader = self._consumer()
        self._try(lambda: reader.assign([kafka.TopicPartition(self.topic, partition, offset)]))
        self._readers[partition] = (reader, offset)
        return reader

    def _consumer(self) -> Any:
        kafka = require("confluent_kafka", "kafka")
        config = {
            "group.id": f"penstock-{secrets.token_hex(4)}",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "queued.max.messages.kbytes": _AHEAD_KIB,
            "fetch.max.bytes": _AHEAD_KIB << 10,
            "max.partition.fetch.bytes": 1 << 20,
        }
        return self._try(lambda: kafka.Consumer(config | self._config, logger=_silent()))

    def _add(self, found: Messages, message: Any) -> None:
        found.offsets.append(message.offset())
        found.values.append(message.value())
        found.keys.append(message.key())
        found.times.append(message.timestamp()[1])
        given = message.headers()
        found.headers.append({name: _text(value) for name, value in given} if given else None)
        found.following = message.offset() + 1

    def _out_of_range(self, partition: int, offset: int) -> Exception:
        bounds = self.bounds(partition)
        if offset < bounds.first:
            return dropped(self, partition, offset, bounds.first)
        return made_again(self, partition, offset, bounds.end)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None:
            self._failed.append(error.str())

    def _try(self, action: Callable[[], Answer]) -> Answer:
        kafka = require("confluent_kafka", "kafka")
        try:
            return action()
        except kafka.KafkaException as error:
            self._raise(error.args[0])

    def _raise(self, error: Any) -> NoReturn:
        kafka = require("confluent_kafka", "kafka")
        codes, told = kafka.KafkaError, error.str()
        if error.code() in (codes._AUTHENTICATION, codes.SASL_AUTHENTICATION_FAILED, codes.TOPIC_AUTHORIZATION_FAILED):
            raise PermissionError(f"{self.name}: the broker refuses the credentials ({told}); check them")
        if error.code() in (codes._UNKNOWN_TOPIC, codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_PARTITION):
            raise ConfigError(f"{self.name}: there is no topic {self.topic!r}; create it first")
        if error.code() == codes.MSG_SIZE_TOO_LARGE:
            raise ConfigError(f"{self.name}: a message is larger than the broker takes; raise message.max.bytes")
        if error.code() == codes._INVALID_ARG:
            raise ConfigError(f"{self.name}: {told}")
        raise ConnectionError(f"{self.name}: {told}")


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "replace")


def _silent() -> Any:
    """A logger that says nothing: what matters is raised, and the lines of the client name their servers only."""
    import logging

    logger = logging.getLogger("penstock.kafka")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    return logger
