"""The file that a competition expects, checked before anybody sends it."""

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
import numpy.typing as npt
import pyarrow as pa

from penstock.arrays.text import is_text
from penstock.datasets.predictions import (
    Predictions,
    PredictionsAre,
    as_array,
    class_places,
    in_order,
    in_rows,
    is_missing,
    matched,
    places,
    refuse_copies,
    told,
)
from penstock.datasets.tables import find_file, read_table
from penstock.errors import ConfigError, DataError, SchemaError
from penstock.files.atomic import write_atomic
from penstock.files.filesystems import require_local

if TYPE_CHECKING:
    from penstock.datasets.base import KaggleDataset
    from penstock.datasets.metrics import Metric

__all__ = ["write_submission"]

log = logging.getLogger(__name__)

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
    predictions_are: PredictionsAre | None = None,
) -> Path:
    """Write `predictions` for `rows` (a dataset, or ids) as the competition expects them; returns the path.

        dataset.submission(numbers, "submission.csv")                     # class numbers become class names
        dataset.submission(probabilities, "submission.csv", metric="auc")

    Predictions are one for each row, a row for each row where there are several columns, or a frame or mapping of
    columns; rows are found by a column of ids, or by an index that has their name. What predictions of classes mean is
    told in `penstock.datasets.predictions`: class numbers are written as the names of their classes, and where plain
    numbers may be either, `predictions_are` says "numbers" or "names". `metric` (else the dataset's) is what the
    competition scores: scores of classes become labels where it needs labels, lists of the best where it needs these
    (map@3: "a c b"), and else they stay. Without it they must be what the sample has.

    The columns of an array are those of the classes or targets, in their order. `sample` is the sample submission: that
    of the dataset's directory, if there is one. The file then has its columns and ids in its order, columns of classes
    also where the sample calls them `Class_a`; a difference in them, a missing prediction or a type that does not fit
    is an error, and nothing is written. The file appears whole or not at all.
    """
    from penstock.datasets.metrics import get_metric

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
    ids = ids if isinstance(ids, pa.Array) else pa.array(ids)
    refuse_copies(ids, "the rows")
    form = _Form.of(expected, id_column, target)
    scored_by = None if metric is None else get_metric(metric)
    asked = _Asked(None if classes is None else tuple(classes), _targets(target), scored_by, predictions_are)
    columns = _columns(in_rows(predictions, [form.id_name, id_column], ids), form, asked)
    if asked.classes is None or len(columns) > 1:  # else they may be names
        columns = {name: _numbers_of_objects(values) for name, values in columns.items()}
    for name, values in columns.items():
        _check(values, name, len(ids))
    if scored_by is not None:
        columns = _as_scored(columns, scored_by, asked)
    if expected is not None:
        ids, columns = _as_sample(expected, form, ids, columns)
    _write(file, form, ids, columns)
    return file


@dataclass(frozen=True)
class _Form:
    """What the file looks like: the column of ids, the others, and where the ids stand among them."""

    id_name: str
    names: tuple[str, ...] | None
    """None: nobody said, so that they are called what the predictions are called."""
    id_place: int = 0
    kinds: Mapping[str, pa.DataType] = field(default_factory=dict)

    @classmethod
    def of(cls, expected: pa.Table | None, id_column: str | None, target: str | Sequence[str] | None) -> Self:
        if expected is None:
            return cls(id_column or "id", _targets(target) or None)
        there = id_column is not None and id_column in expected.column_names
        id_name = str(id_column) if there else expected.column_names[0]
        names = tuple(name for name in expected.column_names if name != id_name)
        if len(names) != len(expected.column_names) - 1 or len(set(names)) != len(names):
            raise SchemaError(f"the sample submission has the columns {expected.column_names}, some of them twice")
        kinds = {name: expected.schema.field(name).type for name in names}
        return cls(id_name, names, expected.column_names.index(id_name), kinds)


@dataclass(frozen=True)
class _Asked:
    """What is known of the predictions besides themselves."""

    classes: tuple[Any, ...] | None
    targets: tuple[str, ...]
    metric: Metric | None
    are: PredictionsAre | None

    @property
    def rankings(self) -> bool:
        """Whether a row has several classes, best first."""
        return self.classes is not None and self.metric is not None and self.metric.needs == "rankings"


def _targets(target: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def _sample_of(spec: Any) -> Any | None:
    """The file that is named, or else one that is called so: metadata names a file that not everybody has."""
    found = find_file(spec.dataset_path, "sample_submission")
    if "sample_submission" not in spec.files:
        return found
    named = spec.dataset_path / spec.files["sample_submission"]
    if named.is_file():
        return named
    instead = "the submission is not checked against one" if found is None else f"{found.name!r} is used instead"
    log.warning("the sample submission %r is not in %s; %s", named.name, spec.dataset_path, instead)
    return found


def _columns(predictions: Any, form: _Form, asked: _Asked) -> dict[str, Column]:
    """The predictions by the names of the columns of the file, in their order."""
    if isinstance(predictions, dict):
        return _from_names(predictions, form, asked)
    if asked.rankings and form.names is not None and len(form.names) == 1:
        return {form.names[0]: _ranked_texts(predictions, asked)}
    given = as_array(predictions)
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.ndim not in (1, 2):
        raise SchemaError(f"predictions have shape {given.shape}; expected (rows,) or (rows, columns)")
    if form.names is None:
        raise ConfigError("nobody said what the predicted column is called; pass target=, or a sample submission")
    names = form.names
    if len(names) == 1 and (given.ndim == 1 or asked.classes is not None):
        return {names[0]: _one_column(given, form, asked)}
    count = 1 if given.ndim == 1 else given.shape[1]
    if len(names) != count:
        raise SchemaError(f"predictions have {count} columns, and the submission has {list(names)}")
    order = class_places(asked.classes, names) or matched(asked.targets, names)
    if order is not None:
        return {name: given[:, place] for name, place in zip(names, order)}
    known_ones = [*(asked.classes or ()), *asked.targets]
    raise SchemaError(
        f"the submission has the columns {list(names)}, and these are not the {known_ones} in any order, so nobody "
        "knows which column of the predictions is which; pass a mapping: {name: values}"
    )


def _from_names(columns: dict[str, Column], form: _Form, asked: _Asked) -> dict[str, Column]:
    names = tuple(columns) if form.names is None else form.names
    if matched(list(columns), names) is not None:
        columns = {name: columns[name] for name in names}
        return {names[0]: _one_column(columns[names[0]], form, asked)} if len(names) == 1 else columns
    if asked.classes is not None and class_places(asked.classes, list(columns)) is not None:
        scores = in_order(columns, asked.classes, "the classes", classes=True)
        order = class_places(asked.classes, names)
        if order is not None:
            return {name: scores[:, place] for name, place in zip(names, order)}
        if len(names) == 1:
            return {names[0]: _one_column(scores, form, asked)}
    if form.kinds:
        raise SchemaError(
            f"the sample submission has the columns {list(names)} behind {form.id_name!r}, got {list(columns)}"
        )
    raise SchemaError(f"the submission has the columns {list(names)}, the predictions {list(columns)}")


def _one_column(given: Column, form: _Form, asked: _Asked) -> Column:
    """The only column: for classes their names, or the probability of the second; else as it is."""
    if asked.classes is None:
        return np.asarray(given)
    if asked.rankings:
        return _ranked_texts(given, asked)
    name, metric = form.names[0] if form.names else "it", asked.metric
    predictions = Predictions.of(given, asked.classes, asked.are)
    if metric is not None and metric.needs in ("scores", "probabilities"):
        scores = predictions.scores(metric.name)
        if scores.ndim == 2 and scores.shape[1] != 2:
            raise SchemaError(
                f"{metric.name} of {len(asked.classes)} classes needs a column for each, and the submission has only "
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
        f"predictions for {name!r} are scores, and the submission has one label for each row; pass metric= (what the "
        "competition scores), or class numbers: scores.argmax(axis=1), or probabilities >= 0.5"
    )


def _ranked_texts(given: Any, asked: _Asked) -> Column:
    from penstock.datasets.labels import ranked_texts

    assert asked.classes is not None
    assert asked.metric is not None
    return ranked_texts(given, asked.classes, asked.metric, asked.are)


def _as_scored(columns: dict[str, Column], metric: Metric, asked: _Asked) -> dict[str, Column]:
    """True as 1 where scores are meant. Raises for what the metric would not take."""
    if metric.needs in ("scores", "probabilities"):
        columns = {name: v.astype(np.int64) if v.dtype.kind == "b" else v for name, v in columns.items()}
    for name, values in columns.items():
        if values.dtype.kind not in "iuf":
            continue
        if metric.needs == "probabilities":
            wrong, wanted = (values < 0) | (values > 1), "probabilities from 0 to 1 (sigmoid or softmax)"
        elif metric.needs == "labels" and asked.classes is None:
            many = len(columns) > 1
            wrong = ~np.isin(values, (0, 1)) if many else values != np.floor(values)
            wanted = "labels, 0 or 1: probabilities >= 0.5" if many else "whole numbers: round them"
        else:
            continue
        if wrong.any():
            row = int(wrong.argmax())
            raise SchemaError(
                f"the prediction for {name!r} in row {row} is {values[row]}; {metric.name} needs {wanted}"
            )
    return columns


def _numbers_of_objects(values: Column) -> Column:
    """A column of objects that are all plain numbers, or all true or false, as such a column."""
    if values.dtype.kind != "O" or values.ndim != 1:
        return values
    kinds = {type(value) for value in values}
    flags = kinds <= {bool, np.bool_}
    numbers = all(issubclass(kind, int | float | np.integer | np.floating) and kind is not bool for kind in kinds)
    return np.array(values.tolist()) if flags or numbers else values


def _check(values: Column, name: str, rows: int) -> None:
    if values.ndim != 1:
        raise SchemaError(f"predictions for {name!r} have shape {values.shape}; expected one for each row")
    if len(values) != rows:
        raise SchemaError(f"there are {len(values)} predictions for {name!r} and {rows} rows; they must be as many")
    kind = values.dtype.kind
    if kind not in "biufUMO":
        raise SchemaError(f"predictions for {name!r} are {values.dtype}; expected numbers or texts")
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
    """Whether a value of a column of objects can be written: a text, a finite number, a date."""
    if isinstance(value, float | np.floating):
        return bool(np.isfinite(value))
    return not is_missing(value) and isinstance(value, str | np.bool_ | Real | Decimal | date)


def _as_sample(
    expected: pa.Table, form: _Form, ids: pa.Array, columns: dict[str, Column]
) -> tuple[pa.Array, dict[str, Column]]:
    """The predictions in the order of the sample's rows, of its types."""
    wanted = expected[form.id_name].combine_chunks()
    refuse_copies(wanted, f"the column {form.id_name!r} of the sample submission")
    if ids.type != wanted.type:
        try:
            ids = ids.cast(wanted.type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise SchemaError(
                f"the sample's ids {form.id_name!r} are {wanted.type}, and the given ones {ids.type}"
            ) from None
    order, missing, foreign = places(ids, wanted, "the rows")
    if missing or foreign:
        raise DataError(
            f"the sample submission has {len(wanted)} ids and there are {len(ids)} predictions: "
            + told(f"{len(missing)} ids have none", missing, f"{len(foreign)} predictions are for others", foreign)
            + f"; predict the whole test file, in which the ids are in {form.id_name!r}"
        )
    made = {}
    for name, values in columns.items():
        _check_type(values, form.kinds[name], name)
        made[name] = _as_type(values[order], form.kinds[name])
    return wanted, made


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
    """Whole numbers stay whole: 1.0 is written 1 where the sample has 1; true is written 1 where it has numbers."""
    if pa.types.is_floating(kind) and values.dtype.kind == "b":
        return values.astype(np.int64)
    if pa.types.is_integer(kind) and values.dtype.kind in "bf" and bool((values == np.floor(values)).all()):
        return values.astype(np.int64)
    return values.astype(np.int64) if pa.types.is_integer(kind) and values.dtype.kind == "b" else values


def _write(path: Path, form: _Form, ids: pa.Array, columns: Mapping[str, Column]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    listed = {name: _listed(values) for name, values in columns.items()}
    names = list(listed)
    names.insert(form.id_place, form.id_name)
    cells = list(listed.values())
    cells.insert(form.id_place, ids.to_pylist())
    writer.writerow(names)
    writer.writerows(zip(*cells))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text.getvalue().encode())


def _listed(values: Column) -> list[Any]:
    """The cells of a column: float32 in as few digits as it has, which are not those of the float64 next to it."""
    narrow = values.dtype.kind == "f" and values.dtype.itemsize < 8
    cells: list[Any] = (values.astype(str) if narrow else values).tolist()
    return cells
