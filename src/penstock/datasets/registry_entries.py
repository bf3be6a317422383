"""What a registry keeps for one competition: a small JSON file, and whether two say the same."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock.datasets.base import DatasetSpec, KaggleDataset
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.metrics import Metric, get_metric
from penstock.datasets.versions import ALL_FILES, DataVersion, changes, contents, with_version
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import require_local
from penstock.files.remote import has_password, shown

__all__ = [
    "Competition",
    "check_entry",
    "default_registry_directory",
    "differences",
    "dumped",
    "entry_before",
    "entry_of",
    "metric_stated",
    "now",
    "read_entry",
    "refuse_password",
    "warn_of_metric",
    "with_data_version",
    "with_files",
]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_FILES = {"train": "train_file", "test": "test_file", "sample_submission": "sample_submission_file"}


@dataclass(frozen=True, slots=True)
class Competition:
    """What is registered under one name."""

    metadata: CompetitionMetadata
    spec: DatasetSpec
    dataset_class: str | None = None
    """`module:Class` or `file.py:Class` where one was given; None: the class is found by the competition's name."""
    discovered_class: str | None = None
    """`file.py:Class` where `discover` found one for its name."""
    versions: tuple[DataVersion, ...] = ()
    """What its files held: when it was registered, each time that was something else, and when they were first read."""

    @property
    def name(self) -> str:
        return self.metadata.competition_name

    @property
    def words(self) -> str:
        """What a search looks at: name, description and tags, in lower case."""
        return "\n".join([self.name, self.metadata.description, *self.metadata.tags]).casefold()

    def to_dict(self) -> dict[str, Any]:
        return {
            "metadata": self.metadata.to_dict(),
            "spec": self.spec.to_dict(),
            "dataset_class": self.dataset_class,
            "discovered_class": self.discovered_class,
            "versions": [version.to_dict() for version in self.versions],
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Competition:
        return cls(
            CompetitionMetadata.from_dict(given["metadata"]),
            DatasetSpec.from_dict(given["spec"]),
            given["dataset_class"],
            given.get("discovered_class"),
            tuple(DataVersion.from_dict(version) for version in given.get("versions", ())),
        )


def entry_of(competition: Competition) -> bytes:
    """The content of its file."""
    try:
        return dumped({"format": FORMAT_VERSION, "registered": now(), **competition.to_dict()})
    except TypeError as error:
        raise ConfigError(f"{competition.name!r} holds a value that cannot be written as JSON: {error}") from error


def now() -> str:
    """The time, as entries have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def dumped(entry: dict[str, Any]) -> bytes:
    return bytes(orjson.dumps(entry, option=orjson.OPT_INDENT_2))


def read_entry(file: Path) -> Competition:
    """What a file holds; one that is no entry, or cannot be read, is a DataError that names it."""
    remedy = "remove it, or register its competition again with replace=True"
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"the entry cannot be read: {error.strerror or error}; {remedy}", file=str(file)) from error
    try:
        entry = orjson.loads(data)
        written = entry["format"]
        if not isinstance(written, int):
            raise TypeError(f"its format is {written!r}")
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"the file is no entry of a registry ({error}); {remedy}", file=str(file)) from error
    if written > FORMAT_VERSION:
        raise DataError(
            f"the entry has format {written}, this release reads up to {FORMAT_VERSION}; update penstock",
            file=str(file),
        )
    try:
        return Competition.from_dict(entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"the entry is damaged: {error}; {remedy}", file=str(file)) from error


def entry_before(file: Path) -> Competition | None:
    """What a file held before it is written; none if it cannot be read any more."""
    try:
        return read_entry(file)
    except (FileNotFoundError, DataError):
        return None


def check_entry(name: str, metadata: CompetitionMetadata, spec: DatasetSpec) -> None:
    """Raise unless metadata and spec are of the same competition, and may stand in a file."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"competition_name must be a text that is not empty, got {name!r}")
    if not isinstance(metadata, CompetitionMetadata) or not isinstance(spec, DatasetSpec):
        raise ConfigError(
            f"a competition is registered with a CompetitionMetadata and a DatasetSpec, got {type(metadata).__name__} "
            f"and {type(spec).__name__}"
        )
    for what, given in (("metadata", metadata.competition_name), ("spec", spec.competition_name)):
        if given != name:
            raise ConfigError(
                f"the {what} is that of {given!r}, and is registered as {name!r}; give both the same name"
            )
    if metadata.competition_type is not spec.competition_type:
        raise ConfigError(
            f"{name!r}: the metadata says {metadata.competition_type.value}, the spec {spec.competition_type.value}; "
            "they must agree"
        )
    refuse_password(spec.dataset_path, "the registry")


def refuse_password(place: Any, where: str) -> None:
    """Raise if a URL that is to be written down somewhere has a password in it."""
    if has_password(str(place)):
        raise ConfigError(
            f"{shown(str(place))!r} has a password in it, and {where} is plain text; leave it out: who may read is "
            "taken from the environment (AWS_ACCESS_KEY_ID, HF_TOKEN ...), or from the configuration of the file "
            "system's own tools (~/.aws, a login)"
        )


def differences(there: Any, here: Any, place: str = "") -> list[str]:
    """`spec.num_samples is 891 there and 892 here`, for everything that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = dict.fromkeys([*there, *here])
        return [
            line
            for key in keys
            for line in differences(there.get(key), here.get(key), f"{place}.{key}" if place else str(key))
        ]
    return [] if there == here else [f"{place} is {there!r:.60} there and {here!r:.60} here"]


def metric_stated(dataset: type[KaggleDataset] | KaggleDataset) -> Metric | None:
    """The metric that a dataset class, or a dataset, states itself; None where it leaves that to the registry."""
    stated: Any = dataset.metric
    return get_metric(stated) if isinstance(stated, str | Metric) else None


def warn_of_metric(competition: Competition, used: str, reader: str) -> None:
    """Say that a competition is scored by what the class that reads it states, where something else is registered."""
    said = competition.metadata
    if get_metric(used).name != said.metric.name:
        log.warning(
            "%r is registered with the metric %s, and %s, which reads it, states %s: %s is used; register it with "
            "that, or under another name to score it otherwise",
            competition.name, said.evaluation_metric, reader, used, used,
        )  # fmt: skip


def with_data_version(new: Competition, before: tuple[DataVersion, ...]) -> Competition:
    """What is registered, with the version of its files among those before; a new one is announced.

    Files behind a URL are looked at when they are first loaded.
    """
    if not isinstance(new.spec.dataset_path, Path):
        return dataclasses.replace(new, versions=before)
    here = contents(with_files(new), ALL_FILES)
    versions, version = with_version(before, here, now())
    if before and version is not None and len(versions) > len(before):
        log.warning(
            "%r: the data is another version, %d: %s in version %d",
            new.name, version.number, "; ".join(changes(before[-1].files, here)), before[-1].number,
        )  # fmt: skip
    return dataclasses.replace(new, versions=versions)


def default_registry_directory() -> Path:
    """Where competitions are kept for a user: not with the caches, which may be deleted at any time."""
    if chosen := os.environ.get("XDG_DATA_HOME"):
        return require_local(chosen, "XDG_DATA_HOME") / "penstock" / "competitions"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "penstock" / "competitions"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "penstock" / "competitions"
    return Path.home() / ".local" / "share" / "penstock" / "competitions"


def with_files(competition: Competition) -> DatasetSpec:
    """The spec, with the files that only the metadata names."""
    spec, metadata = competition.spec, competition.metadata
    plain = {one.name: one.default for one in dataclasses.fields(metadata)}
    named = {split: getattr(metadata, key) for split, key in _FILES.items()}
    named = {split: name for split, name in named.items() if name and name != plain[_FILES[split]]}
    return dataclasses.replace(spec, files=named | dict(spec.files)) if named else spec
