"""Targets of the web page: stores, files of rows, loader files, metrics files of runs, and queues."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal

import orjson

from penstock.errors import ConfigError
from penstock.files.documents import read_document
from penstock.files.filesystems import cut, is_remote, local_or_none, shown
from penstock.files.listing import service_of
from penstock.fsqueue.queue import QUEUE_FILE
from penstock.fsqueue.status import find_queue
from penstock.store.foreign.lookup import is_foreign
from penstock.store.manifest import is_bucket_store, is_store, refuse_remote_store

Kind = Literal["store", "files", "loader", "run", "queue"]
KIND_NAMES: dict[Kind, str] = {
    "store": "token store",
    "files": "files of rows",
    "loader": "loader",
    "run": "run",
    "queue": "queue",
}
METRICS_SUFFIX = ".metrics.jsonl"
"""Ending of a metrics file, which may be opened before the run begins."""
METRICS_MARK = "penstock_metrics"
_HEAD_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """Place that was opened. Addresses of pages name it by its number, never by its path."""

    number: int
    kind: Kind
    place: str
    """Path or URL."""

    @property
    def name(self) -> str:
        """Short name."""
        return PurePath(shown(self.place)).name or self.shown

    @property
    def shown(self) -> str:
        """The place without secrets of a URL."""
        return shown(self.place)

    @property
    def address(self) -> str:
        return f"/t/{self.number}"


def find_targets(places: Iterable[str]) -> list[Target]:
    """A target for each place, each once; raises ConfigError for one that nothing reads."""
    unique = list(dict.fromkeys(places))
    if not unique:
        raise ConfigError("penstock ui needs a target: a store, data files, a loader file, a metrics file or a queue")
    return [Target(number, *_found(place)) for number, place in enumerate(unique)]


def _found(place: str) -> tuple[Kind, str]:
    if service_of(place) is not None:
        raise ConfigError(f"{shown(place)} is a database or a broker, and penstock ui shows files; export rows first")
    if is_remote(place) and local_or_none(place) is None:
        refuse_remote_store(place)
        if is_bucket_store(place):
            return "store", place
        return ("loader" if cut(place)[0].endswith((".yaml", ".yml")) else "files"), place
    path = local_or_none(place) or Path(place)
    if is_store(path) or is_foreign(path):
        return "store", place
    if path.is_dir():
        if (path / QUEUE_FILE).exists() or (path / "queue" / QUEUE_FILE).exists():
            return "queue", str(find_queue(path))
        return "files", place
    if not path.exists():
        if path.name.endswith(METRICS_SUFFIX):
            return "run", place
        if not any(sign in place for sign in "*?["):
            raise ConfigError(f"{place} does not exist")
        return "files", place
    if path.suffix == ".py":
        raise ConfigError(
            f"{place} is code, which penstock ui does not run; open the queue directory that it names instead"
        )
    if is_metrics_file(path):
        return "run", place
    if path.suffix in (".yaml", ".yml") or (path.suffix == ".json" and _describes_loader(path)):
        return "loader", place
    return "files", place


def is_metrics_file(path: Path) -> bool:
    """True if the first line of a file is the header of a metrics file."""
    with path.open("rb") as file:
        first = file.read(_HEAD_BYTES).partition(b"\n")[0]
    if METRICS_MARK.encode() not in first:
        return path.name.endswith(METRICS_SUFFIX) and not first
    try:
        facts = orjson.loads(first)
    except ValueError:
        return False
    return isinstance(facts, dict) and METRICS_MARK in facts


def _describes_loader(path: Path) -> bool:
    if path.stat().st_size > _HEAD_BYTES:
        return False
    try:
        return "loader" in read_document(path, such_as="loader: pretrain")
    except (ConfigError, ValueError):
        return False
