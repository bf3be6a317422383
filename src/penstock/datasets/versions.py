"""Versions of a competition's data: the content of its files, as it was when somebody registered or first loaded it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

from penstock.datasets.spec import DatasetSpec
from penstock.datasets.tables import local_file, split_file
from penstock.errors import DataError

__all__ = [
    "ALL_FILES",
    "DataVersion",
    "FileContent",
    "changes",
    "contents",
    "files_of",
    "refuse_changed",
    "refuse_unregistered",
    "version_of",
    "with_version",
]

ALL_FILES = ("train", "val", "test", "sample_submission")
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a file held when it was looked at."""

    name: str
    size: int
    checksum: str
    """32 hex digits of all its bytes."""

    def __str__(self) -> str:
        return f"{self.size:,} bytes, checksum {self.checksum[:8]}"


@dataclass(frozen=True, slots=True)
class DataVersion:
    """One state of a competition's files, by split, with "sample_submission" among them."""

    number: int
    registered: str
    files: Mapping[str, FileContent]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Self:
        files = {split: FileContent(**content) for split, content in given["files"].items()}
        return cls(given["number"], given["registered"], files)


def files_of(split: str) -> tuple[str, ...]:
    """The files that a split depends on: types and classes are those of the training file."""
    return tuple(dict.fromkeys(["train", split, *(["sample_submission"] if split == "test" else [])]))


def contents(spec: DatasetSpec, splits: Iterable[str]) -> dict[str, FileContent]:
    """What the files of these splits hold, as far as they are there. Reads them whole, those behind a URL as copies."""
    found = {}
    for split in splits:
        file = _file(spec, split)
        if file is not None:
            digest, size = xxhash.xxh3_128(), 0
            with open(file, "rb") as opened:
                while block := opened.read(_BLOCK):
                    digest.update(block)
                    size += len(block)
            found[split] = FileContent(file.name, size, digest.hexdigest())
    return found


def changes(there: Mapping[str, FileContent], here: Mapping[str, FileContent]) -> list[str]:
    """`train.csv is 61,194 bytes, checksum 3f...; it was 60,302 bytes, checksum 9a...`, for every file that differs."""
    return [
        f"{content.name} is {content}; it was {there[split]}"
        for split, content in here.items()
        if split in there and there[split].checksum != content.checksum
    ]


def version_of(versions: Sequence[DataVersion], here: Mapping[str, FileContent]) -> DataVersion | None:
    """The last version in which the files were what they are; files that it does not know do not count."""
    return next((one for one in reversed(versions) if not changes(one.files, here)), None)


def with_version(
    versions: Sequence[DataVersion], here: Mapping[str, FileContent], now: str
) -> tuple[tuple[DataVersion, ...], DataVersion | None]:
    """The versions with that of these files among them, and which it is; None if there are no files."""
    if not here:
        return tuple(versions), None
    found = version_of(versions, here)
    if found is None:
        found = DataVersion(len(versions) + 1, now, dict(here))
        return (*versions, found), found
    whole = dataclasses.replace(found, files={**found.files, **here})
    return tuple(whole if one is found else one for one in versions), whole


def refuse_unregistered(name: str, versions: Sequence[DataVersion], here: Mapping[str, FileContent]) -> None:
    """Raise if files are not what they were in any version of the competition."""
    if not versions or version_of(versions, here) is not None:
        return
    last = versions[-1]
    raise DataError(
        f"the data of {name!r} is not what was registered: {'; '.join(changes(last.files, here))} in version "
        f"{last.number}, registered {last.registered}; put the file back, or register the competition again "
        f"(`penstock competitions add DIR`, or register_competition(..., replace=True)): it is then version "
        f"{len(versions) + 1}"
    )


def refuse_changed(name: str, before: Mapping[str, FileContent], after: Mapping[str, FileContent]) -> None:
    """Raise if files are not any more what they were before they were read."""
    if changed := changes(before, after):
        raise DataError(f"the data of {name!r} changed while it was read: {'; '.join(changed)}; load it again")


def _file(spec: DatasetSpec, split: str) -> Path | None:
    try:
        return local_file(split_file(spec, split))
    except (FileNotFoundError, NotADirectoryError):
        return None
