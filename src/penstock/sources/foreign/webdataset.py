"""WebDataset: tar archives whose members with one name and several endings are a sample.

a/row7.txt  a/row7.json  a/row7.tokens.npy      the sample a/row7 with the columns txt, json and tokens.npy
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from penstock._syntax import literal
from penstock.errors import DataError
from penstock.files.compression import open_input
from penstock.files.listing import PathLike
from penstock.files.ranges.read_ahead import open_raw
from penstock.files.ranges.remote_file import InputFile, RemoteFile
from penstock.memory.budget import parse_bytes
from penstock.sources.file_source import FileSource, check_columns, project

KEY = "__key__"
_NAME = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_TEXT = frozenset({"txt", "text", "transcript", "json", "jsn"})
_NUMBERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
_PICKLED = frozenset({"pyd", "pickle", "pkl", "pth", "pt"})
_BATCH_BYTES = 1 << 20
_NPY_MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 16
_END_BYTES = 1024
_ROW_FILES = frozenset({"jsonl", "parquet", "csv", "tsv", "arrow", "zip", "tar"})


class WebDatasetSource(FileSource):
    """The samples of tar archives in order, with a column for each ending and `__key__` for the name.

    `.txt` and `.json` are texts, `.cls` and `.id` integers, `.npy` lists of numbers of one dimension; other endings
    are bytes. The first sample of a file decides its columns; samples that lack one have null there. Pickled members
    (`.pyd`, `.pth`) are refused, since reading them would run code from the file. Archives may be compressed
    (`.tar.gz`, `.tar.zst`); resuming inside a file reads what comes before. A member has at most `max_member_bytes`.
    """

    suffixes: ClassVar[tuple[str, ...]] = (".tar", ".tgz")

    def __init__(
        self,
        paths: PathLike | Iterable[PathLike],
        *,
        columns: Sequence[str] | None = None,
        max_member_bytes: int | str = "64 MiB",
        allow_empty: bool = False,
    ) -> None:
        self._columns = check_columns(columns)
        self._most = parse_bytes(max_member_bytes)
        super().__init__(paths, allow_empty=allow_empty, columns=self._columns)

    def _file_schema(self, path: InputFile) -> pa.Schema:
        reader = _TarReader(path, None, self._columns, self._most)
        try:
            return project(reader.schema, self._list.partitions.stored(self._columns, reader.schema.names), str(path))
        finally:
            reader.close()

    def _file_rows(self, path: InputFile) -> int | None:
        return None

    def _open(self, path: InputFile) -> _TarReader:
        return _TarReader(path, self._file_schema(path), self._columns, self._most)

    def next_batch(self, max_rows: int) -> pa.RecordBatch | None:
        try:
            return super().next_batch(max_rows)
        except DataError:
            self.close()  # an archive cannot go on behind an error: the next call would take that for its end
            raise


def _unzipped(path: InputFile) -> gzip.GzipFile:
    """A `.tgz` file, which no suffix of a compression tells."""
    if isinstance(path, RemoteFile):
        return gzip.GzipFile(fileobj=io.BufferedReader(open_raw(path)))
    return gzip.GzipFile(path)


Sample = dict[str, Any]


class _TarReader:
    """One open archive."""

    def __init__(self, path: InputFile, schema: pa.Schema | None, columns: Sequence[str] | None, most: int) -> None:
        self._path, self._most, self._wanted = path, most, None if columns is None else set(columns)
        self._row = 0
        self._file = _Reading(_unzipped(path) if path.suffix == ".tgz" else open_input(path))
        self._samples = self._read()
        self._ahead: Sample | None = None
        try:
            self.schema = self._first_schema() if schema is None else schema
        except BaseException:
            self.close()
            raise

    def _first_schema(self) -> pa.Schema:
        """Columns of the first sample."""
        self._ahead = next(self._samples, None)
        if self._ahead is None:
            raise DataError("there are no samples in the archive", file=str(self._path))
        return pa.schema([(name, self._type_of(name, value)) for name, value in self._ahead.items()])

    def skip(self, rows: int) -> int:
        passed = 0
        while passed < rows and self._next() is not None:
            passed += 1
        return passed

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        samples: list[Sample] = []
        size, first = 0, self._row
        while len(samples) < max_rows and size < _BATCH_BYTES and (sample := self._next()) is not None:
            samples.append(sample)
            size += sum(len(value) for value in sample.values())
        if not samples:
            return None
        arrays = []
        for field in self.schema:
            read = self._reader_of(field)
            values = [sample.get(field.name) for sample in samples]
            found = []
            for number, value in enumerate(values):
                try:
                    found.append(None if value is None else read(value))
                except (ValueError, OverflowError, SyntaxError, UnicodeDecodeError) as error:
                    raise DataError(
                        f"the member {_name_of(samples[number])}.{field.name} cannot be read: {error}",
                        file=str(self._path),
                        row=first + number,
                    ) from error
            arrays.append(_array(found, field.type))
        for number, sample in enumerate(samples if self._wanted is None else ()):
            extra = next((name for name in sample if name not in self.schema.names), None)
            if extra is not None:
                raise DataError(
                    f"the sample {_name_of(sample)} has a member .{extra}, and the first sample of the file has none; "
                    "pass columns= with the endings to read",
                    file=str(self._path),
                    row=first + number,
                )
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def held_bytes(self) -> int:
        return 0

    def close(self) -> None:
        self._samples = iter(())
        self._file.close()

    def _next(self) -> Sample | None:
        sample, self._ahead = self._ahead if self._ahead is not None else next(self._samples, None), None
        self._row += sample is not None
        return sample

    def _read(self) -> Iterator[Sample]:
        """Samples, with the bytes of each column. Members are read in the order of the archive, nothing is unpacked."""
        sample: Sample = {}
        seen: bytes | None = None
        try:
            stream: Any = self._file
            with tarfile.open(mode="r|", fileobj=stream) as archive:
                for member in archive:
                    match = _NAME.fullmatch(member.name) if member.isfile() else None
                    if match is None:
                        continue
                    key, ending = match[1].encode(errors="surrogateescape"), match[2].lower()
                    if key != seen and sample:
                        yield sample
                        sample = {}
                    seen = key
                    if self._wanted is not None and ending not in self._wanted:
                        sample.setdefault(KEY, key)
                        continue
                    self._check(member, ending)
                    sample.setdefault(KEY, key)
                    if ending in sample:
                        raise DataError(
                            f"the sample {match[1]} has two members .{ending}", file=str(self._path), row=self._row
                        )
                    file = archive.extractfile(member)
                    data = b"" if file is None else file.read()
                    if len(data) != member.size:
                        raise tarfile.ReadError(f"{member.name} has {len(data)} of {member.size} bytes")
                    sample[ending] = data
                    setattr(archive, "members", [])  # noqa: B010 - a list of all of them would grow
            if self._file.tail.strip(b"\0"):
                raise tarfile.ReadError("it does not end as an archive does")
        except (tarfile.TarError, EOFError, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise DataError(
                f"the archive is damaged or truncated: {error}; copy it again", file=str(self._path), row=self._row
            ) from error
        if sample:
            yield sample

    def _check(self, member: tarfile.TarInfo, ending: str) -> None:
        if not ending.isprintable():  # bytes that are no UTF-8 too
            raise DataError(
                f"the member {member.name!a} has an ending that cannot name a column; rename it, or pass columns= "
                "without it",
                file=str(self._path),
                row=self._row,
            )
        if ending.rpartition(".")[2] in _PICKLED:
            raise DataError(
                f"the member {member.name} is pickled, and reading a pickle runs code from the file; write .npy or "
                ".json, or pass columns= without it",
                file=str(self._path),
            )
        if ending.split(".")[0] in _ROW_FILES:
            raise DataError(
                f"the member {member.name} is a file of rows, and no part of a sample; unpack the archive, and pass "
                "the files in it",
                file=str(self._path),
            )
        if member.size > self._most:
            raise DataError(
                f"the member {member.name} has {member.size} bytes, more than max_member_bytes={self._most}",
                file=str(self._path),
            )

    def _type_of(self, name: str, value: bytes) -> pa.DataType:
        last = name.rpartition(".")[2]
        if name == KEY or last in _TEXT:
            return pa.string()
        if last in _NUMBERS:
            return pa.int64()
        if last != "npy":
            return pa.binary()
        try:
            return pa.list_(pa.from_numpy_dtype(_npy(value).dtype))
        except (ValueError, SyntaxError, pa.ArrowException) as error:
            raise DataError(f"the first .{name} is no array: {error}", file=str(self._path)) from error

    def _reader_of(self, field: pa.Field) -> Callable[[bytes], Any]:
        if pa.types.is_string(field.type):
            return bytes.decode
        if pa.types.is_integer(field.type):
            return _integer
        if pa.types.is_list(field.type):
            return lambda value: _npy_of(value, field.type.value_type)
        return bytes


def _name_of(sample: Sample) -> str:
    name: str = sample[KEY].decode(errors="replace")
    return name


def _integer(data: bytes) -> int:
    value = int(data.decode("ascii"))
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(f"{value} needs more than 64 bits")
    return value


def _npy_of(data: bytes, kind: pa.DataType) -> np.ndarray[Any, Any]:
    array = _npy(data)
    if array.dtype != kind.to_pandas_dtype():
        raise ValueError(
            f"it holds {array.dtype}, and the first of the file {kind}; write all with one type, or pass columns= "
            "without it"
        )
    return array


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    sizes = [0 if value is None else len(value) for value in values]
    arrays = [value for value in values if value is not None]
    flat = np.concatenate(arrays) if arrays else np.zeros(0, kind.value_type.to_pandas_dtype())
    offsets = pa.array(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    mask = pa.array([value is None for value in values])
    return pa.ListArray.from_arrays(offsets, pa.array(flat), mask=mask)


def _npy(data: bytes) -> np.ndarray[Any, Any]:
    """Array of a .npy file: numbers only, of one dimension, exactly as many as there are bytes for."""
    if data[:6] != _NPY_MAGIC or len(data) < 12:
        raise ValueError("it does not begin as a .npy file")
    wide = data[6] > 1
    length = int.from_bytes(data[8 : 12 if wide else 10], "little")
    begin = 12 if wide else 10
    if length > _MOST_HEADER or begin + length > len(data):
        raise ValueError("its header is damaged")
    header = literal(data[begin : begin + length].decode("latin1").strip())
    if not isinstance(header, dict) or not isinstance(header.get("descr"), str):
        raise ValueError("its header is damaged")
    dtype, shape = np.dtype(header["descr"]), header.get("shape")
    if dtype.kind not in "iufb" or dtype.hasobject:
        raise ValueError(f"it holds {dtype}, expected numbers")
    if not isinstance(shape, tuple) or len(shape) != 1:
        raise ValueError(f"it has the shape {shape}, expected one dimension")
    values = np.frombuffer(data, np.uint8, offset=begin + length)
    if shape[0] * dtype.itemsize != len(values):
        raise ValueError(f"it has {len(values)} bytes for {shape[0]} values of {dtype}")
    return values.view(dtype).astype(dtype.newbyteorder("="), copy=False)


class _Reading:
    """A reader of `open_input` as tarfile reads it. Archives end with zeros: without them, one was cut."""

    def __init__(self, file: Any) -> None:
        self._file, self.tail = file, b"-"
        self.close = file.close

    def read(self, size: int) -> bytes:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size and (got := self._file.readinto(view[filled:])):
            filled += got
        found = bytes(view[:filled])
        self.tail = (self.tail + found)[-_END_BYTES:]
        return found
