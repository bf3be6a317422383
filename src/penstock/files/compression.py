"""Reading and writing files whatever their compression, chosen by suffix."""

from __future__ import annotations

import io
import lzma
from typing import Any, BinaryIO, Protocol, cast

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.files.listing import PathLike, split_suffix

__all__ = ["ByteReader", "open_input", "open_output"]

_ARROW_CODECS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
_BUFFER_BYTES = 1 << 18


class ByteReader(Protocol):
    """What the readers need of a file: fill a buffer, close."""

    def readinto(self, buffer: Any, /) -> int | None: ...

    def close(self) -> None: ...


def open_input(path: PathLike, offset: int = 0) -> ByteReader:
    """Open for reading, decompressing by suffix, `offset` bytes in (after decompression).

    Skipping inside a compressed file means decompressing up to there: exact, but not free.
    """
    codec = split_suffix(path)[1]
    raw = open(path, "rb", buffering=0)
    if not codec:
        raw.seek(offset)
        return cast(ByteReader, raw)
    try:
        reader = _decompressor(raw, codec)
        _skip(reader, offset)
    except BaseException:
        raw.close()
        raise
    return reader


def open_output(file: BinaryIO, codec: str, level: int | None = None) -> Any:
    """A writable stream that compresses into `file` with the codec of a suffix such as `.zst` ('' for none)."""
    if not codec:
        return file
    if codec == ".xz":
        return lzma.LZMAFile(file, "wb", preset=level)
    if codec not in _ARROW_CODECS:
        raise ConfigError(f"unknown compression {codec!r}; expected one of {[*_ARROW_CODECS, '.xz']}")
    name = _ARROW_CODECS[codec]
    if level is not None and not pa.Codec.supports_compression_level(name):
        raise ConfigError(f"{codec} has no compression level; leave compression_level out")
    arrow = pa.PythonFile(_Uncloseable(file), mode="w")
    if level is None:
        return pa.CompressedOutputStream(arrow, name)
    return pa.CompressedOutputStream(arrow, pa.Codec(name, compression_level=level))


def _decompressor(raw: BinaryIO, codec: str) -> ByteReader:
    if codec == ".xz":
        return cast(ByteReader, lzma.LZMAFile(raw, "rb"))
    buffered = io.BufferedReader(cast(io.RawIOBase, raw), _BUFFER_BYTES)
    return cast(ByteReader, pa.CompressedInputStream(pa.PythonFile(buffered, mode="r"), _ARROW_CODECS[codec]))


def _skip(reader: ByteReader, count: int) -> None:
    scratch = bytearray(min(count, 1 << 20))
    while count > 0:
        got = reader.readinto(memoryview(scratch)[: min(count, len(scratch))]) or 0
        if not got:
            return
        count -= got


class _Uncloseable(io.RawIOBase):
    """Passes writes on and keeps the file open: whoever opened it still has to sync and rename it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        return self._file.write(data)


