"""`competition.yaml`: what was guessed about a competition, for a person to correct, and read back.

The file lies beside the data, and the data is where the file is, unless it says `dataset_path`. Written with the reason
of each guess as a comment; read with every key checked; checked against the files by `check_files`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from penstock._dtypes import did_you_mean
from penstock.datasets._checking import check_data
from penstock.datasets.base import CompetitionType, DatasetSpec
from penstock.datasets.inference import Inference
from penstock.datasets.metadata import CompetitionMetadata
from penstock.datasets.reading import read_table, split_file
from penstock.errors import ConfigError, DataError, PenstockError, SchemaError
from penstock.files.atomic import write_atomic
from penstock.files.documents import read_document
from penstock.files.listing import PathLike
from penstock.files.remote import is_remote

__all__ = ["SPEC_FILE", "check_files", "read_spec", "spec_text", "write_spec"]

SPEC_FILE = "competition.yaml"

_HEADER = """\
# What penstock found out about this data. Correct what is wrong and run `penstock competitions add` again: this file
# is then read, checked against the data and registered; it is not written over, unless you pass --infer.
"""
_FILE_FIELDS = {"train": "train_file", "test": "test_file", "sample_submission": "sample_submission_file"}
_SHARED = ("competition_name", "competition_type")
_IN_METADATA = ("evaluation_metric", "description", "url", "license", "tags", "deadline")
_IN_SPEC = tuple(field.name for field in dataclasses.fields(DatasetSpec) if field.name not in _SHARED)
_KEYS = (*_SHARED, *_IN_METADATA, *_IN_SPEC)
_TYPES = "# one of " + ", ".join(kind.value for kind in CompetitionType)
_KINDS = "# numeric, categorical, text, boolean, date, id, or ignore, which leaves the column out"


def write_spec(inference: Inference, path: PathLike, *, overwrite: bool = False) -> Path:
    """Write the file; one that is there, and may hold corrections, only with `overwrite`."""
    file = Path(path).expanduser()
    if file.exists() and not overwrite:
        raise ConfigError(f"{file} is there already and may hold corrections; it is kept unless you say otherwise")
    write_atomic(file, spec_text(inference, file).encode())
    return file


def spec_text(inference: Inference, file: Path) -> str:
    """The content of the file: YAML with the reasons as comments."""
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
        add("dataset_path", str(spec.dataset_path))
    lines.append("files:")
    for split, name in spec.files.items():
        lines.append(f"  {split}: {_scalar(name)}  # {_one_line(notes.get(f'files.{split}', ''))}".rstrip(" #"))
    add("delimiter", spec.delimiter, note="" if spec.delimiter else "empty: found by looking")
    add("encoding", spec.encoding, note="" if spec.encoding else "empty: UTF-8, or what the byte order mark says")
    add("num_samples", spec.num_samples, note="rows of the training file")
    add("num_features", spec.num_features, note="its columns without id and target")
    lines.append("")
    add("target_column", list(spec.targets) if len(spec.targets) > 1 else spec.target_column)
    add("id_column", spec.id_column)
    add("group_column", spec.group_column, note=notes.get("group_column", "rows of one value stay in one fold"))
    add("time_column", spec.time_column, note=notes.get("time_column", "validation is later than training"))
    lines += ["", _KINDS, "columns:"]
    for name, column in spec.columns.items():
        why = notes.get(f"columns.{name}", "")
        lines.append(f"  {_scalar(name)}: {_scalar(column.to_dict())}  # {_one_line(why)}".rstrip(" #"))
    if not spec.columns:
        lines[-1] += " {}"
    return "\n".join(lines) + "\n"


def read_spec(path: PathLike) -> tuple[CompetitionMetadata, DatasetSpec]:
    """What a file says; every key checked, nothing of the data read."""
    file = Path(path).expanduser()
    tree = read_document(file, such_as="competition_name: titanic")
    for key in tree:
        if key not in _KEYS:
            raise ConfigError(
                f"{file}: unknown key {key!r}{did_you_mean(str(key), _KEYS) or f'; known: {list(_KEYS)}'}"
            )
    # An empty value is one that was not given.
    given = {key: value for key, value in tree.items() if value is not None}
    for key in _SHARED:
        if key not in given:
            raise ConfigError(f"{file}: {key!r} is missing; add a line such as '{key}: {_SUCH_AS[key]}'")
    for key in ("files", "columns"):
        _check_mapping(given.get(key, {}), key, file)
    files = {split: name for split, name in given.get("files", {}).items() if name is not None}
    shared = {key: given[key] for key in _SHARED}
    place = given.get("dataset_path", "")
    if not is_remote(str(place)):  # a relative one starts at the file, from wherever it is read
        given["dataset_path"] = str(file.absolute().parent / Path(str(place)).expanduser())
    try:
        metadata = CompetitionMetadata.from_dict(
            shared
            | {key: given[key] for key in _IN_METADATA if key in given}
            | {field: files[split] for split, field in _FILE_FIELDS.items() if split in files}
        )
        spec = DatasetSpec.from_dict(shared | {key: given[key] for key in _IN_SPEC if key in given} | {"files": files})
    except (PenstockError, TypeError) as error:
        raise ConfigError(f"{file}: {error}") from error
    return metadata, spec


def check_files(metadata: CompetitionMetadata, spec: DatasetSpec) -> dict[str, int]:
    """Whether the files are what the spec says; raises for the first thing that is not. Rows of each file.

    Reads the training file, the test file and the sample submission whole.
    """
    kinds = {name: column.kind for name, column in spec.columns.items()}
    rows = {}
    for split in ("train", "val", "test", "sample_submission"):
        if split not in spec.files and split != "train":
            continue
        path = split_file(spec, split)
        plain = {} if split == "sample_submission" else kinds
        table = read_table(path, delimiter=spec.delimiter, encoding=spec.encoding, kinds=plain)
        rows[split] = table.num_rows
        if split == "sample_submission":
            if spec.id_column is not None and spec.id_column not in table.column_names:
                raise SchemaError(
                    f"id_column={spec.id_column!r} is not in {path.name}, which has {table.column_names}; correct "
                    "the one that is wrong"
                )
            continue
        if not spec.targets:
            names = table.column_names
            raise ConfigError(f"target_column is missing; {path.name} has {names}: say which is to be predicted")
        check_data(table, spec, split)
        if split == "train":
            _check_targets(table, spec, path.name)
    return rows


_SUCH_AS = {"competition_name": "titanic", "competition_type": "binary_classification"}


def _check_targets(table: Any, spec: DatasetSpec, file: str) -> None:
    """Whether the target can be what the type says."""
    kind = spec.competition_type
    for name in spec.targets:
        column = table.column(name)
        distinct = pc.count_distinct(column).as_py()
        number = (
            pa.types.is_integer(column.type) or pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
        )
        if kind is CompetitionType.BINARY_CLASSIFICATION and distinct != 2:
            raise DataError(
                f"the target {name!r} has {distinct:,} different values, and {kind.value} has two; correct "
                "target_column or competition_type",
                file=file,
            )
        if not (kind.has_classes or kind.is_classification) and not number:
            raise DataError(
                f"the target {name!r} is {column.type}, and {kind.value} needs numbers; correct target_column or "
                "competition_type",
                file=file,
            )
        if spec.class_names is not None and kind.has_classes:
            unknown = [value for value in pc.unique(column).to_pylist() if value not in spec.class_names]
            if unknown:
                raise DataError(
                    f"the target {name!r} has {unknown[0]!r}, which is not among class_names {list(spec.class_names)}",
                    file=file,
                )


def _check_mapping(value: Any, key: str, file: Path) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{file}: {key} is {value!r:.60}; expected a line for each, indented below '{key}:'")
    for name in value:
        if not isinstance(name, str):
            raise ConfigError(f"{file}: {key} has {name!r}, which YAML takes for no text; write it in quotes: '{name}'")


def _is_elsewhere(spec: DatasetSpec, file: Path) -> bool:
    place = spec.dataset_path
    return not isinstance(place, Path) or place.absolute() != file.absolute().parent


def _scalar(value: Any) -> str:
    """A value as YAML on one line; nothing for None."""
    if value is None:
        return ""
    text = _dumped(value)
    return text if text.isprintable() else _dumped(value, default_style='"', allow_unicode=False)


def _dumped(value: Any, **options: Any) -> str:
    choices: dict[str, Any] = {
        "default_flow_style": True,
        "allow_unicode": True,
        "sort_keys": False,
        "width": 1 << 30,
    } | options
    return str(yaml.safe_dump(value, **choices)).removesuffix("...\n").strip()


def _one_line(text: str | None) -> str:
    return "".join(mark if mark.isprintable() else " " for mark in text or "")
