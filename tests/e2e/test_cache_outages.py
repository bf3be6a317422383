"""Shared caches on real servers that are killed, slow, full, or refuse: a run goes on, and says so once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.servers import BUCKET, KILLS, Proxy, RedisServer, S3Server, environment_of, missing

from penstock.connections import redis as redis_connections
from penstock.connections import shared_cache as shared_caches
from penstock.connections.redis import RedisCache
from penstock.connections.shared_cache import ObjectCache, SharedCache, open_cache
from penstock.loaders import PretrainDataLoader
from penstock.store import shared_files

pytestmark = pytest.mark.skipif(bool(REASON := missing(*RedisServer.packages, *S3Server.packages)), reason=str(REASON))
OPTIONS: dict[str, Any] = {"chunk_size": 64, "batch_size": 8, "backend": "numpy", "progress": False}
SECRET = "hunter2-51d3"


@pytest.fixture(autouse=True)
def _small_and_fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(shared_files, "PART_BYTES", 8000)
    monkeypatch.setattr(shared_caches, "_RETRY_SECONDS", 1.0)
    yield
    shared_caches._of_url.cache_clear()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("in") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {n} " * (n % 50)}) + "\n" for n in range(300)))
    return path


@pytest.fixture(scope="module")
def expected(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return batches(texts, tmp_path_factory.mktemp("plain"), None)


def batches(texts: Path, machine: Path, cache: Any) -> list[Any]:
    with PretrainDataLoader(texts, "byte", cache_dir=machine, cache=cache, **OPTIONS) as loader:
        return [np.asarray(batch["input_ids"]).tolist() for batch in loader]


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "the shared cache cannot" in record.getMessage()]


class Killing(SharedCache):
    """A cache whose server is killed before a use of its own."""

    def __init__(self, url: str, kill: Callable[[], None], method: str, at: int) -> None:
        super().__init__(open_cache(url))
        self.uses = 0
        use = getattr(self.backend, method)

        def counted(*arguments: Any) -> Any:
            self.uses += 1
            if self.uses == at:
                kill()
            return use(*arguments)

        setattr(self.backend, method, counted)


@pytest.mark.parametrize(
    ("kind", "method", "at"),
    [
        *(("redis", "stat", 1), ("redis", "put", 6), ("redis", "put", 11), ("redis", "get", 1), ("redis", "get", 7)),
        *(("s3", "put", 6), ("s3", "get", 7)),
    ],
)
def test_a_server_that_is_killed_costs_no_batch_and_no_second_warning(
    kind: str,
    method: str,
    at: int,
    texts: Path,
    expected: list[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (RedisServer if kind == "redis" else S3Server)() as server:
        for name, value in server.environment.items() if isinstance(server, S3Server) else ():
            monkeypatch.setenv(name, value)
        if method == "get":
            assert batches(texts, tmp_path / "ci", server.url) == expected
        assert batches(texts, tmp_path / "one", Killing(server.url, server.kill, method, at)) == expected
        assert server.process is None
        assert len(warnings_in(caplog)) == 1
        if kind == "redis":  # SeaweedFS has its data some seconds after it answers
            server.start()
            shared_caches._of_url.cache_clear()
            assert batches(texts, tmp_path / "two", server.url) == expected
            assert batches(texts, tmp_path / "three", server.url) == expected
            assert len(warnings_in(caplog)) == 1


@pytest.mark.parametrize(
    ("kind", "method"), [("redis", "put"), ("redis", "get"), ("s3", "put"), *([("s3", "get")] if KILLS > 2 else [])]
)
def test_a_server_that_is_killed_and_started_again_and_again_never_serves_a_wrong_batch(
    kind: str, method: str, texts: Path, expected: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of each writing, which leaves a part of the files; then of each reading of them all."""
    with (RedisServer if kind == "redis" else S3Server)() as server:
        for name, value in server.environment.items() if isinstance(server, S3Server) else ():
            monkeypatch.setenv(name, value)
        if method == "get":
            assert batches(texts, tmp_path / "ci", server.url) == expected
        for kill in range(KILLS):
            cache = Killing(server.url, server.kill, method, kill + 2)
            assert batches(texts, tmp_path / f"killed {kill}", cache) == expected
            assert server.process is None
            server.start()
            if method == "put":
                for entry in [*open_cache(server.url).entries()]:
                    assert open_cache(server.url).get(entry.key) is not None
                    open_cache(server.url).delete(entry.key)
        shared_caches._of_url.cache_clear()
        assert batches(texts, tmp_path / "last", server.url) == expected


@pytest.fixture
def redis(redis_server: RedisServer) -> Iterator[RedisServer]:
    """A server of the session with one user more, who may read only."""
    client = RedisCache(redis_server.url)._client
    client.flushdb()
    client.execute_command(
        "ACL", "SETUSER", "reader", "on", f">{SECRET}", "~*", "+@read", "+@connection", "+object", "-@write"
    )
    yield redis_server
    client.config_set("maxmemory", 0)
    client.flushdb()


def test_redis_with_wrong_read_only_or_no_rights_is_done_without(
    redis: RedisServer, texts: Path, expected: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def as_user(name: str) -> str:
        return redis.url.replace("redis://", f"redis://{name}@")

    assert batches(texts, tmp_path / "wrong", as_user(f"reader:{SECRET}-wrong")) == expected
    assert "credentials" in warnings_in(caplog)[-1]
    assert batches(texts, tmp_path / "reader", as_user(f"reader:{SECRET}")) == expected
    assert "cannot be written" in warnings_in(caplog)[-1]
    assert list(open_cache(redis.url).entries()) == []
    assert batches(texts, tmp_path / "writer", redis.url) == expected
    caplog.set_level("INFO")
    shared_caches._of_url.cache_clear()
    assert batches(texts, tmp_path / "again", as_user(f"reader:{SECRET}")) == expected
    assert "fetched the store" in caplog.text
    assert len(warnings_in(caplog)) == 2
    assert SECRET not in caplog.text


def test_redis_without_memory_is_read_on(
    redis: RedisServer, texts: Path, expected: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = RedisCache(redis.url)._client
    client.config_set("maxmemory", client.info("memory")["used_memory"] + 60_000)
    assert batches(texts, tmp_path / "one", redis.url) == expected
    assert "cannot be written" in warnings_in(caplog)[0]
    assert "maxmemory" in warnings_in(caplog)[0]
    assert not [entry for entry in open_cache(redis.url).entries() if entry.key.startswith("store-")]
    assert batches(texts, tmp_path / "two", redis.url) == expected
    assert len(warnings_in(caplog)) == 1


def test_an_object_store_that_refuses_or_has_no_such_bucket_is_done_without(
    s3: S3Server,
    s3_url: str,
    texts: Path,
    expected: list[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert batches(texts, tmp_path / "bucket", "s3://no-such-bucket-here/x") == expected
    assert len(warnings_in(caplog)) == 1
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    assert batches(texts, tmp_path / "wrong", f"s3://{BUCKET}/x") == expected
    assert "credentials" in warnings_in(caplog)[1]
    assert len(warnings_in(caplog)) == 2
    assert SECRET not in caplog.text


def test_a_slow_server_changes_nothing_and_one_that_stalls_is_given_up(
    redis: RedisServer, texts: Path, expected: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Proxy(redis.port, latency_seconds=0.01, reset_after=30_000) as proxy:
        proxy.resets = 1
        url = f"redis://127.0.0.1:{proxy.port}/0"
        assert batches(texts, tmp_path / "slow", url) == expected
        assert batches(texts, tmp_path / "fetched", url) == expected
        assert proxy.resets_done == 1
        assert not warnings_in(caplog)
        proxy.latency_seconds = 1000.0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(redis_connections, "ANSWER_SECONDS", 0.2)
            shared_caches._of_url.cache_clear()
            assert batches(texts, tmp_path / "stalled", url) == expected
    assert "does not answer" in warnings_in(caplog)[0]
    assert len(warnings_in(caplog)) == 1


def test_a_stalled_object_store_is_given_up(
    s3: S3Server,
    s3_url: str,
    texts: Path,
    expected: list[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_caches, "_RETRY_SECONDS", 0.2)
    with Proxy(s3.port, latency_seconds=1000.0) as proxy:
        for name, value in environment_of(proxy.endpoint).items():
            monkeypatch.setenv(name, value)
        assert batches(texts, tmp_path / "stalled", f"{s3_url}/x") == expected
    assert len(warnings_in(caplog)) == 1
    assert isinstance(open_cache(s3_url), ObjectCache)
