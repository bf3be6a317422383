"""Exchange of keys: duplicates over all splits, found partition by partition. The first row of a key stays.

A task writes the keys of its rows grouped by partition. The task of a partition reads that part of every file, in the
order of the splits, and finds the keys that an earlier row had. So memory is that of one partition, and the result is
that of one pass over all rows in order.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.engines.job_directory import JobDirectory
from penstock.pipeline.stages import FirstOfKey, Sink

Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.uint64]


class KeyFile:
    """Keys of the rows of a part, while it is written."""

    def __init__(self, stage: FirstOfKey) -> None:
        self._stage = stage
        self._keys: list[Words] = []
        self._rows: list[npt.NDArray[np.uint64]] = []
        self._at = 0

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
        self._keys.append(np.ascontiguousarray(keys).reshape(-1, width))
        self._rows.append(np.repeat(rows, each))

    def write(self, path: Path, partitions: int) -> dict[str, Any]:
        """Entries (key words, row) grouped by partition; where each partition begins."""
        if not self._keys:
            path.touch()
            return {"starts": [0] * (partitions + 1), "words": 0}
        keys, rows = np.concatenate(self._keys), np.concatenate(self._rows)
        owner = partition_of(keys[:, 0], partitions)
        order = np.argsort(owner, kind="stable")
        entries = np.column_stack([keys[order], rows[order]])
        path.write_bytes(np.ascontiguousarray(entries, "<u8").tobytes())
        counts = np.bincount(owner, minlength=partitions)
        return {"starts": [0, *np.cumsum(counts).tolist()], "words": int(keys.shape[1])}


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


def find_duplicates(directory: JobDirectory, phase: int, partition: int, tasks: int, name: str) -> dict[str, Any]:
    """Rows with a key of this partition that an earlier row had, as row numbers by part."""
    parts: list[npt.NDArray[np.uint64]] = []
    owners: list[npt.NDArray[np.int64]] = []
    for number in range(tasks):
        record = directory.record(f"map-{phase}-{number:06d}")
        starts, words = record["keys"]["starts"], record["keys"]["words"]
        low, high = starts[partition], starts[partition + 1]
        if low == high:
            continue
        with directory.opened(f"map-{phase}-{number:06d}.keys") as path, open(path, "rb") as file:
            file.seek(low * 8 * (words + 1))
            entries = np.fromfile(file, "<u8", (high - low) * (words + 1)).reshape(-1, words + 1)
        parts.append(entries)
        owners.append(np.full(len(entries), number, np.int64))
    found = _later_rows(np.concatenate(parts), np.concatenate(owners)) if parts else np.empty((0, 2), np.int64)
    bounds = np.searchsorted(found[:, 0], np.arange(tasks + 1))
    with directory.created(f"{name}.rows") as path:
        path.write_bytes(bounds.astype("<i8").tobytes() + found[:, 1].astype("<i8").tobytes())
    return {"rows": len(found)}


def _later_rows(entries: npt.NDArray[np.uint64], owners: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
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


def dropped_rows(directory: JobDirectory, phase: int, partitions: int, number: int, rows: int) -> Flags:
    """Flags of the rows of a part that are duplicates, in any partition."""
    gone = np.zeros(rows, np.bool_)
    for partition in range(partitions):
        with directory.opened(f"duplicates-{phase}-{partition:04d}.rows") as path, open(path, "rb") as file:
            tasks_at = np.fromfile(file, "<i8", number + 2)
            low, high = int(tasks_at[number]), int(tasks_at[number + 1])
            if low == high:
                continue
            count = directory.read_json(f"done/duplicates-{phase}-{partition:04d}")
            assert count is not None
            file.seek(path.stat().st_size - 8 * count["rows"] + 8 * low)
            gone[np.fromfile(file, "<i8", high - low)] = True
    return gone
