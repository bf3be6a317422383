"""Queue directory as a whole: its description, and creating, opening and purging it."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import orjson
import xxhash

from penstock._suggest import check_options, did_you_mean
from penstock.errors import ConfigError, QueueNotFoundError, StaleQueueError, StalledError
from penstock.files.atomic import read_regular, write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.fsqueue.layout import Lanes, SplitDirectory
from penstock.types import Field, Schema

logger = logging.getLogger(__name__)

QUEUE_FILE = "queue.json"
_VERSION = 1
_LOCK, _LOCK_SECONDS = ".setup.lock", 30.0
# Setting with the hashes of the provider's code.
_CODE = "provider_code"
_SHOWN = 5
_SPLIT = re.compile(r"[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class Description:
    """Everything that the batches of a queue depend on."""

    meta: Mapping[str, Any]
    """Metadata for the trainer, from `build_meta`; `batch_schema` lists the arrays of a batch."""
    settings: Mapping[str, Any]
    """`seed`, `batch_size`, `batches_per_file`, `lanes`, and the settings that the provider reads."""
    splits: Sequence[str]

    def __post_init__(self) -> None:
        if problems := list(_not_plain(self.meta, "meta")):
            raise ConfigError(f"build_meta() must return plain values that JSON can hold: {'; '.join(problems[:5])}")
        if not self.splits or isinstance(self.splits, str):
            raise ConfigError(f"splits must be a list of one or more names, got {self.splits!r}")
        for split in self.splits:
            if not isinstance(split, str) or not _SPLIT.fullmatch(split) or split in ("members", QUEUE_FILE):
                raise ConfigError(f"a split name consists of letters, digits, '_', '.' and '-', got {split!r}")

    @property
    def fingerprint(self) -> str:
        """Hash of meta and settings, independent of the order of their keys."""
        facts = {"meta": self.meta, "settings": self.settings}
        return xxhash.xxh3_128_hexdigest(_to_json(facts, orjson.OPT_SORT_KEYS))

    @property
    def schema(self) -> Schema:
        return schema_of(self.meta)

    @property
    def batches_per_file(self) -> int:
        return int(self.settings["batches_per_file"])

    @property
    def lanes(self) -> int:
        return int(self.settings["lanes"])


@dataclass(frozen=True, slots=True)
class Queue:
    """Queue directory that exists."""

    path: Path
    description: Description
    fingerprint: str
    id: str = ""
    """Random id: a queue that is purged and created again has another one."""

    @classmethod
    def open(cls, path: PathLike) -> Self:
        """The queue at a path; raises QueueNotFoundError or StaleQueueError, with a remedy.

        Empty directories that are missing (git drops them) are created again.
        """
        queue = cls.read(path)
        for directory in (queue.members, *(queue.split(split).cursors for split in queue.description.splits)):
            with contextlib.suppress(OSError):  # a queue on a read-only disk can still be looked at
                directory.mkdir(exist_ok=True)
        return queue

    @classmethod
    def read(cls, path: PathLike) -> Self:
        """The same, for somebody who only looks: nothing is created."""
        path = require_local(path, "a queue")
        if not path.is_dir():
            raise QueueNotFoundError(
                f"Queue directory not found: {path}; run `python prepare.py <config>` first (same config), or write to "
                "it with a QueueSink"
            )
        try:
            facts = orjson.loads(read_regular(path / QUEUE_FILE))
        except FileNotFoundError:
            raise QueueNotFoundError(
                f"{path} has no metadata ({QUEUE_FILE}), so it is not a queue; run `python prepare.py <config>` with a "
                "directory of its own"
            ) from None
        except ValueError as error:
            raise StaleQueueError(f"{path / QUEUE_FILE} is damaged ({error}); {how_to_purge(path)}") from None
        found = facts.get("version") if isinstance(facts, dict) else None
        if found != _VERSION:
            raise StaleQueueError(
                f"{path / QUEUE_FILE} has version {found!r}, this penstock reads version {_VERSION}; use the penstock "
                f"that made it, or {how_to_purge(path)}"
            )
        try:
            return cls._from_facts(path, facts)
        except (KeyError, TypeError, ValueError) as error:
            raise StaleQueueError(f"{path / QUEUE_FILE} was changed by hand ({error}); {how_to_purge(path)}") from None

    @classmethod
    def _from_facts(cls, path: Path, facts: Mapping[str, Any]) -> Self:
        description = Description(dict(facts["meta"]), dict(facts["settings"]), facts["splits"])
        schema_of(description.meta)
        fingerprint = str(facts["fingerprint"])
        if description.fingerprint != fingerprint or description.lanes < 1 or description.batches_per_file < 1:
            raise ValueError("its contents do not have the fingerprint it names")
        if missing := [split for split in description.splits if not (path / split).is_dir()]:
            raise ValueError(f"there is no directory for the splits {missing}")
        return cls(path, description, fingerprint, str(facts.get("id", "")))

    @classmethod
    def create(cls, path: PathLike, description: Description) -> Self:
        """The queue at a path, created if there is none; raises StaleQueueError if its description differs.

        A queue that nothing was ever published to gets the new description: a first provider may have failed.
        """
        path = require_local(path, "a queue")
        if not path.exists() or not any(path.iterdir()):
            _create(path, description)
        queue = cls.open(path)
        if not queue._fits(description) and queue.is_unused():
            _describe_again(path, description)
            queue = cls.open(path)
        if not queue._fits(description):
            raise StaleQueueError(
                f"{path} holds batches that were made otherwise: {_changes(queue.description, description)}; "
                f"{how_to_purge(path)}"
            )
        if missing := [split for split in description.splits if split not in queue.description.splits]:
            raise StaleQueueError(
                f"{path} has the splits {list(queue.description.splits)} and not {missing}; {how_to_purge(path)}"
            )
        return queue

    def is_unused(self) -> bool:
        """True if nothing was ever published to the queue, and no member uses it."""
        splits = [self.split(name) for name in self.description.splits]
        if os.listdir(self.members) or any(set(split.names()) - {"lanes", "cursors"} for split in splits):
            return False
        lanes = [lane for split in splits for lane in self.lanes(split).all()]
        return all(lane.owner is None and lane.number < self.description.lanes for lane in lanes)

    def _fits(self, description: Description) -> bool:
        return self.fingerprint == description.fingerprint or self._lacks_code_only(description)

    def _lacks_code_only(self, description: Description) -> bool:
        """True if the queue has no hash of the provider's code (of an earlier penstock), and is the same otherwise."""
        if _CODE in self.description.settings or _CODE not in description.settings:
            return False
        same = replace(description, settings=_without_code(description)).fingerprint == self.fingerprint
        if same:
            logger.warning("%s has no hash of its provider's code: edits since then are not noticed", self.path)
        return same

    @property
    def meta(self) -> Mapping[str, Any]:
        return MappingProxyType(dict(self.description.meta))

    @property
    def settings(self) -> Mapping[str, Any]:
        return MappingProxyType(dict(self.description.settings))

    @property
    def repeatable(self) -> bool:
        """True if batch k can be made again: batches of a provider follow from the seed."""
        return "seed" in self.description.settings

    @property
    def members(self) -> Path:
        return self.path / "members"

    def split(self, name: str) -> SplitDirectory:
        splits = list(self.description.splits)
        if name not in splits:
            raise ConfigError(f"there is no split {name!r} in {self.path}; it has {splits}{did_you_mean(name, splits)}")
        return SplitDirectory(self.path / name)

    def lanes(self, directory: SplitDirectory) -> Lanes:
        """Lanes of a split."""
        return Lanes(directory.lanes, self.description.lanes)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn FileNotFoundError into QueueNotFoundError if the whole queue is gone."""
        try:
            yield
        except FileNotFoundError as error:
            if isinstance(error, QueueNotFoundError) or (self.path / QUEUE_FILE).exists():
                raise
            raise QueueNotFoundError(
                f"Queue directory not found: {self.path} was removed while it was in use; "
                "run `python prepare.py <config>` again (same config), then this"
            ) from error


def how_to_purge(path: PathLike) -> str:
    """Remedy in messages about stale data."""
    return f"run `penstock queue purge {path}` to delete the queued batches, then fill it again (prepare.py)"


def purge(path: PathLike, *, force: bool = False) -> int:
    """Remove a queue with one rename, then delete it; returns the bytes that were freed.

    A directory without a queue's metadata is not touched, unless `force` is given.
    """
    path = require_local(path, "a queue")
    if not path.is_dir():
        raise QueueNotFoundError(f"Queue directory not found: {path}; there is nothing to purge")
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; purge its target, {path.resolve()}")
    if not force and not (path / QUEUE_FILE).exists():
        raise ConfigError(f"{path} is not a queue: it has no {QUEUE_FILE}; nothing was removed (--force removes it)")
    gone = path.with_name(f".{path.name}~{secrets.token_hex(4)}.purged")
    path.rename(gone)
    size = sum(file.lstat().st_size for file in gone.rglob("*") if file.is_file())
    shutil.rmtree(gone)
    return size


def schema_of(meta: Mapping[str, Any]) -> Schema:
    """Schema of `meta["batch_schema"]`; shapes are those of one row."""
    entries = meta.get("batch_schema")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ConfigError(
            "build_meta() must return a 'batch_schema', a list such as "
            f'[{{"name": "x", "dtype": "int64", "shape": [8], "role": "input"}}], got {entries!r}'
        )
    fields = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not {"name", "dtype"} <= entry.keys():
            raise ConfigError(f"an entry of batch_schema has name, dtype, shape and role, got {entry!r}")
        check_options(entry, ("name", "dtype", "shape", "role"), "key", where=f"batch_schema of {entry['name']!r}")
        shape = entry.get("shape") or None
        if not isinstance(shape, Sequence | None) or isinstance(shape, str):
            raise ConfigError(f"batch_schema of {entry['name']!r}: shape must be a list of sizes, got {shape!r}")
        fields.append(Field(entry["name"], entry["dtype"], shape=shape, role=entry.get("role"), nullable=False))
    return Schema(fields)


def _create(path: Path, description: Description) -> None:
    """Build the queue under a temporary name, then rename it: the first of several processes wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}~{secrets.token_hex(4)}.tmp")
    try:
        temporary.mkdir()
        (temporary / "members").mkdir()
        _write(temporary, description)
        os.rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) or not path.is_dir():
            raise
        # Another process was faster.
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(path: Path, description: Description) -> None:
    """Write the directories of the splits, and then the metadata."""
    facts = {
        "version": _VERSION,
        "id": secrets.token_hex(8),
        "fingerprint": description.fingerprint,
        "meta": description.meta,
        "settings": description.settings,
        "splits": list(description.splits),
    }
    content = _to_json(facts, orjson.OPT_INDENT_2)
    for split in description.splits:
        directory = SplitDirectory(path / split)
        Lanes(directory.lanes, description.lanes).create()
        directory.cursors.mkdir()
    write_atomic(path / QUEUE_FILE, content)


def _describe_again(path: Path, description: Description) -> None:
    """Give an unused queue another description; of several processes, one does."""
    with FileLock(path / _LOCK) as lock:
        if not lock.acquire(_LOCK_SECONDS):
            raise StalledError(f"{path} is being set up by {lock.owner()}; start again when that is done")
        queue = Queue.open(path)
        if queue.is_unused():
            logger.info("%s was set up and never filled; it is set up again", path)
            for split in queue.description.splits:  # lanes and splits may be others now
                shutil.rmtree(path / split)
            _write(path, description)


def _to_json(facts: Mapping[str, Any], options: int) -> bytes:
    try:
        return orjson.dumps(facts, option=options | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ConfigError(f"build_meta() and the config must be plain values that JSON can hold: {error}") from None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of two plain values, leaf by leaf: `batch_schema[0].role was 'input', is 'target'`."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    return [
        f"{path.lstrip('.')} was {_short(old.get(path))}, is {_short(new.get(path))}"
        for path in dict.fromkeys([*old, *new])
        if path not in old or path not in new or old[path] != new[path]
    ]


def _without_code(description: Description) -> dict[str, Any]:
    return {name: value for name, value in description.settings.items() if name != _CODE}


def _changes(old: Description, new: Description) -> str:
    """`meta vocab_size was 65, is 70; ...`, for messages."""
    found = []
    before, now = (dict(each.settings.get(_CODE) or {}) for each in (old, new))
    if edited := [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]:
        found.append(f"the code of the provider was edited ({', '.join(edited)})")
    for title, was, is_ in (("meta", old.meta, new.meta), ("setting", _without_code(old), _without_code(new))):
        found += [f"{title} {change}" for change in differences(was, orjson.loads(_to_json(is_, 0)))]
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join(found[:_SHOWN] + more) or "the fingerprints differ"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for place, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{place}]")
    else:
        yield path, value


def _not_plain(value: Any, path: str) -> Iterator[str]:
    """Values that JSON would change silently, or refuse without a path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _not_plain(inner, f"{path}.{key}")
            else:
                yield f"{path} has the key {key!r}, which is not a string"
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _not_plain(inner, f"{path}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
