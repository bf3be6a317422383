"""Index of a folder of MosaicML's MDS shards: `index.json` names the files, their columns, sizes and hashes."""

from __future__ import annotations

import bz2
import hashlib
import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import is_remote, shown
from penstock.files.listing import FoundFiles, PathLike
from penstock.files.remote import RemotePath, path_of

INDEX = "index.json"
_CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2", "snappy": "snappy"}
_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_MOST_BYTES = 1 << 32
"""Places of samples in a shard have 32 bits."""
_MOST_INDEX_BYTES, _LOOK_BYTES = 1 << 30, 1 << 16


@dataclass(frozen=True, slots=True)
class MdsFile:
    """One of the two forms of a shard on disk."""

    path: Path
    bytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MdsShard:
    """One shard as the index has it."""

    samples: int
    columns: tuple[tuple[str, str, int | None], ...]
    """Name, encoding, and size in bytes where it is fixed."""
    raw: MdsFile
    packed: MdsFile | None
    codec: str | None

    @property
    def file(self) -> Path:
        """The file that is there: the raw one, else the compressed one."""
        for each in (self.raw, self.packed):
            if each is not None and each.path.is_file():
                return each.path
        raise DataError(
            f"{INDEX} names {self.raw.path.name}, which is not there: the folder is not complete; copy the rest of it",
            file=str(self.raw.path if self.packed is None else self.packed.path),
        )

    def read(self) -> pa.Buffer:
        """Bytes of the shard, mapped or decompressed, after a check of their size and hashes."""
        packed = self.packed if self.file != self.raw.path else None
        stored = self.raw if packed is None else packed
        if (size := stored.path.stat().st_size) != stored.bytes:
            raise DataError(
                f"it has {size} bytes, and {INDEX} says {stored.bytes}: it is not complete; copy it again",
                file=str(stored.path),
                row=0,
            )
        with pa.memory_map(str(stored.path)) as file:
            data = file.read_buffer()
        _check_hashes(data, stored)
        if packed is None:
            return data
        data = _unpacked(data, str(self.codec), self.raw.bytes, packed.path)
        _check_hashes(data, MdsFile(packed.path, self.raw.bytes, self.raw.hashes))
        return data


def is_mds(folder: Path) -> bool:
    """True if a folder holds MDS shards."""
    index = folder / INDEX
    if not index.is_file() or index.stat().st_size > _MOST_INDEX_BYTES:
        return False
    try:
        facts = orjson.loads(index.read_bytes())
        return isinstance(facts, dict) and any(shard.get("format") == "mds" for shard in facts["shards"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return False


def refuse_remote_tokens(path: PathLike) -> None:
    """Raise a ConfigError if a URL leads to token data that is read from local disk, before any of it is fetched."""
    if not is_remote(path) or os.fspath(path).startswith("hf://"):
        return
    place = path_of(path)
    if not isinstance(place, RemotePath):
        return
    found = place.suffix in (".bin", ".idx", ".mds")
    if not found and place.can_be_listed and not place.suffix and not re.search(r"[*\[]", place.url):
        try:
            found = (place / INDEX).is_file() and b'"mds"' in (place / INDEX).read_bytes()[:_LOOK_BYTES]
        except OSError:
            return  # reported when the files are listed
    if found:
        raise ConfigError(
            f"{shown(place.url)!r} is token data of another program at a URL, and such data is read from local disk; "
            "copy it to this machine with the tools of the storage, and pass the copy"
        )


def mds_files(folder: Path) -> FoundFiles:
    """Files of the shards of a folder, in the order of its index; a missing one is an error."""
    files = [shard.file for shard in read_index(folder)]
    return FoundFiles(files, folder.parts, [folder.parts] * len(files))


def read_index(folder: Path) -> list[MdsShard]:
    """Shards of a folder."""
    path = folder / INDEX
    try:
        facts = orjson.loads(path.read_bytes())
        shards = [_shard(folder, each) for each in _is(facts["shards"], list)]
    except FileNotFoundError:
        raise DataError(f"there is no {INDEX} beside the shards; copy it too", file=str(folder)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"it is no index of MDS shards ({error!r:.120}); copy it again", file=str(path)) from error
    if not shards:
        raise DataError("it names no shards", file=str(path))
    return shards


def _shard(folder: Path, facts: Mapping[str, Any]) -> MdsShard:
    if facts["format"] != "mds" or facts["version"] != 2:
        raise DataError(
            f"a shard has format {facts['format']!r} and version {facts['version']!r}; MDS of version 2 is read",
            file=str(folder / INDEX),
        )
    names, encodings, sizes = (_is(facts[name], list) for name in ("column_names", "column_encodings", "column_sizes"))
    if not len(names) == len(encodings) == len(sizes) or len(set(names)) != len(names):
        raise ValueError("its columns do not go together")
    columns = tuple(
        (_is(name, str), _is(encoding, str), size if size is None else _size(size))
        for name, encoding, size in zip(names, encodings, sizes)
    )
    raw, packed = _file(folder, facts["raw_data"]), None
    codec = None if facts.get("compression") is None else _is(facts["compression"], str).partition(":")[0]
    if facts.get("zip_data") is not None:
        packed = _file(folder, facts["zip_data"])
        if codec not in _CODECS:
            raise DataError(f"the compression {codec!r} is unknown; known: {list(_CODECS)}", file=str(folder / INDEX))
    return MdsShard(_size(facts["samples"]), columns, raw, packed, codec)


def _file(folder: Path, facts: Mapping[str, Any]) -> MdsFile:
    name = PurePosixPath(_is(facts["basename"], str))
    if name.is_absolute() or ".." in name.parts or "\\" in str(name) or not name.parts:
        raise DataError(f"the file name {str(name)!r:.120} leads out of the folder", file=str(folder / INDEX))
    hashes = {_is(algorithm, str): _is(digest, str) for algorithm, digest in dict(facts.get("hashes") or {}).items()}
    return MdsFile(folder / name, _size(facts["bytes"]), hashes)


def _is(value: Any, kind: type) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value


def _size(value: Any) -> int:
    size: int = _is(value, int)
    if not 0 <= size < _MOST_BYTES:
        raise ValueError(f"{size} is no size of a shard")
    return size


def _check_hashes(data: pa.Buffer, stored: MdsFile) -> None:
    for algorithm, wanted in stored.hashes.items():
        if algorithm in _XXHASHES:
            found = getattr(xxhash, algorithm)(data).hexdigest()
        elif algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake"):
            found = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
        else:
            raise DataError(f"{INDEX} has a hash by {algorithm!r:.60}, which is unknown", file=str(stored.path), row=0)
        if found != wanted:
            raise DataError(
                f"it is damaged: its {algorithm} is {found}, and {INDEX} says {wanted}; copy it again",
                file=str(stored.path),
                row=0,
            )


def _unpacked(data: pa.Buffer, codec: str, size: int, path: Path) -> pa.Buffer:
    """Decompressed bytes. What an index claims allocates nothing: memory grows with what comes out."""
    try:
        if codec == "snappy":
            found = pa.decompress(data, min(size, 256 * data.size), "snappy")
        elif codec == "bz2":
            found = pa.py_buffer(bz2.BZ2Decompressor().decompress(data, size + 1))
        else:
            with pa.CompressedInputStream(pa.BufferReader(data), _CODECS[codec]) as stream:
                parts, left = io.BytesIO(), size + 1
                while left and (part := stream.read(min(left, 1 << 20))):
                    parts.write(part)
                    left -= len(part)
            found = pa.py_buffer(parts.getbuffer())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"it cannot be decompressed: {error}; copy it again", file=str(path), row=0) from error
    if found.size != size:
        more = "more than " if found.size > size else ""
        raise DataError(
            f"it holds {more}{min(found.size, size)} bytes, and {INDEX} says {size}; copy it again",
            file=str(path),
            row=0,
        )
    return found
