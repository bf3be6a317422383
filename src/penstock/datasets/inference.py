"""Inference of a competition from its files: target, id, type, metric, columns; each guess with its reason.

metadata, spec, notes = infer("data/titanic")
notes["target_column"]    # 'the only column of train.csv that is not in test.csv'
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock._amounts import counted
from penstock._suggest import did_you_mean
from penstock.datasets.base import ColumnSpec, CompetitionType, DataFiles, DatasetSpec
from penstock.datasets.column_types import first_code
from penstock.datasets.dates import dates_of_files, later_by
from penstock.datasets.guesses import (
    Facts,
    facts_of,
    guess_kind,
    guess_metric,
    is_called_id,
    type_of_many,
    type_of_one,
)
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.tables import find_file, listed, read_table
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.listing import PathLike
from penstock.files.remote import RemotePath, path_of, shown

log = logging.getLogger(__name__)

_TARGET_NAMES = ("target", "label", "labels", "y", "class", "outcome", "response")

Notes = dict[str, str]


class Inference(NamedTuple):
    """Inferred metadata and spec. `notes` has the reason of each guess, by field or `columns.<name>`.

    Doubtful guesses, such as ambiguous dates, are also in `doubts.<name>`, and logged.
    """

    metadata: CompetitionMetadata
    spec: DatasetSpec
    notes: Notes


@dataclass(frozen=True)
class _Files:
    """Tables of a directory; test and sample are optional. Names of columns are listed once: there may be thousands."""

    directory: Path | RemotePath
    names: dict[str, str]
    train: pa.Table
    test: pa.Table | None
    sample: pa.Table | None

    @cached_property
    def columns(self) -> dict[str, int]:
        """Names and places of the columns of the training file."""
        return {name: at for at, name in enumerate(self.train.column_names)}

    @cached_property
    def test_columns(self) -> dict[str, int]:
        return {} if self.test is None else {name: at for at, name in enumerate(self.test.column_names)}

    def facts(self, name: str) -> Facts:
        return facts_of(self.train.column(self.columns[name]))

    def test_facts(self, name: str) -> Facts | None:
        if self.test is None or name not in self.test_columns:
            return None
        return facts_of(self.test.column(self.test_columns[name]))


def infer(
    directory: PathLike,
    *,
    name: str | None = None,
    target: str | Sequence[str] | None = None,
    id_column: str | None = None,
    competition_type: CompetitionType | str | None = None,
    metric: str | None = None,
    delimiter: str | None = None,
    encoding: str | None = None,
) -> Inference:
    """Read the files of a local or remote directory, and guess what is not given.

    Reads the training file, the test file and the sample submission whole. If there is no possible target, or there are
    several, the error names the argument to pass.
    """
    notes: Notes = {}
    files = _read(path_of(directory), delimiter, encoding, notes)
    targets = _targets(files, target, notes)
    id_column = _id_column(files, targets, id_column, notes)
    _check_test_columns(files, targets)
    files, formats = _with_dates(files, targets, notes)
    time_column = _time_column(files, targets, notes)
    kind = _type(files, targets, competition_type, time_column, notes)
    taken = {*targets, id_column}
    columns = _columns(files, taken, formats, notes)
    if id_column is not None and id_column == time_column and id_column in formats:
        columns[id_column] = ColumnSpec(kind="id", date_format=formats[id_column])
    metadata = CompetitionMetadata(
        competition_name=name or _name(files.directory, notes),
        competition_type=kind,
        evaluation_metric=metric or _metric(files, targets, kind, notes),
        train_file=files.names["train"],
        test_file=files.names.get("test", "test.csv"),
        sample_submission_file=files.names.get("sample_submission", "sample_submission.csv"),
    )
    spec = DatasetSpec(
        metadata.competition_name,
        files.directory if isinstance(files.directory, Path) else str(files.directory),  # type: ignore[arg-type]
        kind,
        num_samples=files.train.num_rows,
        num_features=len([column for column in files.columns if column not in taken]),
        target_column=targets[0] if len(targets) == 1 else tuple(targets),
        id_column=id_column,
        columns=columns,
        group_column=_group_column(files, taken, notes),
        time_column=time_column,
        files=DataFiles(files.names, delimiter=delimiter, encoding=encoding),
    )
    return Inference(metadata, spec, notes)


# -- files -----------------------------------------------------------------------------------------------------------


def _read(directory: Path | RemotePath, delimiter: str | None, encoding: str | None, notes: Notes) -> _Files:
    paths = _find(directory)
    tables: dict[str, pa.Table | None] = dict.fromkeys(("train", "test", "sample_submission"))
    for split, path in paths.items():
        table = read_table(path, delimiter=delimiter, encoding=encoding)
        if split == "train" and not table.num_rows:
            raise DataError("the training file has a header and no rows", file=str(path))
        tables[split] = table
        notes[f"files.{split}"] = f"{counted(table.num_rows, 'row')}, {counted(table.num_columns, 'column')}"
    names = {split: path.name for split, path in paths.items()}
    return _Files(directory, names, tables["train"], tables["test"], tables["sample_submission"])


def _find(directory: Path | RemotePath) -> dict[str, Any]:
    wanted = "a training file: train.csv, training.tsv, train.parquet or similar, compressed or not, in any case"
    place = shown(str(directory))
    if not directory.exists():
        raise FileNotFoundError(f"no such directory: {place!r}; expected one with {wanted}")
    if not directory.is_dir():
        raise ConfigError(f"{place!r} is a file; expected the directory of a competition, with {wanted}")
    found = {split: find_file(directory, split) for split in ("train", "test", "sample_submission")}
    if found["train"] is None:
        unlisted = isinstance(directory, RemotePath) and not directory.can_be_listed
        why = " (a web server lists no directories; the usual names in lower case were tried)" * unlisted
        raise ConfigError(f"{place!r} is not a dataset: expected {wanted}; it has {listed(directory)}{why}")
    if found["sample_submission"] is None:
        pattern = re.compile(r"(?i)submission.*\.(csv|tsv|parquet)")
        submissions = [path for path in directory.iterdir() if pattern.search(path.name)]
        found["sample_submission"] = submissions[0] if len(submissions) == 1 else None
    return {split: path for split, path in found.items() if path is not None}


def _name(directory: Path | RemotePath, notes: Notes) -> str:
    own = directory.absolute().name if isinstance(directory, Path) else directory.name
    notes["competition_name"] = "the name of the directory"
    return re.sub(r"[\s_]+", "-", own.strip()).lower() or "competition"


# -- columns with a role ---------------------------------------------------------------------------------------------


def _targets(files: _Files, given: str | Sequence[str] | None, notes: Notes) -> list[str]:
    train, names = files.columns, files.names
    if given is not None:
        chosen = [given] if isinstance(given, str) else list(given)
        for name in chosen:
            if name not in train:
                hint = did_you_mean(name, train)
                raise SchemaError(f"the target {name!r} is not in {names['train']}, which has {list(train)}{hint}")
        notes["target_column"] = "given"
        return chosen
    missing = [name for name in train if files.test is not None and name not in files.test_columns]
    if files.sample is not None:
        wanted = [name for name in files.sample.column_names[1:] if name in train]
        wanted = [name for name in wanted if name in missing] or wanted
        if wanted:
            also = f" and not in {names['test']}" if set(wanted) <= set(missing) else ""
            notes["target_column"] = f"a column of {names['sample_submission']} in the training file{also}"
            return wanted
    if len(missing) == 1:
        notes["target_column"] = f"the only column of {names['train']} that is not in {names['test']}"
        return missing
    named = [name for name in missing or train if name.lower() in _TARGET_NAMES]
    if len(named) == 1:
        others = [name for name in missing if name not in named]
        notes["target_column"] = "by its name" + (f"; {others} are not in the test file either" if missing else "")
        return named
    remedy = "name it with --target (target= in Python), several times for several targets"
    if named or missing:
        why = f"are in {names['train']} and not in {names['test']}" if missing else "have the name of one"
        raise ConfigError(f"{len(named or missing)} columns may be the target: {named or missing} {why}; {remedy}")
    if files.test is None:
        why = f"there is no test file to compare with, and no column is called {' or '.join(_TARGET_NAMES[:3])}"
    else:
        why = f"{names['test']} has every column of {names['train']}"
    raise ConfigError(f"the target is unknown: {why}; the columns are {list(train)}; {remedy}")


def _id_column(files: _Files, targets: list[str], given: str | None, notes: Notes) -> str | None:
    train = files.columns
    only_test = [name for name in files.test_columns if name not in train]
    if given is not None:
        if given not in train and given not in only_test:
            raise SchemaError(f"the id {given!r} is not in {files.names['train']}, which has {list(train)}")
        notes["id_column"] = "given"
        return given
    first = files.sample.column_names[0] if files.sample is not None else None
    candidates = [name for name in train if name == first or is_called_id(name)]
    for name in sorted(candidates, key=lambda name: name != first):
        if name not in targets and files.facts(name).is_unique:
            also = f", and the first column of {files.names['sample_submission']}" if name == first else ""
            notes["id_column"] = f"unique in {files.train.num_rows:,} rows{also}"
            return name
    for name in only_test:
        facts = files.test_facts(name)
        if (name == first or (first is None and is_called_id(name))) and facts is not None and facts.is_unique:
            notes["id_column"] = (
                f"unique in {files.names['test']}; {files.names['train']} has no ids, so its rows are numbered"
            )
            return name
    again = f"; {candidates} have duplicates" if candidates else ""
    notes["id_column"] = f"no unique column has the name of an id{again}"
    return None


def _group_column(files: _Files, taken: set[str | None], notes: Notes) -> str | None:
    """Id of something with several rows, of which the test file has others."""
    for name in files.columns:
        facts, test = files.facts(name), files.test_facts(name)
        if name in taken or not is_called_id(name) or test is None or not 1 < facts.distinct < facts.rows:
            continue
        if facts.missing or not len(test.values):
            continue
        if not pc.any(pc.is_in(test.values.cast(pa.string()), facts.values.cast(pa.string()))).as_py():
            notes["group_column"] = (
                f"{facts.distinct:,} different values in {facts.rows:,} rows, none of them in the test file: a group "
                "must not be in training and validation both"
            )
            return name
    return None


def _with_dates(files: _Files, targets: list[str], notes: Notes) -> tuple[_Files, dict[str, str]]:
    """Files with their dates converted, and the format of each column of dates; doubtful ones are noted."""
    found = dates_of_files(files.train, files.test, [name for name in files.columns if name not in targets])
    for name, doubt in found.doubts.items():
        remedy = "set {kind: date, date_format: '%d/%m/%Y'}, or leave it"
        _doubt(notes, name, f"it looks like dates and stays text: {doubt}; {remedy}")
    return dataclasses.replace(files, train=found.train, test=found.test), found.formats


def _doubt(notes: Notes, name: str, why: str) -> None:
    notes[f"doubts.{name}"] = why
    log.warning("column %r: %s", name, why)


def _time_column(files: _Files, targets: list[str], notes: Notes) -> str | None:
    """Time column by which the test file begins after the training file."""
    for name in files.columns:
        facts, test = files.facts(name), files.test_facts(name)
        if name in targets or not len(facts.values):
            continue
        if files.test is None:
            ordered = facts.is_date and facts.values.equals(facts.values.take(pc.sort_indices(facts.values)))
            if ordered and not facts.missing and facts.distinct > 1:
                notes["time_column"] = "the rows are sorted by it"
                return name
        elif test is not None and (later := later_by(name, facts, test)):
            if not facts.missing:
                notes["time_column"] = later
                return name
            rows = counted(facts.missing, "row")
            _doubt(
                notes,
                name,
                f"{later}, but {rows} of the training file have none, so folds ignore it; fill it and set time_column",
            )
    return None


def _columns(files: _Files, taken: set[str | None], formats: Mapping[str, str], notes: Notes) -> dict[str, ColumnSpec]:
    columns = {}
    train_file, test_file = files.names["train"], files.names.get("test", "")
    for name in files.columns:
        if name in taken:
            continue
        facts, test = files.facts(name), files.test_facts(name)
        kind, why = guess_kind(facts, test)
        if facts.is_number and test is not None and (row := first_code(test.values)) is not None:
            kind, why = "text", f"{train_file} has numbers, but {test_file} has codes: {test.values[row].as_py()!r}"
        if files.test is not None and test is None:
            kind, why = "ignore", f"it is not in {test_file}"
        written = formats.get(name, "") if kind == "date" else ""
        columns[name] = ColumnSpec(kind=kind, date_format=written)
        why += f"; all values have the form {written}" if written else ""
        doubt = notes.get(f"doubts.{name}")
        notes[f"columns.{name}"] = f"{why}; {doubt}" if doubt else why
    for name in files.test_columns:
        if name not in files.columns and name not in taken:
            columns[name] = ColumnSpec(kind="ignore")
            _doubt(notes, name, f"it is ignored, since {test_file} has it and {train_file} does not")
            notes[f"columns.{name}"] = f"it is not in {train_file}"
    return columns


def _check_test_columns(files: _Files, targets: list[str]) -> None:
    """Raise if a column seems to have one name in the training file and another one in the test file."""
    if files.test is None:
        return
    test = files.test_columns
    only_train = {_spelling(name): name for name in files.columns if name not in test and name not in targets}
    for name in test:
        same = only_train.get(_spelling(name))
        if name not in files.columns and same is not None:
            raise SchemaError(
                f"{files.names['test']} has a column {name!r} and {files.names['train']} a column {same!r}; give the "
                "column the same name in both files"
            )


def _spelling(name: str) -> str:
    return re.sub(r"[\W_]+", "", name).casefold()


# -- task ------------------------------------------------------------------------------------------------------------


def _type(
    files: _Files, targets: list[str], given: CompetitionType | str | None, time_column: str | None, notes: Notes
) -> CompetitionType:
    if given is not None:
        notes["competition_type"] = "given"
        return CompetitionType(given)
    facts = [files.facts(name) for name in targets]
    for name, found in zip(targets, facts):
        if not len(found.values):
            raise DataError(f"the target {name!r} has no value in any row", file=files.names["train"])
    kind, why = type_of_many(targets, facts) if len(targets) > 1 else type_of_one(targets[0], facts[0])
    if time_column is not None and kind is CompetitionType.REGRESSION:
        kind, why = CompetitionType.TIME_SERIES, f"{why}; predictions are for times after {time_column!r} ends"
    notes["competition_type"] = why
    return kind


def _metric(files: _Files, targets: list[str], kind: CompetitionType, notes: Notes) -> str:
    facts = {name: files.facts(name) for name in targets}
    metric, why = guess_metric(kind, facts, sample=files.sample, file=files.names.get("sample_submission", ""))
    notes["evaluation_metric"] = f"{why}; see the competition's page"
    return metric
