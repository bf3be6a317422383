"""One shard, memory-mapped: its pieces as views, its rows as NumPy views, its checksum."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DataError
from penstock.files.fingerprints import hash_file
from penstock.store.manifest import ShardEntry

__all__ = ["Piece", "ShardReader", "check_content", "check_size"]

Getter = Callable[[int], Any]


class ShardReader:
    """An open shard. Costs a mapping and a look at the footer, no file handle; pieces are decoded when touched.

    Views stay valid as long as they are referred to, whatever happens to the reader.
    """

    def __init__(self, home: Path, entry: ShardEntry, tokens: str | None) -> None:
        check_size(home, entry)
        self.path, self.rows = home / entry.file, entry.rows
        try:
            # Closing the file leaves the mapping to the views, and takes no file handle for each shard.
            with pa.memory_map(str(self.path)) as file:
                self._reader = pa.ipc.open_file(pa.BufferReader(file.read_buffer()))
            index = np.fromfile(home / entry.index_file, "<i4")
            rows = index[entry.rows if tokens is not None else 0 :]
            if len(rows) != self._reader.num_record_batches or int(rows.sum()) != entry.rows:
                raise pa.ArrowInvalid("the index does not go with it")
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self.path, str(error)) from error
        self.starts: list[int] = [0, *np.cumsum(rows).tolist()]
        """The first row of each piece, and the row behind the last."""

    def find(self, row: int) -> int:
        """The piece that holds a row."""
        return bisect_right(self.starts, row) - 1

    def batch(self, piece: int) -> pa.RecordBatch:
        try:
            return self._reader.get_batch(piece)
        except (pa.ArrowException, OSError) as error:
            raise _damaged(self.path, str(error), self.starts[piece]) from error


class Piece:
    """A record batch, with a function for each column that gets the value of a row as cheaply as it can be had."""

    __slots__ = ("batch", "getters", "start")

    def __init__(self, batch: pa.RecordBatch, start: int) -> None:
        self.batch, self.start = batch, start
        self.getters: list[tuple[str, Getter]] = [(n, _getter(c)) for n, c in zip(batch.schema.names, batch.columns)]

    def row(self, row: int) -> dict[str, Any]:
        return {name: get(row) for name, get in self.getters}


def read_lengths(home: Path, entry: ShardEntry) -> npt.NDArray[np.int32]:
    """Tokens of each row, from the index alone."""
    path = home / entry.index_file
    try:
        lengths = np.fromfile(path, "<i4", entry.rows)
    except OSError as error:
        raise _damaged(path, str(error)) from error
    if len(lengths) < entry.rows:
        raise _damaged(path, f"it has {len(lengths)} lengths for {entry.rows} rows")
    return lengths


def check_size(home: Path, entry: ShardEntry) -> None:
    """Whether the files of a shard are there and as long as they were."""
    for name, wanted in ((entry.file, entry.bytes), (entry.index_file, entry.index_bytes)):
        path = home / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise DataError(
                "this shard is missing; restore the file, check out a version without it, or prepare the store again",
                file=str(path),
            ) from None
        if size != wanted:
            raise _damaged(path, f"it has {size} bytes and had {wanted}")


def check_content(home: Path, entry: ShardEntry) -> None:
    """Read the files of a shard and compare their checksums."""
    check_size(home, entry)
    for name, wanted in ((entry.file, entry.name), (entry.index_file, entry.index_checksum)):
        if (digest := hash_file(home / name)) != wanted:
            raise _damaged(home / name, f"its checksum is {digest} and was {wanted}")


def _damaged(path: Path, why: str, row: int = 0) -> DataError:
    return DataError(
        f"this shard is damaged: {why}; restore the file, check out a version without it, or prepare the store again",
        file=str(path),
        row=row,
    )


def _getter(column: pa.Array) -> Getter:
    """Lists of numbers are views of the file; everything else becomes plain Python values."""
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        values = _numbers(column.values)
        if values is not None:
            offsets = column.offsets.to_numpy()
            valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
            return _list_getter(values, offsets, valid)
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        values = _numbers(column.values)
        if values is not None:
            return _block_getter(values.reshape(-1, kind.list_size))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        numbers = column.to_numpy() if not column.null_count else None
        if numbers is not None:
            return lambda row: numbers[row].item()
    return lambda row: column[row].as_py()


def _numbers(values: pa.Array) -> npt.NDArray[Any] | None:
    if values.null_count:
        return None
    if pa.types.is_integer(values.type) or pa.types.is_floating(values.type):
        return np.asarray(values.to_numpy())
    if pa.types.is_boolean(values.type):
        # Bits have no view. Once for a piece, then shared by its rows; read-only as the views are.
        bits = np.asarray(values.to_numpy(zero_copy_only=False))
        bits.flags.writeable = False
        return bits
    return None


def _list_getter(values: npt.NDArray[Any], offsets: npt.NDArray[Any], valid: npt.NDArray[np.bool_] | None) -> Getter:
    if valid is None:
        return lambda row: values[offsets[row] : offsets[row + 1]]
    return lambda row: values[offsets[row] : offsets[row + 1]] if valid[row] else None


def _block_getter(values: npt.NDArray[Any]) -> Getter:
    return lambda row: values[row]
