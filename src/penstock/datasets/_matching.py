"""Whether the files of one competition go together: the same columns, and no category that training does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets._checking import refuse_missing_target
from penstock.datasets._kinds import is_text
from penstock.datasets._spec import DatasetSpec
from penstock.errors import DataError, SchemaError

__all__ = ["check_same_columns", "check_unseen", "seen_values"]


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
