"""Place of a checkpoint: a directory, or a prefix in an object store, that one run uses at a time."""

from __future__ import annotations

import secrets
from pathlib import Path

import orjson

from penstock.errors import ConfigError, ResumeError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import output_place, shown_place
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import ChangedObjectError, ObjectExistsError, ObjectVersion, open_bucket
from penstock.files.remote import RemotePath

CHECKPOINT_NAME = "checkpoint.json"
_LOCK = "checkpoint.lock"
_BEGUN = "begun"
"""The only key of what stands in a bucket before the first save."""


class LocalCheckpointFile:
    """A checkpoint on disk."""

    def __init__(self, directory: Path) -> None:
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"run(checkpoint=...) takes a directory, and {directory} is a file")
        self._file, self.shown = directory / CHECKPOINT_NAME, str(directory)
        self._lock = FileLock(directory / _LOCK)

    @property
    def file(self) -> str:
        return str(self._file)

    def open(self) -> None:
        """Make it, and lock it until `close`."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._lock.hold(f"the checkpoint in {self.shown}")

    def close(self) -> None:
        self._lock.release()

    def read(self) -> bytes | None:
        """The last save; None before the first."""
        try:
            return self._file.read_bytes()
        except FileNotFoundError:
            return None

    def write(self, data: bytes) -> None:
        """Replace the checkpoint in one durable step."""
        write_atomic(self._file, data)

    def holder(self) -> str | None:
        """Word that a run leaves in the checkpoint when it begins; None: the lock of a live process is safe."""
        return None

    def begin(self) -> None:
        """Nothing: no stale run can write here."""


class BucketCheckpointFile:
    """A checkpoint in an object store. A run that has lost the lock without knowing it cannot replace what its
    successor wrote: the store refuses to."""

    def __init__(self, url: str) -> None:
        self._bucket, key = open_bucket(url)
        self.shown = shown_place(url)
        self._key = f"{key}/{CHECKPOINT_NAME}".lstrip("/")
        self._folder = key
        self._lock = ObjectLock(RemotePath(url) / _LOCK)
        self._version: ObjectVersion | None = None
        self._holder = secrets.token_hex(8)

    @property
    def file(self) -> str:
        return f"{self.shown}/{CHECKPOINT_NAME}"

    def open(self) -> None:
        if self._folder and self._bucket.info(self._folder) is not None:
            raise ConfigError(f"run(checkpoint=...) takes a folder of a bucket, and {self.shown} is an object")
        self._bucket.list_folder(self._folder)  # a missing bucket and wrong keys have errors of their own
        self._lock.hold(f"the checkpoint in {self.shown}")

    def close(self) -> None:
        self._lock.release()

    def read(self) -> bytes | None:
        while True:
            info = self._bucket.info(self._key)
            self._version = info.written if info is not None else None
            if info is None:
                return None
            try:
                data = bytes(self._bucket.read(self._key, etag=info.etag))
            except ChangedObjectError:
                continue  # another run has just saved
            return None if _is_begun(data) else data

    def write(self, data: bytes) -> None:
        try:
            first = self._version is None
            self._version = self._bucket.write(self._key, data, create=first, replaced=self._version)
        except (ObjectExistsError, FileNotFoundError):
            info = self._bucket.info(self._key)
            if info is None or bytes(self._bucket.read(self._key)) != data:  # else the answer to our write got lost
                raise ResumeError(
                    f"{self.file} was written by another run meanwhile, so this one has lost it and writes no more; "
                    "let that run end, or stop it and start this one again: it resumes"
                ) from None
            self._version = info.written

    def holder(self) -> str | None:
        return self._holder

    def begin(self) -> None:
        """Mark a checkpoint without a save as ours, so that a stale run cannot make the first."""
        self.write(orjson.dumps({_BEGUN: self._holder}))


def checkpoint_file(path: PathLike) -> LocalCheckpointFile | BucketCheckpointFile:
    """The place that a user named."""
    place = output_place(path, "checkpoint")
    return LocalCheckpointFile(place) if isinstance(place, Path) else BucketCheckpointFile(place)


def _is_begun(data: bytes) -> bool:
    try:
        facts = orjson.loads(data)
    except ValueError:
        return False
    return isinstance(facts, dict) and set(facts) == {_BEGUN}
