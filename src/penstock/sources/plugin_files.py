"""Files of a format that a plugin reads, one source for each file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from penstock.files.listing import PathLike
from penstock.files.ranges.remote_file import InputFile
from penstock.files.remote import local_copy
from penstock.pipeline.stages import Source
from penstock.sources.file_source import FileSource

_ROWS = 4096


class PluginFiles(FileSource):
    """Rows of files that a plugin's source reads: any class with `next_batch`, made with the path of one file.

    The first batch of a file shows its columns, unless the source has a `schema`. Resuming, and another place in a
    file, pass over the rows before it. Of remote files the plugin gets local copies.
    """

    def __init__(
        self, make: Callable[..., Source], paths: PathLike | Iterable[PathLike], *, allow_empty: bool = False
    ) -> None:
        super().__init__(paths, allow_empty=allow_empty)
        self._make = make

    def _open(self, path: InputFile) -> _PluginReader:
        return _PluginReader(self._make([local_copy(path)]))

    def _file_schema(self, path: InputFile) -> pa.Schema:
        reader = self._open(path)
        try:
            return reader.schema()
        finally:
            reader.close()

    def _file_rows(self, path: InputFile) -> int | None:
        return None

    def __repr__(self) -> str:
        return f"{getattr(self._make, '__name__', self._make)}({self._list})"


class _PluginReader:
    """One open file."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._pending: pa.RecordBatch | None = None

    def schema(self) -> pa.Schema:
        found = getattr(self._source, "schema", None)
        if isinstance(found, pa.Schema):
            return found
        self._pending = self._source.next_batch(_ROWS)
        return pa.schema([]) if self._pending is None else self._pending.schema

    def next(self, max_rows: int) -> pa.RecordBatch | None:
        batch = self._pending if self._pending is not None else self._source.next_batch(max_rows)
        if batch is None:
            return None
        rest = batch.slice(max_rows)
        self._pending = rest if rest.num_rows else None
        return batch.slice(0, max_rows)

    def skip(self, rows: int) -> int:
        passed = 0
        while passed < rows and (batch := self.next(rows - passed)) is not None:
            passed += batch.num_rows
        return passed

    def held_bytes(self) -> int:
        return 0 if self._pending is None else int(self._pending.nbytes)

    def close(self) -> None:
        if callable(close := getattr(self._source, "close", None)):
            close()
