"""The target of a table as it is in the file, and as a model learns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.datasets.frames import column_names, column_of
from penstock.datasets.predictions import ClassNames, Predictions
from penstock.datasets.spec import CompetitionType, DatasetSpec
from penstock.datasets.tables import read_names, read_table, split_file
from penstock.errors import ConfigError, DataError, SchemaError

__all__ = ["Labels", "target_values", "training_values"]

_MOST_CLASSES = 100_000


@dataclass(frozen=True)
class Labels:
    """Which columns are the target, and which classes they have."""

    spec: DatasetSpec
    classes: tuple[Any, ...] | None

    @classmethod
    def of(cls, training: Any | None, spec: DatasetSpec) -> Self:
        """With the classes that the spec says, or those of the training file, sorted."""
        return cls.of_values(None if training is None else target_values(training, spec), spec)

    @classmethod
    def of_values(cls, values: pa.Array | None, spec: DatasetSpec) -> Self:
        """The same, of the different values that the target has in the training file."""
        if not spec.competition_type.has_classes or not spec.targets:
            return cls(spec, None)
        if spec.class_names is not None:
            return cls(spec, spec.class_names)
        if values is None:
            return cls(spec, None)  # a missing target is told where rows are checked
        if len(values) > _MOST_CLASSES:
            raise SchemaError(
                f"the target {spec.targets[0]!r} has {len(values)} different values, too many for classes; "
                "is it a regression?"
            )
        found = values.to_pylist()
        if any(value != value for value in found):
            raise DataError(f"the target {spec.targets[0]!r} is NaN in some rows; leave these rows out, or fill them")
        classes = tuple(sorted(found))
        if spec.competition_type is CompetitionType.BINARY_CLASSIFICATION and len(classes) != 2:
            raise SchemaError(
                f"binary_classification needs two values of the target {spec.targets[0]!r}, and the training file has "
                f"{len(classes)}: {list(classes[:10])}; correct competition_type, or give class_names"
            )
        labels = cls(spec, classes)
        if spec.competition_type is CompetitionType.ORDINAL_REGRESSION:
            labels.refuse_no_order("ordinal_regression")
        return labels

    @property
    def dtype(self) -> type[np.int32] | type[np.float32]:
        return np.int32 if self.spec.competition_type.has_classes else np.float32

    def values(self, data: Any) -> npt.NDArray[Any]:
        """The targets as they are in the file: (rows,), or (rows, targets)."""
        columns = [np.asarray(_target(data, name)) for name in self.spec.targets]
        if self.spec.competition_type.has_many_targets:
            return np.stack(columns, axis=1)
        values = columns[0]
        return values.astype(str) if values.dtype.kind == "O" else values

    def numbers(self, data: Any) -> npt.NDArray[Any]:
        """The targets as class numbers or as numbers."""
        columns = [_target(data, name) for name in self.spec.targets]
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

    def class_of(self, predictions: Any) -> ClassNames:
        """The names of classes, of whatever predictions are; plain whole numbers are numbers of classes here."""
        if self.classes is None:
            raise ConfigError(f"{self.spec.competition_type.value} has no classes, or nobody knows them")
        return Predictions.of(predictions, self.classes, "numbers").names()

    def refuse_no_order(self, who: str) -> None:
        """Raise if classes are texts in the order of the alphabet, where their order counts."""
        if self.classes is None or self.spec.class_names is not None or len(self.classes) < 3:
            return
        if isinstance(self.classes[0], str):
            raise ConfigError(
                f"{who} goes by the order of the classes, and that of {list(self.classes)[:10]} is only the alphabet; "
                "give class_names in the spec, from the lowest to the highest"
            )


def target_values(data: Any, spec: DatasetSpec) -> pa.Array | None:
    """The different values of the one target; None where there are no classes, or no such column."""
    if not spec.competition_type.has_classes or not spec.targets or spec.targets[0] not in column_names(data):
        return None
    return _target(data, spec.targets[0]).drop_null().unique()


def training_values(spec: DatasetSpec) -> pa.Array | None:
    """The same of the training file, if there is one."""
    if not spec.competition_type.has_classes or not spec.targets or spec.class_names is not None:
        return None
    target = spec.targets[0]
    options: dict[str, Any] = {"delimiter": spec.delimiter, "encoding": spec.encoding}
    try:
        path = split_file(spec, "train")
    except FileNotFoundError:
        return None
    if target not in read_names(path, **options):
        return None
    kinds = {target: spec.columns[target].kind} if target in spec.columns else {}
    return target_values(read_table(path, columns=[target], kinds=kinds, **options), spec)


def _target(data: Any, name: str) -> pa.Array:
    """The column of a target, of a plain type."""
    column = column_of(data, name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_decimal(column.type):
        return column.cast(pa.float64())
    return column.cast(pa.string()) if column.type in (pa.string_view(), pa.large_string()) else column


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
        wide = np.asarray(column.cast(pa.float64()))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(
            f"the target {name!r} is {column.type}, and numbers are to be predicted; mend the column, or correct "
            f"competition_type (its values are like {column[0].as_py()!r})"
        ) from None
    with np.errstate(over="ignore"):
        numbers = wide.astype(np.float32)
    bad = ~np.isfinite(numbers)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"the target {name!r} is {wide[row]:g} in row {row}, which is no number in float32, and {int(bad.sum())} "
            "such rows in all; leave them out, or scale the target (its logarithm, say)",
            row=row,
        )
    return numbers
