"""Output of a file sink on disk: a hidden directory of finished segments, and renames."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from penstock.errors import ConfigError, ResumeError
from penstock.files.atomic import (
    AtomicFile,
    check_own_directory,
    refuse_link,
    remove_leftovers,
    remove_own_directory,
    strangers,
    sync_directory,
    write_atomic,
)
from penstock.files.listing import split_suffix
from penstock.files.locks import FileLock
from penstock.pipeline.stages import State

Join = Callable[[Iterable[Path], BinaryIO], None]

_RUN = ".penstock-run"
"""In the hidden directory: which run its files are from."""
_OWN = re.compile(r"part-\d{6,}[\w.]*|\.(part-\d{6,}[\w.]*|\.penstock-run)\.\d+-[0-9a-f]{8}\.tmp|\.penstock-run")
"""The names of all that is ever written into it."""


class LocalOutput:
    """The file or directory at a path. It is written by one run at a time, which holds the lock next to it."""

    def __init__(self, path: Path, suffix: str) -> None:
        self.path, self.shown = path, str(path)
        self.is_directory = not path.suffix or path.is_dir()
        self._suffix = suffix if self.is_directory else "".join(split_suffix(path))
        self._lock = FileLock(path.with_name(f".{path.name}.penstock-lock"))
        self._watched = False
        """True if the file system has locks, so that losing this one can be noticed."""

    @property
    def staging(self) -> Path:
        """The hidden directory of finished segments."""
        return self.path.with_name(f".{self.path.name}.penstock-parts")

    @property
    def _leftovers(self) -> Path:
        """Directory being deleted: it is renamed first, since deletion takes several steps."""
        return self.path.with_name(f".{self.path.name}.penstock-old")

    def segment(self, number: int) -> Path:
        return self.staging / f"part-{number:06d}{self._suffix}"

    def fit_budget(self, nbytes: int) -> None:
        """Nothing: what is written goes to the system at once."""

    # -- one run at a time -------------------------------------------------------------------------------------------

    def take_lock(self, *, take_over: bool) -> None:
        self._check_parent()
        self._watched = self._lock.hold(str(self.path), take_over=take_over)

    def release(self) -> None:
        self._lock.release()

    def check(self) -> None:
        """Nothing: the lock of a live process is never taken from it."""

    @property
    def is_ours(self) -> bool:
        """False once the lock was released, or another sink of this process has taken it."""
        return self._lock.held or not self._watched

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, *, in_parts: bool, replaces: bool) -> None:
        """Make room for a run that begins."""
        self._check_target(in_parts=in_parts, replaces=replaces)
        remove_leftovers(self.path)
        if in_parts:
            self.take_lock(take_over=False)
            remove_own_directory(self.staging, _OWN)  # of a run that was killed
            self.staging.mkdir()

    def open(self, number: int, *, in_parts: bool) -> AtomicFile:
        """A file for the rows that follow: a segment, or all there is."""
        return AtomicFile(self.segment(number) if in_parts else self.path)

    def clear(self) -> None:
        """Delete what was not published."""
        remove_own_directory(self.staging, _OWN)

    def token(self) -> State:
        """Facts that a checkpoint has to keep besides the number of segments."""
        return {}

    def restore(self, token: State, run: str, count: int, *, replaces: bool) -> bool:
        """Go back to the segments of a checkpoint; True if their run has published them."""
        foreign = strangers(self.staging, _OWN)
        segments = [self.segment(number) for number in range(count)]
        missing = [segment for segment in segments if not segment.exists()]
        # Taking the hidden directory away is the last thing that flush does; of one segment, it takes that away before.
        taken = not self.staging.exists() or (bool(segments) and missing == segments)
        if bool(token.get("finishing")) and taken and self.path.exists():
            if self._owner() in (run, None) and not foreign:
                remove_own_directory(self.staging, _OWN)
            remove_own_directory(self._leftovers, _OWN)
            return True
        if missing:
            raise ResumeError(f"the checkpoint needs {missing[0]}, which is gone; delete the checkpoint to start again")
        if segments and self._owner() not in (run, None):
            raise ResumeError(
                f"another run has begun to write {self.path} since this checkpoint was made, and its segments are "
                "gone; delete the checkpoint to start again"
            )
        self._check_target(in_parts=True, replaces=replaces)
        remove_leftovers(self.path)
        check_own_directory(self.staging, _OWN)
        self.staging.mkdir(exist_ok=True)
        self._sweep(segments)  # what was written after the checkpoint: its rows come again
        write_atomic(self.staging / _RUN, run.encode())
        return False

    def publish_directory(self, count: int, run: str, *, replaces: bool) -> None:
        self._check_target(in_parts=True, replaces=replaces)
        check_own_directory(self.staging, _OWN)
        remove_own_directory(self._leftovers, _OWN)
        self._sweep([self.segment(number) for number in range(count)])
        if self.path.is_dir():
            if any(self.path.iterdir()):
                self.path.rename(self._leftovers)  # our own of the run before, or `_check_target` would have refused
            else:
                self.path.rmdir()
        self.staging.rename(self.path)
        sync_directory(self.path.parent)
        remove_own_directory(self._leftovers, _OWN)

    def publish_joined(self, count: int, run: str, join: Join) -> None:
        refuse_link(self.staging)
        remove_own_directory(self._leftovers, _OWN)
        segments = [self.segment(number) for number in range(count)]
        if len(segments) == 1:
            segments[0].replace(self.path)
        else:
            with AtomicFile(self.path) as target:
                join(segments, target.file)
        self.staging.rename(self._leftovers)
        sync_directory(self.path.parent)
        remove_own_directory(self._leftovers, _OWN)

    def _owner(self) -> str | None:
        """The run whose files are in the hidden directory; None if it is unknown."""
        with contextlib.suppress(FileNotFoundError):
            return (self.staging / _RUN).read_text(errors="replace")
        return None

    def _sweep(self, segments: list[Path]) -> None:
        """Remove from the hidden directory what is no segment."""
        for stray in self.staging.iterdir():
            if stray not in segments:
                stray.unlink()

    def _check_parent(self) -> None:
        parent = self.path.parent
        if not parent.is_dir():
            raise FileNotFoundError(f"no such directory: {str(parent)!r}; make it before writing {self.path.name}")

    def _check_target(self, *, in_parts: bool, replaces: bool) -> None:
        self._check_parent()
        if in_parts:
            check_own_directory(self._leftovers, _OWN)
        if not self.is_directory:
            return
        if self.path.is_symlink():
            raise ConfigError(f"{self.path} is a symbolic link to a directory; write to the directory that it leads to")
        if self.path.is_file():
            raise ConfigError(f"{self.path} is a file, and a path without a suffix is written as a directory")
        if self.path.is_dir() and (strangers(self.path, _OWN) if replaces else any(self.path.iterdir())):
            raise ConfigError(f"directory {self.path} is not empty; delete it or write elsewhere")
