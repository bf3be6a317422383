"""Shards of MosaicML's MDS: samples as bytes, one after the other.

uint32  number of samples      uint32  where each begins, and where the last ends      JSON  not needed here
sample: uint32 size of each column without a fixed one, then the bytes of all columns
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.sources.file_source import FileSource, check_columns, project
from penstock.sources.foreign.mds_index import INDEX, MdsShard, is_mds, mds_files, read_index

Ints = npt.NDArray[np.int64]
_BATCH_BYTES, _MOST_COUNT = 1 << 20, 1 << 32
_TEXT = {"str": pa.string(), "json": pa.string(), "str_decimal": pa.string()}
_BINARY = ("bytes", "jpeg", "png")
_DTYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}
"""Codes of dtypes in arrays whose column names none."""
_SCALARS = {"int": "int64", **{name: name for name in _DTYPES.values()}}


class MdsSource(FileSource):
    """The samples of a folder of MDS shards, raw or compressed, in order, only the requested `columns`.

    Sizes and hashes of `index.json` are compared when a shard is opened. A shard is decompressed as a whole, and
    decoded about a megabyte at a time. Arrays are lists of one dimension, JSON stays text, images stay bytes. `dtypes`
    names the type of arrays in columns of bytes: `{"tokens": "int64"}`. Pickled columns are refused, since reading
    them would run code from the file.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".mds",)

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        columns: Sequence[str] | None = None,
        dtypes: Mapping[str, str] | None = None,
        allow_empty: bool = False,
    ) -> None:
        if isinstance(paths, (str, os.PathLike)):
            folder = require_local(paths, "a folder of MDS shards")
            paths = mds_files(folder.parent if folder.name == INDEX else folder)
        self._columns, self._dtypes = check_columns(columns), dict(dtypes or {})
        for name, dtype in self._dtypes.items():
            if dtype not in _SCALARS or dtype == "int":
                raise ConfigError(f"dtypes[{name!r}] must be one of {', '.join(_DTYPES.values())}, got {dtype!r}")
        super().__init__(paths, allow_empty=allow_empty, columns=self._columns, dtypes=self._dtypes or None)
        self._shards: dict[Path, MdsShard] = {}

    def _shard(self, given: InputFile) -> MdsShard:
        if isinstance(given, RemoteFile):
            raise ConfigError(
                f"{str(given)!r} is a shard of MDS at a URL, and these are read from local disk; copy the folder"
            )
        path = given
        if path not in self._shards:
            # A merged index names shards in folders below its own.
            home = next((folder for folder in path.parents if is_mds(folder)), path.parent)
            self._shards |= {shard.file: shard for shard in read_index(home)}
        if path not in self._shards:
            raise DataError(f"{INDEX} does not name this file; pass the folder", file=str(path))
        return self._shards[path]

    def _file_schema(self, path: InputFile) -> pa.Schema:
        shard = self._shard(path)
        there = [name for name, _, _ in shard.columns]
        for name in self._dtypes:
            if name not in there:
                raise SchemaError(f"dtypes names {name!r}, and the columns are {there}")
        wanted = self._list.partitions.stored(self._columns, there)
        fields = []
        first: _MdsReader | None = None
        for name, encoding, _ in shard.columns:
            if wanted is not None and name not in wanted:
                continue
            kind = _type_of(name, encoding, self._dtypes.get(name), path)
            if kind is None:  # an array that names its own dtype
                first = first or _MdsReader(shard, path, None, {})
                kind = pa.list_(pa.from_numpy_dtype(first.dtype_of(name)))
            fields.append(pa.field(name, kind))
        return project(pa.schema(fields), wanted, str(path))

    def _file_rows(self, path: InputFile) -> int | None:
        return self._shard(path).samples

    def _open(self, path: InputFile) -> _MdsReader:
        return _MdsReader(self._shard(path), path, self._file_schema(path), self._dtypes)


def _type_of(name: str, encoding: str, dtype: str | None, path: InputFile) -> pa.DataType | None:
    """Arrow type of a column; None for arrays that name their own dtype."""
    if encoding == "pkl":
        raise DataError(
            f"the column {name!r} is pickled, and reading a pickle runs code from the file; write the shards with "
            "another encoding, such as ndarray:int32 or json, or pass columns= without it",
            file=str(path),
        )
    if dtype is not None:
        if encoding != "bytes":
            raise ConfigError(
                f"dtypes[{name!r}]={dtype!r} is for columns of bytes, and {name!r} is {encoding}; omit it"
            )
        return pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))
    if encoding in _SCALARS:
        return pa.from_numpy_dtype(np.dtype(_SCALARS[encoding]))
    if encoding in _BINARY:
        return pa.binary()
    base, _, rest = encoding.partition(":")
    if base == "ndarray":
        named, _, shape = rest.partition(":")
        if "," in shape:
            raise DataError(
                f"the column {name!r} has arrays of several dimensions ({encoding}), and lists have one; pass columns= "
                "without it",
                file=str(path),
            )
        if not named:
            return None
        if named in _DTYPES.values() and (not shape or shape.isdecimal()):
            return pa.list_(pa.from_numpy_dtype(np.dtype(named)))
    found = _TEXT.get(encoding) or {"str_int": pa.int64(), "str_float": pa.float64()}.get(encoding)
    if found is None:
        raise DataError(
            f"the column {name!r} has encoding {encoding!r:.60}, which is not read here; pass columns= without it",
            file=str(path),
        )
    return found


class _MdsReader:
    """One open shard. Every size in it is compared with the bytes that there are before it is used."""

    def __init__(self, shard: MdsShard, path: InputFile, schema: pa.Schema | None, dtypes: Mapping[str, str]) -> None:
        self._shard, self._path, self._dtypes = shard, path, dtypes
        self._schema = schema
        data = shard.read()
        self._raw = np.frombuffer(data, np.uint8)
        self._mapped = path == shard.raw.path
        self._row, samples = 0, shard.samples
        head = 4 * (samples + 2)
        if len(self._raw) < head or int(self._raw[:4].view("<u4")[0]) != samples:
            raise self._damaged(f"it does not hold the {samples} samples that {INDEX} names")
        self._offsets = self._raw[4:head].view("<u4").astype(np.int64)
        if self._offsets[0] < head or self._offsets[-1] != len(self._raw) or (np.diff(self._offsets) < 0).any():
            raise self._damaged("the places of its samples lie outside the file")

    def skip(self, rows: int) -> int:
        self._row = min(rows, self._shard.samples)
        return self._row

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        low = self._row
        if low >= self._shard.samples:
            return None
        most = int(np.searchsorted(self._offsets, self._offsets[low] + _BATCH_BYTES, side="right")) - 1
        high = min(max(most, low + 1), low + max_rows, self._shard.samples)
        assert self._schema is not None
        places = self._places(low, high)
        arrays = [self._decode(field, *places[field.name], low) for field in self._schema]
        self._row = high
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def held_bytes(self) -> int:
        return 0 if self._mapped else len(self._raw)

    def close(self) -> None:
        self._raw = np.zeros(0, np.uint8)

    def dtype_of(self, name: str) -> np.dtype[Any]:
        """The dtype that the first array of a column names."""
        if not self._shard.samples:
            return np.dtype(np.int64)
        begins, sizes = self._places(0, 1)[name]
        if not sizes[0]:
            raise self._damaged(f"an array of {name!r} has no bytes")
        return self._dtype(int(self._raw[begins[0]]), name, 0)

    def _places(self, low: int, high: int) -> dict[str, tuple[Ints, Ints]]:
        """First byte and size of every column of some samples."""
        begins, ends = self._offsets[low:high], self._offsets[low + 1 : high + 1]
        variable = sum(size is None or size == 0 for _, _, size in self._shard.columns)
        at, heads = begins + 4 * variable, begins
        if (at > ends).any():
            raise self._damaged("a sample ends before the sizes of its columns", low)
        found = {}
        for name, _, fixed in self._shard.columns:
            if fixed:
                sizes = np.full(high - low, fixed, np.int64)
            else:
                sizes = self._gather(heads, 4).view("<u4").ravel().astype(np.int64)
                heads = heads + 4
            found[name] = at, sizes
            at = at + sizes
            if (at > ends).any():
                raise self._damaged(f"the column {name!r} of a sample ends behind it", low)
        if (at != ends).any():
            raise self._damaged("a sample has bytes behind its columns", low)
        return found

    def _gather(self, begins: Ints, size: int) -> npt.NDArray[np.uint8]:
        """Bytes of a fixed size from each place on, one line for each."""
        return np.ascontiguousarray(self._raw[begins[:, None] + np.arange(size)])

    def _decode(self, field: pa.Field, begins: Ints, sizes: Ints, low: int) -> pa.Array:
        encoding = next(encoding for name, encoding, _ in self._shard.columns if name == field.name)
        if field.name in self._dtypes:
            return self._lists(field, begins, sizes, low)
        if encoding in _SCALARS:
            dtype = np.dtype(_SCALARS[encoding])
            if (sizes != dtype.itemsize).any():
                raise self._damaged(f"{field.name!r} is no {encoding}", low)
            return pa.array(self._gather(begins, dtype.itemsize).view(dtype).ravel())
        if encoding.startswith("ndarray"):
            return self._arrays(field, encoding, begins, sizes, low)
        joined = self._joined(begins, sizes)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        buffers = [None, pa.py_buffer(offsets), joined]
        plain = pa.Array.from_buffers(pa.binary(), len(sizes), buffers)
        if encoding in _BINARY:
            return plain
        try:
            text = plain.cast(pa.string())
            if pa.types.is_string(field.type):
                return text
            read: Callable[[Any], Any] = int if pa.types.is_integer(field.type) else float
            return pa.array([read(each) for each in text.to_pylist()], field.type)
        except (pa.ArrowException, ValueError, OverflowError) as error:
            raise self._damaged(f"{field.name!r} is no {encoding}: {error}", low) from error

    def _arrays(self, field: pa.Field, encoding: str, begins: Ints, sizes: Ints, low: int) -> pa.Array:
        """Lists of arrays of one dimension, without the dtype and shape that stand before their values."""
        _, _, rest = encoding.partition(":")
        named, _, shape = rest.partition(":")
        dtype = np.dtype(field.type.value_type.to_pandas_dtype())
        if not named:
            if (sizes < 1).any():
                raise self._damaged(f"an array of {field.name!r} has no bytes", low)
            codes = self._raw[begins]
            other = np.flatnonzero(codes != codes[0])
            if self._dtype(int(codes[0]), field.name, low) != dtype or len(other):
                row = int(other[0]) if len(other) else 0
                raise self._damaged(f"arrays of {field.name!r} have several dtypes; write them with one", low + row)
            begins, sizes = begins + 1, sizes - 1
        if not shape:
            if (sizes < 1).any():
                raise self._damaged(f"an array of {field.name!r} has no shape", low)
            marks = self._raw[begins].astype(np.int64)
            if ((marks >> 2) != 1).any():
                row = low + int(np.argmax((marks >> 2) != 1))
                raise self._damaged(f"an array of {field.name!r} has {marks[row - low] >> 2} dimensions, not 1", row)
            head = 1 + (1 << (marks & 3))
            begins, sizes = begins + head, sizes - head
            if (sizes < 0).any():
                raise self._damaged(f"an array of {field.name!r} ends in its shape", low)
            counts = self._counts(begins, head - 1)
            if (counts * dtype.itemsize != sizes).any():
                raise self._damaged(f"an array of {field.name!r} has not the bytes of its shape", low)
        return self._lists(field, begins, sizes, low)

    def _counts(self, ends: Ints, widths: Ints) -> Ints:
        """Numbers of 1, 2, 4 or 8 bytes that end before each place."""
        found = np.zeros(len(ends), np.int64)
        for width in np.unique(widths).tolist():
            which = widths == width
            numbers = self._gather(ends[which] - width, width).view(f"<u{width}").ravel()
            found[which] = np.minimum(numbers.astype(np.uint64), np.uint64(_MOST_COUNT)).astype(np.int64)
        return found

    def _lists(self, field: pa.Field, begins: Ints, sizes: Ints, low: int) -> pa.Array:
        kind = field.type.value_type
        width = kind.bit_width // 8
        if (sizes % width).any():
            row = low + int(np.argmax(sizes % width != 0))
            raise self._damaged(f"{field.name!r} has {sizes[row - low]} bytes, no whole number of {kind}", row)
        offsets = np.concatenate([[0], np.cumsum(sizes // width)]).astype(np.int32)
        values = pa.Array.from_buffers(kind, int(offsets[-1]), [None, self._joined(begins, sizes)])
        return pa.ListArray.from_arrays(pa.array(offsets), values)

    def _joined(self, begins: Ints, sizes: Ints) -> pa.Buffer:
        ends = (begins + sizes).tolist()
        return pa.py_buffer(b"".join([self._raw[low:high].data for low, high in zip(begins.tolist(), ends)]))

    def _dtype(self, code: int, name: str, row: int) -> np.dtype[Any]:
        if code not in _DTYPES:
            raise self._damaged(f"an array of {name!r} has the unknown dtype {code}", row)
        return np.dtype(_DTYPES[code])

    def _damaged(self, why: str, row: int = 0) -> DataError:
        return DataError(f"the shard is damaged: {why}", file=str(self._path), row=row)
