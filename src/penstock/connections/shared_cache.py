"""Shared caches by URL, and their use by a run that must not fail because of them."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from penstock.connections.redis import REDIS_SCHEMES, RedisCache
from penstock.errors import ConfigError
from penstock.files.cache import CacheBackend, CacheEntry, DiskCache
from penstock.files.filesystems import is_object_url, is_remote, require_local, scheme_of, shown
from penstock.files.listing import PathLike
from penstock.files.object_cache import ObjectCache

log = logging.getLogger(__name__)
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
        if not self.readable:
            return None
        try:
            return self.backend.get(key)
        except OSError as error:
            self._failed(error, reading=True)
            return None

    def put(self, key: str, data: bytes) -> bool:
        if not self.writable:
            return False
        try:
            self.backend.put(key, data)
        except (OSError, ConfigError) as error:
            self._failed(error, reading=isinstance(error, (ConnectionError, TimeoutError)))
            return False
        return True

    def stat(self, key: str) -> CacheEntry | None:
        if not self.readable:
            return None
        try:
            return self.backend.stat(key)
        except OSError as error:
            self._failed(error, reading=True)
            return None

    def delete(self, key: str) -> bool:
        if not self.writable:
            return False
        try:
            return self.backend.delete(key)
        except OSError as error:
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
