"""Cache in an object store."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from penstock.files.cache import SEAL_BYTES, CacheEntry, check_key, sealed, unsealed
from penstock.files.filesystems import cut, shown
from penstock.files.listing import PathLike
from penstock.files.objects import open_bucket

log = logging.getLogger(__name__)
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
