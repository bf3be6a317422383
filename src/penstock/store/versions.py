"""Versions of a store: manifests over shared shards. List, compare, check out, and remove what none of them needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files.listing import PathLike
from penstock.files.locking import FileLock
from penstock.store.manifest import (
    BUILD,
    SHARDS,
    VERSIONS,
    Manifest,
    ShardEntry,
    manifest_path,
    read_manifest,
    write_manifest,
)

__all__ = ["Difference", "Pruned", "checkout", "diff", "prune", "versions"]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What version `new` has and version `old` has not, and the other way round."""

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
    """What `prune` removed."""

    versions: tuple[int, ...]
    files: int
    bytes: int


def versions(path: PathLike) -> list[Manifest]:
    """Every version of the store, oldest first. The current one is `open_store(path).manifest.version`."""
    home = Path(path).expanduser()
    read_manifest(home)  # not a store, or not a readable one: say so
    return [read_manifest(home, number) for number in version_numbers(home)]


def diff(path: PathLike, old: int, new: int | None = None) -> Difference:
    """Compare two versions by their shards, without reading a row; `new=None` is the current one."""
    home = Path(path).expanduser()
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
    """Make a version the current one, in one step. Stores that are open keep the version they have."""
    home = Path(path).expanduser()
    with _alone(home):
        manifest = read_manifest(home, version)
        write_manifest(home, manifest, current=True)
    return manifest


def prune(path: PathLike, *, keep_versions: int | None = None) -> Pruned:
    """Remove shards that no version refers to; with `keep_versions`, first all but the newest so many versions.

    The current version always stays. A store that is open on a version that goes can no longer map shards it has not
    touched yet, so prune when nobody reads old versions.
    """
    if keep_versions is not None and keep_versions < 1:
        raise ConfigError(f"keep_versions must be at least 1, got {keep_versions}")
    home = Path(path).expanduser()
    with _alone(home):
        if (home / BUILD).exists():
            raise ConfigError(
                f"{home} has an unfinished run in {BUILD}, whose shards no version refers to yet; "
                "finish that run, or delete that directory, and prune again"
            )
        current = read_manifest(home)
        numbers = version_numbers(home)
        going = numbers[:-keep_versions] if keep_versions is not None else []
        going = [number for number in going if number != current.version]
        needed = {current.version: current} | {n: read_manifest(home, n) for n in numbers if n not in going}
        names = {name for manifest in needed.values() for shard in manifest.shards for name in _files(shard.name)}
        for number in going:
            manifest_path(home, number).unlink()
        strays = [file for file in (home / SHARDS).iterdir() if file.name not in names]
        freed = sum(file.stat().st_size for file in strays)
        for file in strays:
            file.unlink()
    return Pruned(tuple(going), len(strays), freed)


def version_numbers(home: Path) -> list[int]:
    """In ascending order."""
    return sorted(int(file.stem) for file in (home / VERSIONS).glob("*.json") if file.stem.isdigit())


def lock_of(path: Path) -> Path:
    """Beside the store, because a store that is being made is not there yet."""
    return path.with_name(f".{path.name}.penstock-lock")


@contextmanager
def _alone(home: Path) -> Iterator[None]:
    read_manifest(home)
    with FileLock(lock_of(home)) as lock:
        if not lock.acquire():
            raise ConfigError(f"{home} is being written by {lock.owner()}; try again when it has ended")
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


def _files(name: str) -> tuple[str, str]:
    return f"{name}.arrow", f"{name}.index"
