"""Picking a sink by suffix."""

from __future__ import annotations

from typing import Any

from penstock.errors import ConfigError
from penstock.files.listing import PathLike, split_suffix
from penstock.pipeline.stages import Sink
from penstock.plugins import formats
from penstock.sinks.columnar import ArrowSink, ParquetSink
from penstock.sinks.text import CsvSink, JsonlSink

__all__ = ["open_sink"]

_BUILT_IN: dict[str, Any] = {
    ".parquet": ParquetSink,
    ".pq": ParquetSink,
    ".arrow": ArrowSink,
    ".feather": ArrowSink,
    ".ipc": ArrowSink,
    ".jsonl": JsonlSink,
    ".ndjson": JsonlSink,
    ".csv": CsvSink,
    ".tsv": CsvSink,
}


def open_sink(path: PathLike, **options: Any) -> Sink:
    """The sink that writes files with this path's suffix."""
    suffix = split_suffix(path)[0]
    makers = _BUILT_IN if suffix in _BUILT_IN else _with_plugins()
    if suffix not in makers:
        raise ConfigError(f"no sink writes {suffix or 'a path without a suffix'!r}; known: {', '.join(sorted(makers))}")
    return makers[suffix](path, **options)  # type: ignore[no-any-return]


def _with_plugins() -> dict[str, Any]:
    """The formats of plugins too. Asked for only when needed: one that cannot be loaded must not spoil a JSONL file."""
    added = {suffix: found.sink for found in formats() if found.sink is not None for suffix in found.suffixes}
    return added | _BUILT_IN
