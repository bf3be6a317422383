"""Rows as messages of brokers: NATS and Redis are real servers, Kafka is the mock broker of librdkafka."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from tests.brokers import Broker, KafkaBroker, NatsBroker, RedisBroker, as_json, read_all
from tests.servers import KILLS, NatsServer, Proxy, RedisServer

from penstock.connections.logs import Outgoing
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError, StageError
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import KafkaSink, NatsSink, RedisStreamSink, open_sink
from penstock.sources import KafkaSource, MemorySource, NatsSource
from penstock.testing import RowsSource, assert_sink_contract

ROWS = [{"id": i, "text": f"row {i} ö"} for i in range(40)]


def one_log_each(broker: Broker) -> Callable[[Path], Any]:
    """Makes sinks; those of one directory write into one log."""
    urls: dict[Path, str] = {}

    def make(directory: Path) -> Any:
        return broker.sink(urls.setdefault(directory, broker.new()))

    return make


def test_a_log_keeps_the_contract_of_sinks(broker: Broker) -> None:
    assert_sink_contract(one_log_each(broker), lambda sink: read_all(broker.source(sink._log.name)))


def test_a_topic_of_kafka_keeps_every_row_once_over_a_crash(kafka_broker: KafkaBroker) -> None:
    url = kafka_broker.new()
    batches = pa.Table.from_pylist(ROWS).to_batches(max_chunksize=10)
    first = KafkaSink(url, key="text")
    first.restore({})
    first.consume(batches[0])
    token = orjson.loads(orjson.dumps(first.checkpoint()))
    first.consume(batches[1])
    first.abort()  # the process is killed: nothing after the checkpoint is known to the next
    again = KafkaSink(url, key="text")
    again.restore(token)
    for batch in batches[1:]:
        again.consume(batch)
    again.flush()
    rows = read_all(KafkaSource(url, metadata=["partition", "key"]))
    assert sorted(row["id"] for row in rows) == list(range(40))
    assert len({row["partition"] for row in rows}) == 4
    assert all(row["key"].decode() == row["text"] for row in rows)


def test_a_checkpoint_among_rows_that_come_again_still_knows_the_rest_of_them(broker: Broker) -> None:
    url = broker.new(duplicate_window=0.1) if isinstance(broker, NatsBroker) else broker.new()
    rows = pa.Table.from_pylist(ROWS).to_batches()[0]
    first = broker.sink(url)
    first.restore({})
    token = first.checkpoint()
    first.consume(rows)
    first.abort()
    again = broker.sink(url)
    again.restore(token)
    again.consume(rows.slice(0, 15))
    token = orjson.loads(orjson.dumps(again.checkpoint()))
    again.abort()
    last = broker.sink(url)
    last.restore(token)
    last.consume(rows.slice(15))
    assert "there" not in last.checkpoint()
    last.flush()
    assert read_all(broker.source(url)) == ROWS


class CrashError(Exception):
    pass


def crashing(sink: Any, after: int) -> Any:
    """The sink, which dies in its n-th batch, with half of it published."""
    consume, count = sink.consume, [0]

    def die(batch: pa.RecordBatch) -> None:
        count[0] += 1
        if count[0] == after:
            consume(batch.slice(0, batch.num_rows // 2))
            raise CrashError
        consume(batch)

    sink.consume = die
    return sink


@pytest.mark.parametrize("seconds", [1e-6, 1e6])
def test_a_run_that_is_killed_and_resumed_publishes_every_row_once(
    broker: Broker, tmp_path: Path, seconds: float
) -> None:
    # Rows are known by what is in the stream, not by the memory of the server, which ends after a while.
    url = broker.new(duplicate_window=0.1) if isinstance(broker, NatsBroker) else broker.new()
    config = PipelineConfig(batch_rows=4, checkpoint_seconds=seconds)
    for after in (1, 2, 3, 2):
        pipeline = Pipeline(RowsSource(ROWS), [], crashing(broker.sink(url), after), config)
        with pytest.raises(StageError, match="CrashError"):
            pipeline.run(checkpoint=tmp_path)
    _wait_until_the_server_forgets(broker, url)
    for _ in range(2):  # the second finds the run complete
        report = Pipeline(RowsSource(ROWS), [], broker.sink(url), config).run(checkpoint=tmp_path)
        assert (report.resumed, report.rows_out) == (True, 40)
        assert read_all(broker.source(url)) == ROWS


def _wait_until_the_server_forgets(broker: Broker, url: str) -> None:
    """Wait until a message with an id of before is taken for a new one, and delete what that needed."""
    if not isinstance(broker, NatsBroker):
        return
    name = url.rpartition("/")[2]

    async def wait(js: Any) -> None:
        first = await js.get_msg(name, 1)
        ack = await js.publish(name, first.data, headers=first.headers)
        while ack.duplicate:
            ack = await js.publish(name, first.data, headers=first.headers)
        await js.delete_msg(name, ack.seq)

    broker._do(wait)


def test_a_run_from_a_log_to_a_log_is_exact_though_its_batches_are_cut_elsewhere(
    broker: Broker, tmp_path: Path
) -> None:
    url, out = broker.new(), broker.new()
    broker.put(url, as_json(ROWS))
    for rows in (3, 7):
        config = PipelineConfig(batch_rows=rows, checkpoint_seconds=1e-6)
        pipeline = Pipeline(broker.source(url), [], crashing(broker.sink(out), 3), config)
        with pytest.raises(StageError, match="CrashError"):
            pipeline.run(checkpoint=tmp_path)
    Pipeline(broker.source(url), [], broker.sink(out)).run(checkpoint=tmp_path)
    assert read_all(broker.source(out)) == ROWS


@pytest.mark.parametrize("kind", [NatsServer, RedisServer])
def test_a_server_that_is_killed_while_rows_are_published_has_each_once(kind: type[Any], tmp_path: Path) -> None:
    rows = [{"id": i} for i in range(60 * (2 * KILLS + 2))]
    with kind() as server:
        broker = NatsBroker(server.url) if kind is NatsServer else RedisBroker(server.url)
        url = broker.new()
        sink = broker.sink(url)
        for number, batch in enumerate(pa.Table.from_pylist(rows).to_batches(max_chunksize=60)):
            if number % 2 and number < 2 * KILLS:
                _kill_in_the_middle(server, sink)
            sink.consume(batch)
        sink.flush()
        assert read_all(broker.source(url)) == rows


def _kill_in_the_middle(server: Any, sink: Any) -> None:
    """The next messages are stored in part, and then the server dies; it is up again when they are sent again."""
    publish = sink._log.publish

    def once(messages: Outgoing) -> None:
        sink._log.publish = publish
        publish(messages.part(0, 20))
        server.restart()
        raise ConnectionError("killed")

    sink._log.publish = once


@pytest.mark.parametrize("kind", ["nats", "redis"])
def test_a_slow_server_with_resets_has_every_row_once(kind: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(f"{kind}_server")
    direct = NatsBroker(server.url) if kind == "nats" else RedisBroker(server.url)
    url = direct.new()
    rows = [{"id": i} for i in range(3000)]
    with Proxy(server.port, latency_seconds=0.002, reset_after=20_000) as proxy:
        proxy.resets = 4
        sink = direct.sink(url.replace(str(server.port), str(proxy.port)))
        for batch in pa.Table.from_pylist(rows).to_batches(max_chunksize=500):
            sink.consume(batch)
        sink.flush()
        assert proxy.resets_done == 4
    assert read_all(direct.source(url)) == rows


def test_a_column_is_published_as_it_is(broker: Broker) -> None:
    url = broker.new()
    sink = broker.sink(url, column="value")
    sink.consume(pa.RecordBatch.from_pylist([{"value": b"\x00\xff", "n": 1}, {"value": b"", "n": 2}]))
    with pytest.raises(DataError, match="'value' is null"):
        sink.consume(pa.RecordBatch.from_pylist([{"value": None}], schema=pa.schema([("value", pa.binary())])))
    with pytest.raises(SchemaError, match="int64"):
        sink.consume(pa.RecordBatch.from_pylist([{"value": 1}]))
    with pytest.raises(SchemaError, match="no column"):
        sink.consume(pa.RecordBatch.from_pylist([{"other": 1}]))
    sink.flush()
    assert [row["value"] for row in read_all(broker.source(url, format="bytes"))] == [b"\x00\xff", b""]
    with pytest.raises(SchemaError, match="column="):
        broker.sink(url).consume(pa.RecordBatch.from_pylist([{"value": b"x"}]))


def test_subjects_of_messages_come_from_a_column(nats_server: NatsServer) -> None:
    broker = NatsBroker(nats_server.url)
    url = broker.new()
    name = url.rpartition("/")[2]
    broker._do(lambda js: js.update_stream(name=name, subjects=[f"{name}.>"]))
    with pytest.raises(ConfigError, match="subject="):
        Pipeline(MemorySource(ROWS), [], NatsSink(url)).run()
    rows = [{"id": i, "to": f"{name}.{'ab'[i % 2]}"} for i in range(10)]
    Pipeline(MemorySource(rows), [], NatsSink(url, key="to")).run()
    assert [row["id"] for row in read_all(NatsSource(url, subject=f"{name}.b"))] == [1, 3, 5, 7, 9]
    assert len(read_all(NatsSource(f"{url}?subject={name}.a"))) == 5
    with pytest.raises(ConfigError, match="refused"):
        Pipeline(MemorySource([{"id": 1, "to": "elsewhere"}]), [], NatsSink(url, key="to")).run()
    other = broker.new()  # another stream takes this subject
    with pytest.raises(ConfigError, match="expected stream does not match"):
        Pipeline(MemorySource(ROWS), [], NatsSink(url, subject=other.rpartition("/")[2])).run()
    assert read_all(NatsSource(other)) == []
    with pytest.raises(ConfigError, match="pass one"):
        NatsSink(url, subject="a", key="to")


def test_nobody_else_may_append_to_a_stream_of_redis_meanwhile(redis_server: RedisServer) -> None:
    broker = RedisBroker(redis_server.url)
    url = broker.new()
    sink = broker.sink(url)
    sink.consume(pa.RecordBatch.from_pylist(ROWS[:5]))
    client = broker.client()
    client.xadd(url.rpartition("=")[2], {"data": "{}"}, id=f"{1 << 50}-0")
    client.close()
    with pytest.raises(ConfigError, match="stream for itself"):
        sink.consume(pa.RecordBatch.from_pylist(ROWS[5:]))
    sink.abort()


def test_a_message_that_is_too_large_is_refused_by_name(nats_server: NatsServer) -> None:
    broker = NatsBroker(nats_server.url)
    sink = broker.sink(broker.new())
    with pytest.raises(ConfigError, match="max_payload"):
        sink.consume(pa.RecordBatch.from_pylist([{"text": "x" * (2 << 20)}]))
    sink.abort()


def test_a_checkpoint_of_a_log_that_was_made_again_is_refused(broker: Broker, tmp_path: Path) -> None:
    url = broker.new()
    sink = broker.sink(url)
    sink.restore({})
    sink.consume(pa.RecordBatch.from_pylist(ROWS))
    token = sink.checkpoint()
    sink.abort()
    if isinstance(broker, NatsBroker):
        broker.make_again(url)
        with pytest.raises(ResumeError, match="made again"):
            broker.sink(url).restore(token)
    if isinstance(broker, RedisBroker):
        client, name = broker.client(), url.rpartition("=")[2]
        client.delete(name)
        with pytest.raises(ResumeError, match=r"does not exist now.*delete the checkpoint"):
            broker.sink(url).restore(token)
        client.xadd(name, {"data": "{}"}, id="5-0")
        client.close()
        with pytest.raises(ResumeError, match=r"ends with the id 5-0 now.*delete the checkpoint"):
            broker.sink(url).restore(token)
    with pytest.raises(ResumeError, match="damaged"):
        broker.sink(url).restore({"run": "x"})


def test_sinks_are_opened_by_url() -> None:
    assert isinstance(open_sink("nats://h/s"), NatsSink)
    assert isinstance(open_sink("redis://:pw@h/0?stream=s"), RedisStreamSink)
    assert repr(open_sink("kafka://u:pw@h/t", key="k")) == "KafkaSink('kafka://***@h/t', key='k')"
