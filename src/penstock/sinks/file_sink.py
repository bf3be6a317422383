"""Base of the file sinks: whole files by atomic rename, and runs that survive kill -9.

A target with a suffix is one file, written under a hidden name and renamed when it is whole. Without a suffix
it is a directory of part files, written into a hidden directory next to it and renamed in one step too.

After `restore` a sink writes durably: each checkpoint finishes a segment in the hidden directory, and `flush` joins the
segments into the one file, or makes them the part files of the directory.

The hidden directory belongs to one run at a time: a lock next to it keeps out a second live run, and the name of
the run in it one whose checkpoint is older.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

import pyarrow as pa

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.atomic import (
    AtomicFile,
    check_own_directory,
    refuse_link,
    remove_leftovers,
    remove_own_directory,
    strangers,
    sync_directory,
    write_atomic,
)
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike, split_suffix
from penstock.files.locks import FileLock
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.checkpoint import schema_from_text, schema_to_text
from penstock.pipeline.stages import Sink, State

_RUN = ".penstock-run"
"""In the hidden directory: which run its files are from."""
_OWN = re.compile(r"part-\d{6,}[\w.]*|\.(part-\d{6,}[\w.]*|\.penstock-run)\.\d+-[0-9a-f]{8}\.tmp|\.penstock-run")
"""The names of all that is ever written into it."""


class Writer(Protocol):
    """Writes batches of one schema into an open file."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None:
        """Write what is left, footer included; the file itself stays open."""
        ...

    def abort(self) -> None:
        """Release everything; further writes are discarded, and errors on closing are ignored."""
        ...

    def held_bytes(self) -> int: ...


class FileSink(Sink):
    """Base of the sinks that write files."""

    suffix: ClassVar[str] = ""

    def __init__(self, path: PathLike, *, rows_per_file: int | None = None) -> None:
        self.path = require_local(path, "the output of a file sink")
        self._is_directory = not self.path.suffix or self.path.is_dir()
        if rows_per_file is not None and not self._is_directory:
            raise ConfigError(f"rows_per_file needs a directory to write to, and {self.path} is a file name")
        if rows_per_file is not None and rows_per_file <= 0:
            raise ConfigError(f"rows_per_file must be positive, got {rows_per_file}")
        self._rows_per_file = rows_per_file
        self._lock = FileLock(self.path.with_name(f".{self.path.name}.penstock-lock"))
        self._watched = False
        """True if the file system has locks, so that losing this one can be noticed."""
        self._run = secrets.token_hex(8)
        self._schema: pa.Schema | None = None
        self._file: AtomicFile | None = None
        self._writer: Writer | None = None
        self._file_rows = 0
        self._segments = 0
        """Files that are finished, in the hidden directory or, if there is only one, at the target."""
        self._began = False
        self._durable = False
        self._published = False
        self._replaces = False

    # -- implemented by formats ---------------------------------------------------------------------------------------

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        """A writer into an open file; `first` is false for the second and later pieces of one file."""
        raise NotImplementedError(type(self).__name__)

    def _join(self, segments: list[Path], target: BinaryIO) -> None:
        """Finished segments into one file. Formats that can be laid end to end just are."""
        for segment in segments:
            with open(segment, "rb") as piece:
                shutil.copyfileobj(piece, target, 1 << 20)

    # -- a sink ------------------------------------------------------------------------------------------------------

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._published:
            raise ConfigError(f"{self!r} has published its output; call reset() before writing again")
        self._check_still_ours()
        if self._schema is None:
            self._schema = batch.schema
        elif not batch.schema.equals(self._schema):
            difference = describe_difference(self._schema, batch.schema)
            raise SchemaError(f"{self!r} got another schema than before: {difference}")
        if not self._segments and self._writer is None:
            self._begin()  # even without rows: the columns are known now
        while batch.num_rows:
            if self._writer is None:
                self._begin()
            room = batch.num_rows if self._rows_per_file is None else self._rows_per_file - self._file_rows
            part, batch = batch.slice(0, room), batch.slice(room)
            assert self._writer is not None
            with self._refusing():
                self._writer.write(part)
            self._file_rows += part.num_rows
            if self._file_rows == self._rows_per_file:
                self._end()

    def flush(self) -> None:
        """Publish. Doing it again, or after a crash in the middle of it, is safe."""
        if self._published:
            return
        self._check_still_ours()
        if self._writer is None and not self._segments:
            self._begin()  # nothing came, not even columns: an empty file all the same
        self._end()
        if self._is_directory:
            self._publish_directory()
        elif self._durable:
            self._publish_joined()
        self._published = self._replaces = True
        self._lock.release()

    def memory_usage(self) -> int:
        writer = self._writer
        return writer.held_bytes() if writer is not None else 0

    def abort(self) -> None:
        """Remove what was not published, except what a checkpoint needs."""
        self._drop_open_file()
        ours = self._lock.held or not self._watched
        if ours and self._began and self._is_directory and not (self._durable or self._published):
            remove_own_directory(self._staging, _OWN)
        self._lock.release()

    close = abort

    def reset(self) -> None:
        """Ready for another run, which replaces what this one published."""
        self.abort()
        self._schema, self._segments = None, 0
        self._began = self._published = self._durable = False
        self._run = secrets.token_hex(8)

    def claim(self) -> None:
        """Lock the output for this run; an error names another run that writes it."""
        self._take_lock(take_over=False)

    def checkpoint(self) -> State:
        if not self._durable:
            raise ConfigError("checkpoint() without restore(): a plain run cannot be resumed; call restore({}) first")
        self._check_still_ours()
        self._end()
        schema = schema_to_text(self._schema) if self._schema is not None else None
        return {"segments": self._segments, "schema": schema, "run": self._run}

    def restore(self, token: State) -> None:
        self._drop_open_file()
        self._take_lock(take_over=True)
        try:
            self._restore(token)
        except BaseException:
            self._lock.release()
            raise

    def _restore(self, token: State) -> None:
        self._durable, self._segments = True, int(token.get("segments", 0))
        self._schema = schema_from_text(token["schema"]) if token.get("schema") else None
        self._run = token.get("run") or self._run
        foreign = strangers(self._staging, _OWN)
        segments = [self._segment(number) for number in range(self._segments)]
        missing = [segment for segment in segments if not segment.exists()]
        # Taking the hidden directory away is the last thing that flush does; of one segment, it takes that away before.
        taken = not self._staging.exists() or (bool(segments) and missing == segments)
        self._published = bool(token.get("finishing")) and taken and self.path.exists()
        if self._published:
            if self._owner() in (self._run, None) and not foreign:
                remove_own_directory(self._staging, _OWN)
            remove_own_directory(self._leftovers, _OWN)
            self._lock.release()
            return
        if missing:
            raise ResumeError(f"the checkpoint needs {missing[0]}, which is gone; delete the checkpoint to start again")
        if segments and self._owner() not in (self._run, None):
            raise ResumeError(
                f"another run has begun to write {self.path} since this checkpoint was made, and its segments are "
                "gone; delete the checkpoint to start again"
            )
        self._check_target()
        remove_leftovers(self.path)
        check_own_directory(self._staging, _OWN)
        self._staging.mkdir(exist_ok=True)
        self._began = True
        self._sweep(segments)  # what was written after the checkpoint: its rows come again
        write_atomic(self._staging / _RUN, self._run.encode())

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _staging(self) -> Path:
        """The hidden directory of finished segments."""
        return self.path.with_name(f".{self.path.name}.penstock-parts")

    @property
    def _leftovers(self) -> Path:
        """Directory being deleted: it is renamed first, since deletion takes several steps."""
        return self.path.with_name(f".{self.path.name}.penstock-old")

    def _segment(self, number: int) -> Path:
        suffix = self.suffix if self._is_directory else "".join(split_suffix(self.path))
        return self._staging / f"part-{number:06d}{suffix}"

    def _owner(self) -> str | None:
        """The run whose files are in the hidden directory; None if it is unknown."""
        with contextlib.suppress(FileNotFoundError):
            return (self._staging / _RUN).read_text(errors="replace")
        return None

    def _sweep(self, segments: list[Path]) -> None:
        """Remove from the hidden directory what is no segment."""
        for stray in self._staging.iterdir():
            if stray not in segments:
                stray.unlink()

    def _take_lock(self, *, take_over: bool) -> None:
        self._check_parent()
        self._watched = self._lock.hold(str(self.path), take_over=take_over)

    def _check_still_ours(self) -> None:
        if self._watched and not self._lock.held and self._began and (self._durable or self._is_directory):
            raise ConfigError(f"{self!r} was aborted, or another run into it has taken its place; use the newest one")

    def _check_parent(self) -> None:
        parent = self.path.parent
        if not parent.is_dir():
            raise FileNotFoundError(f"no such directory: {str(parent)!r}; make it before writing {self.path.name}")

    def _check_target(self) -> None:
        self._check_parent()
        if self._durable or self._is_directory:
            check_own_directory(self._leftovers, _OWN)
        if not self._is_directory:
            return
        if self.path.is_symlink():
            raise ConfigError(f"{self.path} is a symbolic link to a directory; write to the directory that it leads to")
        if self.path.is_file():
            raise ConfigError(f"{self.path} is a file, and a path without a suffix is written as a directory")
        if self.path.is_dir() and (strangers(self.path, _OWN) if self._replaces else any(self.path.iterdir())):
            raise ConfigError(f"directory {self.path} is not empty; delete it or write elsewhere")

    def _begin(self) -> None:
        in_parts = self._durable or self._is_directory
        if not self._began:
            self._check_target()
            remove_leftovers(self.path)
            if in_parts:
                self._take_lock(take_over=False)
                remove_own_directory(self._staging, _OWN)  # of a run that was killed
                self._staging.mkdir()
            self._began = True
        self._file = AtomicFile(self._segment(self._segments) if in_parts else self.path)
        schema = self._schema if self._schema is not None else pa.schema([])
        with self._refusing():
            self._writer = self._new_writer(self._file.file, schema, first=self._segments == 0 or self._is_directory)
        self._file_rows = 0

    def _end(self) -> None:
        """Finish the open file, if there is one, and give it its name."""
        if self._writer is None or self._file is None:
            return
        with self._refusing():
            self._writer.close()
        self._file.commit()
        self._writer = self._file = None
        self._segments += 1

    def _drop_open_file(self) -> None:
        if self._file is not None:
            self._file.discard()
            if self._writer is not None:
                self._writer.abort()
            self._file.abort()
        self._writer = self._file = None

    def _publish_directory(self) -> None:
        self._check_target()
        check_own_directory(self._staging, _OWN)
        remove_own_directory(self._leftovers, _OWN)
        self._sweep([self._segment(number) for number in range(self._segments)])
        if self.path.is_dir():
            if any(self.path.iterdir()):
                self.path.rename(self._leftovers)  # our own of the run before, or `_check_target` would have refused
            else:
                self.path.rmdir()
        self._staging.rename(self.path)
        sync_directory(self.path.parent)
        remove_own_directory(self._leftovers, _OWN)

    def _publish_joined(self) -> None:
        refuse_link(self._staging)
        remove_own_directory(self._leftovers, _OWN)
        segments = [self._segment(number) for number in range(self._segments)]
        if len(segments) == 1:
            segments[0].replace(self.path)
        else:
            with AtomicFile(self.path) as target:
                self._join(segments, target.file)
        self._staging.rename(self._leftovers)
        sync_directory(self.path.parent)
        remove_own_directory(self._leftovers, _OWN)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn Arrow's errors into SchemaError, and errors of the disk into ones that name this file."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), str(self.path)) from error
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise SchemaError(f"{self!r} cannot write these columns: {error}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"
