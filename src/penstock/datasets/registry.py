"""The competitions somebody registered: one small file each, in a directory that many processes share.

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
from penstock.datasets.discovery import (
    Chosen,
    Discovery,
    discover,
    installed_class,
    load_class,
    name_of,
    plain_name,
)
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.metrics import get_metric
from penstock.datasets.registry_entries import (
    Competition,
    check_entry,
    default_registry_directory,
    differences,
    dumped,
    entry_before,
    entry_of,
    metric_stated,
    now,
    read_entry,
    warn_of_metric,
    with_data_version,
    with_files,
)
from penstock.datasets.versions import (
    DataVersion,
    FileContent,
    contents,
    files_of,
    refuse_changed,
    refuse_unregistered,
    version_of,
    with_version,
)
from penstock.errors import ConfigError, DataError, StalledError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.locks import FileLock

__all__ = ["Competition", "DatasetRegistry", "default_registry_directory"]

log = logging.getLogger(__name__)

_WAIT_SECONDS = 30.0


class DatasetRegistry:
    """Competitions by name, kept in `path`; without one, where the system keeps a user's data.

    Every process that opens the same directory sees the same competitions, at once: each is a file that appears whole
    or not at all, and writers of the same name take turns. A file that is damaged is an error when its competition is
    asked for, a logged warning when the others are listed (see `damaged`), and can be removed or replaced.

    Registering a name twice through one registry is an error; so is registering something else than what an earlier
    process left. `replace=True` says that it is meant. The same once more, from a script that runs again, is fine.

    A class that `discover` found for a competition is remembered with it: other processes load it from its file, and
    are told if that is not possible any more. Nothing else takes its place before the competition is removed, or
    registered with a `dataset_class`.
    """

    def __init__(self, path: PathLike | None = None) -> None:
        self.path = require_local(path, "the registry") if path is not None else default_registry_directory()
        self._registered: set[str] = set()
        self._classes: dict[str, type[KaggleDataset]] = {}
        self._places: list[PathLike] = []
        self._found: dict[str, str] = {}
        """`file.py:Class` of what was discovered, by the plain name of its competition."""

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
        is found by the competition's name, or `TabularDataset`. A class of the script that is run is warned of: another
        process has to run the whole script for it. A URL with a password is refused, since the entry is plain text.
        """
        check_entry(competition_name, metadata, spec)
        named = name_of(dataset_class) if isinstance(dataset_class, type) else dataset_class
        if isinstance(spec.dataset_path, Path):
            spec = dataclasses.replace(spec, dataset_path=spec.dataset_path.absolute())
        with self._alone(competition_name) as file:
            before = entry_before(file)
            discovered = self._found.get(plain_name(competition_name)) or (
                None if before is None else before.discovered_class
            )
            new = Competition(metadata, spec, named, discovered if named is None else None)
            new = with_data_version(new, () if before is None else before.versions)
            if not replace:
                self._refuse_another(competition_name, new, file)
            write_atomic(file, entry_of(new))
        self._registered.add(competition_name)
        if isinstance(dataset_class, type):
            self._classes[competition_name] = dataset_class
        else:
            self._classes.pop(competition_name, None)
        if isinstance(spec.dataset_path, Path):  # what lies behind a URL is looked at when it is loaded
            warn_of_metric(new, self.metric_of(new), self.class_of(new).name)
        if isinstance(dataset_class, type) and dataset_class.__module__ == "__main__":
            log.warning(
                "%r is read by %s, a class of the script that is run: another process that loads it runs the whole "
                "script; put the class into a module of its own, or what the script does below "
                "`if __name__ == '__main__':`",
                competition_name,
                named,
            )
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

        `metric` is a name or an alias, compared with what `load` scores by (`metric_of`). Bounds are inclusive, and
        leave out competitions whose size is not known. Every word of `text` must be in the name, the description or a
        tag; case does not count.
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
                and (wanted is None or get_metric(self.metric_of(one)).name == wanted.name)
                and (min_samples is None or (size is not None and size >= min_samples))
                and (max_samples is None or (size is not None and size <= max_samples))
                and all(word in one.words for word in words)
            )

        return sorted(one.name for one in self._readable() if fits(one))

    def get(self, competition_name: str) -> Competition:
        """What is registered under a name."""
        file = self._file(competition_name)
        try:
            return read_entry(file)
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

        This runs the code below `path`; see `penstock.datasets.discovery`. What is found there for a competition that
        is registered, now or later, is remembered with it.
        """
        result = discover(*self._places, *([path] if path is not None else []))
        if path is not None:
            self._places.append(require_local(path, "a place of dataset classes").absolute())
        self._found |= {plain_name(name): where for name, where in result.files.items()}
        for competition in self._readable() if self._found else ():
            self._remember(competition)
        return result

    def load(self, competition_name: str, split: str = "train", **options: Any) -> KaggleDataset:
        """The dataset of a competition, made with `options` (`folds=`, `tokenizer=`, `template=` ...).

        Files that are not what they were when the competition was registered, or first loaded, are an error: they are
        another version of the data, which counts once it is registered again. The dataset is scored by the metric that
        its class states, and else by the registered one; where the two differ, the log has a warning.
        """
        competition = self.get(competition_name)
        if self._places and competition.dataset_class is None:
            fresh = discover(*self._places, installed=False).files  # there may be more by now
            self._found |= {plain_name(name): where for name, where in fresh.items()}
            self._remember(competition)
        chosen = self.class_of(competition)
        log.info("%r is read by %s: %s", competition_name, *chosen)
        spec = with_files(competition)
        here = contents(spec, files_of(split))
        refuse_unregistered(competition_name, competition.versions, here)
        dataset = self.load_class(competition, chosen)(spec, split, **options)
        refuse_changed(competition_name, here, contents(spec, here))
        version = self._known_version(competition, here)
        dataset.data_version = None if version is None else version.number
        stated = metric_stated(dataset)
        if stated is None:
            dataset.metric = competition.metadata.evaluation_metric
        else:
            warn_of_metric(competition, stated.name, chosen.name)
        return dataset

    def metric_of(self, competition: Competition | str) -> str:
        """The metric that `load` scores by: what the class of a competition states, or else what is registered.

        No file is run to find out: a class that another process discovered, or that is known by its name only, has its
        say when the competition is loaded.
        """
        if isinstance(competition, str):
            competition = self.get(competition)
        chosen = self.class_of(competition)
        stated = None
        if self._is_at_hand(competition, chosen):
            with contextlib.suppress(ConfigError):  # a class that cannot be loaded any more; loading says so
                stated = metric_stated(self.load_class(competition, chosen))
        return competition.metadata.evaluation_metric if stated is None else stated.name

    def class_of(self, competition: Competition | str) -> Chosen:
        """Which class `load` takes for a competition, and why. No file is run to find out."""
        if isinstance(competition, str):
            competition = self.get(competition)
        if competition.dataset_class is not None:
            return Chosen(competition.dataset_class, "registered with it")
        discovered = self._found.get(plain_name(competition.name)) or competition.discovered_class
        if discovered is not None:
            return Chosen(discovered, "discovered for its name")
        return installed_class(competition.name, with_files(competition))

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
                f"{competition.name!r} is read by a class that was discovered for it, and no other takes its place: "
                f"{error}; or discover it where it is now, or remove the competition and register it anew"
            ) from error

    def _known_version(self, competition: Competition, here: dict[str, FileContent]) -> DataVersion | None:
        """The version of files that were read; written down if nobody has seen them before."""
        version = version_of(competition.versions, here) if here else None
        if not here or (version is not None and here.keys() <= version.files.keys()):
            return version
        try:
            with self._alone(competition.name) as file:
                entry = read_entry(file)
                refuse_unregistered(competition.name, entry.versions, here)
                versions, version = with_version(entry.versions, here, now())
                there = orjson.loads(file.read_bytes())
                write_atomic(file, dumped(there | {"versions": [one.to_dict() for one in versions]}))
        except OSError as error:
            log.warning("%r: the version of its data cannot be written down: %s", competition.name, error)
        return version

    def _is_at_hand(self, competition: Competition, chosen: Chosen) -> bool:
        """Whether a class is in memory, or installed: loading it runs no file of somebody's."""
        if competition.name in self._classes or chosen.name.startswith("penstock."):
            return True
        found = self._found.get(plain_name(competition.name))
        named = competition.dataset_class or found or competition.discovered_class
        return named is None or chosen.name == found

    def _remember(self, competition: Competition) -> None:
        """Write down which class was discovered for a competition, for other processes."""
        where = self._found.get(plain_name(competition.name))
        if where is None or competition.dataset_class is not None or competition.discovered_class == where:
            return
        try:
            with self._alone(competition.name) as file:
                entry = orjson.loads(file.read_bytes())
                if entry.get("dataset_class") is None:
                    write_atomic(file, dumped(entry | {"discovered_class": where}))
                    log.info("%r is read by %s from now on", competition.name, where)
        except (OSError, ValueError) as error:
            log.warning("%r: that %s was discovered for it cannot be remembered: %s", competition.name, where, error)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        """A name may be any text, and a file's may not: the name is in the file."""
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:60]
        digest = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        return self.path / f"{slug or 'competition'}-{digest}.json"

    @contextlib.contextmanager
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
                yield file, read_entry(file)
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
        try:
            there = read_entry(file)
        except FileNotFoundError:
            return
        if name in self._registered:
            raise ConfigError(f"{name!r} is registered already, through this registry; {remedy}")
        here = Competition.from_dict(orjson.loads(entry_of(new)))
        here = dataclasses.replace(here, discovered_class=there.discovered_class, versions=there.versions)
        differing = differences(there.to_dict(), here.to_dict())
        if differing:
            raise ConfigError(
                f"{name!r} is registered already in {self.path}, as something else: {'; '.join(differing)}; {remedy}"
            )

    def _unknown(self, name: str) -> ConfigError:
        names = self.list_competitions()
        hint = did_you_mean(name, names) or f"; there are {names}" if names else "; nothing is registered there"
        return ConfigError(f"no competition {name!r} is registered in {self.path}{hint}")
