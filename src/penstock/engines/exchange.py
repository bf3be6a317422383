"""Exchange of keys: duplicates over all splits, found partition by partition. The first row of a key stays.

A task writes the keys of its rows grouped by partition. The task of a partition reads that part of every file, in the
order of the splits, and finds the keys that an earlier row had. So memory is that of one partition, and the result is
that of one pass over all rows in order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.engines.job_directory import JobDirectory
from penstock.engines.records import task_name
from penstock.pipeline.prefetch import map_ahead
from penstock.pipeline.stages import FirstOfKey, Sink

Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]
_WORK = 8
"""Copies of its entries that sorting a partition makes, with some room."""


class KeyFile:
    """Keys of the rows of a part, while it is written: entries (words of a key, row) grouped by partition.

    At most `most_bytes` of them are in memory; the others wait in a temporary file.
    """

    def __init__(self, stage: FirstOfKey, partitions: int, most_bytes: int) -> None:
        self._stage, self._partitions, self._most = stage, partitions, max(1 << 20, most_bytes)
        self._entries: list[Words] = []
        self._held = self._at = 0
        self._spilled: BinaryIO | None = None
        self._chunks: list[tuple[int, npt.NDArray[np.int64], int]] = []
        """Of each chunk in the temporary file: its first byte, where each partition begins, and words of an entry."""

    def beside(self, sink: Sink) -> Sink:
        """A sink that takes the keys of the rows, and hands the rows on."""
        return _WithKeys(self, sink)

    def add(self, batch: pa.RecordBatch) -> None:
        keys, valid = self._stage.row_keys(batch)
        rows = np.arange(self._at, self._at + batch.num_rows, dtype=np.uint64)
        self._at += batch.num_rows
        if valid is not None:
            keys, rows = keys[valid], rows[valid]
        each, width = keys.shape[1:]
        words = np.ascontiguousarray(keys).reshape(-1, width)
        self._entries.append(np.column_stack([words, np.repeat(rows, each)]).astype("<u8", copy=False))
        self._held += self._entries[-1].nbytes
        if self._held > self._most // 4:  # sorting copies them
            self._spill()

    def write(self, path: Path) -> list[int] | None:
        """Write all entries; where each partition begins, and at the end the words of an entry; None without keys."""
        try:
            if not self._chunks and not self._entries:
                return None
            if not self._chunks:
                entries, starts = self._grouped()
                path.write_bytes(entries.data)
                return [*starts.tolist(), entries.shape[1]]
            self._spill()
            with open(path, "wb") as target:
                return self._merge(target)
        finally:
            if self._spilled is not None:
                self._spilled.close()

    def _grouped(self) -> tuple[Words, npt.NDArray[np.int64]]:
        entries = self._entries[0] if len(self._entries) == 1 else np.concatenate(self._entries)
        self._entries, self._held = [], 0
        owner = partition_of(entries[:, 0], self._partitions)
        starts = np.zeros(self._partitions + 1, np.int64)
        np.cumsum(np.bincount(owner, minlength=self._partitions), out=starts[1:])
        return np.ascontiguousarray(entries[np.argsort(owner, kind="stable")]), starts

    def _spill(self) -> None:
        if not self._entries:
            return
        if self._spilled is None:
            self._spilled = tempfile.TemporaryFile(prefix="penstock-keys-")  # noqa: SIM115 - closed by `write`
        entries, starts = self._grouped()
        self._chunks.append((self._spilled.tell(), starts, entries.shape[1]))
        self._spilled.write(entries.data)

    def _merge(self, target: BinaryIO) -> list[int]:
        assert self._spilled is not None
        ends, words = [0], self._chunks[0][2]
        for partition in range(self._partitions):
            count = 0
            for first, starts, _ in self._chunks:
                low, high = int(starts[partition]), int(starts[partition + 1])
                self._spilled.seek(first + low * 8 * words)
                target.write(self._spilled.read((high - low) * 8 * words))
                count += high - low
            ends.append(ends[-1] + count)
        return [*ends, words]


class _WithKeys(Sink):
    def __init__(self, keys: KeyFile, sink: Sink) -> None:
        self._keys, self._sink = keys, sink

    def consume(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._keys.add(batch)
        self._sink.consume(batch)

    def flush(self) -> None:
        self._sink.flush()

    def __repr__(self) -> str:
        return repr(self._sink)


def partition_of(words: Words, partitions: int) -> npt.NDArray[np.int64]:
    """Partition of keys by their first word, which is spread evenly."""
    return ((words >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)).astype(np.int64)


def write_index(
    directory: JobDirectory, phase: int, tasks: int, partitions: int, starts: dict[int, npt.NDArray[np.int64]]
) -> None:
    """Index of the partitions in the files of all tasks, in one file: a task of a partition reads no other."""
    index = np.zeros((tasks, partitions + 2), "<i8")
    for number, row in starts.items():
        index[number] = row
    with directory.created(f"keys-{phase}.index") as path:
        path.write_bytes(index.data)


def find_duplicates(
    directory: JobDirectory, phase: int, partition: int, partitions: int, name: str, budget_bytes: int
) -> dict[str, Any]:
    """Rows with a key of this partition that an earlier row had, as row numbers by part."""
    index = np.frombuffer(directory.read_part(f"keys-{phase}.index"), "<i8").reshape(-1, partitions + 2)
    low, high, words = index[:, partition], index[:, partition + 1], index[:, -1]
    owners = np.flatnonzero(high > low)
    total = int(((high - low) * words).sum()) * 8
    passes = 1 + _WORK * total // budget_bytes
    found = [_in_pass(directory, phase, owners, low, high, words, (one, passes)) for one in range(passes)]
    rows = np.unique(np.concatenate(found), axis=0) if found else np.empty((0, 2), np.int64)
    bounds = np.searchsorted(rows[:, 0], np.arange(len(index) + 1))
    with directory.created(f"{name}.rows") as path:
        path.write_bytes(bounds.astype("<i8").tobytes() + rows[:, 1].astype("<i8").tobytes())
    return {"rows": len(rows)}


def _in_pass(
    directory: JobDirectory,
    phase: int,
    owners: npt.NDArray[np.int64],
    low: npt.NDArray[np.int64],
    high: npt.NDArray[np.int64],
    words: npt.NDArray[np.int64],
    part: tuple[int, int],
) -> npt.NDArray[np.int64]:
    """Duplicates among one of several equal shares of the keys of a partition."""

    def read(number: int) -> Words:
        width = 8 * int(words[number])
        data = directory.read_part(f"{task_name(phase, number)}.keys", low[number] * width, high[number] * width)
        entries: Words = np.frombuffer(data, "<u8").reshape(-1, int(words[number]))
        one, passes = part
        if passes == 1:
            return entries
        # By other bits than those that chose the partition.
        mine: Words = entries[partition_of(entries[:, 0] << np.uint64(32), passes) == one]
        return mine

    parts: list[Words] = []
    numbers: list[npt.NDArray[np.int64]] = []
    for number, entries in zip(owners.tolist(), _read_all(directory, read, owners.tolist())):
        parts.append(entries)
        numbers.append(np.full(len(entries), number, np.int64))
    if not parts:
        return np.empty((0, 2), np.int64)
    return _later_rows(np.concatenate(parts), np.concatenate(numbers))


def _read_all(directory: JobDirectory, read: Any, numbers: Sequence[int]) -> Iterator[Words]:
    """Results of all reads: at once from a bucket, one after the other from files, where threads would cost more."""
    return map(read, numbers) if directory.is_local else map_ahead(read, numbers)


def _later_rows(entries: Words, owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(part, row) of every entry whose key an earlier row had, sorted; each once."""
    width = entries.shape[1] - 1
    rows = entries[:, width].astype(np.int64)
    order = np.lexsort((rows, owners, *(entries[:, word] for word in range(width))))
    keys, part, row = entries[order, :width], owners[order], rows[order]
    fresh = np.ones(len(keys), np.bool_)
    fresh[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    first = np.maximum.accumulate(np.where(fresh, np.arange(len(keys)), 0))
    later = (part != part[first]) | (row != row[first])  # two equal keys of one row are no copy
    return np.unique(np.column_stack([part[later], row[later]]), axis=0)


def dropped_rows(directory: JobDirectory, phase: int, partitions: int, number: int, tasks: int, rows: int) -> Flags:
    """Flags of the rows of a part that are duplicates, in any partition."""
    gone = np.zeros(rows, np.bool_)

    def read(partition: int) -> npt.NDArray[np.int64]:
        name = f"duplicates-{phase}-{partition:04d}.rows"
        low, high = np.frombuffer(directory.read_part(name, 8 * number, 8 * (number + 2)), "<i8").tolist()
        if low == high:
            return np.empty(0, np.int64)
        first = 8 * (tasks + 1)
        return np.frombuffer(directory.read_part(name, first + 8 * low, first + 8 * high), "<i8")

    for found in _read_all(directory, read, range(partitions)):
        gone[found.astype(np.int64)] = True
    return gone
