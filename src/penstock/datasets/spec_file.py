"""`competition.yaml`: inferred metadata and spec of a competition, for a person to correct.

The file is in the directory of the data, unless it has a `dataset_path`. Each guess has its reason as a comment; every
key is validated on reading, and `check_files` validates the data against it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from penstock._suggest import check_options
from penstock.datasets.base import ColumnSpec, CompetitionType, DatasetSpec, KaggleDataset
from penstock.datasets.inference import Inference
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.registry_entries import refuse_password
from penstock.datasets.spec import SPLITS
from penstock.datasets.tables import find_file, read_names, read_table, split_file
from penstock.datasets.tabular import TabularDataset
from penstock.errors import ConfigError, DataError, PenstockError, SchemaError
from penstock.files.atomic import write_atomic
from penstock.files.documents import read_document
from penstock.files.filesystems import require_local
from penstock.files.listing import PathLike
from penstock.files.remote import is_remote

SPEC_FILE = "competition.yaml"

_HEADER = """\
# Inferred by penstock. Correct what is wrong and run `penstock competitions add` again: this file is then read,
# validated against the data and registered; it is not overwritten unless you pass --infer.
"""
_FILE_FIELDS = {"train": "train_file", "test": "test_file", "sample_submission": "sample_submission_file"}
_SHARED = ("competition_name", "competition_type")
_IN_METADATA = ("evaluation_metric", "description", "url", "license", "tags", "deadline")
_FIELDS = (field.name for field in dataclasses.fields(DatasetSpec) if field.name not in _SHARED)
_IN_SPEC = (*_FIELDS, "delimiter", "encoding")
_KEYS = (*_SHARED, *_IN_METADATA, *_IN_SPEC)
_TEXTS = (*_SHARED, "evaluation_metric", "description", "url", "license", "deadline", "dataset_path")
_COLUMN_TEXTS = ("name", "description", "unit", "prefix", "missing")
_IN_YAML = (
    (r"(?:give|pass) (\w+)=None", r"leave \1 empty"),
    (r"must be a count or None", "must be a count, or empty"),
    (r"columns=\{('[^']+'): '(\w+)'\}", r"\1: {kind: \2} below columns"),
    (r"columns=\{(.+?): ColumnSpec\(kind='ignore'\)\} in the spec", r"\1: {kind: ignore} below columns"),
    (r"ColumnSpec\(kind='ignore'\)", "kind: ignore"),
    (
        r"columns=\{(.+?): ColumnSpec\(kind='date', date_format=('[^']+')\)\}, or kind='text'",
        r"\1: {kind: date, date_format: \2} below columns, or kind: text",
    ),
    (r"pass unseen='keep'", "make it kind: text"),
    (r"files=\{'(\w+)': \.\.\.\} in the spec", r"\1: ... below files"),
    (r"pass the right (delimiter|encoding)=", r"give the right \1"),
    (r"pass (delimiter|encoding)='([^']*)'", r"give it as \1: \2"),
)
"""Advice in the errors of datasets, in the form of the file instead of Python."""
_TYPES = "# one of " + ", ".join(kind.value for kind in CompetitionType)
_KINDS = "# numeric, categorical, text, boolean, date, id, or ignore, which omits the column"


def write_spec(inference: Inference, path: PathLike, *, overwrite: bool = False) -> Path:
    """Write the file; an existing one, which may have corrections, only with `overwrite`."""
    file = require_local(path, "the file of a competition")
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} exists and may have corrections; pass overwrite=True to replace it")
    write_atomic(file, spec_text(inference, file).encode())
    return file


def spec_text(inference: Inference, file: Path) -> str:
    """Content of the file: YAML with the reasons as comments."""
    metadata, spec, notes = inference
    lines = [_HEADER.rstrip("\n"), ""]

    def add(key: str, value: Any, *, note: str | None = None, indent: str = "") -> None:
        why = notes.get(key) if note is None else note
        text = f"{indent}{_scalar(key.rpartition('.')[2])}: {_scalar(value)}"
        lines.append(f"{text.rstrip()}  # {_one_line(why)}" if why else text.rstrip())

    add("competition_name", metadata.competition_name)
    lines.append(_TYPES)
    add("competition_type", metadata.competition_type.value)
    add("evaluation_metric", metadata.evaluation_metric)
    add("description", metadata.description)
    add("tags", list(metadata.tags))
    lines.append("")
    if _is_elsewhere(spec, file):
        refuse_password(spec.dataset_path, f"{file.name}")
        place = spec.dataset_path
        add("dataset_path", str(place.absolute() if isinstance(place, Path) else place))
    lines.append("files:")
    for split, name in spec.files.items():
        lines.append(f"  {split}: {_scalar(name)}  # {_one_line(notes.get(f'files.{split}', ''))}".rstrip(" #"))
    add("delimiter", spec.files.delimiter, note="" if spec.files.delimiter else "empty: detected")
    default = "empty: UTF-8, or that of the byte order mark"
    add("encoding", spec.files.encoding, note="" if spec.files.encoding else default)
    add("num_samples", spec.num_samples, note="rows of the training file")
    add("num_features", spec.num_features, note="columns without id and target")
    lines.append("")
    add("target_column", list(spec.targets) if len(spec.targets) > 1 else spec.target_column)
    add("id_column", spec.id_column)
    add(
        "group_column",
        spec.group_column,
        note=notes.get("group_column", "a group stays in one fold"),
    )
    add("time_column", spec.time_column, note=notes.get("time_column", "validation is later than training"))
    lines += ["", _KINDS, "columns:"]
    for name, column in spec.columns.items():
        why = notes.get(f"columns.{name}", "")
        lines.append(f"  {_scalar(name)}: {_scalar(column.to_dict())}  # {_one_line(why)}".rstrip(" #"))
    if not spec.columns:
        lines[-1] += " {}"
    return "\n".join(lines) + "\n"


def read_spec(path: PathLike) -> tuple[CompetitionMetadata, DatasetSpec]:
    """Metadata and spec of a file; every key is validated, and no data is read."""
    file = require_local(path, "the file of a competition")
    tree = read_document(file, such_as="competition_name: titanic")
    check_options(tree, _KEYS, "key", where=str(file))
    # An empty value counts as not given.
    given = {key: value for key, value in tree.items() if value is not None}
    for key in _SHARED:
        if key not in given:
            raise ConfigError(f"{file}: {key!r} is missing; add a line such as '{key}: {_SUCH_AS[key]}'")
    for key in ("files", "columns"):
        _check_mapping(given.get(key, {}), key, file)
    _check_texts(given, file)
    if "columns" in given:
        given["columns"] = {name: _column(name, value, file) for name, value in given["columns"].items()}
    files = {split: name for split, name in given.get("files", {}).items() if name is not None}
    shared = {key: given[key] for key in _SHARED}
    place = given.get("dataset_path", "")
    if not is_remote(str(place)):  # a relative one is relative to the file
        given["dataset_path"] = str(file.absolute().parent / Path(str(place)).expanduser())
    try:
        metadata = CompetitionMetadata.from_dict(
            shared
            | {key: given[key] for key in _IN_METADATA if key in given}
            | {field: files[split] for split, field in _FILE_FIELDS.items() if split in files}
        )
        spec = DatasetSpec.from_dict(shared | {key: given[key] for key in _IN_SPEC if key in given} | {"files": files})
    except (PenstockError, TypeError) as error:
        raise ConfigError(f"{file}: {_as_in_yaml(str(error))}") from error
    return metadata, spec


def check_files(
    metadata: CompetitionMetadata, spec: DatasetSpec, dataset_class: type[KaggleDataset] = TabularDataset
) -> dict[str, int]:
    """Number of rows of each file; raises for the first difference between files and spec.

    It loads the dataset of each split once, and so reads the files whole.
    """
    rows = {}
    with _naming_yaml(spec):
        if not spec.targets:
            path = split_file(spec, "train")
            names = read_names(path, **spec.csv_options)
            raise ConfigError(f"target_column is missing; {path.name} has {names}: name the one to predict")
        for split in SPLITS:
            if split == "train" or split in spec.files or find_file(spec.dataset_path, split) is not None:
                rows[split] = len(_made(dataset_class, spec, split))
        if "sample_submission" in spec.files:
            rows["sample_submission"] = _check_sample(spec)
    return rows


_SUCH_AS = {"competition_name": "titanic", "competition_type": "binary_classification"}


def _made(dataset_class: type[KaggleDataset], spec: DatasetSpec, split: str) -> KaggleDataset:
    try:
        dataset = dataset_class(spec, split)
        if isinstance(dataset, TabularDataset) and split != "test":
            dataset.labels()
    except (PenstockError, OSError):
        raise
    except Exception as error:  # a user's class may raise anything
        raise DataError(
            f"{dataset_class.__name__} cannot read the {split} file: {type(error).__name__}: {error}"
        ) from error
    return dataset


def _check_sample(spec: DatasetSpec) -> int:
    path = split_file(spec, "sample_submission")
    table = read_table(path, **spec.csv_options)
    if spec.id_column is not None and spec.id_column not in table.column_names:
        raise SchemaError(
            f"id_column={spec.id_column!r} is not in {path.name}, which has {table.column_names}; correct the one that "
            "is wrong"
        )
    return int(table.num_rows)


@contextlib.contextmanager
def _naming_yaml(spec: DatasetSpec) -> Iterator[None]:
    """Rewrite the advice in errors of datasets for the file."""
    try:
        yield
    except (PenstockError, OSError) as error:
        if len(error.args) == 1 and isinstance(error.args[0], str):
            words = [value for one in spec.columns.values() for value in one.categories]
            hint = "; YAML reads no and yes as false and true: write 'no' and 'yes' if they are text in the data"
            error.args = (_as_in_yaml(error.args[0]) + hint * any(isinstance(word, bool) for word in words),)
        raise


def _as_in_yaml(message: str) -> str:
    for pattern, words in _IN_YAML:
        message = re.sub(pattern, words, message)
    return message


def _check_texts(given: dict[str, Any], file: Path) -> None:
    if isinstance(given.get("deadline"), datetime.date):
        given["deadline"] = given["deadline"].isoformat()
    for key in _TEXTS:
        _refuse_no_text(given.get(key), key, file)
    tags = given.get("tags", [])
    for tag in tags if isinstance(tags, list) else [tags]:
        _refuse_no_text(tag, "tags", file)


def _refuse_no_text(value: Any, key: str, file: Path) -> None:
    if value is not None and not isinstance(value, str):
        raise ConfigError(
            f"{file}: {key} is {value!r:.60}, expected text; if it is text, write it in quotes: '{value}'"
        )


def _column(name: str, given: Any, file: Path) -> ColumnSpec:
    rules = {"kind": given} if isinstance(given, str) else {} if given is None else given
    try:
        column = ColumnSpec.from_dict(rules)
    except (PenstockError, TypeError) as error:
        raise ConfigError(f"{file}: columns: {name}: {error}") from error
    for key in _COLUMN_TEXTS:
        _refuse_no_text(getattr(column, key), f"columns: {name}: {key}", file)
    if column.decimals is not None and (isinstance(column.decimals, bool) or not isinstance(column.decimals, int)):
        raise ConfigError(f"{file}: columns: {name}: decimals is {column.decimals!r}, expected a number such as 2")
    return column


def _check_mapping(value: Any, key: str, file: Path) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: {key} is {value!r:.60}; expected one line for each, indented below '{key}:'")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{file}: {key} has {name!r}, which is not text in YAML; write it in quotes: '{name}'")


def _is_elsewhere(spec: DatasetSpec, file: Path) -> bool:
    place = spec.dataset_path
    return not isinstance(place, Path) or place.absolute() != file.absolute().parent


def _scalar(value: Any) -> str:
    """Value as YAML on one line; empty for None."""
    options: dict[str, Any] = {"default_flow_style": True, "allow_unicode": True, "sort_keys": False, "width": 1 << 30}
    text = "" if value is None else yaml.safe_dump(value, **options)
    if not text.removesuffix("...\n").strip("\n").isprintable():
        text = yaml.safe_dump(value, **options | {"default_style": '"', "allow_unicode": False})
    return text.removesuffix("...\n").strip("\n")


def _one_line(text: str | None) -> str:
    return "".join(mark if mark.isprintable() else " " for mark in text or "")
