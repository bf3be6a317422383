"""What predictions of classes mean: numbers of classes, their names, or scores; decided here, for everybody.

    numbers       1, 0, 2             the first class is 0
    names         "yes", "no"         the values of the target, as they are in the file
    probabilities 0.2, 0.9            of the second of two classes, one for each row
    scores        (rows, classes)     a column for each class, in their order; the highest is the class

Where class names are whole numbers themselves (1, 2, 3), plain numbers may be either. They are what they can be: 0 is
no name there, and 3 no number. If both are possible, nothing is guessed.
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

__all__ = [
    "ClassNames",
    "Meaning",
    "Predictions",
    "PredictionsAre",
    "as_array",
    "class_places",
    "class_values",
    "in_order",
    "in_rows",
    "is_missing",
    "matched",
    "places",
    "refuse_copies",
    "told",
]


Array = npt.NDArray[Any]
Meaning = Literal["numbers", "names", "probabilities", "scores"]
PredictionsAre = Literal["numbers", "names"]


class ClassNames(np.ndarray[Any, np.dtype[Any]]):
    """Names of classes that are known to be names, as `class_of` gives them, also where they are whole numbers.

    A part of them is known too; what is computed from them (`names == "yes"`) is a plain array. They are known as the
    array that they are: a list or a Series of them is plain.
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
    """Predictions for rows that are of one class each, as whatever is wanted of them."""

    given: Array
    """(rows,), or (rows, classes)."""
    classes: tuple[Any, ...]
    are: PredictionsAre | None = None
    """What plain numbers are, where somebody said so."""

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
                f"expected class numbers or probabilities, names of classes, or (rows, classes) of scores, got "
                f"{given.dtype} of shape {given.shape}"
            )
        if given.ndim == 2 and given.shape[1] != len(classes):
            raise SchemaError(f"predictions have {given.shape[1]} columns, and there are {len(classes)} classes")
        if given.dtype.kind == "f" and np.isnan(given).any():
            row = int(np.isnan(given).reshape(len(given), -1).any(axis=1).argmax())
            raise DataError(f"the prediction for row {row} is NaN, and of no class", row=row)
        return cls(given, tuple(classes), are)

    @functools.cached_property
    def meaning(self) -> Meaning:
        """What they are. Raises if they can be nothing, or more than one thing."""
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
            raise self._either(possible[0])
        return possible[0] if possible else self._nothing()

    @functools.cached_property
    def fractional(self) -> bool:
        """Whether they are floats, and some of them no whole numbers."""
        return self.given.dtype.kind == "f" and not bool((self.given == np.floor(self.given)).all())

    @property
    def between(self) -> bool:
        """Whether they are one number for each row, some of which lie between classes."""
        return self.given.ndim == 1 and self.fractional and not self._may_be_names()

    def numbers(self) -> npt.NDArray[np.int64]:
        """The number of each row's class."""
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
            wanted = "expected class numbers or probabilities, or names of classes"
            raise DataError(
                f"{given[row].item()!r} in row {row} is none of the classes {list(self.classes)[:10]}; "
                + ("round them first" if self.between else wanted),
                row=row,
            )
        return numbers

    def names(self) -> ClassNames:
        """The name of each row's class."""
        return _array_of(self.classes)[self.numbers()].view(ClassNames)

    def scores(self, wanted_by: str) -> Array:
        """The probability or score of the second class for each row, or those of all classes; hard ones if whole."""
        given, second = self.given, "give the probability of the second class as floats, or (rows, classes)"
        if given.ndim == 2:
            return given
        if not _is_number(given) or self.are == "names":
            raise SchemaError(f"{wanted_by} needs scores, and predictions are names of classes; {second}")
        if len(self.classes) != 2:
            raise SchemaError(
                f"{wanted_by} needs a score for each of the {len(self.classes)} classes, got one number for each row; "
                f"give (rows, {len(self.classes)})"
            )
        if self.are is None and not self._numbers_are_names and self._may_be_names():
            raise self._either("scores")
        return given

    def values(self, wanted_by: str) -> Array:
        """Predictions on the scale of `class_values`: classes at their values, what lies between them between."""
        scale = class_values(self.classes)
        if self.given.ndim == 2 or not _is_number(self.given) or not self.fractional or self._may_be_names():
            return scale[self.numbers()]
        if self._numbers_are_names or not _are_numbers(self.classes) or self.are == "names":
            return self.given
        steps = np.unique(np.diff(scale))
        if self.are is None:
            raise self._either("numbers")
        if len(steps) != 1:
            raise SchemaError(
                f"{wanted_by}: the classes {list(self.classes)[:10]} are not evenly spaced, so {self.given[:3]} are no "
                "values of that scale; round them to class numbers, or predict values and pass predictions_are='names'"
            )
        return np.asarray(scale[0] + steps[0] * self.given)

    # -- what they can be --------------------------------------------------------------------------------------------

    @functools.cached_property
    def _numbers_are_names(self) -> bool:
        """Whether it makes no difference: the classes are 0, 1, 2, or False, True."""
        flags = all(isinstance(name, bool | np.bool_) for name in self.classes)
        return (flags or _are_numbers(self.classes)) and list(self.classes) == list(range(len(self.classes)))

    def _may_be_names(self) -> bool:
        flags = self.given.dtype.kind == "b"
        if not (
            all(isinstance(name, bool | np.bool_) for name in self.classes) if flags else _are_numbers(self.classes)
        ):
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

    def _either(self, one: str) -> SchemaError:
        first = self.classes[0]
        return SchemaError(
            f"predictions such as {self.given[:3].tolist()} may be {one} (0 is the class {first!r}) or names of the "
            f"classes {list(self.classes)[:10]}; say which: predictions_are='numbers' or predictions_are='names'. What "
            "class_of(...) gives is known to be names, as the array it is (a list or a Series of it is not)"
        )

    def _nothing(self) -> Meaning:
        """Raise what is wrong with numbers that are nothing."""
        given, count = self.given, len(self.classes)
        if given.dtype.kind == "b":
            raise SchemaError(f"true or false tell two classes apart, and there are {count}; give class numbers")
        if self.are == "names":
            return "names"  # the first that is none is told where they are looked up
        if self.fractional and count > 2:
            raise SchemaError(
                f"predictions such as {given[:3].tolist()} are no numbers of {count} classes; round them first, or "
                f"give the scores of all classes: (rows, {count})"
            )
        if self.fractional:
            raise SchemaError(
                "one number for each row is the probability of the second of two classes, from 0 to 1; for logits "
                "apply a sigmoid first, or give the scores of both: (rows, 2)"
            )
        row = int(self._outside.argmax())
        name = ""
        if _are_numbers(self.classes):
            one = given[row] in self.classes
            name = f", {'but the' if one else 'and no'} name of one: {list(self.classes)[:10]}"
            name += "; if predictions are names, pass predictions_are='names'" if one else ""
        raise DataError(f"{given[row]} in row {row} is the number of none of {count} classes{name}", row=row)


def class_values(classes: tuple[Any, ...]) -> npt.NDArray[np.float64]:
    """Where each class lies on a scale: at its value if classes are numbers, at its number if not."""
    if _are_numbers(classes):
        return np.array(classes, np.float64)
    return np.arange(len(classes), dtype=np.float64)


def as_array(given: Any) -> Array:
    """Whatever has numbers or names, of any library, as an array; bfloat16, which NumPy has not, as float32."""
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
            raise SchemaError(f"predictions cannot be made an array, with as many for each row: {error}") from None
    if array.ndim == 0:
        raise SchemaError(f"expected a prediction for each row, got {given!r:.60}")
    return array.astype(np.float32) if array.dtype.kind == "V" and array.dtype.name == "bfloat16" else array


def is_missing(value: Any) -> bool:
    """None, NaN, NaT and pandas' NA, which is not even equal to itself or not."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        return True


def _plain(given: Array) -> Array:
    """Objects as what they all are."""
    if given.dtype.kind == "S":
        return np.char.decode(given, "utf-8")
    if given.dtype.kind != "O":
        return given
    missing = np.fromiter((is_missing(value) for value in given.ravel()), np.bool_, given.size)
    if missing.any():
        row = int(missing.reshape(len(given), -1).any(axis=1).argmax())
        raise DataError(f"the prediction for row {row} is {given[row]!r}, and of no class", row=row)
    if len({isinstance(value, str) for value in given.ravel()}) > 1:
        raise SchemaError("predictions are texts and other things in one array; make them one kind")
    return np.array(given.tolist())


def _array_of(classes: tuple[Any, ...]) -> Array:
    mixed = len({(isinstance(name, str), isinstance(name, bool)) for name in classes}) > 1
    return np.array(classes, object if mixed else None)


def _is_number(given: Array) -> bool:
    return given.dtype.kind in "biuf"


def _are_numbers(classes: tuple[Any, ...]) -> bool:
    return all(
        isinstance(name, int | float | np.integer | np.floating) and not isinstance(name, bool) for name in classes
    )


def _key(name: Any) -> tuple[bool, Any]:
    """True and 1 are equal to Python and different classes."""
    return isinstance(name, bool | np.bool_), name


def in_rows(predictions: Any, names: Sequence[str | None], ids: pa.Array) -> Any:
    """Predictions in the order of the rows of `ids`, found by a column or an index of ids if they have one.

    A frame or mapping comes back as its other columns, by their names; what has no names as an array, or as it is.
    """
    columns = _columns_of(predictions)
    index = getattr(predictions, "index", None) if hasattr(predictions, "iloc") else None
    if columns is None:
        order = _order_of_index(index, names, ids)
        return predictions if order is None else as_array(predictions)[order]
    found = next((name for name in names if name is not None and name in columns), None)
    if found is not None:
        order = _order(as_array(columns.pop(found)), ids, f"the column {found!r} of the predictions")
        return {name: _taken(values, order, name) for name, values in columns.items()}
    if isinstance(predictions, Mapping):  # of Series, perhaps, each with an index of its own
        return {name: as_array(in_rows(values, names, ids)) for name, values in columns.items()}
    order = _order_of_index(index, names, ids)
    return {name: as_array(values) if order is None else as_array(values)[order] for name, values in columns.items()}


def _taken(values: Any, order: npt.NDArray[np.int64], name: str) -> Array:
    array = as_array(values)
    if array.shape[:1] != order.shape:
        raise SchemaError(f"predictions for {name!r} have shape {array.shape}, and there are {len(order)} ids")
    return array[order]


def _columns_of(predictions: Any) -> dict[str, Any] | None:
    """The columns of a frame or a mapping; None for what has no names."""
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
        raise SchemaError(f"predictions have the columns {[str(name) for name in names]}, some of them twice")
    return columns


def _order_of_index(index: Any, names: Sequence[str | None], ids: pa.Array) -> npt.NDArray[np.int64] | None:
    """Where each row is by an index that has the ids. None for one without a name; others are refused."""
    called = [name for name in getattr(index, "names", ()) if name is not None]
    found = next((name for name in called if str(name) in names), None)
    if found is not None:
        return _order(np.asarray(index.get_level_values(found)), ids, f"the index {found!r} of the predictions")
    if called and type(index).__name__ != "RangeIndex":
        wanted = [name for name in dict.fromkeys(names) if name is not None]
        raise SchemaError(
            f"predictions have the index {', '.join(map(repr, called))}, and the ids are in {wanted}; name it so if it "
            "has the ids, or drop it if rows are in the order of the dataset: reset_index(drop=True)"
        )
    return None


def _order(given: Array, ids: pa.Array, what: str) -> npt.NDArray[np.int64]:
    """For each row its place among the given ids."""
    listed = _as_ids(pa.array(given), ids.type, what)
    order, missing, foreign = places(listed, ids, what)
    if missing or foreign:
        raise DataError(
            f"{what} has {len(listed)} ids, and there are {len(ids)} rows: "
            + told(f"{len(missing)} rows are not there", missing, f"{len(foreign)} ids are of no row", foreign)
        )
    return order


def matched(given: Sequence[Any], wanted: Sequence[str]) -> list[int] | None:
    """For each wanted name its place among the given. None if they differ."""
    place = {str(name): number for number, name in enumerate(given)}
    same = len(place) == len(given) == len(wanted) and set(place) == set(wanted)
    return [place[name] for name in wanted] if same else None


def class_places(classes: Sequence[Any] | None, columns: Sequence[str]) -> list[int] | None:
    """For each of several columns the number of its class; all may begin alike (`Class_a` is `a`). None if they differ.

    A single column is never told by its end: `spam` is not `not_spam`.
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


def in_order(columns: Mapping[str, Array], wanted: Sequence[str], what: str, classes: bool = False) -> Array:
    """The columns as one array (rows, columns), in the wanted order; those of classes may all begin alike."""
    names = list(columns)
    if classes:
        numbers = class_places(wanted, names)
        order = None if numbers is None else np.argsort(numbers).tolist()
    else:
        order = matched(names, wanted)
    if order is None:
        raise SchemaError(f"predictions have the columns {names}, and {what} are {[str(one) for one in wanted]}")
    arrays = list(columns.values())
    return np.stack([arrays[place] for place in order], axis=1)


def _as_ids(given: pa.Array, kind: pa.DataType, what: str) -> pa.Array:
    """Ids of one type, so that they can be compared."""
    try:
        return given if given.type == kind else given.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise SchemaError(f"{what} is {given.type}, and it should be {kind}") from None


def places(given: pa.Array, wanted: pa.Array, what: str) -> tuple[npt.NDArray[np.int64], list[Any], list[Any]]:
    """For each wanted id its row among the given; and the wanted ones that are not there, and those nobody wants."""
    refuse_copies(given, what)
    place = {value: row for row, value in enumerate(given.to_pylist())}
    listed = wanted.to_pylist()
    missing = [value for value in listed if value not in place]
    foreign = sorted(set(place) - set(listed), key=str)
    return np.array([place.get(value, -1) for value in listed], np.int64), missing, foreign


def told(first: str, missing: Sequence[Any], second: str, foreign: Sequence[Any]) -> str:
    """`1 ids have none (first [8]), 2 predictions are for others (first [7, 9])`, without what there is none of."""
    return ", ".join(f"{said} (first {list(ids[:3])})" for said, ids in ((first, missing), (second, foreign)) if ids)


def refuse_copies(ids: pa.Array, what: str) -> None:
    """Raise if an id is missing or there twice."""
    if ids.null_count:
        raise DataError(f"{ids.null_count} of the {len(ids)} ids in {what} are missing; every row needs one")
    counts = ids.value_counts()
    places = np.asarray(counts.field("counts"))
    if len(places) and places.max() > 1:
        twice = counts.field("values")[int(places.argmax())].as_py()
        raise DataError(
            f"the id {twice!r} is there {int(places.max())} times in {what}; a submission has every id once"
        )
