"""Set of the keys seen so far: recent ones in memory, older ones on disk, and a log to rebuild it from."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.arrays.hashes import Words
from penstock.corpus.dedup.kernel_calls import KERNELS, Flags
from penstock.corpus.dedup.key_table import KeyTable, sort_keys
from penstock.errors import ConfigError, ResumeError
from penstock.files.atomic import open_own
from penstock.files.locks import FileLock
from penstock.files.machine_code import Functions
from penstock.files.states import StateFormat
from penstock.pipeline.chain import BrokenStageError
from penstock.pipeline.stages import State

_BLOCK = 256  # keys between two entries of a run's index; a probe reads this many
_READ = 256  # blocks that are read before the keys are looked for in them
_ASK = 1 << 14  # keys that are looked for at a time
_FAN = 4  # as many runs of about one size become a single one
_PART = 1 << 16  # keys in memory while runs are merged


class KeyRuns:
    """A set that takes many keys at a time, none of which it has already.

    Memory: the filter, which never grows, and 8 bytes for every 256 keys. At 10 bits of the filter for each key some 3
    in 100 questions about an unknown key go to disk; with fewer bits, more do.
    """

    def __init__(self, width: int, filter_bytes: int, directory: Path | None) -> None:
        self._width, self._directory = width, directory
        self._filter = _Filter(filter_bytes)
        self._levels: list[list[_Run]] = []

    @property
    def nbytes(self) -> int:
        return self._filter.nbytes + sum(run.index.nbytes for run in self._runs())

    def fit(self, filter_bytes: int) -> None:
        """From now on have a filter of that size, which is made by reading all keys once."""
        if (fitting := _Filter(filter_bytes)).nbytes != self._filter.nbytes:
            self._filter = fitting
            for run in self._runs():
                for start in range(0, run.keys, _PART):
                    self._filter.add(run.read(start, _PART)[:, 0])

    def add(self, pieces: Iterable[Words]) -> None:
        """Keep keys that come in order of their first word."""
        self._put(0, _Run(self._width, self._noted(pieces), self._directory))

    def has(self, keys: Words) -> Flags:
        """Flags of the keys (a row of words each) that are here."""
        found = np.zeros(len(keys), np.bool_)
        for start in range(0, len(keys), _ASK):
            part = keys[start : start + _ASK]
            candidates = np.flatnonzero(self._filter.may_have(part[:, 0]))
            candidates = candidates[np.argsort(part[candidates, 0])]
            for run in self._runs():
                if not len(candidates):
                    break
                here = run.has(part[candidates])
                found[start + candidates[here]] = True
                candidates = candidates[~here]
        return found

    def _runs(self) -> Iterator[_Run]:
        for level in reversed(self._levels):
            yield from level

    def _noted(self, pieces: Iterable[Words]) -> Iterator[Words]:
        for piece in pieces:
            self._filter.add(piece[:, 0])
            yield piece

    def _put(self, number: int, run: _Run) -> None:
        if number == len(self._levels):
            self._levels.append([])
        level = self._levels[number]
        level.append(run)
        if len(level) == _FAN:
            merged = _Run(self._width, _merged(level), self._directory)
            level.clear()
            self._put(number + 1, merged)


class _Run:
    """A file of keys, sorted by their first word."""

    def __init__(self, width: int, pieces: Iterable[Words], directory: Path | None) -> None:
        self._width, self.keys = width, 0
        with tempfile.TemporaryFile(dir=directory, prefix="penstock-dedup-") as file:
            self._file = os.dup(file.fileno())
            weakref.finalize(self, os.close, self._file)
            index = []
            for piece in pieces:
                index.append(piece[-self.keys % _BLOCK :: _BLOCK, 0].copy())  # a view would keep the piece
                self.keys += len(piece)
                file.write(np.ascontiguousarray(piece).data)
        self.index: Words = np.concatenate(index) if index else np.zeros(0, np.uint64)
        """The first word of every 256th key."""

    def has(self, keys: Words) -> Flags:
        """Flags of the keys that are here; they must be sorted by their first word."""
        found = np.zeros(len(keys), np.bool_)
        # Usually one block: the last that begins before the key. Two, if a block begins with the very first word of it.
        lasts = np.searchsorted(self.index, keys[:, 0], side="right") - 1
        firsts = np.maximum(np.searchsorted(self.index, keys[:, 0], side="left") - 1, 0)
        many = lasts - firsts + 1  # 0 for a key before the first block
        blocks = np.unique(np.arange(many.sum()) - np.repeat(np.cumsum(many) - many - firsts, many))
        for start in range(0, len(blocks), _READ):
            chunk = blocks[start : start + _READ].tolist()
            candidates = slice(np.searchsorted(lasts, chunk[0]), np.searchsorted(firsts, chunk[-1], side="right"))
            # Whole blocks in their order are one sorted array.
            found[candidates] |= _within(self._blocks(chunk), keys[candidates])
        return found

    def read(self, start: int, count: int) -> Words:
        """Keys from a place on, as many as there are."""
        size = 8 * self._width
        return self._as_keys(_read(self._file, max(0, min(count, self.keys - start)) * size, start * size))

    def _blocks(self, numbers: list[int]) -> Words:
        size = 8 * self._width * _BLOCK
        end = self.keys * 8 * self._width
        parts = [_read(self._file, min(size, end - number * size), number * size) for number in numbers]
        return self._as_keys(b"".join(parts))

    def _as_keys(self, data: bytes) -> Words:
        return np.frombuffer(data, np.uint64).reshape(-1, self._width)

    def between(self, low: int, high: int) -> Words:
        """The keys whose first word is from `low` to `high`, both included."""
        first = max(0, int(np.searchsorted(self.index, np.uint64(low), side="left")) - 1) * _BLOCK
        last = int(np.searchsorted(self.index, np.uint64(high), side="right")) * _BLOCK
        keys = self.read(first, last - first)
        return keys[(keys[:, 0] >= np.uint64(low)) & (keys[:, 0] <= np.uint64(high))]


class _Filter:
    """A Bloom filter whose bits for one key lie in one word: a question costs one access to memory."""

    def __init__(self, nbytes: int) -> None:
        self._words: Words = np.zeros(max(64, nbytes // 8), np.uint64)

    @property
    def nbytes(self) -> int:
        return self._words.nbytes

    def add(self, keys: Words) -> None:
        """Note keys, which must be sorted: then those of one word are neighbours."""
        at = self._places(keys)
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        if len(starts):
            self._words[at[starts]] |= np.bitwise_or.reduceat(_bits(keys), starts)

    def may_have(self, keys: Words) -> Flags:
        bits = _bits(keys)
        present: Flags = self._words[self._places(keys)] & bits == bits
        return present

    def _places(self, keys: Words) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Rising with the keys, and spread as evenly as they are."""
        return ((keys >> np.uint64(32)) * np.uint64(len(self._words)) >> np.uint64(32)).astype(np.int64)


def _read(file: int, size: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        data = os.pread(file, size, offset)
    else:  # Windows
        os.lseek(file, offset, os.SEEK_SET)
        data = os.read(file, size)
    if len(data) != size:
        raise OSError(f"a temporary file gave {len(data)} bytes from byte {offset} on, expected {size}")
    return data


def _bits(keys: Words) -> Words:
    bits = np.zeros(len(keys), np.uint64)
    for place in (0, 6, 12, 18):
        bits |= np.uint64(1) << (keys >> np.uint64(place) & np.uint64(63))
    return bits


def _merged(runs: list[_Run]) -> Iterator[Words]:
    """All keys of some runs in order. Keys are spread evenly, so equal stretches of numbers hold about as many."""
    parts = max(1, sum(run.keys for run in runs) // _PART)
    cuts = [part * (1 << 64) // parts for part in range(parts + 1)]
    for low, high in pairwise(cuts):
        yield sort_keys(np.concatenate([run.between(low, high - 1) for run in runs]))


def _within(block: Words, keys: Words) -> Flags:
    """Flags of the keys that are in a sorted block."""
    at = np.searchsorted(block[:, 0], keys[:, 0], side="left")
    stop = np.searchsorted(block[:, 0], keys[:, 0], side="right")
    found = np.zeros(len(keys), np.bool_)
    while (left := np.flatnonzero(~found & (at < stop))).size:
        found[left] = (block[at[left]] == keys[left]).all(axis=1)
        at[left] += 1
    return found


DEFAULT_BYTES = 64 << 20
_STATE = StateFormat("keys seen", "a deduplication")
_AT_ONCE = 1 << 16
_LOAD_KEYS, _COMPILE_KEYS = 1 << 16, 1 << 19
_LOAD_LIMIT = 40 << 20
"""Bytes for keys in a memory budget of 256 MiB, from which machine code is loaded, and from twice as many compiled."""


class SeenKeys:
    """A set of keys that only grows, holds at most `nbytes` in memory, and can go back to an earlier state.

    At first half of the memory is for the table, and a quarter for the moment in which the table grows. From when keys
    are moved to disk, a quarter is for the table and half for the filter of what is there. One batch with more keys
    than the table takes makes the table larger all the same.

    With a `log`, a file, every key is appended to it, in the order in which keys came. A state is the length of
    the log and a checksum up to there, so it is always small, and any longer log can restore it:
    what a killed process wrote after its last checkpoint is cut off. Without one, only the last call can be undone.

    A log has one writer. Another process is refused while this one runs; within the process a later set takes the
    log over, as a stage that replaces an abandoned one does, and the earlier set raises errors from then on.
    """

    def __init__(
        self, width: int, log: Path | None = None, nbytes: int = DEFAULT_BYTES, name: str = "deduplication"
    ) -> None:
        self._width, self._log, self._limit, self._name = width, log, nbytes, name
        self._lock: FileLock | None = None
        if log is not None:
            self._lock = FileLock(log.with_name(f"{log.name}.lock"))
            # A stage is not notified of the end of its run; this is the latest time at which the log is needed.
            weakref.finalize(self, _release, self._lock, os.getpid())
        self._clear()
        self._claimed = False

    def forget(self) -> None:
        """Nothing was seen, and others may write the log. It stays on disk until the next key comes, since a state may
        still be loaded."""
        self._clear()
        if self._lock is not None:
            self._lock.release()
        self._claimed = False

    def claim(self) -> None:
        """Be the one that writes the log, from now on; a second call makes sure of it."""
        if self._log is None or self._lock is None or self._lock.held:
            return
        if self._claimed:
            raise BrokenStageError(
                f"{self._log} is being written by another {self._name} of this process, in this pipeline or in a later "
                "one; give each its own directory="
            )
        self._log.parent.mkdir(parents=True, exist_ok=True)
        if not self._lock.acquire(take_over=True):
            raise ConfigError(
                f"{self._log} is being written by {self._lock.owner()}; wait for that run to end, or pass another "
                "directory="
            )
        self._claimed = True

    def _clear(self) -> None:
        self._table = KeyTable(self._width)
        self._runs: KeyRuns | None = None
        self._count = 0
        self._digest: Any = xxhash.xxh3_64()
        self._last: tuple[Words, Any] | None = None
        self._begun = False  # whether the log on disk is ours

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + (self._runs.nbytes if self._runs is not None else 0)

    @property
    def spilled(self) -> bool:
        """True if some of the keys are on disk only."""
        return self._runs is not None

    def fit(self, nbytes: int) -> None:
        """From now on hold at most `nbytes`."""
        self._limit = nbytes
        if self._table.nbytes > self._table_bytes:
            self._spill()
            self._table = KeyTable(self._width)
        if self._runs is not None:
            self._runs.fit(nbytes // 2)

    def add(self, keys: Words) -> Flags:
        """Flags of the rows with a key seen before, in an earlier call or an earlier row; adds all keys.

        `keys` has three axes: rows, keys of a row, words of a key.
        """
        self._table.kernels = self._kernels() if keys.shape[1] == 1 else None
        self._make_room(keys.shape[0] * keys.shape[1])
        known = None
        if self._runs is not None:
            known = self._runs.has(keys.reshape(-1, self._width)).reshape(keys.shape[:2])
        duplicate, fresh = self._table.add_rows(np.ascontiguousarray(keys), known)
        before = self._digest.copy()
        try:
            self._append(fresh)
        except BaseException:
            self._table.remove(fresh)  # as if the call had not been
            raise
        self._digest.update(fresh.data)
        self._count += len(fresh)
        self._last = (fresh, before)
        return duplicate

    def state_dict(self) -> State:
        return _STATE.write({"keys": self._count, "digest": self._digest.hexdigest()})

    def load_state_dict(self, state: State) -> None:
        """Go back, or in a new process forward, to where the state was taken."""
        state = _STATE.read(state)
        count, digest = state["keys"], state["digest"]
        if (count, digest) == (self._count, self._digest.hexdigest()):
            return
        if self._last is not None:
            fresh, before = self._last
            if (count, digest) == (self._count - len(fresh), before.hexdigest()):
                self._table.remove(fresh)
                self._count, self._digest, self._last = count, before, None
                return
        self._clear()
        if count:
            self._rebuild(count, digest)

    def sync(self) -> None:
        """Have the log survive a power failure too; a killed process loses nothing anyway."""
        if self._log is not None and self._begun:
            self.claim()
            with open(self._log, "rb+") as log:
                os.fsync(log.fileno())

    @property
    def _table_bytes(self) -> int:
        return self._limit // (2 if self._runs is None else 4)

    def _make_room(self, keys: int) -> None:
        if self._table.stored + keys > self._table.most_keys(self._table_bytes):
            self._spill()
        self._table.grow_for(self._table.stored + keys)

    def _kernels(self) -> Functions | None:
        """Machine code for the table, once there are many keys, if there is memory for what loads or compiles it."""
        if self._count < _LOAD_KEYS or self._limit < _LOAD_LIMIT:
            return KERNELS.loaded
        return KERNELS.functions(compile_missing=self._count >= _COMPILE_KEYS and self._limit >= 2 * _LOAD_LIMIT)

    def _spill(self) -> None:
        if not self._table.stored:
            return
        if self._runs is None:
            self._runs = KeyRuns(self._width, self._limit // 2, self._log.parent if self._log is not None else None)
        self._runs.add(self._table.in_order())
        if self._table.nbytes <= self._table_bytes:
            self._table.clear()
        else:
            self._table = KeyTable(self._width)
        self._last = None

    def _append(self, keys: Words) -> None:
        if self._log is None or not len(keys):
            return
        self.claim()
        handle = open_own(self._log, os.O_RDWR if self._begun else os.O_RDWR | os.O_CREAT)
        with os.fdopen(handle, "rb+", buffering=0) as log:
            # After our end, the file may hold keys that were undone or written by a killed run.
            log.truncate(self._count * 8 * self._width)
            log.seek(0, os.SEEK_END)
            rest = memoryview(keys.tobytes())
            while rest:
                rest = rest[log.write(rest) :]
        self._begun = True

    def _rebuild(self, count: int, digest: str) -> None:
        if self._log is None:
            raise ResumeError(
                f"the state needs {count} keys that were seen before it, and they were in the memory of that run; "
                "pass directory=... to keep them on disk, and start again"
            )
        path, size = self._log, 8 * self._width
        there = path.stat().st_size // size if path.exists() else 0
        if there < count:
            raise ResumeError(f"the state needs {count} keys from {path}, which has {there}; start again without it")
        self.claim()
        with open(path, "rb") as log:
            while self._count < count:
                data = log.read(min(_AT_ONCE, count - self._count) * size)
                keys = np.frombuffer(data, np.uint64).reshape(-1, self._width)
                self._make_room(len(keys))
                self._table.add_rows(keys[:, None], None)
                self._digest.update(data)
                self._count += len(keys)
        if self._digest.hexdigest() != digest:
            self._clear()
            raise ResumeError(
                f"{path} is damaged, or was written by another run than the state; start again without it"
            )
        self._begun = True


def _release(lock: FileLock, process: int) -> None:
    if os.getpid() == process:  # a fork has the file open as well, and must not remove it
        lock.release()
