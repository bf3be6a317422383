"""Reading a store: any row at any time, as views of memory-mapped shards."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import index
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.filesystems import is_object_url, require_local
from penstock.files.listing import PathLike
from penstock.memory import parse_bytes
from penstock.store.bucket_shards import BucketShard, BucketShards
from penstock.store.home import BucketHome, LocalHome, StoreHome, home_of
from penstock.store.manifest import Manifest, ShardEntry, is_store, read_manifest, store_path
from penstock.store.shards import (
    ShardPiece,
    ShardReader,
    ShardStamp,
    Unchanging,
    Verify,
    check_content,
    check_size,
    check_touched,
    check_verify,
    damaged,
    map_lengths,
    read_lengths,
)
from penstock.store.tables import StoreTables

if TYPE_CHECKING:
    from penstock.store.foreign.base import ForeignOptions

__all__ = ["Store", "Verify", "describe", "find_store", "is_complete", "open_store"]

_MOST_PIECES = 1 << 14
_MOST_BUCKET_PIECES = 1 << 8
"""The disk keeps what is mapped, also if the cache evicts it."""


def open_store(
    path: PathLike | Any,
    version: int | None = None,
    *,
    verify: Verify = "touch",
    cache_dir: PathLike | None = None,
    cache_bytes: int | str = "50 GiB",
    progress: Callable[[int, int], object] | None = None,
    **layout: Unpack[ForeignOptions],
) -> Store:
    """A random-access view of a version of a store (default: the current one), or of token data of another program.

    Token data is files of Megatron (`.bin` and `.idx`), flat `.bin` files (nanoGPT, llm.c) and folders that Hugging
    Face's `save_to_disk` wrote, or a `datasets.Dataset` object; `layout` is what these do not say themselves
    (`docs/other-formats.md`).

    Checks that every file exists and has its length. With `verify="touch"` the checksum of a shard is compared
    when one of its rows is first read, once in a process, which reads the shard (some gigabytes a second);
    `"full"` compares all of them now, and calls `progress(bytes_done, bytes_in_all)` meanwhile. `"fast"` compares none:
    a flipped bit then gives wrong rows, or ends the process.

    Of a store in a bucket (`s3://`, `gs://`, `az://`) pieces are fetched when they are touched, and always verified,
    into a cache of `cache_bytes` below `cache_dir` (default: penstock's own) that all processes of the machine share.
    """
    check_verify(verify)
    if not isinstance(path, (str, os.PathLike)):
        return _open_dataset(path, version, layout)
    if is_object_url(path):
        _refuse_layout(path, layout)
        folder = None if cache_dir is None else require_local(cache_dir, "cache_dir").absolute()
        return _open_bucket_store(BucketHome(path), version, verify, folder, parse_bytes(cache_bytes), progress)
    check = check_content if verify == "full" else check_size
    home = store_path(path)
    if not is_store(home):
        from penstock.store.foreign.lookup import open_foreign, refuse_archive  # which imports this module

        if (found := open_foreign(home, os.fspath(path), **layout)) is not None:
            if version is not None:
                raise ConfigError(f"version={version} is for stores, and {found!r} has no versions; omit it")
            return found
        refuse_archive(home)
    _refuse_layout(path, layout)
    return Store(home, _read_checked(home, version, check, progress), verify=verify, shown=os.fspath(path))


def _open_dataset(dataset: Any, version: int | None, layout: ForeignOptions) -> Store:
    from penstock.store.foreign.lookup import open_dataset  # which imports this module

    if not all(hasattr(dataset, name) for name in ("data", "format", "cache_files")):
        raise ConfigError(f"a store is opened by its path, or over a datasets.Dataset; got {type(dataset).__name__}")
    found = open_dataset(dataset, **layout)
    if found is None or version is not None:
        raise ConfigError(
            "the dataset has no version, omit it"
            if found is not None
            else "the rows of the dataset cannot be read in place: they hold no lists of token ids, are selected or "
            "shuffled, have labels, or are changed by a function; pass it to a loader, or `penstock convert` its folder"
        )
    return found


def _refuse_layout(path: PathLike, layout: ForeignOptions) -> None:
    for name, value in layout.items():
        raise ConfigError(f"{name}={value!r} is for token data of other programs, and {os.fspath(path)!r} is none")


class Store(StoreTables, Sequence[dict[str, Any]]):
    """The rows of one version. `store[i]` is a dict; its lists of numbers are read-only views of the file.

    Shards are mapped when first touched, so opening costs milliseconds however many there are. Safe to use from several
    threads. Pickling keeps the path and the version: a worker process opens the store again.
    """

    def __init__(
        self,
        path: Path | BucketShards,
        manifest: Manifest,
        *,
        verify: Verify = "touch",
        shown: str | None = None,
    ) -> None:
        self._place, self.manifest, self._verify = path, manifest, verify
        self.bucket = path if isinstance(path, BucketShards) else None
        """The shards of a store in a bucket."""
        self.shown = shown if shown is not None else str(path)
        """The path as it was given."""
        self._starts = [0, *np.cumsum([shard.rows for shard in manifest.shards], dtype=np.int64).tolist()]
        self._readers: dict[int, ShardReader | BucketShard] = {}
        self._pieces: dict[tuple[int, int], ShardPiece] = {}
        self._lengths: npt.NDArray[np.int32] | None = None
        self._closed = False

    @property
    def path(self) -> Path:
        """Directory of the store; one in a bucket has none."""
        if isinstance(self._place, BucketShards):
            raise ConfigError(f"{self.shown} is a store in a bucket, and has no directory on this machine")
        return self._place

    @property
    def home(self) -> StoreHome:
        """The files of the store, on disk or in a bucket."""
        return self.bucket.home if self.bucket is not None else LocalHome(self.path)

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
                raise SchemaError(f"{self.shown} was written with tokens=None, so its rows have no lengths")
            self._check_open()
            if self.bucket is not None:
                numbers = range(len(self.manifest.shards))
                self.bucket.fetch_layouts(numbers)
                parts = [self.bucket.lengths(number) for number in numbers]
            else:
                parts = [read_lengths(self.path, shard, self._verify) for shard in self.manifest.shards]
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
        number = index(row)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"row {row} of a store with {len(self)} rows")
        piece, within = self._find(number)
        try:
            return piece.row(within)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            raise self._damaged(number, error) from error

    def take(self, rows: npt.ArrayLike, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows by their numbers, in that order, with repetitions, as one batch. This copies them."""
        wanted = self._numbers(rows)
        schema = self._projected(columns)
        order = np.argsort(wanted, kind="stable")
        parts, done = [], 0
        while done < len(wanted):
            piece, within = self._find(int(wanted[order[done]]))
            last = int(wanted[order[done]]) - within + piece.batch.num_rows
            stop = done + int(np.searchsorted(wanted[order[done:]], last))
            numbers = wanted[order[done:stop]] - (last - piece.batch.num_rows)
            try:
                parts.append(piece.batch.select(schema.names).take(pa.array(numbers)))
            except pa.ArrowException as error:
                raise self._damaged(last - piece.batch.num_rows, error) from error
            done = stop
        if not parts:
            return pa.RecordBatch.from_pylist([], schema=schema)
        place = np.empty(len(wanted), np.int64)
        place[order] = np.arange(len(wanted))
        return pa.concat_batches(parts).take(pa.array(place))

    def batches(
        self, start: int = 0, stop: int | None = None, *, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows `start` to `stop` in order, as views of the file of about a megabyte each.

        Negative numbers count from the end, as in a slice.
        """
        names = self._projected(columns).names
        row, end, _ = slice(start, stop).indices(len(self))
        while row < end:
            self._check_open()
            shard = bisect_right(self._starts, row) - 1
            reader, within = self._reader(shard), row - self._starts[shard]
            number = reader.find(within)
            batch = reader.batch(number).slice(within - reader.starts[number], end - row).select(names)
            yield batch
            row += batch.num_rows

    def open_shard(self, number: int) -> ShardReader | BucketShard:
        """One of the shards of this version, opened and checked according to `verify`."""
        return self._reader(number)

    def release_shards(self, kept: Collection[int]) -> None:
        """Forget opened shards but these; views stay valid, and shards are opened again when they are needed."""
        wanted = set(kept)
        self._readers = {number: reader for number, reader in list(self._readers.items()) if number in wanted}

    def map_lengths(self, number: int) -> npt.NDArray[np.int32]:
        """Tokens of each row of a shard, as a view of its index: nothing is read but what is looked at."""
        self._check_open()
        if self.bucket is not None:
            return self.bucket.lengths(number)
        return map_lengths(self.path, self.manifest.shards[number], self._verify)

    def stamp(self, number: int) -> ShardStamp | Unchanging:
        """Files of a shard as they are now."""
        if self.bucket is not None:
            return Unchanging()
        entry = self.manifest.shards[number]
        return ShardStamp(self.path / entry.file, self.path / entry.index_file)

    def shard_path(self, number: int) -> Path | str:
        """File with the rows of a shard."""
        return self.path / self.manifest.shards[number].file if self.bucket is None else self._reader(number).path

    def close(self) -> None:
        """Release the shards; views stay valid. A second call does nothing."""
        self._closed = True
        self._readers, self._pieces = {}, {}
        if self.bucket is not None:
            self.bucket.close()

    def _find(self, row: int) -> tuple[ShardPiece, int]:
        shard = bisect_right(self._starts, row) - 1
        within = row - self._starts[shard]
        reader = self._readers.get(shard) or self._reader(shard)
        number = reader.find(within)
        piece = self._pieces.get((shard, number))
        if piece is None:
            self._check_open()
            if len(self._pieces) >= (_MOST_PIECES if self.bucket is None else _MOST_BUCKET_PIECES):
                self._pieces = {}  # cheap to make again; a store of terabytes must not fill the memory with views
            batch = reader.batch(number)
            with reader.reading(reader.starts[number]):
                piece = ShardPiece(batch, reader.starts[number], reader.stamp)
            self._pieces[shard, number] = piece
        else:
            piece.stamp.check_often()
        return piece, within - piece.start

    def _reader(self, shard: int) -> ShardReader | BucketShard:
        reader = self._readers.get(shard)
        if reader is None:
            self._check_open()
            if self.bucket is not None:
                return self._readers.setdefault(shard, BucketShard(self.bucket, shard))
            entry = self.manifest.shards[shard]
            if self._verify == "touch":
                check_touched(self.path, entry)
            reader = self._readers.setdefault(shard, ShardReader(self.path, entry, self.manifest))
        return reader

    def _numbers(self, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Row numbers from the beginning, all of them there."""
        given = np.asarray(rows).ravel()
        if not len(given):
            return np.zeros(0, np.int64)
        if given.dtype.kind not in "iu":
            raise TypeError(
                f"take() needs row numbers, which are integers, and got {given.dtype.name}; "
                "of a mask, np.flatnonzero(mask) makes row numbers"
            )
        lowest, highest = int(given.min()), int(given.max())
        if lowest < -len(self) or highest >= len(self):
            raise IndexError(f"rows from {lowest} to {highest} of a store with {len(self)} rows")
        wanted = given.astype(np.int64)
        return np.where(wanted < 0, wanted + len(self), wanted)

    def _damaged(self, row: int, error: Exception) -> DataError:
        shard = bisect_right(self._starts, row) - 1
        return damaged(self.shard_path(shard), str(error), row - self._starts[shard])

    def _projected(self, columns: Sequence[str] | None) -> pa.Schema:
        if columns is None:
            return self.schema
        for name in columns:
            if name not in self.schema.names:
                raise SchemaError(f"column {name!r} not in {self.shown}; it has {self.schema.names}")
        return pa.schema([self.schema.field(name) for name in columns])

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.shown} is closed; open it again with open_store")

    def __getstate__(self) -> dict[str, Any]:
        shards = self.bucket
        return {
            "path": str(self.path.absolute()) if shards is None else shards.home.url,
            "cache": None if shards is None else (shards.cache_dir, shards.cache_bytes),
            "version": self.manifest.version,
            "checksum": self.manifest.checksum,
            "verify": self._verify,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        home = Path(state["path"]) if state["cache"] is None else BucketHome(state["path"])
        manifest = read_manifest(home, state["version"])
        if manifest.checksum != state["checksum"]:
            raise DataError(
                f"version {state['version']} is not the one it was when this store was pickled; open it again",
                file=home_of(home).shown,
            )
        if isinstance(home, Path):
            Store.__init__(self, home, manifest, verify=state["verify"])
            return
        shards = BucketShards(home, manifest, *state["cache"])
        shards.check()
        Store.__init__(self, shards, manifest, verify=state["verify"], shown=home.shown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.shown!r}, version {self.manifest.version}, {len(self)} rows, {self.tokens} tokens)"


def is_complete(path: PathLike, key: str | None = None) -> bool:
    """True if a complete store is at `path` and, if `key` is given, has that content key."""
    home = store_path(path)
    if not is_store(home):
        return False
    try:
        manifest = _read_checked(home, None, check_size)
    except DataError:
        return False
    return key is None or manifest.key == key


def find_store(directory: PathLike, key: str) -> Path | None:
    """The store directly in `directory` that was made of exactly this (see `content_key`), if there is one."""
    home = require_local(directory, "the directory of stores")
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        if path.name[0] != "." and is_complete(path, key):
            return path
    return None


def _read_checked(
    home: Path,
    version: int | None,
    check: Callable[[Path, ShardEntry], None],
    progress: Callable[[int, int], object] | None = None,
) -> Manifest:
    """The manifest of a version whose shards are all there."""
    manifest = read_manifest(home, version)
    while True:
        try:
            entries, done = list(dict.fromkeys(manifest.shards)), 0
            total = sum(entry.bytes + entry.index_bytes for entry in entries)
            for entry in entries:
                check(home, entry)
                done += entry.bytes + entry.index_bytes
                if progress is not None:
                    progress(done, total)
            return manifest
        except DataError:
            # Another version may have become current meanwhile, and this one been pruned.
            newer = read_manifest(home, version)
            if newer.checksum == manifest.checksum:
                raise
            manifest = newer


def _open_bucket_store(
    home: BucketHome,
    version: int | None,
    verify: Verify,
    cache_dir: Path | None,
    cache_bytes: int,
    progress: Callable[[int, int], object] | None = None,
) -> Store:
    manifest = read_manifest(home, version)
    while True:
        shards = BucketShards(home, manifest, cache_dir, cache_bytes)
        try:
            shards.check()
        except DataError:
            newer = read_manifest(home, version)  # as in `_read_checked`
            if newer.checksum == manifest.checksum:
                raise
            manifest = newer
            continue
        if verify == "full":
            shards.verify(progress)
        return Store(shards, manifest, verify=verify, shown=home.shown)


def describe(store: Store) -> dict[str, Any]:
    """Summary of a store, as plain values."""
    manifest = store.manifest
    lengths: dict[str, int] = {}
    if manifest.tokens_column is not None and len(store):
        points = np.percentile(store.lengths, [0, 50, 90, 99, 100], method="lower")
        lengths = dict(zip(("min", "p50", "p90", "p99", "max"), points.astype(int).tolist()))
    share = None
    if manifest.supervised is not None and manifest.tokens:
        share = manifest.supervised / manifest.tokens
    return {
        "path": store.shown,
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
        "tokenizer_name": manifest.lineage[-1].notes.get("tokenizer") if manifest.lineage else None,
        "template": manifest.template,
        "inputs": [file.name for run in manifest.lineage for file in run.inputs],
        "transforms": list(manifest.lineage[-1].transforms) if manifest.lineage else [],
    }
