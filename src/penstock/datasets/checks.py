"""Whether rows are what their spec says: counts, target, ids, columns without a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock._suggest import did_you_mean
from penstock.arrays.text import is_text
from penstock.datasets.frames import column_names, column_of
from penstock.datasets.guesses import is_called_id
from penstock.datasets.spec import DatasetSpec
from penstock.errors import DataError, SchemaError

__all__ = [
    "check_data",
    "check_ids",
    "check_same_columns",
    "check_unseen",
    "feature_names",
    "id_column_of",
    "possible_id",
    "refuse_missing_target",
    "seen_values",
    "shared_ids",
]


_NO_IDS = ("numeric", "categorical", "boolean", "date")


def check_data(data: Any, spec: DatasetSpec, split: str) -> None:
    """Raise for the first way in which the rows of a file are not what the spec says.

    Rows that are no table (a list of arrays, say) are counted, and else left to the dataset's own check.
    """
    names = column_names(data)
    if split == "train" and spec.num_samples is not None and len(data) != spec.num_samples:
        raise SchemaError(
            f"the spec of {spec.competition_name!r} says num_samples={spec.num_samples}, and the training file has "
            f"{len(data)} rows; correct the one that is wrong, or give num_samples=None"
        )
    if not names:
        return
    _check_names(names, spec, split)
    for target in spec.targets if split != "test" else ():
        values = column_of(data, target)
        _check_target(values, target, split)
        _check_classes(values, target, spec)
    if spec.id_column is not None:
        check_ids(column_of(data, spec.id_column), spec.id_column, split)
    if split == "train":
        if len(data):
            _check_values(data, names, spec)
        _check_features(data, names, spec)


def refuse_missing_target(names: Sequence[str], spec: DatasetSpec, split: str) -> None:
    """Raise if a target is not among the columns of a file that must have it."""
    for target in spec.targets:
        if target not in names:
            raise SchemaError(
                f"the target column {target!r} is not in the {split} file, which has {list(names)}; give the right "
                f"target_column{did_you_mean(target, names)}"
            )


def id_column_of(data: Any, spec: DatasetSpec) -> str | None:
    """The column of ids: the spec's, or the first of the training file if it is called one and has no value twice.

    `data` must be the whole training file: a fold of it, or another file, may have no value twice by chance.
    """
    name = possible_id(column_names(data), spec)
    if name is None or spec.id_column is not None:
        return spec.id_column
    values = column_of(data, name)
    unique = not _missing(values).any() and pc.count_distinct(values).as_py() == len(values)
    return name if unique else None


def possible_id(names: Sequence[str], spec: DatasetSpec) -> str | None:
    """The column that can be the id: the spec's, or the first if it is called one and not said to be something else."""
    if spec.id_column is not None or not names:
        return spec.id_column if spec.id_column in names else None
    said = spec.columns.get(names[0])
    other = names[0] in spec.targets or (said is not None and said.kind in _NO_IDS)
    return names[0] if is_called_id(names[0]) and not other else None


def feature_names(names: Sequence[str], spec: DatasetSpec, id_column: str | None) -> list[str]:
    """The columns without id and target, also without those the spec says to ignore."""
    out = {id_column, *spec.targets, *spec.ignored}
    return [name for name in names if name not in out]


def check_ids(values: pa.Array, name: str, split: str) -> None:
    """Raise for the first row without an id, or with one that another row has."""
    missing = _missing(values)
    if missing.any():
        row = int(missing.argmax())
        raise DataError(f"the id {name!r} is missing in row {row} of the {split} file; every row needs one", row=row)
    codes = np.asarray(values.dictionary_encode().indices)
    _, first = np.unique(codes, return_index=True)
    if len(first) == len(codes):
        return
    again = np.ones(len(codes), np.bool_)
    again[first] = False
    row = int(np.argmax(again))
    before = int(np.argmax(codes == codes[row]))
    raise DataError(
        f"the id {values[row].as_py()!r} in {name!r} is in row {before} and in row {row} of the {split} file, and "
        f"{int(again.sum())} ids in all are there again; ids must differ: leave the copies out, or give another "
        f"id_column; if {name!r} is no id, say in the spec what it is, such as columns={{{name!r}: 'categorical'}}",
        row=row,
    )


def shared_ids(ours: pa.Array, theirs: pa.Array) -> pa.Array:
    """The ids that two files have in common; 7 and "7" are the same."""
    ours, theirs = (ids.cast(pa.string()) for ids in (ours, theirs))
    return ours.filter(pc.is_in(ours, theirs))


def _missing(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Where there is no value; NaN, as Parquet files have it, is none."""
    return np.asarray(values.is_null(nan_is_null=True)).astype(np.bool_)


def _check_names(names: list[str], spec: DatasetSpec, split: str) -> None:
    needed = {"id_column": spec.id_column, "group_column": spec.group_column, "time_column": spec.time_column}
    if split != "test":
        refuse_missing_target(names, spec, split)
    for option, name in needed.items():
        if name is not None and name not in names and not (split == "test" and option != "id_column"):
            raise SchemaError(
                f"{option}={name!r} is not in the {split} file, which has {names}{did_you_mean(name, names)}"
            )
    for name in spec.columns:
        if split == "train" and name not in names and name not in spec.targets and name not in spec.ignored:
            raise SchemaError(
                f"the spec describes column {name!r}, which is not in the {split} file; it has {names}"
                f"{did_you_mean(name, names)}"
            )


def _check_target(values: pa.Array, name: str, split: str) -> None:
    missing = _missing(values)
    if missing.any():
        row = int(missing.argmax())
        raise DataError(
            f"the target {name!r} is missing in {int(missing.sum())} of the {len(values)} rows of the {split} file, "
            f"first in row {row}; leave these rows out, or fill them",
            row=row,
        )


def _check_classes(values: pa.Array, name: str, spec: DatasetSpec) -> None:
    truths = [given for given in spec.class_names or () if isinstance(given, bool)]
    if truths and len(values) and is_text(values.type):
        raise SchemaError(
            f"class_names has {truths[0]!r}, and the target {name!r} holds texts such as {values[0].as_py()!r}; YAML "
            "reads no, yes, off and on without quotes as false and true: write them in quotes"
        )


def _check_values(data: Any, names: list[str], spec: DatasetSpec) -> None:
    empty = [name for name in names if name not in spec.ignored and _is_empty(data, name)]
    if empty:
        raise DataError(
            f"column {empty[0]!r} has no value in any of the {len(data)} rows of the training file"
            + (f" (nor have {empty[1:]})" if len(empty) > 1 else "")
            + f"; leave it out with columns={{{empty[0]!r}: ColumnSpec(kind='ignore')}} in the spec, or mend the file"
        )


def _is_empty(data: Any, name: str) -> bool:
    if isinstance(data, pa.Table):
        column = data.column(name)
        if not pa.types.is_floating(column.type):
            return bool(column.null_count == len(data))
        return bool(pc.all(column.is_null(nan_is_null=True)).as_py())
    if hasattr(data, "iloc"):
        return bool(data[name].isna().all())
    return bool(_missing(column_of(data, name)).all())


def _check_features(data: Any, names: list[str], spec: DatasetSpec) -> None:
    if spec.num_features is None:
        return
    id_column = id_column_of(data, spec)
    features = [name for name in names if name != id_column and name not in spec.targets]
    if len(features) != spec.num_features:
        without = [f"the id {id_column!r}"] if id_column is not None else []
        without += [f"the target {target!r}" for target in spec.targets]
        raise SchemaError(
            f"the spec of {spec.competition_name!r} says num_features={spec.num_features}, and the training file has "
            f"{len(features)} columns{' without ' if without else ''}{' and '.join(without)}; correct the one that is "
            "wrong, or give num_features=None"
        )


def check_same_columns(names: Mapping[str, Sequence[str]], spec: DatasetSpec) -> None:
    """Raise unless a file and the training file have the same columns, target and ignored ones apart."""
    refuse_missing_target(names["train"], spec, "train")
    (first, ours), (second, theirs) = names.items()
    apart = {*spec.targets, *spec.ignored}
    only_first = [name for name in ours if name not in theirs and name not in apart]
    only_second = [name for name in theirs if name not in ours and name not in apart]
    if not spec.targets:  # nobody has said what the target is: it is one of those that only the training file has
        only_first, only_second = (only_first, []) if first == "test" else ([], only_second)
    if only_first or only_second:
        sides = [
            f"only the {file} file has {found}" for file, found in ((first, only_first), (second, only_second)) if found
        ]
        raise SchemaError(
            f"the files of {spec.competition_name!r} have different columns: {', and '.join(sides)}; give them the "
            "same columns, name the target in target_column, or mark columns with ColumnSpec(kind='ignore')"
        )


def seen_values(training: pa.Table | None, spec: DatasetSpec) -> dict[str, pa.Array]:
    """The values that each categorical column may have: those of the spec, or else those of the training file."""
    seen = {}
    for name, column in spec.columns.items():
        if column.kind != "categorical" or name in spec.targets:
            continue
        if column.categories:
            seen[name] = _as_texts(pa.array([_said(value) for value in column.categories], pa.string()))
        elif training is not None and name in training.column_names:
            seen[name] = _as_texts(training[name]).unique()
    return seen


def check_unseen(data: pa.Table, spec: DatasetSpec, seen: Mapping[str, pa.Array], split: str) -> None:
    """Raise for the first value of a categorical column that is not among those known."""
    for name, known in seen.items():
        if name not in data.column_names:
            continue
        texts = _as_texts(data[name])
        new = pc.and_(pc.is_valid(texts), pc.invert(pc.is_in(texts, known)))
        marks = np.asarray(new).astype(np.bool_)
        if marks.any():
            row = int(marks.argmax())
            where = "the spec's categories" if spec.columns[name].categories else "the training file"
            listed = [value for value in known.to_pylist() if value is not None]
            raise DataError(
                f"column {name!r} of the {split} file has {data[name][row].as_py()!r} in row {row}, a category that "
                f"{where} does not have, and {int(marks.sum())} such rows in all; known are {sorted(listed)[:20]}: "
                "add it to the categories in the spec, or pass unseen='keep'",
                row=row,
            )


def _as_texts(column: Any) -> pa.Array:
    """Values as texts, so that 1, 1.0 and "1" are one category, whatever type a file gave the column."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if is_text(array.type):
        return array.cast(pa.string())
    if pa.types.is_floating(array.type):
        return pc.replace_substring_regex(array.cast(pa.string()), r"\.0$", "")
    return array.cast(pa.string())


def _said(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
