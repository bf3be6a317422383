"""One shard being written: an Arrow file and its index, hashed as they grow."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from penstock.errors import SchemaError
from penstock.store.manifest import ShardEntry

__all__ = ["ShardWriter", "token_counts"]


class ShardWriter:
    """Writes pieces to `path`, and to `path` with `.index` behind it one int32 for each row (how many tokens it has, if
    the store has tokens) followed by one for each piece (how many rows).

    Holds nothing but the index of its pieces. `sync` makes what is there durable and says which bytes it is; another
    writer can later take over the pieces within that length.
    """

    def __init__(self, path: Path, schema: pa.Schema, tokens: str | None, mask: str | None) -> None:
        self.path = path
        self._tokens, self._mask = tokens, mask
        self._data = _HashedFile(path)
        self._index = _HashedFile(_index_of(path))
        self._writer: Any = pa.ipc.new_file(pa.PythonFile(self._data, "w"), schema)
        self._piece_rows: list[int] = []
        self.rows = 0
        self.size = 0
        """By the measure that cuts are made by."""
        self._token_total = self._supervised = 0

    def write(self, piece: pa.RecordBatch, size: int) -> None:
        self._writer.write_batch(piece)
        if self._tokens is not None:
            counts = token_counts(piece.column(self._tokens), self._tokens)
            self._index.write(counts)
            self._token_total += int(counts.sum(dtype=np.int64))
        if self._mask is not None:
            self._supervised += _count_true(piece.column(self._mask), self._mask)
        self._piece_rows.append(piece.num_rows)
        self.rows += piece.num_rows
        self.size += size

    def sync(self) -> tuple[int, str]:
        """Make the pieces so far durable, and say how many bytes of the file they take, and their hash."""
        self._data.sync()
        return self._data.length, self._data.digest.hexdigest()

    def finish(self) -> ShardEntry:
        """Complete and durable; the entry names the content, the files still have their own names."""
        self._writer.close()
        self._index.write(np.array(self._piece_rows, "<i4"))
        for file in (self._data, self._index):
            file.sync()
            file.close()
        return ShardEntry(
            name=self._data.digest.hexdigest(),
            rows=self.rows,
            tokens=self._token_total if self._tokens is not None else None,
            supervised=self._supervised if self._mask is not None else None,
            bytes=self._data.length,
            index_checksum=self._index.digest.hexdigest(),
            index_bytes=self._index.length,
        )

    def abort(self) -> None:
        """Close without a footer; the files stay."""
        self._data.discarding = self._index.discarding = True
        for part in (self._writer, self._data, self._index):
            with contextlib.suppress(OSError, pa.ArrowException):  # a full disk is full for the last bytes too
                part.close()


def token_counts(column: pa.Array, name: str) -> npt.NDArray[np.int32]:
    """How many tokens each row has; a null has none."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise SchemaError(f"the column of tokens must hold lists, and {name!r} is {kind}; pass tokens=, or tokens=None")
    counts = pc.fill_null(pc.list_value_length(column), 0)
    return np.ascontiguousarray(counts.to_numpy(zero_copy_only=False), "<i4")


def _count_true(column: pa.Array, name: str) -> int:
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise SchemaError(f"the mask must hold lists, and {name!r} is {kind}; pass mask=")
    values = column.flatten()
    if pa.types.is_boolean(values.type):
        return int(pc.sum(values).as_py() or 0)
    return int(pc.sum(pc.not_equal(values, 0)).as_py() or 0)


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + ".index")


class _HashedFile(io.RawIOBase):
    """A file whose hash is known as soon as it is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = open(path, "wb")  # noqa: SIM115 - its lifetime is this object's
        self.digest = xxhash.xxh3_128()
        self.length = 0
        self.discarding = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.length

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if not self.discarding:
            self._file.write(view)
            self.digest.update(view)
            self.length += view.nbytes
        return view.nbytes

    def sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def flush(self) -> None:
        return

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
