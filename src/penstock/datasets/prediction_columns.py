"""Predictions of several columns by the names of these columns, whatever order they were given in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.datasets.predictions import as_array
from penstock.errors import DataError, SchemaError

__all__ = ["class_places", "in_order", "in_rows", "matched", "places", "refuse_copies", "told"]

Array = npt.NDArray[Any]


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
