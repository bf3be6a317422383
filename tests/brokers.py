"""Brokers of messages for tests: one way to make a log, to put messages into it, and to damage it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import orjson

from penstock.pipeline import Sink, Source
from penstock.sinks import KafkaSink, NatsSink, RedisStreamSink
from penstock.sources import KafkaSource, NatsSource, RedisStreamSource

Row = dict[str, Any]


def as_json(rows: Sequence[Row]) -> list[bytes]:
    return [orjson.dumps(row) for row in rows]


def read_all(source: Any, max_rows: int = 1000) -> list[Row]:
    rows: list[Row] = []
    with closing(source):
        while (batch := source.next_batch(max_rows)) is not None:
            rows += batch.to_pylist()
    return rows


class Broker:
    """A log of a test's own on a server that others use too."""

    source_kind: Callable[..., Source]
    sink_kind: Callable[..., Sink]

    def __init__(self, address: str) -> None:
        self.address = address

    def new(self) -> str:
        """URL of a new, empty log."""
        raise NotImplementedError

    def put(self, url: str, values: Sequence[bytes]) -> None:
        raise NotImplementedError

    def drop(self, url: str, count: int) -> None:
        """Delete the first messages, as retention does."""
        raise NotImplementedError

    def make_again(self, url: str) -> None:
        """Delete the log, and make it again."""
        raise NotImplementedError

    def source(self, url: str, **options: Any) -> Any:
        return self.source_kind(url, **options)

    def sink(self, url: str, **options: Any) -> Any:
        return self.sink_kind(url, **options)


class NatsBroker(Broker):
    source_kind, sink_kind = NatsSource, NatsSink

    def new(self, **config: Any) -> str:
        name = f"s{secrets.token_hex(6)}"
        self._do(lambda js: js.add_stream(name=name, subjects=[name], **config))
        return f"{self.address}/{name}"

    def put(self, url: str, values: Sequence[bytes]) -> None:
        async def publish(js: Any) -> None:
            for each in [await js.publish_async(_name(url), value) for value in values]:
                await each

        self._do(publish)

    def drop(self, url: str, count: int) -> None:
        async def purge(js: Any) -> None:
            first = (await js.stream_info(_name(url))).state.first_seq
            await js.purge_stream(_name(url), seq=first + count)

        self._do(purge)

    def make_again(self, url: str) -> None:
        self._do(lambda js: js.delete_stream(_name(url)))
        self._do(lambda js: js.add_stream(name=_name(url), subjects=[_name(url)]))

    def _do(self, work: Callable[[Any], Any]) -> Any:
        import nats

        async def main() -> Any:
            client = await nats.connect(self.address)
            try:
                return await work(client.jetstream())
            finally:
                await client.close()

        return asyncio.run(main())


class RedisBroker(Broker):
    source_kind, sink_kind = RedisStreamSource, RedisStreamSink

    def new(self) -> str:
        name = f"s{secrets.token_hex(6)}"
        client = self.client()
        client.execute_command("XGROUP", "CREATE", name, "g", "$", "MKSTREAM")
        client.close()
        return f"{self.address}?stream={name}"

    def put(self, url: str, values: Sequence[bytes]) -> None:
        client = self.client()
        with client.pipeline(transaction=False) as pipeline:
            for value in values:
                pipeline.xadd(_name(url), {"data": value})
            pipeline.execute()
        client.close()

    def drop(self, url: str, count: int) -> None:
        client = self.client()
        client.xtrim(_name(url), maxlen=client.xlen(_name(url)) - count, approximate=False)
        client.close()

    def make_again(self, url: str) -> None:
        client = self.client()
        client.delete(_name(url))
        client.xadd(_name(url), {"data": b"{}"}, id="1-1")
        client.close()

    def client(self) -> Any:
        import redis

        return redis.Redis.from_url(self.address)


class KafkaBroker(Broker):
    """The mock broker of librdkafka, in this process: the real client and protocol, no files, four partitions."""

    source_kind, sink_kind = KafkaSource, KafkaSink

    def __init__(self) -> None:
        from confluent_kafka import Producer

        self._producer = Producer({"test.mock.num.brokers": 1, "bootstrap.servers": "mock", "log_level": 0})
        (broker,) = self._producer.list_topics().brokers.values()
        super().__init__(f"kafka://{broker.host}:{broker.port}")

    def new(self) -> str:
        name = f"s{secrets.token_hex(6)}"
        while not self._producer.list_topics(name).topics[name].partitions:
            pass
        return f"{self.address}/{name}"

    def put(self, url: str, values: Sequence[bytes], partition: int = 0) -> None:
        for value in values:
            self._producer.produce(_name(url), value, partition=partition)
        assert not self._producer.flush(20)


def _name(url: str) -> str:
    return url.rpartition("=" if "stream=" in url else "/")[2]
