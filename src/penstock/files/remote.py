"""Paths into file systems by URL, and local copies of their files that are made once, for those who need files on disk.

`s3://`, `gs://` and `az://` are object stores (`files/objects.py`), `hdfs://` is Arrow's own file system, and every
other scheme (`memory://`, `https://`, `zip://a.csv::s3://...`) is what fsspec has for it. `file://` is a local path.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import orjson

from penstock.errors import ConfigError, DataError
from penstock.files.cache import default_cache_directory, get_or_make_file, lock_of
from penstock.files.filesystems import (
    cut,
    files_below,
    files_matching,
    has_password,
    is_object_url,
    is_remote,
    kind_of,
    local_path,
    look,
    naming_url,
    open_filesystem,
    require_local,
    scheme_of,
    select,
    shown,
    web_info,
)
from penstock.files.listing import FoundFiles, PathLike, list_files, refuse_tables, split_suffix
from penstock.files.locks import FileLock
from penstock.files.objects import open_bucket
from penstock.files.ranges.read_ahead import RangeFile, open_raw
from penstock.files.ranges.remote_file import InputFile, RemoteFile

if TYPE_CHECKING:
    from pyarrow.fs import FileInfo, FileSystem

__all__ = [
    "RemotePath",
    "clear_copies",
    "fetch",
    "fetch_files",
    "has_password",
    "is_remote",
    "local_copy",
    "open_filesystem",
    "path_of",
    "shown",
]

log = logging.getLogger(__name__)

_STAMPS = (
    *("etag", "e_tag", "content-md5", "digest", "md5hash", "blob_id", "oid", "sha256", "versionid", "version_id"),
    *("mtime", "modified", "created", "updated", "lastmodified", "last_modified", "last-modified"),
)
"""Names, in lower case, of the properties that change with a file's content in fsspec's file systems."""
_PIECE_BYTES = 4 << 20
_ATTEMPTS = 3
_ASKED_FOR = tuple(
    f"{name}{suffix}"
    for name in ("train", "test", "val", "sample_submission", "gender_submission")
    for suffix in (".csv", ".csv.gz", ".parquet")
)
"""Files to probe for on a web server, which cannot list a directory."""
_NOT_IN_NAMES = re.compile(r'[<>:"/\\|?*\x00-\x1f]')


@dataclass(frozen=True, slots=True)
class RemotePath(os.PathLike[str]):
    """A URL that is used as a path is: `RemotePath("s3://bucket/titanic") / "train.csv"`.

    A query (`?region=...`) stays after the path. `str()` is the whole URL, to open it; `repr()` hides a
    password in it. Nothing is looked up before `exists`, `open` and the like are called.

    A web server has no directories to list: for `http://` and `https://` a path whose last part has no suffix counts
    as one, and holds those of the usual files (`train.csv`, `test.csv.gz`, `sample_submission.parquet` ...) that the
    server has when each is requested.
    """

    url: str

    def __post_init__(self) -> None:
        if not is_remote(self.url):
            raise ConfigError(f"{self.url!r} is no URL; expected scheme://..., such as 's3://bucket/data'")

    def __truediv__(self, other: PathLike) -> RemotePath:
        path, rest = cut(self.url)
        return RemotePath(f"{path.rstrip('/')}/{os.fspath(other).strip('/')}{rest}")

    @property
    def name(self) -> str:
        """The last part of the path, without the query."""
        return cut(self.url)[0].rstrip("/").rpartition("/")[2]

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def parent(self) -> RemotePath:
        path, rest = cut(self.url)
        above = path.rstrip("/").rpartition("/")[0]
        return RemotePath(above + rest) if above.partition("://")[2] else self

    def open(self) -> Any:
        """The file for reading: bytes, with `seek`. Close it."""
        if is_object_url(self.url):
            return io.BufferedReader(RangeFile(_object(self.url)), _PIECE_BYTES)
        filesystem, path = open_filesystem(self.url)
        with naming_url(self.url):
            return filesystem.open_input_file(path)

    def read_bytes(self) -> bytes:
        with self.open() as file, naming_url(self.url):
            return bytes(file.read())

    @property
    def can_be_listed(self) -> bool:
        """True if directories can be listed: those of a web server cannot."""
        return scheme_of(self.url) not in ("http", "https")

    def exists(self) -> bool:
        return self.is_dir() if self._is_web_directory else kind_of(_look(self.url)) != "NotFound"

    def is_file(self) -> bool:
        return not self._is_web_directory and kind_of(_look(self.url)) == "File"

    def is_dir(self) -> bool:
        return self._is_web_directory or (self.can_be_listed and kind_of(_look(self.url)) == "Directory")

    def iterdir(self) -> Iterator[RemotePath]:
        """Entries of a directory, in order of their names."""
        if not self.can_be_listed:
            yield from (self / name for name in sorted(_ASKED_FOR) if _is_on_the_web((self / name).url))
            return
        if is_object_url(self.url):
            bucket, key = open_bucket(self.url)
            folders, objects = bucket.list_folder(key)
            names = {*folders, *(one.key.rpartition("/")[2] for one in objects if one.key != key)}
            yield from (self / name for name in sorted(names))
            return
        for info in select(*open_filesystem(self.url), self.url, recursive=False):
            yield self / info.base_name

    @property
    def _is_web_directory(self) -> bool:
        path = cut(self.url)[0]
        return not self.can_be_listed and (path.endswith("/") or not re.search(r"\.[A-Za-z]\w*$", self.name))

    def fetch(self, cache_dir: PathLike | None = None) -> Path:
        """A local copy; see `fetch`."""
        return fetch(self.url, cache_dir)

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"RemotePath({shown(self.url)!r})"

    def __fspath__(self) -> str:
        return self.url


def path_of(path: PathLike) -> Path | RemotePath:
    """A `RemotePath` for a URL, a `Path` for anything else, also for `file://`."""
    text = os.fspath(path)
    if not is_remote(text):
        return Path(text).expanduser()
    local = local_path(text)
    return local if local is not None else RemotePath(text)


def fetch(url: PathLike, cache_dir: PathLike | None = None, *, wait_seconds: float = 3600.0) -> Path:
    """A local copy of a file, made when it is first requested and again when the file has changed.

    The copy keeps the file's name. What tells a change is the size and the ETag or the time that the file system knows;
    asking for them is one request. Of many processes that ask at once one downloads, and the others wait; a copy
    appears whole or not at all. Nothing is evicted before `clear_copies` is called. Without a `cache_dir` the copies
    are in `remote` in penstock's cache directory. A `file://` URL is the local file itself.
    """
    text = os.fspath(url)
    local = local_path(text)
    if local is not None:
        return local
    if is_object_url(text):
        return _copy(_object(text), _cache(cache_dir), wait_seconds)
    filesystem, path = open_filesystem(text)
    return _fetch(filesystem, path, text, _cache(cache_dir), wait_seconds)


def local_copy(file: InputFile) -> Path:
    """The file itself; of a remote one a local copy, as `fetch` makes it."""
    return _copy(file, _cache(None)) if isinstance(file, RemoteFile) else file


def fetch_files(url: PathLike, suffixes: Sequence[str] = (), cache_dir: PathLike | None = None) -> FoundFiles:
    """Local copies of what a URL means: a file, the files below a directory, or those that a glob matches, in order.

    Hidden files are left out, `suffixes` choose among those of a directory; nothing found is an error. In a glob `*`
    and `[...]` stay within a part of the path and `**` does not; `?` begins a query.
    """
    text = os.fspath(url)
    folder = _cache(cache_dir)
    if is_object_url(text):
        found = list_files(text, suffixes)
        copies = [_copy(file, folder) for file in found if isinstance(file, RemoteFile)]
        return FoundFiles(copies, found.base, found.folders)
    filesystem, path = open_filesystem(text)
    kind = kind_of(look(filesystem, path, text))
    base = path.rstrip("/").split("/")
    if kind == "File":
        chosen, base = [path], base[:-1]
    elif kind == "Directory":
        files = files_below(filesystem, path, text)
        refuse_tables(files, path)
        chosen = [file for file in files if not suffixes or split_suffix(file)[0] in suffixes]
        if not chosen:
            wanted = f"{', '.join(suffixes)} file" if suffixes else "file"
            there = ", ".join(sorted({"".join(split_suffix(file)) or "no suffix" for file in files})) or "nothing"
            raise FileNotFoundError(f"no {wanted} in directory {shown(text)!r}; it holds: {there}")
    else:
        chosen = files_matching(filesystem, path, text)
        base = list(takewhile(lambda part: not re.search(r"[*\[]", part), base))
    places = [tuple(file.split("/")[:-1]) for file in chosen]
    return FoundFiles([_fetch(filesystem, file, text, folder) for file in chosen], tuple(base), places)


def fetched_path(path: PathLike) -> Path:
    """The path of a file to read; of a URL, that of its local copy."""
    return fetch(path) if is_remote(path) else Path(path)


def clear_copies(older_than_days: float | None = None, cache_dir: PathLike | None = None) -> int:
    """Delete local copies: all, or those that were fetched longer ago. How many bytes were freed.

    A copy that is being made stays. An open copy stays readable; on Windows it is kept. A path
    that `fetch` returned and that is not open becomes invalid.
    """
    if older_than_days is not None and older_than_days < 0:
        raise ConfigError(f"older_than_days must not be negative, got {older_than_days}; None is all of them")
    before = None if older_than_days is None else time.time() - 86_400 * older_than_days
    freed = 0
    folder = _cache(cache_dir)
    for name in glob.iglob("*/*/*", root_dir=folder):  # noqa: PTH207 - passes over folders that others delete meanwhile
        copy = folder / name
        # Another process may have deleted it first, and Windows keeps what is open.
        with contextlib.suppress(FileNotFoundError, PermissionError), FileLock(lock_of(copy)) as lock:
            if not copy.is_file() or (before is not None and copy.stat().st_mtime >= before):
                continue
            if lock.acquire():
                size = copy.stat().st_size
                copy.unlink()
                freed += size
        for parent in (copy.parent, copy.parent.parent):
            with contextlib.suppress(OSError):  # another state of the file, or another copy being made, is in it
                parent.rmdir()
    return freed


def _is_on_the_web(url: str) -> bool:
    """True if a web server has a file. An HTML page counts as missing; no answer at all is an error."""
    found = web_info(*open_filesystem(url), url)
    return found is not None and str(found.get("mimetype")) != "text/html"


def _look(url: str) -> FileInfo:
    if is_object_url(url):
        from pyarrow.fs import FileInfo, FileType

        bucket, key = open_bucket(url)
        found = bucket.info(key) if key else None
        if found is not None:
            return FileInfo(key, FileType.File, size=found.size)
        below = next(bucket.objects(key), None)
        return FileInfo(key, FileType.Directory if below is not None else FileType.NotFound)
    return look(*open_filesystem(url), url)


def _cache(directory: PathLike | None) -> Path:
    return require_local(directory, "cache_dir") if directory is not None else default_cache_directory() / "remote"


def _object(url: str) -> RemoteFile:
    """An object as it is now."""
    bucket, key = open_bucket(url)
    found = bucket.info(key) if key else None
    if found is None:
        there = "is a directory" if kind_of(_look(url)) == "Directory" else "does not exist"
        raise FileNotFoundError(f"{shown(url)!r} {there}; expected a file")
    path, query = cut(url)
    scheme, _, rest = path.partition("://")
    return RemoteFile(f"{scheme}://{rest.partition('/')[0]}{query}", key, found.size, found.etag, found.modified_ns)


def _copy(file: RemoteFile, cache: Path, wait_seconds: float = 3600.0) -> Path:
    """A local copy of a file in the state in which it was listed."""
    stamp = orjson.dumps([file.size, file.etag, file.modified_ns]).decode()
    name = _NOT_IN_NAMES.sub("_", file.name) or "file"

    def download(target: BinaryIO) -> None:
        with open_raw(file) as opened:
            shutil.copyfileobj(opened, target, _PIECE_BYTES)
        log.info("fetched %s", file)

    return get_or_make_file(
        cache / _digest(_identity(file.url, file.key)) / _digest(stamp) / name,
        download,
        is_valid=functools.partial(_is_whole, size=file.size),
        wait_seconds=wait_seconds,
        name=repr(str(file)),
    )


class _ChangedError(Exception):
    """The file changed while it was downloaded."""


def _fetch(filesystem: FileSystem, path: str, url: str, cache: Path, wait_seconds: float = 3600.0) -> Path:
    """A copy of the file at `path`, to which `url` leads: itself, its directory or a glob."""
    # The path on a web server has the query too, which may hold a secret, and hides the suffix.
    named = cut(path)[0] if scheme_of(url) in ("http", "https") else path
    home, name = cache / _digest(_identity(url, path)), _NOT_IN_NAMES.sub("_", named.rpartition("/")[2]) or "file"
    origin = url if cut(url)[0].endswith(name) else f"{url}: {path}"
    for _ in range(_ATTEMPTS):
        size, stamp = _stamp(filesystem, path, origin)

        def download(file: BinaryIO, size: int | None = size, stamp: str = stamp) -> None:
            copied = _download(filesystem, path, origin, file)
            if _stamp(filesystem, path, origin)[1] != stamp:
                raise _ChangedError
            if size not in (None, copied):
                raise DataError(f"received {copied} of {size} bytes", file=shown(origin))
            log.info("fetched %s", shown(origin))

        with contextlib.suppress(_ChangedError):
            return get_or_make_file(
                home / _digest(stamp) / name,
                download,
                is_valid=functools.partial(_is_whole, size=size),
                wait_seconds=wait_seconds,
                name=repr(shown(origin)),
            )
    raise DataError(f"the file changed during each of {_ATTEMPTS} downloads; fetch it later", file=shown(origin))


def _download(filesystem: FileSystem, path: str, url: str, file: BinaryIO) -> int:
    with naming_url(url):
        stream = filesystem.open_input_stream(path, compression=None)
    with stream:
        while True:
            with naming_url(url):
                piece = stream.read(_PIECE_BYTES)
            if not piece:
                return file.tell()
            file.write(piece)


def _stamp(filesystem: FileSystem, path: str, url: str) -> tuple[int | None, str]:
    """The size, and all that tells one state of a file from another."""
    with naming_url(url):
        info = look(filesystem, path, url)
        facts: dict[str, Any] = {"size": info.size, "mtime": info.mtime_ns}
        if kind_of(info) == "File" and hasattr(filesystem, "handler"):
            details = filesystem.handler.fs.info(path)
            facts |= {str(key): str(value) for key, value in details.items() if str(key).lower() in _STAMPS}
    if kind_of(info) != "File":
        there = "is a directory" if kind_of(info) == "Directory" else "does not exist"
        raise FileNotFoundError(f"{shown(url)!r} {there}; expected a file")
    return info.size, orjson.dumps(facts, option=orjson.OPT_SORT_KEYS).decode()


def _is_whole(target: Path, size: int | None) -> bool:
    try:
        found = target.stat().st_size
    except FileNotFoundError:
        return False
    return size is None or found == size


def _identity(url: str, path: str) -> str:
    """Identity of a file, the same for its own URL, its directory and a glob."""
    start, rest = cut(url)
    host = start.partition("://")[2].partition("/")[0].rpartition("@")[2]
    return f"{scheme_of(url)}://{host}{rest} {path}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
