"""Whether rows are what their spec says: counts, target, ids, columns without a value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock._dtypes import did_you_mean
from penstock.datasets._frames import column_names, column_of
from penstock.datasets._spec import DatasetSpec
from penstock.errors import DataError, SchemaError

__all__ = ["check_data", "feature_names", "id_column_of", "refuse_missing_target"]


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
        _check_target(column_of(data, target), target, split)
    if spec.id_column is not None:
        _check_ids(column_of(data, spec.id_column), spec.id_column, split)
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
    """The column of ids: the spec's, or the first column if it is called an id and has no value twice."""
    if spec.id_column is not None:
        return spec.id_column
    names = column_names(data)
    if not names or names[0] in spec.targets or not _is_called_id(names[0]):
        return None
    values = column_of(data, names[0])
    unique = not values.null_count and pc.count_distinct(values).as_py() == len(values)
    return names[0] if unique else None


def feature_names(data: Any, spec: DatasetSpec) -> list[str]:
    """The columns without id and target, also without those the spec says to ignore."""
    out = {id_column_of(data, spec), *spec.targets, *spec.ignored}
    return [name for name in column_names(data) if name not in out]


def _is_called_id(name: str) -> bool:
    return name.lower() in ("id", "uid", "uuid", "index", "row_id") or name.endswith(("Id", "ID", "_id"))


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
    if values.null_count:
        row = int(np.argmax(np.asarray(values.is_null())))
        raise DataError(
            f"the target {name!r} is missing in {values.null_count} of the {len(values)} rows of the {split} file, "
            f"first in row {row}; leave these rows out, or fill them",
            row=row,
        )


def _check_ids(values: pa.Array, name: str, split: str) -> None:
    if values.null_count:
        row = int(np.argmax(np.asarray(values.is_null())))
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
        "id_column (None if rows have no ids)",
        row=row,
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
        return bool(data.column(name).null_count == len(data))
    if hasattr(data, "iloc"):
        return bool(data[name].isna().all())
    return bool(column_of(data, name).null_count == len(data))


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
