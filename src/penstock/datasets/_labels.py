"""The target of a table as a model learns it, and a model's predictions as the competition wants them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets._frames import column_of
from penstock.datasets._spec import CompetitionType, DatasetSpec
from penstock.errors import ConfigError, DataError, SchemaError

__all__ = ["Labels", "class_of"]

_MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Labels:
    """Which columns are the target, and which classes they have."""

    spec: DatasetSpec
    classes: tuple[Any, ...] | None

    @classmethod
    def of(cls, training: pa.Table | None, spec: DatasetSpec) -> Self:
        """With the classes that the spec says, or those of the training file, sorted."""
        if not spec.competition_type.has_classes or not spec.targets:
            return cls(spec, None)
        if spec.class_names is not None:
            return cls(spec, spec.class_names)
        if training is None or spec.targets[0] not in training.column_names:
            return cls(spec, None)  # a missing target is told where rows are checked
        values = column_of(training, spec.targets[0]).drop_null().unique()
        if len(values) > _MOST_CLASSES:
            raise SchemaError(
                f"the target {spec.targets[0]!r} has {len(values)} different values, too many for classes; "
                "is it a regression?"
            )
        classes = tuple(sorted(values.to_pylist()))
        if spec.competition_type is CompetitionType.BINARY_CLASSIFICATION and len(classes) != 2:
            raise SchemaError(
                f"binary_classification needs two values of the target {spec.targets[0]!r}, and the training file has "
                f"{len(classes)}: {list(classes[:10])}; correct competition_type, or give class_names"
            )
        return cls(spec, classes)

    @property
    def dtype(self) -> type[np.int32] | type[np.float32]:
        return np.int32 if self.spec.competition_type.has_classes else np.float32

    def values(self, data: Any) -> npt.NDArray[Any]:
        """The targets as they are in the file: (rows,), or (rows, targets)."""
        columns = [np.asarray(column_of(data, name)) for name in self.spec.targets]
        if self.spec.competition_type.has_many_targets:
            return np.stack(columns, axis=1)
        values = columns[0]
        return values.astype(str) if values.dtype.kind == "O" else values

    def numbers(self, data: Any) -> npt.NDArray[Any]:
        """The targets as class numbers or as numbers."""
        columns = [column_of(data, name) for name in self.spec.targets]
        if self.classes is not None:
            return _class_numbers(columns[0], self.classes, self.spec.targets[0])
        numbers = [_floats(column, name) for name, column in zip(self.spec.targets, columns)]
        kind = self.spec.competition_type
        if kind is CompetitionType.MULTILABEL_CLASSIFICATION:
            for name, column in zip(self.spec.targets, numbers):
                wrong = ~np.isin(column, (0, 1))
                if wrong.any():
                    row = int(wrong.argmax())
                    raise DataError(f"the label {name!r} is {column[row]:g} in row {row}; expected 0 or 1", row=row)
        return np.stack(numbers, axis=1) if kind.has_many_targets else numbers[0]

    def class_of(self, predictions: Any) -> npt.NDArray[Any]:
        if self.classes is None:
            raise ConfigError(f"{self.spec.competition_type.value} has no classes, or nobody knows them")
        return class_of(predictions, self.classes)


def class_of(predictions: Any, classes: tuple[Any, ...]) -> npt.NDArray[Any]:
    """The class of each prediction: of a number its class, of scores the highest, of a probability the half."""
    given = np.asarray(predictions)
    names = np.array(classes)
    if given.ndim == 2 and given.shape[1] == 1:
        given = given[:, 0]
    if given.dtype.kind == "f" and np.isnan(given).any():
        row = int(np.isnan(given).reshape(len(given), -1).any(axis=1).argmax())
        raise DataError(f"the prediction for row {row} is NaN, and of no class", row=row)
    if given.ndim == 2:
        if given.shape[1] != len(classes):
            raise SchemaError(f"predictions have {given.shape[1]} columns, and there are {len(classes)} classes")
        highest: npt.NDArray[np.int64] = given.argmax(axis=1)
        return np.asarray(names[highest])
    if given.ndim != 1 or given.dtype.kind not in "biuf":
        raise SchemaError(f"expected class numbers or probabilities, got {given.dtype} of shape {given.shape}")
    whole = given.dtype.kind in "biu" or bool((given == np.floor(given)).all())
    if not whole:
        if len(classes) != 2 or (given < 0).any() or (given > 1).any():
            raise SchemaError(
                "one number for each row is the probability of the second of two classes, from 0 to 1; for "
                f"{len(classes)} classes give (rows, {len(classes)}), for logits apply a sigmoid first"
            )
        return names[(given >= 0.5).astype(np.int64)]
    numbers = given.astype(np.int64)
    outside = (numbers < 0) | (numbers >= len(classes))
    if outside.any():
        row = int(outside.argmax())
        raise DataError(f"{given[row]} in row {row} is the number of none of {len(classes)} classes", row=row)
    return names[numbers]


def _class_numbers(column: pa.Array, classes: tuple[Any, ...], name: str) -> npt.NDArray[np.int32]:
    try:
        known = pa.array(list(classes)).cast(column.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError, TypeError):
        raise SchemaError(
            f"class_names {list(classes)[:10]} are not values of the target {name!r}, which is {column.type}; give "
            "them as they are in the file"
        ) from None
    found = pc.index_in(column, known)
    if found.null_count:
        row = int(np.asarray(found.is_null()).argmax())
        raise DataError(
            f"the target {name!r} is {column[row].as_py()!r} in row {row}, which is none of the classes "
            f"{list(classes)[:20]}; {found.null_count} rows are so",
            row=row,
        )
    return np.asarray(found).astype(np.int32)


def _floats(column: pa.Array, name: str) -> npt.NDArray[np.float32]:
    try:
        return np.asarray(column.cast(pa.float64())).astype(np.float32)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(
            f"the target {name!r} is {column.type}, and numbers are to be predicted; mend the column, or correct "
            f"competition_type (its values are like {column[0].as_py()!r})"
        ) from None
