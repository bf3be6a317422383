"""Manifest of a store: its content, its lineage (inputs, steps, content key), and the checksum of every file."""

from __future__ import annotations

import base64
import fnmatch
import glob
import hashlib
import os
import re
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import xxhash

from penstock.arrays.ragged import is_any_list
from penstock.errors import ConfigError, DataError
from penstock.files.checksums import FileFingerprint
from penstock.files.compression import inflate
from penstock.files.filesystems import cut, is_object_url, is_remote, require_local, shown
from penstock.files.listing import PathLike
from penstock.files.objects import open_bucket
from penstock.store.home import BucketHome, StoreHome, home_of, store_home

_KEY_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Lineage:
    """Inputs and steps of a run. Everything but `notes` goes into the key."""

    inputs: tuple[FileFingerprint, ...] = ()
    tokenizer: str | None = None
    """The tokenizer's fingerprint."""
    template: str | None = None
    """The chat template's fingerprint."""
    transforms: tuple[str, ...] = ()
    """`describe()` of each step, in order; a step whose results change has to describe itself differently."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Anything else worth keeping, as plain values; `unnamed` is the reason why there is no key."""

    @property
    def key(self) -> str | None:
        """None if the inputs are not known, or a step has no name: the content of the store has no name then."""
        if not self.inputs or self.notes.get("unnamed"):
            return None
        return content_key(self.inputs, tokenizer=self.tokenizer, template=self.template, transforms=self.transforms)

    def to_dict(self) -> dict[str, Any]:
        return {
            "inputs": [{"name": file.name, "size": file.size, "xxh3": file.xxh3} for file in self.inputs],
            "tokenizer": self.tokenizer,
            "template": self.template,
            "transforms": list(self.transforms),
            "notes": dict(self.notes),
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Lineage:
        inputs = [FileFingerprint(**file) for file in _is(facts["inputs"], list, "inputs")]
        for file in inputs:
            _is(file.name, str, "name of an input")
            _is(file.size, int, "size of an input")
            _is(file.xxh3, str, "hash of an input")
        return cls(
            inputs=tuple(inputs),
            tokenizer=_is(facts["tokenizer"], str | None, "tokenizer"),
            template=_is(facts["template"], str | None, "template"),
            transforms=tuple(_is(step, str, "step") for step in _is(facts["transforms"], list, "transforms")),
            notes=_is(facts["notes"], dict, "notes"),
        )


def content_key(
    inputs: Sequence[FileFingerprint],
    *,
    tokenizer: str | None = None,
    template: str | None = None,
    transforms: Iterable[str] = (),
) -> str:
    """Names a prepared data set by what it is made of: the bytes of its inputs in order, tokenizer, template, steps.

    File names, times, worker counts and machines are no part of it, so the same work is found again anywhere. But the
    directories that stand for columns are: other names are other values.
    """
    facts = {
        "key": _KEY_VERSION,
        "inputs": [[file.size, file.xxh3, *_partitions(file.name)] for file in inputs],
        "tokenizer": tokenizer,
        "template": template,
        "transforms": list(transforms),
    }
    return _digest(facts)


def combined_key(lineage: Sequence[Lineage]) -> str | None:
    """The key of rows that several runs added one after the other; of one run, its own."""
    keys = [run.key for run in lineage]
    if not keys or None in keys:
        return None
    return keys[0] if len(keys) == 1 else _digest(keys)


def _partitions(name: str) -> list[str]:
    return [folder for folder in name.split("/")[:-1] if "=" in folder]


def _digest(facts: object) -> str:
    return hashlib.blake2b(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
_PLAIN: dict[str, Any] = {
    "version": int,
    "parent": int | None,
    "created": str,
    "tokens_column": str | None,
    "mask_column": str | None,
    "key": str | None,
    "run": str | None,
}
_HEX = re.compile("[0-9a-f]{32}")
VERSIONS, SHARDS, BUILD = "versions", "shards", ".build"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard: an Arrow IPC file and its index, each named by its content.

    The same rows may have several indexes, one for each choice of the column of tokens.
    """

    name: str
    """xxh3-128 of the Arrow file, as hex."""
    rows: int
    tokens: int | None
    supervised: int | None
    bytes: int
    """Size of the Arrow file."""
    index_checksum: str
    index_bytes: int

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> ShardEntry:
        for name in ("name", "index_checksum"):
            if not _HEX.fullmatch(_is(facts[name], str, name)):
                raise ValueError(f"the {name} of a shard is {facts[name]!r:.80}, expected a checksum")
        for name in ("rows", "bytes", "index_bytes"):
            if not 0 <= _is(facts[name], int, name) < 1 << 60:
                raise ValueError(f"the {name} of a shard are {facts[name]}")
        for name in ("tokens", "supervised"):
            if not 0 <= (_is(facts[name], int | None, name) or 0) < 1 << 60:
                raise ValueError(f"the {name} of a shard are {facts[name]}")
        return cls(**facts)

    @property
    def file(self) -> str:
        return f"{SHARDS}/{self.name}.arrow"

    @property
    def index_file(self) -> str:
        return f"{SHARDS}/{self.name}-{self.index_checksum[:16]}.index"

    @property
    def sums_file(self) -> str:
        """Checksums of the parts of both files; only stores in buckets have them."""
        return f"{SHARDS}/{self.name}-{self.index_checksum[:16]}.sums"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One version of a store."""

    schema: pa.Schema
    shards: tuple[ShardEntry, ...]
    version: int = 1
    parent: int | None = None
    """The version that was current when this one was made."""
    created: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
    tokens_column: str | None = None
    mask_column: str | None = None
    lineage: tuple[Lineage, ...] = ()
    """Of each run that the rows came from, in order."""
    key: str | None = None
    """Names the content by what it was made of; None if that is not known."""
    run: str | None = None
    """Of the run that published it; tells a run that comes back after a crash whether this was its own doing."""

    @property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @property
    def tokens(self) -> int | None:
        return sum(shard.tokens or 0 for shard in self.shards) if self.tokens_column is not None else None

    @property
    def supervised(self) -> int | None:
        return sum(shard.supervised or 0 for shard in self.shards) if self.mask_column is not None else None

    @property
    def bytes(self) -> int:
        """Of all its files but the manifest."""
        return sum(shard.bytes + shard.index_bytes for shard in self.shards)

    @property
    def tokenizer(self) -> str | None:
        """Fingerprint of the tokenizer, if the last run named one."""
        return self.lineage[-1].tokenizer if self.lineage else None

    @property
    def template(self) -> str | None:
        return self.lineage[-1].template if self.lineage else None

    @property
    def checksum(self) -> str:
        return _checksum(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the file, but for its checksum."""
        return {
            "format": FORMAT_VERSION,
            "version": self.version,
            "parent": self.parent,
            "created": self.created,
            "key": self.key,
            "run": self.run,
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised": self.supervised,
            "bytes": self.bytes,
            "columns": {column.name: str(column.type) for column in self.schema},
            "tokens_column": self.tokens_column,
            "mask_column": self.mask_column,
            "schema": base64.b64encode(zlib.compress(self.schema.serialize())).decode(),
            "lineage": [lineage.to_dict() for lineage in self.lineage],
            "shards": [asdict(shard) for shard in self.shards],
        }

    @classmethod
    def from_dict(cls, facts: Mapping[str, Any]) -> Manifest:
        schema = pa.ipc.read_schema(pa.py_buffer(inflate(base64.b64decode(facts["schema"]))))
        plain = {name: _is(facts[name], kind, name) for name, kind in _PLAIN.items()}
        for name in ("tokens_column", "mask_column"):
            if plain[name] is not None and len(schema) and not _is_list(schema, plain[name]):  # no rows yet: no columns
                raise ValueError(f"its {name} {plain[name]!r} is no column of lists")
        return cls(
            schema=schema,
            shards=tuple(map(ShardEntry.from_dict, _is(facts["shards"], list, "shards"))),
            lineage=tuple(map(Lineage.from_dict, _is(facts["lineage"], list, "lineage"))),
            **plain,
        )


def _is(value: Any, kind: Any, name: str) -> Any:
    """The value, if it has this type."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"its {name} is {value!r:.80}")
    return value


def _is_list(schema: pa.Schema, name: str) -> bool:
    index = schema.get_field_index(name)
    return index >= 0 and is_any_list(schema.field(index).type)


def version_numbers(place: Path | StoreHome) -> list[int]:
    """In ascending order."""
    names = [Path(name) for name in home_of(place).list(VERSIONS)]
    return sorted(int(name.stem) for name in names if name.suffix == ".json" and name.stem.isdigit())


def is_store(place: Path | StoreHome) -> bool:
    """True if a directory, or a prefix of a bucket, holds a published store."""
    return home_of(place).exists(MANIFEST_NAME)


def is_whole(home: StoreHome, manifest: Manifest) -> bool:
    """True if all files of a version are there, and have their lengths."""
    there = {f"{SHARDS}/{name}": size for name, size in home.list(SHARDS).items()}
    return all(
        there.get(shard.file) == shard.bytes and there.get(shard.index_file) == shard.index_bytes
        for shard in manifest.shards
    )


def store_path(path: PathLike) -> Path:
    """Absolute path of a store on disk; a URL is refused."""
    home = store_home(require_local(path, "a store"))
    assert home.path is not None
    return home.path


def manifest_name(version: int | None = None) -> str:
    """Name of the manifest of a version in the store; None means the current one."""
    return MANIFEST_NAME if version is None else f"{VERSIONS}/{version:06d}.json"


def read_manifest(place: Path | StoreHome, version: int | None = None) -> Manifest:
    """The manifest of a version; damage, a newer format and a missing version are errors with a remedy."""
    home = home_of(place)
    file = home.place(manifest_name(version))
    try:
        data = home.read(manifest_name(version))
    except (FileNotFoundError, NotADirectoryError):
        raise _nothing_there(home, version) from None
    try:
        facts = orjson.loads(data)
        stated = facts.pop("checksum", None)
        written = facts["format"]
        if not isinstance(written, int):
            raise TypeError(f"its format is {written!r}")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(home, file, f"it is not a manifest ({error})") from error
    if written > FORMAT_VERSION:
        raise DataError(
            f"the store has format {written}, this release reads up to {FORMAT_VERSION}; update penstock", file=file
        )
    try:
        if stated != _checksum(facts):
            raise ValueError("its content does not match its checksum")
        return Manifest.from_dict(facts)
    except KeyError as error:
        raise _damaged(home, file, f"it lacks {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError, OSError, pa.ArrowException) as error:
        raise _damaged(home, file, str(error)) from error


def manifest_bytes(manifest: Manifest) -> bytes:
    """A manifest as it stands in its file."""
    facts = manifest.to_dict()
    return orjson.dumps(facts | {"checksum": _checksum(facts)}, option=orjson.OPT_INDENT_2)


def write_manifest(place: Path | StoreHome, manifest: Manifest, *, current: bool) -> None:
    """Write it durably under its version number or, with `current`, as the one that readers get."""
    home_of(place).write(manifest_name(None if current else manifest.version), manifest_bytes(manifest))


def _checksum(facts: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(orjson.dumps(facts, option=orjson.OPT_SORT_KEYS))


def _damaged(home: StoreHome, file: str, why: str) -> DataError:
    return DataError(
        f"the manifest is damaged: {why}; check out another version (there are {version_numbers(home)}), or delete the "
        "store and prepare it again",
        file=file,
    )


def _nothing_there(home: StoreHome, version: int | None) -> Exception:
    if version is not None and is_store(home):
        return DataError(f"the store has no version {version}; it has {version_numbers(home)}", file=home.shown)
    numbers = version_numbers(home)
    if home.path is not None:
        there = "there is no manifest.json in it" if home.path.is_dir() else "no such directory"
        looked = f" (looked from {Path.cwd()})"
    else:
        half = bool(home.list(BUILD) or home.list(SHARDS))
        inside = home.bucket.objects(home.key("")) if isinstance(home, BucketHome) else iter(())
        empty = not (half or numbers) and next(inside, None) is None
        there = "there are no objects below it" if empty else "there is no manifest.json below it"
        looked = ", though it has shards: its upload has not ended, or was cut off" if half and not numbers else ""
    if numbers:
        there += f", though it has the versions {numbers}: check one out"
    return FileNotFoundError(f"{home.shown!r} is not a store: {there}{looked}")


def bucket_stores(url: PathLike) -> list[str]:
    """URLs of the stores at a URL of an object store: itself, those directly below it, or those that a glob matches.

    None for raw files. A URL that ends with `.store` is taken for one, so that its absence is reported as such.
    """
    address, query = cut(os.fspath(url).rstrip("/"))
    address = address.rstrip("/")
    name = address.rpartition("/")[2]
    if name.endswith(".store") and not glob.has_magic(name):
        return [address + query]
    if glob.has_magic(name) and not glob.has_magic(address.rpartition("/")[0]):
        folder, pattern = address.rpartition("/")[0], name
    elif "." in name or glob.has_magic(address):
        return []
    else:
        bucket, key = open_bucket(address + query)
        if key and bucket.info(f"{key}/{MANIFEST_NAME}") is not None:
            return [address + query]
        folder, pattern = address, "*.store"
    bucket, key = open_bucket(folder + query)
    names = [found for found in bucket.list_folder(key)[0] if fnmatch.fnmatchcase(found, pattern)]
    prefix = f"{key}/" if key else ""
    stores = [found for found in names if bucket.info(f"{prefix}{found}/{MANIFEST_NAME}") is not None]
    return [f"{folder}/{found}{query}" for found in stores]


def is_bucket_store(path: PathLike) -> bool:
    """True if a path is the URL of one store in an object store; a name that ends with `.store` is taken for one."""
    if not is_object_url(path):
        return False
    address, query = cut(os.fspath(path).rstrip("/"))
    name = address.rstrip("/").rpartition("/")[2]
    if glob.has_magic(address) or "." in name:
        return name.endswith(".store") and not glob.has_magic(address)
    bucket, key = open_bucket(address.rstrip("/") + query)
    return (
        bool(key)
        and bucket.info(f"{key}/{MANIFEST_NAME}") is not None
        and next(bucket.objects(f"{key}/{VERSIONS}/"), None) is not None
    )


def refuse_remote_store(path: PathLike) -> None:
    """Raise a ConfigError if a URL leads to stores that cannot be opened there: they would be taken for raw files."""
    if is_object_url(path):
        address = cut(os.fspath(path))[0].rstrip("/")
        if address.endswith(".store") and glob.has_magic(address):
            raise ConfigError(f"{shown(address)!r} is a URL of several stores; open them one by one, or with a loader")
        return
    if not is_remote(path) or os.fspath(path).startswith("hf://"):
        return  # what the Hub has is fetched whole, and then it is local
    from penstock.files.remote import RemotePath, path_of  # for those who have URLs

    place = path_of(path)
    if not isinstance(place, RemotePath):
        return
    named = place.name.endswith(".store")
    # Requested only where it may be a directory: it costs two requests.
    if named or (
        place.can_be_listed
        and not place.suffix
        and not re.search(r"[*\[]", place.url)
        and (place / MANIFEST_NAME).is_file()
        and (place / VERSIONS).is_dir()
    ):
        raise ConfigError(
            f"{shown(place.url)!r} is a token store at a URL, and stores are read from local disk and from "
            "object stores (s3://, gs://, az://); copy the directory to one of these, and pass the copy"
        )


LABELS = ("label", "kto_tag")
"""Names of label columns: true for a good answer."""
REJECTED = ("rejected", "rejected_response", "rejected_messages")
"""Names of columns with answers that are not to be learned."""


def label_column(schema: pa.Schema) -> str | None:
    """The column with the labels: a boolean `label`, or `kto_tag` of any type; None if the rows have none."""
    for name in LABELS:
        at = schema.get_field_index(name)
        if at >= 0 and (name == "kto_tag" or pa.types.is_boolean(schema.field(at).type)):
            return name
    return None


def rejected_column(schema: pa.Schema) -> str | None:
    """A column of rejected answers without one of chosen answers; None if there is none."""
    return None if "chosen" in schema.names else next((name for name in REJECTED if name in schema.names), None)
