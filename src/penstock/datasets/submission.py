"""The file that a competition expects, checked before anybody sends it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.datasets._kinds import is_text
from penstock.datasets._labels import class_of
from penstock.datasets.reading import find_file, read_table
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.atomic import write_atomic

if TYPE_CHECKING:
    from penstock.datasets.base import KaggleDataset
    from penstock.datasets.metrics import Metric

__all__ = ["write_submission"]

Column = npt.NDArray[Any]


def write_submission(
    rows: KaggleDataset | Any,
    predictions: Any,
    path: str | Path,
    *,
    sample: str | Path | pa.Table | None = None,
    metric: str | Metric | None = None,
    id_column: str | None = None,
    target: str | Sequence[str] | None = None,
    classes: Sequence[Any] | None = None,
) -> Path:
    """Write `predictions` for `rows` (a dataset, or ids) as the competition expects them; returns the path.

        dataset.submission(numbers, "submission.csv")                     # class numbers become class names
        dataset.submission(probabilities, "submission.csv", metric="auc")

    Predictions are one for each row, a row for each row where there are several columns, or a mapping of columns. Class
    numbers are written as the names of their classes. `metric` says what the competition scores: scores of classes
    become labels where it needs labels, and where it needs none they stay. Without it they must be what the sample has.

    `sample` is the sample submission: that of the dataset's directory, if there is one. The file then has its columns
    and ids in its order; a difference in them, a missing prediction or a type that does not fit is an error, and
    nothing is written. The file appears whole or not at all.
    """
    spec = getattr(rows, "spec", None)
    if spec is not None:
        ids: Any = rows.ids()
        id_column = id_column or rows.id_column
        target = target or spec.target_column
        classes = classes or getattr(rows, "class_names", None) or spec.class_names
        sample = sample if sample is not None else _sample_of(spec)
    else:
        ids = rows
    expected = sample if sample is None or isinstance(sample, pa.Table) else read_table(sample)
    ids = ids if isinstance(ids, pa.Array) else pa.array(ids)
    columns = _columns(predictions, expected, target, classes, metric)
    for name, values in columns.items():
        _check(values, name, len(ids))
    _refuse_copies(ids)
    if expected is not None:
        id_column, ids, columns = _as_sample(expected, ids, columns)
    _write(Path(path), id_column or "id", ids, columns)
    return Path(path)


def _sample_of(spec: Any) -> Any | None:
    if "sample_submission" in spec.files:
        return spec.dataset_path / spec.files["sample_submission"]
    return find_file(spec.dataset_path, "sample_submission")


def _columns(
    predictions: Any,
    expected: pa.Table | None,
    target: str | Sequence[str] | None,
    classes: Sequence[Any] | None,
    metric: str | Metric | None,
) -> dict[str, Column]:
    """The predictions by the names of their columns."""
    if hasattr(predictions, "columns") and not isinstance(predictions, Mapping):
        predictions = {str(name): predictions[name] for name in predictions.columns}
    if isinstance(predictions, Mapping):
        return {str(name): np.asarray(values) for name, values in predictions.items()}
    given = np.asarray(predictions)
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.ndim not in (1, 2):
        raise SchemaError(f"predictions have shape {given.shape}; expected (rows,) or (rows, columns)")
    names = _target_names(expected, target)
    several = classes is not None and names == [str(name) for name in classes]
    if given.ndim == 2 and several:
        return dict(zip(names, given.T))
    if classes is not None and len(names) == 1:
        return {names[0]: _of_classes(given, tuple(classes), metric, expected, names[0])}
    if given.ndim == 1:
        given = given[:, None]
    if len(names) != given.shape[1]:
        raise SchemaError(f"predictions have {given.shape[1]} columns, and the submission has {names}")
    return dict(zip(names, given.T))


def _target_names(expected: pa.Table | None, target: str | Sequence[str] | None) -> list[str]:
    if expected is not None:
        return list(expected.column_names[1:])
    if target is None:
        raise ConfigError("nobody said what the predicted column is called; pass target=, or a sample submission")
    return [target] if isinstance(target, str) else list(target)


def _of_classes(
    given: Column, classes: tuple[Any, ...], metric: str | Metric | None, expected: pa.Table | None, name: str
) -> Column:
    """One column of predictions of classes: names, or the probability of the second class."""
    if given.dtype.kind in "OUS" or (given.dtype.kind == "b" and isinstance(classes[0], bool | np.bool_)):
        return given
    if metric is not None:
        from penstock.datasets.metrics import get_metric

        if get_metric(metric).needs != "labels":
            return given[:, 1] if given.ndim == 2 and given.shape[1] == 2 else given
        return class_of(given, classes)
    scores = given.ndim == 2 or (given.dtype.kind == "f" and bool((given != np.floor(given)).any()))
    if not scores:
        return class_of(given, classes)
    if expected is not None and pa.types.is_floating(expected.schema.field(name).type) and given.ndim == 1:
        return given
    raise SchemaError(
        f"predictions for {name!r} are scores, and the submission has one label for each row; pass metric= (what the "
        "competition scores), or class numbers: scores.argmax(axis=1), or probabilities >= 0.5"
    )


def _check(values: Column, name: str, rows: int) -> None:
    if values.ndim != 1:
        raise SchemaError(f"predictions for {name!r} have shape {values.shape}; expected one for each row")
    if len(values) != rows:
        raise SchemaError(f"there are {len(values)} predictions for {name!r} and {rows} rows; they must be as many")
    if values.dtype.kind == "f":
        bad = ~np.isfinite(values)
    elif values.dtype.kind == "O":
        bad = np.array([value is None or value != value for value in values], np.bool_)
    else:
        return
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"the prediction for {name!r} in row {row} is {values[row]!r}, and {int(bad.sum())} such in all; "
            "every row needs a finite value",
            row=row,
        )


def _refuse_copies(ids: pa.Array) -> None:
    if ids.null_count:
        raise DataError(f"{ids.null_count} of {len(ids)} ids are missing; every row needs one")
    counts = ids.value_counts()
    places = np.asarray(counts.field("counts"))
    if len(places) and places.max() > 1:
        twice = counts.field("values")[int(places.argmax())].as_py()
        raise DataError(f"the id {twice!r} is there {int(places.max())} times; a submission has every id once")


def _as_sample(
    expected: pa.Table, ids: pa.Array, columns: dict[str, Column]
) -> tuple[str, pa.Array, dict[str, Column]]:
    """The predictions in the order of the sample's rows and columns."""
    id_name, *names = expected.column_names
    if set(columns) != set(names):
        raise SchemaError(f"the sample submission has the columns {names} behind {id_name!r}, got {list(columns)}")
    wanted = expected[id_name].combine_chunks()
    if ids.type != wanted.type:
        try:
            ids = ids.cast(wanted.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise SchemaError(
                f"the sample's ids {id_name!r} are {wanted.type}, and the given ones {ids.type}"
            ) from None
    place = {value: row for row, value in enumerate(ids.to_pylist())}
    listed = wanted.to_pylist()
    missing = [value for value in listed if value not in place]
    if missing or len(listed) != len(ids):
        foreign = sorted(set(place) - set(listed), key=str)
        raise DataError(
            f"the sample submission has {len(listed)} ids and there are {len(ids)} predictions: "
            f"{len(missing)} ids have none (first {missing[:3]}), {len(foreign)} predictions are for others "
            f"(first {foreign[:3]}); predict the whole test file"
        )
    order = np.array([place[value] for value in listed], np.int64)
    for name in names:
        _check_type(columns[name], expected.schema.field(name).type, name)
    return id_name, wanted, {name: _as_type(columns[name][order], expected.schema.field(name).type) for name in names}


def _check_type(values: Column, kind: pa.DataType, name: str) -> None:
    """Raise where a reader of the file would see another type than the sample has."""
    numbers = values.dtype.kind in "iuf"
    if is_text(kind) and values.dtype.kind not in "OUS":
        wanted = "texts"
    elif pa.types.is_boolean(kind) and values.dtype.kind != "b":
        wanted = "booleans"
    elif pa.types.is_floating(kind) and not numbers and values.dtype.kind != "b":
        wanted = "numbers"
    elif pa.types.is_integer(kind) and not numbers and values.dtype.kind != "b":
        wanted = "whole numbers"
    else:
        return
    raise SchemaError(f"the sample submission has {wanted} in {name!r} ({kind}), got {values.dtype}: {values[:3]!r}")


def _as_type(values: Column, kind: pa.DataType) -> Column:
    """Whole numbers stay whole: 1.0 is written 1 where the sample has 1."""
    if pa.types.is_integer(kind) and values.dtype.kind in "bf" and bool((values == np.floor(values)).all()):
        return values.astype(np.int64)
    return values.astype(np.int64) if pa.types.is_integer(kind) and values.dtype.kind == "b" else values


def _write(path: Path, id_column: str, ids: pa.Array, columns: Mapping[str, Column]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([id_column, *columns])
    writer.writerows(zip(ids.to_pylist(), *(values.tolist() for values in columns.values())))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue().encode())
