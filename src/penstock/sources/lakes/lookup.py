"""Lake tables found by their paths: a directory with a log is a table, not a folder of Parquet files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from penstock.connections.delta import delta_log_at
from penstock.connections.iceberg import iceberg_metadata_at
from penstock.errors import ConfigError
from penstock.files.filesystems import is_object_url, local_or_none, shown
from penstock.files.listing import PathLike
from penstock.sources.lakes.base import LakeSource
from penstock.sources.lakes.delta import DeltaSource
from penstock.sources.lakes.iceberg import IcebergSource

_VERSION = re.compile(r"(?P<path>.+)@v(?P<number>\d+)/?")


def open_lake(path: PathLike, **options: Any) -> LakeSource | None:
    """The source of a Delta or Iceberg table, if there is one at a path or URL; None if not.

    `path@v12` is a version of the table, or a snapshot. Two small requests answer the question at a URL.
    """
    text = os.fspath(path)
    if not _may_be_table(text):
        return None
    kind = _kind_at(text)
    if kind is None and (found := _VERSION.fullmatch(text)) is not None:
        kind = _kind_at(found["path"])
        if kind is not None:
            name = "version" if kind is DeltaSource else "snapshot"
            if options.get(name) is not None:
                raise ConfigError(f"{shown(text)!r} names a version, and {name}={options[name]} another; pass one")
            return kind(found["path"], **{**options, name: int(found["number"])})
    return None if kind is None else kind(text, **options)


def lake_among(paths: Sequence[PathLike], **options: Any) -> LakeSource | None:
    """The source of a table that was passed alone; None if none of the paths is a table."""
    if len(paths) == 1:
        return open_lake(paths[0], **options)
    for path in paths:
        if (found := open_lake(path)) is not None:
            raise ConfigError(f"{shown(path)!r} is a {found.kind}, and a table is read alone; got {len(paths)} paths")
    return None


def _kind_at(path: str) -> type[DeltaSource] | type[IcebergSource] | None:
    if delta_log_at(path):
        return DeltaSource
    return IcebergSource if iceberg_metadata_at(path) else None


def _may_be_table(path: str) -> bool:
    """False for what is certainly none, without a request to a server: files, globs, web pages."""
    if path.partition("?")[0].endswith(".metadata.json"):
        return True
    local = local_or_none(path)
    if local is not None:
        return local.is_dir() or "@v" in path
    clean = path.partition("?")[0]
    name = clean.rstrip("/").rpartition("/")[2]
    if not is_object_url(path) or "*" in clean:
        return False
    return clean.endswith("/") or "." not in name or "@v" in name
