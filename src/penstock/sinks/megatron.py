"""Rows of tokens as a pair of files of Megatron."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, SchemaError
from penstock.files.atomic import AtomicFile, remove_leftovers
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.pipeline.stages import Sink
from penstock.store.foreign.megatron import DTYPES, HEADER, MAGIC

_log = logging.getLogger(__name__)
_CODES = {name: code for code, name in DTYPES.items()}
_SIGNED = {"uint32": "int32", "uint64": "int64"}
"""Types that Megatron does not have, and those that hold the same ids."""
_CHUNK = 1 << 16


class MegatronSink(Sink):
    """`PREFIX.bin` and `PREFIX.idx`: a document of one sequence for each row, with the tokens of `input_ids`.

    Both appear at the end, the index first: without its tokens it is an error to read, and the other way round the
    tokens could be taken for a flat file. Files of this format have no mask: rows with a `loss_mask` are refused
    unless `drop_mask` is set. Other columns are left out, with a warning. Holds four bytes a row.
    """

    def __init__(self, prefix: PathLike, *, drop_mask: bool = False, overwrite: bool = False) -> None:
        given = require_local(prefix, "the output of a MegatronSink")
        stem = str(given)[:-4] if given.suffix in (".bin", ".idx") else str(given)
        self.path, self.index_path = Path(f"{stem}.bin"), Path(f"{stem}.idx")
        self._drop_mask, self._overwrite = drop_mask, overwrite
        self._dtype: np.dtype[Any] | None = None
        self._lengths: list[npt.NDArray[np.int32]] = []
        self._file: AtomicFile | None = None
        self._done = False

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._file is None:
            self._begin(batch.schema)
        column = batch.column("input_ids")
        if column.null_count:
            raise SchemaError("input_ids holds nulls")
        values = column.flatten().to_numpy(zero_copy_only=False)
        assert self._dtype is not None
        assert self._file is not None
        if values.dtype != self._dtype:
            if len(values) and values.max() > np.iinfo(self._dtype).max:
                raise SchemaError(f"the id {values.max()} does not fit {self._dtype}, the widest type of such files")
            values = values.astype(self._dtype)
        self._lengths.append(column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int32))
        self._file.file.write(values.data)

    def flush(self) -> None:
        """Publish both files. Doing it again does nothing."""
        if self._done:
            return
        if self._file is None or self._dtype is None:
            raise SchemaError("there are no rows, and the type of their tokens is not known")
        self.path.unlink(missing_ok=True)  # an older one: it must not be found beside the new index
        with AtomicFile(self.index_path) as index:
            for part in self._index():
                index.file.write(part)
        self._file.commit()
        self._file, self._done = None, True

    def memory_usage(self) -> int:
        return sum(part.nbytes for part in self._lengths)

    def abort(self) -> None:
        """Leave nothing of an unfinished run."""
        if self._file is not None:
            self._file.abort()
        self._file = None

    close = abort

    def reset(self) -> None:
        """Ready for another run, which replaces the files."""
        self.abort()
        self._lengths, self._dtype = [], None
        self._overwrite, self._done = self._overwrite or self._done, False

    def _begin(self, schema: pa.Schema) -> None:
        if self.path.exists() and not self._overwrite:
            raise ConfigError(f"{self.path} exists; delete it, write elsewhere, or pass overwrite (--overwrite)")
        kind = schema.field("input_ids").type if "input_ids" in schema.names else None
        if kind is None or not pa.types.is_integer(getattr(kind, "value_type", pa.null())):
            raise SchemaError(f"expected rows with a column input_ids of lists of integers, got {schema.names}")
        if "loss_mask" in schema.names and not self._drop_mask:
            raise ConfigError(
                "the rows have a loss_mask, and files of Megatron have none: all tokens would be trained on; pass "
                "drop_mask (--drop-mask) if that is meant"
            )
        others = [name for name in schema.names if name not in ("input_ids", "loss_mask")]
        if others:
            _log.warning("%s: the columns %s are left out; such files hold tokens only", self.path, ", ".join(others))
        name = str(kind.value_type)
        self._dtype = np.dtype(_SIGNED.get(name, name))
        remove_leftovers(self.path)
        self._file = AtomicFile(self.path)

    def _index(self) -> Iterator[bytes]:
        """The index, in parts."""
        assert self._dtype is not None
        lengths = np.concatenate([np.zeros(0, np.int32), *self._lengths])
        rows, place = len(lengths), 0
        yield HEADER.pack(MAGIC, 1, _CODES[self._dtype.name], rows, rows + 1)
        yield lengths.tobytes()
        for low in range(0, rows, _CHUNK):
            sizes = lengths[low : low + _CHUNK].astype(np.int64) * self._dtype.itemsize
            yield (place + np.cumsum(sizes) - sizes).tobytes()
            place += int(sizes.sum())
        for low in range(0, rows + 1, _CHUNK):
            yield np.arange(low, min(low + _CHUNK, rows + 1), dtype=np.int64).tobytes()

    def __repr__(self) -> str:
        return f"MegatronSink({str(self.path)[:-4]!r})"
