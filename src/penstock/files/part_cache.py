"""Cache of parts of remote files: one file a part, within a size, shared by all processes of a machine.

A part appears whole or not at all, ends with its checksum, and is fetched by one process while others wait for it.
What goes first when room is needed is decided by those who know when a part is used next (`PartUsers`); parts of
nobody who is there go by the time of their last use.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock._forks import renewed
from penstock.errors import ConfigError
from penstock.files.atomic import AtomicFile, remove_unlocked
from penstock.files.locks import FileLock

log = logging.getLogger(__name__)

Fetch = Callable[[], Iterable[Any]]
"""The bytes of a part, as one buffer or several."""
_NAME = re.compile(r"[0-9a-f]{8}[0-9a-z.-]{0,100}")
_DIGEST_BYTES = 16
_SCANS = 64
"""A process looks at the whole cache after it has added this part of the limit."""
_SPARE = 8
"""Share of the limit that stays free for what other processes add meanwhile."""
_GRACE_SECONDS = 600.0
"""Parts that somebody used so recently are taken for those of a run that goes on."""
_STRAY_SECONDS = 600.0
_TOUCH_SECONDS = 60.0
_POLL_SECONDS = 0.05
_MOST_REMEMBERED = 1 << 18
_ON_WINDOWS = os.name == "nt"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class PartUsers(Protocol):
    """Somebody who knows when parts are used next."""

    def next_uses(self, names: Sequence[str]) -> npt.NDArray[np.float64]:
        """Steps until each part is used; inf for never, NaN for parts of others."""
        ...

    @property
    def near_steps(self) -> float:
        """Steps within which a part is kept, whoever else needs room."""
        ...


class DamagedPartError(ValueError):
    """Bytes that do not match their checksum."""


class _Entry(NamedTuple):
    name: str
    size: int
    used: float
    path: str


class PartCache:
    """Parts by name, in a directory of at most `limit_bytes`, which parts on their way may pass for a moment.

    Safe to use from many threads and processes. `get` returns a part as mapped memory, which stays valid when the part
    is evicted or the directory deleted. If the disk is full, the cache gets smaller; without any room, parts are held
    in memory by those who use them.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        if limit_bytes <= 0:
            raise ConfigError(f"cache_bytes must be positive, got {limit_bytes}")
        self.directory, self.limit_bytes = directory, limit_bytes
        self.fetched_bytes = 0
        """Bytes that this process has fetched."""
        self.evictions = 0
        """Parts that this process has evicted."""
        self._room: float | None = None
        """Bytes that this process may add before it looks at the whole cache; None before the first look."""
        self._checked: dict[str, tuple[int, int]] = {}
        """Parts whose checksum was right, with the inode and time they had then."""
        self._touched: dict[str, float] = {}
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Replaced rather than changed, since a thread that evicts may be going through it."""
        self._guard = renewed(threading.Lock())
        self._warned = self._wanted = False

    def add_users(self, users: PartUsers) -> None:
        """Ask somebody what to evict, as long as they exist."""
        with self._guard:
            self._users = weakref.WeakSet([*self._users, users])

    def has(self, name: str, size: int) -> bool:
        """True if a part is there with its size; its content is not looked at."""
        try:
            return self._path(name).stat().st_size == size + _DIGEST_BYTES
        except OSError:
            return False

    def get(self, name: str, size: int, fetch: Fetch, digest: str | None = None) -> pa.Buffer:
        """A part of `size` bytes: from the cache or, if it is not there or damaged, fetched by one process.

        `digest` is its xxh3-128 as hex, if it is known. DamagedPartError if what is fetched does not match it.
        """
        found = self.find(name, size, digest)
        if found is not None:
            return found
        with contextlib.ExitStack() as stack:
            lock = self._lock(name)
            while lock is not None:
                try:
                    if lock.acquire(_POLL_SECONDS):
                        stack.enter_context(lock)
                        break
                except OSError as error:  # no room, no locks, or no directory: then several may fetch it
                    log.debug("%s: %s", lock.path, error)
                    break
                if (found := self.find(name, size, digest)) is not None:
                    return found
            found = self.find(name, size, digest)
            return found if found is not None else self._fetched(name, size, fetch, digest)

    def find(self, name: str, size: int, digest: str | None = None) -> pa.Buffer | None:
        """A part that is there and, at first use in this process, intact. A damaged one is removed and logged.

        The file may be evicted or replaced at any moment: what is returned is what was mapped, and checked as such.
        """
        path = self._path(name)
        try:
            stat = path.stat()
            if stat.st_size != size + _DIGEST_BYTES:
                raise DamagedPartError(f"it has {stat.st_size} bytes, expected {size + _DIGEST_BYTES}")
            whole = _mapped(path)
            if len(whole) != stat.st_size:
                return None
            part = whole.slice(0, size)
            mark = stat.st_ino, stat.st_mtime_ns
            if self._checked.get(name) != mark or not _has_mark(path, mark):
                _check(part, whole.slice(size).to_pybytes().hex(), digest)
                self._checked[name] = mark
            self._touch(name, path, stat.st_ino)
            return part
        except DamagedPartError as error:
            log.warning("%s is damaged: %s; it is fetched again", path, error)
            with contextlib.suppress(OSError):  # not ours to remove, or (Windows) mapped by others: then it is replaced
                path.unlink()
            return None
        except (OSError, ValueError):
            return None

    def evict(self) -> int:
        """Remove parts until the cache is within its limit, those that are used last first; returns the bytes removed.

        One thread of one process at a time does it, and looks again if others wanted to meanwhile.
        """
        gone = 0
        self._wanted = True
        while self._wanted:
            lock = self._lock("evict")
            try:
                if lock is None or not lock.acquire():
                    break
            except OSError:
                break
            with lock:
                self._wanted = False
                gone += self._evict()
        return gone

    def _evict(self) -> int:
        entries = list(self._entries())
        total = sum(entry.size for entry in entries)
        most = self.limit_bytes - self.limit_bytes // _SPARE
        gone = 0
        for entry in self._by_use(entries) if total > most else ():
            if total - gone <= most:
                break
            with contextlib.suppress(OSError):
                Path(entry.path).unlink()
                gone += entry.size
                self.evictions += 1
        self._room = max((most - total + gone) / _SPARE, self.limit_bytes / _SCANS)
        return gone

    def _fetched(self, name: str, size: int, fetch: Fetch, digest: str | None) -> pa.Buffer:
        path = self._path(name)
        for _ in range(2):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with AtomicFile(path, durable=False) as target:
                    summed, length = xxhash.xxh3_128(), 0
                    for chunk in fetch():
                        target.file.write(chunk)
                        summed.update(chunk)
                        length += len(chunk)
                    self._check_fetched(summed.hexdigest(), length, size, digest)
                    target.file.write(summed.digest())
                    target.file.flush()
                    stat = os.fstat(target.file.fileno())
                    if not _ON_WINDOWS:  # which renames no file that is mapped
                        whole = _mapped(target.temporary)  # before it has a name under which others may evict it
                if _ON_WINDOWS:
                    whole = _mapped(path)
            except FileNotFoundError:
                continue  # the directory was deleted meanwhile, or the part was evicted (Windows)
            except OSError as error:
                if isinstance(error, (ConnectionError, TimeoutError)) or error.errno is None:
                    raise  # of the network
                self._shrink(error)
                continue
            self.fetched_bytes += size
            self._note_added(name, size, (stat.st_ino, stat.st_mtime_ns))
            return whole.slice(0, size)
        chunks = [bytes(chunk) for chunk in fetch()]
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._check_fetched(xxhash.xxh3_128_hexdigest(data), len(data), size, digest)
        self.fetched_bytes += size
        return pa.py_buffer(data)

    def _note_added(self, name: str, size: int, mark: tuple[int, int]) -> None:
        """Note a part that was written and checked just now, and make room if it takes more than there is."""
        self._checked[name] = mark
        self._touched[name] = time.monotonic()
        if self._room is not None:
            self._room -= size
        if self._room is None or self._room < 0:
            self.evict()

    def _check_fetched(self, summed: str, length: int, size: int, digest: str | None) -> None:
        if length != size:
            raise DamagedPartError(f"{length} bytes were fetched, expected {size}")
        if digest is not None and summed != digest:
            raise DamagedPartError(f"the checksum of what was fetched is {summed} and was {digest}")

    def _shrink(self, error: OSError) -> None:
        """Make do with less room than was asked for; said once."""
        used = sum(entry.size for entry in self._entries())
        if error.errno in _FULL and used:
            self.limit_bytes = max(min(self.limit_bytes, used) * 7 // 8, 1)
        if not self._warned:
            self._warned = True
            left = f"of {self.limit_bytes} bytes" if error.errno in _FULL and used else "in memory alone"
            log.warning("%s: %s; going on with a cache %s", self.directory, error.strerror, left)
        self.evict()

    def _by_use(self, entries: list[_Entry]) -> list[_Entry]:
        """Parts in the order in which they may go."""
        uses = np.full(len(entries), np.nan)
        near = 0.0
        names = [entry.name for entry in entries]
        for users in list(self._users):
            uses = np.fmin(uses, users.next_uses(names))
            near = max(near, users.near_steps)
        used = np.array([entry.used for entry in entries])
        foreign = np.isnan(uses)
        fresh = used > time.time() - _GRACE_SECONDS
        # Nobody's; then those used far from now; then those of other runs; then those needed soon.
        kind = np.where(foreign, np.where(fresh, 2, 0), np.where(uses > near, 1, 3))
        order = np.lexsort((np.where(foreign, used, -uses), kind))
        return [entries[number] for number in order.tolist()]

    def _entries(self) -> Iterator[_Entry]:
        """All parts that are there. What killed processes have left is removed."""
        for folder in _listed(self.directory):
            if folder.name == "locks":
                self._sweep_locks(folder.path)
                continue
            for file in _listed(folder.path) if len(folder.name) == 2 else ():
                if file.name.endswith(".tmp"):
                    remove_unlocked(Path(file.path))
                elif _NAME.fullmatch(file.name):
                    with contextlib.suppress(OSError):
                        stat = file.stat()
                        yield _Entry(file.name, stat.st_size, stat.st_mtime, file.path)

    def _sweep_locks(self, folder: str) -> None:
        for file in _listed(folder):
            with contextlib.suppress(OSError, ConfigError):
                if time.time() - file.stat().st_mtime > _STRAY_SECONDS:
                    lock = FileLock(file.path)
                    if lock.acquire():
                        lock.release()

    def _touch(self, name: str, path: Path, inode: int) -> None:
        """Note the use of a part, not more than once a minute."""
        now = time.monotonic()
        if now - self._touched.get(name, -_TOUCH_SECONDS) >= _TOUCH_SECONDS:
            if len(self._touched) > _MOST_REMEMBERED:
                self._touched, self._checked = {}, {}
            self._touched[name] = now
            with contextlib.suppress(OSError):
                os.utime(path)
                stat = path.stat()
                if stat.st_ino == inode:  # another file, put there meanwhile, is still to be checked
                    self._checked[name] = stat.st_ino, stat.st_mtime_ns

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def _lock(self, name: str) -> FileLock | None:
        folder = self.directory / "locks"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return None
        return FileLock(folder / name)

    def __repr__(self) -> str:
        return f"PartCache({str(self.directory)!r}, limit_bytes={self.limit_bytes})"


def _mapped(path: Path) -> pa.Buffer:
    """A whole file as memory that stays valid when the file is removed; no descriptor stays open."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def _has_mark(path: Path, mark: tuple[int, int]) -> bool:
    """True if the file at a path is the one with this inode and time."""
    try:
        stat = path.stat()
    except OSError:
        return False
    return (stat.st_ino, stat.st_mtime_ns) == mark


def _check(part: pa.Buffer, written: str, digest: str | None) -> None:
    found = xxhash.xxh3_128_hexdigest(part)
    if found != written or (digest is not None and found != digest):
        raise DamagedPartError(f"its checksum is {found} and was {digest or written}")


def _listed(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []
