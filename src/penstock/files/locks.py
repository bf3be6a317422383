"""One writer at a time, among threads and processes: a lock file that the system itself releases when its owner dies.

The lock is the kernel's (flock, or LockFileEx on Windows), not the presence of the file, so there is nothing stale to
find after kill -9 and no clock to trust. The text in the file names the holder, for messages only.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import orjson

from penstock._forks import renewed
from penstock.errors import ConfigError
from penstock.files.atomic import open_own
from penstock.files.listing import PathLike

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1
_LOCKED_BYTE = 1 << 30  # far after the text: on Windows a locked byte cannot be read by others

# Reentrant: a garbage collection inside of it may release another lock.
_registry_guard = renewed(threading.RLock())
_registry: dict[str, FileLock] = {}
"""The locks that this process holds, by path."""


class FileLock:
    """A lock at a path; the file is removed when the lock is released. A link at the path is refused.

    `take_over=True` takes it from another holder within this process, which then holds it no more: a new stage
    resumes where an abandoned one stopped. Between processes a lock is never taken from a holder that lives.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        self._handle: int | None = None
        self._process = 0

    @property
    def held(self) -> bool:
        return self._handle is not None

    def acquire(self, wait_seconds: float = 0.0, *, take_over: bool = False) -> bool:
        """Take the lock, waiting at most `wait_seconds`; True if it is held now."""
        if self.held:
            return True
        if take_over and self._take_over():
            return True
        deadline, pause = time.monotonic() + wait_seconds, _FIRST_PAUSE
        while not self._try():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def hold(self, what: str, *, take_over: bool = False) -> bool:
        """Take the lock of `what` now, or raise an error that names who has it; whether there are locks at all.

        A file system without locks (some network drives) is no obstacle, but a warning is logged.
        """
        try:
            if self.acquire(take_over=take_over):
                return True
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            self.path.unlink(missing_ok=True)
            log.warning("%s: its file system has no locks, so a second run that uses it is not detected", what)
            return False
        raise ConfigError(
            f"{what} is in use by {self.owner()}; wait until that run has ended, or stop it, or choose another path"
        )

    def release(self) -> None:
        """Give it back; without holding it, do nothing."""
        with _registry_guard:
            handle, self._handle = self._handle, None
            if handle is None:
                return
            _registry.pop(str(self.path), None)
            if self._process != os.getpid():
                os.close(handle)  # of a fork: its parent still holds the lock
                return
            try:
                with contextlib.suppress(OSError):  # Windows does not remove a file that is open
                    self.path.unlink()
            finally:
                os.close(handle)
            if os.name == "nt":
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def owner(self) -> str:
        """Holder of the lock, as the file names it."""
        try:
            facts = orjson.loads(self.path.read_bytes())
            return f"process {facts['pid']} on {facts['host']}, since {facts['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def _take_over(self) -> bool:
        with _registry_guard:
            holder = _registry.get(str(self.path))
            if holder is None or holder._process != os.getpid():  # a fork's copy: its parent holds the lock
                return False
            handle, holder._handle = holder._handle, None
            if handle is None:
                return False
            self._handle, self._process = handle, os.getpid()
            _registry[str(self.path)] = self
            return True

    def _try(self) -> bool:
        while True:
            handle = open_own(self.path, os.O_RDWR | os.O_CREAT)
            try:
                locked = _lock(handle)
                ours = locked and self._has_the_name(handle)
                if ours:
                    _sign(handle)
            except BaseException:
                os.close(handle)  # or the lock would stay taken until the process ends
                raise
            if ours:
                break
            os.close(handle)
            if not locked:
                return False
        with _registry_guard:
            self._handle, self._process = handle, os.getpid()
            _registry[str(self.path)] = self
        return True

    def _has_the_name(self, handle: int) -> bool:
        """True if the locked file is still the one at the path: its last owner may just have removed it."""
        try:
            return os.path.samestat(os.fstat(handle), self.path.lstat())
        except FileNotFoundError:
            return False

    def __repr__(self) -> str:
        return f"FileLock({str(self.path)!r}{', held' if self.held else ''})"


def _sign(handle: int) -> None:
    """Write the holder into the file. If the disk is full, the lock holds without it."""
    facts = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    with contextlib.suppress(OSError):
        os.truncate(handle, 0)
        os.write(handle, orjson.dumps(facts))


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: int) -> bool:
        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        os.lseek(handle, 0, os.SEEK_SET)
        return True
else:
    import fcntl

    def _lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
