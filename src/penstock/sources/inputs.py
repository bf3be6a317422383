"""Inputs in any form as sources: paths, datasets of Hugging Face, tables, frames, rows in Python, iterators."""

from __future__ import annotations

import inspect
import os
import weakref
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import xxhash

from penstock.errors import ConfigError
from penstock.files.checksums import FileFingerprint, fingerprint_files
from penstock.files.listing import PathLike, as_paths, names_rows, service_of
from penstock.sources.async_iterator import AsyncIteratorSource
from penstock.sources.file_source import FileSource
from penstock.sources.lakes.lookup import lake_among
from penstock.sources.memory import IteratorSource, MemorySource
from penstock.sources.record_source import RecordSource
from penstock.sources.services import open_service
from penstock.sources.sql import SqlSource
from penstock.sources.tables import kind_of, refuse_splits

Input: TypeAlias = Any
"""Paths, or data that `as_input` knows."""

_MOST_SENT_BYTES = 64 << 20
_ITERATED_ROWS = 1000
_NOTHING = object()
_FIRST: dict[int, tuple[Any, Any]] = {}
"""First items of iterators that were looked at and not read, by the ids of the iterators, with the iterators."""
_EXPECTED = (
    "expected a path or a list of paths, the URL of a database, a Source (it has a method next_batch), a Dataset of "
    "Hugging Face, a pandas or "
    "Polars DataFrame, an Arrow table, a list of dicts, a dict of columns, or an iterable of dicts"
)


def as_input(data: Input) -> list[PathLike] | Any:
    """Paths as a list, and tables of lakes, URLs of databases and brokers, and other data as a source of its rows.

    Nothing is opened.

    Tables, frames and datasets are read where they are. An iterator, a reader of record batches, and an
    `IterableDataset` are read row by row, from the beginning each time.
    """
    if (paths := as_paths(data)) is not None:
        return paths if all(map(names_rows, paths)) else lake_among(paths) or paths
    if (url := service_of(data)) is not None:
        return open_service(url)
    if hasattr(data, "next_batch"):
        return data
    kind = kind_of(data)
    if kind == "IterableDataset":
        return _of_iterable_dataset(data)
    refuse_splits(data)
    if _is_of(data, "polars", "LazyFrame"):
        raise ConfigError("a LazyFrame of Polars has no rows before it is computed; pass frame.collect()")
    if any(_is_of(data, package, "Series") for package in ("pandas", "polars")):
        raise ConfigError("a Series is a column, and rows have names for theirs; pass series.to_frame('text')")
    if _is_of(data, "pyarrow", "Dataset"):
        return _of_arrow_dataset(data)
    if isinstance(data, pa.RecordBatchReader):
        return IteratorSource(iter(data), schema=data.schema)
    if kind == "Dataset" or isinstance(data, (Mapping, np.ndarray)) or hasattr(data, "__arrow_c_stream__"):
        return MemorySource(data)
    if isinstance(data, (pa.RecordBatch, pa.Table)) or _is_of(data, "pandas", "DataFrame"):
        return MemorySource(data)
    if isinstance(data, (list, tuple)):
        return _of_list(list(data))
    if isinstance(data, AsyncIterable) or inspect.isasyncgenfunction(data):
        return AsyncIteratorSource(data)
    if callable(data) and not isinstance(data, Iterable):
        return IteratorSource(data)
    if isinstance(data, Iterator):
        return _of_iterator(data)
    if isinstance(data, Iterable):
        return IteratorSource(data)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        return IteratorSource(lambda: (data[number] for number in range(len(data))))
    raise ConfigError(f"the input cannot be read: {_EXPECTED}; got {type(data).__name__} ({data!r:.80})")


def shown_input(data: list[PathLike] | Any) -> str:
    """Name of what `as_input` returned, for messages."""
    return ", ".join(str(path) for path in data) if isinstance(data, list) else repr(data)


def fingerprints_of(source: Any, *, memo: PathLike | None = None) -> list[FileFingerprint]:
    """Content of a source that was given as an object; empty if its content is not known before it is read.

    A source of your own may have a method `fingerprints` that returns them, or one text that changes with the content.
    """
    if isinstance(source, MemorySource):
        return source.fingerprints(memo)
    own = getattr(source, "fingerprints", None)
    if callable(own):
        found = own()
        return [FileFingerprint(type(source).__name__, 0, found)] if isinstance(found, str) else list(found)
    if isinstance(source, FileSource | RecordSource):
        options = {name: value for name, value in source._shown.items() if value is not None}
        described = f"{type(source).__name__} {sorted(options.items())!r}"
        mark = FileFingerprint("<options>", 0, xxhash.xxh3_128_hexdigest(described.encode()))
        return [*fingerprint_files(source.files, memo=memo), mark]
    return []


def why_it_stays(source: Any) -> str | None:
    """Reason why a source cannot be read by other processes; None if it can."""
    if isinstance(source, MemorySource):
        size = source.bytes_to_send
        return f"the rows are {size >> 20} MiB of this process's memory" if size > _MOST_SENT_BYTES else None
    if hasattr(source, "files") or hasattr(source, "manifest") or (isinstance(source, SqlSource) and source.has_key):
        return None
    return f"the rows of {source!r} come one after the other from this process"


def _of_list(items: list[Any]) -> Any:
    if not items:
        raise ConfigError("the input is an empty list; expected at least one path, or one row")
    paths = [isinstance(item, (str, os.PathLike)) for item in items]
    if any(paths):
        other = items[paths.index(False)]
        raise ConfigError(f"the input is a list of paths and of other things, such as {other!r:.80}; pass one kind")
    if isinstance(items[0], (Mapping, pa.RecordBatch)):
        return MemorySource(items)
    if isinstance(items[0], pa.Table):
        return MemorySource(pa.concat_tables(items))
    raise ConfigError(f"the input is a list of {type(items[0]).__name__}; {_EXPECTED}")


def _of_iterator(items: Iterator[Any]) -> Any:
    first = _look(items)
    if first is _NOTHING:
        return IteratorSource(items)
    if isinstance(first, (str, os.PathLike)):
        return list(_Looked(items))
    return IteratorSource(_Looked(items))


def _look(items: Iterator[Any]) -> Any:
    """The first item of an iterator, which stays first until somebody reads it; `_NOTHING` if there is none."""
    key = id(items)
    if key not in _FIRST and (first := next(items, _NOTHING)) is not _NOTHING:
        try:
            _FIRST[key] = (weakref.ref(items, lambda _: _FIRST.pop(key, None)), first)
        except TypeError:  # `map` and others cannot be referenced weakly, and an id is known only while they exist
            _FIRST[key] = (items, first)
    return _FIRST[key][1] if key in _FIRST else _NOTHING


def _of_iterable_dataset(dataset: Any) -> IteratorSource:
    if dataset.features is None:
        return IteratorSource(dataset)  # rows as dicts: tables could have another type in every batch
    arrow = dataset.with_format("arrow")
    return IteratorSource(_Repeated(lambda: arrow.iter(_ITERATED_ROWS), type(dataset).__name__))


def _of_arrow_dataset(dataset: Any) -> Any:
    if type(dataset).__name__ == "InMemoryDataset":
        return MemorySource(dataset.to_table())
    return ScannedSource(dataset)


class ScannedSource(IteratorSource):
    """Rows of a `pyarrow.dataset.Dataset`, in order."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(_Repeated(dataset.to_batches, type(dataset).__name__), schema=dataset.schema)
        self.schema = dataset.schema
        local = type(getattr(dataset, "filesystem", None)).__name__ == "LocalFileSystem"
        self.files = [Path(file) for file in dataset.files] if local else []
        """Local files of the dataset."""
        self._parts = [str(part.partition_expression) for part in dataset.get_fragments()] if local else []

    def fingerprints(self) -> list[FileFingerprint]:
        """Content of the files, and the columns and partitions that the dataset makes of them."""
        if not self.files:
            return []
        described = xxhash.xxh3_128_hexdigest(repr([str(self.schema.remove_metadata()), self._parts]).encode())
        return [*fingerprint_files(self.files), FileFingerprint("<dataset>", 0, described)]


class _Looked(Iterator[Any]):
    """An iterator whose first item `_look` has taken. The item counts as taken when this one is read."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self.__name__ = items, type(items).__name__
        self._begun = False

    def __next__(self) -> Any:
        if not self._begun:
            self._begun = True
            if (taken := _FIRST.pop(id(self._items), None)) is not None:
                return taken[1]
        return next(self._items)


class _Repeated:
    """An iterable that begins anew each time, with a name."""

    def __init__(self, make: Callable[[], Iterable[Any]], name: str) -> None:
        self._make, self.__name__ = make, name

    def __call__(self) -> Iterable[Any]:
        return self._make()


def _is_of(data: Any, package: str, name: str) -> bool:
    """True for an object of a class of a package that need not be installed."""
    return any(kind.__module__.partition(".")[0] == package and kind.__name__ == name for kind in type(data).__mro__)
