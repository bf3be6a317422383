"""What every cache promises: on disk, in Redis, in an object store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.servers import RedisServer

from penstock.connections.redis import RedisCache
from penstock.connections.shared_cache import ObjectCache, open_cache
from penstock.errors import ConfigError
from penstock.files.cache import CacheBackend, DiskCache

KINDS = ["disk", "redis", "redis, in parts", "object store"]
KEYS = st.text("0123456789abcdefghijklmnopqrstuvwxyz", min_size=1, max_size=3)


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], CacheBackend]:
    """Makes clients of one cache, which is empty."""
    if request.param == "disk":
        return lambda: open_cache(tmp_path / "cache")
    if request.param == "object store":
        url = request.getfixturevalue("s3_url")
        return lambda: open_cache(url)
    server: RedisServer = request.getfixturevalue("redis_server")
    url = server.url
    RedisCache(url)._client.flushdb()
    return lambda: RedisCache(url, part_bytes=40 if "parts" in request.param else 1 << 20)


def test_a_url_opens_the_cache_of_its_kind(s3_url: str, redis_server: RedisServer, tmp_path: Path) -> None:
    assert isinstance(open_cache(s3_url), ObjectCache)
    assert isinstance(open_cache(redis_server.url), RedisCache)
    assert isinstance(open_cache(tmp_path), DiskCache)
    assert isinstance(open_cache(f"file://{tmp_path}"), DiskCache)
    for wrong in ("ftp://host/path", "s3:/bucket", "https://host/cache"):
        with pytest.raises(ConfigError, match=r"bucket|cache"):
            open_cache(wrong)
    for wrong in ("redis://:hunter2@host:notaport/0", "redis://:a/hunter2@host/0", "redis://:hunter2@host/0?stream=s"):
        with pytest.raises(ConfigError, match="is no address") as caught:
            open_cache(wrong)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 16, 17, 1000])
def test_every_client_gets_what_one_has_put(make: Callable[[], CacheBackend], size: int) -> None:
    data = secrets.token_bytes(size)
    one, other = make(), make()
    assert other.get("a") is None
    assert other.stat("a") is None
    one.put("a", data)
    assert other.get("a") == data
    entry = other.stat("a")
    assert entry is not None
    assert (entry.key, entry.size) == ("a", size)
    assert abs(entry.used - time.time()) < 3600
    one.put("a", data[:-1] + b"!")
    assert other.get("a") == data[:-1] + b"!"
    assert [(entry.key, entry.size) for entry in other.entries()] == [("a", max(size, 1))]
    assert other.delete("a")
    assert not other.delete("a")
    assert one.get("a") is None
    assert list(one.entries()) == []


@pytest.mark.parametrize("key", ["", "A", "a/b", "../a", "a" * 129, "-a", "a:b", "a\n"])
def test_what_cannot_be_a_key_is_refused(make: Callable[[], CacheBackend], key: str) -> None:
    cache = make()
    for use in (cache.get, cache.stat, cache.delete, lambda key: cache.put(key, b"x")):
        with pytest.raises(ConfigError, match="cache key"):
            use(key)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("put"), KEYS, st.binary(max_size=120)),
            st.tuples(st.sampled_from(["get", "delete", "stat"]), KEYS, st.none()),
        ),
        max_size=12,
    )
)
def test_a_cache_behaves_as_a_dict(make: Callable[[], CacheBackend], steps: list[tuple[str, str, Any]]) -> None:
    cache, model = make(), dict[str, bytes]()
    for entry in list(cache.entries()):
        cache.delete(entry.key)
    for action, key, data in steps:
        if action == "put":
            cache.put(key, data)
            model[key] = data
        elif action == "delete":
            assert cache.delete(key) == (model.pop(key, None) is not None)
        elif action == "stat":
            entry = cache.stat(key)
            assert (None if entry is None else entry.size) == (len(model[key]) if key in model else None)
        assert cache.get(key) == model.get(key)
    assert {entry.key: entry.size for entry in cache.entries()} == {key: len(data) for key, data in model.items()}


def damage(cache: CacheBackend, key: str, change: Callable[[bytes], bytes]) -> None:
    """Change the stored bytes of an entry behind the back of its cache."""
    if isinstance(cache, DiskCache):
        file = cache._files(key)[0]
        file.write_bytes(change(file.read_bytes()))
    elif isinstance(cache, ObjectCache):
        name = cache._name(key)
        cache._bucket.write(name, change(bytes(cache._bucket.read(name))))
    else:
        assert isinstance(cache, RedisCache)
        client = cache._client
        names = sorted(client.keys("penstock:part:*")) or client.keys("penstock:cache:*")
        client.set(names[-1], change(client.get(names[-1])))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data + b"more",
    ],
    ids=["last bit", "first bit", "half", "empty", "longer"],
)
def test_damaged_bytes_are_never_served_and_are_removed(
    make: Callable[[], CacheBackend], change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    cache = make()
    cache.put("a", bytes(range(100)))
    damage(cache, "a", change)
    assert make().get("a") is None
    assert "damaged" in caplog.text
    assert cache.stat("a") is None
    cache.put("a", b"new")
    assert cache.get("a") == b"new"


@pytest.mark.parametrize("make", KINDS[1:], indirect=True)  # a file has its key in its name
def test_an_entry_under_the_key_of_another_is_damaged(make: Callable[[], CacheBackend]) -> None:
    cache = make()
    cache.put("a", b"of a")
    cache.put("b", b"of b")
    if isinstance(cache, ObjectCache):
        cache._bucket.copy(cache._name("a"), cache._name("b"))
    else:
        assert isinstance(cache, RedisCache)
        cache._client.set("penstock:cache:b", cache._client.get("penstock:cache:a"))
    assert cache.get("b") is None


def test_a_missing_part_is_a_missing_entry(redis_server: RedisServer) -> None:
    cache = RedisCache(redis_server.url, part_bytes=40)
    cache._client.flushdb()
    cache.put("a", bytes(100))
    cache._client.delete(cache._client.keys("penstock:part:*")[0])
    assert cache.get("a") is None
    cache.put("a", bytes(100))
    assert cache.get("a") == bytes(100)
    cache.put("a", b"short")
    assert cache._client.keys("penstock:part:*") == []
