"""Reading a store: any row at any time, as views of memory-mapped shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.listing import PathLike
from penstock.store.manifest import Manifest, is_store, read_manifest
from penstock.store.shards import Piece, ShardReader, check_content, check_size, read_lengths

__all__ = ["Store", "Verify", "describe", "find_store", "is_complete", "open_store"]

Verify = Literal["fast", "touch", "full"]
_CHECKS = ("fast", "touch", "full")
_MOST_PIECES = 1 << 14


def open_store(path: PathLike, version: int | None = None, *, verify: Verify = "fast") -> Store:
    """A random-access view of a version of a store (default: the current one).

    `verify="fast"` looks whether every file is there and as long as it was; `"touch"` also compares the checksum of a
    shard when it is first touched; `"full"` those of all shards now, which reads them.
    """
    if verify not in _CHECKS:
        raise ConfigError(f"verify must be one of {', '.join(_CHECKS)}, got {verify!r}")
    home = Path(path).expanduser()
    manifest = read_manifest(home, version)
    check = check_content if verify == "full" else check_size
    for entry in {entry.name: entry for entry in manifest.shards}.values():
        check(home, entry)
    return Store(home, manifest, verify=verify)


class Store(Sequence[dict[str, Any]]):
    """The rows of one version. `store[i]` is a dict; its lists of numbers are read-only views of the file.

    Shards are mapped when first touched, so opening costs milliseconds however many there are. Safe to use from several
    threads. Pickling keeps the path and the version: a worker process opens the store again.
    """

    def __init__(self, path: Path, manifest: Manifest, *, verify: Verify = "fast") -> None:
        self.path, self.manifest, self._verify = path, manifest, verify
        self._starts = [0, *np.cumsum([shard.rows for shard in manifest.shards], dtype=np.int64).tolist()]
        self._readers: dict[int, ShardReader] = {}
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._lengths: npt.NDArray[np.int32] | None = None
        self._closed = False

    @property
    def schema(self) -> pa.Schema:
        return self.manifest.schema

    @property
    def tokens(self) -> int:
        """Tokens of all rows together; 0 if the store has no column of tokens."""
        return self.manifest.tokens or 0

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each row. Read from the indexes, four bytes a row, without touching the tokens; kept afterwards."""
        if self._lengths is None:
            if self.manifest.tokens_column is None:
                raise SchemaError(f"{self.path} was written with tokens=None, so its rows have no lengths")
            self._check_open()
            parts = [read_lengths(self.path, shard) for shard in self.manifest.shards]
            lengths = np.concatenate([np.zeros(0, np.int32), *parts])
            lengths.flags.writeable = False
            self._lengths = lengths
        return self._lengths

    def __len__(self) -> int:
        return int(self._starts[-1])

    @overload
    def __getitem__(self, row: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, row: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, row: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        number = row + len(self) if row < 0 else row
        if not 0 <= number < len(self):
            raise IndexError(f"row {row} of a store with {len(self)} rows")
        piece, within = self._find(number)
        return piece.row(within)

    def take(self, rows: npt.ArrayLike, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows by their numbers, in that order, repeated if asked for, as one batch. This copies them."""
        wanted = np.asarray(rows, dtype=np.int64).ravel()
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if len(wanted) and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"rows from {wanted.min()} to {wanted.max()} of a store with {len(self)} rows")
        schema = self._projected(columns)
        order = np.argsort(wanted, kind="stable")
        parts, done = [], 0
        while done < len(wanted):
            piece, within = self._find(int(wanted[order[done]]))
            last = int(wanted[order[done]]) - within + piece.batch.num_rows
            stop = done + int(np.searchsorted(wanted[order[done:]], last))
            numbers = wanted[order[done:stop]] - (last - piece.batch.num_rows)
            parts.append(piece.batch.select(schema.names).take(pa.array(numbers)))
            done = stop
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=schema)
        place = np.empty(len(wanted), np.int64)
        place[order] = np.arange(len(wanted))
        return pa.concat_batches(parts).take(pa.array(place))

    def batches(
        self, start: int = 0, stop: int | None = None, *, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows `start` to `stop` in order, as views of the file of about a megabyte each."""
        names = self._projected(columns).names
        row, end = max(0, start), len(self) if stop is None else min(stop, len(self))
        while row < end:
            self._check_open()
            shard = bisect_right(self._starts, row) - 1
            reader, within = self._reader(shard), row - self._starts[shard]
            number = reader.find(within)
            batch = reader.batch(number).slice(within - reader.starts[number], end - row).select(names)
            yield batch
            row += batch.num_rows

    def close(self) -> None:
        """Let go of the shards; views that are in use stay valid. A second call does nothing."""
        self._closed = True
        self._readers, self._pieces = {}, {}

    def _find(self, row: int) -> tuple[Piece, int]:
        shard = bisect_right(self._starts, row) - 1
        within = row - self._starts[shard]
        reader = self._readers.get(shard) or self._reader(shard)
        number = reader.find(within)
        piece = self._pieces.get((shard, number))
        if piece is None:
            self._check_open()
            if len(self._pieces) >= _MOST_PIECES:
                self._pieces = {}  # cheap to make again; a store of terabytes must not fill the memory with views
            piece = Piece(reader.batch(number), reader.starts[number])
            self._pieces[shard, number] = piece
        return piece, within - piece.start

    def _reader(self, shard: int) -> ShardReader:
        reader = self._readers.get(shard)
        if reader is None:
            self._check_open()
            entry = self.manifest.shards[shard]
            if self._verify == "touch":
                check_content(self.path, entry)
            reader = self._readers.setdefault(shard, ShardReader(self.path, entry, self.manifest.tokens_column))
        return reader

    def _projected(self, columns: Sequence[str] | None) -> pa.Schema:
        if columns is None:
            return self.schema
        for name in columns:
            if name not in self.schema.names:
                raise SchemaError(f"column {name!r} not in {self.path}; it has {self.schema.names}")
        return pa.schema([self.schema.field(name) for name in columns])

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} is closed; open it again with open_store")

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": str(self.path.absolute()),
            "version": self.manifest.version,
            "checksum": self.manifest.checksum,
            "verify": self._verify,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        path = Path(state["path"])
        manifest = read_manifest(path, state["version"])
        if manifest.checksum != state["checksum"]:
            raise DataError(
                f"version {state['version']} is not the one it was when this store was pickled; open it again",
                file=str(path),
            )
        Store.__init__(self, path, manifest, verify=state["verify"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r}, version {self.manifest.version}, {len(self)} rows, {self.tokens} tokens)"


def is_complete(path: PathLike, key: str | None = None) -> bool:
    """Whether a whole store is at `path`, all its files there and, if `key` is given, made of exactly that."""
    home = Path(path).expanduser()
    if not is_store(home):
        return False
    try:
        manifest = read_manifest(home)
        for entry in manifest.shards:
            check_size(home, entry)
    except DataError:
        return False
    return key is None or manifest.key == key


def find_store(directory: PathLike, key: str) -> Path | None:
    """The store directly in `directory` that was made of exactly this (see `content_key`), if there is one."""
    home = Path(directory).expanduser()
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        if path.name[0] != "." and is_complete(path, key):
            return path
    return None


def describe(store: Store) -> dict[str, Any]:
    """What there is to say about a store in a few lines, as plain values."""
    manifest = store.manifest
    lengths: dict[str, int] = {}
    if manifest.tokens_column is not None and len(store):
        points = np.percentile(store.lengths, [0, 50, 90, 99, 100], method="lower")
        lengths = dict(zip(("min", "p50", "p90", "p99", "max"), points.astype(int).tolist()))
    share = None
    if manifest.supervised is not None and manifest.tokens:
        share = manifest.supervised / manifest.tokens
    return {
        "path": str(store.path),
        "version": manifest.version,
        "parent": manifest.parent,
        "created": manifest.created,
        "key": manifest.key,
        "rows": manifest.rows,
        "tokens": manifest.tokens,
        "supervised": manifest.supervised,
        "supervised_share": share,
        "lengths": lengths,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "columns": {column.name: str(column.type) for column in manifest.schema},
        "tokens_column": manifest.tokens_column,
        "mask_column": manifest.mask_column,
        "tokenizer": manifest.tokenizer,
        "template": manifest.template,
        "inputs": [file.name for run in manifest.lineage for file in run.inputs],
        "transforms": list(manifest.lineage[-1].transforms) if manifest.lineage else [],
    }
