"""Compressed files: reading and writing, with the codec chosen by suffix."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, ResumeError
from penstock.files.filesystems import is_access_error
from penstock.files.listing import PathLike, split_suffix
from penstock.files.ranges.read_ahead import open_raw
from penstock.files.ranges.remote_file import RemoteFile

# Arrow does not know xz, and fails on a bz2 file of several streams if one of them is empty.
_PYTHON_CODECS: dict[str, Callable[[], Any]] = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}
_MAGIC = {".xz": b"\xfd7zXZ\0", ".bz2": b"BZh"}
_ARROW_CODECS = {".gz": "gzip", ".zst": "zstd", ".lz4": "lz4"}
_LEVELS = {".gz": (0, 9), ".zst": (1, 22), ".bz2": (1, 9), ".lz4": (0, 0), ".xz": (0, 9)}
_BUFFER_BYTES = 1 << 18
_FRAME_BYTES = 4 << 20
_PIECE_BYTES = 1 << 16


class ByteReader(Protocol):
    """File as readers use it: fill a buffer, close."""

    def readinto(self, buffer: Any, /) -> int | None: ...

    def close(self) -> None: ...


class DamagedStreamError(EOFError):
    """Compressed bytes that are wrong, or end too early."""


def open_input(path: PathLike, offset: int = 0, *, open_at: Callable[[int], io.RawIOBase] | None = None) -> ByteReader:
    """Open for reading, decompressing by suffix, `offset` bytes in (after decompression).

    `open_at` opens the bytes of the file itself from an offset on, where that is not to be done by the path.

    Skipping inside a compressed file means decompressing up to there: exact, but not free. A file that ends before the
    offset is a `ResumeError`: it is not the one that the offset was taken from.
    """
    file = path if isinstance(path, RemoteFile) else Path(path)
    size = file.stat().st_size
    codec = split_suffix(file)[1] if size else ""  # no bytes at all are an empty file in every codec
    opener = open_at or functools.partial(open_raw, file)
    reader: Any = _Decompressed(opener, codec) if codec else opener(min(offset, size))
    try:
        reached = skip_bytes(reader, offset) if codec else min(size, offset)
        if reached < offset:
            raise ResumeError(
                f"{file} has {reached} bytes now, and the state is at byte {offset}; "
                "restore the same file, or start from the beginning"
            )
    except BaseException:
        reader.close()
        raise
    return cast(ByteReader, reader)


def disk_position(reader: ByteReader) -> int:
    """Bytes of the file itself that were read through `open_input`: of a compressed file, compressed ones."""
    file: Any = reader.raw if isinstance(reader, _Decompressed) else reader
    return int(file.tell())


def open_output(file: BinaryIO, codec: str, level: int | None = None) -> Any:
    """A writable stream that compresses into `file` with the codec of a suffix such as `.zst` ('' for none).

    Closing it writes the end of the stream and leaves `file` open, unless there is no codec: then it is `file` itself.
    """
    if not codec:
        return file
    if codec not in _LEVELS:
        raise ConfigError(f"unknown compression {codec!r}; expected one of {list(_LEVELS)}")
    lowest, highest = _LEVELS[codec]
    if level is not None and not lowest <= level <= highest:
        allowed = f"a compression_level from {lowest} to {highest}" if highest else "no compression level; leave it out"
        raise ConfigError(f"{codec} takes {allowed}, got {level}")
    match codec:
        case ".gz":
            return gzip.GzipFile("", "wb", 6 if level is None else level, file, mtime=0)
        case ".bz2":
            return bz2.BZ2File(file, "wb", compresslevel=9 if level is None else level)
        case ".xz":
            return lzma.LZMAFile(file, "wb", preset=level)
        case _:
            return _CheckedFrames(file, codec, level)


class _Decompressed(io.RawIOBase):
    """The bytes of a compressed file; errors of its codec become a `DamagedStreamError`, raised after
    the last byte that could be decompressed."""

    def __init__(self, opener: Callable[[int], io.RawIOBase], codec: str) -> None:
        self._opener, self._codec = opener, codec
        self._position = 0
        self._piece_bytes = _PIECE_BYTES
        self._damage: Exception | None = None
        self._open()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view, filled = memoryview(buffer).cast("B"), 0
        while filled < len(view) and self._damage is None:
            try:
                # Always the same pieces of the stream, for any request size: damage is always found at the same place.
                got = self._stream.readinto(view[filled:][: self._piece_bytes - self._position % self._piece_bytes])
            except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
                if is_access_error(error):
                    raise  # the disk or the network, not the data
                self._look_closer(error)
                continue
            if not got:
                break
            filled += got
            self._position += got
        if not filled and self._damage is not None:
            raise DamagedStreamError(str(self._damage)) from self._damage
        return filled

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self.raw.close()  # Python's own leave open what they did not open themselves
        super().close()

    def _open(self) -> None:
        self.raw = self._opener(0)
        self._stream: Any
        if self._codec in _PYTHON_CODECS:
            self._stream = _Streams(self.raw, self._codec)
        else:
            buffered = io.BufferedReader(self.raw, _BUFFER_BYTES)
            self._stream = pa.CompressedInputStream(pa.PythonFile(buffered, mode="r"), _ARROW_CODECS[self._codec])

    def _look_closer(self, error: Exception) -> None:
        """A read that fails takes with it what it had decompressed: read that piece again, byte by byte."""
        if self._piece_bytes == 1:
            self._damage = error
            return
        self._stream.close()
        self.raw.close()
        self._open()
        scratch = memoryview(bytearray(_PIECE_BYTES))
        left, got = self._position, 1
        try:
            while left and got:
                got = self._stream.readinto(scratch[:left])
                left -= got
        except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as again:
            if is_access_error(again):
                raise
        if left:
            self._damage = error  # the file was truncated meanwhile
        self._piece_bytes = 1


def inflate(data: bytes, most: int = 1 << 24) -> bytes:
    """Bytes that `zlib.compress` made small; ValueError if they are damaged, or would be more than `most`."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, most)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not stream.eof:
        raise ValueError(f"it ends too early, or has more than {most} bytes")
    return found


class _Streams:
    """The bytes of one or several compressed streams. Behind them may be zeros, but nothing else: the classes of Python
    take whatever follows a stream for the end of the file."""

    def __init__(self, raw: io.RawIOBase, codec: str) -> None:
        self._raw, self._codec = raw, codec
        self._decoder = _PYTHON_CODECS[codec]()
        self._first = True

    def readinto(self, view: memoryview) -> int:
        while len(view):
            if self._decoder.eof and not self._next_stream():
                return 0
            data = (self._raw.read(_BUFFER_BYTES) or b"") if self._decoder.needs_input else b""
            if not data and self._decoder.needs_input:
                if self._first:
                    return 0
                raise EOFError("Compressed file ended before the end-of-stream marker was reached")
            self._first = False
            if found := self._decoder.decompress(data, len(view)):
                view[: len(found)] = found
                return len(found)
        return 0

    def close(self) -> None:
        pass

    def _next_stream(self) -> bool:
        """Begin with what follows a stream; False at the end of the file."""
        data = self._decoder.unused_data
        magic = _MAGIC[self._codec]
        while len(data := data.lstrip(b"\0")) < len(magic) and (more := self._raw.read(_BUFFER_BYTES)):
            data += more
        if not data:
            return False
        if not data.startswith(magic):
            raise EOFError(f"something else follows the end of the stream: {data[:20]!r}")
        self._decoder = _PYTHON_CODECS[self._codec]()
        self._raw.seek(-len(data), os.SEEK_CUR)
        return True


def skip_bytes(reader: ByteReader, count: int) -> int:
    """Read past `count` bytes; how many there were."""
    scratch = memoryview(bytearray(min(count, 1 << 20)))
    left = count
    while left > 0 and (got := reader.readinto(scratch[:left])):
        left -= got
    return count - left


class _CheckedFrames(io.RawIOBase):
    """Zstandard or LZ4 with a checksum of the content, which Arrow's streams leave out, and with a level, which they do
    not take: a frame of its own for every few megabytes. Any reader of the format compares the checksum."""

    def __init__(self, file: BinaryIO, codec: str, level: int | None) -> None:
        self._file = file
        self._codec = pa.Codec(_ARROW_CODECS[codec], compression_level=level)
        self._checked = _checked_zstd if codec == ".zst" else _checked_lz4
        self._waiting = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._waiting += data
        if len(self._waiting) >= _FRAME_BYTES:
            self._write_frame()
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            self._write_frame()
        super().close()

    def _write_frame(self) -> None:
        content = bytes(self._waiting)
        self._file.write(self._checked(self._codec.compress(pa.py_buffer(content), asbytes=True), content))
        self._waiting.clear()


def _checked_zstd(frame: bytes, content: bytes) -> bytes:
    """A frame with the flag for a checksum, and the checksum (RFC 8878, 3.1.1)."""
    flags = frame[4] | 0b100
    checksum = xxhash.xxh64_intdigest(content) & 0xFFFFFFFF
    return frame[:4] + bytes([flags]) + frame[5:] + checksum.to_bytes(4, "little")


def _checked_lz4(frame: bytes, content: bytes) -> bytes:
    """The same for LZ4, whose header has a checksum too: a byte after two bytes of flags and the size, if it is there
    (LZ4 Frame Format 1.6)."""
    flags = frame[4] | 0b100
    end = 6 + (8 if flags & 0b1000 else 0)
    descriptor = bytes([flags]) + frame[5:end]
    checked = bytes([xxhash.xxh32_intdigest(descriptor) >> 8 & 0xFF])
    checksum = xxhash.xxh32_intdigest(content)
    return frame[:4] + descriptor + checked + frame[end + 1 :] + checksum.to_bytes(4, "little")
