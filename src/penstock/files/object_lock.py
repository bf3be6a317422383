"""One writer at a time, among machines: an object in a bucket that its holder renews, and that others watch.

No clock is compared with another: a lock is taken from a holder that has not renewed it for `LEASE_SECONDS` as the
waiting process itself has counted them, with a write that the store refuses if the holder has renewed it meanwhile. Of
a holder on the same machine the kernel tells at once whether it lives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from penstock._forks import renewed
from penstock.errors import ConfigError
from penstock.files.filesystems import shown
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.files.objects import ObjectExistsError, ObjectVersion, open_bucket

log = logging.getLogger(__name__)

LEASE_SECONDS = 30.0
"""A lock that was not renewed for so long may be taken over."""
_RENEWALS_PER_LEASE = 4
_PAUSE = 0.5

_registry_guard = renewed(threading.RLock())
_registry: dict[str, ObjectLock] = {}
"""The locks that this process holds, by URL."""


class ObjectLock:
    """A lock at a URL, with the methods of a `FileLock`. The object is deleted when the lock is released.

    A thread renews it. A holder that was stopped for longer than the lease may find that it has lost it: `check` raises
    then, before anything is written. What must not be written by a stale holder in any case is written on condition.
    """

    def __init__(self, url: PathLike) -> None:
        self._bucket, self._key = open_bucket(url)
        self.url = self._bucket.url_of(self._key)
        self._token = ""
        self._version: ObjectVersion | None = None
        self._renewals = 0
        self._renewed_at = 0.0
        self._process = 0
        self._lost = False
        self._local: FileLock | None = None
        self._stop = threading.Event()
        self._guard = renewed(threading.Lock())

    @property
    def held(self) -> bool:
        """True while nobody else can have it: it was renewed within the lease."""
        return self._is_ours and _seconds() - self._renewed_at < LEASE_SECONDS

    @property
    def _is_ours(self) -> bool:
        """True as far as this process knows."""
        return self._version is not None and not self._lost and self._process == os.getpid()

    def acquire(self, wait_seconds: float = 0.0, *, take_over: bool = False) -> bool:
        """Take the lock, waiting at most `wait_seconds` for a holder that lives; True if it is held now.

        Of a holder on another machine it waits to see a sign of life, `LEASE_SECONDS` at most: it may have been killed.
        """
        if self.held:
            return True
        if take_over and self._take_over():
            return True
        self._bucket.list_folder(self._key)  # some stores make a bucket that is written to, and a wrong name is common
        began = time.monotonic()
        seen: ObjectVersion | None = None
        since, lives = began, False
        while not self._try(create=True):
            found = self._look()
            now = time.monotonic()
            if found is None:
                continue  # released meanwhile
            version, facts = found
            alive = _lives_here(str(facts.get("token")))
            lives = lives or alive is True
            if version != seen:
                lives = lives or seen is not None
                seen, since = version, now
            expired = now - since >= LEASE_SECONDS
            if (alive is False or expired) and self._try(replaced=version):
                log.info("%s: taken from %s, which did not renew it", shown(self.url), facts.get("host"))
                return True
            if lives and now - began >= wait_seconds:
                return False
            time.sleep(_PAUSE)
        return True

    def hold(self, what: str, *, take_over: bool = False) -> bool:
        """Take the lock of `what`, or raise an error that names who has it."""
        if self.acquire(take_over=take_over):
            return True
        raise ConfigError(
            f"{what} is in use by {self.owner()}; wait until that run has ended, or stop it, or choose another path"
        )

    def check(self, what: str) -> None:
        """Raise if the lock was lost to another run. A process that was stopped asks before it goes on."""
        if self._is_ours and self._is_stale:
            with self._guard:
                if self._is_ours and self._is_stale:
                    self._renew()
        if self._lost:
            raise ConfigError(
                f"{what} is in use by {self.owner()} now: this run did not renew its lock {shown(self.url)!r} for "
                f"{LEASE_SECONDS:g} s, as a machine that sleeps or has no network does; start it again to resume"
            )

    @property
    def _is_stale(self) -> bool:
        """True if renewals have failed or the process was stopped: others may take the lock after a whole lease."""
        return _seconds() - self._renewed_at >= LEASE_SECONDS / 2

    def release(self) -> None:
        """Give it back; without holding it, do nothing."""
        with _registry_guard:
            ours = self._is_ours
            self._stop.set()
            if _registry.get(self.url) is self and self._process == os.getpid():
                del _registry[self.url]
        with self._guard:
            if ours:
                with contextlib.suppress(OSError):
                    # Others may take it only after a lease without a renewal.
                    if not self._is_stale or self._renew():
                        self._bucket.delete(self._key)
            self._version = None
            local, self._local = self._local, None
        if local is not None:
            local.release()

    def owner(self) -> str:
        """Holder of the lock, as the object names it."""
        found = self._look()
        try:
            assert found is not None
            facts = found[1]
            return f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
        except (AssertionError, KeyError):
            return "another process"

    def _try(self, *, create: bool = False, replaced: ObjectVersion | None = None) -> bool:
        token = secrets.token_hex(16)
        local = _local_lock(token)
        self._token, self._renewals = token, 0
        began = _seconds()
        try:
            self._version = self._bucket.write(self._key, self._facts(), create=create, replaced=replaced)
        except ObjectExistsError:
            found = self._look()
            if found is None or found[1].get("token") != token:  # else it was written, and the answer got lost
                if local is not None:
                    local.release()
                return False
            self._version = found[0]
        except BaseException:
            if local is not None:
                local.release()
            raise
        self._local, self._process, self._lost = local, os.getpid(), False
        self._renewed_at = began
        with _registry_guard:
            _registry[self.url] = self
        self._start()
        return True

    def _start(self) -> None:
        self._stop = threading.Event()
        threading.Thread(target=self._keep, args=(self._stop,), name="penstock-lock", daemon=True).start()

    def _keep(self, stop: threading.Event) -> None:
        """Renew the lock until it is released or lost. Trouble with the network is no reason to give it up."""
        while not stop.wait(LEASE_SECONDS / _RENEWALS_PER_LEASE):
            with self._guard:
                if stop.is_set() or self._version is None:
                    return
                try:
                    if not self._renew():
                        return
                except OSError as error:
                    log.warning("%s cannot be renewed: %s", shown(self.url), error)

    def _renew(self) -> bool:
        self._renewals += 1
        began = _seconds()
        try:
            self._version = self._bucket.write(self._key, self._facts(), replaced=self._version)
        except (ObjectExistsError, FileNotFoundError):
            found = self._look()
            if found is None or found[1].get("token") != self._token:
                self._lost = True
                return False
            self._version = found[0]
        self._renewed_at = began
        return True

    def _take_over(self) -> bool:
        with _registry_guard:
            holder = _registry.get(self.url)
            if holder is None or holder is self or not holder._is_ours:
                return False
            with holder._guard:
                holder._stop.set()
                self._token, self._version, self._renewals = holder._token, holder._version, holder._renewals
                self._local, self._process, self._lost = holder._local, os.getpid(), False
                self._renewed_at = holder._renewed_at
                holder._version = holder._local = None
            _registry[self.url] = self
            self._start()
            return True

    def _look(self) -> tuple[ObjectVersion, dict[str, Any]] | None:
        """The lock as it stands; None if there is none."""
        info = self._bucket.info(self._key)
        if info is None:
            return None
        try:
            facts = orjson.loads(bytes(self._bucket.read(self._key)))
        except FileNotFoundError:
            return None
        except ValueError:
            facts = {}
        return info.written, facts if isinstance(facts, dict) else {}

    def _facts(self) -> bytes:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        facts = {"token": self._token, "pid": os.getpid(), "host": socket.gethostname(), "since": since}
        return orjson.dumps(facts | {"renewals": self._renewals})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"ObjectLock({shown(self.url)!r}{', held' if self.held else ''})"


def _seconds() -> float:
    """Time since the machine started, with that for which it slept, as others have counted it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _local_path(token: str) -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"penstock-locks-{user}" / f"{token}.lock"


def _local_lock(token: str) -> FileLock | None:
    """The kernel's lock beside the one in the bucket: others on this machine see by it that the holder lives."""
    path = _local_path(token)
    with contextlib.suppress(OSError, ConfigError):
        path.parent.mkdir(mode=0o700, exist_ok=True)
        lock = FileLock(path)
        if lock.acquire():
            return lock
    return None


def _lives_here(token: str) -> bool | None:
    """True if the holder is a live process of this machine, False if it was one; None if it is not known here."""
    if not token.isalnum():
        return None
    path = _local_path(token)
    with contextlib.suppress(OSError, ConfigError):
        if not path.exists():
            return None
        with FileLock(path) as lock:
            return not lock.acquire()
    return None
