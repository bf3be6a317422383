"""What the file sinks share: whole files by atomic rename, and runs that survive kill -9.

Two ways of writing, one set of writers:

- plainly: one hidden file beside the target, renamed when it is whole;
- durably (after `restore`): a hidden directory of finished segments beside the target, one for each checkpoint.
  `flush` joins them into the target. A target without a suffix is a directory: then the segments are its part files
  and nothing needs joining.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Protocol

import pyarrow as pa

from penstock.errors import ConfigError, DataError, ResumeError, SchemaError
from penstock.files.atomic import AtomicFile, sync_directory
from penstock.files.listing import PathLike, split_suffix
from penstock.pipeline.chain import describe_difference
from penstock.pipeline.stages import Sink, State

__all__ = ["FileSink", "Writer"]


class Writer(Protocol):
    """Writes batches of one schema into an open file."""

    def write(self, batch: pa.RecordBatch) -> None: ...

    def close(self) -> None:
        """Write what is left, footer included; the file itself stays open."""
        ...

    def held_bytes(self) -> int: ...


class FileSink(Sink):
    """Base of the sinks that write files."""

    suffix: ClassVar[str] = ""

    def __init__(self, path: PathLike, *, rows_per_file: int | None = None) -> None:
        self.path = Path(path).expanduser()
        if "://" in os.fspath(path):
            raise ConfigError(f"{os.fspath(path)!r} is a URL; file sinks write local paths")
        self._is_directory = not split_suffix(self.path)[0] or self.path.is_dir()
        if rows_per_file is not None and not self._is_directory:
            raise ConfigError(f"rows_per_file needs a directory to write to, and {self.path} is a file name")
        if rows_per_file is not None and rows_per_file <= 0:
            raise ConfigError(f"rows_per_file must be positive, got {rows_per_file}")
        self._rows_per_file = rows_per_file
        self._schema: pa.Schema | None = None
        self._file: AtomicFile | None = None
        self._writer: Writer | None = None
        self._file_rows = 0
        self._segments = 0
        self._durable = False
        self._published = False
        self._checked_target = False

    # -- what a format has to say ------------------------------------------------------------------------------

    def _new_writer(self, file: BinaryIO, schema: pa.Schema, *, first: bool) -> Writer:
        """A writer into an open file; `first` is false for the second and later pieces of one file."""
        raise NotImplementedError(type(self).__name__)

    def _join(self, segments: list[Path], target: BinaryIO) -> None:
        """Finished segments into one file. Formats that can be laid end to end just are."""
        for segment in segments:
            with open(segment, "rb") as piece:
                shutil.copyfileobj(piece, target, 1 << 20)

    # -- a sink ------------------------------------------------------------------------------------------------

    def consume(self, batch: pa.RecordBatch) -> None:
        if self._schema is None:
            self._schema = batch.schema
        elif not batch.schema.equals(self._schema):
            raise SchemaError(f"{self!r} got another schema than before: {describe_difference(self._schema, batch.schema)}")
        while batch.num_rows:
            if self._writer is None:
                self._begin()
            room = batch.num_rows if self._rows_per_file is None else self._rows_per_file - self._file_rows
            part, batch = batch.slice(0, room), batch.slice(room)
            assert self._writer is not None
            try:
                self._writer.write(part)
            except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
                raise SchemaError(f"{self!r} cannot write these columns: {error}") from error
            self._file_rows += part.num_rows
            if self._file_rows == self._rows_per_file:
                self._end()

    def flush(self) -> None:
        """Publish. Doing it again, or after a crash in the middle of it, is safe."""
        if self._published:
            return
        if self._writer is None and self._segments == 0 and not self._is_directory:
            self._begin()  # no rows: an empty file, with the columns if they are known
        self._end()
        if self._is_directory:
            self._publish_directory()
        elif self._durable:
            self._publish_joined()
        self._published = True

    def memory_usage(self) -> int:
        return self._writer.held_bytes() if self._writer is not None else 0

    def abort(self) -> None:
        """Leave nothing behind that was not published."""
        self._drop_open_file()
        if not self._durable:
            shutil.rmtree(self._staging, ignore_errors=True)

    close = abort

    def reset(self) -> None:
        """Ready for another run, which replaces what this one published."""
        self.abort()
        self._schema, self._segments, self._published, self._durable = None, 0, False, False

    def checkpoint(self) -> State:
        self._end()
        return {"segments": self._segments}

    def restore(self, token: State) -> None:
        self._drop_open_file()
        self._durable, self._published = True, False
        self._segments = int(token.get("segments", 0))
        if token.get("finishing") and self._segments and not self._staging.exists() and self.path.exists():
            self._published = True
            return
        self._check_target()
        self._parts_directory.mkdir(parents=True, exist_ok=True)
        for stray in self._parts_directory.glob(f"*{self.suffix}*"):
            number = stray.name.removeprefix("part-")[:6]
            if not number.isdigit() or int(number) >= self._segments:
                stray.unlink()  # written after the checkpoint: its rows come again
        for number in range(self._segments):
            if not self._segment(number).exists():
                raise ResumeError(
                    f"{self._segment(number)} is gone, the checkpoint counts on it; delete the checkpoint to start again"
                )

    # -- inside ------------------------------------------------------------------------------------------------

    @property
    def _staging(self) -> Path:
        return self.path.with_name(f".{self.path.name}.penstock-parts")

    @property
    def _parts_directory(self) -> Path:
        """Where segments go: out of sight, unless a durable run publishes part files one by one."""
        return self.path if self._durable and self._is_directory else self._staging

    def _segment(self, number: int) -> Path:
        return self._parts_directory / f"part-{number:06d}{self._part_suffix}"

    @property
    def _part_suffix(self) -> str:
        inner, outer = split_suffix(self.path)
        return inner + outer if not self._is_directory else self.suffix

    def _check_target(self) -> None:
        if not self.path.parent.is_dir():
            raise FileNotFoundError(f"no such directory: {str(self.path.parent)!r}; make it before writing {self.path.name}")
        if self._is_directory and not self._durable and self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(f"directory {self.path} is not empty; delete it or write elsewhere")

    def _begin(self) -> None:
        if not self._checked_target:
            self._check_target()
            self._checked_target = True
        in_parts = self._durable or self._is_directory
        if in_parts:
            self._parts_directory.mkdir(parents=True, exist_ok=True)
        self._file = AtomicFile(self._segment(self._segments) if in_parts else self.path)
        schema = self._schema if self._schema is not None else pa.schema([])
        self._writer = self._new_writer(self._file.file, schema, first=self._segments == 0 or self._is_directory)
        self._file_rows = 0

    def _end(self) -> None:
        """Finish the open file, if there is one, and give it its name."""
        if self._writer is None or self._file is None:
            return
        self._writer.close()
        self._file.commit()
        self._writer = self._file = None
        self._segments += 1

    def _drop_open_file(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
        if self._file is not None:
            self._file.abort()
        self._writer = self._file = None

    def _publish_directory(self) -> None:
        if self._durable:
            return
        self._staging.mkdir(exist_ok=True)
        if self.path.is_dir():
            self.path.rmdir()  # empty, or `_check_target` would have refused it
        self._staging.rename(self.path)
        sync_directory(self.path.parent)

    def _publish_joined(self) -> None:
        segments = [self._segment(number) for number in range(self._segments)]
        if len(segments) == 1:
            segments[0].replace(self.path)
            sync_directory(self.path.parent)
        else:
            with AtomicFile(self.path) as target:
                self._join(segments, target.file)
        shutil.rmtree(self._staging, ignore_errors=True)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"
