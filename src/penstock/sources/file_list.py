"""What the sources of files share: which files they read, and how a saved position names one of them."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import pyarrow as pa
import xxhash

from penstock.errors import ConfigError, ResumeError, SchemaError
from penstock.files.fingerprints import FileStamps
from penstock.files.listing import FoundFiles, PathLike, list_files, names_of
from penstock.pipeline.stages import State
from penstock.sources.partitions import Partitions

__all__ = ["FileList", "check_columns", "is_schema", "project", "schema_mark", "schema_of"]


_HEAD_BYTES = 4096


class FileList:
    """The files behind a path, directory, glob or list of them; looked for when first needed."""

    def __init__(self, paths: PathLike | Iterable[PathLike], suffixes: tuple[str, ...]) -> None:
        single = isinstance(paths, str) or hasattr(paths, "__fspath__")
        self._paths: list[PathLike] = [paths] if single else list(paths)  # type: ignore[arg-type, list-item]
        self._listed = paths if isinstance(paths, FoundFiles) else None
        self._suffixes = suffixes
        self._found: list[Path] | None = None
        self._heads: dict[int, list[int | str]] = {}
        self._sizes: dict[int, int] = {}
        self.stamps = FileStamps()
        """Of the files that were opened since the source began at its first row."""

    @property
    def files(self) -> list[Path]:
        if self._found is None:
            self._found = self._listed if self._listed is not None else list_files(self._paths, self._suffixes)
        return self._found

    @cached_property
    def partitions(self) -> Partitions:
        """What the names of directories say about the rows."""
        return Partitions(self.files)

    def name(self, number: int) -> str | None:
        """The name of a file, as `names_of` has it; None behind the last."""
        return self._names[number] if number < len(self.files) else None

    @cached_property
    def _names(self) -> list[str]:
        return names_of(self.files)

    def state(self, number: int) -> State:
        """What a position in a file has to say about the file."""
        return {
            "files": len(self.files),
            "file": number,
            "path": self.name(number),
            "head": self._head(number),
            "size": self._size(number),
        }

    def _head(self, number: int) -> list[int | str] | None:
        """How many first bytes a file has (4096 at most) and their hash: a rewritten file differs, a grown one not."""
        if number >= len(self.files):
            return None
        if number not in self._heads:
            with open(self.files[number], "rb") as file:
                data = file.read(_HEAD_BYTES)
            self._heads[number] = [len(data), xxhash.xxh3_64_hexdigest(data)]
        return self._heads[number]

    def _size(self, number: int) -> int | None:
        """The size of a file when it was first asked for: one that has less by the time of resuming lacks rows."""
        if number >= len(self.files):
            return None
        if number not in self._sizes:
            self._sizes[number] = self.files[number].stat().st_size
        return self._sizes[number]

    def check(self, state: State) -> None:
        """Refuse a position in files that are not these."""
        number, count = state["file"], len(self.files)
        if state["files"] != count:
            raise ResumeError(
                f"the state was saved with {state['files']} input files, now there are {count}; "
                "restore the same files, or start without the state"
            )
        if self.name(number) != state["path"]:
            raise ResumeError(
                f"file {number + 1} of the input was {state['path']!r} when the state was saved and is "
                f"{self.name(number)!r} now; restore the same files, or start without the state"
            )
        if state.get("head") is not None:
            size, digest = state["head"]
            with open(self.files[number], "rb") as file:
                data = file.read(size)
            if xxhash.xxh3_64_hexdigest(data) != digest:
                raise ResumeError(
                    f"{self.files[number]} is not the file the state was saved in: it begins with other bytes now; "
                    "restore it, or start without the state"
                )
        if state.get("size") is not None and (now := self.files[number].stat().st_size) < state["size"]:
            raise ResumeError(
                f"{self.files[number]} has {now} bytes and had {state['size']} when the state was saved, so rows of it "
                "are gone; restore it, or start without the state"
            )

    def __str__(self) -> str:
        if len(self._paths) > 2:
            return f"{len(self._paths)} paths"
        return ", ".join(repr(str(path)) for path in self._paths)


_MOST_CHARACTERS = 2048


def schema_mark(schema: pa.Schema) -> str:
    """The schema as text; a very wide one as a fingerprint, which costs a resumed source another look at its input."""
    text = base64.b85encode(zlib.compress(schema.serialize().to_pybytes(), 9)).decode()
    if len(text) <= _MOST_CHARACTERS:
        return text
    columns = "\n".join(f"{field.name!r} {field.type}" for field in schema)
    return f"blake2b {hashlib.blake2b(columns.encode(), digest_size=16).hexdigest()}"


def is_schema(mark: str) -> bool:
    """Whether a mark holds the schema itself."""
    return " " not in mark


def schema_of(mark: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(zlib.decompress(base64.b85decode(mark))))


def project(schema: pa.Schema, columns: Sequence[str] | None, where: str) -> pa.Schema:
    """Only the columns asked for, in that order; each of them must be there."""
    if columns is None:
        return schema
    for name in columns:
        if name not in schema.names:
            raise SchemaError(f"column {name!r} not in {where}; it has {schema.names}")
    return pa.schema([schema.field(name) for name in columns])


def check_columns(columns: Sequence[str] | None) -> list[str] | None:
    """The `columns` argument of a source, as a list."""
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ConfigError(f"columns must be a list of at least one name, got {columns!r}")
    return list(columns) if columns is not None else None
