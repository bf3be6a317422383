"""Rendezvous of ranks: notes in a torch store, or in a directory that all ranks can write to."""

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
"""By path: two objects for one directory share its notes."""


class Rendezvous(Protocol):
    """Notes by name that all ranks see. Every `torch.distributed.Store` is one.

    `get` is only called for keys that `check` has found. `delete_key`, if it exists, keeps the number of notes small.
    """

    def set(self, key: str, value: bytes, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool:
        """True if all keys exist; does not wait."""
        ...


class DirectoryRendezvous:
    """Rendezvous of small files, for ranks without torch.distributed.

    The directory must be new for each start of a job, or ranks would read notes of an earlier start: put the job
    number and the attempt into its name. Notes are atomic, but not durable.
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
        """Delete a note; returns whether it existed."""
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
    """Default store of torch.distributed; it needs no GPU and does not interfere with NCCL."""
    module = sys.modules.get("torch.distributed.distributed_c10d") if running_torch() else None
    if module is None:
        raise ConfigError(
            "no rendezvous: torch.distributed is not initialised; call torch.distributed.init_process_group() first, "
            "or pass rendezvous=DirectoryRendezvous(a shared path)"
        )
    store: Rendezvous = module._get_default_store()
    return store


def meeting(rendezvous: Rendezvous, rank: Rank, name: str) -> tuple[str, int]:
    """Prefix of the keys of a meeting, and the number of earlier meetings of that name of this rank.

    So a name can be used again, and by groups of other sizes (a process may be rank 3 of 4 here, and 1 of 2 there).
    Counted in the process, since processes that share a data rank take part in the same meeting.
    """
    with _turns_guard:
        if isinstance(rendezvous, DirectoryRendezvous):
            counts = _turns_in_directories.setdefault(rendezvous.path.absolute(), {})
        else:
            counts = _turns_of_stores.setdefault(rendezvous, {})
        number = counts.get((rank, name), 0)
        counts[(rank, name)] = number + 1
    return f"penstock/{name}/{rank.world_size}", number


def forget(rendezvous: Rendezvous, key: str) -> None:
    """Delete a note, if the rendezvous can."""
    delete = getattr(rendezvous, "delete_key", None)
    if delete is not None:
        delete(key)


def wait_until(done: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll with growing pauses until a condition holds; False on timeout."""
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
    """Turn a broken connection to the rendezvous into a StalledError."""
    try:
        yield
    except StalledError:
        raise
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]  # torch adds the stack of its own C++
        raise StalledError(
            f"{rank} lost the connection while {doing}: {reason}; the process that serves {rendezvous!r} (usually rank "
            "0) has probably ended: look at its output first"
        ) from error


def _while_busy(act: Callable[[], Result]) -> Result:
    """Retry for a while on Windows, where an open file cannot be replaced."""
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            return act()
        except PermissionError:
            if os.name != "nt" or time.monotonic() > deadline:
                raise
            time.sleep(_FIRST_PAUSE)
