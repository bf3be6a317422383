"""Picking a source by suffix."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files.filesystems import local_or_none
from penstock.files.listing import PathLike, list_files, split_suffix
from penstock.pipeline.stages import Source
from penstock.plugins import formats
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.csv import CsvSource
from penstock.sources.file_source import FileSource
from penstock.sources.inputs import Input, as_input
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.record_source import RecordSource
from penstock.sources.saved_dataset import SPLITS, STATE, SavedDatasetSource, data_files, has_mapping
from penstock.sources.store import StoreSource
from penstock.sources.text import TextSource
from penstock.store.manifest import VERSIONS, is_store, refuse_remote_store

_log = logging.getLogger(__name__)

_BUILT_IN = (JsonlSource, JsonSource, CsvSource, ParquetSource, ArrowSource, TextSource)
_MAKERS: dict[str, Any] = {suffix: kind for kind in _BUILT_IN for suffix in kind.suffixes}


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of one format and the class of their source: nothing is opened yet."""

    kind: Any
    files: Sequence[Path]

    @property
    def name(self) -> str:
        """Full name of the class, or of the function of a plugin."""
        return f"{self.kind.__module__}.{self.kind.__qualname__}"

    def open(self, **options: Any) -> Source:
        source: Source = self.kind(self.files, **options)
        left_out = next(filter(None, getattr(self.files, "partitions", ())), ())
        if left_out and not isinstance(source, FileSource | RecordSource):
            _log.warning(
                "%r takes no columns from the names of directories, so those of %s are left out",
                source,
                "/".join(left_out),
            )
        return source


def open_source(data: Input, **options: Any) -> Source:
    """The source for a path, directory, glob or list of them, by the suffix of its files; or for data in memory.

    Files must all be alike. The directory of a token store is a `StoreSource`; it is opened by itself. Other data is a
    source, a dataset of Hugging Face, a pandas or Polars DataFrame, an Arrow table, reader or dataset, a list of dicts,
    a dict of columns, or an iterable of dicts.
    """
    given = as_input(data)
    if not isinstance(given, list):
        if options:
            raise ConfigError(f"{next(iter(options))}= is an option for files, and the input is {given!r}; omit it")
        source: Source = given
        return source
    found = find_source(given)
    return found.open(**options) if isinstance(found, SourceFiles) else StoreSource(found, **options)


def find_source(path: PathLike | Iterable[PathLike]) -> SourceFiles | PathLike:
    """The files for `open_source` and the class that reads them, or the path of a store."""
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    for each in paths:
        refuse_remote_store(each)
    stores = [each for each in paths if (local := local_or_none(each)) is not None and _is_token_store(local)]
    if stores:
        if len(paths) > 1:
            raise ConfigError(f"{os.fspath(stores[0])!r} is a token store, and a store is opened alone; got {paths!r}")
        return stores[0]
    files = list_files(paths)
    saved = any(file.name in (STATE, SPLITS) for file in files)
    if saved:
        files = data_files(files)
    kinds = {split_suffix(file)[0]: file for file in files}
    makers = _MAKERS if kinds.keys() <= _MAKERS.keys() else _with_plugins()
    unknown = [suffix for suffix in kinds if suffix not in makers]
    if unknown:
        raise ConfigError(
            f"no source reads {unknown[0] or 'files without a suffix'!r} ({kinds[unknown[0]].name}); "
            f"known: {', '.join(sorted(makers))}; build the source yourself, or install a plugin"
        )
    chosen = {makers[suffix] for suffix in kinds}
    if len(chosen) > 1:
        raise ConfigError(f"{path!r} holds files of several formats ({', '.join(sorted(kinds))}); open them one by one")
    kind = chosen.pop()
    return SourceFiles(SavedDatasetSource if saved and has_mapping(files) else kind, files)


def _is_token_store(path: Path) -> bool:
    """A manifest.json alone is not enough: other directories have one among their files."""
    return is_store(path) and (path / VERSIONS).is_dir()


def _with_plugins() -> dict[str, Any]:
    """The formats of plugins too. Loaded only when needed: a broken plugin must not affect a JSONL file."""
    added = {suffix: found.source for found in formats() if found.source is not None for suffix in found.suffixes}
    return added | _MAKERS
