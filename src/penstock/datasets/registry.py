"""Registry of competitions: one small file each, in a directory that many processes share.

registry = DatasetRegistry()
registry.register_competition("titanic", metadata, spec)
registry.search_competitions(competition_type="binary", text="ship")
train = registry.load("titanic", "train", folds=Folds(5))
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from penstock._suggest import did_you_mean
from penstock.datasets.base import CompetitionType, DatasetSpec, KaggleDataset
from penstock.datasets.discovery import Chosen, Discovery, discover, installed_class, load_class, name_of, plain_name
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.metrics import get_metric
from penstock.datasets.registry_entries import (
    Competition,
    DataVersion,
    changes,
    check_entry,
    default_registry_directory,
    differences,
    dumped,
    entry_of,
    files_of,
    metric_stated,
    read_entry,
    refuse_unregistered,
    version_of,
    warn_of_metric,
    with_data_version,
    with_files,
    with_version,
)
from penstock.datasets.tables import FileContent, file_contents
from penstock.errors import ConfigError, DataError, StalledError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock

__all__ = ["Competition", "DatasetRegistry", "default_registry_directory"]

log = logging.getLogger(__name__)

_WAIT_SECONDS = 30.0


class DatasetRegistry:
    """Competitions by name, stored in `path`; by default in the user's data directory.

    All processes that open the same directory see the same competitions at once: each is a file that is published
    atomically, and writers of one name take turns. A damaged file raises when its competition is read, is a logged
    warning when others are listed (see `damaged`), and can be removed or replaced.

    Registering a name twice through one registry is an error, and so is registering something other than what an
    earlier process registered; `replace=True` allows both. Registering the same again, from a script that runs again,
    is allowed.

    A class that `discover` found for a competition is stored with it, and other processes load it from its file. No
    other class replaces it until the competition is removed, or registered with a `dataset_class`.
    """

    def __init__(self, path: PathLike | None = None) -> None:
        self.path = require_local(path, "the registry") if path is not None else default_registry_directory()
        self._registered: set[str] = set()
        self._classes: dict[str, type[KaggleDataset]] = {}
        self._paths: list[PathLike] = []
        self._found: dict[str, str] = {}
        """Discovered classes as `file.py:Class`, by the plain name of their competition."""

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
        """Store a competition. A local path in the spec becomes absolute; its existence is checked on loading.

        `dataset_class` is a class, `"module:Class"` or `"file.py:Class"`; without one, `load` uses the class that is
        found by the competition's name, or `TabularDataset`. A class of the running script is logged as a warning:
        another process has to run the whole script for it. A URL with a password is refused, since the entry is plain
        text.
        """
        check_entry(competition_name, metadata, spec)
        named = name_of(dataset_class) if isinstance(dataset_class, type) else dataset_class
        if isinstance(spec.dataset_path, Path):
            spec = dataclasses.replace(spec, dataset_path=spec.dataset_path.absolute())
        with self._locked(competition_name) as file:
            before = None
            with contextlib.suppress(FileNotFoundError, DataError):
                before = read_entry(file)
            discovered = self._found.get(plain_name(competition_name)) or getattr(before, "discovered_class", None)
            new = Competition(metadata, spec, named, discovered if named is None else None)
            new = with_data_version(new, () if before is None else before.versions)
            if not replace:
                self._refuse_another(competition_name, new, file)
            write_atomic(file, entry_of(new))
        self._registered.add(competition_name)
        self._classes.pop(competition_name, None)
        if isinstance(dataset_class, type):
            self._classes[competition_name] = dataset_class
            if dataset_class.__module__ == "__main__":
                log.warning(
                    "%r is read by %s, a class of the running script: another process that loads it runs the whole "
                    "script; move the class to a module, or the script's code below `if __name__ == '__main__':`",
                    competition_name, named,
                )  # fmt: skip
        if isinstance(spec.dataset_path, Path):  # remote data is read on loading
            warn_of_metric(new, self.metric_of(new), self.class_of(new).name)
        return new

    def remove(self, competition_name: str) -> None:
        """Remove a competition from the registry; its data stays."""
        with self._locked(competition_name) as file:
            if not file.exists():
                raise self._unknown(competition_name)
            file.unlink()
        self._registered.discard(competition_name)
        self._classes.pop(competition_name, None)

    # -- reading -----------------------------------------------------------------------------------------------------

    def list_competitions(self) -> list[str]:
        """Names, sorted."""
        return sorted(competition.name for competition in self._readable())

    def search_competitions(
        self,
        competition_type: CompetitionType | str | None = None,
        metric: str | None = None,
        min_samples: int | None = None,
        max_samples: int | None = None,
        text: str | None = None,
    ) -> list[str]:
        """Names of the competitions that fit all criteria, sorted.

        `metric` is a name or an alias of what `load` scores by (`metric_of`). Bounds are inclusive, and exclude
        competitions of unknown size. Every word of `text` must be in the name, the description or a tag, in any case.
        """
        if min_samples is not None and max_samples is not None and min_samples > max_samples:
            raise ConfigError(f"min_samples={min_samples} is above max_samples={max_samples}")
        kind = CompetitionType(competition_type) if competition_type is not None else None
        wanted = get_metric(metric) if metric is not None else None
        words = (text or "").casefold().split()

        def fits(entry: Competition) -> bool:
            size = entry.spec.num_samples
            return (
                (kind is None or entry.metadata.competition_type is kind)
                and (wanted is None or get_metric(self.metric_of(entry)).name == wanted.name)
                and (min_samples is None or (size is not None and size >= min_samples))
                and (max_samples is None or (size is not None and size <= max_samples))
                and all(word in entry.words for word in words)
            )

        return sorted(entry.name for entry in self._readable() if fits(entry))

    def get(self, competition_name: str) -> Competition:
        """Registered competition of a name."""
        try:
            return read_entry(self._file(competition_name))
        except FileNotFoundError:
            raise self._unknown(competition_name) from None

    def get_metadata(self, competition_name: str) -> CompetitionMetadata:
        return self.get(competition_name).metadata

    def get_spec(self, competition_name: str) -> DatasetSpec:
        return self.get(competition_name).spec

    def damaged(self) -> dict[Path, DataError]:
        """Files that cannot be read, with the reason."""
        return {file: error for file, error in self._entries() if isinstance(error, DataError)}

    def __contains__(self, competition_name: object) -> bool:
        return isinstance(competition_name, str) and self._file(competition_name).exists()

    def __len__(self) -> int:
        return len(self.list_competitions())

    def __repr__(self) -> str:
        return f"DatasetRegistry({str(self.path)!r})"

    # -- datasets ----------------------------------------------------------------------------------------------------

    def discover(self, path: PathLike | None = None) -> Discovery:
        """Dataset classes of penstock, of plugins, and below `path`, for `load` to use.

        This runs the code below `path`; see `penstock.datasets.discovery`. A class found there for a registered
        competition, now or later, is stored with it.
        """
        result = discover(*self._paths, *([path] if path is not None else []))
        if path is not None:
            self._paths.append(require_local(path, "a place of dataset classes").absolute())
        self._found |= {plain_name(name): where for name, where in result.files.items()}
        for competition in self._readable() if self._found else ():
            self._remember(competition)
        return result

    def load(self, competition_name: str, split: str = "train", **options: Any) -> KaggleDataset:
        """Dataset of a competition, constructed with `options` (`folds=`, `tokenizer=`, `template=` ...).

        Files that changed since the competition was registered, or first loaded, are an error: they are another version
        of the data, which has to be registered. The dataset is scored by the metric of its class, or else by the
        registered one; a difference between the two is logged as a warning.
        """
        competition = self.get(competition_name)
        if self._paths and competition.dataset_class is None:
            fresh = discover(*self._paths, installed=False).files  # there may be new files
            self._found |= {plain_name(name): where for name, where in fresh.items()}
            self._remember(competition)
        chosen = self.class_of(competition)
        log.info("%r is read by %s: %s", competition_name, *chosen)
        spec = with_files(competition)
        here = file_contents(spec, files_of(split))
        refuse_unregistered(competition_name, competition.versions, here)
        dataset = self.load_class(competition, chosen)(spec, split, **options)
        if changed := changes(here, file_contents(spec, here)):
            raise DataError(f"the data of {competition_name!r} changed while it was read: {'; '.join(changed)}")
        version = self._known_version(competition, here)
        dataset.data_version = None if version is None else version.number
        stated = metric_stated(dataset)
        if stated is None:
            dataset.metric = competition.metadata.evaluation_metric
        else:
            warn_of_metric(competition, stated.name, chosen.name)
        return dataset

    def metric_of(self, competition: Competition | str) -> str:
        """Metric that `load` scores by: that of the competition's class, or else the registered one.

        No user file is run: a class that another process discovered, or that is known by name only, decides when the
        competition is loaded.
        """
        competition = self.get(competition) if isinstance(competition, str) else competition
        chosen = self.class_of(competition)
        found = self._found.get(plain_name(competition.name))
        named = competition.dataset_class or found or competition.discovered_class
        in_memory = competition.name in self._classes or chosen.name.startswith("penstock.")
        stated = None
        if in_memory or named is None or chosen.name == found:
            with contextlib.suppress(ConfigError):  # a class that cannot be loaded any more: an error of `load`
                stated = metric_stated(self.load_class(competition, chosen))
        return competition.metadata.evaluation_metric if stated is None else stated.name

    def class_of(self, competition: Competition | str) -> Chosen:
        """Class that `load` uses for a competition, with the reason. No user file is run."""
        competition = self.get(competition) if isinstance(competition, str) else competition
        if competition.dataset_class is not None:
            return Chosen(competition.dataset_class, "registered with it")
        discovered = self._found.get(plain_name(competition.name)) or competition.discovered_class
        if discovered is not None:
            return Chosen(discovered, "discovered for its name")
        return installed_class(competition.name, with_files(competition))

    def refuse_code(self, competition: Competition) -> None:
        """Raise if the class of a competition is code that nothing but the registry's entry names.

        An entry is a file that others may have written. `load` runs the code; who only looks at data may not expect it.
        """
        entry = competition.dataset_class or competition.discovered_class
        if entry is not None and not entry.startswith("penstock.") and competition.name not in self._classes:
            raise ConfigError(
                f"{competition.name!r} is read by {entry}, which would be run, and which is known from its entry in "
                f"{self.path} only; look at that code, then pass --trust-code to run it"
            )

    def load_class(self, competition: Competition, chosen: Chosen) -> type[KaggleDataset]:
        """The class itself; runs its code."""
        given = self._classes.get(competition.name)
        if given is not None and name_of(given) == chosen.name:
            return given
        try:
            return load_class(chosen.name)
        except ConfigError as error:
            if competition.dataset_class is not None:
                raise
            raise ConfigError(
                f"{competition.name!r} is read by a discovered class that cannot be loaded: {error}; or discover it "
                "where it is now, or remove the competition and register it again"
            ) from error

    def _known_version(self, competition: Competition, here: dict[str, FileContent]) -> DataVersion | None:
        """Version of the files that were read; files that are read for the first time are added to it."""
        version = version_of(competition.versions, here) if here else None
        if not here or (version is not None and here.keys() <= version.files.keys()):
            return version
        try:
            with self._locked(competition.name) as file:
                entry = read_entry(file)
                refuse_unregistered(competition.name, entry.versions, here)
                versions, version = with_version(entry.versions, here)
                there = orjson.loads(file.read_bytes())
                write_atomic(file, dumped(there | {"versions": [dataclasses.asdict(each) for each in versions]}))
        except OSError as error:
            log.warning("%r: the version of its data cannot be written: %s", competition.name, error)
        return version

    def _remember(self, competition: Competition) -> None:
        """Store the class that was discovered for a competition, for other processes."""
        where = self._found.get(plain_name(competition.name))
        if where is None or competition.dataset_class is not None or competition.discovered_class == where:
            return
        try:
            with self._locked(competition.name) as file:
                entry = orjson.loads(file.read_bytes())
                if entry.get("dataset_class") is None:
                    write_atomic(file, dumped(entry | {"discovered_class": where}))
                    log.info("%r is read by %s from now on", competition.name, where)
        except (OSError, ValueError) as error:
            log.warning("%r: its discovered class %s cannot be stored: %s", competition.name, where, error)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        """File of a name: a slug and a digest, since a name may be any text."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
        digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        return self.path / f"{slug or 'competition'}-{digest}.json"

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[Path]:
        """File of a name, locked for writing."""
        file = self._file(name)
        self.path.mkdir(parents=True, exist_ok=True)
        with FileLock(file.with_name(f".{file.stem}.lock")) as lock:
            if not lock.acquire(_WAIT_SECONDS):
                raise StalledError(
                    f"the lock of {name!r} in {self.path} is held for more than {_WAIT_SECONDS:g} s by {lock.owner()}"
                )
            for stray in self.path.glob(f".{file.name}.*.tmp"):
                stray.unlink(missing_ok=True)  # of a writer that was killed
            yield file

    def _entries(self) -> Iterator[tuple[Path, Competition | DataError]]:
        for file in sorted(self.path.glob("[!.]*.json")) if self.path.is_dir() else ():
            try:
                yield file, read_entry(file)
            except FileNotFoundError:
                continue  # removed by another process
            except DataError as error:
                yield file, error

    def _readable(self) -> Iterator[Competition]:
        for _, entry in self._entries():
            if isinstance(entry, Competition):
                yield entry
            else:
                log.warning("skipped: %s", entry)

    def _refuse_another(self, name: str, new: Competition, file: Path) -> None:
        remedy = "pass replace=True to replace it, or remove it first"
        try:
            there = read_entry(file)
        except FileNotFoundError:
            return
        if name in self._registered:
            raise ConfigError(f"{name!r} is registered already, through this registry; {remedy}")
        here = Competition.from_dict(orjson.loads(entry_of(new)))
        here = dataclasses.replace(here, discovered_class=there.discovered_class, versions=there.versions)
        if differing := differences(there.to_dict(), here.to_dict()):
            raise ConfigError(f"{name!r} is registered already in {self.path}: {'; '.join(differing)}; {remedy}")

    def _unknown(self, name: str) -> ConfigError:
        names = self.list_competitions()
        hint = did_you_mean(name, names) or f"; there are {names}" if names else "; the registry is empty"
        return ConfigError(f"no competition {name!r} is registered in {self.path}{hint}")
