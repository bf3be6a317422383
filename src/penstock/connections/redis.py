"""Redis: clients by URL, and a cache."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

import orjson
import xxhash

from penstock._optional import require
from penstock.errors import ConfigError
from penstock.files.cache import SEAL_BYTES, CacheEntry, check_key, sealed, unsealed
from penstock.files.filesystems import shown

log = logging.getLogger(__name__)
REDIS_SCHEMES = ("redis", "rediss", "unix")
PART_BYTES = 64 << 20
"""Size of the strings that a long value is split into: Redis takes up to 512 MB, and others wait for each of them."""
_WHOLE, _SPLIT = b"\x00", b"\x01"
"""First byte of a value: the value follows, or a description of its parts."""
_DESCRIPTION_BYTES = 256
_ENTRY, _PART = "penstock:cache:", "penstock:part:"
_SCANNED = 500
_CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 5.0
"""Longest wait of a cache for the next bytes of an answer: what it does not have is made again anyway."""


def connect_redis(url: str, *, answer_seconds: float) -> Any:
    """Client of redis-py for a URL such as `redis://user:password@host:6379/0`; it connects when it is used.

    It tries once more after a lost connection. `answer_seconds` is the longest time without a byte from the server.
    """
    redis = require("redis", "redis")
    from redis.backoff import ConstantBackoff
    from redis.retry import Retry

    retry = Retry(ConstantBackoff(0.2), 1, supported_errors=(redis.exceptions.ConnectionError,))
    options = {
        "socket_connect_timeout": min(_CONNECT_SECONDS, answer_seconds),
        "socket_timeout": answer_seconds,
        "protocol": 2,
    }
    try:
        client = redis.Redis.from_url(url, retry=retry, **options)
        pool = client.connection_pool
        pool.connection_class(**pool.connection_kwargs)  # not connected yet: it knows the options of the URL
        return client
    except (ValueError, TypeError) as error:
        reason = "" if "@" in url else f": {error}"  # or it names what it took for a port: a piece of the password
        raise ConfigError(
            f"{shown(url)!r} is no address of Redis{reason}; expected redis://user:password@host:6379/0, with / in a "
            "password as %2F"
        ) from None


class RedisCache:
    """Entries as strings of a Redis database, each with its checksum at the end; long ones in parts of 64 MiB.

    A damaged entry counts as missing, is deleted and logged. Entries are evicted by Redis itself: set `maxmemory` and
    `maxmemory-policy allkeys-lru`. Parts are written before the entry that names them, so that half an entry is never
    seen. Errors of the client are OSErrors here: ConnectionError, PermissionError, TimeoutError.
    """

    def __init__(self, url: str, *, part_bytes: int = PART_BYTES) -> None:
        self.url = shown(url).partition("?")[0]
        self._client, self._part_bytes = connect_redis(url, answer_seconds=ANSWER_SECONDS), part_bytes

    def get(self, key: str) -> bytes | None:
        name = f"{_ENTRY}{check_key(key)}"
        with self._errors():
            value: bytes | None = self._client.get(name)
            if value is None:
                return None
            parts = _parts_of(key, value)
            if parts is not None:
                found: list[bytes | None] = [self._client.get(part) for part in parts]
                if any(part is None for part in found):
                    return None  # evicted, or being replaced
                value = b"".join([_WHOLE, *found])  # type: ignore[list-item]
            content = unsealed(key, memoryview(value)[1:]) if value[:1] == _WHOLE else None
            if content is None:
                log.warning("%s in %s is damaged: it does not match its checksum; it is deleted", key, self.url)
                self._client.delete(name, *parts or ())
            return content

    def put(self, key: str, data: bytes) -> None:
        name, value = f"{_ENTRY}{check_key(key)}", sealed(key, data)
        with self._errors():
            before = _parts_of(key, self._client.getrange(name, 0, _DESCRIPTION_BYTES - 1)) or []
            parts: list[str] = []
            if len(value) <= self._part_bytes:
                self._client.set(name, _WHOLE + value)
            else:
                view, count = memoryview(value), -(-len(value) // self._part_bytes)
                mark = xxhash.xxh3_128_hexdigest(value)
                parts = _part_names(key, mark, count)
                for number, part in enumerate(parts):
                    # A copy: the client cannot send a view.
                    self._client.set(part, bytes(view[number * self._part_bytes : (number + 1) * self._part_bytes]))
                self._client.set(name, _SPLIT + orjson.dumps({"parts": count, "size": len(data), "mark": mark}))
            if gone := [part for part in before if part not in parts]:
                self._client.delete(*gone)

    def delete(self, key: str) -> bool:
        name = f"{_ENTRY}{check_key(key)}"
        with self._errors():
            parts = _parts_of(key, self._client.getrange(name, 0, _DESCRIPTION_BYTES - 1)) or []
            there = bool(self._client.delete(name))
            if parts:
                self._client.delete(*parts)
            return there

    def stat(self, key: str) -> CacheEntry | None:
        name = f"{_ENTRY}{check_key(key)}"
        with self._errors():
            start: bytes = self._client.getrange(name, 0, _DESCRIPTION_BYTES - 1)
            if not start:
                return None
            if start[:1] == _SPLIT:
                size = int(_described(start).get("size", 0))
            else:
                size = max(0, self._client.strlen(name) - 1 - SEAL_BYTES)
            return CacheEntry(key, size, time.time() - self._idle_seconds(name))

    def entries(self) -> Iterator[CacheEntry]:
        with self._errors():
            names = self._client.scan_iter(f"{_ENTRY}*", count=_SCANNED)
            for name in names:
                entry = self.stat(name.decode().removeprefix(_ENTRY))
                if entry is not None:
                    yield entry

    def _idle_seconds(self, name: str) -> float:
        redis = require("redis", "redis")
        with contextlib.suppress(redis.exceptions.ResponseError):  # an LFU policy keeps no times
            return float(self._client.object("idletime", name) or 0)
        return 0.0

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Errors of the client as OSErrors, which name the server and no password."""
        redis = require("redis", "redis").exceptions
        try:
            yield
        except redis.TimeoutError as error:
            raise TimeoutError(f"{self.url} does not answer: {error}") from None
        except (redis.AuthenticationError, redis.NoPermissionError) as error:
            raise PermissionError(f"{self.url} may not be used with these credentials: {error}") from None
        except redis.ConnectionError as error:
            raise ConnectionError(f"{self.url} cannot be reached: {error}") from None
        except redis.RedisError as error:
            kind = PermissionError if str(error).startswith(("NOPERM", "NOAUTH", "READONLY")) else OSError
            raise kind(f"{self.url} refused a request: {error}") from None

    def __repr__(self) -> str:
        return f"RedisCache({self.url!r})"


def _described(value: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = orjson.loads(value[1:])
        if isinstance(found, dict):
            return found
    return {}


def _parts_of(key: str, value: bytes) -> list[str] | None:
    """Names of the parts of an entry; None if it is whole, none of them if it is damaged."""
    if value[:1] != _SPLIT:
        return None
    facts = _described(value)
    count, mark = facts.get("parts"), facts.get("mark")
    if not isinstance(count, int) or not 0 < count < 1 << 20 or not isinstance(mark, str):
        return []
    return _part_names(key, mark, count)


def _part_names(key: str, mark: str, count: int) -> list[str]:
    return [f"{_PART}{key}:{mark}:{number}" for number in range(count)]
