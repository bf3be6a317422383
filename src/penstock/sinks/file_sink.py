"""Base of the file sinks: whole files by atomic rename, and runs that survive kill -9.

A target with a suffix is one file, written under a hidden name and renamed when it is whole. Without a suffix
it is a directory of part files, written into a hidden directory next to it and renamed in one step too.

At a URL of an object store the same holds for objects, which have no rename; see `bucket_output`.

After `restore` a sink writes durably: each checkpoint finishes a segment in the hidden directory, and `flush` joins the
segments into the one file, or makes them the part files of the directory.

The hidden directory belongs to one run at a time: a lock next to it keeps out a second live run, and the name of
the run in it one whose checkpoint is older.
"""

from __future__ import annotations

import contextlib
import copy
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

import pyarrow as pa

from penstock.errors import ConfigError, SchemaError
from penstock.files.atomic import AtomicFile
from penstock.files.filesystems import name_of, output_place
from penstock.files.listing import PathLike
from penstock.files.remote import RemotePath
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.checkpoint import schema_from_text, schema_to_text
from penstock.pipeline.stages import Sink, State
from penstock.sinks.bucket_output import BucketOutput, UploadedFile
from penstock.sinks.local_output import LocalOutput


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


@dataclass(frozen=True)
class _Shown:
    """Name of an output that is written elsewhere."""

    shown: str


class FileSink(Sink):
    """Base of the sinks that write files."""

    suffix: ClassVar[str] = ""

    def __init__(self, path: PathLike, *, rows_per_file: int | None = None) -> None:
        place = output_place(path, "the output of a file sink")
        self._output = LocalOutput(place, self.suffix) if isinstance(place, Path) else BucketOutput(place, self.suffix)
        self.path: Path | RemotePath = self._output.path
        self._name = name_of(place)
        self._is_directory = self._output.is_directory
        if rows_per_file is not None and not self._is_directory:
            raise ConfigError(f"rows_per_file needs a directory to write to, and {self._output.shown} is a file name")
        if rows_per_file is not None and rows_per_file <= 0:
            raise ConfigError(f"rows_per_file must be positive, got {rows_per_file}")
        self._rows_per_file = rows_per_file
        self._run = secrets.token_hex(8)
        self._schema: pa.Schema | None = None
        self._file: AtomicFile | UploadedFile | None = None
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

    def _join(self, segments: Iterable[Path], target: BinaryIO) -> None:
        """Finished segments into one file. Formats that can be laid end to end just are."""
        for segment in segments:
            with open(segment, "rb") as piece:
                shutil.copyfileobj(piece, target, 1 << 20)

    # -- text that tasks of a job write ------------------------------------------------------------------------------

    @property
    def takes_parts(self) -> bool:
        """True if the one file may be laid together of parts that others have written with `part_writer`."""
        return False

    def part_facts(self) -> list[str]:
        """Options that decide the bytes of a part, apart from the rows."""
        return []

    def encoder(self) -> FileSink:
        """A copy for other processes, which makes parts and nothing else."""
        made = copy.copy(self)
        made.__dict__["_output"] = _Shown(self._output.shown)
        return made

    def part_writer(self, file: BinaryIO, schema: pa.Schema) -> Writer:
        """Writer of rows that are not the first of the file."""
        with self._refusing():
            return self._new_writer(file, schema, first=False)

    def take_part(self, path: Path | None, schema: pa.Schema) -> None:
        """Rows of a part, after those so far; the first call, which may have none, defines the columns."""
        if self._writer is None:
            self._schema = schema
            self._begin()
        assert self._file is not None
        if path is not None:
            with self._refusing(), open(path, "rb") as piece:
                shutil.copyfileobj(piece, self._file.file, 1 << 20)

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
            self._output.publish_directory(self._segments, self._run, replaces=self._replaces)
        elif self._durable:
            self._output.publish_joined(self._segments, self._run, self._join)
        self._published = self._replaces = True
        self._output.release()

    def memory_usage(self) -> int:
        if self._writer is None or self._file is None:
            return 0
        uploading = self._file.held_bytes() if isinstance(self._file, UploadedFile) else 0
        return self._writer.held_bytes() + uploading

    def fit_budget(self, nbytes: int) -> None:
        self._output.fit_budget(nbytes)

    def abort(self) -> None:
        """Remove what was not published, except what a checkpoint needs."""
        self._drop_open_file()
        unpublished = self._began and self._is_directory and not (self._durable or self._published)
        if unpublished and self._output.is_ours:
            self._output.clear()
        self._output.release()

    close = abort

    def discard(self) -> None:
        """Remove what `abort` keeps for a checkpoint, if that is gone for good."""
        if self._durable and self._began and not self._published:
            self._output.clear()

    def reset(self) -> None:
        """Ready for another run, which replaces what this one published."""
        self.abort()
        self._schema, self._segments = None, 0
        self._began = self._published = self._durable = False
        self._run = secrets.token_hex(8)

    def claim(self) -> None:
        """Lock the output for this run; an error names another run that writes it."""
        self._output.take_lock(take_over=False)

    def checkpoint(self) -> State:
        if not self._durable:
            raise ConfigError("checkpoint() without restore(): a plain run cannot be resumed; call restore({}) first")
        self._check_still_ours()
        self._end()
        schema = schema_to_text(self._schema) if self._schema is not None else None
        return {"segments": self._segments, "schema": schema, "run": self._run, **self._output.token()}

    def restore(self, token: State) -> None:
        self._drop_open_file()
        self._output.take_lock(take_over=True)
        try:
            self._restore(token)
        except BaseException:
            self._output.release()
            raise

    def _restore(self, token: State) -> None:
        self._durable, self._segments = True, int(token.get("segments", 0))
        self._schema = schema_from_text(token["schema"]) if token.get("schema") else None
        self._run = token.get("run") or self._run
        self._published = self._output.restore(token, self._run, self._segments, replaces=self._replaces)
        if self._published:
            self._output.release()
        else:
            self._began = True

    # -- inside ------------------------------------------------------------------------------------------------------

    def _check_still_ours(self) -> None:
        self._output.check()
        if self._began and (self._durable or self._is_directory) and not self._output.is_ours:
            raise ConfigError(f"{self!r} was aborted, or another run into it has taken its place; use the newest one")

    def _begin(self) -> None:
        in_parts = self._durable or self._is_directory
        if not self._began:
            self._output.begin(in_parts=in_parts, replaces=self._replaces)
            self._began = True
        self._file = self._output.open(self._segments, in_parts=in_parts)
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

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn Arrow's errors into SchemaError, and errors of the disk into ones that name this file."""
        try:
            yield
        except OSError as error:
            if error.errno is None or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), self._output.shown) from error
        except (pa.ArrowNotImplementedError, pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise SchemaError(f"{self!r} cannot write these columns: {error}") from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._output.shown!r})"
