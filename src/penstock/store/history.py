"""Versions of a store: manifests over shared shards. List, compare, check out, and remove what none of them needs."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files.filesystems import beside
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.files.object_lock import ObjectLock
from penstock.store.bucket_build import BucketBuild
from penstock.store.build import Build
from penstock.store.home import BucketHome, StoreHome, store_home
from penstock.store.manifest import (
    BUILD,
    SHARDS,
    VERSIONS,
    Manifest,
    ShardEntry,
    is_store,
    manifest_name,
    read_manifest,
    version_numbers,
    write_manifest,
)

_OWN = re.compile(r"[0-9a-f]{32}(\.arrow|-[0-9a-f]{16}\.(index|sums))")
"""The names of all that is ever put among the shards."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference between two versions of a store."""

    old: int
    new: int
    rows_added: int
    rows_removed: int
    tokens_added: int
    tokens_removed: int
    shards_added: tuple[str, ...]
    shards_removed: tuple[str, ...]
    changed: dict[str, tuple[Any, Any]]
    """Other facts that differ, as they were and as they are."""


@dataclass(frozen=True, slots=True)
class Pruned:
    """Versions and files that `prune` removed."""

    versions: tuple[int, ...]
    files: int
    bytes: int


def versions(path: PathLike) -> list[Manifest]:
    """Every version of the store, oldest first. The current one is `open_store(path).manifest.version`."""
    home = store_home(path)
    _check_is_store(home)
    return [read_manifest(home, number) for number in version_numbers(home)]


def diff(path: PathLike, old: int, new: int | None = None) -> Difference:
    """Compare two versions by their shards, without reading a row; `new=None` is the current one."""
    home = store_home(path)
    before, after = read_manifest(home, old), read_manifest(home, new)
    gone, come = _surplus(before, after), _surplus(after, before)
    facts = ("columns", "tokens_column", "mask_column", "key")
    was, now = before.to_dict(), after.to_dict()
    for manifest, shown in ((before, was), (after, now)):
        shown |= {"tokenizer": manifest.tokenizer, "template": manifest.template}
    return Difference(
        old=before.version,
        new=after.version,
        rows_added=sum(shard.rows for shard in come),
        rows_removed=sum(shard.rows for shard in gone),
        tokens_added=sum(shard.tokens or 0 for shard in come),
        tokens_removed=sum(shard.tokens or 0 for shard in gone),
        shards_added=tuple(shard.name for shard in come),
        shards_removed=tuple(shard.name for shard in gone),
        changed={name: (was[name], now[name]) for name in (*facts, "tokenizer", "template") if was[name] != now[name]},
    )


def checkout(path: PathLike, version: int) -> Manifest:
    """Make a version the current one, in one step. Stores that are open keep the version they have.

    This also repairs a store whose manifest.json is damaged or gone.
    """
    home = store_home(path)
    with _alone(home):
        manifest = read_manifest(home, version)
        write_manifest(home, manifest, current=True)
    return manifest


def prune(path: PathLike, *, keep_versions: int | None = None) -> Pruned:
    """Remove shards that no version refers to; with `keep_versions`, first all but that many newest versions.

    The current version always stays. A store that is open on a version that goes can no longer map shards it has not
    touched yet, so prune when no process reads old versions.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1, got {keep_versions}")
    home = store_home(path)
    with _alone(home):
        current = read_manifest(home)
        numbers = version_numbers(home)
        going = numbers[:-keep_versions] if keep_versions is not None else []
        going = [number for number in going if number != current.version]
        kept = [current, *(read_manifest(home, n) for n in numbers if n not in going and n != current.version)]
        _drop_build(home, current, kept)
        names = {
            name
            for manifest in kept
            for shard in manifest.shards
            for name in (shard.file, shard.index_file, shard.sums_file)
        }
        for number in going:
            home.delete(manifest_name(number))
        there = {f"{SHARDS}/{name}": size for name, size in home.list(SHARDS).items() if _OWN.fullmatch(name)}
        strays = {name: size for name, size in there.items() if name not in names}
        strays |= {f"{folder}{name}": size for folder in ("", f"{VERSIONS}/") for name, size in _halves(home, folder)}
        for name in strays:
            home.delete(name)
    return Pruned(tuple(going), len(strays), sum(strays.values()))


def half_written(home: Path) -> list[Path]:
    """Half-written manifests of killed writers: the caller holds the lock that they held."""
    return [file for folder in (home, home / VERSIONS) for file in folder.glob(".*.json.*.tmp")]


def _halves(home: StoreHome, folder: str) -> list[tuple[str, int]]:
    return [(name, size) for name, size in home.list(folder).items() if fnmatch(name, ".*.json.*.tmp")]


def lock_of(path: Path) -> Path:
    """The lock, next to the store, since a new store does not exist while it is written."""
    return path.with_name(f".{path.name}.penstock-lock")


def store_lock(home: StoreHome) -> FileLock | ObjectLock:
    """The lock of a store, on disk or in a bucket."""
    if isinstance(home, BucketHome):
        return ObjectLock(beside(home.url, ".", ".penstock-lock"))
    assert home.path is not None
    return FileLock(lock_of(home.path))


@contextmanager
def _alone(home: StoreHome) -> Iterator[None]:
    _check_is_store(home)
    with store_lock(home) as lock:
        if not lock.acquire():
            raise ConfigError(f"{home.shown} is being written by {lock.owner()}; try again when it has ended")
        yield


def _surplus(one: Manifest, other: Manifest) -> list[ShardEntry]:
    """Shards of one version that the other does not have; the same content twice counts twice."""
    left = Counter(shard.name for shard in other.shards)
    surplus = []
    for shard in one.shards:
        if left[shard.name]:
            left[shard.name] -= 1
        else:
            surplus.append(shard)
    return surplus


def _check_is_store(home: StoreHome) -> None:
    """A damaged manifest of the current version is accepted here; a store without versions is not."""
    if not is_store(home) and not version_numbers(home):
        read_manifest(home)


def _drop_build(home: StoreHome, current: Manifest, known: list[Manifest]) -> None:
    """Remove what a killed run left, if no checkpoint can come back to it; else refuse."""
    build = BucketBuild(home) if isinstance(home, BucketHome) else Build(Path(home.shown))
    if home.path is not None and not build.path.exists():
        return
    owner = build.owner()
    published = any(manifest.run == owner and manifest.version <= current.version for manifest in known)
    if owner is not None and not published:
        raise ConfigError(
            f"{home.shown} has an unfinished run in {BUILD}, whose shards no version refers to yet; "
            "finish that run, or delete that directory, and prune again"
        )
    if home.path is not None:
        shutil.rmtree(build.path)
    else:
        build.remove()
