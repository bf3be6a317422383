"""Submission file of a competition, validated before it is written."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays.text import is_text
from penstock.datasets.labels import ranked_texts
from penstock.datasets.metrics import Metric, get_metric
from penstock.datasets.predictions import (
    Array,
    Predictions,
    PredictionsAre,
    as_array,
    class_places,
    in_order,
    in_rows,
    is_missing,
    matched,
    places,
    refuse_duplicates,
)
from penstock.datasets.tables import find_file, read_table
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local

if TYPE_CHECKING:
    from penstock.datasets.base import KaggleDataset

log = logging.getLogger(__name__)


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
    predictions_are: PredictionsAre | None = None,
) -> Path:
    """Write `predictions` for `rows` (a dataset, or ids) as the competition expects them; returns the path.

        dataset.submission(numbers, "submission.csv")                     # class numbers become class names
        dataset.submission(probabilities, "submission.csv", metric="auc")

    Predictions are one for each row, a row for each row if there are several columns, or a frame or mapping of columns;
    rows are aligned by a column of ids, or by an index of that name. `penstock.datasets.predictions` describes the
    forms of class predictions: class numbers are written as class names, and if plain numbers may be either,
    `predictions_are` is "numbers" or "names". `metric` (by default the dataset's) decides what is written for scores of
    classes: labels if it needs labels, lists of the best if it needs rankings (map@3: "a c b"), else the scores.
    Without it they must have the form of the sample.

    The columns of an array are those of the classes or targets, in their order. `sample` is the sample submission, by
    default that of the dataset's directory. The file has its columns and ids in its order, and may have a prefix before
    class names (`Class_a`). Rows of data without ids get those of the sample, in order. Other columns or ids, a missing
    prediction or a wrong type are errors, and nothing is written. The file is published atomically.
    """
    file = require_local(path, "the file of a submission")
    spec = getattr(rows, "spec", None)
    ids: Any = rows
    if spec is not None:
        ids = rows.ids()
        id_column = id_column or rows.id_column
        target = target or spec.target_column
        classes = classes or rows._label_rules.classes
        metric = metric if metric is not None else rows.metric
        sample = sample if sample is not None else _sample_of(spec)
    expected = sample if sample is None or isinstance(sample, pa.Table) else read_table(sample)
    if spec is not None and id_column is None and expected is not None:
        ids = _ids_of(expected, pa.array(ids))
    ids = ids if isinstance(ids, pa.Array) else pa.array(ids)
    refuse_duplicates(ids, "the rows")
    targets = () if target is None else (target,) if isinstance(target, str) else tuple(target)
    form = _Form.of(expected, id_column, targets)
    known = _Known(
        None if classes is None else tuple(classes),
        targets,
        None if metric is None else get_metric(metric),
        predictions_are,
    )
    columns = _columns(in_rows(predictions, [form.id_name, id_column], ids), form, known)
    if known.classes is None or len(columns) > 1:  # else they may be names
        columns = {name: _numbers_of_objects(values) for name, values in columns.items()}
    for name, values in columns.items():
        _check(values, name, len(ids))
    if known.metric is not None:
        columns = _as_scored(columns, known.metric, known)
    if expected is not None:
        ids, columns = _as_sample(expected, form, ids, columns)
    _write(file, form, ids, columns)
    return file


@dataclass(frozen=True)
class _Form:
    """Layout of the file: the id column, the other columns, and the place of the id column."""

    id_name: str
    names: tuple[str, ...] | None
    """None: the names of the predictions."""
    id_place: int = 0
    kinds: Mapping[str, pa.DataType] = field(default_factory=dict)

    @classmethod
    def of(cls, expected: pa.Table | None, id_column: str | None, targets: tuple[str, ...]) -> Self:
        if expected is None:
            return cls(id_column or "id", targets or None)
        id_name = str(id_column) if id_column in expected.column_names else expected.column_names[0]
        names = tuple(name for name in expected.column_names if name != id_name)
        if len(names) != len(expected.column_names) - 1 or len(set(names)) != len(names):
            raise SchemaError(f"the sample submission has duplicate columns: {expected.column_names}")
        kinds = {name: expected.schema.field(name).type for name in names}
        return cls(id_name, names, expected.column_names.index(id_name), kinds)


@dataclass(frozen=True)
class _Known:
    """Facts about the predictions: classes, targets, metric, and the meaning of plain numbers."""

    classes: tuple[Any, ...] | None
    targets: tuple[str, ...]
    metric: Metric | None
    are: PredictionsAre | None


def _ids_of(sample: pa.Table, numbers: pa.Array) -> pa.Array:
    """Ids of the rows of a file without ids: those of the sample submission in its order, or the row numbers."""
    given, rows = sample.column(0).combine_chunks(), len(numbers)
    if len(given) != rows:
        raise DataError(
            f"the data has no ids and {rows} rows, and the sample submission {len(given)} rows, so the ids in "
            f"{sample.column_names[0]!r} cannot be given to the rows in order; name the column of ids in id_column"
        )
    if pa.types.is_integer(given.type):
        for counted in (numbers, pc.add(numbers, 1)):  # rows are counted from 0 or 1, whatever the order of the sample
            if set(given.to_pylist()) == set(counted.to_pylist()):
                return counted
    return given


def _sample_of(spec: Any) -> Any | None:
    """Sample submission of a spec: the named file, or one with a usual name."""
    found = find_file(spec.dataset_path, "sample_submission")
    if "sample_submission" not in spec.files:
        return found
    named = spec.dataset_path / spec.files["sample_submission"]
    if named.is_file():
        return named
    instead = "the submission is not validated against one" if found is None else f"{found.name!r} is used instead"
    log.warning("the sample submission %r is not in %s; %s", named.name, spec.dataset_path, instead)
    return found


def _columns(predictions: Any, form: _Form, known: _Known) -> dict[str, Array]:
    """Predictions by the names of the columns of the file, in their order."""
    if isinstance(predictions, dict):
        return _from_names(predictions, form, known)
    rankings = known.classes is not None and known.metric is not None and known.metric.needs == "rankings"
    if rankings and form.names is not None and len(form.names) == 1:
        return {form.names[0]: _one_column(predictions, form, known)}
    given = as_array(predictions)
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.ndim not in (1, 2):
        raise SchemaError(f"predictions have shape {given.shape}; expected (rows,) or (rows, columns)")
    if form.names is None:
        raise ConfigError("the predicted column has no name; pass target=, or a sample submission")
    names = form.names
    if len(names) == 1 and (given.ndim == 1 or known.classes is not None):
        return {names[0]: _one_column(given, form, known)}
    count = 1 if given.ndim == 1 else given.shape[1]
    if len(names) != count:
        raise SchemaError(f"predictions have {count} columns, and the submission has {list(names)}")
    order = class_places(known.classes, names) or matched(known.targets, names)
    if order is None:
        raise SchemaError(
            f"the submission has the columns {list(names)}, which are not {[*(known.classes or ()), *known.targets]}, "
            "so the order of the predicted columns is unknown; pass a mapping: {name: values}"
        )
    return {name: given[:, place] for name, place in zip(names, order)}


def _from_names(columns: dict[str, Array], form: _Form, known: _Known) -> dict[str, Array]:
    names = tuple(columns) if form.names is None else form.names
    if matched(list(columns), names) is not None:
        columns = {name: columns[name] for name in names}
        return {names[0]: _one_column(columns[names[0]], form, known)} if len(names) == 1 else columns
    if known.classes is not None and class_places(known.classes, list(columns)) is not None:
        scores = in_order(columns, known.classes, "the classes", classes=True)
        order = class_places(known.classes, names)
        if order is not None:
            return {name: scores[:, place] for name, place in zip(names, order)}
        if len(names) == 1:
            return {names[0]: _one_column(scores, form, known)}
    expected = f"{list(names)} after {form.id_name!r}" if form.kinds else f"{list(names)}"
    raise SchemaError(f"the submission has the columns {expected}, and the predictions {list(columns)}")


def _one_column(given: Any, form: _Form, known: _Known) -> Array:
    """The only column: class names or the probability of the second class; without classes unchanged."""
    classes, metric = known.classes, known.metric
    if classes is None:
        return np.asarray(given)
    if metric is not None and metric.needs == "rankings":
        return ranked_texts(given, classes, metric, known.are)
    name = form.names[0] if form.names else "it"
    predictions = Predictions.of(given, classes, known.are)
    if metric is not None and metric.needs in ("scores", "probabilities"):
        scores = predictions.scores(metric.name)
        if scores.ndim == 2 and scores.shape[1] != 2:
            raise SchemaError(
                f"{metric.name} of {len(classes)} classes needs a column for each, and the submission has only "
                f"{name!r}; pass a sample submission, or a mapping"
            )
        return scores[:, 1] if scores.ndim == 2 else scores
    if metric is not None and metric.needs == "values" and predictions.fractional:
        return predictions.values(metric.name)
    if metric is not None or predictions.meaning in ("numbers", "names"):
        return np.asarray(predictions.names())
    if predictions.meaning == "probabilities" and pa.types.is_floating(form.kinds.get(name, pa.null())):
        return predictions.given
    raise SchemaError(
        f"predictions for {name!r} are scores, and the submission has one label for each row; pass metric=, or class "
        "numbers: scores.argmax(axis=1), or probabilities >= 0.5"
    )


def _as_scored(columns: dict[str, Array], metric: Metric, known: _Known) -> dict[str, Array]:
    """Columns with True as 1 for metrics of scores. Raises for values that the metric does not take."""
    if metric.needs in ("scores", "probabilities"):
        columns = {name: v.astype(np.int64) if v.dtype.kind == "b" else v for name, v in columns.items()}
    for name, values in columns.items():
        if values.dtype.kind not in "iuf":
            continue
        if metric.needs == "probabilities":
            wrong, wanted = (values < 0) | (values > 1), "probabilities from 0 to 1 (sigmoid or softmax)"
        elif metric.needs == "labels" and known.classes is None:
            many = len(columns) > 1
            wrong = ~np.isin(values, (0, 1)) if many else values != np.floor(values)
            wanted = "labels, 0 or 1: probabilities >= 0.5" if many else "integers: round them"
        else:
            continue
        if wrong.any():
            row = int(wrong.argmax())
            raise SchemaError(f"{name!r} is {values[row]} in row {row}; {metric.name} needs {wanted}")
    return columns


def _numbers_of_objects(values: Array) -> Array:
    """Column of objects that are all numbers, or all booleans, as such a column."""
    if values.dtype.kind != "O" or values.ndim != 1:
        return values
    kinds = {type(value) for value in values}
    flags = kinds <= {bool, np.bool_}
    numbers = all(issubclass(kind, int | float | np.integer | np.floating) and kind is not bool for kind in kinds)
    return np.array(values.tolist()) if flags or numbers else values


def _check(values: Array, name: str, rows: int) -> None:
    if values.ndim != 1:
        raise SchemaError(f"predictions for {name!r} have shape {values.shape}; expected one for each row")
    if len(values) != rows:
        raise SchemaError(f"there are {len(values)} predictions for {name!r} and {rows} rows; they must be equal")
    kind = values.dtype.kind
    if kind not in "biufUMO":
        raise SchemaError(f"predictions for {name!r} are {values.dtype}; expected numbers or text")
    if kind == "O":
        bad = np.fromiter((not _is_cell(value) for value in values), np.bool_, rows)
    elif kind in "fM":
        bad = np.isnat(values) if kind == "M" else ~np.isfinite(values)
    else:
        return
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"the prediction for {name!r} in row {row} is {values[row]!r}, and {int(bad.sum())} such in all; "
            "every row needs a finite value",
            row=row,
        )


def _is_cell(value: Any) -> bool:
    """True for a value that can be written: text, a finite number, a date."""
    if isinstance(value, float | np.floating):
        return bool(np.isfinite(value))
    return not is_missing(value) and isinstance(value, str | np.bool_ | Real | Decimal | date)


def _as_sample(
    expected: pa.Table, form: _Form, ids: pa.Array, columns: dict[str, Array]
) -> tuple[pa.Array, dict[str, Array]]:
    """Predictions in the order of the sample's rows, with its types."""
    wanted = expected[form.id_name].combine_chunks()
    refuse_duplicates(wanted, f"the column {form.id_name!r} of the sample submission")
    try:
        ids = ids if ids.type == wanted.type else ids.cast(wanted.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(f"the sample has {wanted.type} ids in {form.id_name!r}, and the data {ids.type}") from None
    order = places(
        ids, wanted, f"the data ({form.id_name!r})", "ids of the sample submission without a prediction",
        "predictions for other ids",
    )  # fmt: skip
    for name, values in columns.items():
        _check_type(values, form.kinds[name], name)
    return wanted, {name: _as_type(values[order], form.kinds[name]) for name, values in columns.items()}


def _check_type(values: Array, kind: pa.DataType, name: str) -> None:
    """Raise if a reader of the file would see another type than in the sample."""
    number = values.dtype.kind in "iufb"
    if is_text(kind) and values.dtype.kind not in "OUS":
        wanted = "text"
    elif pa.types.is_boolean(kind) and values.dtype.kind != "b":
        wanted = "booleans"
    elif (pa.types.is_floating(kind) or pa.types.is_integer(kind)) and not number:
        wanted = "numbers"
    else:
        return
    raise SchemaError(f"the sample submission has {wanted} in {name!r} ({kind}), got {values.dtype}: {values[:3]!r}")


def _as_type(values: Array, kind: pa.DataType) -> Array:
    """Values as the sample writes them: 1.0 as 1 in a column of integers, true as 1 in a column of numbers."""
    if values.dtype.kind == "b" and (pa.types.is_floating(kind) or pa.types.is_integer(kind)):
        return values.astype(np.int64)
    whole = pa.types.is_integer(kind) and values.dtype.kind == "f" and bool((values == np.floor(values)).all())
    return values.astype(np.int64) if whole else values


def _write(path: Path, form: _Form, ids: pa.Array, columns: Mapping[str, Array]) -> None:
    names, cells = list(columns), []
    for values in columns.values():
        # float32 in its own digits, and not those of the nearest float64.
        narrow = values.dtype.kind == "f" and values.dtype.itemsize < 8
        cells.append((values.astype(str) if narrow else values).tolist())
    names.insert(form.id_place, form.id_name)
    cells.insert(form.id_place, ids.to_pylist())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*cells))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue().encode())
