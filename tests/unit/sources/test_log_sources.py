"""Messages of brokers as rows: NATS and Redis are real servers, Kafka is the mock broker of librdkafka."""

from __future__ import annotations

import io
import itertools
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from tests.brokers import Broker, KafkaBroker, NatsBroker, RedisBroker, as_json, read_all
from tests.servers import KILLS, NatsServer, Proxy, RedisServer

from penstock.connections import nats
from penstock.connections.logs import ReadLimits
from penstock.connections.redis_streams import RedisLog
from penstock.errors import ConfigError, DataError, ResumeError, SchemaError, StoppedError
from penstock.pipeline import Pipeline, PipelineConfig
from penstock.sinks import MemorySink, open_sink
from penstock.sources import KafkaSource, NatsSource, RedisStreamSource, open_source
from penstock.testing import assert_resumes_exactly, assert_source_contract

ROWS = [{"id": i, "text": f"row {i} ö", "deep": {"x": [i]} if i % 3 else None} for i in range(30)]


@pytest.fixture
def full(broker: Broker) -> str:
    """URL of a log with all rows."""
    url = broker.new()
    broker.put(url, as_json(ROWS))
    return url


def test_a_log_keeps_the_contract_of_sources(broker: Broker, full: str) -> None:
    assert_source_contract(lambda: broker.source(full), ROWS)


def test_a_pipeline_over_a_log_resumes_at_every_batch(broker: Broker, full: str) -> None:
    assert_resumes_exactly(lambda: Pipeline(broker.source(full), config=PipelineConfig(batch_rows=7)))


def test_partitions_of_kafka_are_read_one_after_the_other(kafka_broker: KafkaBroker) -> None:
    url = kafka_broker.new()
    kafka_broker.put(url, as_json(ROWS[:4]), partition=2)
    kafka_broker.put(url, as_json(ROWS[4:]), partition=0)
    assert_source_contract(lambda: KafkaSource(url), [*ROWS[4:], *ROWS[:4]])


def test_partitions_without_an_end_take_turns_and_resume_each_at_its_place(kafka_broker: KafkaBroker) -> None:
    url = kafka_broker.new()
    for partition in range(2):
        kafka_broker.put(url, as_json(ROWS[partition::2]), partition=partition)
    first, found = KafkaSource(url, until=None, max_wait_seconds=0.05), []
    while len(found) < 12:
        found += first.next_batch(5).to_pylist()
    again = KafkaSource(url, until=None, max_wait_seconds=0.05)
    again.load_state_dict(first.state_dict())
    first.close()
    while len(found) < 30:
        found += again.next_batch(5).to_pylist()
    again.close()
    assert sorted(row["id"] for row in found) == list(range(30))


def test_a_partition_that_is_added_is_read_from_its_beginning_by_a_resumed_run(
    kafka_broker: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = kafka_broker.new()
    kafka_broker.put(url, as_json(ROWS[:5]), partition=0)
    with monkeypatch.context() as before:
        before.setattr("penstock.connections.kafka.KafkaLog.partitions", lambda _: [0])
        first = KafkaSource(url, until=None, max_wait_seconds=0.05)
        assert first.next_batch(5).num_rows == 5
        state = first.state_dict()
        first.close()
    kafka_broker.put(url, as_json(ROWS[5:8]), partition=3)
    again = KafkaSource(url, until=None, max_wait_seconds=0.05)
    again.load_state_dict(state)
    assert again.next_batch(3).to_pylist() == ROWS[5:8]
    again.close()


def test_metadata_becomes_columns(broker: Broker, full: str) -> None:
    names = ["partition", "offset", "key", "timestamp", "headers"]
    rows = read_all(broker.source(full, metadata=names))
    offsets = [row["offset"] for row in rows]
    assert list(rows[0]) == ["id", "text", "deep", *names]
    assert len({*offsets}) == 30
    assert rows[0]["partition"] == 0
    assert abs(rows[0]["timestamp"] - datetime.now(UTC)).total_seconds() < 600
    (row,) = read_all(broker.source(full, start=offsets[29], metadata={"offset": "place"}))
    assert (row["id"], row["place"]) == (29, offsets[29])
    with pytest.raises(ConfigError, match="metadata"):
        read_all(broker.source(full, metadata={"offset": "text"}))
    with pytest.raises(ConfigError, match="'offsets'"):
        broker.source(full, metadata=["offsets"])


def test_messages_may_be_text_or_bytes(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, [b"eins", "zwö".encode()])
    assert read_all(broker.source(url, format="text")) == [{"text": "eins"}, {"text": "zwö"}]
    assert read_all(broker.source(url, format="bytes")) == [{"value": b"eins"}, {"value": "zwö".encode()}]
    broker.put(url, [b"\xff\xfe"])
    with pytest.raises(DataError, match="UTF-8"):
        read_all(broker.source(url, format="text"))
    with pytest.raises(ConfigError, match="xml"):
        broker.source(url, format="xml")


def test_fields_of_redis_that_are_no_text_are_a_bad_row(redis_server: RedisServer) -> None:
    broker = RedisBroker(redis_server.url)
    url = broker.new()
    client = broker.client()
    for value in ("ä", b"\xff\xfe", "b"):
        client.xadd(url.rpartition("=")[2], {"a": value})
    client.close()
    with pytest.raises(DataError, match="UTF-8"):
        read_all(RedisStreamSource(url, field=None))
    sink = MemorySink()
    config = PipelineConfig(on_error="skip", max_failure_ratio=1.0)
    Pipeline(RedisStreamSource(url, field=None), [], sink, config).run()
    assert sink.rows() == [{"a": "ä"}, {"a": "b"}]


def ipc(rows: list[dict[str, Any]]) -> bytes:
    out, table = io.BytesIO(), pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def test_messages_of_arrow_data_hold_many_rows_and_resume_between_them(broker: Broker) -> None:
    url = broker.new()
    flat = [{"id": row["id"], "text": row["text"]} for row in ROWS]
    broker.put(url, [ipc(flat[:4]), ipc(flat[4:5]), ipc(flat[5:20]), ipc(flat[20:])])
    assert_source_contract(lambda: broker.source(url, format="arrow"), flat)
    broker.put(url, [ipc([{"id": 1, "text": "a", "more": 1}]), b"no arrow", ipc([{"other": 1}])])
    sink = MemorySink()
    config = PipelineConfig(on_error="skip")
    report = Pipeline(broker.source(url, format="arrow"), [], sink, config).run()
    assert (report.rows_out, sum(report.skipped.values())) == (31, 2)


def test_a_poison_message_is_named_by_partition_and_offset(broker: Broker, tmp_path: Path) -> None:
    url = broker.new()
    broker.put(url, [*as_json(ROWS[:5]), b'{"id": ', b'{"id": "x"}', b"[1]", b'{"id":\n5}', *as_json(ROWS[5:])])
    offsets = [row["offset"] for row in read_all(broker.source(url, format="bytes", metadata=["offset"]))]
    given = {"schema": pa.schema([("id", pa.int64())]), "columns": ["id"]}
    with pytest.raises(DataError, match=f"partition 0, offset {offsets[5]}") as error:
        read_all(broker.source(url, **given))
    assert error.value.data == b'{"id": '
    bad = tmp_path / "bad.jsonl"
    sink = MemorySink()
    config = PipelineConfig(on_error="quarantine", quarantine=bad, batch_rows=4)
    report = Pipeline(broker.source(url, **given), [], sink, config).run()
    assert [row["id"] for row in sink.rows()] == [*range(5), 5, *range(5, 30)]
    lines = [orjson.loads(line) for line in bad.read_bytes().splitlines()]
    assert [line["file"].rpartition(" ")[2] for line in lines] == [str(offset) for offset in offsets[5:8]]
    assert [line["raw"] for line in lines] == ['{"id": ', '{"id": "x"}', "[1]"]
    assert report.rows_out == 31


@pytest.mark.parametrize("at", [0, 1, 29])
def test_types_are_those_of_most_messages_and_others_are_bad_rows(broker: Broker, at: int) -> None:
    url = broker.new()
    values = [b'{"id": %d, "tags": ["a"], "more": null}' % number for number in range(30)]
    values.insert(at, b'{"id": "x", "tags": [], "more": null}')
    values.insert(at, b'{"id": 1, "tags": [1, "a"], "more": null}')
    broker.put(url, values)
    offsets = [row["offset"] for row in read_all(broker.source(url, format="bytes", metadata=["offset"]))]
    with pytest.raises(DataError, match=f"partition 0, offset {offsets[at]}"):
        read_all(broker.source(url))
    sink = MemorySink()
    report = Pipeline(broker.source(url), [], sink, PipelineConfig(on_error="skip")).run()
    assert [row["id"] for row in sink.rows()] == list(range(30))
    assert report.rows_out == 30


def test_a_field_that_no_type_holds_in_any_message_is_an_error_that_names_it(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, [b'{"id": 1, "tags": [1, "a"]}'])
    with pytest.raises(SchemaError, match=r"first messages: field 'tags\[\]' has values of int64 and of string"):
        read_all(broker.source(url))
    assert read_all(broker.source(url, columns=["id"])) == [{"id": 1}]  # as the error says


def test_types_are_learned_from_the_first_messages_and_held(broker: Broker) -> None:
    url = broker.new()
    broker.put(url, as_json([{"n": i} for i in range(10)]))
    source = broker.source(url, until=None, max_wait_seconds=0.01)
    first = source.next_batch(10)
    broker.put(url, as_json([{"n": 1.5}, {"n": 11, "new": 1}, {"n": 12}]))
    again = broker.source(url, until=None, max_wait_seconds=0.01)
    again.load_state_dict(orjson.loads(orjson.dumps(source.state_dict())))
    kinds = []
    for _ in range(2):
        with pytest.raises(DataError) as error:
            again.next_batch(10)
        kinds.append(str(error.value))
        again.skip_file()
    assert "1.5" in kinds[0]
    assert "'new'" in kinds[1]
    assert again.next_batch(10).to_pylist() == [{"n": 12}]
    assert again.schema == first.schema == pa.schema([("n", pa.int64())])
    for each in (source, again):
        each.close()


def test_a_schema_and_columns_may_be_given(broker: Broker, full: str) -> None:
    schema = pa.schema([("id", pa.float32()), ("text", pa.string())])
    with pytest.raises(DataError, match="'deep' is not in the schema"):
        read_all(broker.source(full, schema=schema))
    rows = read_all(broker.source(full, schema=schema, columns=["text", "id"]))
    assert rows[3] == {"text": "row 3 ö", "id": 3.0}
    assert read_all(broker.source(full, columns=["id"]))[-1] == {"id": 29}
    with pytest.raises(SchemaError, match="'nope'"):
        read_all(broker.source(full, columns=["nope"]))


@pytest.mark.parametrize("when", ["between two batches", "before a resume"])
def test_what_the_broker_has_dropped_is_never_passed_over(
    broker: Broker, full: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.logs.partition.AHEAD_MESSAGES", 1)
    source = broker.source(full, schema=pa.schema([("id", pa.int64())]), columns=["id"])
    assert source.next_batch(5).num_rows == 5
    state = source.state_dict()
    broker.drop(full, 3)  # all of them were read
    assert source.next_batch(5)["id"].to_pylist() == [5, 6, 7, 8, 9]
    broker.drop(full, 17)
    if when == "before a resume":
        source.close()
        source.load_state_dict(state)
    with pytest.raises(ResumeError, match="dropped") as error:
        read_all(source)
    assert "retention" in str(error.value)
    source.close()
    assert [row["id"] for row in read_all(broker.source(full))] == list(range(20, 30))


def test_a_log_that_is_emptied_while_it_is_read_has_not_ended(
    broker: Broker, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.sources.logs.partition.AHEAD_MESSAGES", 1)
    source = broker.source(full, schema=pa.schema([("id", pa.int64())]), columns=["id"])
    assert source.next_batch(5).num_rows == 5
    broker.drop(full, 30)
    with pytest.raises(ResumeError, match="dropped"):
        read_all(source)
    source.close()


def test_what_redis_7_has_trimmed_is_noticed(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its greatest deleted id is that of XDEL alone; a server before 7 has none.
    info = RedisLog._info
    monkeypatch.setattr(RedisLog, "_info", lambda log, key: {**(info(log, key) or {}), b"max-deleted-entry-id": b"0-0"})
    broker = RedisBroker(redis_server.url)
    url = broker.new()
    broker.put(url, as_json(ROWS))
    source = broker.source(url)
    source.next_batch(5)
    state = source.state_dict()
    broker.drop(url, 12)
    with pytest.raises(ResumeError, match="dropped"):
        _resume_and_read(source, state)
    source.close()


@pytest.mark.parametrize("kind", ["nats", "kafka"])
def test_a_read_that_is_interrupted_loses_nothing(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = request.getfixturevalue("kafka_broker") if kind == "kafka" else None
    broker = broker or NatsBroker(request.getfixturevalue("nats_server").url)
    url = broker.new()
    broker.put(url, as_json(ROWS))
    log = broker.source(url)._log
    first = log.read(0, log.bounds(0).first, ReadLimits(4), after=False)
    with monkeypatch.context() as patch:
        if kind == "nats":
            run = nats._run
            patch.setattr(nats, "_run", lambda work: _interrupt(run(work)))
        else:
            patch.setattr(log, "_add", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            log.read(0, first.following, ReadLimits(4), after=True)
    assert log.read(0, first.following, ReadLimits(4), after=True).offsets[0] == first.following
    log.close()


def _interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


def test_a_time_without_a_zone_is_utc_as_text_and_as_datetime(
    broker: Broker, full: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        naive = datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=1)
        assert len(read_all(broker.source(full, start=naive))) == len(ROWS)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_log_that_was_made_again_is_noticed(broker: Broker, full: str) -> None:
    source = broker.source(full)
    source.next_batch(20)
    state = source.state_dict()
    source.close()
    broker.make_again(full)
    again = broker.source(full)
    with pytest.raises(ResumeError, match="made again"):
        _resume_and_read(again, state)
    again.close()


def _resume_and_read(source: Any, state: Any) -> None:
    source.load_state_dict(state)
    read_all(source)


def test_a_state_of_another_log_is_refused(broker: Broker, full: str) -> None:
    source = broker.source(full)
    state = source.state_dict()
    with pytest.raises(ResumeError, match="this source reads"):
        broker.source(broker.new()).load_state_dict(state)
    with pytest.raises(ResumeError, match="checksum"):
        source.load_state_dict(state | {"row": 7})


def test_reading_ends_where_the_log_ended_when_it_began(broker: Broker, full: str) -> None:
    source = broker.source(full)
    found = source.next_batch(10).to_pylist()
    broker.put(full, as_json(ROWS))
    state = source.state_dict()
    assert found + read_all(source) == ROWS
    again = broker.source(full)
    again.load_state_dict(state)
    assert found + read_all(again) == ROWS


def test_reading_begins_and_ends_at_offsets_and_times(broker: Broker, full: str) -> None:
    rows = read_all(broker.source(full, metadata=["offset"]))
    low, high = rows[10]["offset"], rows[20]["offset"]
    assert read_all(broker.source(full, start=low, until=high)) == ROWS[10:20]
    assert read_all(broker.source(full, start="latest")) == []
    assert read_all(broker.source(full, until="2001-01-01T00:00:00Z")) == []
    assert read_all(broker.source(full, start=datetime(2001, 1, 1, tzinfo=UTC))) == ROWS
    now = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 <= now:
        pass
    broker.put(full, as_json([{**ROWS[1], "id": 77}]))
    when = datetime.fromtimestamp((now + 1) / 1000, UTC)
    assert [row["id"] for row in read_all(broker.source(full, start=when))] == [77]
    for bad in ("soon", "2001-31-31T00:00:00", True, 1.5):
        with pytest.raises(ConfigError, match=r"start|time"):
            broker.source(full, start=bad)


def test_rows_of_a_log_without_an_end_leave_in_time(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = itertools.cycle([0.0, 9e9, 1e9])
    monkeypatch.setattr("time.time", lambda: next(jumps))  # a clock that jumps changes nothing
    url = broker.new()
    broker.put(url, as_json(ROWS[:3]))
    found: list[Any] = []
    with Pipeline(broker.source(url, until=None, max_wait_seconds=0.05)) as pipeline:
        for batch in pipeline:
            found += batch.to_pylist()
            if len(found) == 3:
                threading.Thread(target=broker.put, args=(url, as_json(ROWS[3:]))).start()
            if len(found) == 30:
                break
    assert found == ROWS


def test_a_stop_is_not_the_end_and_the_run_goes_on_later(broker: Broker, tmp_path: Path) -> None:
    url, out = broker.new(), broker.new()
    broker.put(url, as_json(ROWS[:10]))
    for rows in (10, 30):
        source = broker.source(url, until=None, max_wait_seconds=0.01)
        pipeline = Pipeline(source, [], broker.sink(out)).start(tmp_path / "state")
        while len(read_all(broker.source(out))) < rows:
            pass
        pipeline.stop()
        with pytest.raises(StoppedError):
            pipeline.wait()
        broker.put(url, as_json(ROWS[10:]) if rows == 10 else [])
    assert read_all(broker.source(out)) == ROWS


@pytest.mark.parametrize("kind", [NatsServer, RedisServer])
def test_a_server_that_is_killed_while_it_is_read_loses_and_repeats_nothing(
    kind: type[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.brokers import RedisBroker

    monkeypatch.setattr("penstock.sources.logs.partition.AHEAD_MESSAGES", 50)
    rows = [{"id": i} for i in range(1000)]
    with kind() as server:
        broker = NatsBroker(server.url) if kind is NatsServer else RedisBroker(server.url)
        url = broker.new()
        broker.put(url, as_json(rows))
        source, found, kills = broker.source(url), [], 0
        while (batch := source.next_batch(50)) is not None:
            found += batch.to_pylist()
            if kills < KILLS and len(found) > kills * len(rows) // (KILLS + 1):
                server.restart()
                kills += 1
        source.close()
        assert found == rows
        assert kills == KILLS
        server.kill()
        with pytest.raises(ConnectionError, match="retry_seconds") as error:
            read_all(broker.source(url, retry_seconds=0.0))
        assert url.partition("?")[0].rpartition("/")[0] in str(error.value)


@pytest.mark.parametrize("kind", ["nats", "redis"])
def test_a_slow_server_with_resets_changes_no_row(kind: str, request: pytest.FixtureRequest) -> None:
    from tests.brokers import RedisBroker

    server = request.getfixturevalue(f"{kind}_server")
    direct = NatsBroker(server.url) if kind == "nats" else RedisBroker(server.url)
    url = direct.new()
    rows = [{"id": i, "text": "x" * 200} for i in range(2000)]
    direct.put(url, as_json(rows))
    with Proxy(server.port, latency_seconds=0.002, reset_after=100_000) as proxy:
        proxy.resets = 4
        through = url.replace(str(server.port), str(proxy.port))
        source = direct.source(through)
        source.fit_budget(1 << 20)
        assert read_all(source, 100) == rows
        assert proxy.resets_done == 4


@pytest.mark.parametrize(("scheme", "package"), [("nats", "nats"), ("redis", "redis"), ("kafka", "confluent_kafka")])
def test_a_missing_package_is_named_with_its_extra(scheme: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    url = {"nats": "nats://h:1/s", "redis": "redis://h:1/0?stream=s", "kafka": "kafka://h:1/t"}[scheme]
    with pytest.raises(ModuleNotFoundError, match=rf"penstock\[{scheme}\]"):
        open_source(url).next_batch(1)


def test_credentials_of_nats_need_a_package_that_the_extra_brings(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nkeys", None)
    with pytest.raises(ModuleNotFoundError, match=r"nkeys.*penstock\[nats\]"):
        NatsSource(f"{nats_server.url}/s", credentials="user.creds").next_batch(1)


def test_a_log_that_does_not_exist_is_named(broker: Broker, kafka_broker: KafkaBroker) -> None:
    for each in (broker, kafka_broker):
        url = each.new() + "_no"
        with pytest.raises(ConfigError, match=url.rpartition("=" if "=" in url else "/")[2]):
            read_all(open_source(url))


class LockedNats(NatsServer):
    def command(self) -> list[str]:
        return [*super().command(), "--user", "me", "--pass", "s3cr3t"]


class LockedRedis(RedisServer):
    def command(self) -> list[str]:
        return [*super().command(), "--requirepass", "s3cr3t"]

    def answers(self) -> bool:
        return NatsServer.answers(self)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [LockedNats, LockedRedis])
def test_credentials_are_checked_and_never_shown(kind: type[Any], caplog: pytest.LogCaptureFixture) -> None:
    from tests.brokers import RedisBroker

    caplog.set_level(0)
    with kind() as server:
        scheme, _, place = server.url.partition("://")
        address = f"{scheme}://{'me' if kind is LockedNats else ''}:s3cr3t@{place}"
        broker = NatsBroker(address) if kind is LockedNats else RedisBroker(address)
        url = broker.new()
        broker.put(url, as_json(ROWS))
        source = broker.source(url)
        assert source.next_batch(100).num_rows == 30
        shown = [repr(source), orjson.dumps(source.state_dict()).decode(), repr(broker.sink(url))]
        source.close()
        for wrong in (url.replace("s3cr3t", "s3cr3t_wrong"), url.replace(address, server.url)):
            with pytest.raises(PermissionError, match="credentials") as error:
                read_all(broker.source(wrong))
            shown.append(str(error.value))
        server.kill()
        with pytest.raises(ConnectionError) as down:
            read_all(broker.source(url, retry_seconds=0))
        shown += [str(down.value), caplog.text]
        assert "s3cr3t" not in "\n".join(shown)


def test_a_password_with_an_at_sign_is_hidden_whole() -> None:
    assert NatsSource("nats://me:s3@cr3t@h:1/log")._log.name == "nats://***@h:1/log"


@pytest.mark.parametrize(
    "url", ["nats://me:a/s3cr3t@h:1/log", "redis://:s3cr3t/a@h:1/0?stream=s", "kafka://me:a/s3cr3t@h:1/t"]
)
def test_a_slash_in_a_password_is_refused_without_showing_it(url: str) -> None:
    for opened in (open_source, open_sink):
        with pytest.raises(ConfigError, match="%2F") as caught:
            opened(url)
        assert "s3cr3t" not in str(caught.value)


def test_urls_that_name_no_log_are_refused() -> None:
    for url in ("nats://h:1", "nats://h:1/a.b", "redis://h:1/0", "kafka://h:1", "nats://h:1/s?nope=1"):
        with pytest.raises(ConfigError, match=r"h:1|name of a stream"):
            open_source(url)
    with pytest.raises(ConfigError, match="nats://"):
        NatsSource("redis://h/0", "s")
    with pytest.raises(ConfigError, match="name one stream"):
        NatsSource("nats://h/a", "b")
    with pytest.raises(ConfigError, match="alone"):
        open_source(["nats://h/a", "b.jsonl"])
    assert isinstance(open_source(["nats://h/a"]), NatsSource)
    assert isinstance(open_source("redis://:pw@h/0?stream=a", until=None), RedisStreamSource)
    assert "pw" not in repr(open_source("kafka://u:pw@h/t"))
    assert "token" not in repr(open_source("nats://token@h/t"))
