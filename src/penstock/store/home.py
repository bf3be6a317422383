"""Home of a store: the directory on disk or the prefix in a bucket below which its files are."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path

from penstock.errors import ConfigError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import cut, output_place, shown
from penstock.files.listing import PathLike
from penstock.files.objects import Bucket, open_bucket


class StoreHome(ABC):
    """The files of a store by their names in it, such as `versions/000001.json`. They appear whole or not at all."""

    shown: str
    """For messages: without a password."""
    path: Path | None = None
    """The directory, if it is one."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """All bytes of a file; FileNotFoundError if there is none."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Length of a file; None if there is none."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a file in one step, in place of the one that is there."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file; nothing happens if there is none."""

    @abstractmethod
    def list(self, folder: str = "") -> dict[str, int]:
        """Names of the files directly in a folder, in order, and their lengths; none if there is no such folder."""

    def exists(self, name: str) -> bool:
        return self.size(name) is not None

    def place(self, name: str) -> str:
        """Path or URL of a file, for messages."""
        return f"{self.shown}/{name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"


class LocalHome(StoreHome):
    """A store on disk."""

    path: Path

    def __init__(self, path: Path) -> None:
        self.path, self.shown = path, str(path)

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def size(self, name: str) -> int | None:
        file = self.path / name
        return file.stat().st_size if file.is_file() else None

    def write(self, name: str, data: bytes) -> None:
        target = self.path / name
        target.parent.mkdir(exist_ok=True)
        write_atomic(target, data)

    def delete(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def list(self, folder: str = "") -> dict[str, int]:
        inside = self.path / folder
        if not inside.is_dir():
            return {}
        return {file.name: file.stat().st_size for file in sorted(inside.iterdir()) if file.is_file()}

    def place(self, name: str) -> str:
        return str(self.path / name)


class BucketHome(StoreHome):
    """A store in a bucket. The URL as it was given opens it again, also in another process."""

    def __init__(self, url: PathLike) -> None:
        self.url = os.fspath(url)
        self.bucket: Bucket
        self.bucket, self.prefix = open_bucket(self.url)
        if not self.prefix:
            raise ConfigError(f"{shown(self.url)!r} is a whole bucket; name a store in it, such as bucket/name.store")
        self.shown = shown(cut(self.url)[0].rstrip("/"))

    @property
    def name(self) -> str:
        """The last part of its prefix."""
        return self.prefix.rpartition("/")[2]

    def key(self, name: str) -> str:
        return f"{self.prefix}/{name}"

    def read(self, name: str) -> bytes:
        return bytes(self.bucket.read(self.key(name)))

    def size(self, name: str) -> int | None:
        info = self.bucket.info(self.key(name))
        return info.size if info is not None else None

    def write(self, name: str, data: bytes) -> None:
        self.bucket.write(self.key(name), data)

    def delete(self, name: str) -> None:
        self.bucket.delete(self.key(name))

    def list(self, folder: str = "") -> dict[str, int]:
        prefix = self.key(folder).rstrip("/")
        return {info.key[len(prefix) + 1 :]: info.size for info in self.bucket.list_folder(prefix)[1]}


def store_home(path: PathLike | StoreHome) -> StoreHome:
    """The home of the store at a path or URL that a user gave.

    It is absolute: it stays right when the process changes its directory.
    """
    if isinstance(path, StoreHome):
        return path
    home = output_place(path, "a store")
    if not isinstance(home, Path):
        return BucketHome(home)
    home = home.absolute()
    return LocalHome(home if home.name not in ("", "..") else home.resolve())


def home_of(place: Path | StoreHome) -> StoreHome:
    """The home at a path that has been checked already."""
    return LocalHome(place) if isinstance(place, Path) else place
