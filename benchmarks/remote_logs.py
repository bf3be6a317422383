"""Messages of NATS and Redis as rows, compared with the loops that the clients' own documentation shows.

    python benchmarks/remote_logs.py --messages 50000 --runs 5

Each loop reads JSON messages of about 200 bytes and parses them; penstock also makes Arrow batches of them. The cases
take turns, and the table has medians. The clients take one message at a time, of fewer messages if they are slow.
CPU is that of the client's process: on a busy machine it says more than the rate. Servers run on loopback, started by
the script from the packages of the extra `servers`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
from tests.brokers import NatsBroker, RedisBroker
from tests.servers import NatsServer, RedisServer

from penstock.sinks import NatsSink, RedisStreamSink
from penstock.sources import NatsSource, RedisStreamSource

_SLOW = 5_000
"""Messages for loops that take one at a time."""


def penstock_reads(source: Any, count: int) -> int:
    rows = 0
    while rows < count and (batch := source.next_batch(8192)) is not None:
        rows += batch.num_rows
    source.close()
    return rows


def nats_pull(url: str, stream: str, count: int) -> int:
    """Pull subscription, one message fetched and acknowledged at a time."""
    import nats

    async def main() -> int:
        client = await nats.connect(url)
        subscription = await client.jetstream().pull_subscribe(stream, stream=stream)
        done = 0
        while done < count:
            for message in await subscription.fetch(1):
                json.loads(message.data)
                await message.ack()
                done += 1
        await client.close()
        return done

    return asyncio.run(main())


def nats_push(url: str, stream: str, count: int) -> int:
    """Ordered push subscription, the next message awaited, nothing acknowledged: the fastest loop of the client."""
    import nats

    async def main() -> int:
        client = await nats.connect(url)
        subscription = await client.jetstream().subscribe(stream, stream=stream, ordered_consumer=True)
        for _ in range(count):
            json.loads((await subscription.next_msg(timeout=10)).data)
        await client.close()
        return count

    return asyncio.run(main())


def redis_read(url: str, stream: str, count: int) -> int:
    import redis

    client, last = redis.Redis.from_url(url), b"0-0"
    for _ in range(count):
        ((_, ((last, fields),)),) = client.xread({stream: last}, count=1, block=1000)
        json.loads(fields[b"data"])
    client.close()
    return count


def nats_publish(url: str, stream: str, rows: list[bytes]) -> int:
    import nats

    async def main() -> None:
        client = await nats.connect(url)
        for row in rows:
            await client.jetstream().publish(stream, row)
        await client.close()

    asyncio.run(main())
    return len(rows)


def redis_add(url: str, stream: str, rows: list[bytes]) -> int:
    import redis

    client = redis.Redis.from_url(url)
    for row in rows:
        client.xadd(stream, {"data": row})
    client.close()
    return len(rows)


def write(sink: Any, table: pa.Table) -> int:
    for batch in table.to_batches(max_chunksize=4096):
        sink.consume(batch)
    sink.flush()
    return int(table.num_rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--messages", type=int, default=50_000)
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    rows = [{"id": i, "text": f"message {i} " + "word " * 30} for i in range(given.messages)]
    values = [json.dumps(row).encode() for row in rows]
    table, few = pa.Table.from_pylist(rows), values[:_SLOW]
    with NatsServer() as nats_server, RedisServer() as redis_server:
        nats, redis = NatsBroker(nats_server.url), RedisBroker(redis_server.url)
        full = {"nats": nats.new(), "redis": redis.new()}
        write(NatsSink(full["nats"]), table)
        write(RedisStreamSink(full["redis"]), table)
        stream, key = full["nats"].rpartition("/")[2], full["redis"].rpartition("=")[2]
        slow = min(_SLOW, given.messages)
        cases: dict[str, Callable[[], int]] = {
            "NATS, read: penstock": lambda: penstock_reads(NatsSource(full["nats"]), given.messages),
            "NATS, read: fetch(1) and ack": lambda: nats_pull(nats_server.url, stream, slow),
            "NATS, read: next_msg, ordered, no acks": lambda: nats_push(nats_server.url, stream, given.messages),
            "NATS, write: penstock": lambda: write(NatsSink(nats.new()), table),
            "NATS, write: publish": lambda: nats_publish(nats_server.url, nats.new().rpartition("/")[2], few),
            "Redis, read: penstock": lambda: penstock_reads(RedisStreamSource(full["redis"]), given.messages),
            "Redis, read: XREAD COUNT 1": lambda: redis_read(redis_server.url, key, slow),
            "Redis, write: penstock": lambda: write(RedisStreamSink(redis.new()), table),
            "Redis, write: XADD": lambda: redis_add(redis_server.url, redis.new().rpartition("=")[2], few),
        }
        rates: dict[str, list[float]] = {name: [] for name in cases}
        costs: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(given.runs):
            for name, case in cases.items():
                since, used = time.perf_counter(), time.process_time()
                count = case()
                rates[name].append(count / (time.perf_counter() - since))
                costs[name].append(1e6 * (time.process_time() - used) / count)
    best = least = 0.0
    print(f"{'case':42}{'messages/s':>12}{'penstock is':>14}{'CPU us each':>14}{'penstock is':>14}")
    for name, found in rates.items():
        rate, cost = statistics.median(found), statistics.median(costs[name])
        ours = name.endswith("penstock")
        if ours:
            best, least = rate, cost
        ratio, saved = ("", "") if ours else (f"{best / rate:.1f}x", f"{cost / least:.1f}x")
        print(f"{name:42}{rate:12,.0f}{ratio:>14}{cost:14.1f}{saved:>14}")


if __name__ == "__main__":
    main()
