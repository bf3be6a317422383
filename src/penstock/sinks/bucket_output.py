"""Output of a file sink in an object store: hidden objects for finished segments, uploads that appear whole.

One object is written in parts by a run without a checkpoint. Otherwise each segment becomes a hidden object in
`.name.penstock-parts/` beside the target; at the end they are joined into the one object, or copied by the server to
the names that readers look for, and `_SUCCESS` follows as the last object of a directory.

A run that was taken for dead and lives must not change what its successor writes: the names of segments hold a word
that is another one after each resume, and a checkpoint lists them.
"""

from __future__ import annotations

import re
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import orjson

from penstock.errors import ConfigError, ResumeError
from penstock.files.filesystems import beside, name_of, shown_place
from penstock.files.listing import split_suffix
from penstock.files.object_lock import ObjectLock
from penstock.files.objects import PART_BYTES, ObjectWriter, open_bucket, part_bytes_within
from penstock.files.remote import RemotePath
from penstock.pipeline.stages import State
from penstock.sinks.local_output import Join

SUCCESS = "_SUCCESS"
"""Last object of a directory: JSON with the run and the names and lengths of the others."""
_RUN, _PUBLISHING, _PUBLISHED = ".penstock-run", ".penstock-publishing", ".penstock-published"
_OWN = re.compile(r"part-\d{6,}-[0-9a-f]{8}[\w.]*|\.penstock-(run|publishing|published)")
_PART = re.compile(rf"part-\d{{6,}}[\w.]*|{SUCCESS}")


class BucketOutput:
    """The object at a URL, or the objects below it. It is written by one run at a time, which renews a lock beside it.
    A run that has lost it to another one ends with an error.
    """

    def __init__(self, url: str, suffix: str) -> None:
        self.path, self.shown = RemotePath(url), shown_place(url)
        self._bucket, self._key = open_bucket(url)
        name = name_of(url)
        if not self._key:
            raise ConfigError(f"{self.shown!r} is a whole bucket; name an object or a folder in it")
        self.is_directory = not Path(name).suffix or url.partition("?")[0].endswith("/")
        self._suffix = suffix if self.is_directory else "".join(split_suffix(name))
        self._staging = open_bucket(beside(url, ".", ".penstock-parts"))[1]
        self._lock_url = cast(str, beside(url, ".", ".penstock-lock"))
        self._lock: ObjectLock | None = None
        self._sessions: list[tuple[str, int]] = []
        """Word and number of segments of each process that wrote some; the last is this one."""
        self._part_bytes = PART_BYTES

    def fit_budget(self, nbytes: int) -> None:
        """Make the parts of an upload fit."""
        self._part_bytes = part_bytes_within(nbytes)

    # -- one run at a time -------------------------------------------------------------------------------------------

    def take_lock(self, *, take_over: bool) -> None:
        if self._lock is None:
            self._lock = ObjectLock(self._lock_url)
        self._lock.hold(self.shown, take_over=take_over)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def check(self) -> None:
        """Raise if another run has taken the lock."""
        if self._lock is not None:
            self._lock.check(self.shown)

    @property
    def is_ours(self) -> bool:
        return self._lock is None or self._lock.held

    # -- writing -----------------------------------------------------------------------------------------------------

    def begin(self, *, in_parts: bool, replaces: bool) -> None:
        """Make room for a run that begins."""
        self._bucket.list_folder(self._staging)  # a missing bucket and wrong keys are found before hours of work
        self._check_target(replaces=replaces)
        if in_parts:
            self.take_lock(take_over=False)
            self.clear()  # of a run that was killed
            self._sessions = [(secrets.token_hex(4), 0)]

    def open(self, number: int, *, in_parts: bool) -> UploadedFile:
        """An upload for the rows that follow: a segment, or all there is."""
        if not in_parts:
            return UploadedFile(self._bucket.writer(self._key, self._part_bytes))
        word, _ = self._sessions[-1]
        before = sum(count for _, count in self._sessions[:-1])
        self._sessions[-1] = (word, number - before + 1)
        return UploadedFile(self._bucket.writer(self._segments()[number], self._part_bytes))

    def clear(self) -> None:
        """Delete what was not published."""
        self._delete(self._strays())

    def token(self) -> State:
        return {"sessions": [[word, count] for word, count in self._sessions if count]}

    def restore(self, token: State, run: str, count: int, *, replaces: bool) -> bool:
        """Go back to the segments of a checkpoint; True if their run has published them."""
        there = self._staged()
        self._sessions = [(str(word), int(made)) for word, made in token.get("sessions", [])]
        segments = self._segments()
        if len(segments) != count:
            raise ResumeError(f"the state is damaged: it has {count} segments and names {len(segments)}")
        if bool(token.get("finishing")) and (not there or self._mark(_PUBLISHED) == run) and self._is_there(run):
            self.clear()
            return True
        missing = [key for key in segments if key not in there]
        if missing:
            raise ResumeError(
                f"the checkpoint needs {self._bucket.url_of(missing[0])}, which is gone; delete the checkpoint to "
                "start again"
            )
        if segments and self._mark(_RUN) not in (run, None):
            raise ResumeError(
                f"another run has begun to write {self.shown} since this checkpoint was made, and its segments are "
                "gone; delete the checkpoint to start again"
            )
        if self._mark(_PUBLISHING) != run:
            self._check_target(replaces=replaces)
            self._delete(key for key in self._strays() if key not in segments)  # their rows come again
        self._bucket.write(f"{self._staging}/{_RUN}", run.encode())
        self._sessions.append((secrets.token_hex(4), 0))
        return False

    def publish_directory(self, count: int, run: str, *, replaces: bool) -> None:
        """Copy the segments to their names; `_SUCCESS` comes last. Doing it again after a kill does the rest."""
        if self._mark(_PUBLISHING) != run:
            self._check_target(replaces=replaces)
            self._bucket.write(f"{self._staging}/{_PUBLISHING}", run.encode())
        self._bucket.delete(f"{self._key}/{SUCCESS}")
        files: list[dict[str, Any]] = []
        staged = self._staged()
        for number, key in enumerate(self._segments()[:count]):
            self.check()
            name = f"part-{number:06d}{self._suffix}"
            self._bucket.copy(key, f"{self._key}/{name}")
            files.append({"name": name, "bytes": staged[key]})
        kept = {file["name"] for file in files}
        self._delete(f"{self._key}/{name}" for name in self._published() if name not in kept)
        self._bucket.write(f"{self._key}/{SUCCESS}", orjson.dumps({"run": run, "files": files}))
        self._end(run)

    def publish_joined(self, count: int, run: str, join: Join) -> None:
        segments = self._segments()[:count]
        if len(segments) == 1:
            self._bucket.copy(segments[0], self._key)
        else:
            with tempfile.TemporaryDirectory(prefix="penstock-") as folder, self._writer() as target:
                join(self._downloaded(segments, Path(folder)), cast(BinaryIO, target))
        self._end(run)

    def _writer(self) -> ObjectWriter:
        return self._bucket.writer(self._key, self._part_bytes)

    def _downloaded(self, segments: list[str], folder: Path) -> Iterator[Path]:
        """The segments as local files, of which there is one at a time."""
        for key in segments:
            copy = folder / key.rpartition("/")[2]
            with open(copy, "wb") as file:
                self._bucket.download(key, file)
            yield copy
            copy.unlink()

    def _end(self, run: str) -> None:
        """Delete the segments. A run that is killed here finds that it has published."""
        self._bucket.write(f"{self._staging}/{_PUBLISHED}", run.encode())
        self._delete(key for key in self._strays() if not key.endswith(_PUBLISHED))
        self._bucket.delete(f"{self._staging}/{_PUBLISHED}")

    def _segments(self) -> list[str]:
        words = [word for word, count in self._sessions for _ in range(count)]
        return [f"{self._staging}/part-{number:06d}-{word}{self._suffix}" for number, word in enumerate(words)]

    def _staged(self) -> dict[str, int]:
        """Hidden objects, and their lengths."""
        return {info.key: info.size for info in self._bucket.objects(f"{self._staging}/")}

    def _strays(self) -> list[str]:
        keys = list(self._staged())
        for key in keys:
            if not _OWN.fullmatch(key[len(self._staging) + 1 :]):
                raise ConfigError(
                    f"{self._bucket.url_of(self._staging)}/ is where penstock keeps unfinished output, and it holds "
                    f"{key!r}, which penstock did not write; move it elsewhere, then try again"
                )
        return keys

    def _delete(self, keys: Any) -> None:
        listed = list(keys)
        if listed:
            self._bucket.delete(*listed)

    def _mark(self, name: str) -> str | None:
        try:
            return bytes(self._bucket.read(f"{self._staging}/{name}")).decode(errors="replace")
        except FileNotFoundError:
            return None

    def _is_there(self, run: str) -> bool:
        if not self.is_directory:
            return self._bucket.info(self._key) is not None
        try:
            return bool(orjson.loads(bytes(self._bucket.read(f"{self._key}/{SUCCESS}")))["run"] == run)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _published(self) -> list[str]:
        return [info.key[len(self._key) + 1 :] for info in self._bucket.objects(f"{self._key}/")]

    def _check_target(self, *, replaces: bool) -> None:
        if not self.is_directory:
            return
        names = self._published()
        foreign = [name for name in names if not _PART.fullmatch(name)] if replaces else names
        if foreign:
            raise ConfigError(
                f"there are objects below {self.shown}/ already, such as {foreign[0]!r}; delete them or write elsewhere"
            )


class UploadedFile:
    """An object being written, as an `AtomicFile` is on disk."""

    def __init__(self, writer: ObjectWriter) -> None:
        self._writer = writer
        self.file = cast(BinaryIO, writer)

    def held_bytes(self) -> int:
        return self._writer.held_bytes()

    def commit(self) -> None:
        self._writer.commit()

    def discard(self) -> None:
        """Discard further writes, so that a writer can close without errors before `abort`."""
        self._writer.discarding = True

    def abort(self) -> None:
        self._writer.abort()
