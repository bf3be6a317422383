"""Predictions: the meaning of class predictions, and their order by row ids and column names.

    numbers       1, 0, 2             the first class is 0
    names         "yes", "no"         values of the target, as they are in the file
    probabilities 0.2, 0.9            of the second of two classes, one for each row
    scores        (rows, classes)     a column for each class, in their order; the highest is the class

If class names are integers themselves (1, 2, 3), plain numbers may be either. The values decide where they can: 0 is no
name there, and 3 no number. If both are possible, the caller has to say which.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.batching.backends import backend_of
from penstock.errors import ConfigError, DataError, SchemaError

Array = npt.NDArray[Any]
Meaning = Literal["numbers", "names", "probabilities", "scores"]
PredictionsAre = Literal["numbers", "names"]


class ClassNames(np.ndarray[Any, np.dtype[Any]]):
    """Array that is known to hold class names, as `class_of` returns it, also if the names are integers.

    A slice of it is known too; results of computations (`names == "yes"`), lists and Series of it are plain.
    """

    def argsort(self, *args: Any, **options: Any) -> Any:
        return np.asarray(self).argsort(*args, **options)

    def argpartition(self, *args: Any, **options: Any) -> Any:
        return np.asarray(self).argpartition(*args, **options)

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        plain = np.asarray(array)
        return plain[()] if return_scalar else plain


@dataclass(frozen=True)
class Predictions:
    """Predictions for rows of one class each, in any of the four forms."""

    given: Array
    """(rows,), or (rows, classes)."""
    classes: tuple[Any, ...]
    are: PredictionsAre | None = None
    """Meaning of plain numbers, if it was given."""

    @classmethod
    def of(cls, predictions: Any, classes: tuple[Any, ...], are: PredictionsAre | None = None) -> Self:
        if are not in (None, "numbers", "names"):
            raise ConfigError(f"predictions_are must be 'numbers' or 'names', got {are!r}")
        if isinstance(predictions, ClassNames):
            are = "names"
        given = _plain(np.asarray(as_array(predictions)))
        if given.ndim == 2 and given.shape[1] == 1:
            given = given[:, 0]
        if given.ndim not in (1, 2) or given.dtype.kind not in "biufUM" or (given.ndim == 2 and not _is_number(given)):
            raise SchemaError(
                "expected class numbers, probabilities, class names, or (rows, classes) of scores, got "
                f"{given.dtype} of shape {given.shape}"
            )
        if given.ndim == 2 and given.shape[1] != len(classes):
            raise SchemaError(f"predictions have {given.shape[1]} columns, and there are {len(classes)} classes")
        if given.dtype.kind == "f" and np.isnan(given).any():
            row = int(np.isnan(given).reshape(len(given), -1).any(axis=1).argmax())
            raise DataError(f"the prediction for row {row} is NaN", row=row)
        return cls(given, tuple(classes), are)

    @functools.cached_property
    def meaning(self) -> Meaning:
        """Form of the predictions. Raises if none is possible, or more than one."""
        if self.given.ndim == 2:
            return "scores"
        if not _is_number(self.given):
            return "names"
        possible: list[Meaning] = []
        if self.are != "names" and self._may_be_numbers():
            possible.append("numbers")
        if self.are != "numbers" and self._may_be_names() and not (possible and self._numbers_are_names):
            possible.append("names")
        if self.are != "names" and self._may_be_probabilities():
            possible.append("probabilities")
        if len(possible) > 1:
            raise self._ambiguous(possible[0])
        return possible[0] if possible else self._impossible()

    @functools.cached_property
    def fractional(self) -> bool:
        """True for floats that are not all integers."""
        return self.given.dtype.kind == "f" and not bool((self.given == np.floor(self.given)).all())

    @property
    def between(self) -> bool:
        """True for one number for each row, some of which lie between classes."""
        return self.given.ndim == 1 and self.fractional and not self._may_be_names()

    def numbers(self) -> npt.NDArray[np.int64]:
        """Class number of each row."""
        given, meaning = self.given, self.meaning
        if meaning == "scores":
            return np.asarray(given.argmax(axis=1))
        if meaning == "probabilities":
            return (given >= 0.5).astype(np.int64)
        if meaning == "numbers":
            return given.astype(np.int64)
        found, places = np.unique(given, return_inverse=True)
        known = {_key(name): number for number, name in enumerate(self.classes)}
        numbers = np.array([known.get(_key(name), -1) for name in found.tolist()], np.int64)[places]
        if (numbers < 0).any():
            row = int((numbers < 0).argmax())
            hint = "; round them first" if self.between else ""
            classes = list(self.classes)[:10]
            raise DataError(f"{given[row].item()!r} in row {row} is none of the classes {classes}{hint}", row=row)
        return numbers

    def names(self) -> ClassNames:
        """Class name of each row."""
        return _array_of(self.classes)[self.numbers()].view(ClassNames)

    def scores(self, wanted_by: str) -> Array:
        """Probability or score of the second class for each row, or scores of all classes."""
        given, second = self.given, "pass the probability of the second class as floats, or (rows, classes)"
        if given.ndim == 2:
            return given
        if not _is_number(given) or self.are == "names":
            raise SchemaError(f"{wanted_by} needs scores, got class names; {second}")
        if len(self.classes) != 2:
            count = len(self.classes)
            raise SchemaError(
                f"{wanted_by} needs a score for each of the {count} classes, got one number for each row; pass "
                f"(rows, {count})"
            )
        if self.are is None and not self._numbers_are_names and self._may_be_names():
            raise self._ambiguous("scores")
        return given

    def values(self, wanted_by: str) -> Array:
        """Predictions on the scale of `class_values`: classes at their values, fractions between them."""
        scale = class_values(self.classes)
        if self.given.ndim == 2 or not _is_number(self.given) or not self.fractional or self._may_be_names():
            return scale[self.numbers()]
        if self._numbers_are_names or not _are_numbers(self.classes) or self.are == "names":
            return self.given
        steps = np.unique(np.diff(scale))
        if self.are is None:
            raise self._ambiguous("numbers")
        if len(steps) != 1:
            raise SchemaError(
                f"{wanted_by}: the classes {list(self.classes)[:10]} are not evenly spaced, so {self.given[:3]} have "
                "no value between them; round them to class numbers, or predict values with predictions_are='names'"
            )
        return np.asarray(scale[0] + steps[0] * self.given)

    # -- possible meanings -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _numbers_are_names(self) -> bool:
        """True if the classes are 0, 1, 2, or False, True."""
        return (_are_flags(self.classes) or _are_numbers(self.classes)) and list(self.classes) == list(
            range(len(self.classes))
        )

    def _may_be_names(self) -> bool:
        flags = self.given.dtype.kind == "b"
        if not (_are_flags(self.classes) if flags else _are_numbers(self.classes)):
            return False
        return bool(np.isin(self.given, _array_of(self.classes)).all())

    def _may_be_numbers(self) -> bool:
        if self.given.dtype.kind == "b":
            return len(self.classes) == 2
        return not self.fractional and not self._outside.any()

    def _may_be_probabilities(self) -> bool:
        inside = bool(((self.given >= 0) & (self.given <= 1)).all())
        return self.fractional and len(self.classes) == 2 and inside

    @property
    def _outside(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.given < 0) | (self.given >= len(self.classes)))

    def _ambiguous(self, other: str) -> SchemaError:
        return SchemaError(
            f"predictions such as {self.given[:3].tolist()} may be {other} (0 is the class {self.classes[0]!r}) or "
            f"names of the classes {list(self.classes)[:10]}; pass predictions_are='numbers' or "
            "predictions_are='names', or the array that class_of(...) returns (not a list or a Series of it)"
        )

    def _impossible(self) -> Meaning:
        """Raise for numbers without a meaning."""
        given, count = self.given, len(self.classes)
        if given.dtype.kind == "b":
            raise SchemaError(f"booleans are for two classes, and there are {count}; pass class numbers")
        if self.are == "names":
            return "names"  # `numbers` raises for the first unknown name
        if self.fractional and count > 2:
            raise SchemaError(
                f"predictions such as {given[:3].tolist()} are not numbers of {count} classes; round them, or pass the "
                f"scores of all classes: (rows, {count})"
            )
        if self.fractional:
            raise SchemaError(
                "one number for each row is the probability of the second class, from 0 to 1; apply a sigmoid to "
                "logits, or pass the scores of both: (rows, 2)"
            )
        row = int(self._outside.argmax())
        hint = ""
        if _are_numbers(self.classes):
            is_name = given[row] in self.classes
            hint = f", {'but' if is_name else 'nor'} the name of one: {list(self.classes)[:10]}"
            hint += "; if predictions are names, pass predictions_are='names'" if is_name else ""
        raise DataError(f"{given[row]} in row {row} is not the number of one of {count} classes{hint}", row=row)


def class_values(classes: tuple[Any, ...]) -> npt.NDArray[np.float64]:
    """Value of each class on a scale: its own if classes are numbers, else its number."""
    return np.array(classes if _are_numbers(classes) else range(len(classes)), np.float64)


def as_array(given: Any) -> Array:
    """Numbers or names of any library as an array; bfloat16, which NumPy lacks, as float32."""
    if isinstance(given, np.ndarray):
        return given
    if str(getattr(given, "dtype", "")) == "torch.bfloat16":
        given = given.float()
    try:
        array = backend_of(given).to_numpy(given)
    except ConfigError:  # of no framework: lists, Series, Arrow
        try:
            array = np.asarray(given)
        except ValueError as error:
            raise SchemaError(f"predictions cannot be converted to an array: {error}") from None
    if array.ndim == 0:
        raise SchemaError(f"expected a prediction for each row, got {given!r:.60}")
    return array.astype(np.float32) if array.dtype.kind == "V" and array.dtype.name == "bfloat16" else array


def is_missing(value: Any) -> bool:
    """True for None, NaN, NaT and pandas' NA, which cannot even be compared."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        return True


def _plain(given: Array) -> Array:
    """Array of objects as an array of their common type."""
    if given.dtype.kind == "S":
        return np.char.decode(given, "utf-8")
    if given.dtype.kind != "O":
        return given
    missing = np.fromiter(map(is_missing, given.ravel()), np.bool_, given.size)
    if missing.any():
        row = int(missing.reshape(len(given), -1).any(axis=1).argmax())
        raise DataError(f"the prediction for row {row} is {given[row]!r}", row=row)
    if len({isinstance(value, str) for value in given.ravel()}) > 1:
        raise SchemaError("predictions mix text and other types in one array; use one type")
    return np.array(given.tolist())


def _array_of(classes: tuple[Any, ...]) -> Array:
    mixed = len({(isinstance(name, str), isinstance(name, bool)) for name in classes}) > 1
    return np.array(classes, object if mixed else None)


def _is_number(given: Array) -> bool:
    return given.dtype.kind in "biuf"


def _are_flags(classes: tuple[Any, ...]) -> bool:
    return all(isinstance(name, bool | np.bool_) for name in classes)


def _are_numbers(classes: tuple[Any, ...]) -> bool:
    numbers = int | float | np.integer | np.floating
    return all(isinstance(name, numbers) and not isinstance(name, bool) for name in classes)


def _key(name: Any) -> tuple[bool, Any]:
    """Key that differs for True and 1, which are equal in Python and different classes."""
    return isinstance(name, bool | np.bool_), name


# -- order of rows and columns ---------------------------------------------------------------------------------------


def in_rows(predictions: Any, names: Sequence[str | None], ids: pa.Array) -> Any:
    """Predictions in the order of `ids`, aligned by a column or an index of ids if they have one.

    A frame or mapping is returned as a dict of its other columns; anything else as an array, or unchanged.
    """
    columns = _columns_of(predictions)
    index = getattr(predictions, "index", None) if hasattr(predictions, "iloc") else None
    if columns is None:
        order = _order_of_index(index, names, ids)
        return predictions if order is None else as_array(predictions)[order]
    found = next((name for name in names if name is not None and name in columns), None)
    if found is not None:
        order = _order(as_array(columns.pop(found)), ids, f"the column {found!r} of the predictions")
    elif isinstance(predictions, Mapping):  # maybe of Series, each with its own index
        return {name: as_array(in_rows(values, names, ids)) for name, values in columns.items()}
    else:
        order = _order_of_index(index, names, ids)
    arrays = {name: as_array(values) for name, values in columns.items()}
    if order is None:
        return arrays
    for name, array in arrays.items():
        if len(array) != len(order):
            raise SchemaError(f"predictions for {name!r} have shape {array.shape}, and there are {len(order)} ids")
    return {name: array[order] for name, array in arrays.items()}


def _columns_of(predictions: Any) -> dict[str, Any] | None:
    """Columns of a frame or a mapping; None for anything without names."""
    if isinstance(predictions, Mapping):
        names: Sequence[Any] = list(predictions)
    elif isinstance(predictions, pa.Table | pa.RecordBatch):
        names = predictions.schema.names
    elif hasattr(predictions, "columns"):
        names = list(predictions.columns)
    else:
        return None
    columns = {str(name): predictions[name] for name in names}
    if len(columns) != len(names):
        raise SchemaError(f"predictions have duplicate columns: {[str(name) for name in names]}")
    return columns


def _order_of_index(index: Any, names: Sequence[str | None], ids: pa.Array) -> npt.NDArray[np.int64] | None:
    """Row of each id by an index with the ids; None for an unnamed index. Others are refused."""
    called = [name for name in getattr(index, "names", ()) if name is not None]
    found = next((name for name in called if str(name) in names), None)
    if found is not None:
        return _order(np.asarray(index.get_level_values(found)), ids, f"the index {found!r} of the predictions")
    if called and type(index).__name__ != "RangeIndex":
        wanted = [name for name in dict.fromkeys(names) if name is not None]
        raise SchemaError(
            f"predictions have the index {', '.join(map(repr, called))}, and the ids are in {wanted}; rename it if it "
            "has the ids, or drop it if rows are in the order of the dataset: reset_index(drop=True)"
        )
    return None


def _order(given: Array, ids: pa.Array, what: str) -> npt.NDArray[np.int64]:
    """Place of each row's id among the given ids."""
    found = pa.array(given)
    try:
        found = found if found.type == ids.type else found.cast(ids.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(f"{what} is {found.type}, expected {ids.type}") from None
    return places(found, ids, what, "a row has no prediction", "an id is of no row")


def places(given: pa.Array, wanted: pa.Array, what: str, missing_means: str, other_means: str) -> npt.NDArray[np.int64]:
    """Row of each wanted id among the given ids; raises unless both are the same ids."""
    refuse_duplicates(given, what)
    place = {value: row for row, value in enumerate(given.to_pylist())}
    ids = wanted.to_pylist()
    missing = [value for value in ids if value not in place]
    other = sorted(set(place) - set(ids), key=str)
    if missing or other:
        problems = ((missing_means, missing), (other_means, other))
        details = ", ".join(f"{means}: {len(found)} (first {found[:3]})" for means, found in problems if found)
        raise DataError(f"expected {len(ids)} ids, {what} has {len(given)}: {details}")
    return np.array([place[value] for value in ids], np.int64)


def refuse_duplicates(ids: pa.Array, what: str) -> None:
    """Raise if an id is missing or occurs twice."""
    if ids.null_count:
        raise DataError(f"{ids.null_count} of the {len(ids)} ids in {what} are missing; every row needs one")
    counts = ids.value_counts()
    times = np.asarray(counts.field("counts"))
    if len(times) and times.max() > 1:
        twice = counts.field("values")[int(times.argmax())].as_py()
        raise DataError(f"the id {twice!r} occurs {int(times.max())} times in {what}; ids must be unique")


def matched(given: Sequence[Any], wanted: Sequence[str]) -> list[int] | None:
    """Place of each wanted name among the given; None if they differ."""
    place = {str(name): number for number, name in enumerate(given)}
    same = len(place) == len(given) == len(wanted) and set(place) == set(wanted)
    return [place[name] for name in wanted] if same else None


def class_places(classes: Sequence[Any] | None, columns: Sequence[str]) -> list[int] | None:
    """Class number of each column; columns may share a prefix (`Class_a` is `a`). None if they differ.

    A single column never has a prefix: `not_spam` is not `spam`.
    """
    if classes is None:
        return None
    texts = [str(name) for name in classes]
    if len(columns) < 2:
        return matched(texts, columns)
    longer, rest = divmod(sum(map(len, columns)) - sum(map(len, texts)), len(columns))
    if rest or longer < 0:
        return None
    return matched([columns[0][:longer] + name for name in texts], columns)


def in_order(columns: Mapping[str, Array], wanted: Sequence[Any], what: str, *, classes: bool = False) -> Array:
    """Columns as one array (rows, columns) in the wanted order; columns of classes may share a prefix."""
    names = list(columns)
    numbers = class_places(wanted, names) if classes else matched(wanted, names)
    if numbers is None:
        raise SchemaError(f"predictions have the columns {names}, and {what} are {[str(name) for name in wanted]}")
    arrays = list(columns.values())
    return np.stack([arrays[place] for place in np.argsort(numbers)], axis=1)
