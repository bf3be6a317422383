"""A cache of bytes by key: made once, kept within a size, shared by many processes."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from penstock.errors import ConfigError, StalledError
from penstock.files.atomic import AtomicFile
from penstock.files.checksums import hash_file
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock

__all__ = ["CacheBackend", "CacheEntry", "DiskCache", "default_cache_directory"]

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-z][0-9a-z._-]{0,127}")
_STRAY_SECONDS = 3600.0
_LOCKS = "locks"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"_[0-9a-z][0-9a-z._-]{0,127}~[0-9a-f]{32}")
_HALF = re.compile(rf"\.{_FILE.pattern}\.\d+-[0-9a-f]{{8}}\.tmp")
"""Directories, entries and unfinished entries of a cache; nothing else in its directory is ever deleted."""
_MARK = "_"
"""Before each key in the name of its file: on Windows `con` and `nul.txt` are devices, in whatever directory."""

_here = threading.local()
"""The locks of what this thread is making."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One entry, without its content."""

    key: str
    size: int
    used: float
    """When it was last read or written, in seconds since 1970."""


class CacheBackend(Protocol):
    """Where cached bytes are kept. Every method may be called from many threads and processes at once.

    An entry may vanish at any time (evicted, deleted), so each use has to be ready for None. A key is at most 128 of
    `0-9 a-z . _ -` and begins with a letter or digit, so that it is a file name, a Redis key and an S3 name as it is;
    `content_key` and hex digests are.
    """

    def get(self, key: str) -> bytes | None:
        """The content, or None; never half of it, never changed content."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Keep it; replaces what was there, in one step."""
        ...

    def delete(self, key: str) -> bool:
        """Whether there was something to delete."""
        ...

    def stat(self, key: str) -> CacheEntry | None: ...

    def entries(self) -> Iterator[CacheEntry]:
        """All there are, in no order."""
        ...


class DiskCache:
    """Entries as plain files below `directory`, together within `limit_bytes`; the least recently used go first.

    Files appear by atomic rename and carry the checksum of their content in their name, so that no lock is needed for
    correctness: processes that evict, replace and read at once see an entry whole or not at all. A damaged entry counts
    as missing, is removed and logged. The limit is looked at after each sixteenth of it written by this process, and
    eviction makes room for twice that, so several processes together may pass it by a little, for a while.
    """

    def __init__(self, directory: PathLike, limit_bytes: int = 10 << 30) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"limit_bytes must be positive, got {limit_bytes}")
        self.directory, self.limit_bytes = require_local(directory, "the directory of a DiskCache"), limit_bytes
        self._unseen: int | None = None
        """Bytes that may lie above fifteen sixteenths of the limit; None if nobody has looked yet."""

    def get(self, key: str) -> bytes | None:
        file = self._find(key)
        if file is None:
            return None
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None  # evicted meanwhile
        return data if self._is_intact(file, xxhash.xxh3_128_hexdigest(data)) else None

    def path(self, key: str) -> Path | None:
        """The file of an entry, to be mapped or opened by whoever reads paths; checked as `get` does.

        It may be evicted at any time. On Linux and macOS a file that is open or mapped stays readable.
        """
        file = self._find(key)
        try:
            return file if file is not None and self._is_intact(file, hash_file(file)) else None
        except FileNotFoundError:
            return None

    def put(self, key: str, data: bytes) -> None:
        self._put(key, xxhash.xxh3_128_hexdigest(data), len(data), [data])

    def put_file(self, key: str, source: PathLike) -> None:
        """Keep a copy of a file, without reading all of it into memory."""
        with open(source, "rb") as file:
            pieces = iter(lambda: file.read(1 << 20), b"")
            self._put(key, hash_file(source), os.fstat(file.fileno()).st_size, pieces)

    def add(self, data: bytes) -> str:
        """Keep content under its own hash, which is returned. What is there is read and, if damaged, replaced."""
        key: str = xxhash.xxh3_128_hexdigest(data)
        if self.path(key) is None:
            self.put(key, data)
        return key

    def get_or_make(self, key: str, make: Callable[[], bytes], *, wait_seconds: float = 600.0) -> bytes:
        """The content of `key`; if it is missing, of all that ask at once one calls `make`, and the others wait.

        If the one that makes it fails or is killed, another takes its place at once. Content larger than the cache is
        returned, and not kept. `make` may ask for other keys; asking for its own is an error.
        """
        data = self.get(key)
        if data is not None:
            return data
        with FileLock(self._lock_path(key)) as lock, _making(key, lock.path):
            if not lock.acquire(wait_seconds):
                raise StalledError(
                    f"{key} has been in the making for more than {wait_seconds:g} s by {lock.owner()}; "
                    "wait longer with wait_seconds="
                )
            data = self.get(key)
            if data is None:
                data = make()
                if len(data) > self.limit_bytes:
                    log.warning("%s has %d bytes, more than the cache may hold, and is not kept", key, len(data))
                else:
                    self.put(key, data)
        return data

    def delete(self, key: str) -> bool:
        return sum(_unlink(file) for file in self._files(key)) > 0

    def stat(self, key: str) -> CacheEntry | None:
        file = self._find(key, touch=False)
        with contextlib.suppress(FileNotFoundError):
            return _entry(file) if file is not None else None
        return None

    def entries(self) -> Iterator[CacheEntry]:
        for file in self._all_files():
            with contextlib.suppress(FileNotFoundError):
                yield _entry(file)

    def size(self) -> int:
        """Bytes of all entries together; looks at each of them."""
        return sum(entry.size for entry in self.entries())

    def evict(self) -> int:
        """Remove what was not used for longest until an eighth of the limit is free; how many bytes went."""
        files = []
        for file in self._all_files():
            with contextlib.suppress(FileNotFoundError):
                stat = file.stat()
                files.append((stat.st_mtime_ns, stat.st_size, file))
        total, gone = sum(size for _, size, _ in files), 0
        enough = self.limit_bytes - self.limit_bytes // 16
        if total > enough:
            # The newest stays, whatever its size: it is the one that somebody has just asked for.
            for _, size, file in sorted(files)[:-1]:
                if total - gone <= self.limit_bytes - self.limit_bytes // 8:
                    break
                if _unlink(file):
                    gone += size
        self._unseen = max(0, total - gone - enough)
        return gone

    def clear(self) -> None:
        """Remove every entry."""
        for file in self._all_files():
            _unlink(file)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _folder(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{key!r} cannot be a cache key; expected up to 128 of 0-9 a-z . _ - with a letter or digit first: "
                "use content_key(...) or a hex digest"
            )
        return self.directory / xxhash.xxh3_64_hexdigest(key.encode())[:2]

    def _lock_path(self, key: str) -> Path:
        self._folder(key)
        folder = self.directory / _LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"lock-{key}"

    def _files(self, key: str) -> list[Path]:
        """The file of a key; two for a moment while it is being replaced."""
        folder = self._folder(key)
        try:
            return [file for file in folder.iterdir() if file.name.startswith(f"{_MARK}{key}~")]
        except FileNotFoundError:
            return []

    def _find(self, key: str, *, touch: bool = True) -> Path | None:
        newest: tuple[int, Path] | None = None
        for file in self._files(key):
            with contextlib.suppress(FileNotFoundError):
                newest = max(newest or (0, file), (file.stat().st_mtime_ns, file))
        if newest is None:
            return None
        if touch:
            with contextlib.suppress(OSError):
                os.utime(newest[1])
        return newest[1]

    def _is_intact(self, file: Path, digest: str) -> bool:
        if file.name.rpartition("~")[2] == digest:
            return True
        log.warning("%s is damaged: its content does not match its checksum; it is removed", file)
        _unlink(file)
        return False

    def _put(self, key: str, digest: str, size: int, pieces: Iterator[bytes] | list[bytes]) -> None:
        folder = self._folder(key)
        if size > self.limit_bytes:
            raise ConfigError(
                f"{key} has {size} bytes, and the cache {self.directory} may hold {self.limit_bytes}; raise limit_bytes"
            )
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_MARK}{key}~{digest}"
        with AtomicFile(target) as file:
            for piece in pieces:
                file.file.write(piece)
        for other in self._files(key):
            if other != target:
                _unlink(other)
        if self._unseen is None or self._unseen + size > self.limit_bytes // 16:
            self.evict()
        else:
            self._unseen += size

    def _all_files(self) -> Iterator[Path]:
        """Every entry; on the way, what killed writers left behind is removed."""
        if not self.directory.is_dir():
            return
        for folder in self.directory.iterdir():
            if not _FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            for file in folder.iterdir():
                if _FILE.fullmatch(file.name):
                    yield file
                elif _HALF.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - file.stat().st_mtime > _STRAY_SECONDS:
                            _unlink(file)

    def __repr__(self) -> str:
        return f"DiskCache({str(self.directory)!r}, limit_bytes={self.limit_bytes})"


def default_cache_directory() -> Path:
    """Where caches go on this system: `$XDG_CACHE_HOME`, or the usual place, with `penstock` behind it."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return require_local(chosen, "XDG_CACHE_HOME") / "penstock"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "penstock" / "cache"
    return Path.home() / ".cache" / "penstock"


@contextlib.contextmanager
def _making(key: str, lock: Path) -> Iterator[None]:
    """While it is being made; a function that asks for what it makes would wait for itself."""
    locks: set[Path] = _here.__dict__.setdefault("locks", set())
    if lock in locks:
        raise ConfigError(
            f"{key} is asked for by the function that makes it, which would wait for itself; make it from other keys"
        )
    locks.add(lock)
    try:
        yield
    finally:
        locks.discard(lock)


def _entry(file: Path) -> CacheEntry:
    stat = file.stat()
    return CacheEntry(file.name.rpartition("~")[0].removeprefix(_MARK), stat.st_size, stat.st_mtime)


def _unlink(file: Path) -> bool:
    """Whether it was there and went; another process may have been faster, or (Windows) be reading it."""
    try:
        file.unlink()
    except (FileNotFoundError, PermissionError):
        return False
    return True
