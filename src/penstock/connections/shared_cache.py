"""Shared caches by URL, and their use by a run that must not fail because of them."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias, TypeVar

from penstock.connections.redis import REDIS_SCHEMES, RedisCache
from penstock.errors import ConfigError
from penstock.files.cache import SEAL_BYTES, CacheBackend, CacheEntry, DiskCache, check_key, sealed, unsealed
from penstock.files.filesystems import cut, is_object_url, is_remote, require_local, scheme_of, shown
from penstock.files.listing import PathLike
from penstock.files.objects import open_bucket

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
CacheSpec: TypeAlias = PathLike | CacheBackend
"""A shared cache: its URL or directory, or an object with the methods of `CacheBackend`."""
_DISK_LIMIT = "1 TiB"
_AWAY_SECONDS = 300.0
"""Time for which a cache that failed is left alone."""


def open_cache(url: PathLike) -> CacheBackend:
    """The cache at a URL: `redis://host:6379/0`, `s3://bucket/prefix` (also `gs://`, `az://`), or a directory.

    Nothing is requested before it is used. A directory holds up to 1 TiB; make a `DiskCache` for another limit.
    """
    text = os.fspath(url)
    if is_object_url(text):
        return ObjectCache(text)
    if is_remote(text) and scheme_of(text) in REDIS_SCHEMES:
        return RedisCache(text)
    if is_remote(text) and scheme_of(text) != "file":
        raise ConfigError(
            f"{shown(text)!r} is no cache; expected redis://host:6379/0, s3://bucket/prefix, gs://bucket/prefix, "
            "az://container/prefix, or a directory"
        )
    return DiskCache(require_local(text, "a cache"), _DISK_LIMIT)


def require_cache_dir(path: PathLike) -> Path:
    """The directory for caches of this machine; a URL is a ConfigError that says where it goes."""
    text = os.fspath(path)
    if is_remote(text) and scheme_of(text) != "file":
        raise ConfigError(
            f"{shown(text)!r} is a URL, and cache_dir is a directory of this machine; pass the URL as cache=, to share "
            "what is made with other machines"
        )
    return require_local(path, "cache_dir")


class SharedCache:
    """A cache that never fails its user: after an error, logged once, it is not used for five minutes.

    A cache that may be read and not written (its credentials, or no room) is read on. `get` returns None and `put`
    False for what is not there, and for all that cannot be had.
    """

    def __init__(self, backend: CacheBackend) -> None:
        self.backend = backend
        self._read_again = self._write_again = 0.0
        self._lock = threading.Lock()

    @property
    def readable(self) -> bool:
        return time.monotonic() >= self._read_again

    @property
    def writable(self) -> bool:
        return self.readable and time.monotonic() >= self._write_again

    def get(self, key: str) -> bytes | None:
        return self._read(self.backend.get, key)

    def put(self, key: str, data: bytes) -> bool:
        return self._write(self.backend.put, key, data) is not False

    def stat(self, key: str) -> CacheEntry | None:
        return self._read(self.backend.stat, key)

    def delete(self, key: str) -> bool:
        return self._write(self.backend.delete, key) is True

    def _read(self, ask: Callable[[str], Answer | None], key: str) -> Answer | None:
        if not self.readable:
            return None
        try:
            return ask(key)
        except OSError as error:
            self._failed(error, reading=True)
            return None

    def _write(self, ask: Callable[..., object], *arguments: object) -> object:
        """The answer, or False if there is none."""
        if not self.writable:
            return False
        try:
            return ask(*arguments)
        except (OSError, ConfigError) as error:
            self._failed(error, reading=isinstance(error, (ConnectionError, TimeoutError)))
            return False

    def entries(self) -> Iterator[CacheEntry]:
        return self.backend.entries()

    def _failed(self, error: Exception, *, reading: bool) -> None:
        with self._lock:
            known = not (self.readable if reading else self.writable)
            self._write_again = time.monotonic() + _AWAY_SECONDS
            if reading:
                self._read_again = self._write_again
        if not known:
            what = "used" if reading else "written"
            log.warning("the shared cache cannot be %s, and this run goes on without it: %s", what, error)

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("a SharedCache cannot be pickled; pass its URL")

    def __repr__(self) -> str:
        return f"SharedCache({self.backend!r})"


def shared_cache(spec: CacheSpec) -> SharedCache:
    """The cache for a run; the same one for the same URL, so that all users of a process know that it is down."""
    if isinstance(spec, (str, os.PathLike)):
        return _of_url(os.fspath(spec), os.getpid())
    missing = [name for name in ("get", "put", "stat", "delete") if not callable(getattr(spec, name, None))]
    if missing:
        raise ConfigError(f"cache must be a URL, a directory or a CacheBackend, got {spec!r:.80}")
    return spec if isinstance(spec, SharedCache) else SharedCache(spec)


@functools.lru_cache(maxsize=64)
def _of_url(url: str, process: int) -> SharedCache:
    return SharedCache(open_cache(url))


_RETRY_SECONDS = 3.0
"""Longest time in which a request is tried again: what a cache does not answer is made again anyway."""
_FOLDER = "cache"


class ObjectCache:
    """Entries as objects below a URL, such as `s3://bucket/prefix`, each with its checksum at the end.

    A damaged entry counts as missing, is deleted and logged. Nothing is evicted: give the bucket a lifecycle rule for
    objects below `prefix/cache/`. The time of an entry is that of its last write.
    """

    def __init__(self, url: PathLike) -> None:
        self.url = shown(cut(str(url))[0])
        """Address without options and passwords."""
        self._bucket, prefix = open_bucket(url, retry_seconds=_RETRY_SECONDS)
        self._prefix = "/".join(filter(None, (prefix, _FOLDER)))

    def get(self, key: str) -> bytes | None:
        try:
            data = self._bucket.read(self._name(key))
        except FileNotFoundError as error:
            if str(error).startswith("no such bucket"):
                raise
            return None
        content = unsealed(key, data)
        if content is None:
            log.warning("%s in %s is damaged: its content does not match its checksum; it is deleted", key, self.url)
            self._bucket.delete(self._name(key))
        return content

    def put(self, key: str, data: bytes) -> None:
        self._bucket.write(self._name(key), sealed(key, data))

    def delete(self, key: str) -> bool:
        there = self.stat(key) is not None
        self._bucket.delete(self._name(key))
        return there

    def stat(self, key: str) -> CacheEntry | None:
        info = self._bucket.info(self._name(key))
        return None if info is None else CacheEntry(key, info.size - SEAL_BYTES, info.modified_ns / 1e9)

    def entries(self) -> Iterator[CacheEntry]:
        for info in self._bucket.objects(f"{self._prefix}/"):
            yield CacheEntry(info.key.rpartition("/")[2], info.size - SEAL_BYTES, info.modified_ns / 1e9)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{check_key(key)}"

    def __repr__(self) -> str:
        return f"ObjectCache({self.url!r})"
