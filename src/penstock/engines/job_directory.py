"""Directory of a job: what its tasks have made, in a place that all nodes share.

    job.json              the plan: splits, phases, learned schemas
    marker                bytes by which a node shows that it sees this directory
    split-3-of-16.lock    held by the process that runs this split
    done/map-0-000017     what a finished task has made, and its counts
    parts/...             rows, keys and quarantined rows that tasks leave to others

A file appears whole or not at all. Files of a task that was killed are overwritten by its next run, whose bytes are
the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, ResumeError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import beside
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import ObjectExistsError
from penstock.files.states import StateFormat, parse_json, to_json
from penstock.store.home import BucketHome, LocalHome, store_home

PLAN_NAME, MARKER_NAME, SPLITS_NAME = "job.json", "marker", "prepare.json"
_DONE, _PARTS = "done", "parts"
_SHARE_LOCK = re.compile(r"split-(\d+)-of-(\d+)\.lock")
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)
"""Errors of file systems without hard links."""
_RECORD = StateFormat("task of a job", "a finished task of a job")


class JobDirectory:
    """A directory, or a prefix in a bucket."""

    def __init__(self, place: PathLike) -> None:
        home = store_home(place)
        assert isinstance(home, LocalHome | BucketHome)
        self.home = home
        self.shown = home.shown
        self.created_bytes: dict[str, int] = {}
        """Sizes of the parts that were created through this object, by name."""

    @property
    def place(self) -> str:
        """Path or URL that opens it again, in another process too."""
        return str(self.home.path) if isinstance(self.home, LocalHome) else self.home.url

    @property
    def is_local(self) -> bool:
        return isinstance(self.home, LocalHome)

    def lock(self, name: str = "driver.lock") -> FileLock | ObjectLock:
        """Lock of the one driver, or another one."""
        if isinstance(self.home, LocalHome):
            self.home.path.mkdir(parents=True, exist_ok=True)
            return FileLock(self.home.path / name)
        return ObjectLock(f"{self.home.url.rstrip('/')}/{name}")

    def share_lock(self, share: tuple[int, int]) -> FileLock | ObjectLock:
        """Lock of the process that runs a share."""
        return self.lock(f"split-{share[0] + 1}-of-{share[1]}.lock")

    def check_no_shares(self) -> None:
        """Refuse to go on while a process runs a share; locks that killed ones have left are taken away."""
        for name in self.home.list():
            if (found := _SHARE_LOCK.fullmatch(name)) is None:
                continue
            with self.lock(name) as lock:
                if not lock.acquire():
                    raise ConfigError(
                        f"split {found[1]}/{found[2]} of the job in {self.shown} is still run by {lock.owner()}; wait "
                        "until all splits have ended, or stop them: what they have not done is done here"
                    )

    def make(self) -> None:
        if isinstance(self.home, LocalHome):
            for folder in (_DONE, _PARTS):
                (self.home.path / folder).mkdir(parents=True, exist_ok=True)

    def remove(self) -> None:
        """Delete what jobs have written here; called by the driver that holds the lock."""
        if isinstance(self.home, LocalHome):
            for folder in (_DONE, _PARTS):
                shutil.rmtree(self.home.path / folder, ignore_errors=True)
            for name in (PLAN_NAME, MARKER_NAME, SPLITS_NAME, "sink.json", "bad.jsonl"):
                self.home.delete(name)
            shutil.rmtree(self.home.path / "join", ignore_errors=True)
            with contextlib.suppress(OSError):  # files of others
                (self.home.path / "driver.lock").unlink(missing_ok=True)
                self.home.path.rmdir()
            return
        bucket, prefix = self.home.bucket, self.home.prefix
        keys = [info.key for info in bucket.objects(f"{prefix}/")]
        if keys:
            bucket.delete(*keys)

    # -- records -----------------------------------------------------------------------------------------------------

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A small file of the job; None if there is none."""
        try:
            data = self.home.read(name)
        except FileNotFoundError:
            return None
        try:
            return _RECORD.read(parse_json(data))
        except ValueError as error:
            raise ResumeError(
                f"{self.home.place(name)} is damaged ({error}); delete {self.shown} to start the job again"
            ) from error

    def write_json(self, name: str, facts: dict[str, Any]) -> None:
        self.home.write(name, to_json(_RECORD.write(facts)))

    def create_json(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        """Write a small file of the job, unless another process has done so before; what is there."""
        data = to_json(_RECORD.write(facts))
        if isinstance(self.home, LocalHome):
            _create(self.home.path / name, data)
        else:
            with contextlib.suppress(ObjectExistsError):
                self.home.bucket.write(self.home.key(name), data, create=True)
        found = self.read_json(name)
        if found is None:
            raise ResumeError(f"{self.home.place(name)} is gone; run the job again")
        return found

    def done(self) -> set[str]:
        """Names of the finished tasks."""
        return set(self.home.list(_DONE))

    def parts(self) -> dict[str, int]:
        """Names and sizes of the parts."""
        return self.home.list(_PARTS)

    def record(self, task: str) -> dict[str, Any]:
        found = self.read_json(f"{_DONE}/{task}")
        if found is None:
            raise ResumeError(f"{self.home.place(f'{_DONE}/{task}')} is gone; delete {self.shown} to start again")
        return found

    def finish(self, task: str, facts: dict[str, Any]) -> None:
        """Note that a task is done; from now on it is not run again."""
        self.write_json(f"{_DONE}/{task}", facts)

    # -- parts -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def created(self, name: str) -> Iterator[Path]:
        """A path on this machine to write a part to; the part appears when the block ends without an error."""
        if isinstance(self.home, LocalHome):
            folder = self.home.path / _PARTS
            temporary = folder / f".{name}.{secrets.token_hex(8)}.tmp"
        else:
            temporary = Path(tempfile.gettempdir()) / f"penstock-part-{secrets.token_hex(8)}"
        try:
            yield temporary
            self.created_bytes[name] = temporary.stat().st_size
            if isinstance(self.home, LocalHome):
                with open(temporary, "rb+") as file:
                    os.fsync(file.fileno())  # what is noted as done must not be lost with the machine
                temporary.replace(folder / name)
            else:
                with open(temporary, "rb") as file:
                    self.home.bucket.upload(self.home.key(f"{_PARTS}/{name}"), file)
        finally:
            temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def opened(self, name: str, folder: str = f"{_PARTS}/") -> Iterator[Path]:
        """A part, or a file of another folder, as a file of this machine."""
        if isinstance(self.home, LocalHome):
            path = self.home.path / f"{folder}{name}"
            if not path.exists():
                raise self._gone(name)
            yield path
            return
        temporary = Path(tempfile.gettempdir()) / f"penstock-part-{secrets.token_hex(8)}"
        try:
            with open(temporary, "wb") as file:
                self.home.bucket.download(self.home.key(f"{folder}{name}"), file)
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)

    def read_part(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes of a part, from one to another."""
        if not isinstance(self.home, LocalHome):
            return bytes(self.home.bucket.read(self.home.key(f"{_PARTS}/{name}"), int(start), stop and int(stop)))
        try:
            with open(self.home.path / _PARTS / name, "rb", buffering=0) as file:
                file.seek(start)
                return file.read(-1 if stop is None else int(stop - start))
        except FileNotFoundError:
            raise self._gone(name) from None

    def _gone(self, name: str) -> ResumeError:
        return ResumeError(f"{self.home.place(f'{_PARTS}/{name}')} is gone; delete {self.shown} to start the job again")

    def delete_parts(self, prefix: str = "", *, but: str | None = None) -> None:
        """Delete the parts whose names begin so, but those that end otherwise."""
        found = (name for name in self.home.list(_PARTS) if name.startswith(prefix))
        names = [name for name in found if but is None or not name.endswith(but)]
        if isinstance(self.home, LocalHome):
            for name in names:
                self.home.delete(f"{_PARTS}/{name}")
        elif names:
            self.home.bucket.delete(*(self.home.key(f"{_PARTS}/{name}") for name in names))


def _create(path: Path, data: bytes) -> None:
    """Write a file as a whole, unless there is one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    write_atomic(temporary, data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not path.exists():
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def default_place(target: Path | str) -> Path | str:
    """Directory of a job whose output is at `target`."""
    return beside(target, ".", ".job")
