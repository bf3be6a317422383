"""Entry of a registry: one competition as a small JSON file, with the versions of its data."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson

from penstock.datasets.base import DatasetSpec, KaggleDataset
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.metrics import Metric, get_metric
from penstock.datasets.tables import FileContent, file_contents
from penstock.errors import ConfigError, DataError
from penstock.files.filesystems import require_local
from penstock.files.remote import has_password, shown

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
ALL_FILES = ("train", "val", "test", "sample_submission")
_FILE_FIELDS = {"train": "train_file", "test": "test_file", "sample_submission": "sample_submission_file"}


# -- versions of the data --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DataVersion:
    """Content of a competition's files at one time, by split or "sample_submission"."""

    number: int
    registered: str
    files: Mapping[str, FileContent]

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        files = {split: FileContent(**content) for split, content in given["files"].items()}
        return cls(given["number"], given["registered"], files)


def files_of(split: str) -> tuple[str, ...]:
    """Files that a split depends on: the training file decides types and classes."""
    return tuple(dict.fromkeys(["train", split, *(["sample_submission"] if split == "test" else [])]))


def changes(there: Mapping[str, FileContent], here: Mapping[str, FileContent]) -> list[str]:
    """`train.csv is 61,194 bytes, checksum 3f...; it was 60,302 bytes, checksum 9a...`, for every changed file."""
    return [
        f"{content.name} is {content}; it was {there[split]}"
        for split, content in here.items()
        if split in there and there[split].checksum != content.checksum
    ]


def version_of(versions: Sequence[DataVersion], here: Mapping[str, FileContent]) -> DataVersion | None:
    """Last version with these files; files that it does not have are ignored."""
    return next((version for version in reversed(versions) if not changes(version.files, here)), None)


def with_version(
    versions: Sequence[DataVersion], here: Mapping[str, FileContent]
) -> tuple[tuple[DataVersion, ...], DataVersion | None]:
    """Versions including that of these files, and that version; None without files."""
    if not here:
        return tuple(versions), None
    found = version_of(versions, here)
    if found is None:
        found = DataVersion(len(versions) + 1, now(), dict(here))
        return (*versions, found), found
    whole = dataclasses.replace(found, files={**found.files, **here})
    return tuple(whole if version is found else version for version in versions), whole


def refuse_unregistered(name: str, versions: Sequence[DataVersion], here: Mapping[str, FileContent]) -> None:
    """Raise if the files differ from every version of the competition."""
    if not versions or version_of(versions, here) is not None:
        return
    last = versions[-1]
    raise DataError(
        f"the data of {name!r} differs from what was registered: {'; '.join(changes(last.files, here))} in version "
        f"{last.number}, registered {last.registered}; restore the file, or register the competition again as version "
        f"{len(versions) + 1} (`penstock competitions add DIR`, or register_competition(..., replace=True))"
    )


# -- entries ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Competition:
    """Registered competition."""

    metadata: CompetitionMetadata
    spec: DatasetSpec
    dataset_class: str | None = None
    """Given class, as `module:Class` or `file.py:Class`; None: found by the competition's name."""
    discovered_class: str | None = None
    """Class that `discover` found for the name, as `file.py:Class`."""
    versions: tuple[DataVersion, ...] = ()
    """Versions of its files: at each registration that changed them, and when they were first read."""

    @property
    def name(self) -> str:
        return self.metadata.competition_name

    @property
    def words(self) -> str:
        """Searchable text: name, description and tags, in lower case."""
        return "\n".join([self.name, self.metadata.description, *self.metadata.tags]).casefold()

    def to_dict(self) -> dict[str, Any]:
        return {
            "metadata": self.metadata.to_dict(),
            "spec": self.spec.to_dict(),
            "dataset_class": self.dataset_class,
            "discovered_class": self.discovered_class,
            "versions": [dataclasses.asdict(version) for version in self.versions],
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
    """Content of the file of a competition."""
    try:
        return dumped({"format": FORMAT_VERSION, "registered": now(), **competition.to_dict()})
    except TypeError as error:
        raise ConfigError(f"{competition.name!r} has a value that cannot be written as JSON: {error}") from error


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def dumped(entry: dict[str, Any]) -> bytes:
    return bytes(orjson.dumps(entry, option=orjson.OPT_INDENT_2))


def read_entry(file: Path) -> Competition:
    """Competition in a file; a file that cannot be read is a DataError that names it."""
    remedy = "remove it, or register its competition again with replace=True"
    try:
        entry = orjson.loads(file.read_bytes())
        written = entry["format"]
        if not isinstance(written, int):
            raise TypeError(f"its format is {written!r}")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DataError(f"the entry cannot be read: {error.strerror or error}; {remedy}", file=str(file)) from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"the file is not an entry of a registry ({error}); {remedy}", file=str(file)) from error
    if written > FORMAT_VERSION:
        raise DataError(
            f"the entry has format {written}, and this release reads up to {FORMAT_VERSION}; update penstock",
            file=str(file),
        )
    try:
        return Competition.from_dict(entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"the entry is damaged: {error}; {remedy}", file=str(file)) from error


def check_entry(name: str, metadata: CompetitionMetadata, spec: DatasetSpec) -> None:
    """Raise unless metadata and spec belong to the named competition and can be written to a file."""
    if not isinstance(name, str) or not name.strip():
        raise ConfigError(f"competition_name must be a text that is not empty, got {name!r}")
    if not isinstance(metadata, CompetitionMetadata) or not isinstance(spec, DatasetSpec):
        given = f"{type(metadata).__name__} and {type(spec).__name__}"
        raise ConfigError(f"a competition is registered with a CompetitionMetadata and a DatasetSpec, got {given}")
    for what, given in (("metadata", metadata.competition_name), ("spec", spec.competition_name)):
        if given != name:
            raise ConfigError(f"the {what} has the name {given!r}, and is registered as {name!r}; use one name")
    if metadata.competition_type is not spec.competition_type:
        raise ConfigError(
            f"{name!r}: the metadata has type {metadata.competition_type.value}, the spec {spec.competition_type.value}"
        )
    refuse_password(spec.dataset_path, "the registry")


def refuse_password(place: Any, where: str) -> None:
    """Raise if a URL that is to be written to a file has a password in it."""
    if has_password(str(place)):
        raise ConfigError(
            f"{shown(str(place))!r} has a password in it, and {where} is plain text; leave it out: credentials are "
            "taken from the environment (AWS_ACCESS_KEY_ID, HF_TOKEN ...), or from the configuration of the file "
            "system's own tools (~/.aws, a login)"
        )


def differences(there: Any, here: Any, place: str = "") -> list[str]:
    """`spec.num_samples is 891 there and 892 here`, for every difference."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return [] if there == here else [f"{place} is {there!r:.60} there and {here!r:.60} here"]
    keys = dict.fromkeys([*there, *here])
    found = (differences(there.get(key), here.get(key), f"{place}.{key}" if place else str(key)) for key in keys)
    return [line for lines in found for line in lines]


def metric_stated(dataset: type[KaggleDataset] | KaggleDataset) -> Metric | None:
    """Metric that a dataset or its class defines; None if the registered one applies."""
    stated: Any = dataset.metric
    return get_metric(stated) if isinstance(stated, str | Metric) else None


def warn_of_metric(competition: Competition, used: str, reader: str) -> None:
    """Warn if the class that reads a competition defines another metric than the registered one."""
    registered = competition.metadata
    if get_metric(used).name != registered.metric.name:
        log.warning(
            "%r is registered with the metric %s, and its class %s has %s, which is used; register it with that "
            "metric, or under another name", competition.name, registered.evaluation_metric, reader, used,
        )  # fmt: skip


def with_data_version(new: Competition, before: tuple[DataVersion, ...]) -> Competition:
    """Competition with the version of its files; a new version is logged. Remote files are checked when loaded."""
    if not isinstance(new.spec.dataset_path, Path):
        return dataclasses.replace(new, versions=before)
    here = file_contents(with_files(new), ALL_FILES)
    versions, version = with_version(before, here)
    if before and version is not None and len(versions) > len(before):
        log.warning(
            "%r: the data is a new version, %d: %s in version %d",
            new.name, version.number, "; ".join(changes(before[-1].files, here)), before[-1].number,
        )  # fmt: skip
    return dataclasses.replace(new, versions=versions)


def default_registry_directory() -> Path:
    """Directory of a user's competitions: not a cache directory, which may be deleted at any time."""
    if chosen := os.environ.get("XDG_DATA_HOME"):
        base = require_local(chosen, "XDG_DATA_HOME")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path.home() / ".local" / "share"
    return base / "penstock" / "competitions"


def with_files(competition: Competition) -> DatasetSpec:
    """Spec with the file names that only the metadata has."""
    spec, metadata = competition.spec, competition.metadata
    default = {field.name: field.default for field in dataclasses.fields(metadata)}
    named = {split: getattr(metadata, key) for split, key in _FILE_FIELDS.items()}
    named = {split: name for split, name in named.items() if name and name != default[_FILE_FIELDS[split]]}
    files = dataclasses.replace(spec.files, names=named | dict(spec.files))
    return dataclasses.replace(spec, files=files) if named else spec
