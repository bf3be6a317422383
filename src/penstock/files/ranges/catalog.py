"""Listings of remote files: what a URL means, with the size and the ETag of each file, in few requests."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from itertools import takewhile

from penstock.files.filesystems import cut, is_object_url, matches_parts, scheme_of, shown
from penstock.files.listing import FoundFiles, homes_of, refuse_part_of_table, refuse_tables, split_suffix
from penstock.files.objects import Bucket, ObjectInfo, open_bucket
from penstock.files.ranges.remote_file import RemoteFile
from penstock.files.ranges.web import find_web_file

log = logging.getLogger(__name__)

_MAGIC = re.compile(r"[*\[]")


def find_remote(url: str, suffixes: Sequence[str]) -> FoundFiles | None:
    """The files that a URL means: itself, those below a directory, or those that a glob matches, in order.

    None if they can only be copied: by `files/remote.py`.
    """
    if is_object_url(url):
        return _find_objects(url, suffixes)
    if scheme_of(url) in ("http", "https") and "::" not in url:
        file = find_web_file(url)
        if file is None:
            log.info("%s: its server does not send ranges of files, so it is copied whole", shown(url))
            return None
        folder = tuple(cut(url)[0].partition("://")[2].split("/")[:-1])
        return FoundFiles([file], folder, [folder])
    return None


def _find_objects(url: str, suffixes: Sequence[str]) -> FoundFiles:
    bucket, key = open_bucket(url)
    path, query = cut(url)
    root = f"{path.partition('://')[0]}://{path.partition('://')[2].partition('/')[0]}{query}"
    name = bucket.url.partition("://")[2]

    def found(objects: Iterable[ObjectInfo], base: str) -> FoundFiles:
        files = [RemoteFile(root, one.key, one.size, one.etag, one.modified_ns) for one in objects]
        files.sort(key=lambda file: file.key.split("/"))
        folders = [(name, *file.key.split("/")[:-1]) for file in files]
        return FoundFiles(files, (name, *(base.split("/") if base else ())), folders)

    is_file = key and not path.endswith("/") and (_MAGIC.search(key) or "." in key.rpartition("/")[2])
    if is_file and (info := bucket.info(key)) is not None:
        return found([info], key.rpartition("/")[0])
    if _MAGIC.search(key):
        parts = key.split("/")
        base = "/".join(takewhile(lambda part: not _MAGIC.search(part), parts))
        chosen = [one for one in _below(bucket, base) if matches_parts(one.key.split("/"), parts)]
        if not chosen:
            raise FileNotFoundError(f"no file matches {shown(url)!r}")
        return found(chosen, base)
    below = _below(bucket, key)
    if not below and key and not is_file and (info := bucket.info(key)) is not None:
        return found([info], key.rpartition("/")[0])
    if not below:
        raise FileNotFoundError(f"no such file or directory: {shown(url)!r}")
    _refuse_part_of_table(bucket, key, shown(url))
    chosen_keys = set(chosen_names([one.key for one in below], suffixes, shown(url)))
    return found([one for one in below if one.key in chosen_keys], key)


def _refuse_part_of_table(bucket: Bucket, key: str, where: str) -> None:
    """Refuse a partition, or the `data`, of a lake table: only their names cost a request."""
    parts = key.split("/")
    if "=" not in parts[-1] and parts[-1] != "data":
        return
    for home in homes_of(parts):
        at = "/".join(home)
        folders, _ = bucket.list_folder(at)
        if "_delta_log" in folders:
            refuse_part_of_table(where, bucket.url_of(at), "a Delta")
        names = bucket.list_folder(f"{at}/metadata")[1] if "metadata" in folders else []
        if any(one.key.endswith(".metadata.json") for one in names):
            refuse_part_of_table(where, bucket.url_of(at), "an Iceberg")


def _below(bucket: Bucket, prefix: str) -> list[ObjectInfo]:
    """Every object below a prefix that is not hidden. An empty one without a suffix is what some tools write for a
    directory."""
    inside = len(prefix) + 1 if prefix else 0
    return [
        one
        for one in bucket.objects(prefix)
        if len(one.key) > inside
        and not any(part[:1] == "." for part in one.key[inside:].split("/"))
        and (one.size or "." in one.key.rpartition("/")[2])
    ]


def chosen_names(names: list[str], suffixes: Sequence[str], where: str) -> list[str]:
    """Names of the files below a directory that have one of the suffixes; none is an error that says what is there."""
    refuse_tables(names, where)
    chosen = [name for name in names if split_suffix(name)[0] in suffixes] if suffixes else names
    if not chosen:
        there = ", ".join(sorted({"".join(split_suffix(name)) or "no suffix" for name in names}))
        raise FileNotFoundError(f"no {', '.join(suffixes)} file in directory {where!r}; it holds: {there}")
    return chosen
