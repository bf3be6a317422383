"""The competitions somebody registered: one small file each, in a directory that many processes share.

registry = DatasetRegistry()
registry.register_competition("titanic", metadata, spec)
registry.search_competitions(competition_type="binary", text="ship")
train = registry.load("titanic", "train", folds=Folds(5))
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from penstock._dtypes import did_you_mean
from penstock.datasets.base import CompetitionType, DatasetSpec, KaggleDataset
from penstock.datasets.discovery import Discovery, discover, load_class, name_of
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.metrics import get_metric
from penstock.errors import ConfigError, DataError, StalledError
from penstock.files.atomic import write_atomic
from penstock.files.listing import PathLike
from penstock.files.locking import FileLock

__all__ = ["Competition", "DatasetRegistry", "default_registry_directory"]

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
_WAIT_SECONDS = 30.0
_FILES = {"train": "train_file", "test": "test_file", "sample_submission": "sample_submission_file"}


@dataclass(frozen=True, slots=True)
class Competition:
    """What is registered under one name."""

    metadata: CompetitionMetadata
    spec: DatasetSpec
    dataset_class: str | None = None
    """`module:Class` or `file.py:Class` where one was given; None: the class is found by the competition's name."""

    @property
    def name(self) -> str:
        return self.metadata.competition_name

    def to_dict(self) -> dict[str, Any]:
        return {
            "metadata": self.metadata.to_dict(),
            "spec": self.spec.to_dict(),
            "dataset_class": self.dataset_class,
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Competition:
        return cls(
            CompetitionMetadata.from_dict(given["metadata"]),
            DatasetSpec.from_dict(given["spec"]),
            given["dataset_class"],
        )


class DatasetRegistry:
    """Competitions by name, kept in `path`; without one, where the system keeps a user's data.

    Every process that opens the same directory sees the same competitions, at once: each is a file that appears whole
    or not at all, and writers of the same name take turns. A file that is damaged is an error when its competition is
    asked for, a logged warning when the others are listed (see `damaged`), and can be removed or replaced.

    Registering a name twice through one registry is an error; so is registering something else than what an earlier
    process left. `replace=True` says that it is meant. The same once more, from a script that runs again, is fine.
    """

    def __init__(self, path: PathLike | None = None) -> None:
        self.path = Path(path).expanduser() if path is not None else default_registry_directory()
        self._registered: set[str] = set()
        self._classes: dict[str, type[KaggleDataset]] = {}
        self._places: list[PathLike] = []

    # -- writing -----------------------------------------------------------------------------------------------------

    def register_competition(
        self,
        competition_name: str,
        metadata: CompetitionMetadata,
        spec: DatasetSpec,
        *,
        dataset_class: type[KaggleDataset] | str | None = None,
        replace: bool = False,
    ) -> Competition:
        """Keep a competition. A local path in the spec is made absolute; whether it exists is asked when it is loaded.

        `dataset_class` is a class, or `"module:Class"` or `"file.py:Class"`; without one, `load` takes the class that
        is found by the competition's name, or `TabularDataset`.
        """
        _check(competition_name, metadata, spec)
        named = name_of(dataset_class) if isinstance(dataset_class, type) else dataset_class
        if isinstance(spec.dataset_path, Path):
            spec = dataclasses.replace(spec, dataset_path=spec.dataset_path.absolute())
        new = Competition(metadata, spec, named)
        with self._alone(competition_name) as file:
            if not replace:
                self._refuse_another(competition_name, new, file)
            write_atomic(file, _written(new))
        self._registered.add(competition_name)
        if isinstance(dataset_class, type):
            self._classes[competition_name] = dataset_class
        else:
            self._classes.pop(competition_name, None)
        return new

    def remove(self, competition_name: str) -> None:
        """Forget a competition; its data stays where it is."""
        with self._alone(competition_name) as file:
            if not file.exists():
                raise self._unknown(competition_name)
            file.unlink()
        self._registered.discard(competition_name)
        self._classes.pop(competition_name, None)

    # -- reading -----------------------------------------------------------------------------------------------------

    def list_competitions(self) -> list[str]:
        """The names, sorted."""
        return sorted(competition.name for competition in self._readable())

    def search_competitions(
        self,
        competition_type: CompetitionType | str | None = None,
        metric: str | None = None,
        min_samples: int | None = None,
        max_samples: int | None = None,
        text: str | None = None,
    ) -> list[str]:
        """The names of those that fit all that is given, sorted.

        `metric` is a name or an alias. Bounds are inclusive, and leave out competitions whose size is not known. Every
        word of `text` must be in the name, the description or a tag; case does not count.
        """
        if min_samples is not None and max_samples is not None and min_samples > max_samples:
            raise ConfigError(f"min_samples={min_samples} is above max_samples={max_samples}; nothing lies between")
        kind = CompetitionType(competition_type) if competition_type is not None else None
        wanted = get_metric(metric) if metric is not None else None
        words = (text or "").casefold().split()

        def fits(one: Competition) -> bool:
            size = one.spec.num_samples
            return (
                (kind is None or one.metadata.competition_type is kind)
                and (wanted is None or one.metadata.metric.name == wanted.name)
                and (min_samples is None or (size is not None and size >= min_samples))
                and (max_samples is None or (size is not None and size <= max_samples))
                and all(word in _searched(one.metadata) for word in words)
            )

        return sorted(one.name for one in self._readable() if fits(one))

    def get(self, competition_name: str) -> Competition:
        """What is registered under a name."""
        file = self._file(competition_name)
        try:
            return _read(file)
        except FileNotFoundError:
            raise self._unknown(competition_name) from None

    def get_metadata(self, competition_name: str) -> CompetitionMetadata:
        return self.get(competition_name).metadata

    def get_spec(self, competition_name: str) -> DatasetSpec:
        return self.get(competition_name).spec

    def damaged(self) -> dict[Path, DataError]:
        """The files that cannot be read, and why."""
        return {file: error for file, error in self._entries() if isinstance(error, DataError)}

    def __contains__(self, competition_name: object) -> bool:
        return isinstance(competition_name, str) and self._file(competition_name).exists()

    def __len__(self) -> int:
        return len(self.list_competitions())

    def __repr__(self) -> str:
        return f"DatasetRegistry({str(self.path)!r})"

    # -- datasets ----------------------------------------------------------------------------------------------------

    def discover(self, path: PathLike | None = None) -> Discovery:
        """The dataset classes of penstock, of plugins, and below `path`, which `load` knows from then on.

        This runs the code below `path`; see `penstock.datasets.discovery`.
        """
        result = discover(*self._places, *([path] if path is not None else []))
        if path is not None:
            self._places.append(Path(path).absolute())
        return result

    def load(self, competition_name: str, split: str = "train", **options: Any) -> KaggleDataset:
        """The dataset of a competition, made with `options` (`folds=`, `tokenizer=`, `template=` ...)."""
        competition = self.get(competition_name)
        return self._class_of(competition)(_with_files(competition), split, **options)

    def _class_of(self, competition: Competition) -> type[KaggleDataset]:
        if competition.name in self._classes:
            return self._classes[competition.name]
        if competition.dataset_class is not None:
            return load_class(competition.dataset_class)
        found = {_plain(name): dataset for name, dataset in self.discover().found.items()}
        if _plain(competition.name) in found:
            return found[_plain(competition.name)]
        from penstock.datasets.tabular import TabularDataset

        return TabularDataset

    # -- inside ------------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        """A name may be any text, and a file's may not: the name is in the file."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
        digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        return self.path / f"{slug or 'competition'}-{digest}.json"

    @contextmanager
    def _alone(self, name: str) -> Iterator[Path]:
        """The file of a name, while nobody else writes it."""
        file = self._file(name)
        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.stem}.lock")) as lock:
            if not lock.acquire(_WAIT_SECONDS):
                raise StalledError(
                    f"{name!r} has been written for more than {_WAIT_SECONDS:g} s by {lock.owner()} in {self.path}"
                )
            for stray in self.path.glob(f".{file.name}.*.tmp"):
                stray.unlink(missing_ok=True)  # whoever held the lock and wrote it was killed
            yield file

    def _entries(self) -> Iterator[tuple[Path, Competition | DataError]]:
        if not self.path.is_dir():
            return
        for file in sorted(self.path.glob("[!.]*.json")):
            try:
                yield file, _read(file)
            except FileNotFoundError:
                continue  # removed meanwhile
            except DataError as error:
                yield file, error

    def _readable(self) -> Iterator[Competition]:
        for _, entry in self._entries():
            if isinstance(entry, Competition):
                yield entry
            else:
                log.warning("left out: %s", entry)

    def _refuse_another(self, name: str, new: Competition, file: Path) -> None:
        remedy = "pass replace=True to put this one in its place, or remove it first"
        if name in self._registered:
            raise ConfigError(f"{name!r} is registered already, through this registry; {remedy}")
        try:
            there = _read(file)
        except FileNotFoundError:
            return
        differing = _differences(there.to_dict(), Competition.from_dict(orjson.loads(_written(new))).to_dict())
        if differing:
            raise ConfigError(
                f"{name!r} is registered already in {self.path}, as something else: {'; '.join(differing)}; {remedy}"
            )

    def _unknown(self, name: str) -> ConfigError:
        names = self.list_competitions()
        hint = did_you_mean(name, names) or f"; there are {names}" if names else "; nothing is registered there"
        return ConfigError(f"no competition {name!r} is registered in {self.path}{hint}")


def default_registry_directory() -> Path:
    """Where competitions are kept for a user: not with the caches, which may be deleted at any time."""
    if chosen := os.environ.get("XDG_DATA_HOME"):
        return Path(chosen).expanduser() / "penstock" / "competitions"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "penstock" / "competitions"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "penstock" / "competitions"
    return Path.home() / ".local" / "share" / "penstock" / "competitions"


def _written(competition: Competition) -> bytes:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    entry = {"format": FORMAT_VERSION, "registered": now, **competition.to_dict()}
    try:
        data: bytes = orjson.dumps(entry, option=orjson.OPT_INDENT_2)
    except TypeError as error:
        raise ConfigError(f"{competition.name!r} holds a value that cannot be written as JSON: {error}") from error
    return data


def _read(file: Path) -> Competition:
    data = file.read_bytes()
    remedy = "remove it, or register its competition again with replace=True"
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


def _check(name: str, metadata: CompetitionMetadata, spec: DatasetSpec) -> None:
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


def _differences(there: Any, here: Any, place: str = "") -> list[str]:
    """`spec.num_samples is 891 there and 892 here`, for everything that differs."""
    if isinstance(there, dict) and isinstance(here, dict):
        keys = dict.fromkeys([*there, *here])
        return [
            line
            for key in keys
            for line in _differences(there.get(key), here.get(key), f"{place}.{key}" if place else str(key))
        ]
    return [] if there == here else [f"{place} is {there!r:.60} there and {here!r:.60} here"]


def _searched(metadata: CompetitionMetadata) -> str:
    return "\n".join([metadata.competition_name, metadata.description, *metadata.tags]).casefold()


def _with_files(competition: Competition) -> DatasetSpec:
    """The spec, with the files that only the metadata names."""
    spec, metadata = competition.spec, competition.metadata
    plain = {one.name: one.default for one in dataclasses.fields(metadata)}
    named = {split: getattr(metadata, key) for split, key in _FILES.items()}
    named = {split: name for split, name in named.items() if name and name != plain[_FILES[split]]}
    return dataclasses.replace(spec, files=named | dict(spec.files)) if named else spec


def _plain(name: str) -> str:
    """House_Prices and house-prices are the same."""
    return re.sub(r"[\s_-]+", "-", name.strip().casefold())
