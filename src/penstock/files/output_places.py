"""Places to write to: paths on this machine, and URLs of object stores."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.errors import ConfigError
from penstock.files.filesystems import cut, is_remote, local_or_none, require_local, shown
from penstock.files.listing import PathLike
from penstock.files.objects import LEAST_PART_BYTES, OBJECT_SCHEMES, is_object_url, open_bucket

_LONGEST_PART_BYTES = 64 << 20


def output_place(path: PathLike, what: str) -> Path | str:
    """The local path, or the URL of an object store, at which something is to be written; others are a ConfigError.

    A URL that went through `Path`, which makes one slash of two, is restored.
    """
    text = os.fspath(path)
    scheme, colon, rest = text.partition(":/")
    if colon and scheme.lower() in OBJECT_SCHEMES and "::" not in text:
        return f"{scheme}://{rest.lstrip('/')}"
    if is_remote(text) and local_or_none(text) is None:
        raise ConfigError(
            f"{shown(text)!r} is a URL that cannot be written to: {what} must be a path on this machine or a URL of an "
            "object store (s3://, gs://, az://); write there, and copy it with the tools of the storage"
        )
    return require_local(path, what)


def beside(place: Path | str, prefix: str = "", suffix: str = "") -> Path | str:
    """The place with a longer name: `.out.jsonl.lock` for `out.jsonl`. The query of a URL stays behind it."""
    if isinstance(place, Path):
        return place.with_name(f"{prefix}{place.name}{suffix}")
    path, query = cut(place)
    above, slash, name = path.rstrip("/").rpartition("/")
    return f"{above}{slash}{prefix}{name}{suffix}{query}"


def name_of(place: PathLike) -> str:
    """The last part of a path or URL, without a query."""
    text = os.fspath(place)
    return cut(text)[0].rstrip("/").rpartition("/")[2] if is_object_url(text) else Path(text).name


def shown_place(place: Path | str) -> str:
    """A path or URL for messages and states: without a query, which may hold credentials, and without a password."""
    return str(place) if isinstance(place, Path) else shown(cut(place)[0].rstrip("/"))


def part_bytes_within(budget_bytes: int) -> int:
    """Size of the parts of an upload, of which three are in memory: less than a fifth of a budget, if S3 takes such."""
    return min(_LONGEST_PART_BYTES, max(LEAST_PART_BYTES, budget_bytes // 16))


def bucket_has(url: PathLike) -> bool:
    """True if there is an object at a URL, or any below it."""
    bucket, key = open_bucket(url)
    return bucket.info(key) is not None or next(bucket.objects(f"{key}/"), None) is not None
