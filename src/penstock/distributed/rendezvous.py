"""Where ranks leave notes for each other: a torch store, or a directory that all of them can write to."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote
from weakref import WeakKeyDictionary

from penstock.distributed.ranks import Rank, running_torch
from penstock.errors import ConfigError, StalledError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike

__all__ = ["DirectoryRendezvous", "Rendezvous", "find_rendezvous"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_BUSY_SECONDS = 5.0

Result = TypeVar("Result")
Turns = dict[tuple[Rank, str], int]

_turns_guard = threading.Lock()
_turns_of_stores: WeakKeyDictionary[Any, Turns] = WeakKeyDictionary()
_turns_in_directories: dict[Path, Turns] = {}
"""By path, not by object: two objects for one directory see the same notes."""


class Rendezvous(Protocol):
    """Notes by name, seen by all ranks. Every `torch.distributed.Store` is one.

    `get` is asked only for what `check` has found. `delete_key`, where there is one, keeps the notes few.
    """

    def set(self, key: str, value: bytes, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there, without waiting."""
        ...


class DirectoryRendezvous:
    """Notes as small files, for ranks without torch.distributed.

    The directory must be new for each start of a job, or ranks would believe notes of the start before: put a job
    number and an attempt into its name. Notes appear whole or not at all, but are not made durable.
    """

    def __init__(self, path: PathLike) -> None:
        self.path = require_local(path, "the directory of a rendezvous")

    def set(self, key: str, value: bytes) -> None:
        target = self._file(key)
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            temporary.write_bytes(value)
            _while_busy(lambda: temporary.replace(target))
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def get(self, key: str) -> bytes:
        return _while_busy(self._file(key).read_bytes)

    def check(self, keys: Sequence[str]) -> bool:
        return all(self._file(key).exists() for key in keys)

    def delete_key(self, key: str) -> bool:
        """Whether it was there."""
        try:
            _while_busy(self._file(key).unlink)
        except FileNotFoundError:
            return False
        return True

    def __repr__(self) -> str:
        return f"DirectoryRendezvous({str(self.path)!r})"

    def _file(self, key: str) -> Path:
        return self.path / quote(key, safe="")


def find_rendezvous() -> Rendezvous:
    """The store that the ranks of torch.distributed met through; it needs no GPU and stays out of NCCL's way."""
    module = sys.modules.get("torch.distributed.distributed_c10d") if running_torch() else None
    if module is None:
        raise ConfigError(
            "ranks have no place to meet: torch.distributed is not initialised here; "
            "call torch.distributed.init_process_group() first, or pass rendezvous=DirectoryRendezvous(a shared path)"
        )
    store: Rendezvous = module._get_default_store()
    return store


def meeting(rendezvous: Rendezvous, rank: Rank, name: str) -> tuple[str, int]:
    """What the notes of this meeting begin with, and how often this rank has met there before.

    So a name can be used again, and by groups of other sizes (a process may be rank 3 of 4 here, and 1 of 2 there).
    Counted in the process, for processes that share a data rank keep step with each other, not behind each other.
    """
    with _turns_guard:
        if isinstance(rendezvous, DirectoryRendezvous):
            counts = _turns_in_directories.setdefault(rendezvous.path.absolute(), {})
        else:
            counts = _turns_of_stores.setdefault(rendezvous, {})
        number = counts.get((rank, name), 0)
        counts[(rank, name)] = number + 1
    return f"penstock/{name}/{rank.world}", number


def forget(rendezvous: Rendezvous, key: str) -> None:
    """Takes a note away, where the place can."""
    delete = getattr(rendezvous, "delete_key", None)
    if delete is not None:
        delete(key)


def wait_until(done: Callable[[], bool], timeout_seconds: float) -> bool:
    """Whether it came true in time; asks less and less often."""
    deadline, pause = time.monotonic() + timeout_seconds, _FIRST_PAUSE
    while not done():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


@contextlib.contextmanager
def reaching(rendezvous: Rendezvous, rank: Rank, doing: str) -> Iterator[None]:
    """Says what a broken connection to the rendezvous means."""
    try:
        yield
    except StalledError:
        raise
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]  # torch adds the stack of its own C++
        raise StalledError(
            f"{rank} could not reach the others while {doing}: {reason}; the process that serves {rendezvous!r} "
            f"(rank 0, as a rule) has probably ended: look at its output first"
        ) from error


def _while_busy(act: Callable[[], Result]) -> Result:
    """On Windows a file that somebody has open cannot be replaced for a moment."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return act()
        except PermissionError:
            if os.name != "nt" or time.monotonic() > deadline:
                raise
            time.sleep(_FIRST_PAUSE)
