"""A queue directory as a whole: what its batches are, and how it is made, opened and purged."""

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

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, QueueNotFoundError, StaleQueueError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.fsqueue.lanes import lay_out
from penstock.fsqueue.layout import SplitDirectory
from penstock.types import Field, Schema

__all__ = ["Description", "Queue", "differences", "purge"]

logger = logging.getLogger(__name__)

_VERSION = 1
_FILE = "queue.json"
_CODE = "provider_code"
"""The setting that a provider's code is in."""
_TOLD = 5
_SPLIT = re.compile(r"[A-Za-z0-9][\w.-]*")
_TAKEN = ("members", _FILE)


@dataclass(frozen=True, slots=True)
class Description:
    """What the batches of a queue are: everything that a file of them depends on."""

    meta: Mapping[str, Any]
    """What the provider's `build_meta` returned; its `batch_schema` says what a batch holds."""
    settings: Mapping[str, Any]
    """`seed`, `batch_size`, `batches_per_file`, `lanes`, and what the provider declares to read of the config."""
    splits: Sequence[str]

    def __post_init__(self) -> None:
        if problems := list(_not_plain(self.meta, "meta")):
            raise ConfigError(f"build_meta() has to return plain values that JSON can hold: {'; '.join(problems[:5])}")
        if not self.splits or isinstance(self.splits, str):
            raise ConfigError(f"a queue has a list of splits, one at least, got {self.splits!r}")
        for split in self.splits:
            if not isinstance(split, str) or _SPLIT.fullmatch(split) is None or split in _TAKEN:
                raise ConfigError(f"a split's name is made of letters, digits, '_', '.' and '-', got {split!r}")

    @property
    def fingerprint(self) -> str:
        """The same for the same meta and settings, whatever the order of their keys."""
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
    """A queue directory that exists."""

    path: Path
    description: Description
    fingerprint: str
    id: str = ""
    """Drawn when the queue was made: one that was purged and made again is another."""

    @classmethod
    def open(cls, path: PathLike) -> Self:
        """The queue at a path; raises, with what to do, if there is none or it cannot be read."""
        path = require_local(path, "a queue")
        if not path.is_dir():
            raise QueueNotFoundError(
                f"Queue directory not found: {path}; run `python prepare.py <config>` first (same config), "
                "it makes the queue; a QueueSink makes one, too"
            )
        try:
            facts = orjson.loads((path / _FILE).read_bytes())
        except FileNotFoundError:
            raise QueueNotFoundError(
                f"{path} has no metadata ({_FILE}); it is no queue, or was not made by prepare.py; "
                "run `python prepare.py <config>` with a directory of its own"
            ) from None
        except ValueError as error:
            raise StaleQueueError(f"{path / _FILE} is damaged ({error}); {how_to_purge(path)}") from None
        if not isinstance(facts, dict) or facts.get("version") != _VERSION:
            found = facts.get("version") if isinstance(facts, dict) else None
            raise StaleQueueError(
                f"{path / _FILE} has version {found!r}, and this penstock reads version {_VERSION}; use the penstock "
                f"that made it, or {how_to_purge(path)}"
            )
        try:
            description = Description(dict(facts["meta"]), dict(facts["settings"]), facts["splits"])
            schema_of(description.meta)
            fingerprint = str(facts["fingerprint"])
            if description.fingerprint != fingerprint or description.lanes < 1 or description.batches_per_file < 1:
                raise ValueError("its contents do not have the fingerprint it names")
            if missing := [split for split in description.splits if not (path / split).is_dir()]:
                raise ValueError(f"there is no directory for the splits {missing}")
        except (KeyError, TypeError, ValueError) as error:
            raise StaleQueueError(f"{path / _FILE} was changed by hand ({error}); {how_to_purge(path)}") from None
        return cls(path, description, fingerprint, str(facts.get("id", "")))

    @classmethod
    def create(cls, path: PathLike, description: Description) -> Self:
        """The queue at a path, made if there is none; one that was made otherwise is refused, saying what differs.

        Whoever comes first makes it, whole, under another name, and then gives it its own.
        """
        path = require_local(path, "a queue")
        if not path.exists() or not any(path.iterdir()):
            _make(path, description)
        queue = cls.open(path)
        if queue.fingerprint != description.fingerprint and not queue._is_older(description):
            raise StaleQueueError(
                f"{path} holds batches that were made otherwise: {_differences(queue.description, description)}; "
                f"{how_to_purge(path)}"
            )
        if missing := [split for split in description.splits if split not in queue.description.splits]:
            raise StaleQueueError(
                f"{path} has the splits {list(queue.description.splits)}, and {missing} are asked for; "
                f"{how_to_purge(path)}"
            )
        return queue

    def _is_older(self, description: Description) -> bool:
        """Whether it was made before a queue knew the code of its provider, and is the same otherwise."""
        if _CODE in self.description.settings or _CODE not in description.settings:
            return False
        rest = {name: value for name, value in description.settings.items() if name != _CODE}
        same = replace(description, settings=rest).fingerprint == self.fingerprint
        if same:
            logger.warning(
                "%s was made before queues knew the code of their provider: whether it was edited since is not known",
                self.path,
            )
        return same

    @property
    def meta(self) -> Mapping[str, Any]:
        return MappingProxyType(dict(self.description.meta))

    @property
    def repeatable(self) -> bool:
        """Whether batch k would be made again as it was: those of a provider follow from the seed."""
        return "seed" in self.description.settings

    @property
    def settings(self) -> Mapping[str, Any]:
        return MappingProxyType(dict(self.description.settings))

    @property
    def members(self) -> Path:
        return self.path / "members"

    def split(self, name: str) -> SplitDirectory:
        splits = list(self.description.splits)
        if name not in splits:
            raise ConfigError(f"there is no split {name!r} in {self.path}; it has {splits}{did_you_mean(name, splits)}")
        return SplitDirectory(self.path / name)

    @contextlib.contextmanager
    def guarded(self) -> Any:
        """Says, where a file is missing, that the whole queue is gone, if it is."""
        try:
            yield
        except FileNotFoundError as error:
            if isinstance(error, QueueNotFoundError) or (self.path / _FILE).exists():
                raise
            raise QueueNotFoundError(
                f"Queue directory not found: {self.path} was removed while it was in use; "
                "run `python prepare.py <config>` again (same config), then this"
            ) from error


def how_to_purge(path: PathLike) -> str:
    """The remedy in messages about stale data."""
    return f"run `penstock queue purge {path}` to throw away what is queued, then fill it again (prepare.py)"


def purge(path: PathLike, *, force: bool = False) -> int:
    """Remove a queue, at once for everybody else; returns the bytes that were freed.

    A directory that has no queue's metadata in it is not touched, unless `force` is given.
    """
    path = require_local(path, "a queue")
    if not path.is_dir():
        raise QueueNotFoundError(f"Queue directory not found: {path}; there is nothing to purge")
    if path.is_symlink():
        raise ConfigError(f"{path} is a symbolic link; purge the directory that it leads to, {path.resolve()}")
    if not force and not (path / _FILE).exists():
        raise ConfigError(
            f"{path} is no queue: it has no {_FILE}; nothing was removed (--force removes it all the same)"
        )
    gone = path.with_name(f".{path.name}~{secrets.token_hex(4)}.purged")
    path.rename(gone)
    size = sum(file.lstat().st_size for file in gone.rglob("*") if file.is_file())
    shutil.rmtree(gone)
    return size


def schema_of(meta: Mapping[str, Any]) -> Schema:
    """The columns that `meta["batch_schema"]` promises; the shape of each is that of one row."""
    entries = meta.get("batch_schema")
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise ConfigError(
            "build_meta() must return a 'batch_schema', a list such as "
            f'[{{"name": "x", "dtype": "int64", "shape": [8], "role": "input"}}], got {entries!r}'
        )
    fields = []
    for entry in entries:
        if not isinstance(entry, Mapping) or not {"name", "dtype"} <= entry.keys():
            raise ConfigError(f"an entry of batch_schema has a name, a dtype, a shape and a role, got {entry!r}")
        if unknown := entry.keys() - {"name", "dtype", "shape", "role"}:
            raise ConfigError(
                f"batch_schema of {entry['name']!r}: unknown keys {sorted(unknown)}; known are name, dtype, shape, role"
            )
        shape = entry.get("shape") or None
        if not isinstance(shape, Sequence | None) or isinstance(shape, str):
            raise ConfigError(f"batch_schema of {entry['name']!r}: a row's shape is a list of sizes, got {shape!r}")
        fields.append(Field(entry["name"], entry["dtype"], shape=shape, role=entry.get("role"), nullable=False))
    return Schema(fields)


def _make(path: Path, description: Description) -> None:
    facts = {
        "version": _VERSION,
        "id": secrets.token_hex(8),
        "fingerprint": description.fingerprint,
        "meta": description.meta,
        "settings": description.settings,
        "splits": list(description.splits),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}~{secrets.token_hex(4)}.tmp")
    try:
        beside.mkdir()
        (beside / "members").mkdir()
        for split in description.splits:
            directory = SplitDirectory(beside / split)
            directory.lanes.mkdir(parents=True)
            directory.cursors.mkdir()
            lay_out(directory.lanes, description.lanes)
        write_atomic(beside / _FILE, _to_json(facts, orjson.OPT_INDENT_2))
        os.rename(beside, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) or not path.is_dir():
            raise
        # Another provider was faster.
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _to_json(facts: Mapping[str, Any], options: int) -> bytes:
    try:
        return orjson.dumps(facts, option=options | orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise ConfigError(f"build_meta() and the config have to be plain values that JSON can hold: {error}") from None


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`batch_schema[0].role was 'input', is 'target'`: what differs between two plain values, leaf by leaf."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    return [
        f"{path.lstrip('.')} was {_short(old.get(path))}, is {_short(new.get(path))}"
        for path in dict.fromkeys([*old, *new])
        if path not in old or path not in new or old[path] != new[path]
    ]


def _differences(old: Description, new: Description) -> str:
    """`meta vocab_size was 65, is 70; ...`, for messages."""
    found = []
    codes = [dict(each.settings.get(_CODE) or {}) for each in (old, new)]
    edited = [name for name in dict.fromkeys([*codes[0], *codes[1]]) if codes[0].get(name) != codes[1].get(name)]
    if edited:
        found.append(f"the code of the provider was edited ({', '.join(edited)})")
    was, is_ = ({name: value for name, value in each.settings.items() if name != _CODE} for each in (old, new))
    for title, before, now in (("meta", old.meta, new.meta), ("setting", was, is_)):
        found += [f"{title} {told}" for told in differences(before, orjson.loads(_to_json(now, 0)))]
    told = found[:_TOLD] + ([f"and {len(found) - _TOLD} more"] if len(found) > _TOLD else [])
    return "; ".join(told) or "the fingerprints differ"


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
    """What JSON would change without a word, or refuse without saying where."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if isinstance(key, str):
                yield from _not_plain(inner, f"{path}.{key}")
            else:
                yield f"{path} has the key {key!r}, which is no text"
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            yield from _not_plain(inner, f"{path}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path} is {value}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
