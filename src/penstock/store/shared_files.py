"""Files in a shared cache: what one machine has made, others fetch, by key, verified and whole."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import xxhash

from penstock.connections.shared_cache import SharedCache
from penstock.errors import DataError
from penstock.files.atomic import sync_directory
from penstock.memory.budget import format_bytes
from penstock.pipeline.prefetch import map_ahead
from penstock.store.manifest import MANIFEST_NAME, manifest_name, read_manifest

log = logging.getLogger(__name__)
PART_BYTES = 4 << 20
"""Size of the parts of a file, each an entry of the cache: a few of them are in memory at once."""
_VERSION = 1
_NAME = re.compile(
    r"manifest\.json|losses\.json|versions/\d{6}\.json|shards/[0-9a-f]{32}(\.arrow|-[0-9a-f]{16}\.index)"
)
"""Names of the files of a store; a list of others is refused, wherever it leads."""
_HEX = re.compile("[0-9a-f]{32}")


class _MissingPartError(Exception):
    """A part that the cache does not have, or no longer gives."""


@dataclass(frozen=True, slots=True)
class _SharedFile:
    name: str
    size: int
    parts: tuple[str, ...]
    """Checksum of each part."""


def share_store(cache: SharedCache, store: Path, key: str, *, extra: Sequence[str] = ()) -> bool:
    """Put the current version of a store into the cache; True if it is there afterwards.

    Parts are named by their content, so stores share those they have in common, and the list of them comes last:
    half a store is never seen. `extra` are other files of the store's directory.
    """
    if not cache.writable or cache.stat(_list_key("store", key)) is not None:
        return cache.writable
    manifest = read_manifest(store)
    shards = [name for shard in manifest.shards for name in (shard.file, shard.index_file)]
    version = manifest_name(manifest.version)
    # The manifest is last here too, as it is on disk.
    names = [*dict.fromkeys(shards), version, *(name for name in extra if (store / name).is_file()), MANIFEST_NAME]
    return _share(cache, "store", key, store, names)


def fetch_store(cache: SharedCache, key: str, out: Path) -> bool:
    """Fetch a store into the directory `out`, which appears whole; False if the cache does not have all of it."""
    files = _listed(cache, "store", key, lambda name: _NAME.fullmatch(name) is not None)
    if files is None or out.exists():
        return False
    half = out.with_name(f".{out.name}.{os.getpid()}-{secrets.token_hex(4)}.fetching")
    try:
        for file in files:
            target = half / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as written:
                checksum = _write(cache, file, written)
                written.flush()
                os.fsync(written.fileno())
            if target.suffix == ".arrow" and target.stem != checksum:
                raise DataError("its content is not that of its name", file=file.name)
        if read_manifest(half).key != key:
            raise DataError("it is the manifest of another store", file=MANIFEST_NAME)
        sync_directory(half)
        half.rename(out)
    except _MissingPartError:
        _forget(cache, "store", key)
        return False
    except (DataError, OSError) as error:
        log.warning("the store %s of the shared cache cannot be used, and is made again: %s", key, error)
        if isinstance(error, DataError):
            _forget(cache, "store", key)
        return False
    finally:
        shutil.rmtree(half, ignore_errors=True)
    log.info("fetched the store %s (%s) from the shared cache", key, format_bytes(sum(file.size for file in files)))
    return True


def share_file(cache: SharedCache, key: str, file: Path) -> bool:
    """Put a file into the cache; True if it is there afterwards."""
    if not cache.writable or cache.stat(_list_key("file", key)) is not None:
        return cache.writable
    return _share(cache, "file", key, file.parent, [file.name])


def fetch_file(cache: SharedCache, key: str, target: BinaryIO) -> bool:
    """Write a file of the cache into an open one; False, and nothing is written, if it cannot be had whole."""
    files = _listed(cache, "file", key, lambda name: True)  # the name is not used
    if files is None or len(files) != 1:
        return False
    try:
        _write(cache, files[0], target)
    except (_MissingPartError, DataError):
        _forget(cache, "file", key)
        target.seek(0)
        target.truncate()
        return False
    return True


def _forget(cache: SharedCache, kind: str, key: str) -> None:
    """Delete a list of files that are not all there, so that it is made again; not if the cache is just down."""
    if cache.readable:
        cache.delete(_list_key(kind, key))


def _list_key(kind: str, key: str) -> str:
    return f"{kind}-{key}"


def _share(cache: SharedCache, kind: str, key: str, folder: Path, names: Sequence[str]) -> bool:
    listed: list[dict[str, Any]] = []

    def parts() -> Iterator[tuple[int, bytes]]:
        for number, name in enumerate(names):
            listed.append({"name": name, "size": 0, "parts": []})
            with (folder / name).open("rb") as file:
                while data := file.read(PART_BYTES):
                    yield number, data

    def send(part: tuple[int, bytes]) -> tuple[int, int, str] | None:
        number, data = part
        checksum = xxhash.xxh3_128_hexdigest(data)
        name = f"part-{checksum}"
        entry = cache.stat(name)
        there = entry is not None and entry.size == len(data)
        return (number, len(data), checksum) if there or cache.put(name, data) else None

    try:
        with contextlib.closing(map_ahead(send, parts())) as sent:
            for done in sent:
                if done is None:
                    return False
                listed[done[0]]["size"] += done[1]
                listed[done[0]]["parts"].append(done[2])
    except OSError as error:
        log.warning("%s cannot be read, and is not put into the shared cache: %s", folder, error)
        return False
    return cache.put(_list_key(kind, key), orjson.dumps({"version": _VERSION, "files": listed}))


def _listed(cache: SharedCache, kind: str, key: str, is_name: Callable[[str], bool]) -> list[_SharedFile] | None:
    """Files of a key; None if there is no list of them, or one that is not as it must be."""
    data = cache.get(_list_key(kind, key))
    if data is None:
        return None
    try:
        facts = orjson.loads(data)
        if facts["version"] > _VERSION:
            return None  # of a later release
        files = [_SharedFile(each["name"], each["size"], tuple(each["parts"])) for each in facts["files"]]
        for file in files:
            if not is_name(file.name) or not all(_HEX.fullmatch(part) for part in file.parts) or file.size < 0:
                raise ValueError(f"it lists {file.name!r:.80}")
    except (ValueError, KeyError, TypeError) as error:
        log.warning("the list of %s in the shared cache is damaged, and is not used: %s", key, error)
        _forget(cache, kind, key)
        return None
    return files


def _write(cache: SharedCache, file: _SharedFile, target: BinaryIO) -> str:
    """Write the parts of a file; the checksum of all."""

    def get(part: str) -> bytes:
        data = cache.get(f"part-{part}")
        if data is not None and xxhash.xxh3_128_hexdigest(data) != part:
            cache.delete(f"part-{part}")
            data = None
        if data is None:
            raise _MissingPartError
        return data

    digest, size = xxhash.xxh3_128(), 0
    with contextlib.closing(map_ahead(get, file.parts)) as parts:
        for data in parts:
            target.write(data)
            digest.update(data)
            size += len(data)
    if size != file.size:
        raise DataError(f"it has {size} of {file.size} bytes", file=file.name)
    return digest.hexdigest()
