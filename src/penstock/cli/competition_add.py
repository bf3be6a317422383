"""What `penstock competitions add` does: guess or read, check by loading once, then write and register."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, DataError, PenstockError

if TYPE_CHECKING:
    from penstock.datasets.base import DatasetSpec, KaggleDataset
    from penstock.datasets.inference import Inference
    from penstock.datasets.metadata import CompetitionMetadata
    from penstock.datasets.registry import Competition, DatasetRegistry
    from penstock.files.remote import RemotePath

__all__ = ["SPEC_FILE", "TYPES", "Added", "add_data", "as_options", "check_type", "said_as_options"]

SPEC_FILE = "competition.yaml"
TYPES = "binary, multiclass, multilabel, ordinal, regression, multi_target, ranking, time_series"

_AS_OPTIONS = (
    (r"pass replace=True", "pass --replace"),
    (r"again with replace=True", "again with --replace"),
    (r"pass (encoding|delimiter)='([^']*)'", r"pass --\1 \2"),
    (r"pass the right (encoding|delimiter)=", r"pass the right --\1"),
)
"""What errors advise to write in Python, as it is written on the command line."""


@dataclass(frozen=True, slots=True)
class Added:
    """What came of it."""

    competition: Competition
    file: Path
    written: bool
    rows: dict[str, int]
    name_in_file: str
    versions_before: int
    """How many versions of the data were known before."""
    doubts: dict[str, str]
    """By column: what somebody should look at, of what was guessed."""


def add_data(
    registry: DatasetRegistry,
    directory: str,
    file: Path | None,
    name: str | None,
    options: dict[str, Any],
    *,
    guess: bool,
    replace: bool,
) -> Added:
    """Register the data in a directory as its spec file says, which is guessed and written if it is not there.

    Where this fails, nothing is registered and the file is as it was.
    """
    from penstock.datasets.inference import infer
    from penstock.datasets.registry import Competition
    from penstock.datasets.spec_file import check_files, read_spec, write_spec
    from penstock.files.remote import path_of

    file = _spec_file(path_of(directory), file)
    guessed = None
    if guess or not file.exists():
        _refuse_missing(path_of(directory))
        guessed = infer(directory, name=name, **options)
        metadata, spec, _ = guessed
    else:
        _refuse_given(options, file)
        metadata, spec = read_spec(file)
    in_file = metadata.competition_name
    if name is not None:
        metadata = dataclasses.replace(metadata, competition_name=name)
        spec = dataclasses.replace(spec, competition_name=name)
    there = _there(registry, metadata.competition_name, replace=replace)
    same = _is_same(there, spec)
    dataset_class = there.dataset_class if there is not None and same else None
    discovered = there.discovered_class if there is not None else None
    wanted = Competition(metadata, spec, dataset_class, discovered)
    reader = registry.load_class(wanted, registry.class_of(wanted))
    if guessed is not None and options.get("metric") is None:
        guessed = _with_metric(guessed, reader)
        metadata = dataclasses.replace(metadata, evaluation_metric=guessed.metadata.evaluation_metric)
    _refuse_another_metric(metadata, reader, f"{file}: evaluation_metric" if guessed is None else "--metric")
    rows = check_files(metadata, spec, reader)
    with _put_back(file):
        if guessed is not None:
            write_spec(guessed, file, overwrite=guess)
        competition = registry.register_competition(
            metadata.competition_name, metadata, spec, dataset_class=dataset_class, replace=replace or same
        )
    notes = {} if guessed is None else guessed.notes
    doubts = {key.removeprefix("doubts."): why for key, why in notes.items() if key.startswith("doubts.")}
    return Added(
        competition, file, guessed is not None, rows, in_file, 0 if there is None else len(there.versions), doubts
    )


def check_type(given: str | None) -> None:
    """Refuse a type nobody knows, with the short names too."""
    from penstock._suggest import did_you_mean
    from penstock.datasets.base import CompetitionType

    if given is None:
        return
    try:
        CompetitionType(given)
    except ConfigError as error:
        known = [*TYPES.split(", "), *(kind.value for kind in CompetitionType)]
        hint = did_you_mean(given.lower(), known)
        raise ConfigError(f"--type {given!r} is not a competition type{hint}; the types are {TYPES}") from error


@contextlib.contextmanager
def said_as_options() -> Iterator[None]:
    """Gives errors the words of the command line."""
    try:
        yield
    except PenstockError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (as_options(error.args[0]), *error.args[1:])
        raise


def as_options(message: str) -> str:
    for said, option in _AS_OPTIONS:
        message = re.sub(said, option, message)
    return message


def _refuse_given(options: dict[str, Any], file: Path) -> None:
    for option, value in options.items():
        if value is not None:
            shown = option.removesuffix("_column").removeprefix("competition_")
            raise ConfigError(
                f"{file} is there already, and says what --{shown} would say: correct the file, or pass --infer to "
                "guess anew and write over it"
            )


def _there(registry: DatasetRegistry, name: str, *, replace: bool) -> Competition | None:
    """What is registered under the name; a damaged entry may be replaced."""
    try:
        return registry.get(name) if name in registry else None
    except DataError:
        if replace:
            return None
        raise


def _is_same(there: Competition | None, spec: DatasetSpec) -> bool:
    """Whether it is the same data, described once more."""
    place = spec.dataset_path.absolute() if isinstance(spec.dataset_path, Path) else spec.dataset_path
    return there is not None and str(there.spec.dataset_path) == str(place)


def _with_metric(guessed: Inference, reader: type[KaggleDataset]) -> Inference:
    """The guess, with the metric of the class that reads the data where the class states one."""
    from penstock.datasets.metrics import get_metric

    if reader.metric is None:
        return guessed
    metadata = dataclasses.replace(guessed.metadata, evaluation_metric=get_metric(reader.metric).name)
    notes = guessed.notes | {"evaluation_metric": f"{reader.__name__}, which reads the data, states it"}
    return guessed._replace(metadata=metadata, notes=notes)


def _refuse_another_metric(metadata: CompetitionMetadata, reader: type[KaggleDataset], where: str) -> None:
    """Raise if somebody says another metric than the class that reads the data."""
    from penstock.datasets.metrics import get_metric

    if reader.metric is not None and get_metric(reader.metric).name != metadata.metric.name:
        stated = get_metric(reader.metric).name
        raise ConfigError(
            f"{where} is {metadata.evaluation_metric}, and {reader.__name__}, which reads "
            f"{metadata.competition_name!r}, states {stated}; give {stated}, or another name (--name) to have it "
            "scored otherwise"
        )


@contextlib.contextmanager
def _put_back(file: Path) -> Iterator[None]:
    """The file as it was, if what follows fails."""
    from penstock.files.atomic import write_atomic

    before = file.read_bytes() if file.exists() else None
    try:
        yield
    except BaseException:
        if before is None:
            file.unlink(missing_ok=True)
        elif file.read_bytes() != before:
            write_atomic(file, before)
        raise


def _spec_file(place: Path | RemotePath, given: Path | None) -> Path:
    from penstock.datasets.registry_entries import refuse_password

    refuse_password(place, f"{SPEC_FILE} or the registry")
    if given is not None:
        return given.expanduser()
    if not isinstance(place, Path):
        raise ConfigError(f"{str(place)!r} is a URL, where no {SPEC_FILE} can be written; say where with --spec FILE")
    return place / SPEC_FILE


def _refuse_missing(place: Path | RemotePath) -> None:
    if isinstance(place, Path) and not place.exists():
        raise FileNotFoundError(f"no such directory: {str(place)!r} (looked from {Path.cwd()})")
