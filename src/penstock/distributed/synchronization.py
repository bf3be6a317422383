"""Synchronization of ranks: a barrier, the end of an epoch of unknown length, and one state of all ranks.

Everything goes through a `Rendezvous` (notes in a torch store, or in a directory that all ranks can write to), never
through the collectives of the trainer. Every wait has a timeout, whose error names the missing ranks. Loaders with a
plan need none of this: their ranks agree by arithmetic.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote
from weakref import WeakKeyDictionary

import orjson

from penstock._forks import renewed
from penstock.distributed.ranks import Rank, find_rank, running_torch
from penstock.errors import ConfigError, ResumeError, StalledError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.states import CHECKSUM, check_state, is_state, with_checksum

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05
_BUSY_SECONDS = 5.0

Result = TypeVar("Result")
Turns = dict[tuple[Rank, str], int]

_turns_guard = renewed(threading.Lock())
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
            "or pass rendezvous=penstock.distributed.DirectoryRendezvous(a shared path)"
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


_LINGER_SECONDS = 5.0


def barrier(rendezvous: Rendezvous, rank: Rank, name: str, timeout_seconds: float = 300.0) -> None:
    """Wait for all ranks; after the timeout, the error names those that did not arrive.

    A name may be used again, as long as every rank uses it equally often.
    """
    _meet(rendezvous, rank, f"barrier {name}", b"", lambda notes: b"", timeout_seconds)


def gather_states(
    state: Mapping[str, Any],
    *,
    rank: Rank | None = None,
    group: Any = None,
    rendezvous: Rendezvous | None = None,
    timeout_seconds: float = 300.0,
) -> dict[str, Any]:
    """States of all ranks as one (see `merge_states`), equal on every rank. All ranks have to call it.

    Rank 0 merges, so that a thousand ranks exchange two thousand notes and not a million. An error of rank 0 is raised
    on every rank.
    """
    here = find_rank(group=group) if rank is None else rank
    if here.world_size == 1:
        return merge_states([state])

    def merged(notes: list[bytes]) -> bytes:
        try:
            return b"+" + orjson.dumps(merge_states([orjson.loads(note) for note in notes]))
        except ResumeError as error:
            return b"-" + str(error).encode()

    try:
        note = orjson.dumps(state, option=orjson.OPT_NON_STR_KEYS)
    except TypeError as error:
        raise ResumeError(f"the state of {here} is not plain JSON: {error}") from None
    place = find_rendezvous() if rendezvous is None else rendezvous
    answer = _meet(place, here, "states", note, merged, timeout_seconds)
    if answer[:1] == b"-":
        raise ResumeError(answer[1:].decode())
    state = orjson.loads(answer[1:])
    return dict(state)


def merge_states(states: Sequence[Mapping[str, Any]], *, streams: int | None = None) -> dict[str, Any]:
    """One state from those of several ranks: the union of the cursors under "streams", at any depth; the rest once.

    The rest (version, plan, epoch, step) has to be equal everywhere, and so do the cursors of a stream that several
    ranks read. With `streams`, every "streams" must have that many cursors.
    """
    if not states:
        raise ResumeError("no states to merge; pass the state of every rank")
    return _merged(states, "", streams)


class EndOfEpoch:
    """End of an epoch when each rank knows only the end of its own data: the epoch is as long as the longest rank.

    For each step, a rank calls `passed(step)` if it has data, or once `ended(step)` if it has none from there on.
    `more(step)` then returns whether any rank has data for the step, so that ranks without data continue with blanks
    and all stop together. Only ranks that ended wait, for ranks that have not reported the step, with a timeout.

    `passed` posts a small note every time (microseconds through a torch store on one machine, 0.3 ms as a file): a rank
    that ended may be waiting for that step while the trainer holds the others in a collective, so no note may be
    delayed. A rank that knows its data further ahead calls `passed(step + 100)`, and the steps up to there are free.
    An object serves one pass over the data; every rank makes one for each pass.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: Rank, epoch: int, timeout_seconds: float = 300.0, *, name: str = "epoch"
    ) -> None:
        self.rank, self.epoch, self.timeout_seconds = rank, epoch, timeout_seconds
        self._rendezvous = rendezvous
        self._name = f"{name} {epoch}"
        self._keys = "{}/{}".format(*meeting(rendezvous, rank, f"end of {self._name}"))
        self._reach = 0
        """Number of steps that this rank has reported."""
        self._own_end: int | None = None
        self._heard = dict.fromkeys((other for other in range(rank.world_size) if other != rank.rank), 0)
        """Number of steps that the other ranks have reported, for those that may have more."""
        self._longest = 0
        self._left = False

    @property
    def steps(self) -> int | None:
        """Number of steps of the epoch, once it is known."""
        return self._longest if self._own_end is not None and not self._heard else None

    def passed(self, step: int) -> None:
        """Report that this rank has data for this step and all before it."""
        if self._own_end is not None:
            raise ConfigError(f"{self.rank} passed step {step} after its data ended at step {self._own_end}")
        if step >= self._reach:
            self._reach = step + 1
            self._post(b"passed")

    def ended(self, step: int) -> None:
        """Report that this rank has no data for this step or any after it."""
        if self._own_end == step:
            return
        if self._own_end is not None or step < self._reach:
            before = f"passed step {self._reach - 1}" if self._own_end is None else f"ended at step {self._own_end}"
            raise ConfigError(f"{self.rank} ended at step {step} after it {before}")
        self._own_end = self._reach = step
        self._longest = max(self._longest, step)
        self._post(b"ended")

    def more(self, step: int) -> bool:
        """Return whether any rank has data for this step; waits for the others if this one has none."""
        if step < max(self._reach, self._longest):
            return True
        if self._own_end is None:
            raise ConfigError(f"{self.rank} has neither passed step {step} nor ended before it")
        with reaching(self._rendezvous, self.rank, f"asking who has data for step {step} of {self._name}"):
            if not wait_until(lambda: self._settled(step), self.timeout_seconds):
                raise StalledError(self._complaint(step))
            if step < self._longest:
                return True
            self._leave()
        return False

    def _settled(self, step: int) -> bool:
        """Read the notes of ranks that may have more, the most advanced first, until one has, or none is left."""
        for other in sorted(self._heard, key=lambda other: -self._heard[other]):
            key = f"{self._keys}/{other}"
            if self._rendezvous.check([key]):
                word, number = self._rendezvous.get(key).split()
                self._heard[other] = int(number)
                self._longest = max(self._longest, int(number))
                if word == b"ended":
                    del self._heard[other]
            if step < self._longest:
                return True
        return not self._heard

    def _post(self, word: bytes) -> None:
        if self.rank.world_size > 1:
            with reaching(self._rendezvous, self.rank, f"reporting its progress in {self._name}"):
                self._rendezvous.set(f"{self._keys}/{self.rank.rank}", word + b" %d" % self._reach)

    def _leave(self) -> None:
        if not self._left and self.rank.world_size > 1:
            self._left = True
            _leave(self._rendezvous, self.rank, f"{self._keys}/left")

    def _complaint(self, step: int) -> str:
        silent = sorted(self._heard)
        last = (f"rank {other}: step {self._heard[other] - 1}" for other in silent if self._heard[other])
        heard = ", ".join(last)
        known = f"last reports: {heard}" if heard else "no reports so far"
        return (
            f"{self.rank} waited {self.timeout_seconds:g} s for {_ranks(silent)} to report step {step} of {self._name} "
            f"({known}); look at their output: they hang or have ended"
        )


def _meet(
    rendezvous: Rendezvous,
    rank: Rank,
    name: str,
    note: bytes,
    answer: Callable[[list[bytes]], bytes],
    timeout_seconds: float,
) -> bytes:
    """Collect a note of every rank; rank 0 makes an answer of all notes, which every rank gets."""
    if rank.world_size == 1:
        return answer([note])
    base, number = meeting(rendezvous, rank, name)
    notes = [f"{base}/{number}/{other}" for other in range(rank.world_size)]
    answered = f"{base}/{number}/answer"
    with reaching(rendezvous, rank, f"waiting at {name!r}"):
        rendezvous.set(notes[rank.rank], note)
        if not wait_until(
            # Rank 0 may find the answer too, from another process that shares its data rank.
            lambda: rendezvous.check([answered]) or (rank.rank == 0 and rendezvous.check(notes)),
            timeout_seconds,
        ):
            missing = [other for other, key in enumerate(notes) if not rendezvous.check([key])]
            late = f"{_ranks(missing)}, which did not arrive" if missing else "the answer of rank 0, which arrived"
            raise StalledError(
                f"{rank} waited {timeout_seconds:g} s at {name!r} for {late}; look at the output of these ranks: they "
                "hang or have ended"
            )
        if rank.rank == 0 and not rendezvous.check([answered]):
            rendezvous.set(answered, answer([rendezvous.get(key) for key in notes]))
        result = rendezvous.get(answered)
        _leave(rendezvous, rank, f"{base}/{number}/left")
        _tidy(rendezvous, rank, base, number)
    return result


def _leave(rendezvous: Rendezvous, rank: Rank, base: str) -> None:
    """Leave a meeting, rank 0 last if the others leave soon: its process may serve the store that they still read."""
    others = [f"{base}/{other}" for other in range(1, rank.world_size)]
    if rank.rank:
        rendezvous.set(others[rank.rank - 1], b"")
    else:
        wait_until(lambda: rendezvous.check(others), _LINGER_SECONDS)


def _tidy(rendezvous: Rendezvous, rank: Rank, base: str, number: int) -> None:
    """Delete what no rank needs any more: own notes of two meetings ago, and old answers."""
    forget(rendezvous, f"{base}/{number - 2}/{rank.rank}")
    if rank.rank:
        forget(rendezvous, f"{base}/{number - 2}/left/{rank.rank}")
    else:
        forget(rendezvous, f"{base}/{number - 16}/answer")


def _merged(states: Sequence[Mapping[str, Any]], path: str, streams: int | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    checked = all(map(is_state, states))
    if checked:
        for number, state in enumerate(states):
            check_state(state, f"number {number} of the states to merge")
        states = [{key: value for key, value in state.items() if key != CHECKSUM} for state in states]
    for key in dict.fromkeys(key for state in states for key in state):
        where = f"{path}.{key}" if path else str(key)
        for number, state in enumerate(states):
            if key not in state:
                raise ResumeError(f"the states cannot be merged: number {number} has no {where!r}, and others have")
        values = [state[key] for state in states]
        if all(isinstance(value, Mapping) for value in values):
            result[key] = _cursors(values, where, streams) if key == "streams" else _merged(values, where, streams)
            continue
        for number, value in enumerate(values):
            if value != values[0]:
                raise ResumeError(
                    f"the states cannot be merged: {where!r} is {values[0]!r} in number 0 and {value!r} in number "
                    f"{number}; take them from all ranks at the same step of the same run"
                )
        result[key] = values[0]
    return with_checksum(result) if checked else result


def _cursors(parts: Sequence[Mapping[Any, Any]], where: str, streams: int | None) -> dict[str, Any]:
    """Cursors of streams by number, as text for JSON."""
    cursors: dict[int, tuple[int, Any]] = {}
    for number, part in enumerate(parts):
        for stream, cursor in part.items():
            first, known = cursors.setdefault(int(stream), (number, cursor))
            if known != cursor:
                raise ResumeError(
                    f"the states cannot be merged: stream {stream} of {where!r} is at {known!r} in number {first} and "
                    f"at {cursor!r} in number {number}; take them from all ranks at the same step of the same run"
                )
    missing = sorted(set(range(streams or 0)) - set(cursors))
    if missing:
        raise ResumeError(
            f"{where!r} lacks stream {missing[0]} ({len(missing)} of {streams} are in no state of {len(parts)}); "
            f"pass the state of every rank"
        )
    return {str(stream): cursors[stream][1] for stream in sorted(cursors)}


def _ranks(numbers: Iterable[int]) -> str:
    """Text `rank 3`, or `ranks 1, 2 and 5`; at most the first 15."""
    shown = [str(number) for number in numbers]
    if len(shown) > 16:
        shown = [*shown[:15], f"{len(shown) - 15} more"]
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
