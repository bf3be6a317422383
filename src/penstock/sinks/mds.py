"""Rows as a folder of MosaicML's MDS shards."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import xxhash

from penstock.arrays.ragged import is_list
from penstock.arrays.text import is_text
from penstock.errors import ConfigError, SchemaError
from penstock.files.atomic import AtomicFile, check_own_directory, remove_own_directory, sync_directory, write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.memory.budget import parse_bytes
from penstock.pipeline.stages import Sink

_log = logging.getLogger(__name__)
_OWN = re.compile(r"\.?(shard\.\d{5,}\.mds(\.zstd)?|index\.json)(\.\d+-[0-9a-f]{8}\.tmp)?")
_HASH = "xxh3_64"
_MOST_BYTES = 1 << 31
_ZSTD_LEVEL = 3

Encode = Callable[[pa.Array], Iterable[bytes]]


class MdsSink(Sink):
    """A folder of MDS shards with `index.json`, which appears in one step at the end.

    Lists of numbers are `ndarray:TYPE`, masks `ndarray:uint8`, texts `str`, bytes `bytes`, numbers scalars of their
    type; columns of other types are left out, with a warning. Shards have about `shard_bytes` before compression
    (`"zstd"` or none), and one of them is held in memory.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        shard_bytes: int | str = "16 MiB",
        compression: str | None = None,
        rename: dict[str, str] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = require_local(path, "the output of an MdsSink")
        self._shard_bytes = parse_bytes(shard_bytes)
        if not 0 < self._shard_bytes < _MOST_BYTES:
            raise ConfigError(f"shard_bytes must be between 1 byte and 2 GiB, got {shard_bytes!r}")
        if compression not in (None, "zstd"):
            raise ConfigError(f"compression must be 'zstd' or None, got {compression!r}")
        self._compression, self._rename, self._overwrite = compression, dict(rename or {}), overwrite
        self._forget()

    def _forget(self) -> None:
        self._columns: list[_Column] | None = None
        self._samples: list[bytes] = []
        self._held = self._rows = 0
        self._shards: list[dict[str, Any]] = []
        self._began = self._done = False

    @property
    def _staging(self) -> Path:
        return self.path.with_name(f".{self.path.name}.penstock-parts")

    @property
    def _old(self) -> Path:
        return self.path.with_name(f".{self.path.name}.penstock-old")

    def consume(self, batch: pa.RecordBatch) -> None:
        self._begin()
        if self._columns is None:
            self._columns = self._encoders(batch.schema)
        for column in self._columns:
            column.check(batch.column(column.source), self._rows)
        self._rows += batch.num_rows
        parts = [list(column.encode(batch.column(column.source))) for column in self._columns]
        fixed = [column.size is not None for column in self._columns]
        for row in zip(*parts):
            sizes = [len(value) for value, is_fixed in zip(row, fixed) if not is_fixed]
            sample = np.array(sizes, "<u4").tobytes() + b"".join(row)
            if self._samples and self._held + len(sample) + 4 > self._shard_bytes:
                self._end_shard()
            if len(sample) > _MOST_BYTES:
                raise SchemaError(f"a row has {len(sample)} bytes, and samples of MDS less than 2 GiB")
            self._samples.append(sample)
            self._held += len(sample) + 4

    def flush(self) -> None:
        """Publish the folder. Doing it again does nothing."""
        if self._done:
            return
        self._begin()
        if self._columns is None:
            raise SchemaError("there are no rows, and their columns are not known")
        if self._samples or not self._shards:
            self._end_shard()
        write_atomic(self._staging / "index.json", orjson.dumps({"shards": self._shards, "version": 2}))
        if self.path.exists():
            self.path.rename(self._old)
        self._staging.rename(self.path)
        sync_directory(self.path.parent)
        remove_own_directory(self._old, _OWN)
        self._done = True

    def memory_usage(self) -> int:
        return self._held

    def abort(self) -> None:
        """Leave nothing of an unfinished run."""
        if self._began and not self._done:
            remove_own_directory(self._staging, _OWN)
        self._samples, self._held, self._began = [], 0, False

    close = abort

    def reset(self) -> None:
        """Ready for another run, which replaces the folder."""
        done = self._done
        self.abort()
        self._forget()
        self._overwrite = self._overwrite or done

    def _begin(self) -> None:
        if self._began:
            return
        if self.path.exists():
            if not self._overwrite:
                raise ConfigError(f"{self.path} exists; delete it, write elsewhere, or pass overwrite (--overwrite)")
            check_own_directory(self.path, _OWN)
        remove_own_directory(self._old, _OWN)
        remove_own_directory(self._staging, _OWN)  # of a run that was killed
        self._staging.mkdir()
        self._began = True

    def _encoders(self, schema: pa.Schema) -> list[_Column]:
        found, left_out = [], []
        for field in schema:
            column = _Column.of(field, self._rename.get(field.name, field.name))
            if column is None:
                left_out.append(f"{field.name} ({field.type})")
            else:
                found.append(column)
        if left_out:
            _log.warning(
                "%s: the columns %s are left out; MDS has no encoding for them", self.path, ", ".join(left_out)
            )
        if not found:
            raise SchemaError(f"none of the columns {schema.names} has an encoding in MDS")
        return sorted(found, key=lambda column: column.name)

    def _end_shard(self) -> None:
        assert self._columns is not None
        count = len(self._samples)
        sizes = np.array([0, *map(len, self._samples)], np.int64)
        facts: dict[str, Any] = {
            "column_encodings": [column.encoding for column in self._columns],
            "column_names": [column.name for column in self._columns],
            "column_sizes": [column.size for column in self._columns],
            "compression": None if self._compression is None else f"{self._compression}:{_ZSTD_LEVEL}",
            "format": "mds",
            "hashes": [_HASH],
            "size_limit": self._shard_bytes,
            "version": 2,
        }
        config = orjson.dumps(facts)
        offsets = np.cumsum(sizes) + 4 * (count + 2) + len(config)
        head = np.concatenate([[count], offsets]).astype("<u4").tobytes()
        name, packed = f"shard.{len(self._shards):05d}.mds", None
        parts, digest = [head, config, *self._samples], xxhash.xxh3_64()
        for part in parts:
            digest.update(part)
        raw = _file(name, sum(map(len, parts)), digest)
        if self._compression is None:
            with AtomicFile(self._staging / name) as target:
                for part in parts:
                    target.file.write(part)
        else:
            # In one piece: readers expect the size at the beginning of the stream.
            data = pa.Codec(self._compression, _ZSTD_LEVEL).compress(b"".join(parts), asbytes=True)
            write_atomic(self._staging / f"{name}.zstd", data)
            packed = _file(f"{name}.zstd", len(data), xxhash.xxh3_64(data))
        self._shards.append({**facts, "raw_data": raw, "zip_data": packed, "samples": count})
        self._samples, self._held = [], 0

    def __repr__(self) -> str:
        return f"MdsSink({str(self.path)!r})"


def _file(name: str, size: int, digest: xxhash.xxh3_64) -> dict[str, Any]:
    return {"basename": name, "bytes": size, "hashes": {_HASH: digest.hexdigest()}}


class _Column:
    """Encoding of a column."""

    def __init__(self, source: str, name: str, encoding: str, encode: Encode, size: int | None = None) -> None:
        self.source, self.name, self.encoding, self.encode, self.size = source, name, encoding, encode, size

    def check(self, column: pa.Array, first: int) -> None:
        """Refuse a null or an empty list, by its row, if the column begins with the row `first`."""
        what = "a null"
        found = column.is_null().to_numpy(zero_copy_only=False)
        if not found.any() and self.encoding.startswith("ndarray"):
            what, found = "an empty list", column.value_lengths().to_numpy(zero_copy_only=False) == 0
        if found.any():
            raise SchemaError(
                f"the column {self.name!r} has {what} in row {first + int(found.argmax())} (the first is 0), which MDS "
                "cannot hold; fill or remove such rows"
            )

    @classmethod
    def of(cls, field: pa.Field, name: str) -> _Column | None:
        """None for a type without an encoding."""
        kind, source = field.type, field.name
        if is_text(kind):
            return cls(source, name, "str", lambda column: [str(each).encode() for each in column.to_pylist()])
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return cls(source, name, "bytes", lambda column: column.to_pylist())
        if pa.types.is_integer(kind) or pa.types.is_floating(kind):
            dtype = np.dtype(kind.to_pandas_dtype())
            return cls(source, name, dtype.name, _scalars, dtype.itemsize)
        values = getattr(kind, "value_type", pa.null())
        if not is_list(kind):
            return None
        if pa.types.is_boolean(values):
            return cls(source, name, "ndarray:uint8", lambda column: _arrays(column, name))
        if pa.types.is_integer(values) or pa.types.is_floating(values):
            dtype = np.dtype(values.to_pandas_dtype())
            return cls(source, name, f"ndarray:{dtype.name}", lambda column: _arrays(column, name))
        return None


def _scalars(column: pa.Array) -> list[bytes]:
    values = column.to_numpy()
    return [values[row : row + 1].tobytes() for row in range(len(values))]


def _arrays(column: pa.Array, name: str) -> list[bytes]:
    """Arrays with the number of their dimensions and the length before them, as short as it can be."""
    flat = column.flatten()
    if flat.null_count:
        raise SchemaError(f"lists of the column {name!r} hold nulls, which MDS cannot hold; fill or remove them")
    values = flat.to_numpy(zero_copy_only=False)
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    lengths = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.cumsum(lengths)
    found = []
    for end, length in zip(ends.tolist(), lengths.tolist()):
        code = 0 if length < 1 << 8 else 1 if length < 1 << 16 else 2
        head = bytes([1 << 2 | code]) + length.to_bytes(1 << code, "little")
        found.append(head + values[end - length : end].tobytes())
    return found
