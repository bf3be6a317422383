"""The servers of the tests themselves: they answer, and keep what they have over SIGKILL."""

from __future__ import annotations

import asyncio

import obstore
import pytest
from tests.servers import NatsServer, PostgresServer, Proxy, RedisServer, S3Server, client_of


def test_s3_keeps_objects_over_a_kill() -> None:
    with S3Server() as server:
        obstore.put(server.client(), "a/b", b"water")
        server.restart()
        assert obstore.get(server.client(retries=10), "a/b").bytes() == b"water"


def test_postgres_keeps_rows_over_a_kill() -> None:
    import adbc_driver_postgresql.dbapi as dbapi

    with PostgresServer() as server:
        with dbapi.connect(server.url) as connection, connection.cursor() as cursor:
            cursor.execute("create table gates as select 7 as id")
            connection.commit()
        server.restart()
        with dbapi.connect(server.url) as connection, connection.cursor() as cursor:
            cursor.execute("select id from gates")
            assert cursor.fetchone() == (7,)


def test_redis_keeps_keys_over_a_kill() -> None:
    import redis

    with RedisServer() as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("gate", "open")
        server.restart()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("gate") == b"open"


def test_nats_keeps_messages_over_a_kill() -> None:
    import nats

    async def add(url: str) -> int:
        client = await nats.connect(url)
        stream = client.jetstream()
        await stream.add_stream(name="gates", subjects=["gates.*"])
        await stream.publish("gates.one", b"open")
        info = await stream.stream_info("gates")
        await client.close()
        return int(info.state.messages)

    with NatsServer() as server:
        assert asyncio.run(add(server.url)) == 1
        server.restart()
        assert asyncio.run(add(server.url)) == 2


def test_the_proxy_counts_what_the_server_sends_and_cuts_connections(s3: S3Server) -> None:
    data = bytes(300_000)
    obstore.put(s3.client(), "proxied", data)
    with Proxy(s3.port) as proxy:
        assert obstore.get(client_of(proxy.endpoint), "proxied").bytes() == data
        assert len(data) <= proxy.bytes_down < len(data) + 5_000
        proxy.reset_after = 100_000
        with pytest.raises(Exception, match=r"(?i)error"):
            obstore.get(client_of(proxy.endpoint), "proxied").bytes()
        assert proxy.resets_done
