"""A store over files of another program: rows are places in flat, memory-mapped tokens, and nothing is copied."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import xxhash

from penstock.errors import DataError
from penstock.memory.views import place_of
from penstock.store.manifest import Lineage, Manifest, ShardEntry
from penstock.store.reader import Store
from penstock.store.shards import ShardStamp

Ints = npt.NDArray[np.int64]
TOKENS = "input_ids"
_PIECE_TOKENS = 1 << 19
_CHUNK_ROWS = 1 << 17
_WHOLE_BYTES = 64 << 20
_BLOCKS, _BLOCK_BYTES = 1024, 1 << 16


class ForeignOptions(TypedDict, total=False):
    """Layout of a file of another program, as far as it does not say it itself."""

    rows: Literal["documents", "sequences"]
    """Rows of Megatron files: documents (the default), or the sequences that they consist of."""
    eot: int | None
    """Token that separates the documents of a flat file; without it, a file is one document."""
    eot_side: Literal["end", "start"] | None
    """Side of a document on which it stands: by default the end, and the start in files with the header of llm.c."""
    dtype: str | None
    """Type of the tokens of a flat file without a header; uint16 by default."""
    vocab_size: int | None
    """Ids from this number on are refused."""
    tokens: str | None
    """Column of the tokens; by default `input_ids` or `tokens`."""
    mask: str | None
    """Column that is true for supervised tokens; by default `loss_mask`, `assistant_masks` or `completion_mask`."""


class ForeignReader(Protocol):
    """One file as a shard: pieces of rows as record batches, and their tokens."""

    path: Path
    rows: int
    tokens: int
    supervised: int | None
    stamp: ShardStamp
    starts: list[int]
    lengths: npt.NDArray[np.int32]
    schema: pa.Schema

    @property
    def mark(self) -> str:
        """Hash of the content."""
        ...

    def limit_ids(self, vocab_size: int | None) -> None:
        """Refuse ids from this number on, when they are first touched."""
        ...

    def find(self, row: int) -> int: ...

    def batch(self, piece: int, *, mapped: bool = True) -> pa.RecordBatch:
        """Rows of a piece; not `mapped`, they are read into memory where that keeps the file's pages out of it."""
        ...


class ForeignStore(Store):
    """Rows of files of another program. Which tokenizer made them is not known: `limit_ids` sets the largest id."""

    def __init__(
        self, path: Path, readers: Sequence[ForeignReader], kind: str, options: ForeignOptions, shown: str | None = None
    ) -> None:
        self._files, self.kind, self._options = list(readers), kind, options
        facts = {name: value for name, value in sorted(options.items()) if value is not None and name != "vocab_size"}
        layout = xxhash.xxh3_128_hexdigest(orjson.dumps([kind, facts]))
        entries = [
            ShardEntry(
                name=reader.mark,
                rows=reader.rows,
                tokens=reader.tokens,
                supervised=reader.supervised,
                bytes=reader.stamp.size,
                index_checksum=layout,
                index_bytes=0,
            )
            for reader in self._files
        ]
        schema = self._files[0].schema
        manifest = Manifest(
            schema=schema,
            shards=tuple(entries),
            created="",
            tokens_column=options.get("tokens") or TOKENS,
            mask_column=options.get("mask"),
            lineage=(Lineage(transforms=(kind,), notes={"format": kind}),),
        )
        super().__init__(path, manifest, verify="fast", shown=shown)
        self.limit_ids(options.get("vocab_size"))

    def limit_ids(self, vocab_size: int | None) -> None:
        """Refuse ids from `vocab_size` on, and negative ones, with the row: each part of a file when first touched."""
        for reader in self._files:
            reader.limit_ids(vocab_size)

    @property
    def lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of each row."""
        if self._lengths is None:
            lengths = np.concatenate([reader.lengths for reader in self._files])
            lengths.flags.writeable = False
            self._lengths = lengths
        return self._lengths

    def map_lengths(self, number: int) -> npt.NDArray[np.int32]:
        self._check_open()
        return self._files[number].lengths

    def stamp(self, number: int) -> ShardStamp:
        return self._files[number].stamp

    def shard_path(self, number: int) -> Path:
        return self._files[number].path

    def _reader(self, shard: int) -> Any:
        self._check_open()
        return self._files[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "options": dict(self._options),
            "checksum": self.manifest.checksum,
            "shown": self.shown,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        from penstock.store.foreign.lookup import open_foreign  # which makes objects of this class

        found = open_foreign(Path(state["path"]), **state["options"])
        if found is None or found.manifest.checksum != state["checksum"]:
            raise DataError(
                "it is not the file that it was when this store was pickled; open it again", file=state["path"]
            )
        self.__dict__.update(found.__dict__ | {"shown": state["shown"]})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r}, {self.kind}, {len(self)} rows, {self.tokens} tokens)"


class FlatReader:
    """One file of flat tokens: row i is `lengths[i]` tokens from `places(i)` on. No row is copied to be located."""

    supervised: int | None = None

    def __init__(
        self,
        path: Path,
        values: npt.NDArray[Any],
        places: Callable[[Any], Ints],
        lengths: npt.NDArray[np.int32],
        *,
        files: Sequence[Path] = (),
        header_bytes: int = 0,
    ) -> None:
        self.path, self.lengths, self.rows = path, lengths, len(lengths)
        self._values, self._places, self._header_bytes = values, places, header_bytes
        self._marked = tuple(files) or (path,)
        self.stamp = ShardStamp(*self._marked)
        self.schema = pa.schema([(TOKENS, pa.list_(pa.from_numpy_dtype(values.dtype)))])
        self.starts, self.tokens = self._cut()
        self._first_rows = np.asarray(self.starts[:-1], np.int64)
        self._base = place_of(values.ctypes.data, values.itemsize)
        self._limit: int | None = None
        self._unchecked = np.zeros(len(self._first_rows), np.bool_)

    @property
    def mark(self) -> str:
        return content_mark(self._marked)

    def limit_ids(self, vocab_size: int | None) -> None:
        self._limit = vocab_size
        largest = np.iinfo(self._values.dtype)
        if largest.min < 0 or (vocab_size is not None and vocab_size <= largest.max):
            self._unchecked = np.ones(len(self._first_rows), np.bool_)

    def find(self, row: int) -> int:
        return bisect_right(self.starts, row) - 1

    def locate(self, rows: Ints) -> Ints:
        """Address of the tokens of rows."""
        if self._unchecked.any():
            pieces = np.searchsorted(self._first_rows, rows, side="right") - 1
            for piece in np.unique(pieces[self._unchecked[pieces]]).tolist():
                self.batch(piece)
        return self._base + self._places(rows)

    def batch(self, piece: int, *, mapped: bool = True) -> pa.RecordBatch:
        """Rows of a piece, as views of the file if they follow one another in it."""
        self.stamp.check()
        low, high = self.starts[piece], self.starts[piece + 1]
        places, lengths = self._places(slice(low, high)), self.lengths[low:high].astype(np.int64)
        ends = places + lengths
        if (places[1:] == ends[:-1]).all():
            values = self._slice(int(places[0]), int(ends[-1]), mapped)
        else:
            values = np.concatenate([self._values[place:end] for place, end in zip(places.tolist(), ends.tolist())])
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        if self._unchecked[piece]:
            check_ids(values, offsets, self._limit, self.path, low)
            self._unchecked[piece] = False
        flat = pa.Array.from_buffers(self.schema.field(0).type.value_type, len(values), [None, pa.py_buffer(values)])
        return pa.RecordBatch.from_arrays([pa.ListArray.from_arrays(pa.array(offsets), flat)], schema=self.schema)

    def _slice(self, low: int, high: int, mapped: bool) -> npt.NDArray[Any]:
        if mapped:
            return self._values[low:high]
        dtype = self._values.dtype
        values = np.fromfile(self.path, dtype, high - low, offset=self._header_bytes + low * dtype.itemsize)
        if len(values) < high - low:
            self.stamp.check()
            raise DataError("it ends before its rows do; copy it again", file=str(self.path))
        return values

    @contextmanager
    def reading(self, row: int) -> Iterator[None]:
        """The same as of a shard: errors of Arrow name the file."""
        try:
            yield
        except pa.ArrowException as error:
            raise DataError(str(error), file=str(self.path), row=row) from error

    def _cut(self) -> tuple[list[int], int]:
        """First rows of pieces of about a megabyte, and the number of tokens; every row is checked to lie in the file.

        Tokens are read by address, so none may be outside. Reads 12 bytes a row.
        """
        cuts, tokens = [np.zeros(1, np.int64)], 0
        for low in range(0, self.rows, _CHUNK_ROWS):
            part = slice(low, min(low + _CHUNK_ROWS, self.rows))
            places, lengths = self._places(part), self.lengths[part].astype(np.int64)
            bad = (lengths < 0) | (places < 0) | (places > len(self._values) - lengths)
            if bad.any():
                row = int(np.argmax(bad))
                raise DataError(
                    f"the row has {lengths[row]} tokens from token {places[row]} on, and the file has "
                    f"{len(self._values)}: it is truncated, or the index belongs to another file; copy both again",
                    file=str(self.path),
                    row=low + row,
                )
            begins = tokens + np.cumsum(lengths) - lengths
            tokens += int(lengths.sum())
            bucket = np.concatenate([[-1 if low else 0], begins // _PIECE_TOKENS])
            cuts.append(np.flatnonzero(np.diff(bucket)) + low)
        starts = np.unique(np.concatenate([*cuts, [self.rows]]))
        return starts.tolist(), tokens


def check_ids(
    values: npt.NDArray[Any], offsets: npt.NDArray[Any], vocab_size: int | None, path: Path | None, first: int
) -> None:
    """Refuse ids that are negative or not in the vocabulary; `first` is the number of the first row."""
    if not len(values) or (values.min() >= 0 and (vocab_size is None or values.max() < vocab_size)):
        return
    bad = values < 0
    if vocab_size is not None:
        bad |= values >= vocab_size
    place = int(np.argmax(bad))
    row = first + int(np.searchsorted(offsets, place, side="right")) - 1
    allowed = "from 0 on" if vocab_size is None else f"from 0 to {vocab_size - 1}"
    raise DataError(
        f"row {row} holds the id {int(values[place])}, and ids of this vocabulary are {allowed}; pass the tokenizer "
        "that made the file, or its real dtype",
        file=None if path is None else str(path),
        row=row,
    )


def content_mark(files: Sequence[Path]) -> str:
    """Hash of files: of all bytes up to 64 MiB, of 1024 blocks of 64 KiB spread evenly over a larger one.

    Copies have the same mark, whatever their names and times.
    """
    digest = xxhash.xxh3_128()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            size = file.seek(0, 2)
            digest.update(size.to_bytes(8, "little"))
            if size <= _WHOLE_BYTES:
                file.seek(0)
                while data := file.read(1 << 20):
                    digest.update(data)
                continue
            for place in np.linspace(0, size - _BLOCK_BYTES, _BLOCKS).astype(np.int64).tolist():
                file.seek(place)
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def map_file(path: Path) -> npt.NDArray[np.uint8]:
    """Bytes of a file, mapped; takes no file handle."""
    if not path.stat().st_size:
        return np.zeros(0, np.uint8)
    with pa.memory_map(str(path)) as file:
        return np.frombuffer(file.read_buffer(), np.uint8)
