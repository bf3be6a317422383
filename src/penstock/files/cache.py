"""Caches that many processes share: files that are made once, and bytes by key within a size."""

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
from typing import Any, BinaryIO, Protocol

import xxhash

from penstock.errors import ConfigError, StalledError
from penstock.files.atomic import AtomicFile
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.memory.budget import parse_bytes

log = logging.getLogger(__name__)

_KEY = re.compile(r"[0-9a-z][0-9a-z._-]{0,127}")
_STRAY_SECONDS = 3600.0
_OLD_SECONDS = 24 * 3600.0
_UNFINISHED = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp")
_LOCKS = "locks"
_FOLDER = re.compile(r"[0-9a-f]{2}")
_FILE = re.compile(r"_[0-9a-z][0-9a-z._-]{0,127}~[0-9a-f]{32}")
_HALF = re.compile(rf"\.{_FILE.pattern}\.\d+-[0-9a-f]{{8}}\.tmp")
"""Directories, entries and unfinished entries of a cache; nothing else in its directory is ever deleted."""
_MARK = "_"
"""Prefix of each file name: on Windows `con` and `nul.txt` are devices in every directory."""

_here = threading.local()
"""The locks of what this thread is making."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One entry, without its content."""

    key: str
    size: int
    used: float
    """Time of the last read or write, in seconds since 1970."""


class CacheBackend(Protocol):
    """Storage of cached bytes. Every method may be called from many threads and processes at once.

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
        """Delete an entry; False if there was none."""
        ...

    def stat(self, key: str) -> CacheEntry | None: ...

    def entries(self) -> Iterator[CacheEntry]:
        """All there are, in no order."""
        ...


def check_key(key: str) -> str:
    """The key, if it is one; otherwise a ConfigError."""
    if not _KEY.fullmatch(key):
        raise ConfigError(
            f"{key!r} cannot be a cache key; expected up to 128 of 0-9 a-z . _ - with a letter or digit first: "
            "use content_key(...) or a hex digest"
        )
    return key


SEAL_BYTES = 24
_SEAL = b"penstock"


def sealed(key: str, data: bytes) -> bytes:
    """Data with a checksum of itself and its key at the end, for storage that has none."""
    return b"".join((data, _SEAL, _seal(key, data)))


def unsealed(key: str, data: Any) -> bytes | None:
    """Data as it was given to `sealed`; None if any bit of it or its key has changed."""
    view = memoryview(data)
    content = view[:-SEAL_BYTES]
    if len(view) < SEAL_BYTES or view[-SEAL_BYTES:] != _SEAL + _seal(key, content):
        return None
    return bytes(content)


def _seal(key: str, data: Any) -> bytes:
    digest = xxhash.xxh3_128(key.encode())
    digest.update(data)
    return digest.digest()


def lock_of(path: Path) -> Path:
    """The lock file that `get_or_make_file` holds while it makes the file at `path`."""
    return path.with_name(f".{path.name}.lock")


def get_or_make_file(
    path: Path,
    make: Callable[[BinaryIO], object],
    *,
    is_valid: Callable[[Path], bool] = Path.is_file,
    wait_seconds: float = 3600.0,
    name: str | None = None,
) -> Path:
    """The file at `path`. If it is missing or not valid, one process makes it and the others wait.

        get_or_make_file(cache / f"{key}.arrow", lambda file: write_table(table, file))

    `make` writes into an open file, which appears under its name, by atomic rename, once `make` has returned; if it
    raises, nothing appears. If the maker fails or is killed, another one takes over at once. `make` may request other
    files; requesting its own is a ConfigError. `name` is what errors call the file.
    """
    if is_valid(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _made_once(lock_of(path), name or str(path), wait_seconds):
        if not is_valid(path):
            _remove_strays(path)
            with AtomicFile(path) as target:
                make(target.file)
    return path


def _remove_strays(path: Path) -> None:
    """Remove unfinished files of killed writers: all of this file, whose lock is held; others after a day."""
    for stray in path.parent.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError):
            if stray.name.startswith(f".{path.name}.") or (
                _UNFINISHED.fullmatch(stray.name) and time.time() - stray.stat().st_mtime > _OLD_SECONDS
            ):
                _unlink(stray)


class DiskCache:
    """Entries as plain files below `directory`, together within `limit_bytes`; the least recently used go first.

    Files appear by atomic rename and carry the checksum of their content in their name, so that no lock is needed for
    correctness: processes that evict, replace and read at once see an entry whole or not at all. A damaged entry counts
    as missing, is removed and logged. The limit is looked at after each sixteenth of it written by this process, and
    eviction makes room for twice that, so several processes together may pass it by a little, for a while.
    """

    def __init__(self, directory: PathLike, limit_bytes: int | str = "10 GiB") -> None:
        limit = parse_bytes(limit_bytes)
        if limit <= 0:
            raise ConfigError(f"limit_bytes must be positive, got {limit_bytes}")
        self.directory, self.limit_bytes = require_local(directory, "the directory of a DiskCache"), limit
        self._unseen: int | None = None
        """Bytes that may lie above fifteen sixteenths of the limit; None before the first look."""

    def get(self, key: str) -> bytes | None:
        file = self._find(key)
        if file is None:
            return None
        try:
            data = file.read_bytes()
        except FileNotFoundError:
            return None  # evicted meanwhile
        if file.name.rpartition("~")[2] == xxhash.xxh3_128_hexdigest(data):
            return data
        log.warning("%s is damaged: its content does not match its checksum; it is removed", file)
        _unlink(file)
        return None

    def put(self, key: str, data: bytes) -> None:
        folder, size = self._folder(key), len(data)
        if size > self.limit_bytes:
            raise ConfigError(
                f"{key} has {size} bytes, and the cache {self.directory} may hold {self.limit_bytes}; raise limit_bytes"
            )
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"{_MARK}{key}~{xxhash.xxh3_128_hexdigest(data)}"
        with AtomicFile(target, durable=False) as file:  # after a loss of power its checksum is wrong
            file.file.write(data)
        for other in self._files(key):
            if other != target:
                _unlink(other)
        if self._unseen is None or self._unseen + size > self.limit_bytes // 16:
            self.evict()
        else:
            self._unseen += size

    def get_or_make(self, key: str, make: Callable[[], bytes], *, wait_seconds: float = 600.0) -> bytes:
        """The content of `key`. If it is missing, one caller makes it and the others wait, as in `get_or_make_file`.

        Content larger than the cache is returned, and not kept.
        """
        data = self.get(key)
        if data is not None:
            return data
        with _made_once(self._lock_path(key), key, wait_seconds):
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
        """Remove the least recently used entries until an eighth of the limit is free; returns the bytes removed."""
        files = []
        for file in self._all_files():
            with contextlib.suppress(FileNotFoundError):
                stat = file.stat()
                files.append((stat.st_mtime_ns, stat.st_size, file))
        total, gone = sum(size for _, size, _ in files), 0
        enough = self.limit_bytes - self.limit_bytes // 16
        if total > enough:
            # The newest stays, of any size: it was requested just now.
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

    def _folder(self, key: str) -> Path:
        return self.directory / xxhash.xxh3_64_hexdigest(check_key(key).encode())[:2]

    def _lock_path(self, key: str) -> Path:
        self._folder(key)
        folder = self.directory / _LOCKS
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"lock-{key}"

    def _files(self, key: str) -> list[Path]:
        """The file of a key; two for a moment while it is being replaced."""
        return [file for file in _listed(self._folder(key)) if file.name.startswith(f"{_MARK}{key}~")]

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

    def _all_files(self) -> Iterator[Path]:
        """Every entry. Old unfinished files of killed writers are removed."""
        if not self.directory.is_dir():
            return
        for folder in _listed(self.directory):
            if not _FOLDER.fullmatch(folder.name) or folder.is_symlink() or not folder.is_dir():
                continue
            for file in _listed(folder):
                if _FILE.fullmatch(file.name):
                    yield file
                elif _HALF.fullmatch(file.name):
                    with contextlib.suppress(FileNotFoundError):
                        if time.time() - file.stat().st_mtime > _STRAY_SECONDS:
                            _unlink(file)

    def __repr__(self) -> str:
        return f"DiskCache({str(self.directory)!r}, limit_bytes={self.limit_bytes})"


def default_cache_directory() -> Path:
    """Directory of penstock's caches: `penstock` in `$XDG_CACHE_HOME`, or in the cache directory of this system."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return require_local(chosen, "XDG_CACHE_HOME") / "penstock"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "penstock" / "cache"
    return Path.home() / ".cache" / "penstock"


@contextlib.contextmanager
def _made_once(lock_path: Path, name: str, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of what is being made, after waiting for another maker."""
    locks: set[Path] = _here.__dict__.setdefault("locks", set())
    if lock_path in locks:
        raise ConfigError(f"the function that makes {name} requests {name} itself; it may only request other entries")
    locks.add(lock_path)
    try:
        with FileLock(lock_path) as lock:
            if not lock.acquire(wait_seconds):
                raise StalledError(
                    f"{lock.owner()} has been making {name} for more than {wait_seconds:g} s; "
                    "wait longer with wait_seconds="
                )
            yield
    finally:
        locks.discard(lock_path)


def _entry(file: Path) -> CacheEntry:
    stat = file.stat()
    return CacheEntry(file.name.rpartition("~")[0].removeprefix(_MARK), stat.st_size, stat.st_mtime)


def _listed(folder: Path) -> list[Path]:
    """Entries of a folder; none if it was deleted."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def _unlink(file: Path) -> bool:
    """Remove a file; False if another process removed it first, or (Windows) is reading it."""
    try:
        file.unlink()
    except (FileNotFoundError, PermissionError):
        return False
    return True
