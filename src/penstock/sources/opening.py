"""Picking a source by suffix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.errors import ConfigError
from penstock.files.listing import PathLike, list_files, split_suffix
from penstock.pipeline.stages import Source
from penstock.plugins import formats
from penstock.sources.arrow import ArrowSource
from penstock.sources.csv import CsvSource
from penstock.sources.jsonl import JsonlSource, JsonSource
from penstock.sources.parquet import ParquetSource
from penstock.sources.text import TextSource

__all__ = ["open_source"]

_BUILT_IN = (JsonlSource, JsonSource, CsvSource, ParquetSource, ArrowSource, TextSource)


def open_source(path: PathLike | Iterable[PathLike], **options: Any) -> Source:
    """The source for a path, directory, glob or list of them, by the suffix of its files. They must all be alike."""
    makers: dict[str, Any] = {suffix: kind for kind in _BUILT_IN for suffix in kind.suffixes}
    for found in formats():
        if found.source is not None:
            makers |= dict.fromkeys(found.suffixes, found.source)
    files = list_files(path)
    kinds = {split_suffix(file)[0]: file for file in files}
    unknown = [suffix for suffix in kinds if suffix not in makers]
    if unknown:
        raise ConfigError(
            f"no source reads {unknown[0] or 'files without a suffix'!r} ({kinds[unknown[0]].name}); "
            f"known: {', '.join(sorted(makers))}; build the source yourself, or install a plugin"
        )
    chosen = {makers[suffix] for suffix in kinds}
    if len(chosen) > 1:
        raise ConfigError(f"{path!r} holds files of several formats ({', '.join(sorted(kinds))}); open them one by one")
    return chosen.pop()(files, **options)  # type: ignore[no-any-return]
