"""One shard, memory-mapped: its pieces as views, its rows as NumPy views, its checksum."""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.ragged import is_list
from penstock.errors import ConfigError, DataError
from penstock.files.checksums import hash_file, is_settled
from penstock.store.manifest import Manifest, ShardEntry

Verify = Literal["fast", "touch", "full"]
"""Extent of the check: sizes; also the checksum of a shard when it is first read; all checksums at once."""

Getter = Callable[[int], Any]
_CHECKS = ("fast", "touch", "full")
_MOST_REMEMBERED = 1 << 16
CHECK_SECONDS = 0.001
"""Time between two looks at the files of a shard whose rows are read one by one."""

_intact: set[tuple[str, str, int, int, int]] = set()
"""Files whose checksum was right, with the size, time and inode they had then."""


class ShardReader:
    """An open shard. Costs a mapping and a look at the footer, no file handle; pieces are decoded when touched.

    Views stay valid as long as they are referred to, also after the reader is closed. With `mapped=False`, pieces are
    read into memory instead, which takes a file handle: nobody who has one depends on the file any more.
    """

    def __init__(self, home: Path, entry: ShardEntry, manifest: Manifest, *, mapped: bool = True) -> None:
        check_size(home, entry)
        self.path, self.rows = home / entry.file, entry.rows
        self.stamp = ShardStamp(self.path, home / entry.index_file)
        try:
            if mapped:
                # Closing the file leaves the mapping to the views, and takes no file handle for each shard.
                with pa.memory_map(str(self.path)) as file:
                    self._reader = pa.ipc.open_file(pa.BufferReader(file.read_buffer()))
            else:
                self._reader = pa.ipc.open_file(pa.OSFile(str(self.path)))
            before = 4 * entry.rows if manifest.tokens_column is not None else 0
            rows = np.fromfile(home / entry.index_file, "<i4", offset=before)
            if not self._reader.schema.equals(manifest.schema):
                raise pa.ArrowInvalid("its columns are not those of the store")
            if len(rows) != self._reader.num_record_batches or int(rows.sum()) != entry.rows:
                raise pa.ArrowInvalid("its index belongs to another shard")
        except (pa.ArrowException, OSError) as error:
            raise damaged(self.path, str(error)) from error
        self.starts: list[int] = [0, *np.cumsum(rows).tolist()]
        """The first row of each piece, and the row after the last."""

    @property
    def schema(self) -> pa.Schema:
        return self._reader.schema

    def find(self, row: int) -> int:
        """The piece that holds a row."""
        return bisect_right(self.starts, row) - 1

    def batch(self, piece: int) -> pa.RecordBatch:
        self.stamp.check()
        with self.reading(self.starts[piece]):
            batch = self._reader.get_batch(piece)
            batch.validate()  # sizes of buffers only: a few microseconds, and not every damage ends the process
            if batch.num_rows != self.starts[piece + 1] - self.starts[piece]:
                raise pa.ArrowInvalid(f"a record batch has {batch.num_rows} rows, and the index has another number")
            return batch

    @contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """Turn errors about damaged bytes into DataError that names the file."""
        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise damaged(self.path, str(error), row) from error


class ShardStamp:
    """The files of a shard as they were when it was opened.

    Mapped memory does not show that a file changed, and touching what was truncated ends the process.
    """

    __slots__ = ("_paths", "_seen", "checked")

    def __init__(self, *files: Path) -> None:
        self._paths = tuple(map(str, files))
        try:
            self._seen = self._marks()
        except OSError as error:
            raise damaged(files[0], str(error)) from error
        self.checked = time.monotonic()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _, _ in self._seen)

    def check(self) -> None:
        """Raise DataError if a file was changed or removed. Costs two looks, some microseconds."""
        self.checked = time.monotonic()
        try:
            if self._marks() == self._seen:
                return
            what = "changed"
        except OSError:
            what = "removed"
        raise DataError(
            f"this shard was {what} while it was being read; shards are never rewritten in place: restore the "
            "file, or start again with the store as it is now",
            file=self._paths[0],
        )

    def check_often(self) -> None:
        """The same, unless the last check was just now: cheap enough for every row."""
        if time.monotonic() - self.checked > CHECK_SECONDS:
            self.check()

    def _marks(self) -> list[tuple[int, int, int]]:
        stats = map(os.stat, self._paths)
        return [(stat.st_size, stat.st_mtime_ns, stat.st_ino) for stat in stats]


class Unchanging:
    """Stamp of files that nobody changes: parts of a store in a bucket, named by their content and mapped."""

    def check(self) -> None:
        return

    check_often = check


class ShardPiece:
    """A record batch, with a function for each column that gets the value of a row as cheaply as it can be had."""

    __slots__ = ("batch", "getters", "stamp", "start")

    def __init__(self, batch: pa.RecordBatch, start: int, stamp: ShardStamp | Unchanging) -> None:
        self.batch, self.start, self.stamp = batch, start, stamp
        self.getters: list[tuple[str, Getter]] = [(n, _getter(c)) for n, c in zip(batch.schema.names, batch.columns)]

    def row(self, row: int) -> dict[str, Any]:
        return {name: get(row) for name, get in self.getters}


def read_lengths(home: Path, entry: ShardEntry, verify: Verify) -> npt.NDArray[np.int32]:
    """Tokens of each row, from the index alone."""
    path = home / entry.index_file
    try:
        if verify == "touch":
            _check_once(path, entry.index_checksum)
        lengths = np.fromfile(path, "<i4", entry.rows)
    except OSError as error:
        raise damaged(path, str(error)) from error
    if len(lengths) < entry.rows:
        raise damaged(path, f"it has {len(lengths)} lengths for {entry.rows} rows")
    return lengths


def map_lengths(home: Path, entry: ShardEntry, verify: Verify) -> npt.NDArray[np.int32]:
    """The same as a view of the file: nothing is read but the lengths that are looked at."""
    path = home / entry.index_file
    if not entry.rows:
        return np.zeros(0, np.int32)
    try:
        if verify == "touch":
            _check_once(path, entry.index_checksum)
        with pa.memory_map(str(path)) as file:
            return np.frombuffer(file.read_buffer(), "<i4", entry.rows)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error


def check_size(home: Path, entry: ShardEntry) -> None:
    """True if the files of a shard exist and have their length."""
    for name, wanted in ((entry.file, entry.bytes), (entry.index_file, entry.index_bytes)):
        path = home / name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise _missing(path) from None
        if size != wanted:
            raise damaged(path, f"it has {size} bytes and had {wanted}")


def check_content(home: Path, entry: ShardEntry) -> None:
    """Read the files of a shard and compare their checksums."""
    check_size(home, entry)
    _check_hash(home / entry.file, entry.name)
    _check_hash(home / entry.index_file, entry.index_checksum)


def check_touched(home: Path, entry: ShardEntry) -> None:
    """The same, but once in a process: files that have not changed since are not read again."""
    check_size(home, entry)
    _check_once(home / entry.file, entry.name)
    _check_once(home / entry.index_file, entry.index_checksum)


def check_verify(verify: Verify) -> Verify:
    if verify not in _CHECKS:
        raise ConfigError(f"verify must be one of {', '.join(_CHECKS)}, got {verify!r}")
    return verify


def _check_once(path: Path, wanted: str) -> None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        raise _missing(path) from None
    mark = (str(path), wanted, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if mark in _intact:
        return
    _check_hash(path, wanted)
    if is_settled(stat):
        if len(_intact) >= _MOST_REMEMBERED:
            _intact.clear()
        _intact.add(mark)


def _check_hash(path: Path, wanted: str) -> None:
    if (digest := hash_file(path)) != wanted:
        raise damaged(path, f"its checksum is {digest} and was {wanted}")


def _missing(path: Path) -> DataError:
    return DataError(
        "this shard is missing; restore the file, check out a version without it, or prepare the store again",
        file=str(path),
    )


def damaged(path: Path | str, why: str, row: int = 0) -> DataError:
    """A shard that is not what it was."""
    return DataError(
        f"this shard is damaged: {why}; restore the file, check out a version without it, or prepare the store again",
        file=str(path),
        row=row,
    )


def _getter(column: pa.Array) -> Getter:
    """Lists of numbers are views of the file; everything else becomes plain Python values."""
    kind = column.type
    if is_list(kind):
        values = _numbers(column.values)
        if values is not None:
            offsets = column.offsets.to_numpy()
            valid = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
            return _list_getter(values, offsets, valid)
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        values = _numbers(column.values)
        if values is not None:
            return _block_getter(values.reshape(len(column), kind.list_size))
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
