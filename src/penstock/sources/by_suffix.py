"""Picking a source by suffix."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.files.filesystems import local_or_none, shown
from penstock.files.listing import PathLike, as_paths, list_files, names_rows, service_of, split_suffix
from penstock.files.ranges.remote_file import InputFile
from penstock.pipeline.stages import Source
from penstock.plugins import formats
from penstock.sources.columnar import ArrowSource, ParquetSource
from penstock.sources.csv import CsvSource
from penstock.sources.file_source import FileSource
from penstock.sources.foreign.mds import MdsSource
from penstock.sources.foreign.mds_index import is_mds, mds_files, refuse_remote_tokens
from penstock.sources.foreign.token_files import TokenFileSource
from penstock.sources.foreign.webdataset import WebDatasetSource
from penstock.sources.inputs import Input, as_input
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.lakes.lookup import lake_among
from penstock.sources.record_source import RecordSource
from penstock.sources.saved_dataset import SPLITS, STATE, SavedDatasetSource, data_files, has_mapping
from penstock.sources.services import open_service
from penstock.sources.store import StoreSource
from penstock.sources.text import TextSource
from penstock.store.foreign.lookup import is_token_file
from penstock.store.manifest import VERSIONS, is_bucket_store, is_store, refuse_remote_store

_log = logging.getLogger(__name__)

_BUILT_IN = (
    *(JsonlSource, JsonSource, CsvSource, ParquetSource, ArrowSource, TextSource),
    *(MdsSource, WebDatasetSource),
)
_MAKERS: dict[str, Any] = {suffix: kind for kind in _BUILT_IN for suffix in kind.suffixes}


@dataclass(frozen=True, slots=True)
class SourceFiles:
    """Files of one format and the class of their source: nothing is opened yet."""

    kind: Any
    files: Sequence[InputFile]
    left_out: Sequence[InputFile] = ()
    """Files of the directory that are no data, or another kind of data than most."""

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

    Of a directory or a glob, what lies beside data is left out, with a warning that names it: descriptions, checksums
    and scripts, files that no source reads, text beside at least as many bytes of one structured format, and formats
    with less than a tenth of the bytes. Without such a format it is an error. The directory of a token store is a
    `StoreSource`, that of a Delta or Iceberg table (`lake/chats`, `lake/chats@v12`) a `DeltaSource` or `IcebergSource`;
    the URL of a database (`postgresql://host/name?table=documents&key=id`) or of a broker (`nats://host/STREAM`,
    `redis://host/0?stream=NAME`, `kafka://host/TOPIC`) is its source, which takes the options. Other data is a source,
    a dataset of Hugging Face, a pandas or Polars DataFrame, an Arrow table, reader or dataset, a list of dicts, a dict
    of columns, or an iterable of dicts.
    """
    if (url := service_of(data)) is not None:
        return open_service(url, **options)
    paths = as_paths(data)
    given = as_input(data) if paths is None else lake_among(paths, **options) or paths
    if not isinstance(given, list):
        if options and paths is None:
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
    stores = [each for each in paths if _is_token_store(each)]
    for each in paths:
        if not names_rows(each) and each not in stores:
            refuse_remote_tokens(each)
    if stores:
        if len(paths) > 1:
            raise ConfigError(f"{os.fspath(stores[0])!r} is a token store, and a store is opened alone; got {paths!r}")
        return stores[0]
    if len(paths) == 1 and not names_rows(paths[0]) and (local := local_or_none(paths[0])) is not None:
        if is_mds(local):
            return SourceFiles(MdsSource, mds_files(local))
        if is_token_file(local):
            return SourceFiles(TokenFileSource, [local])
    files = list_files(paths)
    _refuse_shards(paths, files)
    saved = any(file.name in (STATE, SPLITS) for file in files)
    if saved:
        files = data_files(files)
    suffixes = {split_suffix(file)[0] for file in files}
    makers = _MAKERS if suffixes <= _MAKERS.keys() else _with_plugins()
    named = {_spelled(each) for each in paths}
    named_files = {file for file in files if _spelled(file) in named}
    chosen = _chosen(files, makers, named_files, path)
    left_out = [file for file in files if file not in chosen]
    if left_out:
        if noted := [file for file in left_out if file.name != "_SUCCESS"]:  # sinks of many programs write it
            names = ", ".join(file.name for file in noted[:_SHOWN]) + ", ..." * (len(noted) > _SHOWN)
            where = ", ".join(shown(str(each)) for each in paths)
            _log.warning("%s: %d of %d files are read; left out: %s", where, len(chosen), len(files), names)
        files = files.only(chosen)
    kind = makers[split_suffix(files[0])[0]]
    return SourceFiles(SavedDatasetSource if saved and has_mapping(files) else kind, files, left_out)


_SHOWN = 10
_METADATA = re.compile(
    r"(readme|licen[cs]e|notice|citation|changelog|contributing|datasheet|dataset_?card)(\..*)?"
    r"|(dataset_infos?|dataset_dict|croissant)\.json|_success|_(common_)?metadata(\..*)?"
    r"|(md5|sha1|sha256|sha512)sums?(\.txt)?|checksums?(\..*)?|thumbs\.db|desktop\.ini|requirements.*\.txt"
    r"|.*\.(md5|sha1|sha256|sha512|crc|py|ipynb|ya?ml|toml|cfg|sh|pdf|html?|png|jpe?g|svg|log|lock|bib|cff|rst)"
)
"""Names of files beside data: descriptions, checksums, scripts."""
_ROWS = (JsonlSource, CsvSource, ParquetSource, ArrowSource, MdsSource, WebDatasetSource)
"""Formats that descriptions are not written in: `changelog.jsonl` is data about changes."""
_MOST = 0.9
"""Share of the bytes that one format must have, if others are there."""
_HALF = 0.5
"""Share that is enough for one structured format beside text."""


def _spelled(path: PathLike) -> str:
    """A path as text, the same for one that was given and one that was found."""
    text = os.fspath(path)
    return text if "://" in text else str(Path(text).expanduser())


def _chosen(
    files: Sequence[InputFile], makers: Mapping[str, Any], named: Collection[InputFile], path: Any
) -> set[InputFile]:
    """Files of one format, without what lies beside data. Files that were named are always meant."""
    kept = [file for file in files if file in named or not _is_beside_data(file, makers)]
    kept = kept or list(files)
    unknown = [file for file in kept if split_suffix(file)[0] not in makers]
    refused = [file for file in unknown if file in named or len(unknown) == len(kept) or _looks_like_data(file, makers)]
    if refused:
        suffix = split_suffix(refused[0])[0]
        raise ConfigError(
            f"no source reads {suffix or 'files without a suffix'!r} ({refused[0].name}); "
            f"known: {', '.join(sorted(makers))}; pass a glob that leaves it out, build the source yourself, or "
            "install a plugin"
        )
    kept = [file for file in kept if file not in unknown]
    groups: dict[Any, list[InputFile]] = {}
    for file in kept:
        groups.setdefault(makers[split_suffix(file)[0]], []).append(file)
    if len(groups) == 1:
        return set(kept)
    sizes = {kind: sum(file.stat().st_size for file in members) for kind, members in groups.items()}
    total, structured = sum(sizes.values()), [kind for kind in groups if kind is not TextSource]
    meant = [kind for kind in groups if sizes[kind] >= _MOST * total]
    if not meant and len(structured) == 1 and sizes[structured[0]] >= _HALF * total:
        meant = structured
    forced = {makers[split_suffix(file)[0]] for file in kept if file in named}
    if len(meant) != 1 or forced - set(meant):
        formats = ", ".join(sorted({split_suffix(file)[0] for file in kept}))
        pattern = str(kept[0].with_name(f"*{split_suffix(kept[0])[0]}"))
        raise ConfigError(
            f"{path!r} holds files of several formats ({formats}); open them one by one: pass a glob such as "
            f"{pattern!r}, or give each format to MixedDataLoader as a source"
        )
    return set(groups[meant[0]])


def _is_beside_data(file: InputFile, makers: Mapping[str, Any]) -> bool:
    """True for a name of metadata, unless it is that of a table (`_metadata.parquet` holds no rows)."""
    name = file.name.lower()
    if makers.get(split_suffix(file)[0]) in _ROWS and not name.startswith("_"):
        return False
    return _METADATA.fullmatch(name) is not None


def _looks_like_data(file: InputFile, makers: Mapping[str, Any]) -> bool:
    """True for an archive, and for a data file with another ending, such as `a.jsonl.part`."""
    endings = [each.lower() for each in file.suffixes]
    return bool(endings) and (endings[-1] in _ARCHIVES or any(each in makers for each in endings[:-1]))


_ARCHIVES = frozenset({".zip", ".tar", ".tgz", ".7z", ".rar"})


_SHARD = re.compile(r"[/\\]shards[/\\][0-9a-f]{32}(-[0-9a-f]{16}\.index|\.arrow)(?=$|\?)")
"""Path of a file of a token store."""


def _refuse_shards(paths: Iterable[PathLike], files: Iterable[InputFile]) -> None:
    """Raise a ConfigError for shards of a store below a directory: the rows of half a store would be taken for all."""
    if any("shards" in re.split(r"[/\\]", os.fspath(path)) for path in paths):
        return  # they are asked for by name
    for file in files:
        if (found := _SHARD.search(str(file))) is not None:
            place = str(file)[: found.start()]
            raise ConfigError(
                f"{place!r} has shards of a token store and is none that can be read here: without a manifest.json, "
                "which comes last, it was uploaded or copied in part; complete it, or pass the path of a whole store"
            )


def _is_token_store(path: PathLike) -> bool:
    """A manifest.json alone is not enough: other directories have one among their files."""
    local = local_or_none(path)
    if local is None:
        return is_bucket_store(path)
    return is_store(local) and (local / VERSIONS).is_dir()


def _with_plugins() -> dict[str, Any]:
    """The formats of plugins too. Loaded only when needed: a broken plugin must not affect a JSONL file."""
    added = {suffix: found.source for found in formats() if found.source is not None for suffix in found.suffixes}
    return added | _MAKERS
