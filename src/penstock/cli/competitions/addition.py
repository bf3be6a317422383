"""Addition of the data of a competition to the registry, as `penstock competitions add` does it."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._suggest import did_you_mean
from penstock.errors import ConfigError, DataError, PenstockError

if TYPE_CHECKING:  # imported when a command runs
    from penstock.datasets.base import DatasetSpec, KaggleDataset
    from penstock.datasets.inference import Inference
    from penstock.datasets.metadata import CompetitionMetadata
    from penstock.datasets.registry import Competition, DatasetRegistry
    from penstock.files.remote import RemotePath

SPEC_FILE = "competition.yaml"
TYPES = "binary, multiclass, multilabel, ordinal, regression, multi_target, ranking, time_series"
_AS_OPTIONS = (
    (r"pass replace=True", "pass --replace"),
    (r"again with replace=True", "again with --replace"),
    (r"pass (encoding|delimiter)='([^']*)'", r"pass --\1 \2"),
    (r"pass the right (encoding|delimiter)=", r"pass the right --\1"),
)
"""Advice in errors, in Python and on the command line."""


@dataclass(frozen=True, slots=True)
class AddedData:
    """Result of `add`."""

    competition: Competition
    file: Path
    written: bool
    rows: dict[str, int]
    name_in_file: str
    versions_before: int
    """Number of known versions of the data before."""
    doubts: dict[str, str]
    """By column: inferred facts that a person should check."""


def add_data(
    registry: DatasetRegistry,
    directory: str,
    file: Path | None,
    name: str | None,
    options: dict[str, Any],
    *,
    infer_again: bool,
    replace: bool,
    trust_code: bool,
) -> AddedData:
    """Register the data in a directory with its spec file, which is inferred and written if it does not exist.

    After an error nothing is registered and the file is unchanged.
    """
    from penstock.datasets.inference import infer
    from penstock.datasets.registry import Competition
    from penstock.datasets.spec_file import check_files, read_spec, write_spec
    from penstock.files.remote import path_of

    file = _spec_file(path_of(directory), file)
    inferred = None
    if infer_again or not file.exists():
        _refuse_missing(path_of(directory))
        inferred = infer(directory, name=name, **options)
        metadata, spec, _ = inferred
    else:
        _refuse_options(options, file)
        metadata, spec = read_spec(file)
    in_file = metadata.competition_name
    if name is not None:
        metadata = dataclasses.replace(metadata, competition_name=name)
        spec = dataclasses.replace(spec, competition_name=name)
    before = _registered(registry, metadata.competition_name, replace=replace)
    same = before is not None and _is_same_data(before, spec)
    dataset_class = before.dataset_class if before is not None and same else None
    discovered = before.discovered_class if before is not None else None
    wanted = Competition(metadata, spec, dataset_class, discovered)
    if not trust_code:
        registry.refuse_code(wanted)
    reader = registry.load_class(wanted, registry.class_of(wanted))
    if inferred is not None and options.get("metric") is None:
        inferred = _with_metric(inferred, reader)
        metadata = dataclasses.replace(metadata, evaluation_metric=inferred.metadata.evaluation_metric)
    _refuse_another_metric(metadata, reader, f"{file}: evaluation_metric" if inferred is None else "--metric")
    rows = check_files(metadata, spec, reader)
    with _restored(file):
        if inferred is not None:
            write_spec(inferred, file, overwrite=infer_again)
        competition = registry.register_competition(
            metadata.competition_name, metadata, spec, dataset_class=dataset_class, replace=replace or same
        )
    notes = {} if inferred is None else inferred.notes
    doubts = {key.removeprefix("doubts."): why for key, why in notes.items() if key.startswith("doubts.")}
    return AddedData(
        competition, file, inferred is not None, rows, in_file, 0 if before is None else len(before.versions), doubts
    )


def check_type(given: str | None) -> None:
    """Raise ConfigError for an unknown type; short names are valid too."""
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
def errors_as_options() -> Iterator[None]:
    """Replace Python arguments in error messages by command-line options."""
    try:
        yield
    except PenstockError as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (as_options(error.args[0]), *error.args[1:])
        raise


def as_options(message: str) -> str:
    for argument, option in _AS_OPTIONS:
        message = re.sub(argument, option, message)
    return message


def _refuse_options(options: dict[str, Any], file: Path) -> None:
    for option, value in options.items():
        if value is not None:
            shown = option.removesuffix("_column").removeprefix("competition_")
            raise ConfigError(
                f"{file} exists, so --{shown} has no effect: correct the file, or pass --infer to infer it again and "
                "overwrite it"
            )


def _registered(registry: DatasetRegistry, name: str, *, replace: bool) -> Competition | None:
    """The competition of that name, if any; a damaged entry may be replaced."""
    try:
        return registry.get(name) if name in registry else None
    except DataError:
        if replace:
            return None
        raise


def _is_same_data(competition: Competition, spec: DatasetSpec) -> bool:
    place = spec.dataset_path.absolute() if isinstance(spec.dataset_path, Path) else spec.dataset_path
    return str(competition.spec.dataset_path) == str(place)


def _with_metric(inferred: Inference, reader: type[KaggleDataset]) -> Inference:
    """The inference with the metric of the class that reads the data, if it has one."""
    from penstock.datasets.metrics import get_metric

    if reader.metric is None:
        return inferred
    metadata = dataclasses.replace(inferred.metadata, evaluation_metric=get_metric(reader.metric).name)
    notes = inferred.notes | {"evaluation_metric": f"{reader.__name__}, which reads the data, has this metric"}
    return inferred._replace(metadata=metadata, notes=notes)


def _refuse_another_metric(metadata: CompetitionMetadata, reader: type[KaggleDataset], where: str) -> None:
    """Raise if the metric is not that of the class that reads the data."""
    from penstock.datasets.metrics import get_metric

    if reader.metric is not None and get_metric(reader.metric).name != metadata.metric.name:
        stated = get_metric(reader.metric).name
        raise ConfigError(
            f"{where} is {metadata.evaluation_metric}, but {reader.__name__}, which reads "
            f"{metadata.competition_name!r}, has the metric {stated}; use {stated}, or register under another name "
            "(--name)"
        )


@contextlib.contextmanager
def _restored(file: Path) -> Iterator[None]:
    """Restore the file if the block fails."""
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
        raise ConfigError(f"{str(place)!r} is a URL, where no {SPEC_FILE} can be written; pass --spec FILE")
    return place / SPEC_FILE


def _refuse_missing(place: Path | RemotePath) -> None:
    if isinstance(place, Path) and not place.exists():
        raise FileNotFoundError(f"no such directory: {str(place)!r} (looked from {Path.cwd()})")
