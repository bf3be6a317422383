"""Shards of a store written by tasks: where one begins follows from the bytes of all rows before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.executor import Task
from penstock.engines.job_directory import JobDirectory
from penstock.engines.parts import part_batches, row_ranges, schema_of
from penstock.engines.records import PhaseRecords
from penstock.store.shard_writer import Pieces, ShardWriter, plain_batch, plain_schema


class ShardCuts:
    """Row numbers at which shards begin, found as `StoreWriter` cuts them, from the bytes of rows alone."""

    def __init__(self, piece_bytes: int, shard_bytes: int) -> None:
        self._piece, self._shard = piece_bytes, shard_bytes
        self._row = 0
        self._piece_start, self._piece_filled = 0, 0
        self._shard_size = 0

    def add(self, sizes: npt.NDArray[np.int64]) -> Iterator[int]:
        """First rows of the shards that begin among these rows; never 0."""
        reach = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=reach[1:])
        start = 0
        while start < len(sizes):
            stop = int(np.searchsorted(reach, reach[start] + self._piece - self._piece_filled, side="right")) - 1
            if stop >= len(sizes):
                break
            if stop == start and self._row + start == self._piece_start:
                stop += 1  # a row larger than a piece is one by itself
            size = self._piece_filled + int(reach[stop] - reach[start])
            yield from self._end_piece(size)
            start = stop
            self._piece_start, self._piece_filled = self._row + stop, 0
        self._piece_filled += int(reach[-1] - reach[start])
        self._row += len(sizes)

    def finish(self) -> Iterator[int]:
        if self._piece_start < self._row:
            yield from self._end_piece(self._piece_filled)

    def _end_piece(self, size: int) -> Iterator[int]:
        if self._shard_size and self._shard_size + size > self._shard:
            yield self._piece_start
            self._shard_size = 0
        self._shard_size += size


def shard_tasks(
    directory: JobDirectory, records: PhaseRecords, options: dict[str, Any], piece: int, shard: int
) -> list[Task]:
    """A task for each shard of the rows of some parts."""
    cuts, begins = ShardCuts(piece, shard), [0]
    counts = [part.rows for part in records.complete]
    for number, rows in enumerate(counts):
        if rows:
            begins += cuts.add(np.frombuffer(directory.read_part(f"{records.name(number)}.sizes"), "<i8"))
    begins += cuts.finish()
    rows = sum(counts)
    if not rows:
        return []
    ends = np.cumsum(counts)
    tasks = []
    for number, (start, stop) in enumerate(zip(begins, [*begins[1:], rows])):
        pieces = []
        first = int(np.searchsorted(ends, start, side="right"))
        for index in range(first, len(counts)):
            before = int(ends[index]) - counts[index]
            if before >= stop:
                break
            low, high = max(start - before, 0), min(stop - before, counts[index])
            if high > low:
                pieces.append([f"{records.name(index)}.rows", low, high])
        arguments = {**options, "pieces": pieces, "piece_bytes": piece, "number": number}
        tasks.append(Task(f"shard-{number:06d}", "shard", arguments, f"rows {start:,} to {stop:,} of the store"))
    return tasks


def write_shard(directory: JobDirectory, task: Task) -> dict[str, Any]:
    """Write one shard into the job's directory."""
    asked = task.arguments
    schema = schema_of(asked["schema"])
    assert schema is not None
    stored = plain_schema(schema)
    pieces = Pieces(asked["piece_bytes"])
    with directory.created(f"{task.name}.data") as path:
        writer = ShardWriter(path, stored, asked["tokens"], asked["mask"])
        for name, low, high in asked["pieces"]:
            with directory.opened(name) as rows:
                for batch in row_ranges(part_batches(rows), low, high):
                    for piece, size in pieces.add(plain_batch(batch, stored)):
                        writer.write(piece, size)
        if (rest := pieces.rest()) is not None:
            writer.write(*rest)
        entry = writer.finish()
        index = Path(f"{path}.index")
        with directory.created(f"{task.name}.index") as target:
            index.replace(target)
    return {"entry": asdict(entry)}
